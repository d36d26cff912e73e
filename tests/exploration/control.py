"""The daemon's side of the world: what the core can be told next, and what its answers do.

The core's state is taken apart into the hub and one Member per slot, so that slots can be compared and
exchanged, and put together again for each event. Left out, because no decision of a recovery depends on
them: texts, and the counters of budgets (which the explorer's configuration never exhausts).
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from flashrec import phases as ph
from flashrecd.core import events as ev
from flashrecd.core.detection import Detector
from flashrecd.core.job import Core
from flashrecd.core.state import JobConfig, JobState, Member, NodeLife, NodeSpec, RankStatus, Status
from flashrecd.core.state import Standby as Waiting
from tests.exploration import arenas, invariants, nodes
from tests.exploration.model import (
    BLANK,
    NO_CONTEXT,
    Config,
    Life,
    Link,
    Node,
    Proc,
    Regime,
    Slot,
    Somebody,
    Standby,
    Told,
    Violation,
    World,
)
from tests.exploration.ranks import die, moves

NOW = 0.0
ENOUGH = 1_000_000
SEEN = "seen by the exploration"
NEW = 1000  # processes the core names itself are p1000 and later, so that they meet no other name


def slot_name(rank: int) -> str:
    return f"r{rank}"


def standby_name(number: int) -> str:
    return f"s{number}"


Claims = tuple[tuple[tuple[int, ...], str], ...]


def claims_of(config: Config, rank: int) -> Claims:
    """What `rank` holds, in its own words."""
    return tuple((members, "digest") for members in config.sets_of(rank))


def compose(world: World, config: Config) -> JobState:
    names = [(standby_name(i), s) for i, s in enumerate(world.standbys)]
    return replace(
        world.hub,
        members=tuple([_named(s.member, r, config) for r, s in enumerate(world.slots)]),
        standbys=tuple(Waiting(name, s.known, s.node) for name, s in names if s.known is not None),
        stopping_procs=(
            *[slot_name(r) for r, s in enumerate(world.slots) if s.doomed],
            *[name for name, s in names if s.doomed],
        ),
        doomed_at=(
            *[(slot_name(r), s.node) for r, s in enumerate(world.slots) if s.doomed and s.node],
            *[(name, s.node) for name, s in names if s.doomed and s.node],
        ),
        num_launched=NEW,
    )


@functools.cache
def _named(member: Member, rank: int, config: Config) -> Member:
    protected = member.status is not RankStatus.STARTING
    return replace(member, proc=slot_name(rank), claims=claims_of(config, rank) if protected else None)


def kept_by(slot: Slot) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Versions in its private slots, and in its arena."""
    sealed = [kept.content.version for kept in slot.arena if kept.sealed]
    private = {content.version for content in (*slot.private, *slot.full_private)}
    return tuple(sorted(private)), tuple(sealed)


def event_of(world: World, rank: int, config: Config) -> ev.Event:
    """The oldest message of a rank's process, as the shell hands it to the core."""
    slot = world.slots[rank]
    proc, (kind, *rest) = slot_name(rank), slot.outbox[0]
    match kind:
        case "protected":
            return ev.Protected(proc, claims_of(config, rank), SEEN if config.regime is Regime.SEALED else "")
        case "switched":
            return ev.Switched(proc, SEEN)
        case "parked":
            return ev.Parked(proc, *rest, *kept_by(slot))  # type: ignore[arg-type]
        case "formed":
            return ev.Formed(proc, *rest)  # type: ignore[arg-type]
        case "leaving":
            return ev.Leaving(proc, *rest)  # type: ignore[arg-type]
    raise AssertionError(f"no message {kind}")


def hears(before: Slot, slot: Slot, rank: int) -> str:
    return f"core hears {slot.outbox[0]} of {rank}{'' if before is slot else ', just sealed'}"


def put(world: World, rank: int, slot: Slot) -> World:
    return world._replace(slots=(*world.slots[:rank], slot, *world.slots[rank + 1 :]))


