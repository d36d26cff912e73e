"""Which tensors a rank's state consists of, and how it is cut into pieces. Free of torch.

A layout is the ordered list of a rank's tensors; the bytes of each are those of its elements in C order,
whatever its strides in memory. Two ranks can serve each other exactly if their layouts have the same
digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgpack

from flashrec.errors import ProtocolError

# Cuts inside a tensor fall on multiples of this: whole elements of every dtype, whole cache lines.
CUT_ALIGNMENT_BYTES = 64

_MAX_DIMS = 64
_MAX_TENSORS = 1 << 24
_MAX_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name is unique in the layout, `dtype` is torch's name without the prefix
    ("bfloat16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.name!r} ({self.dtype}, shape {list(self.shape)})"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + size_bytes) of the tensor at `tensor_index` of a layout."""

    tensor_index: int
    offset: int
    size_bytes: int

    def to_wire(self) -> list[int]:
        return [self.tensor_index, self.offset, self.size_bytes]

    @staticmethod
    def from_wire(wire: object) -> Piece:
        """Raises ProtocolError when `wire` is not three integers that can be a piece."""
        if type(wire) is not list or len(wire) != 3 or any(type(item) is not int for item in wire):
            raise ProtocolError("a piece that is not three integers")
        index, offset, size_bytes = wire
        if not (0 <= index < _MAX_TENSORS and 0 <= offset <= _MAX_BYTES and 0 < size_bytes <= _MAX_BYTES):
            raise ProtocolError(f"a piece out of range: {wire}")
        return Piece(index, offset, size_bytes)


@dataclass(frozen=True)
class Layout:
    """The tensors of a rank, in order. `digest` is the same exactly for equal layouts."""

    specs: tuple[TensorSpec, ...]
    digest: str = field(init=False, compare=False)
    total_bytes: int = field(init=False, compare=False)

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        names = {spec.name for spec in specs}
        assert len(names) == len(specs), "names in a layout are unique"
        object.__setattr__(self, "specs", tuple(specs))
        object.__setattr__(self, "total_bytes", sum(spec.size_bytes for spec in specs))
        object.__setattr__(self, "digest", hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest())

    def difference(self, other: Layout, whose: tuple[str, str] = ("one", "the other")) -> str | None:
        """What first sets `other` apart from this layout, naming the tensor; None when they are equal. `whose`
        names the two."""
        one, two = whose
        for index, (mine, theirs) in enumerate(zip(self.specs, other.specs, strict=False)):
            if mine != theirs:
                return f"tensor {index} is {mine} in {one}, {theirs} in {two}"
        if len(self.specs) == len(other.specs):
            return None
        if len(self.specs) < len(other.specs):
            one, two = two, one
        short, long = sorted((self.specs, other.specs), key=len)
        return f"tensor {len(short)} is {long[len(short)]} in {one}, absent in {two}"

    def split(self, num_parts: int) -> list[list[Piece]]:
        """Cut all bytes into `num_parts` parts of nearly equal size (within 64 bytes plus one cut), in order.

        Every byte is in exactly one piece; tensors without bytes are in none. A large tensor may span several
        parts; a part may be empty when there is less to share than there are parts."""
        if num_parts < 1:
            raise ValueError(f"num_parts must be at least 1, not {num_parts}")
        parts: list[list[Piece]] = [[] for _ in range(num_parts)]
        start = 0  # of the tensor, in the bytes of the whole layout
        part = 0
        for index, spec in enumerate(self.specs):
            offset = 0
            while offset < spec.size_bytes:
                # The end of `part` in the whole layout; exact integers, so all ranks cut alike.
                part_end = self.total_bytes * (part + 1) // num_parts
                room = part_end - (start + offset)
                if part < num_parts - 1:
                    room = -(-room // CUT_ALIGNMENT_BYTES) * CUT_ALIGNMENT_BYTES
                if room <= 0:
                    part += 1
                    continue
                size_bytes = min(room, spec.size_bytes - offset)
                parts[part].append(Piece(index, offset, size_bytes))
                offset += size_bytes
            start += spec.size_bytes
        return parts

    def missing(self, pieces: Sequence[Piece]) -> str | None:
        """The first bytes that `pieces` do not cover, or cover twice, or that do not exist; None when every
        byte of the layout is in exactly one of them."""
        by_tensor: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_tensor.setdefault(piece.tensor_index, []).append(piece)
        for index, spec in enumerate(self.specs):
            offset = 0
            for piece in sorted(by_tensor.pop(index, []), key=lambda piece: piece.offset):
                if piece.offset != offset:
                    what = "missing" if piece.offset > offset else "covered twice"
                    return f"bytes of {spec} around offset {min(offset, piece.offset)} are {what}"
                offset += piece.size_bytes
            if offset != spec.size_bytes:
                what = "missing" if offset < spec.size_bytes else "beyond its end"
                return f"bytes of {spec} from offset {min(offset, spec.size_bytes)} are {what}"
        return f"tensor {min(by_tensor)} does not exist" if by_tensor else None

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def to_wire(self) -> list[Any]:
        return [[spec.name, spec.dtype, list(spec.shape), spec.size_bytes] for spec in self.specs]

    @staticmethod
    def from_wire(wire: object) -> Layout:
        """Raises ProtocolError when `wire` is not what `to_wire` makes."""
        if type(wire) is not list or len(wire) > _MAX_TENSORS:
            raise ProtocolError("a layout that is not a list of tensors")
        specs = [_spec_from_wire(item) for item in wire]
        if len({spec.name for spec in specs}) != len(specs):
            raise ProtocolError("a layout that names a tensor twice")
        return Layout(specs)

    def to_bytes(self) -> bytes:
        packed = msgpack.packb(self.to_wire(), unicode_errors="surrogatepass")
        assert isinstance(packed, bytes)
        return packed

    @staticmethod
    def from_bytes(data: bytes) -> Layout:
        """Raises ProtocolError when `data` is not what `to_bytes` makes."""
        try:
            wire = msgpack.unpackb(data, unicode_errors="surrogatepass")
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(f"not a layout: {error or type(error).__name__}") from error
        return Layout.from_wire(wire)


def _spec_from_wire(item: object) -> TensorSpec:
    if type(item) is not list or len(item) != 4:
        raise ProtocolError("a tensor that is not (name, dtype, shape, size)")
    name, dtype, shape, size_bytes = item
    if type(name) is not str or type(dtype) is not str or not dtype.isidentifier():
        raise ProtocolError(f"a tensor named {name!r} of dtype {dtype!r}")
    if type(shape) is not list or len(shape) > _MAX_DIMS or type(size_bytes) is not int:
        raise ProtocolError(f"tensor {name!r} has no proper shape or size")
    if any(type(dim) is not int or not 0 <= dim <= _MAX_BYTES for dim in shape):
        raise ProtocolError(f"tensor {name!r} has the shape {shape}")
    num_elements = prod(shape)
    fits = size_bytes % num_elements == 0 and size_bytes > 0 if num_elements else size_bytes == 0
    if not fits or size_bytes > _MAX_BYTES:
        raise ProtocolError(f"tensor {name!r} of shape {shape} cannot have {size_bytes} bytes")
    return TensorSpec(name, dtype, tuple(shape), size_bytes)
