"""What one rank offers to others: pieces of its state in one file, with the checksum of every chunk. No
torch.

The pieces, one after another, are a stream of bytes in the file. It is checked, sent and asked for in chunks
of `chunk_bytes` of that stream (the last may be shorter), whatever pieces they cut. There are these kinds:

    export/g<generation>.r<rank>.<index>    made for a recovery, of a parked survivor's state; nothing else in it
    arena/r<rank>.<number>                  sealed in each step (flashrec.state.arena); several streams in it
    replica/r<rank>.<number>                what another node's shard server keeps of an arena; the same form
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrec.errors import IntegrityError, ProtocolError
from flashrec.state.layout import Layout, Piece

EXPORT = "export"
ARENA = "arena"
REPLICA = "replica"
# Large enough that a message costs little beside its bytes, small enough to stay in a cache between being
# copied and being checked.
CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 4 << 20


def export_path(directory: Path | str, generation: int, rank: int, index: int = 0) -> Path:
    """Where `rank` puts the `index`-th thing it exports in `generation`, below the job's directory in shared
    memory."""
    return Path(directory) / EXPORT / f"g{generation}.r{rank}.{index}"


@dataclass(frozen=True)
class ExportManifest:
    """Pieces that `rank` offers. `path` is absolute on its node; `checksums` has one xxh3_64 per chunk; the
    stream is the `size_bytes` from `offset` on, and the file may be longer.

    `generation` is the one that wrote the bytes: an export's is that of the recovery it was made for, a sealed
    version's may be any earlier one."""

    path: str
    rank: int
    version: int
    generation: int
    layout_digest: str
    pieces: tuple[Piece, ...]
    chunk_bytes: int
    checksums: tuple[int, ...]
    size_bytes: int
    offset: int = 0

    @property
    def name(self) -> str:
        """The file's name at the shard server."""
        path = Path(self.path)
        return f"{path.parent.name}/{path.name}"

    @property
    def is_sealed(self) -> bool:
        """Whether it lies in an arena, or in what another node keeps of one."""
        return Path(self.path).parent.name in (ARENA, REPLICA)

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """(offset in the file, size in bytes) of a chunk."""
        start = chunk * self.chunk_bytes
        return self.offset + start, min(self.chunk_bytes, self.size_bytes - start)

    def check(self, layout: Layout, version: int, generation: int) -> None:
        """Raises IntegrityError when this does not offer `version` of `layout` to `generation`.

        What is sealed may be of any generation up to this one: whoever planned the recovery knows that it was
        not lost since."""
        fits = self.generation <= generation if self.is_sealed else self.generation == generation
        if self.version != version or not fits:
            raise IntegrityError(
                f"rank {self.rank} offers version {self.version} in generation {self.generation}, "
                f"not version {version} in generation {generation}"
            )
        if self.layout_digest != layout.digest:
            raise IntegrityError(f"rank {self.rank} offers a state of another layout ({self.layout_digest})")
        for piece in self.pieces:
            if piece.tensor_index >= len(layout):
                raise IntegrityError(f"rank {self.rank} offers {piece}, beyond the layout's end")
            if piece.offset + piece.size_bytes > layout.specs[piece.tensor_index].size_bytes:
                raise IntegrityError(
                    f"rank {self.rank} offers {piece}, beyond the end of {layout.specs[piece.tensor_index]}"
                )

    def to_wire(self) -> list[Any]:
        return [
            self.path,
            self.rank,
            self.version,
            self.generation,
            self.layout_digest,
            [piece.to_wire() for piece in self.pieces],
            self.chunk_bytes,
            list(self.checksums),
            self.size_bytes,
            self.offset,
        ]

    @staticmethod
    def from_wire(wire: object) -> ExportManifest:
        """Raises ProtocolError when `wire` is not what `to_wire` makes."""
        if type(wire) is not list or len(wire) != 10:
            raise ProtocolError("a manifest that is not a list of ten fields")
        path, rank, version, generation, layout_digest, pieces_wire, chunk_bytes, checksums = wire[:8]
        size_bytes, offset = wire[8:]
        if type(path) is not str or not path.startswith("/") or type(layout_digest) is not str:
            raise ProtocolError("a manifest whose path or digest is not text")
        numbers = (rank, version, generation, chunk_bytes, size_bytes, offset)
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
            raise ProtocolError(f"a manifest with the numbers {numbers}")
        if type(pieces_wire) is not list or type(checksums) is not list:
            raise ProtocolError("a manifest without pieces or checksums")
        if any(type(value) is not int or not 0 <= value < 1 << 64 for value in checksums):
            raise ProtocolError("a manifest with a checksum that is none")
        pieces = tuple(Piece.from_wire(piece) for piece in pieces_wire)
        if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES or size_bytes != sum(piece.size_bytes for piece in pieces):
            raise ProtocolError(f"a manifest of {size_bytes} bytes in chunks of {chunk_bytes}")
        if len(checksums) != -(-size_bytes // chunk_bytes):
            raise ProtocolError(f"a manifest with {len(checksums)} checksums for {size_bytes} bytes")
        return ExportManifest(
            path,
            rank,
            version,
            generation,
            layout_digest,
            pieces,
            chunk_bytes,
            tuple(checksums),
            size_bytes,
            offset,
        )


@dataclass(frozen=True)
class Source:
    """Where a part can be had: the file itself on this node (`address` None), or a shard server that has it.

    `key` is what that server asks for, if it asks for one; `secure` sets a socket's security before it is
    connected."""

    manifest: ExportManifest
    address: str | None = None
    key: bytes = b""
    secure: Callable[[Any], None] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        where = "this node's memory" if self.address is None else self.address
        return f"rank {self.manifest.rank} in {where}"


# The sources of the same pieces, best first.
Part = Sequence[Source]
