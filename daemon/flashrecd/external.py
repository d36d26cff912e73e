"""Ranks that another launcher starts (torchrun, Slurm, a shell): they come by themselves, with a Join.

    Join --the rank is awaited--> adopted, Welcome
      |
      |--no job runs--------------> its job begins; all its ranks are awaited
      |--the rank's process lives-> it waits until that one is proven dead, JOIN_WAIT_S at most; an orphan, whose
      |                             launcher has died, is ended for it
      |--another job runs---------> refused while one of that job's processes lives; else that job is superseded
      `--it cannot be right-------> refused

The core decides as for any job; only what it launches is waited for rather than started. A job is forgotten when
its launcher is gone and none of its processes has been there for ABANDONED_S.
"""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashrec import __version__
from flashrec.errors import FlashrecError, UsageError
from flashrec.protocol import messages as msg
from flashrecd.core import events as ev
from flashrecd.core.state import JobConfig, Status
from flashrecd.jobrun import JobRun
from flashrecd.launching import Process
from flashrecd.supervise import Supervisor
from flashrecd.supervise.descendants import has_open, process_stat

JOIN_WAIT_S = 10.0
ABANDONED_S = 60.0
MAX_WAITING = 4096
MAX_NAME = 200


def job_name(join: msg.Join) -> str:
    """What a job is called in file names: the same for the ranks of one script under one name, and only for them."""
    return hashlib.blake2b(
        f"{join.job}\0{join.target}".encode(errors="surrogateescape"), digest_size=6
    ).hexdigest()


class ExternalProcesses:
    """The source of a job's processes that starts none: `admit()` takes those that come."""

    def __init__(self, label: str, run_dir: Path, supervisor: Supervisor, awaits: Callable[[], None]) -> None:
        """`label`: the job's name as its user knows it. `run_dir`: who joins has it open. `awaits()` is called when one
        more rank is waited for."""
        self.label = label
        self._run_dir = run_dir
        self._supervisor = supervisor
        self._awaits = awaits
        self._awaited: dict[int, tuple[Process, asyncio.Future[int]]] = {}
        self._joins: dict[str, msg.Join] = {}  # of the processes that live
        self._launchers: dict[int, int] = {}  # pid -> pidfd, of those that live
        self._last_launcher = 0
        self.ever_launched_by: set[int] = set()

    def begin(self) -> None:
        """Nothing has to run for it."""

    async def start(self, process: Process) -> int:
        assert process.rank is not None, "an external job has no standbys"
        joined: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._awaited[process.rank] = process, joined
        self._awaits()
        try:
            return await joined
        except asyncio.CancelledError:
            if not joined.done() or joined.cancelled():
                raise
            # It came, and was called off, in the same turn: it lives until the kernel says that it does not.
            self._supervisor.kill_group(process.name)
            return joined.result()
        finally:
            if self._awaited.get(process.rank, (None,))[0] is process:
                del self._awaited[process.rank]

    def admit(self, join: msg.Join) -> str | None:
        """The name under which the process is watched from now on; None while its rank is not awaited.

        Raises UsageError when it is not who it says, and what `Supervisor.adopt` does."""
        if join.rank not in self._awaited:
            return None
        process, joined = self._awaited[join.rank]
        if joined.done():
            return None
        _prove(join, self._run_dir)
        self._supervisor.adopt(process.name, join.pid)
        del self._awaited[join.rank]
        self._joins[process.name] = join
        self._watch_launcher(join.launcher_pid)
        joined.set_result(join.pid)
        return process.name

    def take_over(self, first: msg.Join, processes: Iterable[Process]) -> None:
        """Those that joined a daemon that has died. `first`: the Join that began the job."""
        for process in processes:
            stat = process_stat(process.pid)
            if process.adopted and not process.gone and process.rank is not None and stat is not None:
                join = replace(first, rank=process.rank, pid=process.pid, launcher_pid=stat.parent)
                self._joins[process.name] = join
                self._watch_launcher(stat.parent)

    def assigned(self, process: Process) -> None:
        raise AssertionError("an external job has no standbys")

    async def ended(self, process: Process) -> None:
        self._joins.pop(process.name, None)

    async def close(self) -> None:
        await self._supervisor.settled(timeout_s=5.0)
        for pid in list(self._launchers):
            self._launcher_gone(pid)

    def describe(self) -> dict[str, Any]:
        launcher = {"job": self.label, "pid": self._last_launcher, "alive": bool(self._launchers)}
        return {"log_dir": None, "launcher": {**launcher, "program": _program(self._last_launcher)}}

    @property
    def num_live(self) -> int:
        """How many of its processes live."""
        return len(self._joins)

    @property
    def has_launcher(self) -> bool:
        return bool(self._launchers)

    def is_orphan(self, proc: str) -> bool:
        """Whether it lives, and what started it does not."""
        return proc in self._joins and self._joins[proc].launcher_pid not in self._launchers

    def _watch_launcher(self, pid: int) -> None:
        if pid <= 1:
            return  # it has died, and its rank has been handed to the system's first process
        self._last_launcher = pid
        self.ever_launched_by.add(pid)
        if pid not in self._launchers:
            with contextlib.suppress(OSError, OverflowError, ValueError):
                self._launchers[pid] = pidfd = os.pidfd_open(pid)
                asyncio.get_running_loop().add_reader(pidfd, self._launcher_gone, pid)

    def _launcher_gone(self, pid: int) -> None:
        pidfd = self._launchers.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


