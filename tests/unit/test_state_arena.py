"""The arena: whenever its writer dies, what is sealed is whole, and what the job may have to go back to is there."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.errors import EnvironmentFault, IntegrityError, UsageError
from flashrec.state import arena_format, arena_writer, files
from flashrec.state.arena import Arena, SealedVersion
from flashrec.state.arena_format import EMPTY, SEALED, WRITING, Cut, FileHeader
from flashrec.state.arena_writer import ArenaWriter, Bytes, GivenUp, Stores, Words
from flashrec.state.layout import Piece
from flashrec.state.manifest import MAX_CHUNK_BYTES, Source
from flashrec.state.pull import Puller, PullIncomplete
from tests.arenas import (
    GROWN,
    JOB,
    RANK,
    SMALL,
    Tensors,
    blob_of,
    check,
    rank_layout,
    seal,
    stream,
    tensors,
    used_bytes,
    versions,
)
from tests.crashing import in_crashing_child

CHUNK = 4096


def writer_in(directory: Path, stores: Stores | None = None, job: str = JOB, rank: int = RANK) -> ArenaWriter:
    return ArenaWriter(directory, rank, job, chunk_bytes=CHUNK, stores=stores)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def arena(directory: Path) -> Arena:
    return Arena(directory, RANK, JOB)


@pytest.fixture
def writer(directory: Path) -> ArenaWriter:
    return writer_in(directory)


# --- what is sealed -----------------------------------------------------------------------------------------


def test_two_versions_are_kept_and_are_what_was_sealed(
    directory: Path, arena: Arena, writer: ArenaWriter
) -> None:
    assert arena.sealed() == []
    assert writer.newest() is None
    for version in range(6):
        seal(writer, version)
        assert versions(arena) == list(range(max(0, version - 1), version + 1))
        assert writer.newest() == version
        assert writer.newest(below=version) == (version - 1 if version else None)
        check(arena)
    assert arena.problems() == []
    assert names(directory) == ["r3.0"]
    assert oct(os.stat(directory / "r3.0").st_mode & 0o777) == "0o600"
    assert oct(os.stat(directory).st_mode & 0o777) == "0o700"


def test_what_a_version_is_made_of(arena: Arena, writer: ArenaWriter) -> None:
    seal(writer, 7, generation=2)
    state = arena.read(7)
    assert state.sealed == SealedVersion(7, 2)
    assert state.layout == SMALL
    shared, unique = state.manifests
    assert (unique.size_bytes, shared.size_bytes) == (14_011, SMALL.owned_bytes - 14_011)
    assert {manifest.generation for manifest in state.manifests} == {2}
    assert {manifest.version for manifest in state.manifests} == {7}
    assert unique.is_sealed
    assert unique.name == "arena/r3.0"
    assert unique.offset % 4096 == shared.offset % 4096 == 0
    assert len(unique.checksums) == 4


def test_a_rank_without_tensors_seals_its_blob(arena: Arena, writer: ArenaWriter) -> None:
    for version, blob in enumerate((b"", b"x", b"y" * 100_000)):
        assert seal(writer, version, layout=rank_layout([]), blob=blob) == (0, 0)
        assert arena.read(version).blob == blob
        assert arena.read(version).manifests == ()


def test_ranks_do_not_see_each_other(directory: Path, writer: ArenaWriter) -> None:
    seal(writer, 1)
    for other in (0, 33, 13):
        assert Arena(directory, other, JOB).sealed() == []
        assert Arena(directory, other, JOB).problems() == []


def test_no_directory_is_nothing_sealed(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "none", RANK, JOB)
    assert (arena.sealed(), arena.problems()) == ([], [])
    arena.discard_above(0)
    with pytest.raises(IntegrityError, match="rank 3 has no sealed version 4"):
        arena.read(4)


def test_chunks_that_are_there_already_are_not_copied_again(writer: ArenaWriter) -> None:
    """All but the odd tensors are frozen, and chunks of 4 KiB with a byte of an odd one change."""
    owned = SMALL.owned_bytes
    assert seal(writer, 0) == (owned, 0)
    assert seal(writer, 1) == (owned, 0), "nothing is known of the other slot"
    copied, unchanged = seal(writer, 2)
    assert copied + unchanged == owned
    assert 0 < unchanged < owned
    same = tensors(SMALL, 1)
    for version in range(3, 8):
        slot = writer.open_slot(version, 1, SMALL, 0)
        copied = sum(slot.put(index, same)[0] for index in range(slot.num_chunks))
        slot.seal(b"")
        assert copied <= owned - unchanged, "never what is frozen"
    assert copied == 0, "nor what has not changed for a while"


@pytest.mark.parametrize("compared_first", [False, True])
def test_bytes_that_change_while_they_are_copied_are_not_taken_for_whole(
    arena: Arena, directory: Path, compared_first: bool
) -> None:
    live = tensors(SMALL, 5)

    class Late(Stores):
        is_armed = False

        def copy(self, place: Bytes, data: Bytes) -> None:
            super().copy(place, data)
            if self.is_armed:  # the copy has the old byte
                live[1].data[1][100] = (live[1].data[1][100] + 1) % 256

    stores = Late()
    writer = writer_in(directory, stores)
    if compared_first:
        for version in (1, 2, 3):
            seal(writer, version)
    stores.is_armed = True
    slot = writer.open_slot(5, 1, SMALL, 0)
    for index in range(slot.num_chunks):
        slot.put(index, live)
    slot.seal(b"")
    with pytest.raises(IntegrityError, match="chunk 0 of version 5 is damaged"):
        check(arena, [5], blob=b"")


def test_a_chunk_that_changed_is_copied_before_it_is_compared_and_one_that_did_not_is_not(
    writer: ArenaWriter,
) -> None:
    """A slot holds what it got two versions ago; the first time there is nothing to compare with. Some chunks are
    frozen."""
    copied = []
    for version, seed in enumerate([0, 1, 2, 3, 4, 4, 4, 4, 4, 5, 5]):
        live = tensors(SMALL, seed)
        slot = writer.open_slot(version, 1, SMALL, 0)
        copied.append(sum(slot.put(index, live)[0] for index in range(slot.num_chunks)))
        slot.seal(b"")
    whole, moving = SMALL.owned_bytes, copied[2]
    assert 0 < moving < whole
    assert copied == [whole] * 2 + [moving] * 5 + [0, 0] + [moving] * 2


def test_a_version_is_not_sealed_before_all_chunks_are_there(writer: ArenaWriter) -> None:
    slot = writer.open_slot(0, 1, SMALL, 0)
    for index in range(slot.num_chunks - 1):
        slot.put(index, tensors(SMALL, 0))
    with pytest.raises(AssertionError, match="chunks"):
        slot.seal(b"")
    assert writer.newest() is None


def test_a_reader_that_gives_too_little_is_refused(writer: ArenaWriter) -> None:
    class Short(Tensors):
        def read_piece(self, piece: Piece) -> memoryview:
            return super().read_piece(piece)[:1]  # which numpy would spread over the whole place

    slot = writer.open_slot(0, 1, SMALL, 0)
    with pytest.raises(ValueError, match="too few"):
        slot.put(0, [Short(one.layout, 0) for one in SMALL.sets])


# --- other tensors, other blobs
# -------------------------------------------------------------------------------


def test_a_new_layout_gets_a_file_and_the_old_one_goes_when_it_is_not_needed(
    directory: Path, arena: Arena, writer: ArenaWriter
) -> None:
    seal(writer, 0)
    slot = writer.open_slot(1, 1, GROWN, 400)
    check(arena, [0])
    for index in range(slot.num_chunks):
        slot.put(index, tensors(GROWN, 1))
    slot.seal(blob_of(1))
    assert names(directory) == ["r3.0", "r3.1"]
    assert versions(arena) == [0, 1], "both can be gone back to, whatever file they are in"
    check(arena)
    assert arena.read(0).layout == SMALL
    assert arena.read(1).layout == GROWN
    # Version 2 begins when every rank has passed the gate of 1: nobody goes back to 0.
    seal(writer, 2, layout=GROWN)
    assert names(directory) == ["r3.1"]
    assert versions(arena) == [1, 2]
    check(arena)


def test_layouts_that_alternate(directory: Path, arena: Arena, writer: ArenaWriter) -> None:
    for version in range(9):
        seal(writer, version, layout=(SMALL, GROWN)[version % 2])
        assert versions(arena)[-2:] == list(range(max(0, version - 1), version + 1))
        check(arena)
        assert len(names(directory)) <= 2


def test_a_blob_may_grow_a_little_in_place_and_then_gets_a_new_file(
    directory: Path, arena: Arena, writer: ArenaWriter
) -> None:
    for version, size_bytes in enumerate((100, 120, 130, 50_000, 50_100, 3)):
        blob = bytes([version]) * size_bytes
        seal(writer, version, blob=blob)
        check(arena, [version], blob=blob)
        for older in versions(arena):
            assert set(arena.read(older).blob) == {older}
    assert names(directory) == ["r3.1"]


def test_memory_is_had_at_once_and_at_most_five_percent_above_two_versions(
    directory: Path, writer: ArenaWriter
) -> None:
    layout = rank_layout([3_000_000, 17, 5_000_001], [4_000_000, 100])
    blob = b"c" * 200_000
    wanted = 2 * (layout.owned_bytes + len(blob))
    for version in range(3):
        if version == 0:
            writer.open_slot(0, 1, layout, len(blob))
            assert wanted <= used_bytes(directory), "before a byte is written"
        seal(writer, version, layout=layout, blob=blob)
        assert wanted <= used_bytes(directory) <= 1.05 * wanted
    # And again when optimizer state has come.
    grown = rank_layout([3_000_000, 17, 5_000_001, 6_000_000], [4_000_000, 100])
    wanted = 2 * (grown.owned_bytes + len(blob))
    for version in range(3, 5):
        seal(writer, version, layout=grown, blob=blob)
    assert wanted <= used_bytes(directory) <= 1.05 * wanted


# --- a writer that dies -------------------------------------------------------------------------------------


class Died(BaseException):
    """The writer's process, at some store."""


