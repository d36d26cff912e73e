"""Taking over a job whose daemon has died: finding it, and watching what is left of it.

A directory in shared memory is believed if it is this user's and closed to all others, if processes hold it (else
it has been removed), and if what lies in it decodes and names this run directory. A process is believed to be the one
that was recorded if pid, start and user agree; the core hears of every other as of one that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashrec import __version__
from flashrec.errors import FlashrecError, ProtocolError
from flashrec.protocol import messages as msg
from flashrec.protocol import records as rec
from flashrec.protocol.codec import decode
from flashrec.protocol.jobdir import PARENT, JobDirectory, job_directories
from flashrec.protocol.jobfiles import JobFiles, is_ours, lives, number_of
from flashrec.protocol.phase import Phase
from flashrecd.core import events as ev
from flashrecd.core.state import RankStatus
from flashrecd.launching import Process
from flashrecd.supervise import Supervisor

if TYPE_CHECKING:
    from flashrecd.jobrun import JobRun

Note = Callable[[str, str], None]

_STATUS_AT = {
    Phase.STARTING: RankStatus.STARTING,
    Phase.BUILDING: RankStatus.BUILDING,
    Phase.HELD: RankStatus.PARKED,
    Phase.PARKED: RankStatus.PARKED,
    Phase.REFORMING: RankStatus.FORMING,
    Phase.LEFT: RankStatus.LEFT,
    Phase.GONE: RankStatus.LEFT,
}


@dataclass(frozen=True)
class Orphaned:
    """A job without a daemon. `processes`: in the order in which they were launched."""

    directory: JobDirectory
    record: rec.JobRecord
    submit: msg.Submit | msg.Join
    ledger: rec.LedgerRecord
    processes: tuple[rec.ProcessRecord, ...]


def find(address: str, note: Note, parent: Path = PARENT) -> Orphaned | None:
    """The job that a daemon with this address ran, if it has living ranks. What cannot be taken over is noted."""
    found: Orphaned | None = None
    for path in job_directories(parent):
        try:
            one = _read(path, address)
        except (OSError, FlashrecError) as error:
            note("not adopted", f"{path}: {error}")
            continue
        if one is None:
            continue
        if found is not None:
            note("not adopted", f"{path}: {found.directory.path} is adopted already")
            one.directory.leave()
            continue
        found = one
    return found


def _read(path: Path, address: str) -> Orphaned | None:
    """None: it is not this daemon's to take."""
    files = JobFiles(path)
    if not is_ours(path) or not files.is_described or files.is_part:
        return None
    record = files.job()
    if record.address != address:
        return None
    if record.release != __version__:
        raise ProtocolError(f"its job is of flashrec {record.release}, this daemon of {__version__}")
    submit = decode(record.submit, msg.Submit | msg.Join)
    assert isinstance(submit, msg.Submit | msg.Join)
    if isinstance(submit, msg.Submit) and submit.num_nodes + submit.num_spare_nodes > 1:
        raise ProtocolError("its job runs on several nodes, which no other leader can take over yet")
    processes = tuple(files.processes())
    if not any(one.rank is not None and lives(one.pid, one.start_ticks) for one in processes):
        raise ProtocolError("no rank of its job lives")
    return Orphaned(JobDirectory.hold(path), record, submit, files.ledger(), processes)


def take_over(job: JobRun, orphaned: Orphaned, supervisor: Supervisor) -> None:
    """Watch what lives of it, end the standbys, and tell the core. The job's directory is `orphaned.directory`."""
    last: dict[int, rec.ProcessRecord] = {}
    for record in orphaned.processes:
        if record.rank is not None and record.rank < orphaned.submit.world_size:
            last[record.rank] = record
    holders = [last.get(rank) for rank in range(orphaned.submit.world_size)]
    ledger = orphaned.ledger
    adopt = ev.Adopt(
        generation=ledger.generation,
        num_launched=max([ledger.num_launched, *(number_of(one.proc) for one in orphaned.processes)]),
        restarts=ledger.restarts,
        tries=ledger.tries,
        holders=tuple(one.proc if one else f"unknown-{rank}" for rank, one in enumerate(holders)),
        claims=tuple(one.claims if one else None for one in holders),
        why_sealed=next((one.why_sealed for one in last.values() if one.why_sealed), ""),
    )
    job.feed(adopt)
    if job.records is not None:
        for record in last.values():
            job.records.holds(Process.of(record))
    ours = isinstance(orphaned.submit, msg.Submit)
    for record in orphaned.processes:
        if record not in last.values() and _watched(job, record, supervisor, ours):
            # A standby, which has nobody to wait for any more, or what the last daemon was about to end.
            supervisor.kill_group(record.proc)
    lost = [
        proc
        for proc, holder in zip(adopt.holders, holders, strict=True)
        if holder is None or not _watched(job, holder, supervisor, ours)
    ]
    for proc in lost:
        rank = adopt.holders.index(proc)
        holder = holders[rank]
        job.processes[proc] = Process.of(holder) if holder else Process(proc, 0, rank, 0, replacement=True)
        job.exited(proc, None, None)


def _watched(job: JobRun, record: rec.ProcessRecord, supervisor: Supervisor, ours: bool) -> bool:
    """Whether it lives; then its end will be told. `ours`: a daemon started it, no other launcher."""
    if not lives(record.pid, record.start_ticks):
        return False
    try:
        supervisor.adopt(record.proc, record.pid, start_ticks=record.start_ticks, leads_session=ours)
    except FlashrecError:
        return False
    job.processes[record.proc] = Process.of(record)
    return True


def refusal(offer: msg.Rejoin, job: str, process: Process | None, *, is_awaited: bool) -> msg.Refused | None:
    """Why an offer to be adopted is not taken; None if it is. `is_awaited`: whether `process` may still make one."""
    if offer.job != job or process is None or process.gone or not is_awaited:
        return msg.Refused("stranger", f"{offer.proc} of job {offer.job} is not one that is awaited here")
    if (offer.pid, offer.rank) != (process.pid, process.rank):
        return msg.Refused("stranger", f"{offer.proc} is not process {offer.pid} with rank {offer.rank}")
    return None


def standing(offer: msg.Rejoin, private: tuple[int, ...], sealed: tuple[int, ...]) -> ev.Adopted:
    """What a rank says of itself, in the core's words. ProtocolError for a phase that there is not."""
    try:
        phase = Phase(offer.phase)
    except ValueError:
        raise ProtocolError(f"there is no phase {offer.phase}") from None
    return ev.Adopted(
        offer.proc,
        offer.generation,
        _STATUS_AT.get(phase, RankStatus.LIVE),
        offer.version,
        offer.can_advance,
        offer.claims,
        offer.why_sealed,
        private,
        sealed,
    )
