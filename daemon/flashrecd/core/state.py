"""What the core knows of a job: plain frozen values, so that an explorer can keep and compare them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import NamedTuple, overload

from flashrec.errors import UsageError


class Status(StrEnum):
    STARTING = "starting"
    ADOPTING = "adopting"
    RUNNING = "running"
    PARKING = "parking"
    FORMING = "forming"
    RESTARTING = "restarting"
    CLOSING = "closing"
    STOPPING = "stopping"
    ENDED = "ended"


class RankStatus(StrEnum):
    STARTING = "starting"  # runs its script, not protected yet
    LIVE = "live"
    PARKED = "parked"
    BUILDING = "building"  # a replacement that holds nothing yet
    FORMING = "forming"
    LEFT = "left"
    AWAITED = "awaited"  # of a daemon that has died: the process may live, and has not been heard yet
    DONE = "done"  # exited with code 0, and never called protect(); or while there was no daemon, after its script
    DEAD = "dead"


ENDING = (Status.CLOSING, Status.STOPPING, Status.ENDED)
GONE = (RankStatus.DEAD, RankStatus.DONE)
HOLDS_STATE = (RankStatus.LIVE, RankStatus.PARKED, RankStatus.FORMING, RankStatus.LEFT)


class NodeLife(StrEnum):
    LIVE = "live"
    LOST = "lost"  # for good: whoever returns is another node, of the same name


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node as a job begins. `domain`: what fails together with it; "" if that is the node alone. `num_slots`: the
    ranks that fit on it; None: any number."""

    name: str = ""
    domain: str = ""
    num_slots: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """What the core must know of a job.

    `nodes`: the leader's first, whose loss nothing outlives; ranks 0 to nproc_per_node - 1 begin there, the next ones
    on the second node, and so on. What is left over are spares. UsageError for what cannot work."""

    world_size: int
    nodes: tuple[NodeSpec, ...] = (NodeSpec(),)
    nproc_per_node: int | None = None  # ranks that begin on a node; None: all, on the only one
    replicas: int = 0  # other nodes that keep what a rank seals
    num_standbys: int = (
        1  # on each node that has ranks; a spare has nproc_per_node, one for each rank it may take
    )
    max_restarts: int | None = None  # recoveries before the job fails; None: no bound
    max_tries_per_step: int = 3  # recoveries of the same version before the job fails
    suspect_after_s: float = 3.0
    external: bool = False  # another launcher starts the processes: what is launched is waited for

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError(f"a job needs at least one rank, not {self.world_size}")
        if self.num_standbys < 0:
            raise UsageError(f"the number of standbys cannot be {self.num_standbys}")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise UsageError(f"max restarts cannot be {self.max_restarts}")
        if not self.suspect_after_s > 0:
            raise UsageError(f"suspect_after_s must be positive, not {self.suspect_after_s}")
        self._check_nodes()

    def _check_nodes(self) -> None:
        if not self.nodes:
            raise UsageError("a job needs at least one node")
        if self.replicas < 0:
            raise UsageError(f"the number of replicas cannot be {self.replicas}")
        if self.nproc_per_node is not None and self.nproc_per_node < 1:
            raise UsageError(f"a node begins with at least one rank, not {self.nproc_per_node}")
        if len(self.nodes) == 1:
            return
        if self.nproc_per_node is None:
            raise UsageError("a job on several nodes must say how many ranks begin on each: nproc_per_node")
        if self.external:
            raise UsageError("ranks that another launcher starts run on one node only")
        names = [node.name for node in self.nodes]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"two nodes have the name {twice!r}")

    @property
    def ranks_per_node(self) -> int:
        """How many ranks begin on a node."""
        return self.nproc_per_node if self.nproc_per_node is not None else self.world_size


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node, and what is known of it. Its index in JobState.nodes is its name in every event and action.

    `spare`: it has been given no rank. `unheard`: why it may be lost, in words; "" while it is heard. `is_deserted`:
    it is unheard, and nothing of flashrec listens there any more. `is_proven`: it is lost, and somebody who knows says
    that nothing runs on it any more."""

    name: str = ""
    domain: str = ""
    num_slots: int | None = None
    life: NodeLife = NodeLife.LIVE
    spare: bool = False
    unheard: str = ""
    is_deserted: bool = False
    is_proven: bool = False


class Standby(NamedTuple):
    """A process that holds no rank yet. `depth`: "" until it is ready."""

    proc: str
    depth: str = ""
    node: int = 0


class Kept(NamedTuple):
    """The replicas of one rank that a node keeps: versions of its private state, and sealed and whole versions."""

    rank: int
    private: tuple[int, ...]
    sealed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A rank, and the process that holds it now."""

    proc: str
    status: RankStatus = RankStatus.STARTING
    version: int | None = None
    can_advance: bool = False
    private: tuple[int, ...] = ()  # versions in its private slots
    sealed: tuple[int, ...] = ()  # versions in its arena
    claims: tuple[tuple[tuple[int, ...], str], ...] | None = (
        None  # since protect(): its replica sets, with digests
    )
    buckets: str = ""
    joined: int = 0  # the generation it said it was in when it was adopted
    node: int = 0  # where its process is, and its arena
    keepers: tuple[int, ...] = ()  # the nodes that keep what it seals
    size_bytes: int = 0  # of what it seals


