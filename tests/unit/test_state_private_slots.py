"""Private slots: whatever happens while a version is sealed, the older ones stay and the new one is whole
or unseen."""

import errno
import functools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.errors import EnvironmentFault, IntegrityError, UsageError
from flashrec.state import files, private_slots
from flashrec.state.private_slots import HEADER_BYTES, KEPT_VERSIONS, PrivateSlots
from tests.crashing import in_crashing_child

PAYLOADS = {version: bytes([version]) * (1000 + version) for version in range(10)}


def versions(slots: PrivateSlots) -> list[int]:
    return [slot.version for slot in slots.sealed()]


def names(slots: PrivateSlots) -> list[str]:
    return sorted(os.listdir(slots.directory))


@pytest.fixture
def slots(tmp_path: Path) -> PrivateSlots:
    return PrivateSlots(tmp_path / "private", 3)


def test_the_three_newest_versions_are_kept(slots: PrivateSlots) -> None:
    for version in range(5):
        slots.seal(version, 1, PAYLOADS[version])
        assert versions(slots) == list(range(max(0, version - 2), version + 1))
    for version in (2, 3, 4):
        assert slots.read(version) == PAYLOADS[version]
    assert [slot.size_bytes for slot in slots.sealed()] == [1002, 1003, 1004]
    assert names(slots) == ["r3.v2.g1", "r3.v3.g1", "r3.v4.g1"]
    assert oct(os.stat(slots.directory / "r3.v4.g1").st_mode & 0o777) == "0o600"


def test_ranks_do_not_touch_each_other(tmp_path: Path) -> None:
    one, eleven = PrivateSlots(tmp_path, 1), PrivateSlots(tmp_path, 11)
    for version in range(3):
        one.seal(version, 1, b"one")
        eleven.seal(version, 1, b"eleven")
    one.discard_above(0)
    assert versions(one) == [0]
    assert versions(eleven) == [0, 1, 2]


def test_an_empty_payload_is_a_version(slots: PrivateSlots) -> None:
    slots.seal(0, 0, b"")
    assert versions(slots) == [0]
    assert slots.read(0) == b""


# --- a crash at every instruction
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_system_call_leaves_whole_versions_only(tmp_path: Path, after: bool) -> None:
    visible_after_crash = set()
    calls = 0
    while True:
        slots = PrivateSlots(tmp_path / str(calls), 0)
        for version in (3, 4, 5):
            slots.seal(version, 1, PAYLOADS[version])
        crashed = in_crashing_child(
            (private_slots, files),
            calls,
            after=after,
            act=lambda slots=slots: slots.seal(6, 1, PAYLOADS[6]),
            write_at_most=400,
        )
        # Another process (the daemon, the replacement) looks at what is there.
        reader = PrivateSlots(tmp_path / str(calls), 0)
        seen = versions(reader)
        # Sealed in the gate of step 5: if that gate did not pass, the job goes back to 5 or to 4.
        assert {4, 5} <= set(seen), "neither version the job may go back to must be lost"
        assert {3, 4, 5} <= set(seen) or {4, 5, 6} <= set(seen), "three versions at all times"
        for version in seen:
            assert reader.read(version) == PAYLOADS[version]
        visible_after_crash.add(tuple(seen))
        # And the replacement goes on, in a new generation; nothing of the torso stays.
        reader.discard_above(5)
        reader.seal(6, 2, b"again")
        assert versions(reader) == [4, 5, 6]
        assert reader.read(6) == b"again"
        assert len(names(reader)) == 3
        if not crashed:
            break
        calls += 1
    assert calls >= 6, "the fault never fired"
    assert {(3, 4, 5), (4, 5, 6)} <= visible_after_crash, "both outcomes must have occurred"


def test_a_torso_left_by_a_dead_writer_is_swept_by_the_next_seal(tmp_path: Path) -> None:
    slots = PrivateSlots(tmp_path, 0)
    act = functools.partial(slots.seal, 0, 1, PAYLOADS[9])
    assert in_crashing_child((private_slots, files), 2, after=True, act=act, write_at_most=400)
    assert any(name.startswith(".") for name in names(slots))
    assert versions(slots) == []
    PrivateSlots(tmp_path, 0).seal(0, 2, b"x")
    assert names(slots) == ["r0.v0.g2"]


# --- generations --------------------------------------------------------------------------------------------


def test_a_redone_version_takes_the_place_of_its_first_attempt(slots: PrivateSlots) -> None:
    slots.seal(5, 1, b"five")
    slots.seal(6, 1, b"first attempt")
    slots.seal(6, 2, b"second attempt")
    assert slots.read(6) == b"second attempt"
    assert names(slots) == ["r3.v5.g1", "r3.v6.g2"]


def test_an_older_generation_may_not_seal(slots: PrivateSlots) -> None:
    slots.seal(5, 2, b"new")
    with pytest.raises(UsageError, match=r"rank 3 .*version 6 in generation 1"):
        slots.seal(6, 1, b"stale")
    assert names(slots) == ["r3.v5.g2"]


