"""Export and pull on one node: verified in place, other sources for what is damaged, refused when
incomplete."""

import dataclasses
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.errors import EnvironmentFault, IntegrityError, ProtocolError
from flashrec.state import files
from flashrec.state.codec import checksum
from flashrec.state.export import discard_exports, export
from flashrec.state.layout import Layout, Piece, TensorSpec
from flashrec.state.manifest import ExportManifest, Source, export_path
from flashrec.state.pull import PullCancelled, Puller, PullIncomplete, PullReport

CHUNK = 4096


class Memory:
    """A rank's tensors as plain bytes. `indirect` ones have no memory of their own to write into, like a
    tensor with other strides."""

    def __init__(self, layout: Layout, seed: int | None, indirect: Sequence[int] = ()) -> None:
        generator = random.Random(seed)
        self.data = [
            bytearray(generator.randbytes(spec.size_bytes) if seed is not None else spec.size_bytes)
            for spec in layout
        ]
        self.indirect = set(indirect)

    def read_piece(self, piece: Piece) -> memoryview:
        return memoryview(self.data[piece.tensor_index])[piece.offset : piece.offset + piece.size_bytes]

    def piece_memory(self, piece: Piece) -> memoryview | None:
        return None if piece.tensor_index in self.indirect else self.read_piece(piece)

    def write_piece(self, piece: Piece, data: bytes | bytearray | memoryview) -> None:
        self.read_piece(piece)[:] = data


def layout_of(sizes: Sequence[int]) -> Layout:
    return Layout([TensorSpec(f"t{i}", "uint8", (size,), size) for i, size in enumerate(sizes)])


LAYOUT = layout_of([10, 50_000, 0, 1, 300_000, 64])


def exports(
    memory: Memory,
    directory: Path,
    num_parts: int,
    *,
    layout: Layout = LAYOUT,
    version: int = 7,
    generation: int = 2,
    first_rank: int = 0,
) -> list[ExportManifest]:
    return [
        export(
            memory,
            pieces,
            export_path(directory, generation, first_rank + rank),
            rank=first_rank + rank,
            version=version,
            generation=generation,
            layout_digest=layout.digest,
            chunk_bytes=CHUNK,
        )
        for rank, pieces in enumerate(layout.split(num_parts))
    ]


def pull(
    puller: Puller,
    memory: Memory,
    parts: Sequence[Sequence[Source]],
    layout: Layout = LAYOUT,
    deadline_s: float = 20,
) -> PullReport:
    return puller.pull(memory, layout, parts, version=7, generation=2, deadline_s=deadline_s)


def sources(*of_part: Sequence[ExportManifest]) -> list[list[Source]]:
    """The parts that several ranks' exports make: of_part[i][k] is source i of part k."""
    return [[Source(manifest) for manifest in manifests] for manifests in zip(*of_part, strict=True)]


@given(
    st.lists(st.one_of(st.integers(0, 100), st.integers(0, 20_000)), max_size=8), st.integers(1, 4), st.data()
)
@settings(max_examples=40)
def test_what_is_pulled_equals_what_was_exported(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], num_parts: int, draw: st.DataObject
) -> None:
    layout = layout_of(sizes)
    directory = tmp_path_factory.mktemp("job")
    memory = Memory(layout, 1)
    manifests = [
        ExportManifest.from_wire(manifest.to_wire())
        for manifest in exports(memory, directory, num_parts, layout=layout)
    ]
    indirect = draw.draw(st.lists(st.integers(0, max(0, len(sizes) - 1))))
    target = Memory(layout, None, indirect)
    report = pull(Puller(), target, sources(manifests), layout)
    assert target.data == memory.data
    assert report.size_bytes == layout.total_bytes == sum(report.bytes_by_source.values())


