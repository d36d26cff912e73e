"""How a message travels: one msgpack array `[PROTOCOL, name, field, field, ...]`.

Decoding trusts nothing: size, structure, number and type of every field are checked against the
message's annotations before a value is made, and whatever is wrong is a ProtocolError that says what.

Text may hold what a path or a variable holds: bytes that are not UTF-8 travel as Python's surrogate escapes.
"""

import types
from dataclasses import fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from flashrec.errors import ProtocolError
from flashrec.protocol import messages

PROTOCOL = 1
MAX_MESSAGE_BYTES = 64 << 20


def encode(message: Any) -> bytes:
    """`message`, a frozen dataclass of one of the protocol's modules, as bytes."""
    kind = type(message)
    values = [getattr(message, field.name) for field in fields(kind)]
    packed: bytes = msgpack.packb(
        [PROTOCOL, kind.__name__, *values], use_bin_type=True, unicode_errors="surrogateescape"
    )
    return packed


def decode(data: bytes | memoryview, allowed: Any = messages.Message) -> Any:
    """The message in `data`, if it is one of the union `allowed`; ProtocolError otherwise."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        parts = msgpack.unpackb(data, use_list=False, unicode_errors="surrogateescape")
    except Exception as error:  # msgpack raises a dozen kinds, some of them ValueError, some its own
        raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from None
    if not isinstance(parts, tuple) or len(parts) < 2 or type(parts[0]) is not int or parts[0] != PROTOCOL:
        raise ProtocolError(f"not a message of protocol {PROTOCOL}")
    kind = _kinds(allowed).get(parts[1]) if isinstance(parts[1], str) else None
    if kind is None:
        raise ProtocolError(f"unexpected message {parts[1]!r:.60}")
    expected = _field_types(kind)
    if len(parts) != 2 + len(expected):
        raise ProtocolError(f"{kind.__name__} has {len(expected)} fields, not {len(parts) - 2}")
    for (name, annotation), value in zip(expected, parts[2:], strict=True):
        if not _conforms(value, annotation):
            raise ProtocolError(f"{kind.__name__}.{name} cannot be {type(value).__name__}")
    return kind(*parts[2:])


@cache
def _kinds(union: Any) -> dict[str, type]:
    """Of a union, or of one message alone, by name."""
    return {kind.__name__: kind for kind in get_args(union) or (union,)}


@cache
def _field_types(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


def _conforms(value: object, annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(_conforms(value, option) for option in get_args(annotation))
    if origin is tuple:
        inner = get_args(annotation)
        if not isinstance(value, tuple):
            return False
        if len(inner) == 2 and inner[1] is Ellipsis:
            return all(_conforms(item, inner[0]) for item in value)
        return len(value) == len(inner) and all(_conforms(v, a) for v, a in zip(value, inner, strict=True))
    return type(value) is annotation
