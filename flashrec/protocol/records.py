"""What lies in files of a job's directory for a daemon that takes over.

`jobfiles` writes and reads them; their form is that of messages, see `codec`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job, as long as it lives. `submit`: its Submit, or the Join that began it, encoded. `client_ticks`: when the
    process that submitted it was started (with its pid, that names it)."""

    release: str
    job: str
    address: str
    log_dir: str
    client_ticks: int
    submit: bytes


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """What of the daemon's decisions no rank could tell: numbers that must not be used twice, and budgets."""

    generation: int
    num_launched: int
    restarts: int
    tries: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process that was welcomed. `start_ticks`: its start, which with the pid names it for ever. `own_files`: it
    prints into files of its own, not into those of a rank's first process. `claims` and `why_sealed` as in Protected:
    its rank's, or None before; the job's."""

    proc: str
    pid: int
    start_ticks: int
    rank: int | None
    generation: int
    replacement: bool
    own_files: bool
    claims: tuple[tuple[tuple[int, ...], str], ...] | None
    why_sealed: str


@dataclass(frozen=True, slots=True)
class PartRecord:
    """The job is another node's, and this one has this part in it (see `agents`)."""

    part: str


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """The node's shard server: its process (see ProcessRecord), and where other nodes reach it."""

    pid: int
    start_ticks: int
    address: str


IN_FILES = JobRecord | LedgerRecord | ProcessRecord | PartRecord | ShardRecord
