"""The whole of a scenario: fault after fault, and the other policies beside it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from flashrec.sim.failures.report import FailureReport, PolicyResult, quantiles
from flashrec.sim.failures.rivals import beside
from flashrec.sim.failures.scenario import FailureScenario
from flashrec.sim.failures.traces import Fault
from flashrecd.simulate.fold import Cluster, Episode
from flashrecd.simulate.ranks import Decision, Recovery
from flashrecd.simulate.world import World

Progress = Callable[[float], None]


@dataclass(slots=True)
class FoldedRun:
    """flashrec through a trace, every episode in a folded world (see flashrecd.simulate.fold)."""

    scenario: FailureScenario
    cluster: Cluster = field(init=False)
    began_s: float = 0.0
    version: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    lost_steps: int = 0
    fatal: int = 0
    why_fatal: dict[str, int] = field(default_factory=dict)
    pulled_bytes: float = 0.0
    again_bytes: float = 0.0
    done: int = 0  # steps committed by wall time, lost ones too: what was replicated
    decisions: list[Decision] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    _past: list[tuple[float, int, float]] = field(default_factory=list)  # began, version, stopped

    def __post_init__(self) -> None:
        self.cluster = Cluster(self.scenario)

    def play(self, faults: tuple[Fault, ...], progress: Progress | None) -> None:
        number = 0
        while number < len(faults):
            first = faults[number]
            self.cluster.repaired(first.at_s)
            group, number = [first], number + 1
            while True:
                episode = self.cluster.fold(group)
                world = episode.play(group, self.version, self.began_s)
                over_s = world.now if world.ended else world.steps.began_s
                if number == len(faults) or faults[number].at_s >= over_s:
                    break
                group.append(faults[number])
                number += 1
            self._take(episode, world)
            if world.ended:
                number = self._restart(world, faults, number)
            if progress is not None:
                progress(min(group[-1].at_s / self.scenario.duration_s, 1.0))

    def _take(self, episode: Episode, world: World) -> None:
        began_s, version = self.began_s, self.version
        self.decisions += world.decisions
        self.recoveries += world.recoveries
        for one in world.recoveries:
            self.recoveries_s.append(one.running_s - one.began_s)
            self.lost_steps += one.held - one.resumed
            self.done += one.held - version
            self._past.append((began_s, version, one.began_s))
            began_s, version = one.running_s + one.keep_s, one.resumed
        self.pulled_bytes += world.traffic.pulled_bytes
        self.again_bytes += world.traffic.replicated_bytes
        self.began_s, self.version = began_s, version
        episode.write_back(world)

    def _restart(self, world: World, faults: tuple[Fault, ...], number: int) -> int:
        """Everything is lost but the disk. A fault meanwhile begins it anew. The number of the next fault."""
        scenario, cluster = self.scenario, self.cluster
        self.fatal += 1
        why = (
            "the leader's node" if "leads" in world.ended else world.ended.split(":")[0].split(" of rank")[0]
        )
        self.why_fatal[why] = self.why_fatal.get(why, 0) + 1
        struck_s = min(world.steps.stopped_s, world.now)
        held = world.steps.held() if math.isfinite(world.steps.stopped_s) else world.steps.step(struck_s)
        self._past.append((self.began_s, self.version, struck_s))
        self.done += held - self.version
        at_s = self._room(world.now)
        while number < len(faults) and faults[number].at_s < at_s + scenario.restart_s:
            at_s = max(at_s, faults[number].at_s)
            number += 1
        version = self._on_disk(struck_s)
        self.lost_steps += held - version
        self.began_s, self.version = at_s + scenario.restart_s, version
        self.recoveries_s.append(self.began_s - struck_s)
        cluster.place_anew()
        return number

    def _room(self, now: float) -> float:
        """A node for every seat again, if it takes repairs; when that is so."""
        cluster = self.cluster
        taken: set[int] = set()
        for seat, home in enumerate(cluster.homes):
            is_away = any(node == home for _, node in cluster._away)
            if not is_away and home not in taken:
                taken.add(home)
                continue
            while not cluster.spares:
                now = max(now, cluster.next_repair_s())
                cluster.repaired(now)
            cluster.move(seat, cluster.spares.pop(0))
        return now

    def _on_disk(self, at_s: float) -> int:
        """The version of the newest checkpoint that was complete by then."""
        scenario = self.scenario
        every_s = scenario.restart_interval_s()
        begun_s = math.floor((at_s - scenario.save_s) / every_s) * every_s
        if begun_s <= 0:
            return 0
        index = bisect.bisect_right(self._past, begun_s, key=lambda past: past[0]) - 1
        began_s, version, stopped_s = self._past[max(index, 0)]
        step_s = scenario.effective_step_s()
        return version + max(math.floor((min(begun_s, stopped_s) - began_s) / step_s), 0)

    def result(self) -> PolicyResult:
        scenario = self.scenario
        rest = math.floor(max(scenario.duration_s - self.began_s, 0.0) / scenario.effective_step_s())
        committed = self.version + rest
        self.done += rest
        p50, p90, p99 = quantiles(self.recoveries_s)
        seals = self.done / scenario.seal_every if scenario.is_sealed else 0
        return PolicyResult(
            "flashrec",
            committed * scenario.step_s / scenario.duration_s,
            float(self.lost_steps),
            len(self.recoveries_s),
            p50,
            p90,
            p99,
            self.pulled_bytes,
            self.again_bytes + seals * scenario.replicas * scenario.state_bytes * scenario.layout.devices,
            self.fatal,
        )


def simulate_flashrec(
    scenario: FailureScenario, progress: Progress | None = None
) -> tuple[PolicyResult, dict[str, int]]:
    """Only flashrec; and why all state was lost, how often."""
    run = FoldedRun(scenario)
    run.play(scenario.faults(), progress)
    return run.result(), run.why_fatal


def simulate_failures(
    scenario: FailureScenario, *, progress: Progress | None = None, max_replicas: int = 3
) -> FailureReport:
    """flashrec, checkpoint-restart and replica-dropping through the same faults, and the best K of 0 to `max_replicas`.

    UsageError for a scenario that cannot be. `progress` is called with the share that is done."""
    flashrec, why_fatal = simulate_flashrec(scenario, progress)
    choices: dict[int, float] = {}
    if scenario.is_sealed:
        for replicas in range(min(max_replicas, scenario.layout.nodes - 1) + 1):
            if replicas == scenario.replicas:
                choices[replicas] = flashrec.goodput
            else:
                choices[replicas] = simulate_flashrec(scenario.with_replicas(replicas))[0].goodput
    return FailureReport.of(scenario, (flashrec, *beside(scenario)), choices, why_fatal)