class Dying(Stores):
    """Dies at the n-th store; of a copy, the first half may have been made."""

    def __init__(self, survive: int) -> None:
        self.survive = survive
        self.count = 0

    def word(self, words: Words, index: int, value: int) -> None:
        self._go_on()
        super().word(words, index, value)

    def copy(self, place: Bytes, data: Bytes) -> None:
        try:
            self._go_on()
        except Died:
            super().copy(place[: len(data) // 2], data[: len(data) // 2])
            raise
        super().copy(place, data)

    def _go_on(self) -> None:
        if self.count >= self.survive:
            raise Died
        self.count += 1


# Optimizer state appears at 1, and a blob outgrows its room at 4.
STORY = [(0, SMALL), (1, GROWN), (2, GROWN), (3, GROWN), (4, GROWN), (5, GROWN)]


def live_through(
    writer: ArenaWriter, done: list[int], generation: int, story: Sequence[tuple[int, object]]
) -> None:
    for version, layout in story:
        blob = blob_of(version) if version < 4 else blob_of(version) * 100
        seal(writer, version, generation, layout, blob)  # type: ignore[arg-type]
        done.append(version)


def check_story(arena: Arena) -> None:
    for version in versions(arena):
        check(arena, [version], blob=blob_of(version) if version < 4 else blob_of(version) * 100)


def test_a_writer_that_dies_at_any_store(tmp_path: Path) -> None:
    counting = Dying(1 << 60)
    live_through(writer_in(tmp_path / "all", counting), [], 1, STORY)
    assert counting.count > 100
    outcomes = set()
    for survive in range(counting.count):
        directory = tmp_path / str(survive)
        done: list[int] = []
        with pytest.raises(Died):
            live_through(writer_in(directory, Dying(survive)), done, 1, STORY)
        arena = Arena(directory, RANK, JOB)
        seen = versions(arena)
        assert arena.problems() == []
        assert set(done[-1:]) <= set(seen) <= set(done[-2:]), "exactly what was sealed, and the newest of it"
        check_story(arena)
        outcomes.add(tuple(seen))

        # Its replacement goes on with the same files, and may die too.
        replacement = writer_in(directory, Dying(survive % 40))
        assert replacement.problems == []
        assert replacement.newest() == (seen[-1] if seen else None)
        story = STORY[seen[-1] + 1 :] if seen else STORY
        done = seen[-1:]
        try:
            live_through(replacement, done, 2, story)
        except Died:
            assert set(done[-1:]) <= set(versions(arena)), "the newest was never written over"
        check_story(arena)
        live_through(writer_in(directory), done, 3, STORY[done[-1] + 1 :] if done else STORY)
        assert versions(arena) == [4, 5]
        assert arena.problems() == []
        check_story(arena)
        assert len(names(directory)) <= 2
        shutil.rmtree(directory)
    # An old file is removed before the first store of the version that does not need it.
    assert outcomes >= {(), (0,), (1,), (1, 2), (2, 3), (4,)}


def test_readers_see_whole_versions_at_every_store(tmp_path: Path) -> None:
    """The daemon and other ranks look on while the writer is at it."""
    directory = tmp_path / "arena"
    arena = Arena(directory, RANK, JOB)
    done: list[int] = []
    looks = 0

    class Watched(Stores):
        def word(self, words: Words, index: int, value: int) -> None:
            super().word(words, index, value)
            self.look()

        def copy(self, place: Bytes, data: Bytes) -> None:
            super().copy(place[: len(data) // 2], data[: len(data) // 2])
            self.look()
            super().copy(place, data)

        def look(self) -> None:
            nonlocal looks
            looks += 1
            assert arena.problems() == []
            seen = versions(arena)
            assert set(done[-1:]) <= set(seen) <= {*done[-2:], len(done)}
            if looks % 3 == 0:
                check_story(arena)

    live_through(writer_in(directory, Watched()), done, 1, STORY)
    assert looks > 100


def test_what_a_dead_writer_had_copied_is_not_copied_again(directory: Path, arena: Arena) -> None:
    for version in range(2):
        seal(writer_in(directory), version)
    begun = writer_in(directory).open_slot(2, 1, SMALL, 0)
    for index in range(2):
        begun.put(index, tensors(SMALL, 2))
    assert versions(arena) == [1]
    slot = writer_in(directory).open_slot(2, 2, SMALL, 0)
    assert [slot.put(index, tensors(SMALL, 2))[0] for index in range(2)] == [0, 0]


def test_half_written_chunks_are_not_taken_for_what_they_were(tmp_path: Path) -> None:
    """Tensors may come back to values they had: what the table said of a chunk ends when its bytes do."""
    for survive in range(40):
        directory = tmp_path / str(survive)
        for version in range(3):
            seal(writer_in(directory), version)
        dying = writer_in(directory, Dying(survive))
        with contextlib.suppress(Died):
            seal(dying, 3)  # over version 1
        arena = Arena(directory, RANK, JOB)
        arena.discard_above(2)
        replacement = writer_in(directory)
        slot = replacement.open_slot(3, 2, SMALL, 0)
        for index in range(slot.num_chunks):
            slot.put(index, tensors(SMALL, 1))
        slot.seal(b"")
        for one, manifest, expected in zip(
            SMALL.sets, arena.read(3).manifests, tensors(SMALL, 1), strict=True
        ):
            assert stream(manifest) == b"".join(expected.read_piece(piece) for piece in one.part(RANK))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_writer_that_dies_at_any_system_call(tmp_path: Path, after: bool) -> None:
    """While it takes over, makes a new file and removes the old one."""
    calls = 0
    seen_after_crash = set()
    while True:
        directory = tmp_path / str(calls)
        seal(writer_in(directory), 0)
        arena = Arena(directory, RANK, JOB)

        def act(directory: Path = directory) -> None:
            writer = writer_in(directory)
            for version in (1, 2):
                seal(writer, version, layout=GROWN)

        crashed = in_crashing_child((arena_writer, arena_format, files), calls, after=after, act=act)
        seen = versions(arena)
        assert seen in ([0], [0, 1], [1], [1, 2])
        assert arena.problems() == []
        check(arena)
        seen_after_crash.add(tuple(seen))
        replacement = writer_in(directory)
        for version in range(seen[-1] + 1, 4):
            seal(replacement, version, 2, layout=GROWN)
        assert versions(arena) == [2, 3]
        check(arena)
        assert len(names(directory)) == 1, "nothing of the torso stays"
        if not crashed:
            break
        calls += 1
    assert calls >= 8, "the fault never fired"
    assert {(0,), (1,) if after else (0, 1), (1, 2)} <= seen_after_crash


# --- generations and going back -----------------------------------------------------------------------------


def test_discard_above_lets_go_of_newer_versions(arena: Arena, writer: ArenaWriter) -> None:
    seal(writer, 5, 1)
    seal(writer, 6, 1)
    arena.discard_above(6)
    assert versions(arena) == [5, 6]
    arena.discard_above(5)
    assert versions(arena) == [5]
    assert writer.newest() == 5, "the writer sees it too"
    seal(writer, 6, 2)
    assert arena.sealed() == [SealedVersion(5, 1), SealedVersion(6, 2)]
    check(arena)


def test_nothing_of_a_discarded_version_is_relied_on(
    directory: Path, arena: Arena, writer: ArenaWriter
) -> None:
    """It may have been discarded because it was damaged: then the same bytes have to be copied again."""
    seal(writer, 5)
    path = Path(arena.read(5).manifests[0].path)
    flip(path, arena.read(5).manifests[0].offset)
    arena.discard_above(4)
    assert seal(writer, 5, 2) == (SMALL.owned_bytes, 0)
    check(arena, [5])


def test_what_is_above_the_version_that_begins_was_lost(arena: Arena, writer: ArenaWriter) -> None:
    seal(writer, 4, 1)
    seal(writer, 6, 1)
    seal(writer, 5, 2)
    assert arena.sealed() == [SealedVersion(4, 1), SealedVersion(5, 2)]
    check(arena)


def test_an_older_generation_may_not_seal(directory: Path, arena: Arena, writer: ArenaWriter) -> None:
    seal(writer, 5, 2)
    with pytest.raises(UsageError, match=r"rank 3 .*version 6 in generation 1.*replaced"):
        writer.open_slot(6, 1, SMALL, 0)
    assert arena.sealed() == [SealedVersion(5, 2)]


@given(
    st.lists(
        st.tuples(st.sampled_from(["seal", "discard", "begin", "replace"]), st.integers(0, 5), st.booleans()),
        max_size=14,
    )
)
@settings(max_examples=40, deadline=None)
def test_any_history(tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int, bool]]) -> None:
    """Against a model: which versions may, and which must, be readable."""
    directory = tmp_path_factory.mktemp("history") / "arena"
    writer, arena = writer_in(directory), Arena(directory, RANK, JOB)
    may: set[int] = set()
    for act, version, grown in history:
        layout = GROWN if grown else SMALL
        must: set[int] = set()
        if act == "replace":
            writer = writer_in(directory)
            must = may
        elif act == "discard":
            arena.discard_above(version)
            must = may = {one for one in may if one <= version}
        elif writer.holds(version):
            continue
        else:
            may = {one for one in may if one < version}
            must = set(sorted(may)[-1:])
            if act == "begin":
                writer.open_slot(version, 1, layout, 10).put(0, tensors(layout, version))
            else:
                seal(writer, version, layout=layout)
                may.add(version)
                must.add(version)
        seen = set(versions(arena))
        assert must <= seen <= may
        may = seen
        check(arena)
        assert writer.problems == arena.problems() == []


# --- damage -------------------------------------------------------------------------------------------------


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def sealed_file(directory: Path, writer: ArenaWriter) -> Path:
    for version in range(2):
        seal(writer, version)
    return directory / "r3.0"


FILE_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: os.truncate(path, 0), "truncated in its header"),
    "cut in the header": (lambda path: os.truncate(path, 4095), "truncated in its header"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), r"has \d+ bytes, not \d+"),
    "cut to its header": (lambda path: os.truncate(path, 4096), r"has 4096 bytes, not \d+"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 1), r"has \d+ bytes, not \d+"),
    "magic": (lambda path: flip(path, 0), "not in a form"),
    "format": (lambda path: flip(path, 8), "not in a form"),
    "size of the header": (lambda path: flip(path, 12), "header is damaged"),
    "checksum of the header": (lambda path: flip(path, 16), "header is damaged"),
    "header": (lambda path: flip(path, 40), "header is damaged"),
    "layout": (lambda path: flip(path, 4096 + 20), "layout is damaged"),
    "noise": (lambda path: path.write_bytes(os.urandom(path.stat().st_size)), "not in a form"),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "not in a form"),
    "directory": (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
    "link": (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), "not a regular file"),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file"),
}


