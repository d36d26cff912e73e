"""What the leader of a job and the daemons of its other nodes tell each other about it. See `codec` for how it travels.

Each node's part of a job is run by its own daemon, the agent; the job's decisions are the leader's. What goes between
the leader and a process passes through the agent as it is (`ToProcess`, `FromProcess`).

A connection may break and come again while both live, so all that is said of a part travels in an Envelope, is
numbered, and is kept until the other side has it: each is heard once, and in order.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Envelope:
    """Number `number` (from 1) of what is said of `part`: `data` is an encoded order (from the leader) or report (from
    the agent). `received`: the number of the last one that the sender has heard. A part is a node's share in a job; it
    has a name of its own, so what belongs to one that is over changes nothing."""

    part: str
    number: int
    received: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resume:
    """There is a new connection, or much has been heard: `received` is the number of the last one. `repeat`: say again
    what came after it."""

    part: str
    received: int
    repeat: bool


@dataclass(frozen=True, slots=True)
class Unknown:
    """The sender knows of no such part: it is over."""

    part: str


FROM_LEADER = Envelope | Resume | Unknown
FROM_AGENT = Envelope | Resume | Unknown

# --- orders: from the leader ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginPart:
    """Take part in a job. `submit`: the encoded Submit. Answered with PartBegun or PartRefused."""

    job: str
    submit: bytes


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Answered with ProcessStarted or ProcessNotStarted. `rank` None: a standby."""

    proc: str
    rank: int | None
    generation: int
    replacement: bool


@dataclass(frozen=True, slots=True)
class AssignProcess:
    """A standby has been given a rank."""

    proc: str
    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class EndProcess:
    """`hard`: with all that it has started, at once; else it is asked to end."""

    proc: str
    hard: bool


@dataclass(frozen=True, slots=True)
class SignalProcess:
    proc: str
    signal: int


@dataclass(frozen=True, slots=True)
class ToProcess:
    """Pass `data`, an encoded message, on to `proc`."""

    proc: str
    data: bytes


@dataclass(frozen=True, slots=True)
class FenceReplicas:
    """Take no replica of this generation or an older one any more, and say what is there: ReplicasKept."""

    generation: int


@dataclass(frozen=True, slots=True)
class SettleReplicas:
    """`generation` resumes at `version`: private state above it was lost, and what was sealed above `sealed`."""

    generation: int
    version: int
    sealed: int


@dataclass(frozen=True, slots=True)
class GenerationRuns:
    """All ranks have formed it: exports are of no use any more, nor are the replicas of the ranks in `forget`."""

    generation: int
    forget: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputSeen:
    """So many bytes of output have been passed on (see messages.OUTPUT_OVERHEAD_BYTES)."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Prelude:
    """A piece of what a rank has recorded before the first gate (see flashrec.prelude): `data` is what the file `name`
    has from byte `offset` on. Told by the agent of a node where it was recorded, and by the leader before a
    process takes the rank on another."""

    name: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class OutputShown:
    """Answers PartAdopted: (process, its stream, the byte in its file up to which its output has come)."""

    shown: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True)
class EndPart:
    """The job has ended, or this node's part in it: end what is left, remove what it holds. Answered with PartEnded."""


# --- reports: from an agent -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartBegun:
    """Ready to start processes. `shard_address`: where other nodes get this one's shards, and bring replicas."""

    shard_address: str
    shm_dir: str
    log_dir: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class PartAdopted:
    """Another daemon has taken the part over from one that died; the first report it makes. `processes`: (name, pid) of
    all that may live. Any other has ended, or was never started. Their ranks offer themselves by Rejoin."""

    processes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PartRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    proc: str
    pid: int


@dataclass(frozen=True, slots=True)
class ProcessNotStarted:
    proc: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """`code` and `signal` both None: how is not known. `last_words`: the last line on its standard error."""

    proc: str
    code: int | None
    signal: int | None
    last_words: str


@dataclass(frozen=True, slots=True)
class OutputEnded:
    """All that an ended process had printed has been told."""

    proc: str


@dataclass(frozen=True, slots=True)
class FromProcess:
    """`proc`, which is what it says it is, has said `data`. `at_ns`: the agent's monotonic clock."""

    proc: str
    data: bytes
    at_ns: int


@dataclass(frozen=True, slots=True)
class RankKept:
    """The versions in a rank's private slots and arena on this node, as of now. Comes before what it explains: the
    rank's Parked, or its process's end."""

    rank: int
    private: tuple[int, ...]
    sealed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankTags:
    """(rank, its tag as it lies in shared memory); `heard`: processes whose heartbeat has come since the last one."""

    tags: tuple[tuple[int, bytes], ...]
    heard: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankDescribed:
    """Comes before the rank's Protected. `difference`: between its layout and that of others on this node, in words;
    `shortage`: of this node's shared memory, should the regime be sealed; `unsealed`: why no full version can be sealed
    here, should it be live; `needs`: what sealing takes, in words."""

    rank: int
    difference: str
    shortage: str
    unsealed: str
    needs: str


@dataclass(frozen=True, slots=True)
class ReplicasKept:
    """(rank, versions of its private state, of its sealed state) that this node keeps for others. `generation`: which
    was fenced."""

    generation: int
    kept: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class PartOutput:
    """`data`: an encoded Output."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PartNote:
    """A line for the event log."""

    event: str
    reason: str
    rank: int | None


@dataclass(frozen=True, slots=True)
class PartEnded:
    """Nothing of it is left."""


ORDERS = (
    BeginPart
    | StartProcess
    | AssignProcess
    | EndProcess
    | SignalProcess
    | ToProcess
    | FenceReplicas
    | SettleReplicas
    | GenerationRuns
    | OutputSeen
    | OutputShown
    | Prelude
    | EndPart
)
REPORTS = (
    PartBegun
    | PartAdopted
    | PartRefused
    | ProcessStarted
    | ProcessNotStarted
    | ProcessEnded
    | OutputEnded
    | FromProcess
    | RankKept
    | RankTags
    | RankDescribed
    | ReplicasKept
    | PartOutput
    | PartNote
    | Prelude
    | PartEnded
)
