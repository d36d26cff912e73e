"""The state codec: what goes in comes out with its types, and garbage is refused."""

import collections
import subprocess
import sys

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.errors import ProtocolError, UsageError
from flashrec.state.codec import MAX_DEPTH, Foreign, checksum, decode, encode

MAX = 1 << 24

keys = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text())
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 200), max_value=1 << 200),
    st.floats(allow_nan=False),
    st.text(st.characters()),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(collections.Counter),
        st.lists(inner, max_size=4).map(lambda items: collections.deque(items, 7)),
        st.sets(st.integers(), max_size=4),
        st.frozensets(st.text(), max_size=4),
    ),
    max_leaves=12,
)


def same(one: object, other: object) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        # In order: a state dict's order decides how an optimizer's groups are numbered.
        return len(one) == len(other) and all(
            same(a, b) for a, b in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple | collections.deque) and isinstance(
        other, list | tuple | collections.deque
    ):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@given(values)
@settings(max_examples=300)
def test_round_trip_keeps_values_types_and_order(value: object) -> None:
    assert same(decode(encode(value), MAX), value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<i4").reshape(2, 3),
        np.arange(6, dtype=">f8")[::2],
        np.zeros((0, 3), np.float16),
        np.array(5, np.uint8),
        np.array([True, False]),
        np.array(["a", "bcd"]),
        np.array([b"x", b""], "S3"),
        np.array([1 + 2j], np.complex64),
        np.array(["2020-01-02"], "datetime64[D]"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_keep_dtype_shape_and_values(array: np.ndarray) -> None:
    again = decode(encode(array), MAX)
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    assert np.array_equal(again, array)
    assert again.flags.writeable


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.int64(-3), np.bool_(True), np.float64("inf")])
def test_numpy_scalars_stay_numpy_scalars(scalar: np.generic) -> None:
    again = decode(encode({"x": scalar}), MAX)["x"]
    assert type(again) is type(scalar)
    assert again == scalar


def test_nan_and_negative_zero_are_bit_equal() -> None:
    for value in (float("nan"), -0.0, float("-inf")):
        assert np.float64(decode(encode(value), MAX)).tobytes() == np.float64(value).tobytes()


def test_defaultdict_keeps_a_builtin_factory() -> None:
    again = decode(encode(collections.defaultdict(list, a=[1])), MAX)
    assert again["missing"] == []
    assert again["a"] == [1]


def test_equal_sets_give_equal_bytes() -> None:
    # "8" and "16" collide in a small table, so insertion order shows in iteration order.
    assert encode({8, 16, 0}) == encode({0, 16, 8})


class Unknown:
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, (2, Unknown())]}, "['a'][1][1]"),
        ({"scheduler": {"fn": print}}, "['scheduler']['fn']"),
        ([np.array([None])], "[0]"),
        ({(1, Unknown()): 1}, "a key of the value"),
        (collections.defaultdict(lambda: 1), "the value"),
    ],
)
def test_an_unknown_value_is_refused_with_its_place(value: object, where: str) -> None:
    with pytest.raises(UsageError) as caught:
        encode(value)
    assert where in str(caught.value)


def test_a_value_inside_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UsageError):
        encode(loop)
    nested: tuple[object, ...] = ()
    for _ in range(MAX_DEPTH + 1):
        nested = (nested,)
    with pytest.raises(UsageError, match="nested"):
        encode(nested)


def test_foreign_values_pass_through_without_their_library() -> None:
    data = encode({"t": Foreign("torch.Tensor", ["float32", [1], False, b"\0\0\0\0"])})
    again = decode(data, MAX)
    assert again["t"].kind == "torch.Tensor"
    assert encode(again) == data


def test_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="at most 10"):
        decode(encode(b"x" * 100), 10)


@given(st.binary(max_size=300))
@settings(max_examples=500)
def test_garbage_is_refused_or_is_a_value(data: bytes) -> None:
    try:
        decode(data, MAX)
    except ProtocolError:
        return


@given(values, st.data())
@settings(max_examples=300)
def test_damaged_records_raise_nothing_but_protocol_error(value: object, draw: st.DataObject) -> None:
    data = bytearray(encode(value))
    position = draw.draw(st.integers(0, len(data) - 1))
    data[position] ^= draw.draw(st.integers(1, 255))
    del data[draw.draw(st.integers(1, len(data))) :]
    try:
        decode(data, MAX)
    except ProtocolError:
        return


def ext(code: int, body: object) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb(body)))


@pytest.mark.parametrize(
    "data",
    [
        ext(3, ["<f4", [1 << 40], b""]),  # claims far more than it holds
        ext(3, ["<f4", [1 << 62, 1 << 62], b"1234"]),
        ext(3, ["<f4", [-1], b"1234"]),
        ext(3, ["|O", [1], b"12345678"]),  # objects would be pointers
        ext(3, ["<U0", [1 << 40], b""]),
        ext(3, ["f4,f4", [1], b"12345678"]),
        ext(3, [["<f4"], [1], b"1234"]),
        ext(1, {"a": 1}),
        ext(6, ["OrderedDict", None, [[1]]]),
        ext(6, ["defaultdict", "exec", []]),
        ext(6, ["deque", 1, [1, 2]]),
        ext(6, ["set", None, [[1]]]),
        ext(99, []),
        msgpack.packb({"a": 1})[:-1],
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion, in 5 bytes
        b"\x91" * 5000 + b"\x00",
        b"",
        msgpack.packb(1) + b"\x00",
    ],
)
def test_lies_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, MAX)


def test_nesting_of_extensions_is_bounded() -> None:
    data = msgpack.packb(1)
    for _ in range(MAX_DEPTH + 10):
        data = msgpack.packb(msgpack.ExtType(1, b"\x91" + data))
    with pytest.raises(ProtocolError, match="nested"):
        decode(data, MAX)


def test_checksum_tells_single_bits_apart() -> None:
    data = bytearray(1000)
    before = checksum(data)
    data[777] ^= 1
    assert checksum(data) != before


def test_the_torch_free_parts_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, flashrec.state.codec, flashrec.state.private_slots, flashrec.state.layout\n"
        "import flashrec.state.shardwire, flashrec.state.export, flashrecd.shards.server\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
    )