CHUNK = 256  # members


class Members(Sequence[Member]):
    """The members of a large job: a frozen sequence of which another one with one member changed shares most, so that
    the message of one rank of N does not cost N. Small jobs have a tuple."""

    __slots__ = ("_chunks", "_len")

    def __init__(self, members: Sequence[Member]) -> None:
        every = tuple(members)
        self._len = len(every)
        self._chunks = tuple(every[i : i + CHUNK] for i in range(0, len(every), CHUNK))

    def changed(self, rank: int, member: Member) -> "Members":
        """The same, but for `rank`."""
        number, place = divmod(rank, CHUNK)
        chunk = list(self._chunks[number])
        chunk[place] = member
        chunks = list(self._chunks)
        chunks[number] = tuple(chunk)
        new = Members(())
        new._len, new._chunks = self._len, tuple(chunks)
        return new

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, rank: int) -> Member: ...

    @overload
    def __getitem__(self, rank: slice) -> tuple[Member, ...]: ...

    def __getitem__(self, rank: int | slice) -> Member | tuple[Member, ...]:
        if isinstance(rank, slice):
            return tuple(self)[rank]
        if not -self._len <= rank < self._len:
            raise IndexError(rank)
        number, place = divmod(rank % self._len, CHUNK)
        return self._chunks[number][place]

    def __iter__(self) -> Iterator[Member]:
        return chain.from_iterable(self._chunks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Members):
            return self._chunks == other._chunks
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything the core knows; frozen, so that an explorer can keep and compare it. From `holdings` on, what only a
    job on several nodes has."""

    status: Status = Status.STARTING
    generation: int = 1  # newest generation any rank was told of
    members: Sequence[Member] = ()  # a tuple, or Members where they are many
    awaited: tuple[str, ...] = ()  # launched, and not started by their launcher yet
    nodes: tuple[NodeStatus, ...] = ()  # of JobConfig.nodes, and then those that joined later
    standbys: tuple[Standby, ...] = ()  # oldest first
    num_launched: int = 0
    built_offered: bool = False
    why_sealed: str = ""  # "": the live regime
    why_unsealed: str = ""  # of the live regime: why no full version is sealed; "": now and then one is
    restarts: int = 0
    version: int = 0  # of the newest plan
    tries: tuple[int, int] = (-1, 0)  # step that failed, recoveries from it
    first_failure: str = ""
    errors: tuple[tuple[str, str], ...] = ()  # process -> last line of its traceback
    outcome: tuple[int, str] | None = None  # code and reason, once the end is decided
    stopping_procs: tuple[str, ...] = ()
    deadline: float | None = None  # when those who were asked to end are made to
    holdings: tuple[tuple[int, tuple[Kept, ...]], ...] = ()  # while parking: by node, the replicas it keeps
    holdings_by: float | None = None  # when a node that has not told is lost
    promised: bool = False  # a rank of `generation` has promised never to vote in it again
    unproven: tuple[tuple[int, int], ...] = ()  # (rank, its lost node) of `generation`: it may live there
    doomed_at: tuple[
        tuple[str, int], ...
    ] = ()  # those of stopping_procs that are not on the first node, and where
    waits_for: str = ""  # what a recovery waits for that no rank can give, in words
    too_few: str = ""  # why fewer replicas are kept than asked for, in words
    is_regrouping: bool = False  # all park, and nothing has failed
