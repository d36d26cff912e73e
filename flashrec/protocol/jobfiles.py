"""What a daemon writes into its job's directory for one that may have to take over.

    job            JobRecord: what was submitted, and where
    ledger         LedgerRecord: numbers that are used up
    process/p7     ProcessRecord: one file for each process that was welcomed and has not ended

and where the job is led by another node's daemon, instead of the ledger

    part           PartRecord: which part of it this node has
    heard          the number of the last order, eight bytes
    shards         ShardRecord: the process that serves the node's shards

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
from flashrec.protocol import records as rec
from flashrec.protocol.codec import MAX_MESSAGE_BYTES, decode, encode

PROCESSES = "process"
_JOB, _LEDGER = "job", "ledger"
_PART, _HEARD, _SHARDS = "part", "heard", "shards"
_NUMBER_BYTES = 8

Record = TypeVar(
    "Record", rec.JobRecord, rec.LedgerRecord, rec.ProcessRecord, rec.PartRecord, rec.ShardRecord
)


class JobFiles:
    """The files below one job's directory. Writing raises OSError (shared memory is full, say)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ledger: rec.LedgerRecord | None = None
        self._heard_fd = -1

    # --- by the daemon that runs the job ------------------------------------------------------------------

    def describe(self, job: rec.JobRecord) -> None:
        self._write(self._directory / _JOB, job)

    def count(self, ledger: rec.LedgerRecord) -> None:
        """Before what is counted happens; costs nothing while nothing changes."""
        if ledger != self._ledger:
            self._write(self._directory / _LEDGER, ledger)
            self._ledger = ledger

    def took(self, process: rec.ProcessRecord) -> None:
        self._write(self._path(process.proc), process)

    def let_go(self, proc: str) -> None:
        self._path(proc).unlink(missing_ok=True)

    def takes_part(self, part: rec.PartRecord) -> None:
        """Before `describe`, which makes it count."""
        self._write(self._directory / _PART, part)

    def heard(self, number: int) -> None:
        """Before the order is carried out."""
        if self._heard_fd < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._heard_fd = os.open(self._directory / _HEARD, flags, stat.S_IRUSR | stat.S_IWUSR)
        os.pwrite(self._heard_fd, number.to_bytes(_NUMBER_BYTES, "little"), 0)

    def serves(self, shards: rec.ShardRecord) -> None:
        self._write(self._directory / _SHARDS, shards)

    def close(self) -> None:
        if self._heard_fd >= 0:
            os.close(self._heard_fd)
            self._heard_fd = -1

    def withdraw(self) -> None:
        """What cannot be kept true must not be believed: nobody will take this job over."""
        (self._directory / _JOB).unlink(missing_ok=True)

    # --- by whoever finds it ------------------------------------------------------------------------------

    def job(self) -> rec.JobRecord:
        """Raises OSError, ProtocolError."""
        return _read(self._directory / _JOB, rec.JobRecord)

    def ledger(self) -> rec.LedgerRecord:
        """Raises OSError, ProtocolError."""
        return _read(self._directory / _LEDGER, rec.LedgerRecord)

    @property
    def is_described(self) -> bool:
        """Whether there is a job that may be taken over."""
        return (self._directory / _JOB).exists()

    @property
    def is_part(self) -> bool:
        """Of a job that another node's daemon leads."""
        return (self._directory / _PART).exists()

    def part(self) -> rec.PartRecord:
        """Raises OSError, ProtocolError."""
        return _read(self._directory / _PART, rec.PartRecord)

    def last_heard(self) -> int:
        """Raises OSError, ProtocolError."""
        data = (self._directory / _HEARD).read_bytes()
        if len(data) != _NUMBER_BYTES:
            raise ProtocolError(f"the number of an order has {_NUMBER_BYTES} bytes, not {len(data)}")
        return int.from_bytes(data, "little")

    def shards(self) -> rec.ShardRecord:
        """Raises OSError, ProtocolError."""
        return _read(self._directory / _SHARDS, rec.ShardRecord)

    def processes(self) -> list[rec.ProcessRecord]:
        """In the order in which they were launched. Raises OSError, ProtocolError."""
        found = [
            _read(path, rec.ProcessRecord)
            for path in (self._directory / PROCESSES).iterdir()
            if not path.name.endswith(".new")
        ]
        return sorted(found, key=lambda one: number_of(one.proc))

    def _path(self, proc: str) -> Path:
        return self._directory / PROCESSES / f"p{number_of(proc)}"

    def _write(self, path: Path, record: rec.IN_FILES) -> None:
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
