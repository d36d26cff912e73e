"""State as bytes: a typed msgpack codec, without pickle and without torch.

`decode(encode(x), ...)` gives back `x` with the very same types: None, bool, int of any size, float,
complex, str, bytes, list, tuple, dict (any hashable of these as a key), set, frozenset, deque, the dict
classes that state dicts are made of (OrderedDict, Counter, defaultdict of a builtin) and numpy arrays and
scalars. What it does not know it refuses, with the path to the value.

Objects of other libraries go through a `Hook` (torch's is in `flashrec.state.tensors`). Without one, a
decoded value of that kind stays a `Foreign`, which encodes again to the same bytes: the daemon can read a
record that holds tensors without importing torch.

On the wire each type that msgpack lacks is an extension whose body is itself msgpack:

    1 tuple   [items]            2 int      signed big-endian bytes     3 array     [dtype, shape, bytes]
    4 scalar  [dtype, bytes]     5 foreign  [kind, body]                6 container [kind, argument, items]
    7 complex [real, imag]

numpy is imported only when an array is met: the shard server and the daemon do without it.
"""

from __future__ import annotations

import collections
import re
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
import xxhash

from flashrec.errors import ProtocolError, UsageError

Buffer = bytes | bytearray | memoryview

# Ext bodies nest by Python recursion in both directions; state dicts are a handful of levels deep.
MAX_DEPTH = 64
_MAX_NUMPY_DIMS = 64

_TUPLE, _INT, _ARRAY, _SCALAR, _FOREIGN, _CONTAINER, _COMPLEX = range(1, 8)
_DTYPE = re.compile(r"[<>|=](?:[biufc][1-9]\d?|[SU][1-9]\d{0,8}|[mM]8(?:\[\d*\w+\])?)")
_FACTORIES: dict[str, Callable[[], Any]] = {
    cls.__name__: cls for cls in (int, float, bool, str, bytes, list, dict, set, tuple)
}


@dataclass(frozen=True)
class Foreign:
    """A value of another library, as the plain data its hook made of it."""

    kind: str
    body: Any


class Hook(Protocol):
    """Turns objects of one library into plain data and back."""

    def to_foreign(self, obj: object) -> Foreign | None:
        """The plain form of `obj`, or None when it is not one of this library's."""

    def from_foreign(self, foreign: Foreign) -> object:
        """The object again; raises ValueError when the data does not describe one."""


def checksum(data: Buffer) -> int:
    """xxh3_64 of `data`: guards against damage, not against an adversary."""
    return xxhash.xxh3_64_intdigest(data)


def encode(obj: object, hook: Hook | None = None) -> bytes:
    """`obj` as bytes. Raises UsageError, naming the path, for a value of an unknown type."""
    try:
        return _Encoder(hook).pack(obj)
    except _Unknown as unknown:
        path = _find(obj, unknown.value) or "somewhere inside"
        raise UsageError(f"cannot encode {path}: {unknown.reason}") from None
    except RecursionError:
        raise UsageError(f"cannot encode a value nested over {MAX_DEPTH} levels, or in itself") from None
    except (ValueError, OverflowError) as error:
        raise UsageError(f"cannot encode: {error}") from error


def decode(data: Buffer, max_bytes: int, hook: Hook | None = None) -> Any:
    """The object that `encode` made `data` of. Raises ProtocolError when it is longer than `max_bytes` or is
    not what `encode` makes; never executes anything that the bytes name."""
    size_bytes = memoryview(data).nbytes
    if size_bytes > max_bytes:
        raise ProtocolError(f"a record of {size_bytes} bytes, where at most {max_bytes} are allowed")
    try:
        return _Decoder(hook).unpack(data)
    except ProtocolError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, struct.error) as error:
        raise ProtocolError(f"not a state record: {error or type(error).__name__}") from error
    except (msgpack.UnpackException, MemoryError) as error:
        raise ProtocolError(f"not a state record: {error or type(error).__name__}") from error


