"""What a daemon writes into its job's directory for one that may have to take over.

    job            JobRecord: what was submitted, and where
    ledger         LedgerRecord: numbers that are used up
    process/p7     ProcessRecord: one file for each process that was welcomed and has not ended

Each file is one message in the control plane's codec, written beside and then renamed, so that it is whole or absent.
Torch-free.
"""

import contextlib
import os
import signal
import stat
from pathlib import Path
from typing import TypeVar

from flashrec.errors import ProtocolError
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import MAX_MESSAGE_BYTES, decode, encode

PROCESSES = "process"
_JOB, _LEDGER = "job", "ledger"

Record = TypeVar("Record", msg.JobRecord, msg.LedgerRecord, msg.ProcessRecord)


class JobFiles:
    """The files below one job's directory. Writing raises OSError (shared memory is full, say)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ledger: msg.LedgerRecord | None = None

    # --- by the daemon that runs the job ------------------------------------------------------------------

    def describe(self, job: msg.JobRecord) -> None:
        self._write(self._directory / _JOB, job)

    def count(self, ledger: msg.LedgerRecord) -> None:
        """Before what is counted happens; costs nothing while nothing changes."""
        if ledger != self._ledger:
            self._write(self._directory / _LEDGER, ledger)
            self._ledger = ledger

    def took(self, process: msg.ProcessRecord) -> None:
        self._write(self._path(process.proc), process)

    def let_go(self, proc: str) -> None:
        self._path(proc).unlink(missing_ok=True)

    def withdraw(self) -> None:
        """What cannot be kept true must not be believed: nobody will take this job over."""
        (self._directory / _JOB).unlink(missing_ok=True)

    # --- by whoever finds it ------------------------------------------------------------------------------

    def job(self) -> msg.JobRecord:
        """Raises OSError, ProtocolError."""
        return _read(self._directory / _JOB, msg.JobRecord)

    def ledger(self) -> msg.LedgerRecord:
        """Raises OSError, ProtocolError."""
        return _read(self._directory / _LEDGER, msg.LedgerRecord)

    def processes(self) -> list[msg.ProcessRecord]:
        """In the order in which they were launched. Raises OSError, ProtocolError."""
        found = [
            _read(path, msg.ProcessRecord)
            for path in (self._directory / PROCESSES).iterdir()
            if not path.name.endswith(".new")
        ]
        return sorted(found, key=lambda one: number_of(one.proc))

    def _path(self, proc: str) -> Path:
        return self._directory / PROCESSES / f"p{number_of(proc)}"

    def _write(self, path: Path, record: msg.Message) -> None:
        beside = path.with_name(path.name + ".new")
        fd = os.open(
            beside,
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
            stat.S_IRUSR | stat.S_IWUSR,
        )
        with os.fdopen(fd, "wb") as file:
            file.write(encode(record))
        os.replace(beside, path)


def number_of(proc: str) -> int:
    """Of a process that a core has named. Raises ProtocolError for any other name."""
    if not proc.startswith("p") or not proc[1:].isascii() or not proc[1:].isdecimal():
        raise ProtocolError(f"no process is ever called {proc!r:.40}")
    return int(proc[1:])


def lives(pid: int, start_ticks: int) -> bool:
    """Whether the process of this user that was started then (field 22 of its stat in /proc) has not ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return False
    fields = text.rpartition(b")")[2].split()  # the name before it may hold anything
    return int(fields[19]) == start_ticks and fields[0] not in (b"Z", b"X") and owner == os.getuid()


def end_processes(directory: Path) -> None:
    """SIGKILL to every process of a job that has no daemon, and to its process group."""
    with contextlib.suppress(OSError, ProtocolError):
        for one in JobFiles(directory).processes():
            if lives(one.pid, one.start_ticks):
                with contextlib.suppress(OSError):
                    os.killpg(one.pid, signal.SIGKILL)  # it leads its session, and so its group


def is_ours(directory: Path) -> bool:
    """Whether it is a directory of this user's that nobody else can look into."""
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _read(path: Path, kind: type[Record]) -> Record:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        record = decode(file.read(MAX_MESSAGE_BYTES + 1), kind | None)
    assert isinstance(record, kind)
    return record
