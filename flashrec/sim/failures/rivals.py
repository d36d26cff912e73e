"""The other two policies, through the faults of a scenario."""

from __future__ import annotations

from flashrec.sim.failures.dropping import simulate_dropping
from flashrec.sim.failures.report import PolicyResult, quantiles
from flashrec.sim.failures.restarts import simulate_restarts
from flashrec.sim.failures.scenario import FailureScenario
from flashrec.sim.failures.traces import Scope


def beside(scenario: FailureScenario) -> tuple[PolicyResult, PolicyResult]:
    """Checkpoint-restart and replica-dropping. Neither pays for flashrec's step."""
    return _restarting(scenario), _dropping(scenario)


def _restarting(scenario: FailureScenario) -> PolicyResult:
    faults = scenario.faults()
    layout = scenario.layout
    ran = simulate_restarts(
        [fault.at_s for fault in faults],
        scenario.duration_s,
        scenario.restart_interval_s(),
        scenario.save_s,
        scenario.restart_s,
    )
    loaded = len(ran.outages_s) * scenario.state_bytes * layout.devices
    saved = scenario.state_bytes * layout.devices * ran.useful_s / scenario.restart_interval_s()
    quantile = quantiles(ran.outages_s)
    lost = ran.lost_s / scenario.step_s
    return PolicyResult(
        "checkpoint-restart", ran.goodput, lost, len(ran.outages_s), *quantile, loaded, saved, len(faults)
    )


def _dropping(scenario: FailureScenario) -> PolicyResult:
    layout, costs, copies = scenario.layout, scenario.costs, scenario.data_parallel
    per_copy = layout.devices // copies
    faults = []
    for fault in scenario.faults():
        if fault.scope is Scope.RANK:
            struck: tuple[int, ...] = (fault.index // per_copy,)
        else:
            first = min(scenario.strikes(fault)) * layout.devices_per_node
            last = (max(scenario.strikes(fault)) + 1) * layout.devices_per_node - 1
            struck = tuple(range(first // per_copy, last // per_copy + 1))
        faults.append((fault.at_s, struck))
    pull_s = scenario.state_bytes / costs.pull_bytes_per_s
    ran = simulate_dropping(
        faults,
        duration_s=scenario.duration_s,
        replicas=copies,
        step_s=scenario.step_s,
        away_s=scenario.restart_s,
        drop_s=costs.detect_node_s + costs.forming_s(layout.devices),
        join_s=costs.forming_s(layout.devices) + pull_s,
        interval_s=scenario.restart_interval_s(),
    )
    pulled = sum(len(struck) for _, struck in faults) * per_copy * scenario.state_bytes
    lost = ran.lost_s / scenario.step_s
    quantile = quantiles(ran.outages_s)
    return PolicyResult(
        "replica-dropping", ran.goodput, lost, len(ran.outages_s), *quantile, pulled, 0.0, ran.restarts
    )