def _with(standbys: tuple[Standby, ...], number: int, standby: Standby) -> tuple[Standby, ...]:
    return (*standbys[:number], standby, *standbys[number + 1 :])


class Told_by_events(Detector):
    """Nothing is late here; what the core would see by the clock is an event."""

    is_still = False

    def ticked(self, now: float) -> bool:
        return False

    def silence(self, proc: str, now: float) -> float:
        return 0.0

    def stands_still(self, procs: Iterable[str], now: float) -> bool:
        return self.is_still


class Control:
    """The daemon of one world, the leader if there are more. Decisions are remembered: the core is asked once for each
    situation."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.core = Core(
            JobConfig(
                world_size=config.num_ranks,
                num_standbys=config.num_standbys,
                max_tries_per_step=ENOUGH,
                suspect_after_s=1,
                nodes=tuple(NodeSpec(f"n{i}", domain) for i, domain in enumerate(config.domains))
                or (NodeSpec(),),
                nproc_per_node=config.share if config.several else None,
                replicas=config.replicas if config.several else 0,
            )
        )
        self.detector = self.core.detector = Told_by_events(1)
        self.decided: dict[object, tuple[JobState, list[ev.Action]]] = {}

    def initial(self) -> World:
        """The daemon has just begun; or (from_start False) every rank has protected, and it knows."""
        config = self.config
        slots = tuple([Slot(BLANK, replica=config.replica(rank)) for rank in range(config.num_ranks)])
        there = tuple([Node() for _ in config.domains]) if config.several else ()
        world = World(JobState(), slots, (), config.num_faults, nodes=there, returns=config.returns)
        world = self.tell(world, ev.Begin())
        if not config.from_start:
            while world.hub.status is Status.STARTING:  # protect, seal and say so: one rank after the other
                rank = next(
                    r for r, slot in enumerate(world.slots) if slot.member.status is RankStatus.STARTING
                )
                while options := moves(world.slots[rank], NO_CONTEXT, config):
                    world = put(world, rank, options[0].slot)
                world = self.hear(world, rank)
            for rank, slot in enumerate(world.slots):  # each is told the regime
                world = put(world, rank, moves(slot, NO_CONTEXT, config)[0].slot)
            for number in range(0 if config.several else len(world.standbys)):
                world = self.hear_standby(standby_moves(world)[0][1], number)
        return world

    def messages(self, world: World) -> list[tuple[str, Callable[[], World]]]:
        """What the core can hear next: the oldest message of each channel, and deaths."""
        options: list[tuple[str, Callable[[], World]]] = self.node_messages(world)
        for rank, slot in enumerate(world.slots):
            if not self.is_heard(world, slot.node):
                continue
            options.extend(
                (hears(before, slot, rank), partial(self.hear, world, rank, before))
                for before in self.spoken(slot)
            )
            if slot.life is Life.ZOMBIE:
                options.append(
                    (f"core hears of the death of {rank}", lambda rank=rank: self.bury(world, rank))
                )
        for number, standby in enumerate(world.standbys):
            if not self.is_heard(world, standby.node):
                continue
            if standby.outbox:
                label = f"core hears {standby.outbox[0]} of standby {number}"
                options.append((label, lambda number=number: self.hear_standby(world, number)))
            if standby.life is Life.ZOMBIE:
                label = f"core hears of the death of standby {number}"
                options.append((label, lambda number=number: self.bury_standby(world, number)))
        return options

    @staticmethod
    def is_heard(world: World, node: int) -> bool:
        return not world.nodes or world.nodes[node].link is Link.UP

    def node_messages(self, world: World) -> list[tuple[str, Callable[[], World]]]:
        """What the core can hear of nodes: answers, silence, and what somebody says who can know."""
        options: list[tuple[str, Callable[[], World]]] = []
        tell, hub = partial(self.tell, world), world.hub
        stands_still = False
        for number, node in enumerate(world.nodes):
            is_live = hub.nodes[number].life is NodeLife.LIVE
            if node.link is Link.UP and node.outbox:
                options.append(
                    (f"core hears of node {number} what it keeps", partial(self.hear_node, world, number))
                )
            if is_live and node.link in (Link.CUT, Link.DEAD) and not node.closed:
                closed = nodes.changed(world, number, closed=True)
                event = ev.NodeClosed(number, "reset")
                options.append(
                    (f"core hears that node {number} is closed", partial(self.tell, closed, event))
                )
            if is_live and node.link is Link.CUT:
                killed = [die(s) if s.doomed and s.node == number else s for s in world.slots]
                back = nodes.changed(world._replace(slots=tuple(killed)), number, link=Link.UP, closed=False)
                event = ev.NodeHeard(number)
                options.append((f"core hears node {number} again", partial(self.tell, back, event)))
            stands_still = stands_still or (is_live and node.closed)
            if is_live and node.closed and not hub.nodes[number].is_deserted:
                options.append((f"core finds node {number} deserted", partial(tell, ev.NodeDeserted(number))))
            gone = node.link is Link.DEAD or (node.link is Link.LOST and not node.runs)
            if gone and hub.waits_for and not hub.nodes[number].is_proven:
                options.append(
                    (f"somebody says that node {number} is gone", partial(tell, ev.NodeFenced(number)))
                )
            if node.link is Link.LOST and node.runs:
                options.append((f"what ran on node {number} ends", partial(self.end_ghosts, world, number)))
            came_back = any(world.hub.nodes[number].name == one.name for one in hub.nodes[number + 1 :])
            if world.returns and number and not came_back and node.link is not Link.UP:
                options.append((f"node {number} comes again", partial(self.come_again, world, number)))
        if stands_still and hub.status is not Status.ENDED:
            options.append(("core finds that all others stand still", partial(self.stand_still, world)))
        if world.returns and self.config.returning:
            options.append(
                ("a node joins", partial(self.join, world._replace(returns=world.returns - 1), "new"))
            )
        return options

    def hear_node(self, world: World, number: int) -> World:
        node = world.nodes[number]
        _, generation, kept = node.outbox[0]
        world = nodes.changed(world, number, outbox=node.outbox[1:])
        return self.tell(world, ev.Holdings(number, generation, kept))  # type: ignore[arg-type]

    def end_ghosts(self, world: World, number: int) -> World:
        """Its daemon learns that it has no part in the job any more."""
        return nodes.changed(world, number, runs=False)._replace(ghosts=())

    def come_again(self, world: World, number: int) -> World:
        """Its daemon is started anew: nothing of before runs there, and it keeps nothing."""
        ghosts = () if world.nodes[number].link is Link.LOST else world.ghosts
        gone = nodes.dies(world._replace(returns=world.returns - 1, ghosts=ghosts), number)
        known = world.hub.nodes[number]
        return self.join(gone, known.name, known.domain)

    def join(self, world: World, name: str, domain: str | None = None) -> World:
        world = world._replace(nodes=(*world.nodes, Node()))
        return self.tell(world, ev.NodeJoined(name, self.config.returning if domain is None else domain))

    def stand_still(self, world: World) -> World:
        self.detector.is_still = True
        try:
            return self.tell(world, ev.Tick())
        finally:
            self.detector.is_still = False

    def spoken(self, slot: Slot) -> tuple[Slot, ...]:
        """The slot as the core may find it when it hears the oldest message of its process; () if there is none."""
        if not slot.outbox:
            return ()
        return arenas.resolved(slot, self.config) if slot.outbox[0][0] == "parked" else (slot,)

    def hear(self, world: World, rank: int, slot: Slot | None = None) -> World:
        slot = slot or world.slots[rank]
        world = put(world, rank, slot)
        event = event_of(world, rank, self.config)
        return self.tell(put(world, rank, slot._replace(outbox=slot.outbox[1:])), event)

    def bury(self, world: World, rank: int) -> World:
        """The kernel says that a rank's process is gone. What it had sent and was not heard yet is lost."""
        slot = world.slots[rank]
        code, signal = (None, 9) if slot.exit_code is None else (slot.exit_code, None)
        event = ev.Exited(slot_name(rank), code, signal, *kept_by(slot))
        return self.tell(put(world, rank, slot._replace(life=Life.NONE, outbox=())), event)

    def hear_standby(self, world: World, number: int) -> World:
        standby = world.standbys[number]
        depth = str(standby.outbox[0][0])
        standbys = _with(world.standbys, number, standby._replace(outbox=standby.outbox[1:]))
        return self.tell(world._replace(standbys=standbys), ev.StandbyReady(standby_name(number), depth))

    def bury_standby(self, world: World, number: int) -> World:
        gone = world.standbys[number]._replace(life=Life.NONE, outbox=())
        event = ev.Exited(standby_name(number), None, 9)
        return self.tell(world._replace(standbys=_with(world.standbys, number, gone)), event)

    def tell(self, world: World, event: ev.Event) -> World:
        """Let the core handle `event`, and carry out what it answers."""
        key = (
            type(event),  # named tuples of different types may be equal
            event,
            world.hub,
            tuple([(slot.member, slot.doomed) for slot in world.slots]),
            tuple([(standby.known, standby.doomed) for standby in world.standbys]),
        )
        decided = self.decided.get(key)
        if decided is None:
            self.core.state = compose(world, self.config)
            actions = self.core.handle(event, NOW)
            decided = self.decided[key] = (self.core.state, actions)
        after = Effects(self.config, world, *decided).world
        if not world.nodes:
            return after
        for number, standby in enumerate(
            after.standbys
        ):  # they are ready at once, and die with their nodes alone
            if standby.depth == "" and standby.life is Life.ALIVE and self.is_heard(after, standby.node):
                ready = standby._replace(depth="forked")
                after = after._replace(standbys=_with(after.standbys, number, ready))
                return self.tell(after, ev.StandbyReady(standby_name(number), "forked"))
        return after


