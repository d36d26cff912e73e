"""What the daemon of a node that takes part in another's job writes down, and what the next one finds if it dies.

Where it lies, and what is believed of it, is as for a daemon that leads a job: see `flashrec.protocol.jobfiles` and
`flashrecd.adoption`. Everything is written before it happens: an order's number before it is carried out, a process
before it is welcomed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flashrec import __version__
from flashrec.errors import FlashrecError, ProtocolError
from flashrec.protocol import messages as msg
from flashrec.protocol import records as rec
from flashrec.protocol.codec import decode, encode
from flashrec.protocol.jobdir import PARENT, JobDirectory, job_directories
from flashrec.protocol.jobfiles import JobFiles, is_ours
from flashrecd.launching import Process
from flashrecd.records import Withdrawable, process_record

Note = Callable[[str, str], None]
HOLD_TRIES = 5
HOLD_PAUSE_S = 0.02


class PartRecords(Withdrawable):
    """Of one part."""

    def describe(
        self, part: str, job: str, submit: msg.Submit, *, heard: int, address: str, log_dir: Path
    ) -> None:
        """The part begins. `heard`: the number of the order that said so."""
        record = rec.JobRecord(
            release=__version__,
            job=job,
            address=address,
            log_dir=str(log_dir),
            client_ticks=0,
            submit=encode(submit),
        )
        self._try(lambda: self._files.heard(heard))
        self._try(lambda: self._files.takes_part(rec.PartRecord(part)))
        self._try(lambda: self._files.describe(record))

    def heard(self, number: int) -> None:
        self._try(lambda: self._files.heard(number))

    def took(self, process: Process) -> None:
        """It runs, or has been given a rank."""
        record = process_record(process, claims=None, why_sealed="")
        self._try(lambda: self._files.took(record))

    def forgot(self, proc: str) -> None:
        """Nothing is left of it, nor to be told."""
        self._try(lambda: self._files.let_go(proc))

    def close(self) -> None:
        self._files.close()


@dataclass(frozen=True)
class OrphanedPart:
    """A part without a daemon. `heard`: the number of the last order. `processes`: in the order of their launch."""

    directory: JobDirectory
    part: str
    heard: int
    record: rec.JobRecord
    submit: msg.Submit
    shards: rec.ShardRecord
    processes: tuple[rec.ProcessRecord, ...]


def find_part(address: str, note: Note, parent: Path = PARENT) -> OrphanedPart | None:
    """The part that a daemon with this address had. What cannot be taken over is noted."""
    found: OrphanedPart | None = None
    for path in job_directories(parent):
        try:
            one = _read(path, address)
        except (OSError, FlashrecError) as error:
            note("not adopted", f"{path}: {error}")
            continue
        if one is not None and found is not None:
            note("not adopted", f"{path}: {found.directory.path} is adopted already")
            one.directory.leave()
        elif one is not None:
            found = one
    return found


def _read(path: Path, address: str) -> OrphanedPart | None:
    """None: it is not this daemon's to take."""
    files = JobFiles(path)
    if not is_ours(path) or not files.is_part or not files.is_described:
        return None
    record = files.job()
    if record.address != address:
        return None
    if record.release != __version__:
        raise ProtocolError(f"its job is of flashrec {record.release}, this daemon of {__version__}")
    submit = decode(record.submit, msg.Submit)
    shards, processes = files.shards(), tuple(files.processes())
    heard, part = files.last_heard(), files.part().part
    return OrphanedPart(_hold(path), part, heard, record, submit, shards, processes)


def _hold(path: Path) -> JobDirectory:
    """The shard server asks now and then whether it is alone, and then nobody else can come, for an instant."""
    for _ in range(HOLD_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            return JobDirectory.hold(path)
        time.sleep(HOLD_PAUSE_S)
    return JobDirectory.hold(path)