def test_checksums_are_those_of_the_chunks(tmp_path: Path) -> None:
    (manifest,) = exports(Memory(LAYOUT, 1), tmp_path, 1)
    data = Path(manifest.path).read_bytes()
    assert len(data) == LAYOUT.total_bytes == manifest.size_bytes
    assert list(manifest.checksums) == [checksum(data[i : i + CHUNK]) for i in range(0, len(data), CHUNK)]
    assert oct(os.stat(manifest.path).st_mode & 0o777) == "0o600"


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_corrupt_byte_is_taken_from_the_next_source(tmp_path: Path) -> None:
    memory = Memory(LAYOUT, 1)
    first, second = exports(memory, tmp_path, 2), exports(memory, tmp_path, 2, first_rank=2)
    flip(first[1].path, 9 * CHUNK + 5)
    target = Memory(LAYOUT, None)
    report = pull(Puller(max_threads=1), target, sources(first, second))
    assert target.data == memory.data
    assert "rank 1" in report.refused[0]
    assert f"bytes {9 * CHUNK} to {10 * CHUNK}" in report.refused[0]
    # Nine chunks were good and stay; only the rest came from the other rank.
    assert report.bytes_by_source["rank 1 in this node's memory"] == 9 * CHUNK
    assert report.bytes_by_source["rank 3 in this node's memory"] == second[1].size_bytes - 9 * CHUNK


@pytest.mark.parametrize("damage", ["truncated", "gone", "link", "directory"])
def test_a_damaged_file_is_left_for_the_next_source(tmp_path: Path, damage: str) -> None:
    memory = Memory(LAYOUT, 1)
    first, second = exports(memory, tmp_path, 1), exports(memory, tmp_path, 1, first_rank=1)
    path = Path(first[0].path)
    if damage == "truncated":
        os.truncate(path, first[0].size_bytes - 1)
    else:
        path.unlink()
        if damage == "link":
            path.symlink_to(second[0].path)
        if damage == "directory":
            path.mkdir()
    target = Memory(LAYOUT, None)
    report = pull(Puller(), target, sources(first, second))
    assert target.data == memory.data
    assert len(report.refused) == 1


def test_a_source_that_lies_about_its_checksums_cannot_mix_two_states(tmp_path: Path) -> None:
    """Its chunks match its own manifest, until it is caught; then all it gave is fetched again."""
    memory, lie = Memory(LAYOUT, 1), Memory(LAYOUT, 2)
    lying, honest = exports(lie, tmp_path, 1), exports(memory, tmp_path, 1, first_rank=1)
    flip(lying[0].path, 5 * CHUNK)
    target = Memory(LAYOUT, None)
    pull(Puller(max_threads=1), target, sources(lying, honest))
    assert target.data == memory.data


@pytest.mark.parametrize("offset", [0, 1, 4096, 9 * 4096 + 100])
def test_a_stream_somewhere_in_a_longer_file(tmp_path: Path, offset: int) -> None:
    memory = Memory(LAYOUT, 1)
    (plain,) = exports(memory, tmp_path, 1)
    path = Path(plain.path)
    path.write_bytes(b"x" * offset + path.read_bytes() + b"y" * 100)
    manifest = dataclasses.replace(plain, offset=offset)
    target = Memory(LAYOUT, None)
    assert pull(Puller(), target, sources([ExportManifest.from_wire(manifest.to_wire())])).refused == ()
    assert target.data == memory.data
    assert manifest.chunk_range(1) == (offset + CHUNK, CHUNK)
    os.truncate(path, offset + plain.size_bytes - 1)
    with pytest.raises(PullIncomplete, match=f"not {offset + plain.size_bytes}"):
        pull(Puller(), Memory(LAYOUT, None), sources([manifest]))


def test_several_exports_of_one_rank(tmp_path: Path) -> None:
    """One for each replica set: none takes the place of another, and a second pull of one goes on though the
    other was pulled in between."""
    layouts = [layout_of([70_000]), layout_of([10, 60_000])]
    memories = [Memory(layout, seed) for seed, layout in enumerate(layouts)]
    manifests = [
        export(
            memory,
            layout.split(1)[0],
            export_path(tmp_path, 2, 0, index),
            rank=0,
            version=7,
            generation=2,
            layout_digest=layout.digest,
            chunk_bytes=CHUNK,
        )
        for index, (memory, layout) in enumerate(zip(memories, layouts, strict=True))
    ]
    assert [manifest.name for manifest in manifests] == ["export/g2.r0.0", "export/g2.r0.1"]
    puller, targets = Puller(), [Memory(layout, None) for layout in layouts]
    for _ in range(2):
        reports = [
            pull(puller, target, sources([manifest]), layout)
            for target, manifest, layout in zip(targets, manifests, layouts, strict=True)
        ]
    assert [target.data for target in targets] == [memory.data for memory in memories]
    assert [sum(report.bytes_by_source.values()) for report in reports] == [0, 0], "all was in place"


