"""What the core is told, and what it answers: plain values, all of them.

A process is named by the core (`p7`); a rank is a number that processes hold one after another.
"""

from typing import NamedTuple

from flashrecd.core.plan import Plan
from flashrecd.core.state import Kept, RankStatus

# --- events -----------------------------------------------------------------------------------------


class Begin(NamedTuple):
    """The job was accepted: start its world."""


class Joined(NamedTuple):
    """Another launcher has started the process that was waited for."""

    proc: str


class Adopt(NamedTuple):
    """The daemon that ran this job has died, and left word of what no rank can tell. `holders`: by rank, the process
    that held it last, or a name that none bears. `claims`: by rank, as in Protected; None if it had not protected."""

    generation: int
    num_launched: int
    restarts: int
    tries: tuple[int, int]
    holders: tuple[str, ...]
    claims: tuple[tuple[tuple[tuple[int, ...], str], ...] | None, ...]
    why_sealed: str


class Adopted(NamedTuple):
    """A rank has said where it stands. `status` is LIVE unless it waits for the daemon, or is no part of the newest
    generation yet; the rest as in Protected and Parked."""

    proc: str
    generation: int
    status: RankStatus
    version: int | None
    can_advance: bool = False
    claims: tuple[tuple[tuple[int, ...], str], ...] | None = None
    why_sealed: str = ""
    private: tuple[int, ...] = ()
    sealed: tuple[int, ...] = ()
    shortage: str = ""  # as in Protected, of all ranks that have been heard by now


class BuiltOffered(NamedTuple):
    """The script promised (init(standby="built")) that a standby may run it up to its first step."""


class StandbyReady(NamedTuple):
    proc: str
    depth: str  # "forked" | "built"


class Protected(NamedTuple):
    """`claims`: what the rank holds, as (ranks that hold the same bytes, digest of their layout) for each replica set;
    `why_sealed`: what the live regime would not protect, in words; "" if nothing."""

    proc: str
    claims: tuple[tuple[tuple[int, ...], str], ...]
    why_sealed: str = ""
    difference: str = ""  # between this layout and another rank's, in words, if there is one
    shortage: str = ""  # of shared memory, should the regime be sealed
    why_unsealed: str = ""  # why no full version can be sealed, should it be live
    size_bytes: int = 0  # of shared memory for what it seals: ranks are compared by it


class Switched(NamedTuple):
    """A rank has seen that the live regime does not do, and has agreed with the others on the sealed one."""

    proc: str
    why_sealed: str


class Unsealed(NamedTuple):
    """A rank of the live regime can seal no full version any more, so none is sealed by any."""

    proc: str
    why_unsealed: str


class Parked(NamedTuple):
    """`generation` is over for this process, for good: it will never vote in it again. `private` and `sealed`: the
    versions in its private slots and in its arena."""

    proc: str
    generation: int
    version: int | None
    can_advance: bool
    private: tuple[int, ...] = ()
    sealed: tuple[int, ...] = ()


class Formed(NamedTuple):
    proc: str
    generation: int
    buckets: str = ""  # digest of what must be equal on all ranks besides state (DDP's buckets)


class Leaving(NamedTuple):
    proc: str
    generation: int
    version: int


class Failed(NamedTuple):
    """An exception left the rank's script; its exit follows."""

    proc: str
    error: str  # last line of the traceback


class Exited(NamedTuple):
    """Proof of death: the kernel said so. `private`, `sealed`: what its private slots and its arena still hold;
    `step`: where its tag said it was."""

    proc: str
    code: int | None
    signal: int | None
    private: tuple[int, ...] = ()
    sealed: tuple[int, ...] = ()
    step: int | None = None
    left: int | None = None  # the version at which its script was over, if its tag says that it was


class Condemned(NamedTuple):
    """Its process must not go on, for a reason that the core cannot see."""

    proc: str
    why: str


class Heartbeat(NamedTuple):
    proc: str


class TagSeen(NamedTuple):
    """A rank's published tag: `entered` is the step its body is in (None: between steps)."""

    proc: str
    entered: int | None
    progress: int  # grows with every collective and phase change


class NodeHeard(NamedTuple):
    """Anything came from this incarnation of the node. Also said when it is connected again after NodeClosed."""

    node: int


class NodeClosed(NamedTuple):
    """The connection to the node is closed; it may come again."""

    node: int
    why: str


class NodeDeserted(NamedTuple):
    """Since NodeClosed nothing listens any more where the node served shards, though its machine answers."""

    node: int


