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
from flashrecd.core.events import RankSources
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
    generation: int = 0  # in which it was sealed; of worlds with several nodes alone


class Incoming(NamedTuple):
    """A version that a keeper is pulling: a slot was opened for it, and it is not visible yet."""

    kept: Kept
    asked: int  # generation in which its rank asked for it


class Copy(NamedTuple):
    """What one other node keeps of a rank: see nodes.py."""

    node: int
    private: tuple[Kept, ...] = ()
    full_private: tuple[Kept, ...] = ()
    arena: tuple[Kept, ...] = ()
    incoming: Incoming | None = None
    acked: tuple[tuple[str, Content], ...] = ()  # what the rank's process knows to be there

    @property
    def is_empty(self) -> bool:
        return self == Copy(self.node)


class Told(NamedTuple):
    """What a plan tells one rank besides what its machine must know."""

    generation: int = 0
    keepers: tuple[int, ...] = ()
    sources: tuple[RankSources, ...] = ()  # of a rank that is replaced


class Ghost(NamedTuple):
    """A process that lives on a node that was given up: its keepers do not know that yet, and nor does it."""

    rank: int
    generation: int
    arena: tuple[Kept, ...]
    keepers: tuple[int, ...]
    votes: int  # the step in whose gate it may still vote yes; -1: none


class Link(IntEnum):
    UP = 0
    CUT = 1  # the leader and it do not hear each other
    LOST = 2  # cut for good: the core has given it up
    DEAD = 3


class Node(NamedTuple):
    link: Link = Link.UP
    closed: bool = False  # the core was told that its connection is closed
    fenced: int = 0
    settled: int = 0
    inbox: tuple[tuple[object, ...], ...] = ()  # what its shard server is to do, in this order
    outbox: tuple[tuple[object, ...], ...] = ()
    runs: bool = False  # processes of ours may run on it after it was given up

    @property
    def is_there(self) -> bool:
        return self.link is not Link.DEAD


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
    arena: tuple[Kept, ...] = ()  # its tensors, in the sealed regime, or in full versions
    full_private: tuple[Content, ...] = ()  # its private slots of full versions
    replica: int = 0  # ranks with the same number hold the same tensors; 0: nobody else holds mine
    floor: int = -1  # a version that a gate has made safe: no recovery goes back behind it
    # Marks left in the groups. They stay when the process dies: what it had contributed, it had contributed.
    joined: int = 0  # generation whose groups it connected to last
    entered: int = -1  # newest step of that generation it takes part in
    voted: int = -1  # newest step it voted yes in
    refused: int = -1  # newest step it voted no in
    asked: int = -1  # newest step in whose vote it asked for the sealed regime
    offered: int = -1  # newest full version it had sealed, by its last vote
    served: tuple[int, Content] | None = None  # export in shared memory: generation, content
    # What the newest plan says of this rank.
    is_source: int = 0  # generation for whose replaced ranks its memory is a source of tensors
    from_arenas: int = 0  # generation for which it installs its own set's tensors from arenas
    # Of worlds with several nodes.
    node: int = 0  # where its process, arena and private slots are
    keepers: tuple[int, ...] = ()  # who its process has told last
    asks: int = 0  # generation in which it did
    copies: tuple[Copy, ...] = ()  # what other nodes keep of it
    told: Told = Told()
    promise: int = 0  # as Proc.promised, and outlives the process
    holders: tuple[
        int, ...
    ] = ()  # where what its last vote relied on is: home, and those who have acknowledged it


class Standby(NamedTuple):
    life: Life = Life.ALIVE
    depth: str = ""  # how far it really is
    known: str | None = ""  # how far the core thinks it is; None: the core has let go of it
    doomed: bool = False
    outbox: tuple[tuple[object, ...], ...] = ()
    building: bool = False  # it was told to Prepare
    node: int = 0


class World(NamedTuple):
    hub: JobState  # of the core, without members, standbys and texts
    slots: tuple[Slot, ...]
    standbys: tuple[Standby, ...]
    faults: int  # left
    cut: int = 0  # generation in which a link has broken
    nodes: tuple[Node, ...] = ()  # () where there is one
    ghosts: tuple[Ghost, ...] = ()
    waived: bool = False  # home and keepers of a rank have died before it was replicated again
    returns: int = 0  # nodes that may still come (back)


class Regime(StrEnum):
    LIVE = "live"
    SEALED = "sealed"
    SWITCHING = (
        "switching"  # it begins in the live one; the ranks see what that does not bear, and agree to change
    )


class Config(NamedTuple):
    """The numbers of slots and the `discards` exist to be set wrong: see mutants.py. The live regime does with two
    private slots, and is explored with as many."""

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
    full_every: int = (
        0  # of the live regime: steps from one full version to the next, as all ranks wish; 0: none
    )
    full_fails: bool = False  # a rank may come to the gate without having sealed the full version
    all_die: bool = False  # a fault may also end every process at once
    private_slots: int = 2
    arena_slots: int = 2
    full_private_slots: int = 2
    discards: bool = True
    discards_tensors: bool = True
    discards_full: bool = True
    reduced: bool = True
    # Of worlds with several nodes: ranks 0 to share - 1 begin on the first, and so on; what is left over are spares.
    domains: tuple[str, ...] = ()  # of the nodes; (): one node
    share: int = 1
    replicas: int = 1
    open_ended: bool = False  # nobody leaves: all that could be is over when all are at the last version
    warm: int = 0  # steps that were made before it begins, all of them as they should
    rank_faults: bool = True
    node_faults: bool = True
    cuts: bool = False  # a node may be cut off from the leader, alone or from all
    returns: int = 0  # nodes that may come
    returning: str = ""  # the domain they come in
    begins: str = ""  # what has happened then: see world.beginning
    mistakes: tuple[str, ...] = ()  # of nodes.py, set by mutants

    @property
    def several(self) -> bool:
        return len(self.domains) > 1

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
    watermark: int  # what all that have voted in my step offered; -1 while not all have
    source: Content | None  # what there is for me to install; None: not yet
    private: Content | None = None  # of several nodes: the private state that there is for me
    cut_off: bool = False  # nothing of what the core says comes through


NO_CONTEXT = Context(False, False, False, False, False, False, -1, None)
LOST = -2  # the lineage of what no source gives any more


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