class _Unknown(Exception):
    def __init__(self, value: object, reason: str) -> None:
        super().__init__(reason)
        self.value = value
        self.reason = reason


class _Encoder:
    def __init__(self, hook: Hook | None) -> None:
        self._hook = hook
        self._depth = 0

    def pack(self, obj: object) -> bytes:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RecursionError
        packed = msgpack.packb(obj, default=self._default, strict_types=True, unicode_errors="surrogatepass")
        self._depth -= 1
        assert isinstance(packed, bytes)
        return packed

    def _ext(self, code: int, body: object) -> msgpack.ExtType:
        return msgpack.ExtType(code, self.pack(body))

    def _default(self, obj: object) -> msgpack.ExtType:
        cls = type(obj)
        if cls is tuple:
            return self._ext(_TUPLE, list(obj))  # type: ignore[call-overload]
        if cls is int:
            assert isinstance(obj, int)
            return msgpack.ExtType(_INT, obj.to_bytes(obj.bit_length() // 8 + 1, "big", signed=True))
        if cls is complex:
            assert isinstance(obj, complex)
            return self._ext(_COMPLEX, [obj.real, obj.imag])
        if cls is Foreign:
            assert isinstance(obj, Foreign)
            return self._ext(_FOREIGN, [obj.kind, obj.body])
        container = _take_apart(obj)
        if container is not None:
            return self._ext(_CONTAINER, list(container))
        if cls.__module__ == "numpy":
            return self._numpy(obj)
        if self._hook is not None:
            foreign = self._hook.to_foreign(obj)
            if foreign is not None:
                return self._ext(_FOREIGN, [foreign.kind, foreign.body])
        raise _Unknown(obj, f"a value of type {cls.__module__}.{cls.__qualname__} is not plain data")

    def _numpy(self, obj: object) -> msgpack.ExtType:
        import numpy as np

        if not isinstance(obj, (np.ndarray, np.generic)):
            raise _Unknown(obj, f"a value of type numpy.{type(obj).__qualname__} is not plain data")
        if not _DTYPE.fullmatch(obj.dtype.str):
            raise _Unknown(obj, f"arrays of dtype {obj.dtype} are not plain data")
        if isinstance(obj, np.generic):
            return self._ext(_SCALAR, [obj.dtype.str, obj.tobytes()])
        return self._ext(_ARRAY, [obj.dtype.str, list(obj.shape), obj.tobytes()])


class _Decoder:
    def __init__(self, hook: Hook | None) -> None:
        self._hook = hook
        self._depth = 0

    def unpack(self, data: Buffer) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ProtocolError(f"a record nested deeper than {MAX_DEPTH} levels")
        value = msgpack.unpackb(
            data,
            ext_hook=self._ext,
            strict_map_key=False,
            use_list=True,
            raw=False,
            unicode_errors="surrogatepass",
        )
        self._depth -= 1
        return value

    def _list(self, data: Buffer, length: int | None) -> list[Any]:
        value = self.unpack(data)
        if type(value) is not list or (length is not None and len(value) != length):
            raise ProtocolError("an extension whose body is not the list it should be")
        return value

    def _ext(self, code: int, data: bytes) -> object:
        if code == _TUPLE:
            return tuple(self._list(data, None))
        if code == _INT:
            return int.from_bytes(data, "big", signed=True)
        if code == _ARRAY:
            return _array(*self._list(data, 3))
        if code == _SCALAR:
            dtype, raw = self._list(data, 2)
            return _array(dtype, [], raw)[()]
        if code == _FOREIGN:
            kind, body = self._list(data, 2)
            if type(kind) is not str:
                raise ProtocolError("a foreign value whose kind is not a string")
            foreign = Foreign(kind, body)
            return foreign if self._hook is None else self._hook.from_foreign(foreign)
        if code == _CONTAINER:
            kind, argument, items = self._list(data, 3)
            if type(items) is not list:
                raise ProtocolError("a container whose items are not a list")
            return _put_together(kind, argument, items)
        if code == _COMPLEX:
            real, imag = self._list(data, 2)
            return complex(float(real), float(imag))
        raise ProtocolError(f"an extension of unknown code {code}")


def _take_apart(obj: object) -> tuple[str, Any, list[Any]] | None:
    """(kind, argument, items) of a container that msgpack lacks, or None."""
    cls = type(obj)
    if cls is collections.OrderedDict or cls is collections.Counter:
        assert isinstance(obj, dict)
        return cls.__name__, None, [list(item) for item in obj.items()]
    if cls is collections.defaultdict:
        assert isinstance(obj, collections.defaultdict)
        factory = obj.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
            raise _Unknown(obj, f"a defaultdict with the factory {factory!r} is not plain data")
        return "defaultdict", name, [list(item) for item in obj.items()]
    if cls is set or cls is frozenset:
        assert isinstance(obj, (set, frozenset))
        # Two ranks' equal sets must give equal bytes, whatever order their hashes put them in.
        return cls.__name__, None, sorted(obj, key=_sort_key)
    if cls is collections.deque:
        assert isinstance(obj, collections.deque)
        return "deque", obj.maxlen, list(obj)
    return None


def _sort_key(item: object) -> tuple[str, str]:
    return type(item).__name__, repr(item)


def _put_together(kind: object, argument: Any, items: list[Any]) -> object:
    if kind == "OrderedDict":
        return collections.OrderedDict(_pairs(items))
    if kind == "Counter":
        return collections.Counter(dict(_pairs(items)))
    if kind == "defaultdict":
        return collections.defaultdict(None if argument is None else _FACTORIES[argument], _pairs(items))
    if kind == "set":
        return set(items)
    if kind == "frozenset":
        return frozenset(items)
    if kind == "deque":
        if argument is not None and (type(argument) is not int or argument < len(items)):
            raise ProtocolError("a deque longer than its bound")
        return collections.deque(items, argument)
    raise ProtocolError(f"a container of unknown kind {kind!r}")


def _pairs(items: Iterable[Any]) -> list[tuple[Any, Any]]:
    pairs = []
    for item in items:
        if type(item) is not list or len(item) != 2:
            raise ProtocolError("a dict whose items are not pairs")
        pairs.append((item[0], item[1]))
    return pairs


def _array(dtype: object, shape: object, raw: object) -> Any:
    import numpy as np

    if type(dtype) is not str or not _DTYPE.fullmatch(dtype):
        raise ProtocolError(f"an array of dtype {dtype!r}")
    if type(shape) is not list or len(shape) > _MAX_NUMPY_DIMS or type(raw) is not bytes:
        raise ProtocolError("an array that is not (dtype, shape, bytes)")
    size_bytes = np.dtype(dtype).itemsize
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= sys.maxsize:
            raise ProtocolError(f"an array with a dimension of {dim!r}")
        size_bytes *= dim
    if size_bytes != len(raw):
        raise ProtocolError(f"an array of shape {shape} and dtype {dtype} in {len(raw)} bytes")
    # bytearray: the array must be writable, and must not alias the record it came in.
    return np.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else np.zeros(shape, dtype)


def _find(obj: object, wanted: object, path: str = "the value", depth: int = 0) -> str | None:
    """Where inside `obj` the very object `wanted` is, for the error message."""
    if obj is wanted:
        return path
    if depth > MAX_DEPTH:
        return None
    children: Iterable[tuple[str, object]] = ()
    if isinstance(obj, dict):
        children = [(f"{path}[{key!r}]", value) for key, value in obj.items()]
        children += [(f"a key of {path}", key) for key in obj]
    elif isinstance(obj, (list, tuple, set, frozenset, collections.deque)):
        children = [(f"{path}[{index}]", value) for index, value in enumerate(obj)]
    for child_path, child in children:
        found = _find(child, wanted, child_path, depth + 1)
        if found is not None:
            return found
    return None
