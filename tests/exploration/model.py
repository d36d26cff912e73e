"""What the simulated world is made of: plain immutable values.

Around the real machines (a rank's `phases.transition`, the daemon's `Core.handle`) the world keeps what
they act upon: memory, private slots, arenas, groups, channels. Content is modelled as (version, lineage), the
lineage being the generation whose gate made that version (of version 0: the one the world started in); ranks
start every generation with equal content (which is asserted), so the pair stands for the whole history.
"""

from collections.abc import Iterator
from enum import IntEnum, StrEnum
from typing import NamedTuple, NoReturn

from flashrec import phases as ph
from flashrecd.core import job
from flashrecd.core.state import JobState, Member


class Violation(AssertionError):
    """An invariant does not hold, or a machine refused what happened to it."""


class Content(NamedTuple):
    """State at `version`; `lineage` tells one attempt at its last step from another."""

    version: int
    lineage: int


DAMAGED = -1  # the lineage of bytes that are no longer what was sealed


class Kept(NamedTuple):
    """A slot of an arena: tensors that are being copied into it, or are sealed."""

    content: Content
    sealed: bool


class Life(IntEnum):
    NONE = 0  # not started yet, or known to be gone
    ALIVE = 1
    ZOMBIE = 2  # dead, and the kernel has not said so yet


class Somebody(tuple[int, ...]):
    """`Plan.replaced` without the names, which would tell ranks apart that are alike. A rank's machine asks
    only whether anybody is replaced; should it ever ask for more, it fails here rather than unnoticed."""

    def __contains__(self, _: object) -> NoReturn:
        raise NotImplementedError("the exploration leaves out which ranks are replaced: teach it")

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError("the exploration leaves out which ranks are replaced: teach it")


class Say(NamedTuple):
    """A message to the daemon that goes out after the actions before it."""

    message: tuple[object, ...]


class Await(NamedTuple):
    """protect() waits to be told the regime."""


class Proc(NamedTuple):
    """A process that holds a rank, as the machine and its memory make it."""

    state: ph.RankState
    todo: tuple[
        ph.Action | Say | Await, ...
    ] = ()  # what its main thread has still to carry out, in this order
    tensors: Content | None = None
    private: Content | None = None  # None: in the middle of a step
    note: Content | None = None  # what NoteRedo remembered
    settled: bool = False  # a failure became known after it had settled and before it enters
    grads: int = 0  # generation in which its gradients were completed and voted for; 0: none
    promised: int = 0  # generation it has promised not to vote in any more


class Slot(NamedTuple):
    """A rank: what outlives its processes, and the process it has now."""

    member: Member  # the core's view; without the process's name, which is the slot's number
    life: Life = Life.NONE
    exit_code: int | None = None  # of a zombie; None: killed by a signal
    doomed: bool = False  # the core waits for its exit (JobState.stopping_procs)
    proc: Proc | None = None
    inbox: tuple[ph.Event, ...] = ()
    outbox: tuple[tuple[object, ...], ...] = ()
    private: tuple[Content, ...] = ()  # its private slots
    arena: tuple[Kept, ...] = ()  # its tensors, in the sealed regime
    replica: int = 0  # ranks with the same number hold the same tensors; 0: nobody else holds mine
    floor: int = -1  # a version that a gate has made safe: no recovery goes back behind it
    # Marks left in the groups. They stay when the process dies: what it had contributed, it had contributed.
    joined: int = 0  # generation whose groups it connected to last
    entered: int = -1  # newest step of that generation it takes part in
    voted: int = -1  # newest step it voted yes in
    refused: int = -1  # newest step it voted no in
    asked: int = -1  # newest step in whose vote it asked for the sealed regime
    served: tuple[int, Content] | None = None  # export in shared memory: generation, content
    # What the newest plan says of this rank.
    is_source: int = 0  # generation for whose replaced ranks its memory is a source of tensors
    from_arenas: int = 0  # generation for which it installs its own set's tensors from arenas


class Standby(NamedTuple):
    life: Life = Life.ALIVE
    depth: str = ""  # how far it really is
    known: str | None = ""  # how far the core thinks it is; None: the core has let go of it
    doomed: bool = False
    outbox: tuple[tuple[object, ...], ...] = ()
    building: bool = False  # it was told to Prepare


class World(NamedTuple):
    hub: JobState  # of the core, without members, standbys and texts
    slots: tuple[Slot, ...]
    standbys: tuple[Standby, ...]
    faults: int  # left
    cut: int = 0  # generation in which a link has broken


class Regime(StrEnum):
    LIVE = "live"
    SEALED = "sealed"
    SWITCHING = (
        "switching"  # it begins in the live one; the ranks see what that does not bear, and agree to change
    )


class Config(NamedTuple):
    """`private_slots`, `arena_slots` and the `discards` exist to be set wrong: see mutants.py. The live regime does
    with two private slots, and is explored with as many."""

    num_ranks: int = 3
    steps: int = 2
    num_faults: int = 2
    num_standbys: int = 0
    link_faults: bool = True
    from_start: bool = True  # False: every rank has protected its state, and the daemon knows
    regime: Regime = Regime.LIVE
    sets: tuple[
        tuple[int, ...], ...
    ] = ()  # unique ranks first; (): one set of all in the live regime, else unique
    shared: bool = False  # besides, every rank is in a set of all
    communicates: bool = False  # a collective runs between gate and exit
    damages: bool = False  # a fault may also strike the bytes of a sealed version
    private_slots: int = 2
    arena_slots: int = 2
    discards: bool = True
    discards_tensors: bool = True
    reduced: bool = True

    @property
    def all_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.num_ranks))

    def own_sets(self) -> tuple[tuple[int, ...], ...]:
        if self.sets:
            return self.sets
        return tuple((r,) for r in self.all_ranks) if self.regime is Regime.SEALED else (self.all_ranks,)

    def own_set(self, rank: int) -> tuple[int, ...]:
        return next(members for members in self.own_sets() if rank in members)

    def sets_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return (self.own_set(rank), self.all_ranks) if self.shared else (self.own_set(rank),)

    def replica(self, rank: int) -> int:
        members = self.own_set(rank)
        return 1 + self.own_sets().index(members) if len(members) > 1 else 0


class Context(NamedTuple):
    """What a rank can notice of the others."""

    entered: bool  # all take part in my step: gradients can become complete
    passed: bool  # all have voted yes in my step
    refused: bool  # all have voted in my step, and one of them no
    joined: bool  # all have connected to my generation's groups
    broken: bool  # somebody left my generation's groups, so that an operation on them may fail
    asked: bool  # one that has voted in my step asked for the sealed regime
    source: Content | None  # what there is for me to install; None: not yet


NO_CONTEXT = Context(False, False, False, False, False, False, None)


class Move(NamedTuple):
    """Something a rank's process can do now. `eager`: it commutes with whatever others can do before it, and
    stays possible. `lasting`: it leaves something behind, so that dying before it is not dying after it."""

    label: str
    slot: Slot
    eager: bool = False
    lasting: bool = False


BLANK = Member("")
EMPTY_HUB = JobState()
RUNNING = job.Status.RUNNING
