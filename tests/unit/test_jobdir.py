"""A job's shared memory: refused in time where there is no room, and removed by whoever is the last."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashrec.errors import EnvironmentFault
from flashrec.protocol import jobdir
from flashrec.protocol.jobdir import FOLDERS, JobDirectory, remove_stale


@pytest.fixture(autouse=True)
def descriptors_are_given_back() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def test_made_private_and_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    directory = JobDirectory.make("k3f9", tmp_path)
    assert directory.path.parent == tmp_path
    assert directory.path.name.startswith(f"flashrec-{os.getuid()}-k3f9-")
    for path in (directory.path, *(directory.path / folder for folder in FOLDERS)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (directory.path / "private" / "r0.v1.g1").write_bytes(b"x")
    directory.remove()
    assert not list(tmp_path.iterdir())
    directory.remove()


def space(free_bytes: int) -> object:
    return lambda path: SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096)


def test_too_little_room_is_said_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", space(5 << 20))
    with pytest.raises(EnvironmentFault, match=r"has 5 MiB free; a job needs at least 16 MiB there"):
        JobDirectory.make("j", tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "statvfs", space(jobdir.MIN_FREE_BYTES))
    JobDirectory.make("j", tmp_path).remove()


def test_full_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was room when we looked, and none any more: nothing half made is left."""
    made = Path.mkdir

    def mkdir(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if self.name == FOLDERS[2]:
            raise OSError(28, "No space left on device")
        made(self, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(EnvironmentFault, match="No space left on device"):
        JobDirectory.make("j", tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_shared_memory_or_no_permission_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault, match="No such file or directory"):
        JobDirectory.make("j", tmp_path / "none")

    def refuse(*_: object, **__: object) -> None:  # root, which tests may run as, is never refused by a mode
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(EnvironmentFault, match=r"cannot make .*flashrec-.*: Permission denied"):
        JobDirectory.make("j", tmp_path)


def test_nobody_removes_what_somebody_holds_and_the_last_one_does(tmp_path: Path) -> None:
    daemon = JobDirectory.make("j", tmp_path)
    ranks = [JobDirectory.hold(daemon.path) for _ in range(2)]
    assert remove_stale(tmp_path) == []
    assert daemon.leave() is False  # as when it is killed
    assert remove_stale(tmp_path) == []
    assert ranks[0].leave() is False
    assert daemon.path.exists()
    assert ranks[1].leave() is True
    assert not daemon.path.exists()


def test_while_the_daemon_lives_a_rank_that_ends_removes_nothing(tmp_path: Path) -> None:
    daemon = JobDirectory.make("j", tmp_path)
    assert JobDirectory.hold(daemon.path).leave() is False
    assert JobDirectory.hold(daemon.path).leave() is False
    daemon.remove()


def test_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    paths = []
    for job in ("a", "b"):
        directory = JobDirectory.make(job, tmp_path)
        (directory.path / "export" / "g1.r0").write_bytes(b"x")
        directory._close()  # what the kernel does for a process that was killed
        paths.append(directory.path)
    held = JobDirectory.make("c", tmp_path)
    assert sorted(remove_stale(tmp_path)) == sorted(paths)
    assert list(tmp_path.iterdir()) == [held.path]
    held.remove()


def test_only_what_is_ours_is_removed(tmp_path: Path) -> None:
    uid = os.getuid()
    for name in (
        "torch_123",
        f"flashrec-{uid + 1}-j-abcd",
        f"flashrec-{uid}-j",
        "flashrec-bench",
        "-".join("flashrec"),
    ):
        (tmp_path / name).mkdir()
    (tmp_path / f"flashrec-{uid}-file-ab").touch()
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / f"flashrec-{uid}-link-ab").symlink_to(target)
    before = sorted(tmp_path.iterdir())
    assert remove_stale(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == before
    assert remove_stale(tmp_path / "none") == []


def test_what_is_gone_or_being_removed_cannot_be_joined(tmp_path: Path) -> None:
    directory = JobDirectory.make("j", tmp_path)
    directory.remove()
    with pytest.raises(OSError, match="No such file"):
        JobDirectory.hold(directory.path)
