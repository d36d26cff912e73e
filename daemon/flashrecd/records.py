"""Keeps true what a daemon must know that takes over a job whose own has died (see `flashrec.protocol.jobfiles`).

Everything is written before it happens: a number before it is used, a process before it is welcomed.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from flashrec import __version__
from flashrec.protocol import messages as msg
from flashrec.protocol import records as rec
from flashrec.protocol.codec import encode
from flashrec.protocol.jobfiles import JobFiles
from flashrecd.core.state import JobState
from flashrecd.launching import Process
from flashrecd.supervise.descendants import process_stat


class Withdrawable:
    """Records of a job, or a part in one. If they cannot be written (shared memory is full) they are withdrawn, which
    `note(event, reason)` is told: nobody will take over, and all else goes on."""

    def __init__(self, directory: Path, note: Callable[[str, str], None]) -> None:
        self._files = JobFiles(directory)
        self._note = note
        self._withdrawn = False

    def _try(self, write: Callable[[], None]) -> None:
        if self._withdrawn:
            return
        try:
            write()
        except OSError as error:
            self._withdrawn = True
            with contextlib.suppress(OSError):
                self._files.withdraw()
            self._note("no adoption", f"should this daemon die, none can take over: {error}")


def process_record(
    process: Process, *, claims: tuple[tuple[tuple[int, ...], str], ...] | None, why_sealed: str
) -> rec.ProcessRecord:
    """As it is now; the rest as in rec.ProcessRecord."""
    stat = process_stat(process.pid)
    return rec.ProcessRecord(
        proc=process.name,
        pid=process.pid,
        start_ticks=stat.start_ticks if stat is not None else 0,
        rank=process.rank,
        generation=process.generation,
        replacement=process.replacement,
        own_files=process.own_files,
        claims=claims,
        why_sealed=why_sealed,
    )


class Records(Withdrawable):
    """Of one job."""

    def __init__(self, directory: Path, note: Callable[[str, str], None]) -> None:
        super().__init__(directory, note)
        self._holders: dict[int, str] = {}

    def describe(self, job: str, submit: msg.Submit | msg.Join, address: str, log_dir: Path) -> None:
        """The job begins."""
        client = process_stat(submit.pid)
        record = rec.JobRecord(
            release=__version__,
            job=job,
            address=address,
            log_dir=str(log_dir),
            client_ticks=client.start_ticks if client is not None else 0,
            submit=encode(submit),
        )
        self._try(lambda: self._files.describe(record))

    def count(self, state: JobState) -> None:
        """Before what the core has just decided is done."""
        ledger = rec.LedgerRecord(state.generation, state.num_launched, state.restarts, state.tries)
        self._try(lambda: self._files.count(ledger))

    def took(self, process: Process, state: JobState) -> None:
        """Before it is welcomed, before it is given a rank, and when its state is known. The record of a rank's last
        holder stays until there is one of the next: it says what the rank holds."""
        member = state.members[process.rank] if process.rank is not None else None
        claims = member.claims if member is not None else None
        record = process_record(process, claims=claims, why_sealed=state.why_sealed)
        self._try(lambda: self._files.took(record))
        if process.rank is not None:
            before = self._holders.get(process.rank, process.name)
            self._holders[process.rank] = process.name
            if before != process.name:
                self._try(lambda: self._files.let_go(before))

    def holds(self, process: Process) -> None:
        """There is a record of it, written by the daemon before this one; it is its rank's last holder."""
        if process.rank is not None:
            self._holders[process.rank] = process.name

    def ended(self, process: Process) -> None:
        if process.rank is None:
            self._try(lambda: self._files.let_go(process.name))
