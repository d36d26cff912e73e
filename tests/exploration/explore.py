"""All interleavings of a small world, breadth first, with the shortest counterexample.

States that differ only by which rank is which are one: nothing in a slot names a rank, so slots are
sorted, those of a replica set among themselves. What a process can do is remembered per slot and context,
so the real machines are asked once for each situation they can be in.

Partial-order reduction. A move is *eager* (see ranks.py) if it commutes with all that anybody else can do
before it and stays possible meanwhile: a main thread's local actions, unwinding after a known failure, a
message taken up by a rank that does nothing but wait for it. Where there is one it is followed alone: any
other order leads to the same states. It may be overtaken by the death of its own process; that is followed
as well where the move is *lasting*, and is otherwise the death after it: memory dies with the process, and
what was sent may be lost with it. An event that only sends is not lasting for that reason. In the sealed
regime a thread copies tensors meanwhile; its end is no move of its own, but falls where it makes a difference
(see arenas.py): before a death, a report that the core hears, or a discarding, which then have two outcomes.

What the core hears is eager, too, where it commutes with all else it could hear: a message that changes
what is known of its sender and no more, or that begins the parking (an abort only adds to what others may
notice); and a death that the core must hear of before it can plan or go on, of a process that has said
nothing since. Never the message or death that completes something (all have protected, parked, formed,
left), nor, with standbys, what could overtake a completed forming, which launches new ones: those are
followed in every order. Two orders may differ in the version the core remembers of a rank that has not
parked yet, which only its log reads. test_exploration.py compares with a search without all this.

On several nodes (see nodes.py) no ranks are alike. While nothing has happened that the newest generation does not know
of, what a rank waits for comes before all else, and every fault is followed there as well: whoever does not get it can
only wait. A node deletes what was lost before all else, for nothing is pulled until it has, and obeys a fence at once
where nothing is under way to it.

Once no fault is left, every rank steps in one generation and no message is under way, a single
interleaving is followed to the end: without faults all moves of a running world commute, and the states
it passes through were seen, with all their interleavings, before the last fault.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from flashrec import phases as ph
from flashrecd.core.events import SendPlan
from flashrecd.core.state import JobState, NodeLife, RankStatus, Status
from tests.exploration import arenas, control, invariants, nodes, ranks
from tests.exploration.model import Await, Config, Life, Link, Move, Node, Slot, Violation, World
from tests.exploration.world import (
    Public,
    beginning,
    breakable,
    committed,
    context,
    deaths_of_all,
    ghosts_move,
    public,
    spread_context,
)

State = tuple[int, tuple[int, ...], int, int, int, int]
"""Hub, slots, standbys, faults left, generation cut; and the nodes with all that is theirs, 0 where there is one."""


@dataclass
class Report:
    config: Config
    num_states: int = 0
    num_events: int = 0
    seconds: float = 0.0
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    outcomes: dict[int | None, int] = field(default_factory=dict)  # exit code -> final states

    def __str__(self) -> str:
        c = self.config
        kind = f"{c.regime}{f' {c.sets}' if c.sets else ''}{' and one of all' if c.shared else ''}"
        kind += ", communicating" if c.communicates else ""
        kind += ", damages" if c.damages else ""
        kind += f", full versions every {c.full_every}" if c.full_every else ""
        kind += ", which may fail" if c.full_fails else ""
        kind += ", all may die" if c.all_die else ""
        if c.several:
            kind += (
                f", {len(c.domains)} nodes {'/'.join(c.domains)}, {c.share} ranks each, {c.replicas} replicas"
            )
            kind += ", cuts" if c.cuts else ""
            kind += (
                f", {c.returns} may come{f' in {c.returning}' if c.returning else ''}" if c.returns else ""
            )
            kind += "" if c.rank_faults else ", nodes only"
        text = (
            f"{kind}: {c.num_ranks} ranks, {c.steps} steps, {c.num_faults} faults, {c.num_standbys} standbys"
            f"{'' if c.reduced else ', unreduced'}: {self.num_states} states, {self.num_events} events, "
            f"{self.seconds:.1f} s, final states by exit code {self.outcomes}"
        )
        if self.violation:
            text += f"\nVIOLATION: {self.violation}\n  " + "\n  ".join(self.trace)
        return text


class Intern:
    """Equal values get one small number."""

    def __init__(self) -> None:
        self.ids: dict[object, int] = {}
        self.values: list[object] = []

    def __call__(self, value: object, kind: object = None) -> int:
        number = self.ids.setdefault((value, kind), len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


def _types(slot: Slot) -> object:
    """What tells equal slots apart: named tuples of different types may be equal."""
    return (*map(type, slot.inbox), *map(type, slot.proc.todo)) if slot.proc else None


class Explorer:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.daemon = control.Control(config)
        self.hubs, self.slots, self.standbys = Intern(), Intern(), Intern()
        self.publics: list[Public] = []
        self.views: list[tuple[int, object]] = []
        self.quiet: list[int] = []  # per slot: the generation it steps in with nothing under way, or 0
        self.move_cache: dict[object, tuple[tuple[Move, int], ...]] = {}
        self.core_cache: dict[object, tuple[int, tuple[int, ...], int, int]] = {}
        self.rests = Intern()
        self.rests(((), (), False, 0))
        self.transfer_cache: dict[object, tuple[tuple[Move, int], ...]] = {}
        self.sound: set[object] = set()
        self.death_ids: dict[int, tuple[int, ...]] = {}
        self.replicas: list[int] = []
        self.is_mixed = bool(config.sets)

    # --- states as small numbers --------------------------------------------------------------------------

    def slot_id(self, slot: Slot) -> int:
        number = self.slots(slot, _types(slot))
        if number == len(self.publics):
            self.publics.append(public(slot, self.config))
            self.replicas.append(slot.replica)
            self.views.append(invariants.view(slot))
            self.quiet.append(self._quiet(slot))
        return number

    @staticmethod
    def _quiet(slot: Slot) -> int:
        stepping = (*invariants.STEPPING, ph.Phase.IDLE, ph.Phase.LEFT, ph.Phase.GONE)
        if slot.proc and slot.proc.todo and isinstance(slot.proc.todo[0], Await):
            return 0
        still = slot.life is Life.ALIVE and slot.proc is not None and not slot.inbox
        if not still or slot.proc is None or slot.proc.state.latched or slot.proc.state.plan:
            return 0
        under_way = [message for message in slot.outbox if message[0] != "leaving"]
        return slot.joined if slot.proc.state.phase in stepping and not under_way else 0

    def pack(self, world: World) -> State:
        ids = self._sorted([self.slot_id(slot) for slot in world.slots])
        rest = (world.nodes, world.ghosts, world.waived, world.returns)
        return (
            self.hubs(world.hub),
            ids,
            self.standbys(world.standbys),
            world.faults,
            world.cut,
            self.rests(rest),
        )

    def _sorted(self, ids: list[int]) -> tuple[int, ...]:
        """Only ranks of one replica set, and those with a set of their own, are alike; and on several nodes, none."""
        if self.config.several:
            return tuple(ids)
        ids.sort(key=(lambda number: (self.replicas[number], number)) if self.is_mixed else None)
        return tuple(ids)

    def unpack(self, state: State) -> World:
        hub, slots, standbys, faults, cut, rest = state
        return World(
            self.hubs.values[hub],  # type: ignore[arg-type]
            tuple(self.slots.values[s] for s in slots),  # type: ignore[arg-type]
            self.standbys.values[standbys],  # type: ignore[arg-type]
            faults,
            cut,
            *self.rests.values[rest],  # type: ignore[misc]
        )

    # --- successors ---------------------------------------------------------------------------------------

    def moves(self, number: int, publics: list[Public], cut: int) -> tuple[tuple[Move, int], ...]:
        me = self.publics[number]
        key = (number, context(me, publics, cut, self.config.shared)) if me.group else number
        found = self.move_cache.get(key)
        if found is None:
            slot = self.slots.values[number]
            assert isinstance(slot, Slot)
            found = tuple(
                (move, self.slot_id(move.slot))
                for move in ranks.moves(slot, context(me, publics, cut, self.config.shared), self.config)
            )
            self.move_cache[key] = found
        return found

    def spread_moves(
        self, state: State, i: int, publics: list[Public], there: tuple[Node, ...]
    ) -> tuple[tuple[tuple[Move, int], ...], tuple[tuple[Move, int], ...]]:
        """The same in a world of several nodes, and what keepers can do about the rank."""
        number = state[1][i]
        me = publics[i]
        if me.wants >= 0 and me.group:
            ctx = spread_context(i, publics, [self.slots.values[s] for s in state[1]], there, state[4])  # type: ignore[misc]
        else:
            ctx = context(me, publics, state[4], from_sources=True)
            if there[me.node].link is not Link.UP:
                ctx = ctx._replace(cut_off=True)
        key = (number, ctx)
        found = self.move_cache.get(key)
        slot = self.slots.values[number]
        assert isinstance(slot, Slot)
        if found is None:
            mine = ranks.moves(slot, ctx, self.config)
            found = self.move_cache[key] = tuple((move, self.slot_id(move.slot)) for move in mine)
        key = (number, state[5])
        copied = self.transfer_cache.get(key)
        if copied is None:
            moves = nodes.transfers(slot, there, self.config)
            copied = self.transfer_cache[key] = tuple((move, self.slot_id(move.slot)) for move in moves)
        return found, copied

    def deaths(self, state: State, i: int) -> list[tuple[str, State]]:
        if not self.config.rank_faults:
            return []
        number = state[1][i]
        if number not in self.death_ids:
            slot = self.slots.values[number]
            assert isinstance(slot, Slot)
            self.death_ids[number] = tuple(self.slot_id(dead) for dead in ranks.deaths(slot, self.config))
        return [(f"! {i} dies", self._moved(state, i, dead, 1)) for dead in self.death_ids[number]]

    def damages(self, state: State, i: int) -> list[tuple[str, State]]:
        slot = self.slots.values[state[1][i]]
        assert isinstance(slot, Slot)
        label = f"! the arena of {i} is damaged"
        return [
            (label, self._moved(state, i, self.slot_id(after), 1))
            for after in arenas.damages(slot, self.config)
        ]

    def successors(self, state: State) -> list[tuple[str, State]]:
        hub, slots, standbys, left, cut, rest = state
        publics = [self.publics[s] for s in slots]
        every = []
        found: list[tuple[str, State]] = []
        there: tuple[Node, ...] = self.rests.values[rest][0] if rest else ()  # type: ignore[index]
        copied: list[tuple[int, Move, int]] = []
        for i, number in enumerate(slots):
            if rest:
                mine, theirs = self.spread_moves(state, i, publics, there)
                copied.extend((i, move, after) for move, after in theirs)
            else:
                mine = self.moves(number, publics, cut)
            eager = [option for option in mine if option[0].eager] if self.config.reduced else []
            if eager:
                found.extend((f"{i} {move.label}", self._moved(state, i, after)) for move, after in eager)
                if rest and found[0][0].endswith("Exit"):
                    found = [
                        (label, self.pack(committed(self.unpack(after), move.slot)))
                        for (label, after), (move, _) in zip(found, eager, strict=True)
                    ]
                if left and any(move.lasting for move, _ in eager):
                    found.extend(self.deaths(state, i) if not rest else self.faults(state))
                return found
            every.append(mine)
        if rest and self.config.reduced:
            found = self._obeyed_at_once(state, there)
            calm = self._is_calm(state, publics, there)
            if not found and calm:
                # What a rank waits for: in every order with each other, and before all else.
                copying = [(i, move, after) for i, move, after in copied if move.eager]
                found = [(f"{i}: {move.label}", self._moved(state, i, after)) for i, move, after in copying]
            if found:
                return [*found, *(self.faults(state) if left else ())]
            if copied and not left and calm and self._is_known(state, there):
                i, move, after = copied[0]
                return [(f"{i}: {move.label}", self._moved(state, i, after))]
        heard = self._heard_at_once(state) if self.config.reduced else []
        if heard:
            return heard
        for i, mine in enumerate(every):
            if i and slots[i] == slots[i - 1] and self.config.reduced and not rest:
                continue  # its twin does the same
            for move, after in mine:
                moved = self._moved(state, i, after)
                if move.label.startswith("Formed"):
                    invariants.at_formed(self.unpack(moved).slots, move.slot.joined)
                found.append((f"{i} {move.label}", moved))
        found.extend(self._heard(state))
        if rest:
            found.extend((f"{i}: {move.label}", self._moved(state, i, after)) for i, move, after in copied)
            world = self.unpack(state)
            found.extend((label, self.pack(after)) for label, after in ghosts_move(world, self.config))
            found.extend(
                (f"node {n} obeys {node.inbox[0]}", self.pack(nodes.obeys(world, n, self.config)))
                for n, node in enumerate(there)
                if node.inbox and node.link is Link.UP
            )
            found = [one for one in found if one[1] != state]
            if left:
                found.extend(self.faults(state))
            elif found and self.config.reduced and self._runs_on(state) and self._is_quiet(there):
                del found[1:]
            return found
        if self.config.num_standbys:
            world = self.unpack(state)
            found.extend((label, self.pack(after)) for label, after in control.standby_moves(world))
        if left:
            for i, number in enumerate(slots):
                if publics[i].alive and not (i and number == slots[i - 1]):
                    found.extend(self.deaths(state, i))
                if self.config.damages and not (i and number == slots[i - 1]):
                    found.extend(self.damages(state, i))
            if self.config.all_die:
                for after in deaths_of_all(self.unpack(state).slots, self.config):
                    numbers = self._sorted([self.slot_id(slot) for slot in after])
                    found.append(("! all die", (hub, numbers, standbys, left - 1, cut, rest)))
            if self.config.num_standbys:
                found.extend(
                    (label, self.pack(after)) for label, after in control.standby_deaths(self.unpack(state))
                )
            if self.config.link_faults:
                found.extend(
                    (f"! a link of generation {g} breaks", (hub, slots, standbys, left - 1, g, rest))
                    for g in breakable(publics)
                    if g != cut
                )
        elif found and self.config.reduced and self._runs_on(state):
            del found[1:]
        return found

    def _moved(self, state: State, i: int, number: int, faults: int = 0) -> State:
        slots = state[1]
        return (
            state[0],
            self._sorted([*slots[:i], number, *slots[i + 1 :]]),
            state[2],
            state[3] - faults,
            state[4],
            state[5],
        )

    def faults(self, state: State) -> list[tuple[str, State]]:
        """Every fault of a world on several nodes."""
        hub, slots, standbys, left, cut, rest = state
        publics = [self.publics[s] for s in slots]
        hub_state = self.hubs.values[hub]
        assert isinstance(hub_state, JobState)
        if hub_state.status is Status.ENDED:
            return []
        found = [one for i in range(len(slots)) if publics[i].alive for one in self.deaths(state, i)]
        world = self.unpack(state)
        for after in deaths_of_all(world.slots, self.config):
            numbers = self._sorted([self.slot_id(slot) for slot in after])
            found.append(("! all die", (hub, numbers, standbys, left - 1, cut, rest)))
        if self.config.link_faults:
            found.extend(
                (f"! a link of generation {g} breaks", (hub, slots, standbys, left - 1, g, rest))
                for g in breakable(publics)
                if g != cut
            )
        found.extend((label, self.pack(after)) for label, after in nodes.losses(world, self.config))
        return found

    def _obeyed_at_once(self, state: State, there: tuple[Node, ...]) -> list[tuple[str, State]]:
        """What a node does that no rank notices; and what the core hears of it, if it waits for more than that."""
        for number, node in enumerate(there):
            if node.link is not Link.UP or not (node.inbox or node.outbox):
                continue
            world = self.unpack(state)
            if node.inbox and (
                nodes.is_bystander(world, number, self.config)
                or (not state[3] and not self.config.mistakes and self._is_known(state, there))
            ):
                return [
                    (
                        f"node {number} obeys {node.inbox[0]}",
                        self.pack(nodes.obeys(world, number, self.config)),
                    )
                ]
            if node.outbox:
                after = self.pack(self.daemon.hear_node(world, number))
                if self._commutes(self.hubs.values[state[0]], after[0]):  # type: ignore[arg-type]
                    return [(f"core hears of node {number} what it keeps", after)]
        return []

    def _is_calm(self, state: State, publics: list[Public], there: tuple[Node, ...]) -> bool:
        """Whether nothing has happened that the newest generation does not know of."""
        hub = self.hubs.values[state[0]]
        assert isinstance(hub, JobState)
        generation = hub.generation
        return (
            hub.status in (Status.RUNNING, Status.FORMING)
            and state[4] != generation
            and all(one.alive and one.over < generation for one in publics)
            and all(
                node.link is Link.UP or known.life is not NodeLife.LIVE
                for node, known in zip(there, hub.nodes, strict=True)
            )
        )

    def _is_known(self, state: State, there: tuple[Node, ...]) -> bool:
        """Whether the core has nothing more to learn of nodes, and waits for nothing that they do."""
        hub = self.hubs.values[state[0]]
        assert isinstance(hub, JobState)
        if self.config.mistakes not in ((), (nodes.HASTY,)):
            return False
        return hub.status in (Status.RUNNING, Status.FORMING) and all(
            node.link is Link.UP or known.life is not NodeLife.LIVE
            for node, known in zip(there, hub.nodes, strict=True)
        )

    @staticmethod
    def _is_quiet(there: tuple[Node, ...]) -> bool:
        return not any(node.inbox or node.outbox or node.link is Link.CUT for node in there)

    def _heard(self, state: State) -> list[tuple[str, State]]:
        hub, slots, standbys, left, cut, rest = state
        world = self.unpack(state)
        found = []
        for label, happen in self.daemon.messages(world):
            key = (hub, slots, standbys, rest, label)
            after = self.core_cache.get(key)
            if after is None:
                packed = self.pack(happen())
                after = self.core_cache[key] = (*packed[:3], packed[5])
            found.append((label, (*after[:3], left, cut, after[3])))
        return found

    def _heard_at_once(self, state: State) -> list[tuple[str, State]]:
        """The first of the core's events that commutes with all others: see the module's text."""
        hub, slots, _, left, cut, rest = state
        before = self.hubs.values[hub]
        assert isinstance(before, JobState)
        there: tuple[Node, ...] = self.rests.values[rest][0] if rest else ()  # type: ignore[index]
        if any(node.link is not Link.UP and not node.closed for node in there):
            return []  # what the core hears of that first makes a difference
        for i, number in enumerate(slots):
            slot = self.slots.values[number]
            assert isinstance(slot, Slot)
            if there and there[slot.node].link is not Link.UP:
                continue
            if slot.life is Life.ALIVE and slot.outbox:
                found = []
                for spoken in self.daemon.spoken(slot):
                    label = control.hears(spoken, slot, i)
                    after = self._core(state, i, label, partial(self.daemon.hear, slot=spoken))
                    found.append((label, (*after[:3], left, cut, after[3])))
                if all(self._commutes(before, after[0]) for _, after in found):
                    if left and rest:
                        return [*found, *self.faults(state)]
                    return [*found, *(self.deaths(state, i) if left else ())]
            elif slot.life is Life.ZOMBIE and not slot.outbox:
                status = slot.member.status
                if (status is RankStatus.LIVE and before.status in (Status.RUNNING, Status.PARKING)) or (
                    status is RankStatus.FORMING and before.status is Status.FORMING
                ):
                    label = f"core hears of the death of {i}"
                    after = self._core(state, i, label, self.daemon.bury)
                    lost = nodes.losses(self.unpack(state), self.config) if left and rest else ()
                    return [
                        (label, (*after[:3], left, cut, after[3])),
                        *[(label, self.pack(after)) for label, after in lost],
                    ]
        return []

    def _commutes(self, before: JobState, number: int) -> bool:
        now = self.hubs.values[number]
        assert isinstance(now, JobState)
        parks = now.status is Status.PARKING and (self.config.several or not self.config.num_standbys)
        return now.generation == before.generation and (now.status is before.status or parks)

    def _core(
        self, state: State, i: int, label: str, happen: Callable[[World, int], World]
    ) -> tuple[int, tuple[int, ...], int, int]:
        key = (*state[:3], state[5], label)
        after = self.core_cache.get(key)
        if after is None:
            packed = self.pack(happen(self.unpack(state), i))
            after = self.core_cache[key] = (*packed[:3], packed[5])
        return after

    def _runs_on(self, state: State) -> bool:
        generations = {self.quiet[s] for s in state[1]}
        hub = self.hubs.values[state[0]]
        running = hub.status in (Status.RUNNING, Status.CLOSING)  # type: ignore[attr-defined]
        return running and len(generations) == 1 and 0 not in generations and state[4] not in generations

    def check(self, state: State) -> None:
        views = tuple(self.views[s] for s in state[1])
        if views not in self.sound:
            invariants.of_state(views)  # type: ignore[arg-type]
            self.sound.add(views)

    # --- the search -----------------------------------------------------------------------------------------

    def run(self, max_states: int | None = None) -> Report:
        report, begin = Report(self.config), time.perf_counter()
        try:
            states = [self.pack(beginning(self.daemon))]
        except Violation as violation:
            report.violation, report.trace = str(violation), ["steps that are as they should be"]
            return report
        seen = {states[0]}
        came, choice = array("l", [0]), array("l", [0])  # whose successor a state was first, and which
        at = 0
        try:
            while at < len(states) and (max_states is None or at < max_states):
                state = states[at]
                found = self.successors(state)
                report.num_events += len(found)
                self._check_life(state, found, report)
                for number, (_, after) in enumerate(found):
                    if after not in seen:
                        seen.add(after)
                        states.append(after)
                        came.append(at)
                        choice.append(number)
                        self.check(after)
                at += 1
        except Violation as violation:
            report.violation = str(violation)
            try:
                self.check(states[-1])
                last = at  # an event was wrong
            except Violation:
                last = len(states) - 1  # the state it led to
            while last:
                report.trace.insert(0, self.successors(states[came[last]])[choice[last]][0])
                last = came[last]
        report.num_states, report.seconds = len(states), time.perf_counter() - begin
        return report

    def _check_life(self, state: State, found: list[tuple[str, State]], report: Report) -> None:
        """The job always proceeds, or has ended."""
        hub = self.hubs.values[state[0]]
        assert isinstance(hub, JobState)
        if hub.status is Status.ENDED:
            code = hub.outcome[0] if hub.outcome else None
            report.outcomes[code] = report.outcomes.get(code, 0) + 1
        elif all(label[0] == "!" for label, _ in found):
            if self.config.open_ended and all(self._is_at_its_end(s) for s in state[1]):
                report.outcomes[0] = report.outcomes.get(0, 0) + 1
                return
            raise Violation("stuck: the job neither proceeds nor ends")

    def _is_at_its_end(self, number: int) -> bool:
        slot = self.slots.values[number]
        assert isinstance(slot, Slot)
        at_rest = slot.proc is not None and slot.proc.state.phase is ph.Phase.IDLE and not slot.proc.todo
        return at_rest and slot.proc is not None and slot.proc.state.version == self.config.steps

    def planned(self) -> set[object]:
        """The situations in which a plan was made: what it says, and what was known of each rank."""
        return {
            (
                action.plan.generation,
                action.plan.version,
                len(action.plan.replaced),
                tuple(sorted((m.version or 0, m.can_advance, m.private, m.sealed) for m in state.members)),
            )
            for state, actions in self.daemon.decided.values()
            for action in actions
            if isinstance(action, SendPlan)
        }
