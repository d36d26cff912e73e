"""A daemon of the demo's own that can be killed, and what becomes of a job when it is."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashrec.cli.client import LONGEST_PARENT, Client, ask_status, daemon_runs_in
from flashrec.cli.orphans import end_orphans, subreaper
from flashrec.errors import DaemonUnavailable, EnvironmentFault
from flashrec.protocol.jobdir import remove_stale

START_S = 20.0
END_S = 10.0
WITHOUT_STEPS = 5  # that every rank commits while there is no daemon
WITHOUT_S = 10.0  # and no longer than so long
RUNNING = "running"
# It ends with the demo, but the demo does not own it: an owned daemon's ranks would end with it.
PROGRAM = """
import signal
from flashrec.prctl import die_with_parent
die_with_parent(signal.SIGTERM)
from flashrecd.__main__ import main
main()
"""


@dataclass(frozen=True, kw_only=True)
class DaemonStrike:
    """What became of the daemon's death so far. Instants are `time.monotonic_ns()`, 0 for what has not been yet."""

    step: int
    """Steps that every rank had committed when it was killed."""
    pid: int
    signal_ns: int
    died_ns: int
    steps_without: int = 0
    """Steps that every rank committed while no daemon was there."""
    started_ns: int = 0
    new_pid: int | None = None
    adopted_ns: int = 0
    """When the new one had all ranks, each with the process it had before."""

    @property
    def adopted_ms(self) -> float | None:
        """From the start of the new daemon's process."""
        return (self.adopted_ns - self.started_ns) / 1e6 if self.adopted_ns else None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "SIGKILL",
            "step": self.step,
            "pid": self.pid,
            "new_pid": self.new_pid,
            "steps_without_daemon": self.steps_without,
            "adopted_ms": None if self.adopted_ms is None else round(self.adopted_ms, 3),
        }


class SeparateDaemon:
    """`flashrecd` in a run directory, started as often as it is killed."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._log = run_dir / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with open(self._log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "--dir", str(self.run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the demo, which ends it
            )

    def await_start(self) -> None:
        """Until it listens. EnvironmentFault, with what it said, if it does not."""
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while not (daemon_runs_in(self.run_dir) and (self.run_dir / "control.sock").exists()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = self._log.read_text(errors="replace").strip()
                raise EnvironmentFault(f"the daemon did not start: {text or 'no output'}")
            time.sleep(0.01)

    def rank_pids(self) -> list[int]:
        """Of the job's ranks, if it is running with all of them; else nothing."""
        if daemon_runs_in(self.run_dir):
            with Client(self.run_dir) as client, contextlib.suppress(DaemonUnavailable):
                job = ask_status(client)["job"]
                if job is not None and job["status"] == RUNNING:
                    pids = [rank["pid"] for rank in job["ranks"]]
                    return pids if None not in pids else []
        return []

    def kill(self) -> None:
        """SIGKILL, and wait for the death."""
        assert self._process is not None
        self._process.kill()
        if self._process.wait() != -signal.SIGKILL:
            raise EnvironmentFault(f"the daemon had ended before it was killed: {self._process.returncode}")

    def reap(self, spared: Collection[int]) -> None:
        """The ranks of a daemon that was killed are children of this process now, and their zombies its to take.

        `spared`: children that somebody else waits for."""
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        for pid in map(int, children.read_text().split() if children.exists() else ()):
            if pid != self.pid and pid not in spared:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end_orphans()
        remove_stale()


@contextlib.contextmanager
def separate_daemon() -> Iterator[SeparateDaemon]:
    """One that listens; gone at the end, with whatever is left of its jobs."""
    # The path of a socket is short, that of a temporary directory need not be.
    parent = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > LONGEST_PARENT else None
    with (
        tempfile.TemporaryDirectory(prefix="flashrec-", dir=parent, ignore_cleanup_errors=True) as folder,
        subreaper(),
    ):
        daemon = SeparateDaemon(Path(folder))
        try:
            daemon.start()
            daemon.await_start()
            yield daemon
        finally:
            daemon.close()


class DaemonFault:
    """Kills the daemon in mid-training, lets the ranks train on for a while, and starts another in its place."""

    def __init__(self, daemon: SeparateDaemon, step: int) -> None:
        self._daemon = daemon
        self._step = step
        self._pids: list[int] = []
        self.strike: DaemonStrike | None = None

    @property
    def over(self) -> bool:
        """The new daemon has adopted every rank."""
        return self.strike is not None and self.strike.adopted_ns > 0

    def reap(self, spared: Collection[int]) -> None:
        """To be called often, once the daemon was killed."""
        if self.strike is not None:
            self._daemon.reap(spared)

    def advance(self, committed: int) -> None:
        """To be called often, with the number of steps that every rank has committed."""
        now = time.monotonic_ns()
        if self.strike is None:
            if committed >= self._step:
                self._kill(committed)
        elif not self.strike.started_ns:
            meanwhile = committed - self.strike.step
            if meanwhile >= WITHOUT_STEPS or now - self.strike.died_ns > WITHOUT_S * 1e9:
                self._daemon.start()
                self.strike = replace(
                    self.strike, steps_without=meanwhile, started_ns=now, new_pid=self._daemon.pid
                )
        elif not self.strike.adopted_ns and self._pids == self._daemon.rank_pids():
            self.strike = replace(self.strike, adopted_ns=time.monotonic_ns())

    def _kill(self, committed: int) -> None:
        self._pids = self._daemon.rank_pids()
        if not self._pids:
            return  # not just now: a rank is being replaced
        pid, signal_ns = self._daemon.pid, time.monotonic_ns()
        self._daemon.kill()
        self.strike = DaemonStrike(step=committed, pid=pid, signal_ns=signal_ns, died_ns=time.monotonic_ns())
