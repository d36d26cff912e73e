"""Chunks on the wire: made smaller where it pays, the same bytes afterwards, and nothing else is taken for them."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import ProtocolError
from flashrec.state.packing import pack, unpack

MIB = 1 << 20


def normal(size_bytes: int, width: int) -> bytes:
    """As weights are: float32, or the upper halves of it (bfloat16)."""
    values = np.random.default_rng(5).normal(0, 0.02, size_bytes // width).astype(np.float32)
    return values.tobytes() if width == 4 else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.mark.parametrize("width", [4, 2])
def test_floats_shrink_by_their_exponents(width: int) -> None:
    data = normal(MIB, width)
    packed = pack(data)
    assert packed is not None
    assert packed[0] == 4
    assert len(packed) < 0.9 * MIB
    assert len(packed) < len(zstandard.ZstdCompressor(level=1).compress(data))
    assert unpack(packed, MIB) == data


def test_what_does_not_shrink_stays_as_it_is() -> None:
    assert pack(np.random.default_rng(5).bytes(MIB)) is None
    assert pack(b"") is None
    # The sample shrinks, the whole does not.
    noise = bytearray(np.random.default_rng(5).bytes(MIB))
    noise[MIB // 2 : MIB // 2 + (16 << 10)] = bytes(16 << 10)
    assert pack(noise) is None


@given(st.binary(max_size=300), st.integers(1, 200))
def test_any_bytes_come_back(data: bytes, times: int) -> None:
    whole = data * times
    packed = pack(memoryview(whole))
    assert packed is None or (len(packed) < len(whole) and unpack(packed, len(whole)) == whole)


PACKED = pack(bytes(1000)) or b""


@pytest.mark.parametrize(
    ("packed", "size_bytes", "reason"),
    [
        (b"", 10, "no width"),
        (b"\2" + PACKED[1:], 1000, "no width"),
        (PACKED, 999, "has not the 999 bytes"),
        (PACKED[:1] + zstandard.ZstdCompressor().compress(bytes(1 << 30)), 1000, "has not the 1000 bytes"),
        (PACKED[:1] + b"junk", 4, "cannot be unpacked"),
        (PACKED[:-1], 1000, "cannot be unpacked"),
    ],
)
def test_nothing_else_is_unpacked(packed: bytes, size_bytes: int, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        unpack(packed, size_bytes)


@given(st.binary(max_size=60))
def test_garbage_is_refused(junk: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(b"\4" + junk, 1 << 20)