@dataclass
class _Waiting:
    identity: bytes
    join: msg.Join
    until: float


@dataclass(frozen=True)
class _Over:
    """A job that had got past its start and has ended: its launcher, which does not know, may start ranks again."""

    name: str
    launchers: frozenset[int]
    reason: str


class Joining:
    """Who may join which job, and when.

    `run_dir`: the daemon's; who joins holds it open. `job()` is the one that runs; `begin(name, join)` makes a new
    one; `bind(identity, proc)` ties a sender to a process; `refuse(identity, kind, reason)` answers it."""

    def __init__(
        self,
        run_dir: Path,
        job: Callable[[], JobRun | None],
        begin: Callable[[str, msg.Join], None],
        bind: Callable[[bytes, str], None],
        refuse: Callable[[bytes, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._job = job
        self._begin = begin
        self._bind = bind
        self._refuse = refuse
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._over: _Over | None = None
        self._deserted_since: float | None = None

    def take(self, identity: bytes, join: msg.Join) -> None:
        """Answered now, or as soon as it is decided. UsageError for what cannot be right."""
        if join.release != __version__:
            self._refuse(
                identity, "version", f"the daemon is flashrec {__version__}, this process {join.release}"
            )
            return
        if not 0 <= join.rank < join.world_size:
            raise UsageError(f"rank {join.rank} is not in a world of {join.world_size}")
        if not join.job or len(join.job) > MAX_NAME:
            raise UsageError(f"a job's name has 1 to {MAX_NAME} characters")
        if len(self._waiting) >= MAX_WAITING or join.world_size > MAX_WAITING:
            raise UsageError(f"a daemon takes at most {MAX_WAITING} ranks")
        self._waiting.append(_Waiting(identity, join, self._clock() + JOIN_WAIT_S))
        self.admit()

    def admit(self) -> None:
        """Decide again about those that wait."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            try:
                if not self._decide(one):
                    self._waiting.append(one)
            except FlashrecError as error:
                self._refuse(one.identity, type(error).__name__, str(error))

    def tick(self) -> None:
        """A few times a second."""
        now = self._clock()
        self.admit()
        for one in [one for one in self._waiting if now > one.until]:
            self._waiting.remove(one)
            self._refuse(one.identity, "UsageError", self._why_not(one.join))
        self._end_deserted(now)

    def ended(self, job: JobRun) -> None:
        """`job` is over."""
        source = job.source
        if isinstance(source, ExternalProcesses) and _got_past_its_start(job):
            assert job.core.state.outcome is not None
            self._over = _Over(job.name, frozenset(source.ever_launched_by), job.core.state.outcome[1])

    # --- decisions ----------------------------------------------------------------------------------------

    def _decide(self, one: _Waiting) -> bool:
        """Whether it was answered. Raises UsageError, EnvironmentFault: it is refused."""
        join, name, job = one.join, job_name(one.join), self._job()
        if job is None:
            return self._decide_without_job(one, name)
        source = job.source
        if not isinstance(source, ExternalProcesses):
            raise UsageError(
                f"job {job.name} runs here, which `flashrec run` started; a daemon runs one at a time"
            )
        if job.core.state.outcome is not None or job.core.state.status is Status.CLOSING:
            return False  # it ends
        if job.name != name:
            if source.num_live:
                raise UsageError(
                    f"job {source.label!r} ({job.target}) runs here with {source.num_live} processes, and this is job "
                    f"{join.job!r} ({join.target}); a daemon runs one at a time"
                )
            job.feed(ev.Stop(f"superseded by job {join.job!r} ({join.target})", hard=True))
            return False
        if job.core.config.world_size != join.world_size:
            raise UsageError(
                f"job {source.label!r} has {job.core.config.world_size} ranks, not {join.world_size}; for a new job "
                "set FLASHREC_JOB to another name"
            )
        proc = source.admit(join)
        if proc is not None:
            self._bind(one.identity, proc)
            job.joined(msg.Hello(proc, join.pid, join.release), one.identity)
            return True
        self._end_orphan(job, source, join)
        return False

    def _decide_without_job(self, one: _Waiting, name: str) -> bool:
        over, join = self._over, one.join
        if over is not None and join.restarted and over.name == name and join.launcher_pid in over.launchers:
            self._refuse(one.identity, "ended", f"job {join.job!r} has ended: {over.reason}")
            return True
        _prove(join, self._run_dir)  # or a stranger's word would make a job that nobody comes to
        self._over = None
        self._begin(name, join)
        return False

    def _end_orphan(self, job: JobRun, source: ExternalProcesses, join: msg.Join) -> None:
        """Its launcher has died, and another starts the rank again: nobody looks after the one that lives."""
        members = job.core.state.members
        proc = members[join.rank].proc if join.rank < len(members) else ""
        if source.is_orphan(proc) and join.pid not in job.pids().values():
            job.condemn(proc, "its launcher has died, and another has started the rank again")

    def _why_not(self, join: msg.Join) -> str:
        job = self._job()
        members = job.core.state.members if job is not None else ()
        pid = (
            job.pids().get(members[join.rank].proc) if job is not None and join.rank < len(members) else None
        )
        if pid is not None:
            return (
                f"rank {join.rank} of job {join.job!r} is running as process {pid}, and has not ended in "
                f"{JOIN_WAIT_S:.0f} s: two processes cannot hold one rank"
            )
        return (
            f"rank {join.rank} of job {join.job!r} cannot join: the job that runs here has not ended in "
            f"{JOIN_WAIT_S:.0f} s"
        )

    def _end_deserted(self, now: float) -> None:
        job = self._job()
        source = job.source if job is not None else None
        there = (
            not isinstance(source, ExternalProcesses)
            or source.num_live
            or source.has_launcher
            or self._waiting
        )
        if job is None or there or job.core.state.outcome is not None:
            self._deserted_since = None
        elif self._deserted_since is None:
            self._deserted_since = now
        elif now - self._deserted_since > ABANDONED_S:
            job.feed(
                ev.Stop(f"its launcher is gone, and no rank came back in {ABANDONED_S:.0f} s", hard=True)
            )


def external_config(join: msg.Join) -> JobConfig:
    """How often a failed rank is started again is its launcher's to bound."""
    return JobConfig(world_size=join.world_size, num_standbys=0, external=True)


def _prove(join: msg.Join, run_dir: Path) -> None:
    """UsageError when the sender is not the process it says."""
    if not has_open(join.pid, run_dir):
        raise UsageError(
            f"rank {join.rank} says that it is process {join.pid}, which is not so here: daemon and ranks must be "
            "in the same container"
        )


def _got_past_its_start(job: JobRun) -> bool:
    state = job.core.state
    reached = [v for m in state.members for v in (m.version or 0, *m.private, *m.sealed)]
    return max([state.version, *reached]) > 0


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"
