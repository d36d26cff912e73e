"""Goodput in closed form, for a planner that compares thousands of strategies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashrec.errors import UsageError
from flashrec.sim.failures.costs import RecoveryCosts
from flashrec.sim.failures.dropping import dropping_goodput
from flashrec.sim.failures.restarts import daly_interval, restart_goodput
from flashrec.sim.failures.scenario import FailureScenario
from flashrec.sim.failures.traces import FailureRates, Layout, Scope


@dataclass(frozen=True, slots=True)
class GoodputEstimate:
    """Useful share of time under each policy, and what it is made of. `recovery_s`: flashrec's, mean over faults,
    with the work that is done again. `fatal_per_s`: rate of losing owner and all replicas."""

    flashrec: float
    checkpoint_restart: float
    replica_dropping: float
    recovery_s: float
    fatal_per_s: float
    disk_interval_s: float


def expected_goodput(
    step_s: float,
    state_bytes: float,
    devices: int,
    *,
    devices_per_node: int = 8,
    nodes_per_rack: int = 16,
    rates: FailureRates | None = None,
    costs: RecoveryCosts | None = None,
    replicas: int = 1,
    data_parallel: int = 1,
    save_s: float = 30.0,
    restart_s: float = 300.0,
    repair_s: float = 4 * 3600.0,
) -> GoodputEstimate:
    """See `estimate`; the sealed regime. `step_s`: an undisturbed step; `state_bytes`: unique, of a device."""
    scenario = FailureScenario(
        layout=Layout(devices, devices_per_node, nodes_per_rack),
        step_s=step_s,
        state_bytes=state_bytes,
        rates=rates or FailureRates(),
        costs=costs or RecoveryCosts(),
        replicas=replicas,
        data_parallel=data_parallel,
        save_s=save_s,
        restart_s=restart_s,
        repair_s=repair_s,
    )
    return estimate(scenario)


def outage_s(scenario: FailureScenario, scope: Scope, *, is_silent: bool = False) -> float:
    """Mean seconds that a fault costs flashrec: from the death to the restored progress.

    Survivors run to their gate, on average half a step away; then the plan, a replacement (which was being made
    meanwhile), the pull, the forming. What the survivors computed of the step is done again: half a step; and a whole
    one where the resumed version is older than the one they hold (sealed regime, death after the gate, or before the
    seal or the replica of this step's version was complete)."""
    costs, layout, step_s = scenario.costs, scenario.layout, scenario.effective_step_s()
    gate_s = (1 - costs.apply_share) * step_s
    if scope is Scope.RANK:
        detect_s = costs.detect_rank_s
        pull_s = (
            scenario.state_bytes / costs.restore_bytes_per_s
            if scenario.is_sealed
            else scenario.state_bytes / costs.pull_bytes_per_s
        )
        late_s = scenario.seal_s()
    else:
        detect_s = (
            max(costs.suspect_after_s, step_s) + costs.suspect_after_s / 24
            if is_silent
            else costs.detect_node_s
        )
        pull_s = scenario.node_bytes() / costs.pull_bytes_per_s
        late_s = scenario.seal_s() + scenario.replicate_s()
    leader_s = layout.devices * costs.leader_message_s
    wait_s = max((gate_s**2) / (2 * step_s) - detect_s, 0.0)
    parked_s = detect_s + costs.report_s + wait_s + leader_s
    ready_s = max(
        parked_s + costs.export_s, detect_s + costs.replacement_s(has_standby=scenario.has_standbys)
    )
    away_s = ready_s + pull_s + costs.forming_s(layout.devices) + leader_s
    keep_s = 0.0
    if scope is not Scope.RANK and scenario.is_sealed and scenario.replicas:
        keep_s = max(scenario.node_bytes() / costs.replicate_bytes_per_s - gate_s, 0.0)
    again = 0.5
    if scenario.is_sealed:
        every = scenario.seal_every
        again += min(late_s / step_s, every) + (every - 1) / 2 + costs.apply_share
    return away_s + keep_s + again * step_s


def fatal_rate(scenario: FailureScenario, window_s: float) -> float:
    """Losses of an owner and all of its K replicas, a second: the first of K + 1 nodes fails, and then the others
    within `window_s`, before new replicas are made. Racks: a domain's loss takes no replica with it while others are
    free."""
    layout, rates = scenario.layout, scenario.rates
    per_node = rates.rate_per_s(layout, Scope.NODE) / layout.nodes
    per_node += rates.rate_per_s(layout, Scope.RACK) / layout.racks
    if scenario.replicas == 0:
        return layout.nodes * per_node if scenario.is_sealed else 0.0
    if not scenario.is_sealed:
        copies = scenario.data_parallel
        return layout.nodes / copies * copies * per_node * (per_node * window_s) ** (copies - 1)
    others = scenario.replicas + 1
    return layout.nodes * others * per_node * (per_node * window_s) ** scenario.replicas


def estimate(scenario: FailureScenario) -> GoodputEstimate:
    """The closed forms for a scenario. flashrec: undisturbed speed, times the share of time that is not an outage,
    times what the rare fall back to disk leaves. The mean number of faults is the rates', so a trace is not seen."""
    layout, rates, costs = scenario.layout, scenario.rates, scenario.costs
    mtbf_s = rates.mtbf_s(layout)
    total, mean_s = 0.0, 0.0
    for scope in Scope:
        rate = rates.rate_per_s(layout, scope)
        silent = 0.0 if scope is Scope.RANK else rates.silent_share
        each = (1 - silent) * outage_s(scenario, scope)
        each += silent * outage_s(scenario, scope, is_silent=True) if silent else 0.0
        total += rate
        mean_s += rate * each
    mean_s /= total
    fatal = fatal_rate(scenario, outage_s(scenario, Scope.NODE))
    interval_s = scenario.restart_interval_s()
    fatal_s = scenario.restart_s + interval_s / 2 + scenario.save_s
    speed = scenario.step_s / scenario.effective_step_s()
    live = speed / (1 + mean_s / mtbf_s + fatal * fatal_s)
    lost_rank = rates.rate_per_s(layout, Scope.RANK) + rates.rate_per_s(layout, Scope.NODE)
    dropped = dropping_goodput(
        scenario.data_parallel,
        scenario.data_parallel / lost_rank if lost_rank else math.inf,
        scenario.restart_s,
        costs.detect_node_s + costs.forming_s(layout.devices),
        costs.forming_s(layout.devices) + scenario.state_bytes / costs.pull_bytes_per_s,
        scenario.step_s / 2,
    )
    if not math.isfinite(dropped):
        raise UsageError("without any fault there is nothing to estimate")
    saved = daly_interval(scenario.save_s, mtbf_s) if scenario.disk_interval_s is None else interval_s
    restarted = restart_goodput(saved, scenario.save_s, scenario.restart_s, mtbf_s)
    return GoodputEstimate(live, restarted, dropped, mean_s, fatal, interval_s)
