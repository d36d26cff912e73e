"""The run under flashrec: a private daemon's job, an injector that kills its ranks, somebody who watches."""

import json
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flashrec.cli.client import Client, ask_status
from flashrec.cli.demo.daemon import DaemonFault, DaemonStrike
from flashrec.cli.demo.faults import FaultReport, join, unplanned
from flashrec.cli.demo.injector import InjectorProcess, Strike
from flashrec.cli.demo.schedule import Fault
from flashrec.cli.demo.settings import PROGRAMS, Settings
from flashrec.cli.run import Submission
from flashrec.cli.submit import submit_from_here
from flashrec.errors import RecoveryFailed
from flashrec.protocol import messages as msg
from flashrec.protocol.tag import Tag, TagReader, tag_path

POLL_S = 0.05
STALLED_S = 90.0
KEPT_STDERR_LINES = 30
_TAKEN_BY = re.compile(r"\ba (\w+) standby, takes the rank$")


class Watcher(Protocol):
    """Sees the run as it goes."""

    def training(self, tags: Sequence[Tag | None], record: "Record") -> None: ...


class Tags(Protocol):
    """Those of a job's ranks, as they are now."""

    def all(self) -> list[Tag | None]: ...

    def close(self) -> None: ...


class JobTags:
    """Of a job whose ranks are on this node."""

    def __init__(self, shm_dir: Path, world_size: int) -> None:
        self._readers = [TagReader(tag_path(shm_dir, rank)) for rank in range(world_size)]

    def all(self) -> list[Tag | None]:
        return [reader.read() for reader in self._readers]

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


@dataclass
class Record:
    """Everything known about the run, while it goes on and afterwards. Instants are `time.monotonic_ns()`."""

    faults: list[Fault]
    strikes: list[Strike] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    standbys: dict[tuple[int, int], str] = field(default_factory=dict)
    """By the fault's index and the rank: how far the process was that took it; "none" if it had to be started."""
    daemon: DaemonStrike | None = None
    regime: str = "unknown"
    why_sealed: str = ""
    disturbed: list[tuple[int, int]] = field(default_factory=list)
    """From each kill (and from the start) until a standby stood ready again."""
    seconds: float = 0.0
    failure: str | None = None
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_STDERR_LINES))

    def reports(self) -> list[FaultReport]:
        return join(self.faults, self.strikes, self.recoveries, self.standbys)

    def unplanned(self) -> list[str]:
        return unplanned(self.strikes, self.recoveries)