class NodeJoined(NamedTuple):
    """A node that is new, or another incarnation of one that was there: it has no process and keeps nothing. It is
    appended to JobState.nodes, and a live node of its name is lost by this; unless the job is about to end, or the name
    is the first node's: then nothing changes."""

    name: str
    domain: str = ""
    num_slots: int | None = None


class NodeFenced(NamedTuple):
    """Somebody who can know (a fencing command, the operator) says that nothing runs on the node any more."""

    node: int


class Holdings(NamedTuple):
    """The answer to Fence: the replicas that the node keeps, and refuses to change within that generation."""

    node: int
    generation: int
    kept: tuple[Kept, ...]


class Stop(NamedTuple):
    """Somebody wants the job to end: politely, or now."""

    reason: str
    hard: bool
    code: int = 130  # of the job, by then


class Tick(NamedTuple):
    """Time passes."""


Event = (
    Begin
    | Joined
    | Adopt
    | Adopted
    | BuiltOffered
    | StandbyReady
    | Protected
    | Switched
    | Unsealed
    | Parked
    | Formed
    | Leaving
    | Failed
    | Exited
    | Condemned
    | Heartbeat
    | TagSeen
    | NodeHeard
    | NodeClosed
    | NodeDeserted
    | NodeJoined
    | NodeFenced
    | Holdings
    | Stop
    | Tick
)

# --- actions ----------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """Start a process on `node`: for `rank`, or (None) as a standby. It stays there, whatever rank it takes later."""

    proc: str
    rank: int | None
    generation: int
    replacement: bool
    node: int = 0


class Prepare(NamedTuple):
    """Tell a forked standby to run the script up to its first step, as nobody in particular."""

    proc: str


class Assign(NamedTuple):
    """A standby takes a rank."""

    proc: str
    rank: int
    generation: int


class Abort(NamedTuple):
    """Generation `generation` is over: cut its groups, park, report."""

    generation: int
    procs: tuple[str, ...]
    reason: str


class Fence(NamedTuple):
    """These nodes are to refuse replicas of generation `generation` and older from now on, whatever is under way, and
    then to say what they keep (Holdings)."""

    generation: int
    nodes: tuple[int, ...]


class Settle(NamedTuple):
    """The job goes on at `version` in `generation`: these nodes are to delete what older generations brought that is
    newer, whole or not: private state above `version` (-1: all of it), tensors above `sealed`. In the live regime
    `sealed` is the watermark: a full version above it will never be whole on all ranks, and would take the place in
    which the next one is written."""

    generation: int
    version: int
    nodes: tuple[int, ...]
    sealed: int


class SetRegime(NamedTuple):
    """Every rank has protected its state, so the regime is known. `keepers`: by rank, the nodes that keep what it
    seals; () for all in a job on one node."""

    sealing: bool
    procs: tuple[str, ...]
    keepers: tuple[tuple[int, ...], ...] = ()
    why_unsealed: str = ""


class RankSources(NamedTuple):
    """The nodes from which the sealed part and the private state of `rank` at the plan's version can be had: the node
    of its arena first, if that has it, then those that keep a replica. Where nobody needs one of the two it is ()."""

    rank: int
    sealed: tuple[int, ...]
    private: tuple[int, ...]


class SendPlan(NamedTuple):
    """`keepers`: as in SetRegime, from this generation on. `sources`: of every rank of which a replaced rank needs
    something sealed; () in a job on one node."""

    plan: Plan
    sealing: bool
    procs: tuple[str, ...]
    keepers: tuple[tuple[int, ...], ...] = ()
    sources: tuple[RankSources, ...] = ()


class Release(NamedTuple):
    """All ranks are at their end: they may exit."""

    procs: tuple[str, ...]


class Kill(NamedTuple):
    proc: str
    hard: bool
    reason: str


class End(NamedTuple):
    """The job has ended; `code` is what `flashrec run` exits with."""

    code: int
    reason: str


class Inspect(NamedTuple):
    """Ask every rank for its stack and last collective: all stand still, and nobody can be blamed."""

    procs: tuple[str, ...]


class Log(NamedTuple):
    """A line of the event log: every decision with its reason."""

    event: str
    rank: int | None
    step: int | None
    reason: str


Action = (
    Launch
    | Prepare
    | Assign
    | Abort
    | Fence
    | Settle
    | SetRegime
    | SendPlan
    | Release
    | Kill
    | End
    | Inspect
    | Log
)
