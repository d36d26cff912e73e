"""What the core is told, and what it answers: plain values, all of them.

A process is named by the core (`p7`); a rank is a number that processes hold one after another.
"""

from typing import NamedTuple

from flashrecd.core.plan import Plan
from flashrecd.core.state import RankStatus

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


class Switched(NamedTuple):
    """A rank has seen that the live regime does not do, and has agreed with the others on the sealed one."""

    proc: str
    why_sealed: str


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


class Stop(NamedTuple):
    """Somebody wants the job to end: politely, or now."""

    reason: str
    hard: bool


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
    | Parked
    | Formed
    | Leaving
    | Failed
    | Exited
    | Condemned
    | Heartbeat
    | TagSeen
    | Stop
    | Tick
)

# --- actions ----------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """Start a process: for `rank`, or (None) as a standby."""

    proc: str
    rank: int | None
    generation: int
    replacement: bool


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


class SetRegime(NamedTuple):
    """Every rank has protected its state, so the regime is known."""

    sealing: bool
    procs: tuple[str, ...]


class SendPlan(NamedTuple):
    plan: Plan
    sealing: bool
    procs: tuple[str, ...]


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


Action = Launch | Prepare | Assign | Abort | SetRegime | SendPlan | Release | Kill | End | Inspect | Log