def test_versions_above_the_resumed_one_are_fenced_even_if_not_discarded(slots: PrivateSlots) -> None:
    slots.seal(6, 1, b"six")
    slots.seal(7, 1, b"lost with its generation")
    slots.seal(6, 2, b"six again")
    assert versions(slots) == [6]
    assert slots.read(6) == b"six again"


def test_going_back_within_a_generation_is_refused(slots: PrivateSlots) -> None:
    slots.seal(6, 1, b"six")
    with pytest.raises(UsageError, match="later"):
        slots.seal(5, 1, b"five")


def test_sealing_the_same_again_needs_the_same_bytes(slots: PrivateSlots) -> None:
    slots.seal(6, 1, b"six")
    slots.seal(6, 1, b"six")
    with pytest.raises(UsageError, match="other bytes"):
        slots.seal(6, 1, b"SIX")
    assert slots.read(6) == b"six"


def test_discard_above_removes_every_generation(slots: PrivateSlots) -> None:
    slots.seal(5, 1, b"five")
    slots.seal(6, 1, b"six")
    assert [slot.version for slot in slots.discard_above(5)] == [6]
    assert versions(slots) == [5]
    assert slots.discard_above(5) == []


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), max_size=12))
@settings(max_examples=100)
def test_any_history_of_seals_and_discards(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, int, bool]]
) -> None:
    """Against a model: a dict of what must be readable."""
    slots = PrivateSlots(tmp_path_factory.mktemp("private"), 0)
    model: dict[int, tuple[int, bytes]] = {}
    for number, (version, generation, discard) in enumerate(history):
        if discard:
            slots.discard_above(version)
            model = {v: slot for v, slot in model.items() if v <= version}
            continue
        payload = f"{number}".encode()
        try:
            slots.seal(version, generation, payload)
        except UsageError:
            continue
        model = {v: slot for v, slot in model.items() if v < version}
        model[version] = (generation, payload)
        model = dict(sorted(model.items())[-KEPT_VERSIONS:])
    assert [(slot.version, slot.generation) for slot in slots.sealed()] == [
        (version, generation) for version, (generation, _) in sorted(model.items())
    ]
    for version, (_, payload) in model.items():
        assert slots.read(version) == payload


# --- damage
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def sealed_file(slots: PrivateSlots) -> Path:
    slots.seal(7, 2, PAYLOADS[7])
    return slots.directory / "r3.v7.g2"


@pytest.mark.parametrize("position", [0, 9, 13, 20, 30, 40, 50, HEADER_BYTES, HEADER_BYTES + 500, -1])
def test_a_flipped_bit_is_found(slots: PrivateSlots, sealed_file: Path, position: int) -> None:
    data = bytearray(sealed_file.read_bytes())
    data[position] ^= 4
    sealed_file.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"version 7 \(generation 2\) of rank 3"):
        slots.read(7)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5])
def test_a_truncated_file_is_not_listed_and_not_read(
    slots: PrivateSlots, sealed_file: Path, length: int
) -> None:
    os.truncate(sealed_file, length)
    assert slots.sealed() == []
    with pytest.raises(IntegrityError, match="truncated"):
        slots.read(7)


def test_a_file_under_another_name_is_found_out(slots: PrivateSlots, sealed_file: Path) -> None:
    os.rename(sealed_file, slots.directory / "r3.v8.g2")
    assert slots.sealed() == []
    with pytest.raises(IntegrityError, match="holds version 7"):
        slots.read(8)


def test_a_version_that_is_not_there(slots: PrivateSlots) -> None:
    with pytest.raises(IntegrityError, match="rank 3 has no sealed version 1"):
        slots.read(1)


def test_stray_files_are_ignored(slots: PrivateSlots, sealed_file: Path) -> None:
    for name in ("r3.v9", "r3.v9.g1.bak", "notes", "r3.vx.g1", ".r3.v9.g1.1.1"):
        (slots.directory / name).write_bytes(b"x")
    assert versions(slots) == [7]


# --- the machine says no
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
@pytest.mark.parametrize("first_write_takes", [0, 700])
def test_a_full_filesystem_is_an_environment_fault_and_loses_nothing(
    slots: PrivateSlots, monkeypatch: pytest.MonkeyPatch, code: int, first_write_takes: int
) -> None:
    for version in (3, 4, 5):
        slots.seal(version, 1, PAYLOADS[version])
    takes = [first_write_takes]

    def writev(fd: int, views: list[memoryview]) -> int:
        if takes and takes[0]:
            return os.write(fd, b"".join(views)[: takes.pop()])
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "writev", writev)
        with pytest.raises(EnvironmentFault) as caught:
            slots.seal(6, 1, PAYLOADS[6])
    assert str(slots.directory) in str(caught.value)
    assert f"{1006 + HEADER_BYTES} bytes needed" in str(caught.value)
    assert "free" in str(caught.value)
    assert names(slots) == ["r3.v3.g1", "r3.v4.g1", "r3.v5.g1"]
    slots.seal(6, 1, PAYLOADS[6])
    assert versions(slots) == [4, 5, 6]


def test_no_permission_is_an_environment_fault(slots: PrivateSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(EnvironmentFault, match="Permission denied"):
        slots.seal(0, 1, b"x")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentFault, match="file"):
        PrivateSlots(tmp_path / "file", 0)
