"""Which tensors a rank's state consists of, and how it is cut into pieces. Free of torch.

A layout is an ordered list of tensors; the bytes of each are those of its elements in C order, whatever
its strides in memory. A rank's tensors are divided into replica sets by who else holds the very same bytes:

    DDP, ranks 0-3             {0, 1, 2, 3}: everything
    FSDP, ranks 0-3            {r}: the rank's shards
    HSDP, 2 replicas of 2      {0, 2} and {1, 3}: the shards of each pair
    ZeRO-1, ranks 0-3          {0, 1, 2, 3}: parameters; {r}: the rank's share of optimizer state

The members of a set can serve one another, and each seals its part of what they share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import msgpack

from flashrec.errors import ProtocolError

# Cuts inside a tensor fall on multiples of this: whole elements of every dtype, whole cache lines.
CUT_ALIGNMENT_BYTES = 64

_MAX_DIMS = 64
_MAX_TENSORS = 1 << 24
_MAX_BYTES = 1 << 62
_MAX_RANK = 1 << 24


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
        return _packed(self.to_wire())

    @staticmethod
    def from_bytes(data: bytes) -> Layout:
        """Raises ProtocolError when `data` is not what `to_bytes` makes."""
        return Layout.from_wire(_unpacked(data))


@dataclass(frozen=True)
class ReplicaSet:
    """Ranks that hold the very same bytes of the tensors in `layout`.

    `ranks` are global and ascending, each once; (r,) means that the tensors are unique to rank r. `layout`
    is equal on all members."""

    ranks: tuple[int, ...]
    layout: Layout

    def __post_init__(self) -> None:
        assert self.ranks == tuple(sorted(set(self.ranks))), f"members ascend, each once: {self.ranks}"
        assert self.ranks, "a replica set has members"
        assert self.ranks[0] >= 0, f"ranks are not negative: {self.ranks}"
        assert len(self.layout), "a replica set has tensors"

    def part(self, rank: int) -> list[Piece]:
        """What member `rank` seals; together the members' parts are all bytes, each once. ValueError for a
        rank that is no member."""
        return list(self._parts[self.ranks.index(rank)])

    @cached_property
    def _parts(self) -> list[list[Piece]]:
        return self.layout.split(len(self.ranks))

    def __str__(self) -> str:
        first = self.layout.specs[0]
        more = f" and {len(self.layout) - 1} more" if len(self.layout) > 1 else ""
        return f"{first}{more} {_held(self.ranks)}"


@dataclass(frozen=True)
class RankLayout:
    """All tensors of one rank, by who else holds them.

    `sets` ascend by their ranks, no two of the same ranks, each with `rank` among them; () for a rank without
    tensors. `digest` is of everything but `rank` (the ranks of a DDP job have the same); `owned_bytes` is
    what the rank seals, its parts of all sets."""

    rank: int
    sets: tuple[ReplicaSet, ...]
    digest: str = field(init=False, compare=False)
    total_bytes: int = field(init=False, compare=False)
    owned_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        ranks = [one.ranks for one in self.sets]
        assert ranks == sorted(set(ranks)), f"replica sets ascend, each once: {ranks}"
        assert all(self.rank in one for one in ranks), f"rank {self.rank} is in each of its sets: {ranks}"
        sets = _packed(self._sets_to_wire())
        object.__setattr__(self, "digest", hashlib.blake2b(sets, digest_size=16).hexdigest())
        object.__setattr__(self, "total_bytes", sum(one.layout.total_bytes for one in self.sets))
        owned = sum(piece.size_bytes for one in self.sets for piece in one.part(self.rank))
        object.__setattr__(self, "owned_bytes", owned)

    def disagreement(self, other: RankLayout) -> str | None:
        """What contradicts that the two are ranks of one job, in words: a replica set that one claims with the
        other as a member, and the other does not, or with another layout. None when they are compatible."""
        for mine, theirs in ((self, other), (other, self)):
            claims = {one.ranks: one for one in theirs.sets}
            for claimed in mine.sets:
                if theirs.rank not in claimed.ranks:
                    continue
                found = claims.get(claimed.ranks)
                if found is None:
                    name = claimed.layout.specs[0].name
                    return (
                        f"rank {mine.rank} holds {claimed}; rank {theirs.rank} holds "
                        f"{theirs._where(name) or f'no tensor {name!r}'}"
                    )
                whose = (f"rank {mine.rank}", f"rank {theirs.rank}")
                difference = claimed.layout.difference(found.layout, whose)
                if difference is not None:
                    return f"of what is {_held(claimed.ranks)}, {difference}"
        return None

    def _where(self, name: str) -> str | None:
        for one in self.sets:
            for spec in one.layout:
                if spec.name == name:
                    return f"{spec} {_held(one.ranks)}"
        return None

    def _sets_to_wire(self) -> list[Any]:
        return [[list(one.ranks), one.layout.to_wire()] for one in self.sets]

    def to_bytes(self) -> bytes:
        return self._bytes

    @cached_property
    def _bytes(self) -> bytes:
        return _packed([self.rank, self._sets_to_wire()])

    @staticmethod
    def from_bytes(data: bytes) -> RankLayout:
        """Raises ProtocolError when `data` is not what `to_bytes` makes."""
        wire = _unpacked(data)
        if type(wire) is not list or len(wire) != 2 or type(wire[1]) is not list:
            raise ProtocolError("a rank's layout that is not (rank, replica sets)")
        rank = wire[0]
        sets = [_set_from_wire(item) for item in wire[1]]
        ranks = [one.ranks for one in sets]
        if type(rank) is not int or any(rank not in one for one in ranks):
            raise ProtocolError(f"a layout of rank {rank!r} with replica sets of other ranks")
        if ranks != sorted(set(ranks)):
            raise ProtocolError(f"a layout of rank {rank} whose replica sets do not ascend")
        if not 0 <= rank < _MAX_RANK:
            raise ProtocolError(f"a layout of rank {rank}")
        return RankLayout(rank, tuple(sets))


def _held(ranks: tuple[int, ...]) -> str:
    return f"alike on ranks {list(ranks)}" if len(ranks) > 1 else f"alone on rank {ranks[0]}"


def _packed(wire: object) -> bytes:
    packed = msgpack.packb(wire, unicode_errors="surrogatepass")
    assert isinstance(packed, bytes)
    return packed


def _unpacked(data: bytes) -> object:
    try:
        wire: object = msgpack.unpackb(data, unicode_errors="surrogatepass")
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a layout: {error or type(error).__name__}") from error
    return wire


def _set_from_wire(item: object) -> ReplicaSet:
    if type(item) is not list or len(item) != 2 or type(item[0]) is not list:
        raise ProtocolError("a replica set that is not (ranks, layout)")
    ranks = item[0]
    if not ranks or any(type(rank) is not int or not 0 <= rank < _MAX_RANK for rank in ranks):
        raise ProtocolError(f"a replica set of the ranks {ranks!r:.100}")
    if ranks != sorted(set(ranks)):
        raise ProtocolError(f"a replica set whose ranks do not ascend: {ranks!r:.100}")
    layout = Layout.from_wire(item[1])
    if not len(layout):
        raise ProtocolError(f"a replica set of the ranks {ranks!r:.100} without tensors")
    return ReplicaSet(tuple(ranks), layout)


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