# --- the world obeys ---------------------------------------------------------------------------------


@functools.cache
def _plain(member: Member, status: Status) -> Member:
    """What is known of a rank, less what the core learns anew before it ever looks at it again."""
    if status is Status.RUNNING and member.status is RankStatus.LIVE:
        return Member("", member.status, node=member.node, keepers=member.keepers)
    return replace(member, proc="", claims=None)


class Effects:
    """One answer of the core, carried out: `world` is the world afterwards."""

    def __init__(self, config: Config, world: World, state: JobState, actions: list[ev.Action]) -> None:
        self.config = config
        self.before = world
        self.state = state
        self.slots = list(world.slots)
        self.standbys = list(world.standbys)
        self.nodes = list(world.nodes)
        self.names: dict[str, int | Standby] = {slot_name(r): r for r in range(len(self.slots))}
        self.names.update({standby_name(i): s for i, s in enumerate(world.standbys)})
        self._lose_nodes()
        self._carry_out(actions)
        self.world = self._world()
        formed = state.status is Status.RUNNING is not world.hub.status
        if world.nodes and formed and "forgets too early" in config.mistakes:
            self.world = nodes.first_committed(self.world)

    def _lose_nodes(self) -> None:
        """What the core has given up is no more for it."""
        known = self.before.hub.nodes
        for number, node in enumerate(known):
            if node.life is NodeLife.LIVE is not self.state.nodes[number].life:
                self.before = world = nodes.given_up(self.before, number)
                self.slots, self.nodes = list(world.slots), list(world.nodes)
                for i, standby in enumerate(world.standbys):
                    self.names[standby_name(i)] = standby

    def _order(self, number: int, order: tuple[object, ...]) -> None:
        node = self.nodes[number]
        if node.link in (Link.UP, Link.CUT):
            self.nodes[number] = node._replace(inbox=(*node.inbox, order))

    def _carry_out(self, actions: list[ev.Action]) -> None:
        for action in actions:
            match action:
                case ev.Launch():
                    self._launch(action)
                case ev.Assign():
                    self._assign(action)
                case ev.Abort():
                    self._send(action.procs, ph.Latch(action.generation))
                case ev.Fence():
                    for number in action.nodes:
                        if "holdings before the fence" in self.config.mistakes:
                            self._order(number, ("look", action.generation))
                        self._order(number, ("fence", action.generation))
                case ev.Settle():
                    for number in action.nodes:
                        self._order(number, ("settle", action.generation, action.version, action.sealed))
                case ev.SetRegime():
                    self._keepers(action)
                    self._send(action.procs, ph.Regime(action.sealing))
                case ev.SendPlan():
                    self._plan(action)
                case ev.Release():
                    invariants.at_release(self.slots)
                    self._send(action.procs, ph.Released())
                case ev.Kill():
                    self._kill(action.proc)
                case ev.Prepare():
                    self._change(action.proc, building=True)
                case ev.Log() if action.event == "stopping" and (
                    self.nodes or "cannot recover" in action.reason
                ):
                    if not self.before.waived:
                        invariants.at_giving_up(self.slots, self.config.damages)
                case _:
                    pass

    def _world(self) -> World:
        state = self.state
        known, doomed = {s.proc: s.depth for s in state.standbys}, set(state.stopping_procs)
        doomed_ranks = {self.names[name] for name in doomed}
        slots = tuple(
            [
                slot._replace(member=_plain(member, state.status), doomed=rank in doomed_ranks)
                for rank, (slot, member) in enumerate(zip(self.slots, state.members, strict=True))
            ]
        )
        standbys = []
        for name, standby in self.names.items():
            if isinstance(standby, Standby) and (name in known or standby.life is not Life.NONE):
                standbys.append(standby._replace(known=known.get(name), doomed=name in doomed))
        hub = replace(
            state,
            members=(),
            standbys=(),
            stopping_procs=(),
            num_launched=0,
            restarts=0,
            tries=(-1, 0),
            version=state.version if state.status is Status.FORMING else 0,
            first_failure="",
            outcome=state.outcome and (state.outcome[0], ""),
            doomed_at=(),
        )
        if hub.status is Status.ENDED:
            invariants.at_end(slots, [s.life for s in standbys])
        cut = self.before.cut if self.before.cut >= state.generation else 0
        before = self.before
        world = World(
            hub,
            slots,
            tuple(standbys),
            before.faults,
            cut,
            tuple(self.nodes),
            before.ghosts,
            before.waived,
            before.returns,
        )
        if world.ghosts and all(
            node.fenced >= max(ghost.generation for ghost in world.ghosts) or not node.is_there
            for node in world.nodes
            if node.link is not Link.LOST
        ):
            world = world._replace(ghosts=())
        return world

    def _change(self, name: str, **changes: object) -> None:
        standby = self.names[name]
        assert isinstance(standby, Standby)
        self.names[name] = standby._replace(**changes)  # type: ignore[arg-type]

    def _launch(self, action: ev.Launch) -> None:
        if action.rank is None:
            self.names[action.proc] = Standby(node=action.node)
            return
        slot = self.slots[action.rank]
        if slot.life is not Life.NONE:
            raise Violation(f"two processes hold rank {action.rank}")
        self.names[action.proc] = action.rank
        phase = ph.Phase.BUILDING if action.replacement else ph.Phase.STARTING
        proc = Proc(ph.RankState(0, phase, action.generation))
        slot = slot._replace(life=Life.ALIVE, proc=proc, inbox=(), outbox=(), exit_code=None)
        if not action.replacement:
            if not self.before.waived:
                invariants.at_start(slot)
            slot = Slot(
                slot.member,
                slot.life,
                proc=proc,
                private=slot.private,  # files of an earlier start stay where they are
                full_private=slot.full_private,
                arena=slot.arena,
                replica=slot.replica,
                joined=action.generation,
                copies=slot.copies,
                node=slot.node,
            )
        self.slots[action.rank] = self._moved(slot, action.node)

    @staticmethod
    def _moved(slot: Slot, node: int) -> Slot:
        """Another process has the rank, perhaps on another node, where nothing lies of what it sealed."""
        slot = nodes.forget_acks(slot)
        if slot.node != node:
            slot = slot._replace(node=node, arena=(), private=(), full_private=())
        return slot

    def _keepers(self, action: ev.SetRegime) -> None:
        for rank, keepers in enumerate(action.keepers):
            slot = self.slots[rank]
            self.slots[rank] = slot._replace(keepers=keepers, asks=self.state.generation)

    def _assign(self, action: ev.Assign) -> None:
        standby = self.names[action.proc]
        assert isinstance(standby, Standby)
        self.names[action.proc] = action.rank
        slot = self.slots[action.rank]
        if slot.life is not Life.NONE:
            raise Violation(f"two processes hold rank {action.rank}")
        proc = Proc(ph.RankState(0, ph.Phase.BUILDING, action.generation, rehearsed=standby.depth == "built"))
        alive = standby.life is Life.ALIVE
        slot = slot._replace(
            life=standby.life, proc=proc if alive else None, inbox=(), outbox=(), exit_code=None
        )
        self.slots[action.rank] = self._moved(slot, standby.node)

    def _send(self, procs: tuple[str, ...], event: ph.Event) -> None:
        for name in procs:
            rank = self.names[name]
            assert isinstance(rank, int)
            slot = self.slots[rank]
            if slot.life is Life.ALIVE:
                self.slots[rank] = slot._replace(inbox=(*slot.inbox, event))

    def _plan(self, action: ev.SendPlan) -> None:
        plan = action.plan
        invariants.at_plan(self.slots, plan, action.sealing, self.config.damages, self.before.waived)
        invariants.require(
            not self.before.ghosts or not nodes.could_pass(self.before, plan.generation - 1),
            f"two worlds: a gate of generation {plan.generation - 1} can still pass on a lost node",
        )
        if self.before.nodes:
            told = {one.rank: one for one in action.sources}
            for rank, slot in enumerate(self.slots):
                mine = tuple(told.values()) if rank in plan.replaced else ()
                self.slots[rank] = slot._replace(told=Told(plan.generation, action.keepers[rank], mine))
        sources = {rank for _, servers in plan.served for rank in servers}
        served = {members for members, _ in plan.served}
        for rank, slot in enumerate(self.slots):
            arenas_give = rank in plan.replaced and self.config.own_set(rank) not in served
            self.slots[rank] = slot._replace(
                is_source=plan.generation if rank in sources else 0,
                from_arenas=plan.generation if arenas_give else 0,
                served=None,
            )
        somebody = Somebody((0,) * len(plan.replaced))
        self._send(
            action.procs, ph.Plan(plan.generation, plan.version, somebody, (), action.sealing, plan.watermark)
        )

    def _hears(self, number: int) -> bool:
        return not self.nodes or self.nodes[number].link is Link.UP

    def _kill(self, name: str) -> None:
        target = self.names[name]
        if isinstance(target, Standby):
            if not self._hears(target.node):
                return
            if target.life is Life.ALIVE:
                self.names[name] = target._replace(life=Life.ZOMBIE, outbox=())
        elif self.slots[target].life is Life.ALIVE and self._hears(self.slots[target].node):
            self.slots[target] = die(self.slots[target])


def standby_moves(world: World) -> list[tuple[str, World]]:
    """What standbys do on their own: get ready, and build when told to."""
    options = []
    for number, standby in enumerate(world.standbys):
        if standby.life is not Life.ALIVE:
            continue
        depth = (
            "forked"
            if standby.depth == ""
            else "built"
            if standby.building and standby.depth != "built"
            else ""
        )
        if depth:
            after = standby._replace(depth=depth, outbox=(*standby.outbox, (depth,)))
            options.append(
                (
                    f"standby {number} is {depth}",
                    world._replace(standbys=_with(world.standbys, number, after)),
                )
            )
    return options


def standby_deaths(world: World) -> list[tuple[str, World]]:
    return [
        (
            f"! standby {number} dies",
            world._replace(
                standbys=_with(world.standbys, number, standby._replace(life=Life.ZOMBIE)),
                faults=world.faults - 1,
            ),
        )
        for number, standby in enumerate(world.standbys)
        if standby.life is Life.ALIVE and world.faults
    ]
