"""What the rules know of a job's nodes: who has room, who keeps replicas, what they have told, and whether a
generation is over although a node that had ranks of it is lost.

In a job on one node nothing of this does anything.
"""

from __future__ import annotations

from dataclasses import replace

from flashrecd.core import events as ev
from flashrecd.core.claims import replica_sets
from flashrecd.core.ledger import Ledger
from flashrecd.core.placement import NodeView, fewest, place
from flashrecd.core.plan import Plan
from flashrecd.core.state import NodeLife, NodeSpec, NodeStatus, Status

LEADER = 0  # its loss ends the job, so nobody asks whether it is lost

Versions = dict[int, tuple[int, ...]]


def watch_of(node: int) -> str:
    """The detector's name for a node; no process has it."""
    return f"node {node}"


class Nodes(Ledger):
    """The questions that other rules have about nodes."""

    __slots__ = ()

    @property
    def are_several(self) -> bool:
        return len(self.state.nodes) > 1

    def node_name(self, node: int) -> str:
        return self.state.nodes[node].name or str(node)

    def live_nodes(self) -> tuple[int, ...]:
        nodes = self.state.nodes
        if self._live[0] is not nodes:
            live = tuple(n for n, node in enumerate(nodes) if node.life is NodeLife.LIVE)
            self._live = nodes, live
        return self._live[1]

    def is_live(self, node: int) -> bool:
        return 0 <= node < len(self.state.nodes) and self.state.nodes[node].life is NodeLife.LIVE

    def _change_node(self, node: int, **changes: object) -> None:
        changed = replace(self.state.nodes[node], **changes)  # type: ignore[arg-type]
        self._set(nodes=(*self.state.nodes[:node], changed, *self.state.nodes[node + 1 :]))

    def _begin_nodes(self, specs: tuple[NodeSpec, ...]) -> None:
        self._set(nodes=tuple(NodeStatus(spec.name, spec.domain, spec.num_slots) for spec in specs))
        for node in self.live_nodes():
            self.detector.heard(watch_of(node), self._now)

    # --- room -----------------------------------------------------------------------------------------------

    def _capacity(self, node: int) -> int:
        slots = self.state.nodes[node].num_slots
        return self.config.world_size if slots is None else slots

    def _seats(self) -> list[int]:
        """By rank, where it is when a world begins: each node's share, in order, and then whatever room there is.
        Shorter than the world if it does not fit."""
        left = self.config.world_size
        taken = dict.fromkeys(self._reachable(), 0)
        for share in (self.config.ranks_per_node, self.config.world_size):
            for node in taken:
                more = min(left, max(min(share, self._capacity(node)) - taken[node], 0))
                taken[node] += more
                left -= more
        return [node for node, count in taken.items() for _ in range(count)]

    def _reachable(self) -> tuple[int, ...]:
        return tuple(node for node in self.live_nodes() if not self.state.nodes[node].unheard)

    def _home_for(self, rank: int) -> int | None:
        """Where the next process for `rank` is to be: its own node while that lives; else a node that has not its
        share of ranks yet, one that has a standby for it first; else any with room. None: there is no room."""
        member = self.state.members[rank]
        if self.is_live(member.node):
            return member.node
        taken = dict.fromkeys(self._reachable(), 0)
        for other in self.state.members:
            if other.node in taken:  # also where it has just died: it is replaced there
                taken[other.node] += 1
        ready = {standby.node for standby in self.state.standbys if standby.depth}

        def merit(node: int) -> tuple[bool, bool, int, bool, int]:
            has_share = taken[node] >= self.config.ranks_per_node
            # The ranks of a lost node stay together, lest each spare lose its room for a whole one.
            crowd = taken[node] if has_share else -taken[node]
            return has_share, node not in ready, crowd, node not in member.keepers, node

        room = [node for node in taken if taken[node] < self._capacity(node)]
        return min(room, key=merit, default=None)

    # --- replicas -------------------------------------------------------------------------------------------

    def _cannot_keep(self, seats: list[int]) -> str:
        """Why a job cannot begin with the replicas it asks for; "" if it can."""
        asked, nodes = self.config.replicas, self._views()
        can = fewest(seats, nodes, asked)
        if can >= asked:
            return ""
        return (
            f"{asked} replicas of every rank need {asked + 1} nodes, and there are {len(nodes)}: "
            f"add nodes, or ask for {can}"
        )

    def _views(self) -> list[NodeView]:
        return [NodeView(node, self.state.nodes[node].domain) for node in self._reachable()]

    def _placed(self) -> tuple[tuple[int, ...], ...]:
        members = self.state.members
        homes, before = [m.node for m in members], [m.keepers for m in members]
        sizes = [m.size_bytes for m in members]
        return place(homes, self._views(), self.config.replicas, before, sizes if all(sizes) else ())

    def _choose_keepers(self) -> tuple[tuple[int, ...], ...]:
        """By rank, who keeps what it seals from the next generation on; () in a job that keeps no replicas."""
        if not self.are_several or not self.config.replicas:
            return ()
        keepers = self._placed()
        members = zip(self.state.members, keepers, strict=True)
        self._set(members=tuple(replace(member, keepers=chosen) for member, chosen in members))
        fewest_kept = min(map(len, keepers))
        few = (
            f"{len(self.live_nodes())} nodes live: {fewest_kept} replicas of some ranks are kept, not "
            f"{self.config.replicas}"
            if fewest_kept < self.config.replicas
            else ""
        )
        if few and few != self.state.too_few:
            self._log("too few replicas", few)
        self._set(too_few=few)
        return keepers

    def _falls_together(self) -> str:
        """Why the live regime would not outlive the loss of a node or a failure domain, in words; "" if it would."""
        if not self.are_several:
            return ""
        domains = {view.node: view.domain or view.node for view in self._views()}
        if len(set(domains.values())) == 1:
            domains = {node: node for node in domains}
        for ranks in replica_sets(self.state.members):
            nodes = {self.state.members[rank].node for rank in ranks}
            if len({domains[node] for node in nodes}) == 1:
                where = ", ".join(self.node_name(node) for node in sorted(nodes))
                who = f"rank {ranks[0]} and its replicas" if len(ranks) > 1 else f"rank {ranks[0]}"
                return f"what {who} hold is on {where} alone"
        return ""

    def _kept(self) -> tuple[Versions, Versions]:
        """By rank, the versions of its private state and its sealed ones that can be had: in the arena of its node, and
        from the nodes that keep replicas."""
        private = {rank: m.private for rank, m in enumerate(self.state.members)}
        sealed = {rank: m.sealed for rank, m in enumerate(self.state.members)}
        for _, kept in self.state.holdings:
            for one in kept:
                if one.rank in private:
                    private[one.rank] = tuple(sorted({*private[one.rank], *one.private}))
                    sealed[one.rank] = tuple(sorted({*sealed[one.rank], *one.sealed}))
        return private, sealed

    def _sources(self, plan: Plan) -> tuple[ev.RankSources, ...]:
        """Where the nodes are that hold what a replaced rank needs of arenas and private slots."""
        if not self.are_several:
            return ()
        replaced, served = set(plan.replaced), {members for members, _ in plan.served}
        read = {
            rank
            for members in replica_sets(self.state.members)
            if members not in served and not replaced.isdisjoint(members)
            for rank in members
        }
        private: dict[int, list[int]] = {rank: [] for rank in replaced}
        sealed: dict[int, list[int]] = {rank: [] for rank in read}
        for rank in replaced | read:
            member = self.state.members[rank]
            if plan.version in member.private and rank in private:
                private[rank].append(member.node)
            if plan.version in member.sealed and rank in sealed:
                sealed[rank].append(member.node)
        for node, kept in self.state.holdings:
            for one in kept:
                if plan.version in one.private and node not in private.get(one.rank, [node]):
                    private[one.rank].append(node)
                if plan.version in one.sealed and node not in sealed.get(one.rank, [node]):
                    sealed[one.rank].append(node)
        return tuple(
            ev.RankSources(rank, tuple(sealed.get(rank, ())), tuple(private.get(rank, ())))
            for rank in sorted(replaced | read)
        )

    # --- the end of a generation ------------------------------------------------------------------------------

    def _fence(self, generation: int) -> None:
        """With the generation end its replicas: none may be added that the plan does not know of."""
        if self.are_several:
            by = self._now + self.config.suspect_after_s
            self._set(holdings=(), holdings_by=by)
            self._do(ev.Fence(generation, self.live_nodes()))

    def _settle(self, generation: int, version: int, sealed: int) -> None:
        """`generation` begins, at `version`; what was known of the one before it is over. `sealed`: see Settle."""
        if self.are_several:
            self._set(
                holdings=(), holdings_by=None, promised=False, unproven=(), waits_for="", is_regrouping=False
            )
            self._do(ev.Settle(generation, version, self.live_nodes(), sealed))

    def _untold(self) -> tuple[int, ...]:
        """The live nodes that have not said yet what they keep."""
        told = {node for node, _ in self.state.holdings}
        return tuple(node for node in self.live_nodes() if node not in told)

    def _tells(self, told: ev.Holdings) -> bool:
        """Adds what a live node keeps to the holdings; False if it has said so before, or is not live."""
        holdings, nodes = self._told
        if holdings is not self.state.holdings:
            nodes = {node for node, _ in self.state.holdings}
        if not self.is_live(told.node) or told.node in nodes:
            return False
        self._set(holdings=(*self.state.holdings, (told.node, told.kept)))
        nodes.add(told.node)
        self._told = self.state.holdings, nodes
        return True

    def _may_step_elsewhere(self) -> str:
        """Why the newest generation may not be over, in words; "" if it is. It is once a live rank has promised never
        to vote in it again, which every gate would need, or if every rank of it is proven dead."""
        where = sorted({node for _, node in self.state.unproven if not self.state.nodes[node].is_proven})
        if self.state.promised or not where:
            return ""
        ranks = sorted(rank for rank, node in self.state.unproven if node in where)
        names = ", ".join(self.node_name(node) for node in where)
        ended = self.state.generation - (self.state.status is Status.RESTARTING)
        return (
            f"no rank of generation {ended} is left that could promise to stop, and ranks {ranks} may "
            f"still train on what is lost: somebody must say that nothing runs any more on {names}"
        )

    def _is_held_up(self) -> bool:
        """Whether a recovery in which all that live have parked must still wait. Why is logged once."""
        why = self._may_step_elsewhere()
        if why and why != self.state.waits_for:
            self._log("waiting", why)
        self._set(waits_for=why)
        return bool(why) or (
            # What lost nodes told is forgotten with them.
            self.state.status is Status.PARKING
            and self.are_several
            and len(self.state.holdings) < len(self.live_nodes())
        )
