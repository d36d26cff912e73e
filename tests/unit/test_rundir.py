"""One daemon in a directory, nobody else's eyes on it, and a dead daemon's remains in nobody's way."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from flashrec.cli.client import daemon_runs_in
from flashrec.errors import EnvironmentFault
from flashrecd.rundir import MAX_SOCKET_PATH, RunDirectory


def test_it_is_made_private_and_says_who_has_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "deep" / "run")
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert run.address == f"ipc://{run.path}/control.sock"
    assert json.loads((run.path / "daemon.json").read_text())["pid"] == os.getpid()
    assert (run.path / "jobs").is_dir()
    assert daemon_runs_in(run.path)
    run.close()
    assert not daemon_runs_in(run.path)
    assert not (run.path / "daemon.json").exists()


def test_a_second_daemon_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path)
    with pytest.raises(EnvironmentFault, match=rf"a daemon \(pid {os.getpid()}\) runs in {tmp_path} already"):
        RunDirectory(tmp_path)
    first.close()
    RunDirectory(tmp_path).close()


def test_a_dead_daemons_remains_are_in_nobodys_way(tmp_path: Path) -> None:
    """Its lock is free, since the kernel let go of it; its socket and its json lie there."""
    tmp_path.chmod(0o700)
    (tmp_path / "control.sock").touch()
    (tmp_path / "daemon.lock").touch()
    (tmp_path / "daemon.json").write_text('{"pid": 1, "release": "0"}')
    assert not daemon_runs_in(tmp_path)
    run = RunDirectory(tmp_path)
    assert not run.socket_path.exists()
    run.close()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": null}', "\xff"])
def test_a_damaged_json_does_not_hide_the_first_daemon(tmp_path: Path, content: str) -> None:
    first = RunDirectory(tmp_path)
    (tmp_path / "daemon.json").write_text(content, encoding="latin-1")
    with pytest.raises(EnvironmentFault, match="already"):
        RunDirectory(tmp_path)
    first.close()


def test_open_to_others_is_refused(tmp_path: Path) -> None:
    for mode in (0o750, 0o701, 0o777):
        tmp_path.chmod(mode)
        with pytest.raises(EnvironmentFault, match="open to others; `chmod 700` it"):
            RunDirectory(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_or_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"cannot make the run directory .*/file"):
        RunDirectory(tmp_path / "file")
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(EnvironmentFault, match="not a directory of this user"):
        RunDirectory(tmp_path / "link")
    assert not list(target.iterdir())


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    path = tmp_path / ("x" * MAX_SOCKET_PATH)
    with pytest.raises(EnvironmentFault, match="too long for a socket"):
        RunDirectory(path)
    assert not path.exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "daemon.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentFault, match="cannot write in the run directory"):
        RunDirectory(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_failed_claim_gives_its_descriptors_back(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(EnvironmentFault):
            RunDirectory(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    first.close()
