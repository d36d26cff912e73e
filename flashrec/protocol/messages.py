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
    why_unsealed: str = ""


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
    live regime would not protect, "" if nothing. `arena_bytes`: shared memory that sealing takes. `why_unsealed`: why
    no full version is to be sealed in the live regime, "" if one may."""

    proc: str
    claims: tuple[tuple[tuple[int, ...], str], ...]
    why_sealed: str
    arena_bytes: int
    why_unsealed: str = ""


@dataclass(frozen=True, slots=True)
class Unsealed:
    """This rank can seal no full version any more, and this is why."""

    proc: str
    why_unsealed: str


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
    another daemon, should this one die, where training cannot go on without; 0: none will come.

    Where there are several nodes: `node` is this one's number, `data_address` the address at which other nodes' ranks
    reach this one's, `replica_address` that of its shard process, and `key_file` holds the cluster's key.
    `kept_within_s`: how long a rank waits for other nodes to acknowledge what it has sealed."""

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
    local_rank: int | None = None
    local_world_size: int = 1
    node: int = 0
    num_nodes: int = 1
    data_address: str = "127.0.0.1"
    replica_address: str = ""
    key_file: str = ""
    plain_bulk: bool = False
    kept_within_s: float = 60.0


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
    """`local_rank`: among the ranks of its node."""

    rank: int
    generation: int
    local_rank: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Regime:
    """Every rank has protected its state: in the sealed regime, or in the live one. `keepers`: (node, address) of those
    that keep replicas of what this rank seals. `why_unsealed`: why no full version is to be sealed in the live regime,
    "" if one may."""

    sealing: bool
    keepers: tuple[tuple[int, str], ...] = ()
    why_unsealed: str = ""


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """`replaced` ranks install `version`. `served`: (replica set, its members that serve it from memory). `keepers` as
    in Regime, from now on. `sources`: (rank, where what it sealed of the version is to be had, where its private
    state), each as (node, address) in the order to try; where there is one node only, both are in its memory.
    `watermark`: the newest version that every rank has sealed whole, -1: none."""

    generation: int
    version: int
    replaced: tuple[int, ...]
    served: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    sealing: bool
    keepers: tuple[tuple[int, str], ...] = ()
    sources: tuple[tuple[int, tuple[tuple[int, str], ...], tuple[tuple[int, str], ...]], ...] = ()
    watermark: int = -1


@dataclass(frozen=True, slots=True)
class PartReady:
    """A survivor's Exported, passed on to the replaced ranks. `address`: of its node's shard process; "": it is in this
    node's shared memory."""

    generation: int
    rank: int
    manifest: bytes
    address: str = ""


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
    num_nodes: int = 1  # with as many ranks each
    num_spare_nodes: int = 0
    num_replicas: int = 0  # other nodes that keep what a rank seals


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
class FenceNode:
    """Who asks knows that nothing runs any more on the job's lost node `node`."""

    node: str


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out; `detail` is for a person."""

    detail: str


@dataclass(frozen=True, slots=True)
class ShutDown:
    """End the daemon, and its job with it."""


FROM_PROCESS = (
    Hello
    | Join
    | Rejoin
    | Heartbeat
    | BuiltOffered
    | StandbyReady
    | Protected
    | Switched
    | Unsealed
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
FROM_COMMAND = Submit | Attach | Present | StopJob | AskStatus | SignalRank | FenceNode | ShutDown
TO_COMMAND = Refused | Submitted | Output | Happened | JobEnded | Status | Done
Message = FROM_PROCESS | TO_PROCESS | FROM_COMMAND | TO_COMMAND
