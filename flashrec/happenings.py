"""What happens to a rank, and what it must do about it: the words of its state machine, `flashrec.phases`."""

from typing import NamedTuple

NEVER = 1 << 40
"""As the number of steps between two full versions: none is sealed."""

# --- what happens to a rank -----------------------------------------------------------------------


class Protected(NamedTuple):
    """protect() was called: version 0 exists."""


class Regime(NamedTuple):
    """Every rank has called protect(), so it is known what there is to protect. `sealing`: the sealed regime."""

    sealing: bool


class Settle(NamedTuple):
    """Between two steps: if a failure is known, park and recover before anything else."""


class Enter(NamedTuple):
    """The main thread starts a step."""


class GateReached(NamedTuple):
    """Gradients are complete; nothing was changed yet."""


class Verdict(NamedTuple):
    """The agreement ended. `passed` None: no result came (a peer is gone, or the groups were cut). `sealing`: some
    rank has seen what the live regime cannot bear, so all go over to the sealed one. `watermark`: the newest full
    version that every rank has sealed (-1: none). `every`: after how many steps each of them bears the next."""

    passed: bool | None
    sealing: bool = False
    watermark: int = -1
    every: int = NEVER


class Applied(NamedTuple):
    """The optimizer has run."""


class Exit(NamedTuple):
    """The body was left, normally or by unwinding. `communicated`: a collective ran since the gate, so a failure
    may have left this rank torn: neither at this version nor at the next."""

    communicated: bool = False


class Close(NamedTuple):
    """The loop over the steps is at its end."""


class Latch(NamedTuple):
    """Generation `generation` is over: an error in a collective, or the daemon's abort."""

    generation: int


class Plan(NamedTuple):
    """Resume at `version` in `generation`. `replaced` ranks, all that do not hold it, install it: of each replica set
    in `served` the ranks beside it serve what they hold, all else comes from arenas. `watermark`: the newest version
    up to it that every rank has sealed whole; -1: none."""

    generation: int
    version: int
    replaced: tuple[int, ...]
    served: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    sealing: bool = False
    watermark: int = -1


class Rehearsed(NamedTuple):
    """A replacement is built and rehearsed: it can install as soon as a plan names its sources."""


class Installed(NamedTuple):
    """This rank holds every byte of the plan's version, verified."""


class Formed(NamedTuple):
    """The groups of `generation` connect every rank."""

    generation: int


class Leave(NamedTuple):
    """The script is at its end."""


class Released(NamedTuple):
    """All ranks are at their end."""


Event = (
    Protected
    | Regime
    | Settle
    | Enter
    | GateReached
    | Verdict
    | Applied
    | Exit
    | Close
    | Latch
    | Plan
    | Rehearsed
    | Installed
    | Formed
    | Leave
    | Released
)

# --- what the rank must do about it -----------------------------------------------------------------


class NoteRedo(NamedTuple):
    """Remember what a redo of this step must start from."""


class Seal(NamedTuple):
    """Seal private state as of now, as that of `version`."""

    version: int


class BeginSeal(NamedTuple):
    """Begin to copy the tensors of `version`, as they are now, into the arena; beside forward and backward."""

    version: int


class FinishSeal(NamedTuple):
    """Come back when the tensors of `version` are sealed."""

    version: int


class BeginFull(NamedTuple):
    """As BeginSeal, of a full version in the live regime: private state of `version` is kept beside its tensors, until
    a later full version is sealed everywhere."""

    version: int


class FinishFull(NamedTuple):
    """Come back when the full version is sealed, or cannot be: that is no failure, and shows in the watermark."""

    version: int


class AwaitKept(NamedTuple):
    """Come back when every node that keeps replicas of this rank has acknowledged `sealed` (None: no such version) and
    the private state of the versions `private`. At once where there is none. It ends in two other ways, and either way
    what follows in the same list is void: because the generation is over, or because a keeper does not acknowledge.
    In a gate that is Verdict(False), for no vote went out, and the others hear of it; in a recovery it is a Latch, as
    with Install."""

    sealed: int | None
    private: tuple[int, ...]


class Vote(NamedTuple):
    """Take part in the agreement. A full version counts in it once all who keep replicas have acknowledged it."""


class Apply(NamedTuple):
    """Let the optimizer run."""


class Abandon(NamedTuple):
    """Unwind the body."""


class Report(NamedTuple):
    """Tell the daemon: parked in `generation`, holding `version` (None: nothing yet, or a mixture). `can_advance`:
    my vote is out and my gradients are complete, so I can also become version + 1."""

    generation: int
    version: int | None
    can_advance: bool


class DiscardAbove(NamedTuple):
    """Delete everything sealed above `version`: a redone step must not mix with its first attempt. And full versions
    above `full`: not every rank has them, and they would be taken for what a later one may be written over."""

    version: int
    full: int


class PutBack(NamedTuple):
    """Restore what NoteRedo remembered."""


class Serve(NamedTuple):
    """Give my part of what the plan says I serve to its replaced ranks."""

    plan: Plan


class Install(NamedTuple):
    """Load the plan's version from where it can be had, and verify it."""

    plan: Plan


class Form(NamedTuple):
    """Connect the groups of `generation`."""

    generation: int


class Commit(NamedTuple):
    """`version` is now held by this rank."""

    version: int


class Linger(NamedTuple):
    """Tell the daemon that the script is at its end, and wait."""

    generation: int
    version: int


Action = (
    NoteRedo
    | Seal
    | BeginSeal
    | FinishSeal
    | BeginFull
    | FinishFull
    | AwaitKept
    | Vote
    | Apply
    | Abandon
    | Report
    | DiscardAbove
    | PutBack
    | Serve
    | Install
    | Form
    | Commit
    | Linger
)