@pytest.mark.parametrize("damage", FILE_DAMAGE)
def test_a_file_that_is_not_right_is_left_out_with_its_reason(
    directory: Path, arena: Arena, sealed_file: Path, damage: str
) -> None:
    act, reason = FILE_DAMAGE[damage]
    act(sealed_file)
    assert arena.sealed() == []
    (problem,) = arena.problems()
    assert problem.startswith(f"{sealed_file}: ")
    with pytest.raises(IntegrityError, match=reason) as caught:
        arena.read(1)
    assert str(sealed_file) in str(caught.value)
    arena.discard_above(0)
    # A replacement does not stumble over it either.
    replacement = writer_in(directory)
    assert len(replacement.problems) == 1
    seal(replacement, 1, 2)
    seal(replacement, 2, 2)
    assert versions(arena) == [1, 2]
    check(arena)
    assert "r3.1" in names(directory), "a name is not used again"


@pytest.mark.parametrize(("job", "rank", "reason"), [("job-b", 3, "job 'job-b'"), (JOB, 4, "rank 4")])
def test_a_file_of_another_job_or_rank_is_left_out(
    tmp_path: Path, directory: Path, arena: Arena, job: str, rank: int, reason: str
) -> None:
    other = writer_in(tmp_path / "other", job=job, rank=rank)
    layout = rank_layout([100]) if rank == RANK else rank_layout([])
    if rank != RANK:
        layout = type(layout)(rank, ())
    slot = other.open_slot(1, 1, layout, 0)
    for index in range(slot.num_chunks):
        slot.put(index, tensors(layout, 1))
    slot.seal(b"")
    directory.mkdir()
    (tmp_path / "other" / f"r{rank}.0").rename(directory / "r3.0")
    assert arena.sealed() == []
    assert reason in arena.problems()[0]
    with pytest.raises(IntegrityError, match=reason):
        arena.read(1)


