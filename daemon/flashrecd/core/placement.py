"""Which nodes keep a rank's replicas: a pure function.

What is asked for, the first before the second:

1. as many keepers as there are to be, if there are as many nodes besides the rank's own;
2. none in the failure domain of the rank's node while another is free, and no two in one domain while there are others;
3. whoever keeps a rank already goes on, where 1 and 2 allow it: to move a replica costs its bytes;
4. new replicas go where the load is least, so that no node runs out of memory first; while the load allows it, those of
   one node's ranks go to the same nodes, so that a second loss meets as few pairs of nodes as possible.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class NodeView(NamedTuple):
    """A node that can keep replicas. `domain`: what fails together with it; "" if that is the node alone."""

    node: int
    domain: str = ""


class _Wanted(NamedTuple):
    """How many of a rank's keepers are to be the first of their domain, further ones of domains that have one, and of
    the owner's domain."""

    first: int
    further: int
    own: int


def fewest(homes: Iterable[int], nodes: Sequence[NodeView], replicas: int) -> int:
    """How many of `replicas` keepers each rank can have on these nodes, whatever their domains."""
    there = {view.node for view in nodes}
    return min((min(replicas, len(there - {home})) for home in set(homes)), default=replicas)


def place(
    homes: Sequence[int],
    nodes: Sequence[NodeView],
    replicas: int,
    before: Sequence[Sequence[int]] = (),
    sizes: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """By rank, the nodes that keep what it seals; fewer than `replicas` where there are not as many.

    `homes`: by rank, its node. `nodes`: those that live. `before`: by rank, who keeps its replicas now; () for nobody.
    `sizes`: by rank, the bytes of a replica; () if all are alike. The work grows with the ranks, and with the nodes for
    each node whose ranks need new keepers."""
    return _Placing(homes, nodes, replicas, before or [()] * len(homes), sizes or [1] * len(homes)).result()


class _Placing:
    def __init__(
        self,
        homes: Sequence[int],
        nodes: Sequence[NodeView],
        replicas: int,
        before: Sequence[Sequence[int]],
        sizes: Sequence[int],
    ) -> None:
        self._homes, self._replicas, self._sizes = homes, replicas, sizes
        self._domains: dict[int, object] = {view.node: view.domain or view.node for view in nodes}
        self._nodes = list(self._domains)
        self._nodes_in = Counter(self._domains.values())
        self._wanted = {home: self._wanted_for(home) for home in set(homes)}
        self._keepers = [self._kept(homes[rank], before[rank]) for rank in range(len(homes))]
        self._new: list[set[int]] = [set() for _ in homes]
        self._load = dict.fromkeys(self._nodes, 0)
        for rank, keepers in enumerate(self._keepers):
            for node in keepers:
                self._load[node] += sizes[rank]
        total = sum(sum(self._wanted[home]) * size for home, size in zip(homes, sizes, strict=True))
        self._fair = -(-total // max(len(self._nodes), 1))
        self._partners: dict[int, list[int]] = {}

    def result(self) -> tuple[tuple[int, ...], ...]:
        # The largest first: what comes last must fit in where the load is least.
        for rank in sorted(range(len(self._homes)), key=lambda rank: (-self._sizes[rank], rank)):
            self._complete(rank)
        self._even_out()
        return tuple(tuple(keepers) for keepers in self._keepers)

    def _domain(self, node: int) -> object:
        return self._domains.get(node, node)

    def _wanted_for(self, home: int) -> _Wanted:
        own = self._domain(home)
        num_own = self._nodes_in[own]
        num_foreign = len(self._nodes) - num_own
        num_domains = len(self._nodes_in) - (own in self._nodes_in)
        foreign = min(self._replicas, num_foreign)
        first = min(foreign, num_domains)
        beside = num_own - (home in self._domains)
        return _Wanted(first, foreign - first, min(self._replicas - foreign, beside))

    def _missing(self, home: int, keepers: Sequence[int]) -> _Wanted:
        wanted, own = self._wanted[home], self._domain(home)
        foreign = [self._domain(node) for node in keepers if self._domain(node) != own]
        first = len(set(foreign))
        return _Wanted(
            wanted.first - first,
            wanted.further - (len(foreign) - first),
            wanted.own - (len(keepers) - len(foreign)),
        )

    def _kept(self, home: int, before: Sequence[int]) -> list[int]:
        """Those who keep it already, as far as they are what is wanted."""
        kept: list[int] = []
        for node in before:
            kept += self._that_fit(home, kept, [node])
        return kept

    def _that_fit(self, home: int, keepers: Sequence[int], nodes: Iterable[int]) -> list[int]:
        """Those of `nodes` that are one of the keepers that `keepers` lack."""
        missing, own = self._missing(home, keepers), self._domain(home)
        used = {self._domain(node) for node in keepers}
        fitting = []
        for node in nodes:
            domain = self._domains.get(node)
            if domain is None or node == home or node in keepers:
                continue
            foreign = missing.further if domain in used else missing.first
            if (missing.own if domain == own else foreign) > 0:
                fitting.append(node)
        return fitting

    def _complete(self, rank: int) -> None:
        home, keepers = self._homes[rank], self._keepers[rank]
        while any(self._missing(home, keepers)):
            node = self._best(rank)
            keepers.append(node)
            self._new[rank].add(node)
            self._load[node] += self._sizes[rank]

    def _best(self, rank: int) -> int:
        home, size = self._homes[rank], self._sizes[rank]
        partners = self._partners.setdefault(home, [])
        for node in self._that_fit(home, self._keepers[rank], partners):
            if self._load[node] + size <= self._fair:
                return node
        # Among equals the next in line, so that neighbours do not all choose the first.
        node = min(
            self._that_fit(home, self._keepers[rank], self._nodes),
            key=lambda node: (self._load[node], node < home, node),
        )
        partners.append(node)
        return node

    def _even_out(self) -> None:
        """What was placed early may be in the way of what came late."""
        movable: dict[int, list[int]] = {
            node: [] for node in self._nodes
        }  # ranks of which a new replica is there
        for rank, new in enumerate(self._new):
            for node in new:
                movable[node].append(rank)
        while any(
            self._relieve(node, movable)
            for node in sorted(self._nodes, key=lambda node: (-self._load[node], node))
            if self._load[node] > self._fair
        ):
            pass

    def _relieve(self, high: int, movable: dict[int, list[int]]) -> bool:
        """Whether a new replica could go from `high` to where there is less, perhaps by making another one there give
        way in turn: the shortest such chain, of replicas of one size."""
        lowest = min(self._load.values())
        came: dict[int, tuple[tuple[int, int, int], ...]] = {
            high: ()
        }  # node -> (rank, from, to) on the way there
        queue = [high]
        for node in queue:
            for rank in movable[node]:
                size = self._sizes[rank]
                on_the_way = [move[0] for move in came[node]]
                alike = not on_the_way or self._sizes[on_the_way[0]] == size
                if rank in on_the_way or not alike or lowest + size >= self._load[high]:
                    continue
                for to in self._instead(rank, node):
                    if to in came:
                        continue
                    came[to] = (*came[node], (rank, node, to))
                    if self._load[to] + size < self._load[high]:
                        for move in came[to]:
                            self._move(*move, movable)
                        return True
                    queue.append(to)
        return False

    def _instead(self, rank: int, node: int) -> list[int]:
        """The nodes that could keep `rank` in the place of `node`."""
        others = [keeper for keeper in self._keepers[rank] if keeper != node]
        fitting = self._that_fit(self._homes[rank], others, (n for n in self._nodes if n != node))
        return sorted(fitting, key=lambda other: (self._load[other], other))

    def _move(self, rank: int, node: int, to: int, movable: dict[int, list[int]]) -> None:
        keepers, size = self._keepers[rank], self._sizes[rank]
        keepers[keepers.index(node)] = to
        movable[node].remove(rank)
        movable[to].append(rank)
        self._load[node] -= size
        self._load[to] += size
