"""Ranks and nodes that answer the real core in simulated time.

A `World` gives `Core.handle` what daemons and ranks would say, each after what it costs, and does what the core
answers. A *member* is what the core takes for a rank. It stands for one rank, or (folded) for all ranks of a node,
which begin, park and fail to be heard together: then a lost node costs the bytes of all of them and a lost rank those
of one.

Heartbeats, tags and ticks come on a grid. A folded world leaves them out except where something died that the core has
not been told of: nothing else can follow from them (a process that ends is told of at once, and a replacement that
takes longer than the core waits is refused by FailureScenario). Before the first, the core hears what it would have
heard last, and the length of a step. Acknowledgements of keepers are no events of the core; they are what
`Steps.sealed` computes. Every rank's message takes the leader `leader_message_s`, so the last one of N is handled N
times that later.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flashrec.sim.failures.scenario import FailureScenario
from flashrecd.core import events as ev
from flashrecd.core.detection import HEARTBEATS
from flashrecd.core.job import Core
from flashrecd.core.state import JobConfig, Kept, Member, NodeLife, NodeSpec, RankStatus, Status
from flashrecd.simulate.clock import Steps
from flashrecd.simulate.ranks import Decision, Process, Recovery, Traffic, pull

DIGEST = "layout"
WHY_SEALED = "each rank alone holds a part"
NOTED = ("node lost", "rank lost", "abort", "plan", "running", "ended", "torn", "waiting")


@dataclass(slots=True)
class World:
    """`specs`: the nodes, the leader's first. `num_seats`: how many of them have ranks. `per_node`: members on each.
    `sets`: by node with ranks, which replica set it is in (live regime)."""

    scenario: FailureScenario
    specs: tuple[NodeSpec, ...]
    num_seats: int
    per_node: int
    is_folded: bool
    sets: tuple[int, ...] = ()
    version: int = 0
    began_s: float = 0.0
    core: Core = field(init=False)
    steps: Steps = field(init=False)
    now: float = field(init=False, default=0.0)
    procs: dict[str, Process] = field(init=False, default_factory=dict)
    dead_nodes: dict[int, float] = field(init=False, default_factory=dict)
    decisions: list[Decision] = field(init=False, default_factory=list)
    recoveries: list[Recovery] = field(init=False, default_factory=list)
    traffic: Traffic = field(init=False, default_factory=Traffic)
    ended: str = field(init=False, default="")
    # The members whose replicas count; None: all. Others are stand-ins, whose keepers are made up.
    counted: frozenset[int] | None = field(init=False, default=None)
    _queue: list[tuple[float, int, Callable[[], None]]] = field(init=False, default_factory=list)
    _count: int = field(init=False, default=0)
    _lost: dict[int, set[int]] = field(init=False, default_factory=dict)  # member -> its lost ranks
    _beats: bool = field(init=False, default=False)
    _resumes_at: int | None = field(init=False, default=None)  # while groups are formed: the plan's version
    _homes: tuple[int, ...] = field(init=False, default=())  # by member, its node when its generation began
    _keepers: tuple[tuple[int, ...], ...] = field(init=False, default=())
    _is_started: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.steps = Steps.of(self.scenario)
        config = JobConfig(
            world_size=self.num_seats * self.per_node,
            nodes=self.specs,
            nproc_per_node=self.per_node if len(self.specs) > 1 else None,
            replicas=min(self.scenario.replicas, len(self.specs) - 1),
            num_standbys=1 if self.scenario.has_standbys else 0,
            suspect_after_s=self.scenario.costs.suspect_after_s,
            max_tries_per_step=10**6,  # nothing here is a poison batch
        )
        self.core = Core(config)
        self.now = self.began_s
        self._tell(ev.Begin())
        for rank, member in enumerate(self.core.state.members):
            claims = ((self._set_of(rank), DIGEST),)
            self._tell(ev.Protected(member.proc, claims, WHY_SEALED if self.scenario.is_sealed else ""))
            self.procs[member.proc].holds = self.version
        if self.core.state.status is not Status.RUNNING:
            raise RuntimeError(f"the simulated world did not start: {self.core.state.outcome}")
        for standby in self.core.state.standbys:
            self._tell(ev.StandbyReady(standby.proc, "forked"))
        self.decisions.clear()
        self._is_started = True
        self.note_places()
        self.steps.resume(self.began_s, self.version, 0.0)
        if not self.is_folded:
            self._start_beats()

    def _set_of(self, rank: int) -> tuple[int, ...]:
        if self.scenario.is_sealed:
            return (rank,)
        node, local = divmod(rank, self.per_node)
        return tuple(
            other * self.per_node + local
            for other in range(self.num_seats)
            if self.sets[other] == self.sets[node]
        )

    # --- time -------------------------------------------------------------------------------------------------

    def at(self, at_s: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_s, self._count, happen))

    def run(self, until_s: float) -> None:
        """Everything up to then."""
        while self._queue and self._queue[0][0] <= until_s and not self.ended:
            self.now, _, happen = heapq.heappop(self._queue)
            happen()

    def settle(self) -> None:
        """Everything that is under way (of a folded world, which comes to rest)."""
        self.run(math.inf)

    @property
    def beat_s(self) -> float:
        return self.scenario.costs.suspect_after_s / HEARTBEATS

    def _start_beats(self) -> None:
        if self._beats:
            return
        self._beats = True
        if self.is_folded:
            last = self._last_beat_s(self.now)
            self._say_alive(last)
            self.core.detector.ticked(last)
        self.at(self._last_beat_s(self.now) + self.beat_s, self._beat)

    def _last_beat_s(self, at_s: float) -> float:
        """The one before: what happens at the instant of a beat comes first."""
        return (math.ceil(at_s / self.beat_s) - 1) * self.beat_s

    def _beat(self) -> None:
        self._say_alive(self.now)
        self._tell(ev.Tick())
        if self.is_folded and not self._unknown_dead():
            self._beats = False
            return
        self.at((round(self.now / self.beat_s) + 1) * self.beat_s, self._beat)

    def _unknown_dead(self) -> bool:
        """Whether a node died whose loss the core does not know, and of which it needs something."""
        state = self.core.state
        needed = {node for m in state.members for node in (m.node, *m.keepers)}
        return any(n in needed and state.nodes[n].life is NodeLife.LIVE for n in self.dead_nodes)

    def _say_alive(self, at_s: float) -> None:
        before, self.now = self.now, at_s
        for node in self.core.live_nodes():
            if self.dead_nodes.get(node, math.inf) > at_s:
                self._tell(ev.NodeHeard(node))
        entered, progress = self.steps.step(at_s), self.steps.progress(at_s)
        for member in self.core.state.members:
            proc = self.procs[member.proc]
            lived = proc.lives or at_s < self.dead_nodes.get(proc.node, -math.inf) <= before
            if lived and proc.holds is not None:
                self._tell(ev.Heartbeat(member.proc))
                self._tell(ev.TagSeen(member.proc, entered, progress))
        self.now = before

    def warm(self, at_s: float) -> None:
        """What a core has heard by `at_s`, at the instants at which it would have: a step's beginning, the next
        one's, and the last word."""
        beat_s = self.beat_s
        self.now = at_s
        last = self._last_beat_s(at_s)
        step = self.steps.step(last)
        enters = [self.steps.began_s + (s - self.steps.version) * self.steps.step_s for s in (step - 1, step)]
        times = {math.ceil(t / beat_s) * beat_s for t in enters if t >= self.steps.began_s}
        for t in sorted({t for t in times | {last - beat_s, last} if self.steps.began_s <= t <= at_s}):
            self._say_alive(t)
        self.core.detector.ticked(last)

    # --- what befalls it ----------------------------------------------------------------------------------------

    def lose_rank(self, member: int, local: int = 0) -> None:
        holder = self.core.state.members[member].proc
        proc = self.procs[holder]
        if proc.node in self.dead_nodes:
            return
        self._lost.setdefault(member, set()).add(local)
        if not proc.lives:
            return
        proc.lives = False
        self._stopped()
        private, sealed = self.steps.private(self.now), self.steps.sealed(self.now)
        if proc.holds is None:
            private, sealed = self.core.state.members[member].private, self.core.state.members[member].sealed
        exited = ev.Exited(holder, None, 9, private, sealed, self.steps.step(self.now))
        self.at(self.now + self.scenario.costs.detect_rank_s, lambda: self._unless_dead(proc.node, exited))

    def lose_nodes(self, nodes: tuple[int, ...], is_silent: bool) -> None:
        fresh = [node for node in nodes if node not in self.dead_nodes]
        if not fresh:
            return
        costs, state = self.scenario.costs, self.core.state
        matters = False
        for node in fresh:
            self.dead_nodes[node] = self.now
            for proc in self.procs.values():
                proc.lives = proc.lives and proc.node != node
            for rank, member in enumerate(state.members):
                if member.node == node:
                    self._lost[rank] = set(range(self._ranks_of_member()))
                matters = matters or member.node == node or node in member.keepers
        if 0 in fresh:
            self.ended = "the first node, which leads, was lost"
            self.decisions.append(Decision(self.now, "ended", None))
            return
        if matters:
            self._stopped()
            self._start_beats()
        if not is_silent:
            for node in fresh:
                closed = ev.NodeClosed(node, "reset by peer")
                self.at(self.now + costs.detect_node_s, lambda closed=closed: self._tell(closed))  # type: ignore[misc]
            if matters:
                generation = state.generation
                self.at(self.now + costs.detect_node_s, lambda: self._first_parks(generation))

    def _ranks_of_member(self) -> int:
        return self.scenario.layout.devices_per_node // self.per_node

    def _stopped(self) -> None:
        if math.isinf(self.steps.stopped_s):
            self.steps.stop(self.now)

    def _first_parks(self, generation: int) -> None:
        """A survivor's collective failed with the node: it parks without being told, at its gate; unless that
        generation is over by then."""
        if self._is_current(generation):
            self.at(self.steps.parked_s(self.now), lambda: self._one_parks(generation))

    def _is_current(self, generation: int) -> bool:
        state = self.core.state
        return state.generation == generation and state.status in (Status.RUNNING, Status.FORMING)

    def _one_parks(self, generation: int) -> None:
        if not self._is_current(generation):
            return
        for rank, member in enumerate(self.core.state.members):
            proc = self.procs[member.proc]
            if (
                proc.lives
                and proc.holds is not None
                and member.status in (RankStatus.LIVE, RankStatus.FORMING)
            ):
                self._park(member.proc, rank, generation)
                return

    def _unless_dead(self, node: int, event: ev.Event) -> None:
        if node not in self.dead_nodes:
            self._tell(event)

    # --- what the core wants done ---------------------------------------------------------------------------------

    def _tell(self, event: ev.Event) -> None:
        was = self.core.state.status
        for action in self.core.handle(event, self.now):
            self._perform(action)
        if was is not Status.RUNNING and self.core.state.status is Status.RUNNING and self._is_started:
            self._running()

    def _perform(self, action: ev.Action) -> None:
        costs = self.scenario.costs
        match action:
            case ev.Log():
                if action.event in NOTED:
                    self.decisions.append(Decision(self.now, action.event, action.step))
            case ev.Launch():
                self.procs[action.proc] = Process(action.node, action.rank)
                if action.rank is None:
                    ready = ev.StandbyReady(action.proc, "forked")
                    if self._is_started:  # those of the start are ready before it is looked at
                        self.at(self.now + costs.spawn_s, lambda: self._unless_dead(action.node, ready))
                else:
                    self.procs[action.proc].ready_s = self.now + costs.replacement_s(has_standby=False)
            case ev.Assign():
                proc = self.procs[action.proc]
                proc.rank, proc.ready_s = action.rank, self.now + costs.replacement_s()
            case ev.Abort():
                told = self.now + self.scenario.costs.report_s
                for name in action.procs:
                    self._is_told_to_park(name, action.generation, told)
            case ev.Fence():
                for node in action.nodes:
                    if node not in self.dead_nodes:
                        self.at(self.now + self.scenario.costs.report_s, self._tells(node, action.generation))
            case ev.SendPlan():
                self._form(action)
            case ev.Kill():
                self._kill(action.proc)
            case ev.End():
                self.ended = action.reason
            case _:
                pass

    def _leader_s(self) -> float:
        return self.scenario.layout.devices * self.scenario.costs.leader_message_s

    def _kill(self, name: str) -> None:
        proc = self.procs[name]
        proc.lives = False
        exited = ev.Exited(name, None, 9, self.steps.private(self.now), self.steps.sealed(self.now))
        self.at(self.now + self.scenario.costs.kill_s, lambda: self._unless_dead(proc.node, exited))

    def _is_told_to_park(self, name: str, generation: int, told_s: float) -> None:
        proc = self.procs[name]
        if proc.rank is None:
            return
        rank = proc.rank
        parks_s = (
            told_s if proc.holds is None or self._resumes_at is not None else self.steps.parked_s(told_s)
        )
        self.at(parks_s + self._leader_s(), lambda: self._park(name, rank, generation))

    def _park(self, name: str, rank: int, generation: int) -> None:
        proc = self.procs[name]
        if not proc.lives or proc.node in self.dead_nodes:
            return
        if proc.holds is None:
            private, sealed = self.core.state.members[rank].private, self.core.state.members[rank].sealed
            self._tell(ev.Parked(name, generation, None, False, private, sealed))
            return
        version = self.steps.held() if self._resumes_at is None else proc.holds
        private, sealed = self.steps.private(self.now), self.steps.sealed(self.now)
        private = tuple(sorted({*private, version}))
        proc.holds = version
        self._tell(ev.Parked(name, generation, version, False, private, sealed))

    def _tells(self, node: int, generation: int) -> Callable[[], None]:
        def tell() -> None:
            if node in self.dead_nodes:
                return
            kept = []
            for rank, member in enumerate(self.core.state.members):
                if node in member.keepers:
                    # What a dead node's ranks had sealed came to its keepers only while it lived.
                    until = min(self.now, self.dead_nodes.get(self._homes[rank], math.inf))
                    kept.append(Kept(rank, self.steps.private(until), self.steps.sealed(until, kept=True)))
            self._tell(ev.Holdings(node, generation, tuple(kept)))

        return tell

    def _form(self, action: ev.SendPlan) -> None:
        plan, costs = action.plan, self.scenario.costs
        num_lost = {r: len(self._lost.get(r, ())) or self._ranks_of_member() for r in plan.replaced}
        begin_s = self.now + self.scenario.costs.report_s
        ready_s, pulled = pull(self.scenario, self.core.state.members, self.procs, num_lost, action, begin_s)
        self.traffic.pulled_bytes += pulled
        self._resumes_at = plan.version
        formed_s = ready_s + costs.forming_s(self.scenario.layout.devices) + self._leader_s()
        self.at(formed_s, lambda: self._formed(plan.generation, plan.version))

    def _formed(self, generation: int, version: int) -> None:
        state = self.core.state
        if state.status is not Status.FORMING or state.generation != generation:
            return
        if not all(self.procs[m.proc].lives for m in state.members):
            return  # somebody will be missed
        for member in state.members:
            self.procs[member.proc].holds = version
        for member in state.members:
            self._tell(ev.Formed(member.proc, generation))

    def _running(self) -> None:
        version = self.core.state.version
        members = self.core.state.members
        new_bytes: dict[int, float] = {}
        for rank, (before, member) in enumerate(zip(self._keepers, members, strict=True)):
            if self.scenario.is_sealed and (self.counted is None or rank in self.counted):
                num_new = len(set(member.keepers) - set(before))
                size = num_new * self._ranks_of_member() * self.scenario.state_bytes
                new_bytes[member.node] = new_bytes.get(member.node, 0.0) + size
                self.traffic.replicated_bytes += size
        worst = max(new_bytes.values(), default=0.0) / self.scenario.costs.replicate_bytes_per_s
        keep_s = max(worst - self.steps.gate_s, 0.0)
        began_s = self.steps.stopped_s
        self.recoveries.append(Recovery(began_s, self.now, self.steps.held(), version, keep_s))
        self.steps.resume(self.now, version, keep_s)
        self._resumes_at = None
        self._lost.clear()
        self.note_places()

    def note_places(self) -> None:
        """Where members are, and who keeps what they seal, as of now."""
        self._homes = tuple(member.node for member in self.core.state.members)
        self._keepers = tuple(member.keepers for member in self.core.state.members)

    def place(self, keepers: tuple[tuple[int, ...], ...]) -> None:
        """By member, who keeps what it seals, in place of those that the core chose."""
        members: tuple[Member, ...] = tuple(
            replace(m, keepers=k) for m, k in zip(self.core.state.members, keepers, strict=True)
        )
        self.core.state = replace(self.core.state, members=members)
        self.note_places()
