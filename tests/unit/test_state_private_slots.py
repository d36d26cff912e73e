"""The arena: whatever happens while a version is sealed, the older ones stay and the new one is whole or
unseen."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.errors import EnvironmentFault, IntegrityError, UsageError
from flashrec.state import private_slots as arena_module
from flashrec.state import files
from flashrec.state.private_slots import HEADER_BYTES, PrivateSlots

PAYLOADS = {version: bytes([version]) * (1000 + version) for version in range(10)}


def versions(arena: PrivateSlots) -> list[int]:
    return [slot.version for slot in arena.sealed()]


def names(arena: PrivateSlots) -> list[str]:
    return sorted(os.listdir(arena.directory))


@pytest.fixture
def arena(tmp_path: Path) -> PrivateSlots:
    return PrivateSlots(tmp_path / "private", 3)


def test_the_two_newest_versions_are_kept(arena: PrivateSlots) -> None:
    for version in range(5):
        arena.seal(version, 1, PAYLOADS[version])
        assert versions(arena) == list(range(max(0, version - 1), version + 1))
    assert arena.read(4) == PAYLOADS[4]
    assert arena.read(3) == PAYLOADS[3]
    assert [slot.size_bytes for slot in arena.sealed()] == [1003, 1004]
    assert names(arena) == ["r3.v3.g1", "r3.v4.g1"]
    assert oct(os.stat(arena.directory / "r3.v4.g1").st_mode & 0o777) == "0o600"


def test_ranks_do_not_touch_each_other(tmp_path: Path) -> None:
    one, eleven = PrivateSlots(tmp_path, 1), PrivateSlots(tmp_path, 11)
    for version in range(3):
        one.seal(version, 1, b"one")
        eleven.seal(version, 1, b"eleven")
    one.discard_above(0)
    assert versions(one) == []
    assert versions(eleven) == [1, 2]


def test_an_empty_payload_is_a_version(arena: PrivateSlots) -> None:
    arena.seal(0, 0, b"")
    assert versions(arena) == [0]
    assert arena.read(0) == b""


# --- a crash at every instruction
# ----------------------------------------------------------------------------


class CrashingOs:
    """`os`, but the process ends right before or right after the n-th call that changes anything."""

    CHANGING = ("open", "writev", "close", "rename", "unlink")

    def __init__(self, survive_calls: int, *, after: bool, write_at_most: int) -> None:
        self._left = survive_calls
        self._after = after
        self._write_at_most = write_at_most

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        if name not in self.CHANGING:
            return real

        def call(*args: object) -> object:
            if self._left == 0 and not self._after:
                os._exit(77)
            if name == "writev":
                fd, views = args
                args = (fd, [views[0][: self._write_at_most]])  # many short writes
            result = real(*args)
            if self._left == 0:
                os._exit(77)
            self._left -= 1
            return result

        return call


def in_crashing_child(survive_calls: int, *, after: bool, act: Callable[[], None]) -> bool:
    """Run `act` in a forked child that dies at the given system call; whether it died there (or got
    through)."""
    pid = os.fork()
    if pid == 0:
        try:
            crashing = CrashingOs(survive_calls, after=after, write_at_most=400)
            arena_module.os = files.os = crashing
            act()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 77), f"the child failed instead of crashing: {code}"
    return code == 77


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_system_call_leaves_whole_versions_only(tmp_path: Path, after: bool) -> None:
    visible_after_crash = set()
    calls = 0
    while True:
        arena = PrivateSlots(tmp_path / str(calls), 0)
        arena.seal(4, 1, PAYLOADS[4])
        arena.seal(5, 1, PAYLOADS[5])
        crashed = in_crashing_child(calls, after=after, act=lambda arena=arena: arena.seal(6, 1, PAYLOADS[6]))
        # Another process (the daemon, the replacement) looks at what is there.
        reader = PrivateSlots(tmp_path / str(calls), 0)
        seen = versions(reader)
        assert set(seen) >= {5}, "the version all ranks have must never be lost"
        assert {4, 5} <= set(seen) or {5, 6} <= set(seen), "two versions at all times"
        for version in seen:
            assert reader.read(version) == PAYLOADS[version]
        visible_after_crash.add(tuple(seen))
        # And the replacement goes on, in a new generation; nothing of the torso stays.
        reader.discard_above(5)
        reader.seal(6, 2, b"again")
        assert versions(reader) == [5, 6]
        assert reader.read(6) == b"again"
        assert len(names(reader)) == 2
        if not crashed:
            break
        calls += 1
    assert calls >= 6, "the fault never fired"
    assert {(4, 5), (5, 6)} <= visible_after_crash, "both outcomes must have occurred"


def test_a_torso_left_by_a_dead_writer_is_swept_by_the_next_seal(tmp_path: Path) -> None:
    arena = PrivateSlots(tmp_path, 0)
    assert in_crashing_child(2, after=True, act=lambda: arena.seal(0, 1, PAYLOADS[9]))
    assert any(name.startswith(".") for name in names(arena))
    assert versions(arena) == []
    PrivateSlots(tmp_path, 0).seal(0, 2, b"x")
    assert names(arena) == ["r0.v0.g2"]


# --- generations --------------------------------------------------------------------------------------------


def test_a_redone_version_takes_the_place_of_its_first_attempt(arena: PrivateSlots) -> None:
    arena.seal(5, 1, b"five")
    arena.seal(6, 1, b"first attempt")
    arena.seal(6, 2, b"second attempt")
    assert arena.read(6) == b"second attempt"
    assert names(arena) == ["r3.v5.g1", "r3.v6.g2"]


def test_an_older_generation_may_not_seal(arena: PrivateSlots) -> None:
    arena.seal(5, 2, b"new")
    with pytest.raises(UsageError, match=r"rank 3 .*version 6 in generation 1"):
        arena.seal(6, 1, b"stale")
    assert names(arena) == ["r3.v5.g2"]


def test_versions_above_the_resumed_one_are_fenced_even_if_not_discarded(arena: PrivateSlots) -> None:
    arena.seal(6, 1, b"six")
    arena.seal(7, 1, b"lost with its generation")
    arena.seal(6, 2, b"six again")
    assert versions(arena) == [6]
    assert arena.read(6) == b"six again"


def test_going_back_within_a_generation_is_refused(arena: PrivateSlots) -> None:
    arena.seal(6, 1, b"six")
    with pytest.raises(UsageError, match="later"):
        arena.seal(5, 1, b"five")


def test_sealing_the_same_again_needs_the_same_bytes(arena: PrivateSlots) -> None:
    arena.seal(6, 1, b"six")
    arena.seal(6, 1, b"six")
    with pytest.raises(UsageError, match="other bytes"):
        arena.seal(6, 1, b"SIX")
    assert arena.read(6) == b"six"


def test_discard_above_removes_every_generation(arena: PrivateSlots) -> None:
    arena.seal(5, 1, b"five")
    arena.seal(6, 1, b"six")
    assert [slot.version for slot in arena.discard_above(5)] == [6]
    assert versions(arena) == [5]
    assert arena.discard_above(5) == []


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), max_size=12))
@settings(max_examples=100)
def test_any_history_of_seals_and_discards(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, int, bool]]
) -> None:
    """Against a model: a dict of what must be readable."""
    arena = PrivateSlots(tmp_path_factory.mktemp("arena"), 0)
    model: dict[int, tuple[int, bytes]] = {}
    for number, (version, generation, discard) in enumerate(history):
        if discard:
            arena.discard_above(version)
            model = {v: slot for v, slot in model.items() if v <= version}
            continue
        payload = f"{number}".encode()
        try:
            arena.seal(version, generation, payload)
        except UsageError:
            continue
        model = {v: slot for v, slot in model.items() if v < version}
        model[version] = (generation, payload)
        model = dict(sorted(model.items())[-2:])
    assert [(slot.version, slot.generation) for slot in arena.sealed()] == [
        (version, generation) for version, (generation, _) in sorted(model.items())
    ]
    for version, (_, payload) in model.items():
        assert arena.read(version) == payload


# --- damage
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def sealed_file(arena: PrivateSlots) -> Path:
    arena.seal(7, 2, PAYLOADS[7])
    return arena.directory / "r3.v7.g2"


@pytest.mark.parametrize("position", [0, 9, 13, 20, 30, 40, 50, HEADER_BYTES, HEADER_BYTES + 500, -1])
def test_a_flipped_bit_is_found(arena: PrivateSlots, sealed_file: Path, position: int) -> None:
    data = bytearray(sealed_file.read_bytes())
    data[position] ^= 4
    sealed_file.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"version 7 \(generation 2\) of rank 3"):
        arena.read(7)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5])
def test_a_truncated_file_is_not_listed_and_not_read(arena: PrivateSlots, sealed_file: Path, length: int) -> None:
    os.truncate(sealed_file, length)
    assert arena.sealed() == []
    with pytest.raises(IntegrityError, match="truncated"):
        arena.read(7)


def test_a_file_under_another_name_is_found_out(arena: PrivateSlots, sealed_file: Path) -> None:
    os.rename(sealed_file, arena.directory / "r3.v8.g2")
    assert arena.sealed() == []
    with pytest.raises(IntegrityError, match="holds version 7"):
        arena.read(8)


def test_a_version_that_is_not_there(arena: PrivateSlots) -> None:
    with pytest.raises(IntegrityError, match="rank 3 has no sealed version 1"):
        arena.read(1)


def test_stray_files_are_ignored(arena: PrivateSlots, sealed_file: Path) -> None:
    for name in ("r3.v9", "r3.v9.g1.bak", "notes", "r3.vx.g1", ".r3.v9.g1.1.1"):
        (arena.directory / name).write_bytes(b"x")
    assert versions(arena) == [7]


# --- the machine says no
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
@pytest.mark.parametrize("first_write_takes", [0, 700])
def test_a_full_filesystem_is_an_environment_fault_and_loses_nothing(
    arena: PrivateSlots, monkeypatch: pytest.MonkeyPatch, code: int, first_write_takes: int
) -> None:
    arena.seal(4, 1, PAYLOADS[4])
    arena.seal(5, 1, PAYLOADS[5])
    takes = [first_write_takes]

    def writev(fd: int, views: list[memoryview]) -> int:
        if takes and takes[0]:
            return os.write(fd, b"".join(views)[: takes.pop()])
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "writev", writev)
        with pytest.raises(EnvironmentFault) as caught:
            arena.seal(6, 1, PAYLOADS[6])
    assert str(arena.directory) in str(caught.value)
    assert f"{1006 + HEADER_BYTES} bytes needed" in str(caught.value)
    assert "free" in str(caught.value)
    assert names(arena) == ["r3.v4.g1", "r3.v5.g1"]
    arena.seal(6, 1, PAYLOADS[6])
    assert versions(arena) == [5, 6]


def test_no_permission_is_an_environment_fault(arena: PrivateSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(EnvironmentFault, match="Permission denied"):
        arena.seal(0, 1, b"x")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentFault, match="file"):
        PrivateSlots(tmp_path / "file", 0)


def test_check_space_names_directory_needed_and_free(arena: PrivateSlots) -> None:
    arena.check_space(1)
    needed = 1 << 60
    with pytest.raises(
        EnvironmentFault, match=rf"{arena.directory} is full: {needed} bytes needed, \d+ free"
    ):
        arena.check_space(needed)
