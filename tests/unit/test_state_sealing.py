"""The sealer: a thread that seals while the step computes, a gate that helps it, and a stop that is heard at once."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashrec.errors import EnvironmentFault, UsageError
from flashrec.state import arena_writer, files, sealing
from flashrec.state.arena import Arena, SealedVersion
from flashrec.state.layout import Piece, RankLayout
from flashrec.state.manifest import CHUNK_BYTES
from flashrec.state.sealing import Sealer, SealReport, SealStopped, SealStuck
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
    tensors,
    versions,
)

WAIT_S = 60
# Six chunks in one replica set.
LARGE = rank_layout([6 * CHUNK_BYTES - 100])
THREAD = "flashrec-seal"


class Scripted(Tensors):
    """Tells which thread reads, and does something before each read."""

    def __init__(self, layout: RankLayout, version: int, act: Callable[[int], None] = lambda _: None) -> None:
        super().__init__(layout.sets[0].layout, version)
        self.readers: list[str] = []
        self._act = act

    def read_piece(self, piece: Piece) -> memoryview:
        self.readers.append(threading.current_thread().name)
        self._act(len(self.readers))
        return super().read_piece(piece)


def on_thread() -> bool:
    return threading.current_thread().name == THREAD


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def arena(directory: Path) -> Arena:
    return Arena(directory, RANK, JOB)


@pytest.fixture
def sealer(directory: Path) -> Iterator[Sealer]:
    sealer = Sealer(directory, RANK, JOB)
    yield sealer
    sealer.close()


def begin(sealer: Sealer, version: int, layout: RankLayout = SMALL, generation: int = 1) -> None:
    sealer.begin(version, generation, layout, tensors(layout, version), lambda: blob_of(version))


def test_versions_one_after_another(sealer: Sealer, arena: Arena, directory: Path) -> None:
    assert sealer.newest() is None
    for version in range(6):
        layout = SMALL if version == 0 else GROWN
        begin(sealer, version, layout)
        report = sealer.finish()
        assert (report.version, sealer.newest()) == (version, version)
        assert report.copied_bytes + report.unchanged_bytes == layout.owned_bytes
        assert report.waited_s >= 0
        assert versions(arena) == list(range(max(0, version - 1), version + 1))
        check(arena)
    assert os.listdir(directory) == ["r3.1"]


def test_what_did_not_change_is_not_copied(sealer: Sealer, arena: Arena) -> None:
    for version in range(4):
        sealer.begin(version, 1, LARGE, [Scripted(LARGE, 7)], lambda: b"same")
        report = sealer.finish()
        expected = (LARGE.owned_bytes, 0) if version < 2 else (0, LARGE.owned_bytes)
        assert (report.copied_bytes, report.unchanged_bytes) == expected
    assert arena.read(3).blob == b"same"


def test_the_thread_needs_no_gate_and_yields_to_everything(sealer: Sealer, arena: Arena) -> None:
    """It has a low priority, and all is read and sealed by it if the step takes long enough."""
    priorities = set()
    last_read = threading.Event()
    threads = []

    def look(count: int) -> None:
        priorities.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if count == 6:
            last_read.set()

    def blob() -> bytes:
        threads.append(threading.current_thread().name)
        return b"blob"

    reader = Scripted(LARGE, 0, look)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    sealer.begin(0, 1, LARGE, [reader], blob)
    assert last_read.wait(WAIT_S)
    sealer.finish()
    assert reader.readers == [THREAD] * 6
    assert threads == [THREAD]
    assert priorities == {min(19, before + 15)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    check(arena, [0], blob=b"blob")


def test_the_gate_takes_what_is_left(sealer: Sealer, arena: Arena) -> None:
    """While the thread is at its first chunk, for as long as the gate needs for all others."""
    begun, released = threading.Event(), threading.Event()

    def act(_: int) -> None:
        if on_thread():
            begun.set()
            assert released.wait(WAIT_S)
        elif reader.readers.count("MainThread") == 5:
            released.set()

    reader = Scripted(LARGE, 0, act)
    sealer.begin(0, 1, LARGE, [reader], lambda: b"")
    assert begun.wait(WAIT_S)
    report = sealer.finish()
    assert sorted(reader.readers) == ["MainThread"] * 5 + [THREAD]
    assert report.copied_bytes == LARGE.owned_bytes
    check(arena, [0], blob=b"")


def may_take_niceness_back() -> bool:
    found = []

    def attempt() -> None:
        thread = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, thread)
        try:
            os.setpriority(os.PRIO_PROCESS, thread, before + 1)
            os.setpriority(os.PRIO_PROCESS, thread, before)
        except OSError:
            return
        found.append(before)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(found)


def test_a_gate_that_waits_for_the_thread_lends_it_its_priority(sealer: Sealer) -> None:
    """Else, where all cores are busy, it would wait for as long as everybody lets the thread wait."""
    if not may_take_niceness_back():
        pytest.skip("this process may not take niceness back")
    normal = os.getpriority(os.PRIO_PROCESS, 0)
    begun, found = threading.Event(), []

    def act(_: int) -> None:
        if on_thread():
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            begun.set()
            deadline = time.monotonic() + WAIT_S
            while found[-1] != normal and time.monotonic() < deadline:
                threading.Event().wait(0.001)
                found[-1] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    one_chunk = rank_layout([1000])
    for version in range(2):
        begun.clear()
        sealer.begin(version, 1, one_chunk, [Scripted(one_chunk, version, act)], lambda: b"")
        assert begun.wait(WAIT_S)
        sealer.finish()
    assert found == [normal, normal]


def stopping(sealer: Sealer) -> threading.Thread:
    """A thread that stops the sealer, and has said so when this returns."""
    thread = threading.Thread(target=sealer.stop)
    thread.start()
    while sealer._task is not None:
        threading.Event().wait(0.001)
    return thread


def test_stop_ends_it_after_one_chunk(sealer: Sealer, arena: Arena) -> None:
    begun, released = threading.Event(), threading.Event()

    def act(_: int) -> None:
        begun.set()
        assert released.wait(WAIT_S)

    reader = Scripted(LARGE, 0, act)
    sealer.begin(0, 1, LARGE, [reader], lambda: b"")
    assert begun.wait(WAIT_S)
    stop = stopping(sealer)
    assert stop.is_alive(), "it waits for the chunk that is under way"
    released.set()
    stop.join(WAIT_S)
    assert not stop.is_alive()
    assert reader.readers == [THREAD]
    assert (sealer.newest(), versions(arena)) == (None, [])
    with pytest.raises(UsageError, match="begin"):
        sealer.finish()
    begin(sealer, 0)
    sealer.finish()
    check(arena, [0])
    assert reader.readers == [THREAD], "the tensors of what was given up are not read again"


def test_stop_from_another_thread_ends_a_finish(sealer: Sealer, arena: Arena) -> None:
    """The sealing thread waits in its first chunk until the main thread has been stopped in its own."""
    begun, released = threading.Event(), threading.Event()
    stops = []

    def act(_: int) -> None:
        if on_thread():
            begun.set()
            assert released.wait(WAIT_S)
        else:
            stops.append(stopping(sealer))
            released.set()

    reader = Scripted(LARGE, 4, act)
    sealer.begin(4, 1, LARGE, [reader], lambda: b"")
    assert begun.wait(WAIT_S)
    with pytest.raises(SealStopped, match="version 4"):
        sealer.finish()
    for stop in stops:
        stop.join(WAIT_S)
    assert sorted(reader.readers) == ["MainThread", THREAD]
    assert versions(arena) == []


def test_nothing_is_done_for_a_version_that_is_sealed(sealer: Sealer, arena: Arena) -> None:
    begin(sealer, 3, generation=1)
    sealer.finish()
    reader = Scripted(LARGE, 3)
    sealer.begin(3, 2, LARGE, [reader], lambda: pytest.fail("the blob was made again"))
    report = sealer.finish()
    assert report == SealReport(3, 0, 0, report.waited_s)
    assert reader.readers == []
    assert arena.sealed() == [SealedVersion(3, 1)]
    check(arena)


def test_a_version_that_is_not_finished_is_given_up_for_the_next(sealer: Sealer, arena: Arena) -> None:
    begun, released = threading.Event(), threading.Event()

    def act(_: int) -> None:
        begun.set()
        assert released.wait(WAIT_S)

    given_up = Scripted(LARGE, 5, act)
    sealer.begin(5, 1, LARGE, [given_up], lambda: b"five")
    assert begun.wait(WAIT_S)
    sealer.begin(6, 1, LARGE, [Scripted(LARGE, 6)], lambda: b"six")
    released.set()
    assert sealer.finish().version == 6
    assert given_up.readers == [THREAD]
    assert versions(arena) == [6]
    check(arena, blob=b"six")


@pytest.mark.parametrize("failing", ["reader on the thread", "reader at the gate", "blob"])
def test_what_goes_wrong_comes_out_of_finish(sealer: Sealer, arena: Arena, failing: str) -> None:
    begin(sealer, 1, LARGE)
    sealer.finish()
    begun, released = threading.Event(), threading.Event()

    def act(_: int) -> None:
        begun.set()
        if failing == "reader at the gate":
            if on_thread():
                assert released.wait(WAIT_S)
                return
            released.set()
        raise RuntimeError("device lost")

    def blob() -> bytes:
        if failing == "blob":
            begun.set()
            raise RuntimeError("device lost")
        return b""

    sealer.begin(2, 1, LARGE, [Scripted(LARGE, 2, act)], blob)
    assert begun.wait(WAIT_S)
    with pytest.raises(RuntimeError, match="device lost"):
        sealer.finish()
    with pytest.raises(UsageError, match="begin"):
        sealer.finish()
    assert versions(arena) == [1]
    check(arena)
    begin(sealer, 2, LARGE)
    sealer.finish()
    assert versions(arena) == [1, 2]
    check(arena)


def test_no_room_comes_out_of_finish(
    sealer: Sealer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((*os.statvfs(directory)[:3], 3, 3, *os.statvfs(directory)[5:]))
    monkeypatch.setattr(files.os, "statvfs", lambda _: full)
    begin(sealer, 0)
    with pytest.raises(EnvironmentFault, match="bytes needed"):
        sealer.finish()
    assert os.listdir(directory) == []


@pytest.mark.parametrize("ending", ["stop", "begin"])
def test_memory_for_what_is_given_up_is_not_had(
    sealer: Sealer, directory: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    begun, released = threading.Event(), threading.Event()
    slices = 0

    def fallocate(fd: int, offset: int, size_bytes: int) -> None:
        nonlocal slices
        slices += 1
        begun.set()
        assert released.wait(WAIT_S)
        os.truncate(fd, offset + size_bytes)

    monkeypatch.setattr(arena_writer.os, "posix_fallocate", fallocate)
    layout = rank_layout([100 << 20])
    sealer.begin(0, 1, layout, [Scripted(SMALL, 0)], lambda: b"")
    assert begun.wait(WAIT_S)
    if ending == "stop":
        stop = stopping(sealer)
        released.set()
        stop.join(WAIT_S)
        assert (slices, os.listdir(directory)) == (1, [])
    else:
        begin(sealer, 1)
        released.set()
        sealer.finish()
        assert (slices, sealer.newest()) == (2, 1)
        assert len(os.listdir(directory)) == 1


def test_a_generation_that_is_over_may_not_seal(sealer: Sealer) -> None:
    begin(sealer, 1, generation=3)
    sealer.finish()
    begin(sealer, 2, generation=2)
    with pytest.raises(UsageError, match="replaced"):
        sealer.finish()


def test_discard_above_gives_up_what_is_under_way(sealer: Sealer, arena: Arena) -> None:
    for version in (4, 5):
        begin(sealer, version)
        sealer.finish()
    begin(sealer, 6)
    sealer.discard_above(4)
    assert (sealer.newest(), versions(arena)) == (4, [4])
    begin(sealer, 5, generation=2)
    sealer.finish()
    assert arena.sealed() == [SealedVersion(4, 1), SealedVersion(5, 2)]
    check(arena)


def test_finish_without_begin_is_refused(sealer: Sealer) -> None:
    with pytest.raises(UsageError, match="begin"):
        sealer.finish()


def test_a_replacement_takes_over(directory: Path, arena: Arena) -> None:
    dead = arena_writer.ArenaWriter(directory, RANK, JOB)
    for version in (1, 2):
        seal(dead, version)
    dead.open_slot(3, 1, SMALL, 0).put(0, tensors(SMALL, 3))
    (directory / ".r3.7.99").write_bytes(b"torso")
    sealer = Sealer(directory, RANK, JOB)
    assert sealer.newest() == 2
    for version in (2, 3):
        begin(sealer, version, generation=2)
        sealer.finish()
    assert arena.sealed() == [SealedVersion(2, 1), SealedVersion(3, 2)]
    check(arena)
    assert os.listdir(directory) == ["r3.0"]
    sealer.close()


def test_close_leaves_no_thread_and_keeps_the_files(directory: Path, arena: Arena) -> None:
    sealer = Sealer(directory, RANK, JOB)
    begin(sealer, 0)
    sealer.finish()
    begin(sealer, 1)
    sealer.close()
    sealer.close()
    assert all(thread.name != THREAD for thread in threading.enumerate())
    assert str(directory) not in Path("/proc/self/maps").read_text()
    assert 0 in versions(arena)
    check(arena)


def test_the_tensors_are_let_go_of_when_a_version_is_done(sealer: Sealer) -> None:
    """A rank that is short of memory must not hold those of a step that is over."""

    class Watched(Tensors):
        def __del__(self) -> None:
            gone.set()

    gone = threading.Event()
    sealer.begin(0, 1, LARGE, [Watched(LARGE.sets[0].layout, 0)], lambda: b"")
    sealer.finish()
    assert gone.wait(WAIT_S)


@pytest.mark.parametrize("wait", [Sealer.finish, Sealer.stop])
def test_a_thread_that_does_not_come_back_is_not_waited_for_without_end(
    sealer: Sealer, monkeypatch: pytest.MonkeyPatch, wait: Callable[[Sealer], object]
) -> None:
    reads, may_go_on = threading.Event(), threading.Event()

    def stick(_: int) -> None:
        if on_thread():
            reads.set()
            may_go_on.wait(WAIT_S)

    monkeypatch.setattr(sealing, "STUCK_S", 0.01)
    sealer.begin(0, 1, LARGE, [Scripted(LARGE, 0, stick)], lambda: b"")
    assert reads.wait(WAIT_S)
    try:
        with pytest.raises(SealStuck, match="has not ended a unit of its work"):
            wait(sealer)
    finally:
        may_go_on.set()
    monkeypatch.setattr(sealing, "STUCK_S", WAIT_S)
    sealer.stop()
