"""Chunks made smaller on the wire, without loss: byte planes, then zstd.

The bytes of floats are sorted by their place in four: those of the exponents lie together, vary little, and shrink; of
the mantissas' nothing is to be gained. (Two 16-bit floats have two exponents in four bytes; it works as well.) What
is no float may do better as it is: a sample tells, and whether it pays at all.

    packed    width (1 byte), zstd frame of the planes
"""

from __future__ import annotations

import numpy as np
import zstandard

from flashrec.errors import ProtocolError
from flashrec.state.codec import Buffer

_WIDTHS = (4, 1)
_LEVEL = 1
_SAMPLE_BYTES = 16 << 10
_WORTH = 0.95
"""Of its size, at most, is what a chunk must shrink to: else the work would be for nothing."""


def pack(data: Buffer) -> bytes | None:
    """`data`, smaller; None where that does not pay."""
    raw = np.frombuffer(data, np.uint8)
    packer = zstandard.ZstdCompressor(level=_LEVEL)
    middle = len(raw) // 2 & ~7
    sample = raw[middle : middle + _SAMPLE_BYTES]
    sizes = [len(packer.compress(_planes(sample, width))) for width in _WIDTHS]
    best = min(sizes)
    if best > _WORTH * len(sample):
        return None
    width = _WIDTHS[sizes.index(best)]
    packed = bytes([width]) + packer.compress(_planes(raw, width))
    return packed if len(packed) <= _WORTH * len(raw) else None


def unpack(packed: Buffer, size_bytes: int) -> bytes:
    """What `pack` was given, which had `size_bytes`. Raises ProtocolError for anything else; never takes more memory
    than a few times that."""
    frame = memoryview(packed)
    if not frame.nbytes or frame[0] not in _WIDTHS:
        raise ProtocolError("a packed chunk of no width that is known")
    try:
        if zstandard.frame_content_size(frame[1:]) != size_bytes:
            raise ProtocolError(f"a packed chunk that has not the {size_bytes} bytes it should have")
        planes = zstandard.ZstdDecompressor().decompress(frame[1:], max_output_size=size_bytes)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"a packed chunk that cannot be unpacked: {error}") from error
    if len(planes) != size_bytes:
        raise ProtocolError(f"a packed chunk of {len(planes)} bytes where {size_bytes} should be")
    return _joined(np.frombuffer(planes, np.uint8), frame[0])


def _planes(raw: np.ndarray[tuple[int], np.dtype[np.uint8]], width: int) -> bytes:
    """What is left over after the last whole element comes last, as it is."""
    if width == 1:
        return raw.tobytes()
    whole = len(raw) // width * width
    return raw[:whole].reshape(-1, width).T.tobytes() + raw[whole:].tobytes()


def _joined(planes: np.ndarray[tuple[int], np.dtype[np.uint8]], width: int) -> bytes:
    if width == 1:
        return planes.tobytes()
    whole = len(planes) // width * width
    return planes[:whole].reshape(width, -1).T.tobytes() + planes[whole:].tobytes()
