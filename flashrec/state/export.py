"""Serving a part of this rank's state: its bytes go to shared memory once, checksummed on the way. No
torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

import xxhash

from flashrec.errors import EnvironmentFault
from flashrec.state.files import ASIDE, free_bytes, make_directory, no_space, remove, write_whole
from flashrec.state.layout import Piece
from flashrec.state.manifest import CHUNK_BYTES, EXPORT, ExportManifest

_EXPORT_NAME = re.compile(
    rf"{re.escape(ASIDE)}?g(\d{{1,18}})\.r\d{{1,9}}\.\d{{1,9}}(?:\.\d+\.\d+)?", re.ASCII
)


class PieceReader(Protocol):
    """What `flashrec.state.capture.Captured` is to the export."""

    def read_piece(self, piece: Piece) -> memoryview: ...


@runtime_checkable
class Lender(PieceReader, Protocol):
    """Of a reader whose bytes have to be fetched: it needs to know when they are not needed any more."""

    def lend(
        self, pieces: Sequence[Piece], ahead: Sequence[Piece] = ()
    ) -> AbstractContextManager[list[memoryview]]:
        """The pieces' bytes inside the block. `ahead` is likely to be asked for next."""


def export(
    reader: PieceReader,
    pieces: Sequence[Piece],
    path: Path,
    *,
    rank: int,
    version: int,
    generation: int,
    layout_digest: str,
    chunk_bytes: int = CHUNK_BYTES,
) -> ExportManifest:
    """Write `pieces` of `rank`'s state to `path` (complete, or not there) and describe them.

    The state must not change meanwhile: the rank is parked. Raises EnvironmentFault when there is no room."""
    size_bytes = sum(piece.size_bytes for piece in pieces)
    make_directory(path.parent)
    if free_bytes(path.parent) < size_bytes:
        raise no_space(path.parent, size_bytes)
    checksums: list[int] = []
    write_whole(path, _checksummed(reader, pieces, chunk_bytes, checksums), size_bytes)
    return ExportManifest(
        str(path),
        rank,
        version,
        generation,
        layout_digest,
        tuple(pieces),
        chunk_bytes,
        tuple(checksums),
        size_bytes,
    )


def discard_exports(directory: Path | str, before_generation: int) -> int:
    """Remove the job's exports of generations before this one, also half-written ones; returns how many."""
    folder = Path(directory) / EXPORT
    count = 0
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise EnvironmentFault(f"cannot list {folder}: {error.strerror}") from error
    for name in names:
        match = _EXPORT_NAME.fullmatch(name)
        if match is not None and int(match[1]) < before_generation:
            count += remove(folder / name)
    return count


def _checksummed(
    reader: PieceReader, pieces: Sequence[Piece], chunk_bytes: int, checksums: list[int]
) -> Iterator[memoryview]:
    """The pieces' bytes, cut at chunks; `checksums` has been filled when this is exhausted."""
    chunk = xxhash.xxh3_64()
    room = chunk_bytes
    for piece in pieces:
        data = reader.read_piece(piece)
        offset = 0
        while offset < data.nbytes:
            view = data[offset : offset + room]
            chunk.update(view)
            yield view
            offset += view.nbytes
            room -= view.nbytes
            if room == 0:
                checksums.append(chunk.intdigest())
                chunk = xxhash.xxh3_64()
                room = chunk_bytes
    if room < chunk_bytes:
        checksums.append(chunk.intdigest())