def test_what_is_sealed_may_be_older_than_the_recovery_but_not_newer(tmp_path: Path) -> None:
    memory = Memory(LAYOUT, 1)
    parts = exports(memory, tmp_path, 2)
    (tmp_path / "arena").mkdir()
    for generation, fits in ((0, True), (2, True), (3, False)):
        path = tmp_path / "arena" / f"r0.{generation}"
        path.write_bytes(Path(parts[0].path).read_bytes())
        sealed = dataclasses.replace(parts[0], path=str(path), generation=generation)
        assert sealed.is_sealed
        assert not parts[1].is_sealed
        target = Memory(LAYOUT, None)
        if fits:
            pull(Puller(), target, sources([sealed, parts[1]]))
            assert target.data == memory.data
        else:
            with pytest.raises(IntegrityError, match="generation 3"):
                pull(Puller(), target, sources([sealed, parts[1]]))


def test_no_good_source_is_said_and_another_call_goes_on(tmp_path: Path) -> None:
    memory = Memory(LAYOUT, 1)
    manifests = exports(memory, tmp_path, 3)
    flip(manifests[2].path, manifests[2].size_bytes - 1)
    target, puller = Memory(LAYOUT, None), Puller()
    with pytest.raises(PullIncomplete, match=r"1 of 3 parts of version 7.*rank 2.*checksum") as caught:
        pull(puller, target, sources(manifests))
    assert caught.value.parts == (2,)
    again = exports(memory, tmp_path, 3, first_rank=10)
    report = pull(puller, target, sources([*manifests[:2], again[2]]))
    assert target.data == memory.data
    last_chunk = manifests[2].chunk_range(len(manifests[2].checksums) - 1)[1]
    assert report.bytes_by_source == {"rank 12 in this node's memory": last_chunk}, "only what was missing"


def test_a_new_generation_starts_anew(tmp_path: Path) -> None:
    memory, target, puller = Memory(LAYOUT, 1), Memory(LAYOUT, None), Puller()
    pull(puller, target, sources(exports(memory, tmp_path, 1)))
    later = exports(memory, tmp_path, 1, generation=3)
    target = Memory(LAYOUT, None)
    report = puller.pull(target, LAYOUT, sources(later), version=7, generation=3, deadline_s=20)
    assert sum(report.bytes_by_source.values()) == LAYOUT.total_bytes
    assert target.data == memory.data


