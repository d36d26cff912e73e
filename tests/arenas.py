"""What the tests of arenas share: a rank whose tensors are a known function of the version, sealed and looked at."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from flashrec.errors import IntegrityError
from flashrec.state.arena import Arena
from flashrec.state.arena_writer import ArenaWriter
from flashrec.state.codec import checksum
from flashrec.state.layout import Layout, Piece, RankLayout, ReplicaSet, TensorSpec
from flashrec.state.manifest import ExportManifest

JOB = "job-a"
RANK = 3


def layout_of(prefix: str, sizes: Sequence[int]) -> Layout:
    return Layout([TensorSpec(f"{prefix}{i}", "uint8", (size,), size) for i, size in enumerate(sizes)])


def rank_layout(unique: Sequence[int], shared: Sequence[int] = ()) -> RankLayout:
    """RANK's tensors of these sizes: some it has alone, some it shares with rank 1 and seals half of."""
    sets = [ReplicaSet((RANK,), layout_of("u", unique))] if unique else []
    if shared:
        sets.append(ReplicaSet((1, RANK), layout_of("s", shared)))
    return RankLayout(RANK, tuple(sorted(sets, key=lambda one: one.ranks)))


SMALL = rank_layout([10, 5000, 0, 1, 9000], [5000, 3])
# What the first optimizer step makes of it.
GROWN = rank_layout([10, 5000, 0, 1, 9000, 5000], [5000, 3, 5000])


class Tensors:
    """The tensors of a replica set at `version`; every second one is frozen."""

    def __init__(self, layout: Layout, version: int | None) -> None:
        self.data = [
            bytearray(b"" if version is None else _content(spec, version if i % 2 else -1)).ljust(
                spec.size_bytes, b"\0"
            )
            for i, spec in enumerate(layout)
        ]

    def read_piece(self, piece: Piece) -> memoryview:
        return memoryview(self.data[piece.tensor_index])[piece.offset : piece.offset + piece.size_bytes]

    def piece_memory(self, piece: Piece) -> memoryview | None:
        return self.read_piece(piece)

    def write_piece(self, piece: Piece, data: bytes | bytearray | memoryview) -> None:
        self.read_piece(piece)[:] = data


@functools.cache
def _content(spec: TensorSpec, version: int) -> bytes:
    return random.Random(f"{spec.name} {version}").randbytes(spec.size_bytes)


def tensors(layout: RankLayout, version: int) -> list[Tensors]:
    """The live tensors, one reader for each replica set."""
    return [Tensors(one.layout, version) for one in layout.sets]


def blob_of(version: int) -> bytes:
    return random.Random(version).randbytes(300 + version)


def seal(
    writer: ArenaWriter,
    version: int,
    generation: int = 1,
    layout: RankLayout = SMALL,
    blob: bytes | None = None,
) -> tuple[int, int]:
    """One version from begin to end on this thread; returns (bytes copied, bytes found unchanged)."""
    blob = blob_of(version) if blob is None else blob
    slot = writer.open_slot(version, generation, layout, len(blob))
    readers = tensors(layout, version)
    counts = [slot.put(chunk, readers) for chunk in range(slot.num_chunks)]
    slot.seal(blob)
    return sum(copied for copied, _ in counts), sum(unchanged for _, unchanged in counts)


def versions(arena: Arena) -> list[int]:
    return [sealed.version for sealed in arena.sealed()]


def check(arena: Arena, seen: Iterable[int] | None = None, blob: bytes | None = None) -> None:
    """Every version that is said to be sealed can be read, and is what was sealed, byte for byte."""
    for version in versions(arena) if seen is None else seen:
        state = arena.read(version)
        assert state.sealed.version == version
        assert state.blob == (blob_of(version) if blob is None else blob)
        live = tensors(state.layout, version)
        for one, manifest, reader in zip(state.layout.sets, state.manifests, live, strict=True):
            assert ExportManifest.from_wire(manifest.to_wire()) == manifest
            assert manifest.layout_digest == one.layout.digest
            assert list(manifest.pieces) == one.part(RANK)
            expected = b"".join(reader.read_piece(piece) for piece in manifest.pieces)
            assert stream(manifest) == expected, f"version {version}, {one}"


def stream(manifest: ExportManifest) -> bytes:
    """The bytes that a manifest describes. Raises IntegrityError where they do not match."""
    data = Path(manifest.path).read_bytes()
    chunks = []
    for number, expected in enumerate(manifest.checksums):
        offset, size_bytes = manifest.chunk_range(number)
        chunks.append(data[offset : offset + size_bytes])
        if checksum(chunks[-1]) != expected:
            raise IntegrityError(f"chunk {number} of version {manifest.version} is damaged")
    assert sum(map(len, chunks)) == manifest.size_bytes
    return b"".join(chunks)


def used_bytes(directory: Path) -> int:
    """Memory (blocks) that all files there have."""
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())
