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

    def training(self, tags: Sequence[Tag | None], faults: Sequence[FaultReport]) -> None: ...


@dataclass
class Record:
    """Everything known about the run, while it goes on and afterwards. Instants are `time.monotonic_ns()`."""

    faults: list[Fault]
    strikes: list[Strike] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    standbys: dict[int, str] = field(default_factory=dict)
    """By the fault's index: how far the process was that took the rank; "none" if it had to be started."""
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

    def __init__(self, client: Client, settings: Settings, faults: list[Fault], out: Path) -> None:
        self._client = client
        self._settings = settings
        self._out = out
        self.record = Record(faults)
        self._taken_by: dict[int, list[str]] = {}  # rank -> who took it, in order
        self._disturbed_since: int | None = time.monotonic_ns()

    def run(self, watcher: Watcher) -> Record:
        began = time.monotonic()
        submission = Submission(self._client, self._job(), lambda rank, stream: False)
        readers = [TagReader(tag_path(submission.shm_dir, rank)) for rank in range(self._settings.ranks)]
        injector = InjectorProcess(
            self._client.run_dir,
            submission.shm_dir,
            self._settings.ranks,
            self._settings.standby,
            self.record.faults,
        )
        moved_at, last_commits = began, -1
        try:
            with Client(self._client.run_dir) as observer:
                while submission.ended is None:
                    self._take(submission.poll(POLL_S), observer)
                    self._note(injector.poll())
                    tags = [reader.read() for reader in readers]
                    watcher.training(tags, self.record.reports())
                    commits = sum(tag.committed for tag in tags if tag is not None)
                    if commits != last_commits:
                        moved_at, last_commits = time.monotonic(), commits
                    elif time.monotonic() - moved_at > STALLED_S:
                        raise RecoveryFailed(
                            f"no step was committed for {STALLED_S:.0f} s: {_where(tags)}; the job is ended"
                        )
                self._note(injector.poll())
                self.record.recoveries = ask_status(observer)["last_job"]["recoveries"]
                watcher.training(tags, self.record.reports())
        finally:
            injector.close()
            for reader in readers:
                reader.close()
        if submission.ended.code:
            self.record.failure = submission.ended.reason
        if self._disturbed_since is not None:
            self.record.disturbed.append((self._disturbed_since, time.monotonic_ns()))
        self.record.seconds = time.monotonic() - began
        return self.record

    def _job(self) -> msg.Submit:
        depth = self._settings.standby
        arguments = (
            *self._settings.arguments(self._out),
            "--standby",
            depth if depth != "none" else "forked",
        )
        return submit_from_here(
            str(PROGRAMS / "train.py"),
            world_size=self._settings.ranks,
            args=arguments,
            num_standbys=int(depth != "none"),
        )

    def _take(self, message: msg.Message | None, observer: Client) -> None:
        match message:
            case msg.Output(rank, "stderr", data):
                self.record.stderr.append(f"[{rank}]: {data.decode(errors='replace')}")
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
                job = ask_status(observer)["job"]
                self.record.recoveries = job["recoveries"] if job is not None else self.record.recoveries
                if self._settings.standby == "none":
                    self._undisturbed()
            case "running" if self._settings.standby == "none":
                self._undisturbed()

    def _note(self, strikes: list[Strike]) -> None:
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
                self.record.standbys[strike.index] = self._taken_by[strike.rank][number]

    def _undisturbed(self) -> None:
        if self._disturbed_since is not None:
            self.record.disturbed.append((self._disturbed_since, time.monotonic_ns()))
            self._disturbed_since = None


def _where(tags: Sequence[Tag | None]) -> str:
    return ", ".join(
        f"rank {rank}: {tag.place} of step {tag.step}" if tag is not None else f"rank {rank}: not started"
        for rank, tag in enumerate(tags)
    )
