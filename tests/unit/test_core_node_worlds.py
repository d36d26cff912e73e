"""Random lives of a job on several nodes: whatever is lost, in whatever order the core hears of it, it asks nothing of
the dead, trusts no lost node, ends a generation before it begins another, and comes to an end of every recovery."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashrecd.core import events as ev
from flashrecd.core.job import Core
from flashrecd.core.state import GONE, JobConfig, Kept, NodeLife, NodeSpec, RankStatus, Status

ENOUGH = 10**6
MOVES = (
    *[0] * 3,
    *[1] * 8,
    *[2] * 20,
    *[3] * 8,
    *[4] * 30,
    *[6] * 30,
    *[7] * 60,
    *[9] * 5,
    *[10] * 4,
    *[11] * 9,
    12,
)
UNIQUE = "each rank alone holds a part"


class World:
    """Processes, arenas and replicas, as they would be; and what must be true of every answer of the core.

    `sealed`: each rank alone holds its tensors. Every random number comes from `dice`."""

    def __init__(self, dice: random.Random, *, sealed: bool) -> None:
        self.dice = dice
        self.sealed = sealed
        num_nodes, spares = dice.randint(2, 4), dice.randint(0, 2)
        self.share = dice.randint(1, 2)
        self.replicas = min(dice.choice([0, 1, 1, 1, 2, 2]), num_nodes + spares - 1)
        extra = dice.randint(0, 1)
        specs = [
            NodeSpec(f"n{i}", dice.choice(["", "x", "y"]), self.share + extra)
            for i in range(num_nodes + spares)
        ]
        self.core = Core(
            JobConfig(
                world_size=num_nodes * self.share,
                nodes=tuple(specs),
                nproc_per_node=self.share,
                replicas=self.replicas,
                num_standbys=dice.randint(0, 1),
                max_tries_per_step=ENOUGH,
            )
        )
        self.now = 0.0
        self.version = 0  # the newest that every keeper has acknowledged
        self.at = 0  # the one that the ranks are at, or their plan
        self.alive: dict[str, int] = {}  # process -> its node, as far as the core can reach it
        self.of: dict[int, dict[int, str]] = {}  # generation -> rank -> process that was told of it
        self.promised: set[int] = set()
        self.exited: set[str] = set()
        self.fenced: set[int] = set()
        self.went: dict[str, int] = {}  # process -> the node it was started on
        self.arenas: dict[int, tuple[int, set[int]]] = {}  # rank -> (node, versions)
        self.kept: dict[int, dict[int, set[int]]] = {}  # node -> rank -> versions
        self.to_park: dict[str, int] = {}  # process -> generation that was aborted
        self.to_form: dict[str, int] = {}
        self.to_tell: dict[int, int] = {}  # node -> generation that was fenced
        self.passed = False
        self.installing: dict[str, int] = {}
        self.lost_since_whole: set[int] = set()
        self.ended: ev.End | None = None
        self.num_plans = 0
        self.tell(ev.Begin())
        self.of[1] = {rank: member.proc for rank, member in enumerate(self.core.state.members)}
        everyone = tuple(range(self.core.config.world_size))
        for rank, member in enumerate(self.core.state.members):
            claims = (((rank,) if sealed else everyone, "digest"),)
            self.tell(ev.Protected(member.proc, claims, UNIQUE if sealed else ""))
        assert self.core.state.status is Status.RUNNING
        for _ in range(3):
            self.commit()

    # --- the core is told, and obeyed ---------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        before = self.core.state
        actions = self.core.handle(event, self.now)
        for node, status in enumerate(self.core.state.nodes):
            known = node < len(before.nodes)
            if status.life is NodeLife.LOST and known and before.nodes[node].life is NodeLife.LIVE:
                self.gone(node)
        for action in actions:
            self.obey(action)
        self.check()

    def gone(self, node: int) -> None:
        self.lost_since_whole.add(node)
        self.kept.pop(node, None)
        self.to_tell.pop(node, None)
        for proc in [proc for proc, where in self.alive.items() if where == node]:
            del self.alive[proc]
            self.to_park.pop(proc, None)
            self.to_form.pop(proc, None)
        self.arenas = {rank: arena for rank, arena in self.arenas.items() if arena[0] != node}

    def obey(self, action: ev.Action) -> None:
        match action:
            case ev.Launch():
                assert self.core.is_live(action.node)
                self.alive[action.proc] = self.went[action.proc] = action.node
            case ev.Assign():
                assert action.proc in self.alive
            case ev.Kill():
                assert action.proc in self.alive
            case ev.Abort():
                # It may be what makes a silent node matter: then the news of its loss comes together with this.
                assert all(
                    proc in self.alive or not self.core.is_live(self.went[proc]) for proc in action.procs
                )
                self.to_park |= dict.fromkeys(set(action.procs) & set(self.alive), action.generation)
                self.to_form.clear()
            case ev.Fence():
                assert set(action.nodes) >= set(self.core.live_nodes())
                self.to_tell = dict.fromkeys(self.core.live_nodes(), action.generation)
            case ev.Settle():
                for node in self.core.live_nodes():
                    assert node in action.nodes
                    for versions in self.kept.get(node, {}).values():
                        versions -= {v for v in versions if v > action.version}
            case ev.SendPlan():
                self.planned(action)
            case ev.End():
                self.ended = action

    def planned(self, sent: ev.SendPlan) -> None:
        self.num_plans += 1
        generation, version = sent.plan.generation, sent.plan.version
        old = self.of[generation - 1]
        proven = [proc in self.exited or self.went[proc] in self.fenced for proc in old.values()]
        assert generation - 1 in self.promised or all(proven), "nobody has ended the old generation"
        assert set(sent.procs) <= set(self.alive)
        assert version <= self.at + 1
        assert version >= self.version or self.too_many_lost, "a step was lost that was acknowledged"
        self.version, self.at = min(self.version, version), version
        if self.replicas:
            for rank, keepers in enumerate(sent.keepers):
                home = self.core.state.members[rank].node
                assert home not in keepers
                assert all(self.core.is_live(node) for node in keepers)
        sources = {one.rank: one for one in sent.sources}
        for rank in sent.plan.replaced:
            assert sources[rank].private
            assert sources[rank].sealed or not self.sealed
        for rank, one in sources.items():
            for node in {*one.sealed, *one.private}:
                home, sealed_there = self.arenas.get(rank, (-1, set()))
                # A rank may have come to a node that had kept replicas of it, and keeps them still.
                there = self.kept.get(node, {}).get(rank, set()) | (sealed_there if home == node else set())
                assert version in there, f"node {node} does not have version {version} of rank {rank}"
        members = self.core.state.members
        self.of[generation] = {rank: member.proc for rank, member in enumerate(members)}
        self.to_form = dict.fromkeys(sent.procs, generation)
        self.to_park.clear()
        self.installing = {members[rank].proc: version for rank in sent.plan.replaced}
        self.passed = False

    def check(self) -> None:
        state = self.core.state
        taken: dict[int, int] = {}
        for member in state.members:
            if member.status not in GONE:
                assert self.core.is_live(member.node)
                assert self.alive.get(member.proc) == member.node
                taken[member.node] = taken.get(member.node, 0) + 1
        for node, count in taken.items():
            slots = state.nodes[node].num_slots
            assert slots is not None
            assert count <= slots
            assert not state.nodes[node].spare
        for standby in state.standbys:
            assert self.alive.get(standby.proc) == standby.node
        if state.status is Status.RUNNING:
            assert len(set(self.of[state.generation].values()) & set(self.alive)) == len(state.members)

    @property
    def too_many_lost(self) -> bool:
        """Since every rank last had all its replicas."""
        return len(self.lost_since_whole) > self.replicas or bool(self.core.state.too_few)

    # --- what happens ---------------------------------------------------------------------------------------

    def commit(self) -> None:
        """A step: what it needs is sealed, acknowledged, and everybody votes."""
        if self.core.state.status is not Status.RUNNING:
            return
        self.at += 1
        self.acknowledge()

    def acknowledge(self) -> None:
        self.passed = False
        self.version = v = self.at
        self.lost_since_whole = set()
        for rank, member in enumerate(self.core.state.members):
            self.arenas[rank] = member.node, {v - 1, v}
            for node in member.keepers:
                self.kept.setdefault(node, {})[rank] = {v - 1, v}

    def vote(self) -> None:
        """The gate of the present step passes, for some who see it before they hear of a failure."""
        if self.core.state.status is Status.RUNNING:
            self.passed = True
            if not self.sealed:  # nobody voted before the private state of the next version was acknowledged
                for versions in (*(kept for _, kept in self.arenas.values()), *self.replicas_kept()):
                    versions |= {self.at + 1}

    def replicas_kept(self) -> Iterator[set[int]]:
        return (versions for ranks in self.kept.values() for versions in ranks.values())

    def park(self, proc: str, generation: int) -> None:
        rank = self.core.rank_of(proc)
        self.to_park.pop(proc, None)
        if rank is None or proc not in self.alive:
            return
        if proc not in self.of.get(generation, {}).values():
            return  # a replacement that was told of no generation yet has nothing to promise
        self.promised.add(generation)
        versions = self.in_arena(rank, proc)
        sealed = versions if self.sealed else ()
        if proc in self.installing:
            event = ev.Parked(proc, generation, None, False, versions, sealed)
        elif self.passed and self.dice.random() < 0.5:
            event = ev.Parked(proc, generation, self.at + 1, False, versions, sealed)
        else:
            event = ev.Parked(proc, generation, self.at, self.passed, versions, sealed)
        self.tell(event)

    def in_arena(self, rank: int, proc: str) -> tuple[int, ...]:
        """What is in the arena of `rank` on the node of `proc`."""
        node, versions = self.arenas.get(rank, (-1, set()))
        return tuple(sorted(versions)) if node == self.went[proc] else ()

    def exit(self, proc: str) -> None:
        rank = self.core.rank_of(proc)
        for waiting in (self.to_park, self.to_form, self.alive):
            waiting.pop(proc, None)
        self.exited.add(proc)
        versions = self.in_arena(rank, proc) if rank is not None else ()
        self.tell(ev.Exited(proc, None, 9, versions, versions if self.sealed else ()))

    def hold(self, node: int) -> None:
        generation = self.to_tell.pop(node)
        kept = tuple(
            Kept(rank, tuple(sorted(versions)), tuple(sorted(versions)) if self.sealed else ())
            for rank, versions in self.kept.get(node, {}).items()
        )
        self.tell(ev.Holdings(node, generation, kept))

    def form(self, proc: str) -> None:
        generation = self.to_form.pop(proc)
        rank = self.core.rank_of(proc)
        if proc in self.installing and rank is not None:
            self.arenas[rank] = self.went[proc], {self.installing.pop(proc)}
        self.tell(ev.Formed(proc, generation))
        if self.core.state.status is Status.RUNNING:
            self.acknowledge()  # for every rank before the first gate

    def anything(self) -> None:
        dice, state = self.dice, self.core.state
        self.now += dice.choice([0.0, 0.0, 0.5])
        others = [node for node in self.core.live_nodes() if node]
        for node in self.core.live_nodes():
            if not state.nodes[node].unheard:
                self.tell(ev.NodeHeard(node))
        match dice.choice(MOVES):
            case 0 if others:
                node = dice.choice(others)
                self.tell(ev.NodeClosed(node, "reset"))
                if dice.random() < 0.3:
                    self.tell(ev.NodeDeserted(node))
            case 1 if self.alive:
                self.exit(dice.choice(sorted(self.alive)))
            case 2:
                self.commit()
            case 3:
                self.vote()
            case 4 if self.to_park:
                self.park(*dice.choice(sorted(self.to_park.items())))
            case 6 if self.to_tell:
                self.hold(dice.choice(sorted(self.to_tell)))
            case 7 if self.to_form:
                self.form(dice.choice(sorted(self.to_form)))
            case 9:
                self.tell(ev.NodeJoined(dice.choice(["n1", "n2", "new"]), "", self.share))
            case 10 if state.status is Status.RUNNING:
                self.park(dice.choice([m.proc for m in state.members]), state.generation)
            case 12 if state.status is Status.RUNNING and others:  # nobody is left to promise
                alone = dice.choice(others)
                for member in state.members:
                    if member.node != alone and self.core.state.status is not Status.STOPPING:
                        self.exit(member.proc)
                self.tell(ev.NodeClosed(alone, "reset"))
            case 11:
                self.tell(ev.Tick())

    def settle(self) -> None:
        """Everybody who can say something says it."""
        for _ in range(1000):
            if self.ended is not None:
                return
            doomed = [proc for proc in self.core.state.stopping_procs if proc in self.alive]
            if doomed:
                self.exit(doomed[0])
            elif self.to_park:
                self.park(*next(iter(self.to_park.items())))
            elif self.to_tell:
                self.hold(next(iter(self.to_tell)))
            elif self.to_form:
                self.form(next(iter(self.to_form)))
            elif self.core.state.waits_for:
                lost = {node for _, node in self.core.state.unproven} - self.fenced
                assert lost, "it waits for nothing"
                self.fenced.add(node := min(lost))
                self.tell(ev.NodeFenced(node))
            else:
                return
        raise AssertionError("no end of it")


def live(seed: int, sealed: bool) -> World:
    dice = random.Random(seed)
    world = World(dice, sealed=sealed)
    for _ in range(dice.randint(5, 300)):
        if world.ended is None and world.core.state.status is not Status.STOPPING:
            world.anything()
    world.settle()
    return world


@settings(max_examples=120, deadline=None)
@example(719, True)  # a replica on the rank's own node is older than the arena there, and is what can be had
@given(st.integers(0, 2**32), st.booleans())
def test_every_recovery_comes_to_an_end_that_its_losses_explain(seed: int, sealed: bool) -> None:
    world = live(seed, sealed)
    state = world.core.state
    if world.ended is None:
        assert state.status is Status.RUNNING or all(
            state.nodes[m.node].unheard
            for m in state.members
            if m.status is RankStatus.LIVE and m.proc in world.alive
        ), state.status
        return
    code, reason = world.ended
    assert code == 1
    if "room" in reason:
        room = sum(state.nodes[node].num_slots or 0 for node in world.core.live_nodes())
        heard = sum(
            node.num_slots or 0 for node in state.nodes if node.life is NodeLife.LIVE and not node.unheard
        )
        assert min(room, heard) < len(state.members)
    elif "no rank is left that holds the tensor state" in reason:
        assert not sealed
    else:
        assert "no source" in reason
        assert world.too_many_lost


def test_the_lives_are_full_of_events() -> None:
    """Else the property above would say little."""
    worlds = [live(seed, seed % 2 == 0) for seed in range(120)]
    assert sum(world.num_plans for world in worlds) > 200
    assert sum(len(world.fenced) for world in worlds) > 3
    reasons = [world.ended.reason for world in worlds if world.ended is not None]
    assert any("room" in reason for reason in reasons)
    assert any("no source" in reason for reason in reasons)
    assert sum(world.ended is None for world in worlds) > 20
