"""Every message of the control plane, as a frozen value. See `codec` for how they travel.

Three kinds of peers talk to the daemon's control socket: processes it started (ranks and standbys), ranks that
another launcher started, and command lines; nobody else: the socket is `ipc://` in a directory only its user can enter.

Instants are `time.monotonic_ns()`, which all processes of a machine share.
"""

from dataclasses import dataclass

# --- from a process the daemon started ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a process: who it is, and which release it runs."""

    proc: str
    pid: int
    release: str


@dataclass(frozen=True, slots=True)
class Join:
    """First message of a rank that another launcher started, in place of Hello. `job`: the name its user knows;
    `target`: the script's path; `restarted`: the launcher has started this rank before."""

    job: str
    target: str
    rank: int
    world_size: int
    pid: int
    launcher_pid: int
    restarted: bool
    release: str


@dataclass(frozen=True, slots=True)
class Rejoin:
    """First message of a rank whose daemon has died, to the one that runs in its place: what the rank is, and where it
    stands. `phase` is a `flashrec.protocol.phase.Phase`; what the other fields mean follows from it, and from the
    messages that they repeat (Hello, Protected, Parked, BuiltOffered)."""

    proc: str
    pid: int
    release: str
    job: str
    rank: int
    generation: int
    phase: int
    version: int | None
    can_advance: bool
    claims: tuple[tuple[tuple[int, ...], str], ...] | None
    why_sealed: str
    arena_bytes: int
    built_offered: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    proc: str


@dataclass(frozen=True, slots=True)
class BuiltOffered:
    """init(standby="built"): a standby may run the script up to its first step."""

    proc: str


@dataclass(frozen=True, slots=True)
class StandbyReady:
    proc: str
    depth: str


@dataclass(frozen=True, slots=True)
class Protected:
    """`claims`: (ranks that hold the same bytes, digest of their layout) for each replica set. `why_sealed`: what the
    live regime would not protect, "" if nothing. `arena_bytes`: shared memory that the sealed regime would take."""

    proc: str
    claims: tuple[tuple[tuple[int, ...], str], ...]
    why_sealed: str
    arena_bytes: int


@dataclass(frozen=True, slots=True)
class Switched:
    """The ranks have agreed in their gate on the sealed regime, and this is why."""

    proc: str
    why_sealed: str


@dataclass(frozen=True, slots=True)
class Parked:
    proc: str
    generation: int
    version: int | None
    can_advance: bool
    at_ns: int


@dataclass(frozen=True, slots=True)
class Exported:
    """A survivor's part of the state lies in shared memory; `manifest` is for those who pull it."""

    proc: str
    generation: int
    rank: int
    manifest: bytes
    at_ns: int


@dataclass(frozen=True, slots=True)
class Formed:
    proc: str
    generation: int
    buckets: str
    pulled_ns: int
    rehearsed_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Committed:
    """First commit after a forming, or after a redo; later ones show in the tag alone."""

    proc: str
    generation: int
    version: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception left the script; the process is about to exit."""

    proc: str
    step: int | None
    traceback: str


@dataclass(frozen=True, slots=True)
class Ending:
    """The script is over, and the process about to exit with `code`: for a daemon that cannot ask the kernel, because
    another program started the process."""

    proc: str
    code: int


@dataclass(frozen=True, slots=True)
class Leaving:
    proc: str
    generation: int
    version: int


@dataclass(frozen=True, slots=True)
class Noted:
    """Something a person should read in the event log."""

    proc: str
    event: str
    step: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Put:
    """Rendezvous: make a value known to the other ranks of this generation."""

    proc: str
    generation: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Get:
    """Rendezvous: answered with a Value as soon as somebody has put the key."""

    proc: str
    generation: int
    key: str


# --- to such a process --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello, Join or Rejoin: what the job looks like. `rank` None: you are a standby. `external`: another
    launcher starts this job's ranks, and starts all of them again when one is lost. `patience_s`: how long to wait for
    another daemon, should this one die, where training cannot go on without; 0: none will come."""

    proc: str
    job: str
    shm_dir: str
    rank: int | None
    world_size: int
    generation: int
    replacement: bool
    pull: str
    shard_address: str
    heartbeat_s: float
    daemon_pid: int
    external: bool
    patience_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The daemon does not accept the sender; `reason` is for a person."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """To a forked standby: run the script up to its first step."""


@dataclass(frozen=True, slots=True)
class Assign:
    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class Abort:
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Regime:
    """Every rank has protected its state: in the sealed regime, or in the live one."""

    sealing: bool


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """`replaced` ranks install `version`. `served`: (replica set, its members that serve it from memory)."""

    generation: int
    version: int
    replaced: tuple[int, ...]
    served: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    sealing: bool


@dataclass(frozen=True, slots=True)
class PartReady:
    """A survivor's Exported, passed on to the replaced ranks."""

    generation: int
    rank: int
    manifest: bytes


