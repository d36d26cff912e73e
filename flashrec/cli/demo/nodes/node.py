"""One of the demo's nodes from outside: its daemon, its processes, its memory, and how all of it dies.

Its processes are the daemon and whatever descends from it: the daemon is a subreaper, so none of them gets away. Each
is watched and killed through a pidfd, so nobody else is hit whose number it has become.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashrec.errors import EnvironmentFault
from flashrec.protocol.jobdir import job_directories
from flashrec.protocol.places import daemon_runs_in

DEATH_S = 10.0
GONE = "gone-"
"""What the directory of a lost job is called while it is taken away: nobody looks for that."""


@dataclass(frozen=True, kw_only=True)
class Process:
    pid: int
    fd: int
    """A pidfd."""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)

    def ended(self, timeout_s: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(int(timeout_s * 1000)))


@dataclass(frozen=True, kw_only=True)
class Node:
    """`number` counts from 1, the leader's. `memory`: its /dev/shm as seen from here."""

    number: int
    name: str
    address: str
    run_dir: Path
    memory: Path

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "run_dir": str(self.run_dir), "memory": str(self.memory)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Node:
        return Node(**{**fields, "run_dir": Path(fields["run_dir"]), "memory": Path(fields["memory"])})

    def daemon_pid(self) -> int | None:
        """None when no daemon has come up here, or the last one is gone."""
        if not daemon_runs_in(self.run_dir):
            return None
        try:
            return int(json.loads((self.run_dir / "daemon.json").read_text())["pid"])
        except (OSError, ValueError, KeyError):
            return None

    def directory(self, job: str) -> Path | None:
        """That of `job` on this node, as seen from here: the one that its daemon holds. Where several nodes share a
        machine's memory theirs lie side by side."""
        pid = self.daemon_pid()
        held = set() if pid is None else _held_by(pid)
        for path in job_directories(self.memory):
            if f"-{job}-" in path.name and _identity(path) in held:
                return path
        return None

    def processes(self, opened: contextlib.ExitStack) -> list[Process]:
        """The daemon first, then everything below it, as of now. `opened` closes the pidfds. EnvironmentFault when
        there is no daemon."""
        pid = self.daemon_pid()
        if pid is None:
            raise EnvironmentFault(f"node {self.name} has no daemon")
        return open_processes([pid, *descendants_of(pid)], opened)

    def forget_memory(self, job: str) -> list[str]:
        """Take the job's directory away, from under whoever uses it: what this node kept is gone. Returns the names
        of the files that were in it."""
        directory = self.directory(job)
        if directory is None:
            raise EnvironmentFault(f"node {self.name} has no memory of job {job}")
        gone = directory.with_name(GONE + directory.name)
        directory.rename(gone)  # at once: no rank shall find half of it
        names = sorted(str(path.relative_to(gone)) for path in gone.rglob("*") if path.is_file())
        shutil.rmtree(gone)
        return names


def kill_all(processes: Iterable[Process]) -> None:
    """SIGKILL, in this order, and wait for the deaths. EnvironmentFault for what outlives it."""
    processes = list(processes)
    for process in processes:
        process.kill()
    for process in processes:
        if not process.ended(DEATH_S):
            raise EnvironmentFault(f"process {process.pid} outlived a SIGKILL by {DEATH_S:.0f} s")


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a node's death took. Instants are `time.monotonic_ns()`."""

    signal_ns: int
    died_ns: int
    pids: tuple[int, ...]
    files: int


def lose(node: Node, job: str, *, subreaper: int, before: Callable[[], None] = lambda: None) -> Loss:
    """The whole node at once: its memory, then its daemon and every process of it. `before` is called in the last
    moment. `subreaper`: the process that orphans of the daemon fall to."""
    with contextlib.ExitStack() as opened:
        processes = node.processes(opened)
        spared = set(children_of(subreaper))
        before()
        signal_ns = time.monotonic_ns()
        files = node.forget_memory(job)
        kill_all(processes)
        # What the daemon had just started is an orphan by now.
        strays = set(children_of(subreaper)) - spared - {one.pid for one in processes}
        late = open_processes([*strays, *(pid for one in strays for pid in descendants_of(one))], opened)
        kill_all(late)
        pids = tuple(one.pid for one in (*processes, *late))
        return Loss(signal_ns=signal_ns, died_ns=time.monotonic_ns(), pids=pids, files=len(files))


def open_processes(pids: Iterable[int], opened: contextlib.ExitStack) -> list[Process]:
    """Those of them that are there."""
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            process = Process(pid=pid, fd=os.pidfd_open(pid))
            opened.callback(os.close, process.fd)
            found.append(process)
    return found


def descendants_of(pid: int) -> list[int]:
    """Parents first."""
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children_of(parent) if child not in found]
        found += level
    return found


def children_of(pid: int) -> list[int]:
    """The dead that nobody has waited for included; none when it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return found


def _held_by(pid: int) -> set[tuple[int, int]]:
    """What it has open, in whatever namespace."""
    held = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{fd}")
                held.add((status.st_dev, status.st_ino))
    return held


def _identity(path: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return -1, -1