class Training:
    """Runs train.py to its end. `run()` raises RecoveryFailed when nothing moves any more."""

    def __init__(
        self,
        client: Client,
        settings: Settings,
        faults: list[Fault],
        out: Path,
        daemon: DaemonFault | None = None,
    ) -> None:
        """`daemon`: strikes before all `faults`, if at all."""
        self._client = client
        self._settings = settings
        self._out = out
        self._daemon = daemon
        self._injector: InjectorProcess | None = None
        self.record = Record(faults)
        self._taken_by: dict[int, list[str]] = {}  # rank -> who took it, in order
        self._disturbed_since: int | None = time.monotonic_ns()

    def run(self, watcher: Watcher) -> Record:
        began = time.monotonic()
        submission = Submission(self._client, self._job(), lambda rank, stream: False)
        readers = self._tags(submission)
        moved_at, last_commits = began, -1
        try:
            with Client(self._client.run_dir) as observer:
                while submission.ended is None:
                    tags = readers.all()
                    self._strike(submission, tags)
                    self._take(submission.poll(POLL_S), observer)
                    watcher.training(tags, self.record)
                    commits = sum(tag.committed for tag in tags if tag is not None)
                    if commits != last_commits:
                        moved_at, last_commits = time.monotonic(), commits
                    elif time.monotonic() - moved_at > STALLED_S:
                        raise RecoveryFailed(
                            f"no step was committed for {STALLED_S:.0f} s: {_where(tags)}; the job is ended"
                        )
                self._note()
                self._ended(ask_status(observer)["last_job"])
                watcher.training(readers.all(), self.record)
        finally:
            self._close()
            readers.close()
        if submission.ended.code:
            self.record.failure = submission.ended.reason
        if self._disturbed_since is not None:
            self.record.disturbed.append((self._disturbed_since, time.monotonic_ns()))
        self.record.seconds = time.monotonic() - began
        return self.record

    def _tags(self, submission: Submission) -> "Tags":
        return JobTags(submission.shm_dir, self._settings.ranks)

    def _strike(self, submission: Submission, tags: Sequence[Tag | None]) -> None:
        """The daemon first, if it is to be struck; then the ranks."""
        if self._injector is None and self._daemon is not None and not self._daemon.over:
            self._daemon.advance(min(tag.committed if tag is not None else 0 for tag in tags))
            self.record.daemon = self._daemon.strike
        elif self._injector is None:
            self._injector = InjectorProcess(
                self._client.run_dir,
                submission.shm_dir,
                self._settings.ranks,
                self._settings.standby,
                self.record.faults,
            )
        if self._daemon is not None:
            self._daemon.reap([self._injector.pid] if self._injector is not None else [])
        self._note()

    def _close(self) -> None:
        if self._injector is not None:
            self._injector.close()

    def _job(self) -> msg.Submit:
        return submit_from_here(
            str(PROGRAMS / "train.py"),
            world_size=self._settings.ranks,
            args=self._settings.training_arguments(self._out),
            num_standbys=int(self._settings.standby != "none"),
        )

    def _take(self, message: msg.Message | None, observer: Client) -> None:
        match message:
            case msg.Output(rank, "stderr", data):
                lines = data.decode(errors="replace").splitlines()
                self.record.stderr.extend(f"[{rank}]: {line}" for line in lines)
            case msg.Happened(line):
                self._happened(json.loads(line), observer)
            case _:
                pass

    def _happened(self, event: dict[str, Any], observer: Client) -> None:
        match event["event"]:
            case "replacement":
                taken = _TAKEN_BY.search(event["reason"])
                self._taken_by.setdefault(event["rank"], []).append(taken.group(1) if taken else "none")
                self._assign_standbys()
            case "standby ready":
                if event["reason"].endswith(f" is {self._settings.standby}"):
                    self._undisturbed()
            case "recovered":
                self._remember(ask_status(observer)["job"])
                if self._settings.standby == "none":
                    self._undisturbed()
            case "regime":
                self._remember(ask_status(observer)["job"])
            case "running" if self._settings.standby == "none":
                self._undisturbed()

    def _ended(self, job: dict[str, Any] | None) -> None:
        """The job is over: its last status."""
        self._remember(job)

    def _remember(self, job: dict[str, Any] | None) -> None:
        """What the daemon's status says about the job that only the daemon knows."""
        if job is not None:
            self.record.recoveries = job["recoveries"]
            self.record.regime, self.record.why_sealed = job["regime"], job["why_sealed"]

    def _note(self) -> None:
        strikes = self._injector.poll() if self._injector is not None else []
        for strike in strikes:
            self.record.strikes.append(strike)
            if self._disturbed_since is None:
                self._disturbed_since = strike.signal_ns
        if strikes:
            self._assign_standbys()

    def _assign_standbys(self) -> None:
        """The n-th kill of a rank led to its n-th replacement."""
        counts: dict[int, int] = {}
        for strike in self.record.strikes:
            number = counts.get(strike.rank, 0)
            counts[strike.rank] = number + 1
            if number < len(self._taken_by.get(strike.rank, ())):
                self.record.standbys[strike.index, strike.rank] = self._taken_by[strike.rank][number]

    def _undisturbed(self) -> None:
        if self._disturbed_since is not None:
            self.record.disturbed.append((self._disturbed_since, time.monotonic_ns()))
            self._disturbed_since = None


def _where(tags: Sequence[Tag | None]) -> str:
    return ", ".join(
        f"rank {rank}: {tag.place} of step {tag.step}" if tag is not None else f"rank {rank}: not started"
        for rank, tag in enumerate(tags)
    )