def test_stray_files_are_ignored(directory: Path, arena: Arena, sealed_file: Path) -> None:
    for name in ("r3", "r3.", "r3.x", "r33.0", "notes", ".r3.9.77", "r3.0.bak", "r03.1x"):
        (directory / name).write_bytes(b"x")
    assert versions(arena) == [0, 1]
    assert arena.problems() == []


def header_of(path: Path) -> FileHeader:
    return FileHeader.from_page(path.read_bytes()[:4096])


SLOT_DAMAGE = {
    "state": (0, "state"),
    "version": (8, "damaged header"),
    "generation": (16, "damaged header"),
    "blob size": (24, "damaged header"),
    "blob checksum": (32, "damaged header"),
    "table checksum": (40, "damaged header"),
    "header checksum": (48, "damaged header"),
    "table": (64, "damaged table"),
    "blob": (4096, "damaged blob"),
}


@pytest.mark.parametrize("damage", SLOT_DAMAGE)
@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_that_is_not_right_is_left_out_and_the_other_stays(
    directory: Path, arena: Arena, sealed_file: Path, damage: str, slot: int
) -> None:
    offset, reason = SLOT_DAMAGE[damage]
    flip(sealed_file, header_of(sealed_file).slot_offset(slot) + offset)
    assert versions(arena) == [1 - slot]
    check(arena)
    (problem,) = arena.problems()
    assert f"slot {slot} has" in problem
    assert reason in problem
    with pytest.raises(IntegrityError, match=reason):
        arena.read(slot)
    # A replacement writes there, and not over the good one.
    replacement = writer_in(directory)
    assert replacement.newest() == 1 - slot
    assert reason in replacement.problems[0]
    seal(replacement, 2, 2)
    assert versions(arena) == [1 - slot, 2]
    check(arena)
    assert arena.problems() == []