@dataclass(frozen=True, slots=True)
class Value:
    generation: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Inspect:
    """Write your stacks and last collective to the event log."""


@dataclass(frozen=True, slots=True)
class Released:
    """All ranks are at their end."""


# --- command lines ------------------------------------------------------------------------------------


START_METHODS = ("fork", "fresh")
PULLS = ("shm", "zmq")
OUTPUT_OVERHEAD_BYTES = 64
"""What an Output counts besides its bytes, where it is counted how much waits to be shown."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a job. `target` is a script's path, or a module's name with `module`. The job ends when the process
    `pid`, which submits it, does."""

    release: str
    pid: int
    target: str
    module: bool
    args: tuple[str, ...]
    cwd: str
    umask: int
    python: str
    env: tuple[tuple[str, str], ...]
    world_size: int
    num_standbys: int
    max_restarts: int | None
    log_dir: str | None
    start_method: str  # one of START_METHODS
    preload: tuple[str, ...]  # modules the fork server imports
    pull: str  # one of PULLS
    suspect_after_s: float


@dataclass(frozen=True, slots=True)
class Attach:
    """To a daemon that has adopted a job: the command line that submitted it is here. `shown`: (process, stream, up to
    which byte of its file) for all output that it has dealt with. Answered by Submitted, or Refused."""

    release: str
    job: str
    pid: int
    shown: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True)
class Submitted:
    job: str
    log_dir: str
    shm_dir: str
    daemon_pid: int


@dataclass(frozen=True, slots=True)
class Output:
    """Lines of a rank's output, one or many, the last one without its newline. Rank -1: a standby's. `end`: where they
    end in the file of process `proc`."""

    rank: int
    stream: str
    data: bytes
    proc: str
    end: int


@dataclass(frozen=True, slots=True)
class Happened:
    """A line of the event log, as it is written."""

    line: str


@dataclass(frozen=True, slots=True)
class JobEnded:
    job: str
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Present:
    """A submitting command line has dealt with `num_bytes` of output so far (see OUTPUT_OVERHEAD_BYTES)."""

    job: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StopJob:
    job: str
    hard: bool


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Answered with a Status."""


@dataclass(frozen=True, slots=True)
class Status:
    """`document` is JSON: what `flashrec status --json` prints."""

    document: str


@dataclass(frozen=True, slots=True)
class SignalRank:
    rank: int
    signal: int


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out; `detail` is for a person."""

    detail: str


@dataclass(frozen=True, slots=True)
class ShutDown:
    """End the daemon, and its job with it."""


# --- in files: what a daemon that takes over must know ------------------------------------------------


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


FROM_PROCESS = (
    Hello
    | Join
    | Rejoin
    | Heartbeat
    | BuiltOffered
    | StandbyReady
    | Protected
    | Switched
    | Parked
    | Exported
    | Formed
    | Committed
    | Failed
    | Ending
    | Leaving
    | Noted
    | Put
    | Get
)
TO_PROCESS = (
    Welcome
    | Refused
    | Prepare
    | Assign
    | Abort
    | Regime
    | ResumePlan
    | PartReady
    | Value
    | Inspect
    | Released
)
FROM_COMMAND = Submit | Attach | Present | StopJob | AskStatus | SignalRank | ShutDown
TO_COMMAND = Refused | Submitted | Output | Happened | JobEnded | Status | Done
IN_FILES = JobRecord | LedgerRecord | ProcessRecord
Message = FROM_PROCESS | TO_PROCESS | FROM_COMMAND | TO_COMMAND | IN_FILES