def test_bytes_that_change_while_they_are_copied_are_noticed(tmp_path: Path) -> None:
    """The check is of the bytes in place, not of those in the file."""

    class Careless(Memory):
        def write_piece(self, piece: Piece, data: bytes | bytearray | memoryview) -> None:
            pass  # allocates, and never copies

    manifests = exports(Memory(LAYOUT, 1), tmp_path, 1)
    with pytest.raises(PullIncomplete, match="do not match"):
        pull(Puller(), Careless(LAYOUT, None, indirect=[4]), sources(manifests))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 8}, "version 8"),
        ({"generation": 1}, "generation 1"),
        ({"layout_digest": "0" * 32}, "another layout"),
        ({"pieces": (Piece(99, 0, 10),)}, "beyond the layout's end"),
        ({"pieces": (Piece(0, 5, 10),)}, "beyond the end of 't0'"),
    ],
)
def test_a_manifest_of_something_else_is_refused(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    memory = Memory(LAYOUT, 1)
    (good,) = exports(memory, tmp_path, 1)
    wrong = dataclasses.replace(good, rank=5, **change)
    with pytest.raises(IntegrityError, match=reason):
        pull(Puller(), Memory(LAYOUT, None), [[Source(wrong)]])
    target = Memory(LAYOUT, None)
    report = pull(Puller(), target, [[Source(wrong), Source(good)]])
    assert target.data == memory.data
    assert reason in report.refused[0]


def test_parts_must_be_the_whole_state_once(tmp_path: Path) -> None:
    manifests = exports(Memory(LAYOUT, 1), tmp_path, 3)
    target = Memory(LAYOUT, None)
    for wrong in (manifests[:2], [*manifests, manifests[0]], []):
        with pytest.raises(IntegrityError, match="not the whole state"):
            pull(Puller(), target, sources(wrong))
    with pytest.raises(IntegrityError, match="no source"):
        pull(Puller(), target, [[]])
    assert target.data == Memory(LAYOUT, None).data


def test_the_deadline_ends_a_pull(tmp_path: Path) -> None:
    manifests = exports(Memory(LAYOUT, 1), tmp_path, 2)
    with pytest.raises(PullIncomplete, match="within 0 s"):
        pull(Puller(), Memory(LAYOUT, None), sources(manifests), deadline_s=0)


def test_cancellation_ends_a_pull(tmp_path: Path) -> None:
    manifests = exports(Memory(LAYOUT, 1), tmp_path, 2)
    asked = 0

    def is_cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > 5

    with pytest.raises(PullCancelled):
        pull(Puller(is_cancelled), Memory(LAYOUT, None), sources(manifests))
    assert asked < 40, "it went on after it was cancelled"


def test_a_file_that_is_removed_during_the_pull_stays_readable(tmp_path: Path) -> None:
    """The daemon may clean up a generation while a slow replacement still has it mapped."""
    memory = Memory(LAYOUT, 1)
    manifests = exports(memory, tmp_path, 1)

    def remove() -> bool:
        Path(manifests[0].path).unlink(missing_ok=True)
        return False

    target = Memory(LAYOUT, None)
    # The first question comes after the first chunk: by then the file is open.
    report = pull(Puller(remove, max_threads=1), target, sources(manifests))
    assert target.data == memory.data
    assert report.refused == ()


def test_export_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs(tmp_path)
    full = os.statvfs_result((*status[:3], 3, 3, *status[5:]))
    monkeypatch.setattr(files.os, "statvfs", lambda _: full)
    with pytest.raises(
        EnvironmentFault, match=rf"{LAYOUT.total_bytes} bytes needed, {3 * status.f_frsize} free"
    ):
        exports(Memory(LAYOUT, 1), tmp_path, 1)
    assert list((tmp_path / "export").iterdir()) == []


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    class Failing(Memory):
        def read_piece(self, piece: Piece) -> memoryview:
            if piece.tensor_index == 4:
                raise RuntimeError("device lost")
            return super().read_piece(piece)

    with pytest.raises(RuntimeError, match="device lost"):
        exports(Failing(LAYOUT, 1), tmp_path, 1)
    assert list((tmp_path / "export").iterdir()) == []


def test_exports_of_older_generations_are_discarded(tmp_path: Path) -> None:
    assert discard_exports(tmp_path, 9) == 0
    for generation in (1, 2, 10):
        exports(Memory(LAYOUT, 1), tmp_path, 2, generation=generation)
    (tmp_path / "export" / ".g1.r5.0.123.0").write_bytes(b"torso")
    (tmp_path / "export" / "notes").write_bytes(b"x")
    assert discard_exports(tmp_path, 10) == 5
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == ["g10.r0.0", "g10.r1.0", "notes"]


@given(
    st.recursive(
        st.one_of(st.none(), st.integers(), st.text(max_size=5), st.booleans()),
        lambda inner: st.lists(inner, max_size=10),
        max_leaves=30,
    )
)
def test_malformed_manifests_are_refused(wire: object) -> None:
    with pytest.raises(ProtocolError):
        ExportManifest.from_wire(wire)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, "relative"),
        (0, 3),
        (1, -1),
        (2, True),
        (4, None),
        (5, [[0, 0, 1]]),
        (5, {}),
        (6, 0),
        (6, 1 << 40),
        (7, []),
        (7, [-1] * 86),
        (8, 0),
        (9, -1),
        (9, None),
    ],
)
def test_a_manifest_with_one_wrong_field_is_refused(tmp_path: Path, index: int, value: object) -> None:
    (manifest,) = exports(Memory(LAYOUT, 1), tmp_path, 1)
    wire = manifest.to_wire()
    assert ExportManifest.from_wire(wire) == manifest
    wire[index] = value
    with pytest.raises(ProtocolError):
        ExportManifest.from_wire(wire)