def test_a_blob_that_claims_more_than_its_room(arena: Arena, sealed_file: Path) -> None:
    """With a checksum that fits: the file was not damaged but made so."""
    header = header_of(sealed_file)
    data = bytearray(sealed_file.read_bytes())
    start = header.slot_offset(1)
    words = [int.from_bytes(data[start + 8 * i : start + 8 * i + 8], "little") for i in range(7)]
    words[3] = header.blob_room + 1
    words[6] = arena_format.checksum(arena_format.header_words(words))
    data[start : start + 56] = b"".join(word.to_bytes(8, "little") for word in words)
    sealed_file.write_bytes(data)
    assert versions(arena) == [0]
    assert "in a room of" in arena.problems()[0]


def test_a_flipped_bit_in_a_tensor_is_found_by_the_puller(directory: Path, arena: Arena) -> None:
    layout = rank_layout([30_000])
    writer = writer_in(directory)
    seal(writer, 4, layout=layout)
    (manifest,) = arena.read(4).manifests
    target = Tensors(layout.sets[0].layout, None)
    source = [[Source(manifest)]]

    def pull() -> None:
        Puller().pull(target, layout.sets[0].layout, source, version=4, generation=9, deadline_s=20)

    pull()
    assert target.data == Tensors(layout.sets[0].layout, 4).data
    flip(Path(manifest.path), manifest.offset + 5 * CHUNK + 7)
    target = Tensors(layout.sets[0].layout, None)
    with pytest.raises(PullIncomplete, match=f"bytes {manifest.offset + 5 * CHUNK} to"):
        pull()


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_no_damage_anywhere_makes_a_wrong_byte_pass(
    tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("damage") / "arena"
    writer = writer_in(directory)
    for version in range(3):
        seal(writer, version, layout=GROWN)
    path = directory / "r3.0"
    data = bytearray(path.read_bytes())
    starts = [0, 8, 4096, *(header_of(path).slot_offset(slot) for slot in range(2))]
    for _ in range(draw.draw(st.integers(1, 3))):
        place = draw.draw(st.one_of(st.integers(0, len(data) - 1), st.sampled_from(starts)))
        noise = draw.draw(st.one_of(st.binary(min_size=1, max_size=80), st.sampled_from([bytes(4096)])))
        data[place : place + len(noise)] = noise[: len(data) - place]
    path.write_bytes(data)
    arena = Arena(directory, RANK, JOB)
    for version in versions(arena):
        with contextlib.suppress(IntegrityError):
            check(arena, [version])
    replacement = writer_in(directory)
    for version in range(3, 6):
        seal(replacement, version, 2, layout=GROWN)
    assert versions(arena) == [4, 5]


@given(st.binary(max_size=5000))
@settings(max_examples=100)
def test_headers_of_noise_are_refused(page: bytes) -> None:
    with pytest.raises(IntegrityError):
        FileHeader.from_page(page)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job", 5),
        ("rank", -1),
        ("generation", 1.5),
        ("layout_digest", b"x"),
        ("chunk_bytes", 0),
        ("chunk_bytes", MAX_CHUNK_BYTES + 1),
        ("blob_room", 17),
        ("data_bytes", 4097),
        ("num_chunks", True),
    ],
)
def test_headers_with_a_field_that_cannot_be_are_refused(field: str, value: object) -> None:
    good = arena_format.header_for(JOB, 1, SMALL, Cut.of(SMALL, CHUNK), 100)
    assert FileHeader.from_page(good.to_page()) == good
    object.__setattr__(good, field, value)
    with pytest.raises(IntegrityError):
        FileHeader.from_page(good.to_page())


