"""Every message survives its way unchanged; whatever else arrives is a ProtocolError, and nothing besides."""

from __future__ import annotations

import math
import types
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashrec.errors import ProtocolError
from flashrec.protocol import codec
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import MAX_MESSAGE_BYTES, PROTOCOL, decode, encode

KINDS = get_args(msg.Message)
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    bytes: st.binary(max_size=200),
    type(None): st.none(),
    # Text, and what os.fsdecode makes of a path that is not UTF-8.
    str: st.text(max_size=50)
    | st.binary(max_size=20).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
}


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a field, from its annotation alone: a new message is tested without a word here."""
    if get_origin(annotation) in (Union, types.UnionType):
        return st.one_of(*map(values, get_args(annotation)))
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return st.lists(values(inner[0]), max_size=5).map(tuple)
        return st.tuples(*map(values, inner))
    return LEAVES[annotation]


def instances(kind: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    return st.builds(kind, *(values(hints[field.name]) for field in fields(kind)))


ANY_MESSAGE = st.sampled_from(KINDS).flatmap(instances)
# What msgpack can carry: decode must cope with all of it.
NOISE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=10)
    | st.binary(max_size=10) | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=12))
    | st.builds(msgpack.Timestamp, st.integers(-(2**30), 2**40), st.integers(0, 10**9 - 1)),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


def raises_only_protocol_errors(data: bytes, allowed: Any = msg.Message) -> msg.Message | None:
    try:
        return decode(data, allowed)
    except ProtocolError as error:
        # It is logged as JSON and sent back: neither may fail, however strange the data.
        encode(msg.Refused("protocol", str(error)))
        if len(str(error)) < 500:
            return None
        raise


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_round_trip(kind: Any) -> None:
    @settings(max_examples=25)
    @given(instances(kind))
    def comes_back(message: Any) -> None:
        back = decode(encode(message))
        assert back == message
        assert type(back) is kind
        for field in fields(kind):
            assert type(getattr(back, field.name)) is type(getattr(message, field.name))

    comes_back()


def test_not_a_number_comes_back() -> None:
    submit = decode(encode(an_instance(msg.Submit, suspect_after_s=math.nan)))
    assert isinstance(submit, msg.Submit)
    assert math.isnan(submit.suspect_after_s)


def an_instance(kind: Any, **changes: Any) -> Any:
    """One message of a kind, without drawing it."""
    simple = {int: 1, bool: False, float: 1.0, bytes: b"x", str: "x"}
    hints = get_type_hints(kind)
    given_values = {field.name: simple.get(hints[field.name]) for field in fields(kind)}
    for name, annotation in hints.items():
        if get_origin(annotation) is tuple:
            given_values[name] = ()
    return kind(**(given_values | changes))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_direction_takes_only_its_own(kind: Any) -> None:
    data = encode(an_instance(kind))
    for union in (msg.FROM_PROCESS, msg.TO_PROCESS, msg.FROM_COMMAND, msg.TO_COMMAND):
        if kind in get_args(union):
            assert type(decode(data, union)) is kind
        else:
            with pytest.raises(ProtocolError, match=f"unexpected message '{kind.__name__}'"):
                decode(data, union)


@given(st.binary(max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    assert raises_only_protocol_errors(data) is None


@given(NOISE)
def test_msgpack_that_is_no_message_is_refused(value: Any) -> None:
    assert raises_only_protocol_errors(msgpack.packb(value)) is None


@settings(max_examples=300)
@given(st.sampled_from(KINDS), st.lists(NOISE, max_size=16))
def test_fields_of_other_types_are_refused(kind: Any, values: list[Any]) -> None:
    """Or it is, by chance, a message whose fields have the types they should have."""
    back = raises_only_protocol_errors(msgpack.packb([PROTOCOL, kind.__name__, *values]))
    if back is not None:
        hints = get_type_hints(kind)
        assert all(codec._conforms(getattr(back, field.name), hints[field.name]) for field in fields(kind))


@given(ANY_MESSAGE, st.data())
def test_a_field_too_few_or_too_many_is_refused(message: Any, data: st.DataObject) -> None:
    parts = msgpack.unpackb(encode(message), unicode_errors="surrogateescape")
    if data.draw(st.booleans()) and len(parts) > 2:
        del parts[data.draw(st.integers(2, len(parts) - 1))]
    else:
        parts.append(data.draw(st.one_of(*LEAVES.values())))
    with pytest.raises(ProtocolError, match=f"{type(message).__name__} has"):
        decode(msgpack.packb(parts, unicode_errors="surrogateescape"))


@given(ANY_MESSAGE, st.data())
def test_truncated_is_refused(message: Any, data: st.DataObject) -> None:
    whole = encode(message)
    with pytest.raises(ProtocolError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(ANY_MESSAGE, st.binary(min_size=1, max_size=20))
def test_more_than_one_message_is_refused(message: Any, more: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(message) + more)


@settings(max_examples=300)
@given(ANY_MESSAGE, st.data())
def test_a_damaged_message_is_refused_or_another_valid_one(message: Any, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    assume(bytes(damaged) != encode(message))
    back = raises_only_protocol_errors(bytes(damaged))
    if back is not None:
        assert decode(encode(back)) == back or "nan" in repr(back)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([PROTOCOL + 1, "Heartbeat", "p1"], "not a message of protocol"),
        ([True, "Heartbeat", "p1"], "not a message of protocol"),
        ([float(PROTOCOL), "Heartbeat", "p1"], "not a message of protocol"),
        ([PROTOCOL], "not a message of protocol"),
        ({"proc": "p1"}, "not a message of protocol"),
        ([PROTOCOL, "NoSuch"], "unexpected message 'NoSuch'"),
        ([PROTOCOL, ["Heartbeat"], "p1"], "unexpected message"),
        ([PROTOCOL, "object"], "unexpected message"),
        ([PROTOCOL, "Heartbeat", b"p1"], "Heartbeat.proc cannot be bytes"),
        ([PROTOCOL, "Present", "j", True], "Present.num_bytes cannot be bool"),
        ([PROTOCOL, "Present", "j", 1.0], "Present.num_bytes cannot be float"),
        ([PROTOCOL, "Parked", "p", 1, "0", True, 1], "Parked.version cannot be str"),
    ],
)
def test_what_is_wrong_is_said(value: Any, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(msgpack.packb(value))


def test_too_large_is_refused_before_it_is_looked_at() -> None:
    class Large(bytes):
        def __len__(self) -> int:
            return MAX_MESSAGE_BYTES + 1

    with pytest.raises(ProtocolError, match=f"the limit is {MAX_MESSAGE_BYTES}"):
        decode(Large(b"\xc1"))


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
        b"\xdb\xff\xff\xff\xffx",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,  # nested
        b"\x81\xa1a" * 2000 + b"\xc0",
        b"",
    ],
    ids=["array", "text", "map", "bytes", "deep", "deep map", "empty"],
)
def test_a_claim_of_size_or_depth_costs_nothing(data: bytes) -> None:
    assert raises_only_protocol_errors(data) is None
