"""Jobs for the benchmarks: a module run as ranks under a daemon of its own, watched and disturbed from here."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flashrec.cli.client import Client, ask_status, private_daemon
from flashrec.cli.submit import submit_from_here
from flashrec.protocol import messages as msg

ROOT = Path(__file__).resolve().parent.parent
KEPT_LINES = 60


class JobFailed(Exception):
    """The job ended otherwise than well; the message has its last output."""


class Job:
    """One submitted job. `poll()` must be called now and then: it takes in what the ranks print."""

    def __init__(self, client: Client, watcher: Client, submit: msg.Submit) -> None:
        self._client = client
        self._watcher = watcher
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._num_bytes = 0
        self._present_at = 0.0
        answer = client.ask(submit)
        assert isinstance(answer, msg.Submitted)
        self.name = answer.job
        self.ended: msg.JobEnded | None = None
        self.daemon_pid: int = self.status()["daemon"]["pid"]

    def poll(self, timeout_s: float) -> None:
        """Take in messages for `timeout_s`, or until the job has ended."""
        until = time.monotonic() + timeout_s
        while self.ended is None:
            now = time.monotonic()
            if now > self._present_at:
                self._present_at = now + 0.5
                self._client.send(msg.Present(self.name, self._num_bytes))
            match self._client.receive(min(0.1, max(0.0, until - now))):
                case msg.Output() as output:
                    self._num_bytes += len(output.data) + msg.OUTPUT_OVERHEAD_BYTES
                    self._tail.append(f"[{output.rank}] {output.data.decode(errors='replace')}")
                case msg.JobEnded() as ended:
                    self.ended = ended
                case _:
                    pass
            if time.monotonic() >= until:
                return

    def wait(self, deadline_s: float) -> None:
        """Until the job's end. JobFailed if it fails, or takes longer."""
        self.poll(deadline_s)
        if self.ended is None:
            raise JobFailed(f"the job did not end in {deadline_s:.0f} s\n{self.output}")
        self.check()

    def check(self) -> None:
        """JobFailed if the job has ended, and not well."""
        if self.ended is not None and self.ended.code:
            raise JobFailed(f"the job failed: {self.ended.reason}\n{self.output}")

    def status(self) -> dict[str, Any]:
        """The daemon's status document."""
        return ask_status(self._watcher)

    def stop(self) -> None:
        """End the job, whatever it is doing."""
        self._client.send(msg.StopJob(self.name, hard=True))
        self.poll(10)

    @property
    def output(self) -> str:
        return "\n".join(self._tail)


@contextlib.contextmanager
def run_job(
    module: str,
    args: Sequence[object],
    *,
    ranks: int,
    standbys: int = 0,
    start_method: str = "fork",
) -> Iterator[Job]:
    """`flashrec run -m module args...` under a daemon that exists for this job alone."""
    submit = submit_from_here(
        module,
        world_size=ranks,
        module=True,
        args=[str(arg) for arg in args],
        cwd=str(ROOT),
        env={**os.environ, "PYTHONPATH": search_path()},
        num_standbys=standbys,
        start_method=start_method,
        suspect_after_s=10.0,
    )
    with private_daemon() as client, Client(client.run_dir) as watcher:
        job = Job(client, watcher, submit)
        try:
            yield job
        finally:
            if job.ended is None:
                job.stop()


def search_path() -> str:
    """PYTHONPATH for a process that must find what this one finds."""
    return os.pathsep.join([str(ROOT), *[path for path in sys.path if path]])


def cpu_seconds(pid: int) -> float:
    """CPU time, user and system, that process `pid` has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