def test_the_states_are_far_apart() -> None:
    for one, other in ((EMPTY, WRITING), (WRITING, SEALED), (EMPTY, SEALED)):
        assert (one ^ other).bit_count() >= 8


def test_a_job_whose_name_does_not_fit_is_refused(tmp_path: Path) -> None:
    writer = writer_in(tmp_path / "arena", job="j" * 5000)
    with pytest.raises(UsageError, match="job's name"):
        writer.open_slot(0, 1, SMALL, 0)
    assert names(tmp_path / "arena") == []


# --- the machine says no ------------------------------------------------------------------------------------


def test_no_room_says_what_is_needed_and_what_is_free(
    directory: Path, arena: Arena, writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(writer, 0)
    status = os.statvfs(directory)
    full = os.statvfs_result((*status[:3], 3, 3, *status[5:]))
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "statvfs", lambda _: full)
        with pytest.raises(
            EnvironmentFault, match=rf"is full: 81920 bytes needed, {3 * status.f_frsize} free"
        ):
            seal(writer, 1, layout=GROWN)
    assert names(directory) == ["r3.0"]
    check(arena, [0])
    seal(writer, 1, layout=GROWN)
    assert versions(arena) == [0, 1]


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "rename"])
def test_a_call_that_fails_leaves_nothing_behind(
    directory: Path, arena: Arena, writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    seal(writer, 0)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(arena_writer.os, call, fail)
        with pytest.raises(EnvironmentFault, match="bytes needed"):
            seal(writer, 1, layout=GROWN)
    assert names(directory) == ["r3.0"]
    assert versions(arena) == [0]


def test_no_permission_is_an_environment_fault(
    directory: Path, arena: Arena, writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(writer, 0)

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(arena_writer.os, "open", refuse)
        with pytest.raises(EnvironmentFault, match="Permission denied"):
            seal(writer, 1, layout=GROWN)
        with pytest.raises(EnvironmentFault, match="Permission denied"):
            writer_in(directory)
        with pytest.raises(EnvironmentFault, match="Permission denied"):
            arena.discard_above(0)
        assert arena.sealed() == []
        assert "Permission denied" in arena.problems()[0]
    assert versions(arena) == [0]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentFault, match="file"):
        writer_in(tmp_path / "file")


def test_making_a_file_can_be_given_up(directory: Path, writer: ArenaWriter) -> None:
    asked = 0

    def is_given_up() -> bool:
        nonlocal asked
        asked += 1
        return asked > 2

    with pytest.raises(GivenUp):
        writer.open_slot(0, 1, rank_layout([40 << 20]), 0, is_given_up)
    assert asked == 3, "asked now and then while memory is had"
    assert names(directory) == []
