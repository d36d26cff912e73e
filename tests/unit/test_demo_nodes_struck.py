"""What strikes a node does strike: memory is gone, processes are dead, a byte differs, and nobody else is touched."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrec.cli.demo.nodes import node as nodes
from flashrec.cli.demo.nodes.corrupt import corrupt, damaged
from flashrec.cli.demo.nodes.node import Node, descendants_of, kill_all, lose, open_processes
from flashrec.cli.demo.nodes.tags import NodeTags
from flashrec.errors import EnvironmentFault, IntegrityError
from flashrec.protocol.jobdir import JobDirectory
from flashrec.protocol.tag import TagWriter, tag_path
from flashrec.state.arena import Arena
from flashrec.state.arena_writer import ArenaWriter
from flashrec.state.private_slots import PrivateSlots
from tests.arenas import JOB, RANK, seal

# Stands for a daemon: holds the job's directory and the run directory's lock, and has a child that has a child.
DAEMON = """
import fcntl, json, os, subprocess, sys
run, directory = sys.argv[1:]
lock = os.open(run + "/daemon.lock", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX)
held = os.open(directory, os.O_RDONLY)
child = subprocess.Popen([sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '100'])"],
    start_new_session=True)
open(run + "/daemon.json", "w").write(json.dumps({"pid": os.getpid()}))
print("ready", flush=True)
child.wait()
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[Node, Path, subprocess.Popen[bytes]]]:
    """A node whose daemon holds the second of two directories of the job, and its children."""
    memory, run = tmp_path / "shm", tmp_path / "run"
    memory.mkdir()
    run.mkdir()
    other, mine = (JobDirectory.make("abc", memory) for _ in range(2))
    (mine.path / "arena" / "r2.0").write_bytes(b"sealed")
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(run), str(mine.path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield (
                Node(number=2, name="node2", address="127.0.0.3", run_dir=run, memory=memory),
                mine.path,
                process,
            )
        finally:
            with contextlib.ExitStack() as opened:
                kill_all(open_processes([process.pid, *descendants_of(process.pid)], opened))
            process.wait()
            for directory in (other, mine):
                directory.remove()


def sleeping_below(pid: int) -> list[int]:
    """Until the child's child is there."""
    while len(found := descendants_of(pid)) < 2:
        pass
    return found


def test_a_nodes_directory_is_the_one_that_its_daemon_holds(daemon) -> None:  # type: ignore[no-untyped-def]
    node, mine, process = daemon
    assert node.daemon_pid() == process.pid
    assert node.directory("abc") == mine
    assert node.directory("xyz") is None


def test_a_lost_node_has_neither_memory_nor_processes(daemon) -> None:  # type: ignore[no-untyped-def]
    node, mine, process = daemon
    below = sleeping_below(process.pid)
    (other,) = set(node.memory.iterdir()) - {mine}
    seen: list[bool] = []
    loss = lose(node, "abc", subreaper=os.getpid(), before=lambda: seen.append(mine.exists()))
    assert seen == [True]
    assert set(loss.pids) == {process.pid, *below}
    assert loss.files == 1
    assert list(node.memory.iterdir()) == [other]
    assert process.wait() == -9
    for pid in below:
        with contextlib.suppress(ChildProcessError):  # an orphan is whoever's who reaps them
            os.waitpid(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"
    assert node.daemon_pid() is None
    with pytest.raises(EnvironmentFault, match="no daemon"):
        lose(node, "abc", subreaper=os.getpid())


def test_memory_is_gone_before_the_daemon_dies(daemon, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    node, mine, process = daemon
    order: list[str] = []
    kill = nodes.kill_all

    def killed(processes: list[nodes.Process]) -> None:
        order.append("directory" if mine.exists() else "no directory")
        order.append(f"first {processes[0].pid}" if processes else "none")
        kill(processes)

    monkeypatch.setattr(nodes, "kill_all", killed)
    lose(node, "abc", subreaper=os.getpid())
    assert order[:2] == ["no directory", f"first {process.pid}"]


def test_what_was_started_meanwhile_dies_too_and_a_stranger_lives(daemon) -> None:  # type: ignore[no-untyped-def]
    """A process that the daemon had just started is an orphan once it is dead."""
    node, _, _ = daemon
    stranger = subprocess.Popen(["sleep", "100"])
    late: list[subprocess.Popen[bytes]] = []
    try:
        loss = lose(
            node,
            "abc",
            subreaper=os.getpid(),
            before=lambda: late.append(subprocess.Popen(["sleep", "101"])),
        )
        assert late[0].pid in loss.pids
        assert stranger.poll() is None
    finally:
        for one in (stranger, *late):
            one.kill()
            one.wait()


def test_a_stale_record_of_a_daemon_is_none(tmp_path: Path) -> None:
    (tmp_path / "daemon.json").write_text(json.dumps({"pid": os.getpid()}))
    node = Node(number=1, name="a", address="127.0.0.2", run_dir=tmp_path, memory=tmp_path)
    assert node.daemon_pid() is None
    assert Node.from_json(json.loads(json.dumps(node.to_json()))) == node


# --- tags -------------------------------------------------------------------------------------------------


def test_the_newest_tag_of_a_rank_counts_wherever_it_is(tmp_path: Path) -> None:
    node = Node(number=1, name="a", address="127.0.0.2", run_dir=tmp_path, memory=tmp_path)
    old, new = (JobDirectory.make("abc", tmp_path) for _ in range(2))
    stranger = JobDirectory.make("xyz", tmp_path)
    for directory, at_ns, step in ((old, 5, 7), (new, 9, 6), (stranger, 20, 99)):
        writer = TagWriter(tag_path(directory.path, 1))
        writer.step, writer.changed_ns = step, at_ns
        writer.publish()
        writer.close()
    with contextlib.closing(NodeTags([node], "abc", 2)) as tags:
        none, newest = tags.all()
        assert none is None
        assert newest is not None
        assert newest.step == 6
        new.remove()  # lost: what it said last is known still
        again = tags.read(1)
        assert again is not None
        assert again.step == 6
    old.remove()
    stranger.remove()


# --- a byte -----------------------------------------------------------------------------------------------


@pytest.fixture
def keeper(tmp_path: Path) -> Path:
    """A directory with a replica of rank 3: sealed versions 4 and 5."""
    writer = ArenaWriter(tmp_path / "replica", RANK, JOB, chunk_bytes=4096)
    for version in (4, 5):
        seal(writer, version)
    return tmp_path


def test_a_byte_of_the_newest_version_is_changed(keeper: Path) -> None:
    before = {path: path.read_bytes() for path in keeper.rglob("*") if path.is_file()}
    (found,) = corrupt(keeper, RANK, JOB)
    assert (found.what, found.rank, found.version) == ("sealed", RANK, 5)
    assert damaged(keeper, RANK, JOB, 5)
    assert not damaged(keeper, RANK, JOB, 4)
    changed = [
        sum(a != b for a, b in zip(data, path.read_bytes(), strict=True)) for path, data in before.items()
    ]
    assert sorted(changed) == [0] * (len(changed) - 1) + [1]
    # Its header is as it was: only who reads the bytes notices.
    assert [one.version for one in Arena(keeper / "replica", RANK, JOB).sealed()] == [4, 5]


def test_nothing_is_corrupted_twice_or_of_others(keeper: Path) -> None:
    """A byte that is changed twice is what it was."""
    first = corrupt(keeper, RANK, JOB)
    assert corrupt(keeper, RANK, JOB, but=first) == []
    assert corrupt(keeper, RANK - 1, JOB) == []
    assert damaged(keeper, RANK, JOB, 5)


@pytest.mark.parametrize("all_private", [False, True])
def test_private_state_is_corrupted_too(keeper: Path, all_private: bool) -> None:
    slots = PrivateSlots(keeper / "replica-private", RANK)
    for version in (4, 5):
        slots.seal(version, 1, b"state of the generators")
    found = corrupt(keeper, RANK, JOB, all_private=all_private)
    private = [5, 4] if all_private else [5]
    assert [(one.what, one.version) for one in found] == [
        ("sealed", 5),
        *(("private", version) for version in private),
    ]
    for version in (4, 5):
        if version in private:
            with pytest.raises(IntegrityError, match="checksum"):
                slots.read(version)
        else:
            assert slots.read(version) == b"state of the generators"
