"""What failures cost, by the daemon's own core in simulated time.

    python -m benchmarks.failures                    # everything, on one core
    python -m benchmarks.failures --scales 32 4800   # recovery time at these sizes only
    python -m benchmarks.failures --days 90 --devices 16384 --scales

Two tables: recovery time against scale, with the leader's work for every rank's message measured on the real core at
that size, here and now; and 90 days of failures on 16,384 devices at the rate that Llama 3 had, under three policies,
with the time that took.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashrec.sim.failures import FailureScenario, Fault, Layout, RecoveryCosts, Scope, estimate
from flashrecd.core import events as ev
from flashrecd.core.job import Core
from flashrecd.core.nodes import watch_of
from flashrecd.core.state import (
    JobConfig,
    JobState,
    Kept,
    Member,
    NodeSpec,
    NodeStatus,
    RankStatus,
    Standby,
    Status,
)
from flashrecd.simulate import simulate_failures
from flashrecd.simulate.fold import Cluster
from flashrecd.simulate.run import FoldedRun

PER_RACK = 16  # Layout's
SCALES = (32, 256, 1024, 4800, 16_384, 100_000)
PHASES = 20  # of a step, at which the failure strikes
# Assumptions about the cluster: 400 Gb/s into each node, of which a pull gets 70 % (docs/measurements.md: 63 to
# 75 %), a step of 10 s, 400 MB of state a device (405e9 parameters, 16 bytes each, on 16,384), a restart from disk of
# 5 minutes.
LINK = RecoveryCosts(pull_bytes_per_s=35e9, replicate_bytes_per_s=35e9)
STEP_S, STATE_BYTES, RESTART_S, SAVE_S = 10.0, 4e8, 300.0, 30.0
SAMPLE = 2000  # of the messages of one kind that are really handled, where there are more


@dataclass(frozen=True)
class LeaderWork:
    """Seconds of the core for one recovery: all ranks' Parked, all nodes' Holdings, all ranks' Formed, and the plan,
    which is the last Holdings' answer."""

    parked_s: float
    holdings_s: float
    plan_s: float
    formed_s: float
    is_sampled: bool

    @property
    def total_s(self) -> float:
        return self.parked_s + self.holdings_s + self.plan_s + self.formed_s


def leader_work(devices: int) -> LeaderWork:
    """One rank is lost of `devices`, in the sealed regime with one replica."""
    layout = Layout(devices)
    scenario = FailureScenario(layout=layout, step_s=STEP_S, state_bytes=STATE_BYTES, data_parallel=1)
    core = running_core(scenario)
    lost = devices // 2
    core.handle(ev.Exited(core.state.members[lost].proc, None, 9, (5, 6), (5, 6)), 1.0)
    assert core.state.status is Status.PARKING
    survivors = [rank for rank in range(devices) if rank != lost]
    parked_s = handle_all(
        core,
        [(r, ev.Parked(core.state.members[r].proc, 1, 6, False, (5, 6), (5, 6))) for r in survivors],
        {"status": RankStatus.PARKED, "version": 6, "private": (5, 6), "sealed": (5, 6)},
    )
    kept: dict[int, list[Kept]] = {}
    for rank, member in enumerate(core.state.members):
        for node in member.keepers:
            kept.setdefault(node, []).append(Kept(rank, (5, 6), (5, 6)))
    told = [ev.Holdings(node, 1, tuple(kept.get(node, ()))) for node in core.live_nodes()]
    skipped = max(len(told) - 1 - SAMPLE, 0)
    core.state = replace(core.state, holdings=tuple((one.node, one.kept) for one in told[:skipped]))
    began = time.process_time()
    for one in told[skipped:-1]:
        core.handle(one, 1.0)
    holdings_s = (time.process_time() - began) * (len(told) - 1) / (len(told) - 1 - skipped)
    began = time.process_time()
    core.handle(told[-1], 1.0)
    plan_s = time.process_time() - began
    assert core.state.status is Status.FORMING, core.state.outcome
    formed = [(rank, ev.Formed(m.proc, 2)) for rank, m in enumerate(core.state.members)]
    formed_s = handle_all(core, formed, {"status": RankStatus.LIVE, "version": 6})
    assert core.state.status is Status.RUNNING
    return LeaderWork(parked_s, holdings_s, plan_s, formed_s, devices > SAMPLE)


def handle_all(core: Core, messages: list[tuple[int, ev.Event]], leads_to: dict[str, object]) -> float:
    """Seconds for all of them; of many, the first are taken as said, and the time of the others stands for theirs."""
    skipped = max(len(messages) - SAMPLE, 0)
    if skipped:
        members = list(core.state.members)
        for rank, _ in messages[:skipped]:
            members[rank] = replace(members[rank], **leads_to)  # type: ignore[arg-type]
        core.state = replace(core.state, members=tuple(members))
    core.handle(messages[skipped][1], 1.0)  # it looks through the members that it was given at once
    began = time.process_time()
    for _, message in messages[skipped + 1 : -1]:
        core.handle(message, 1.0)
    each_s = (time.process_time() - began) / (len(messages) - skipped - 2)
    began = time.process_time()
    core.handle(messages[-1][1], 1.0)  # what it leads to happens once
    return each_s * (len(messages) - 1) + time.process_time() - began


def running_core(scenario: FailureScenario) -> Core:
    """As after a start; made at once, for a start of 100,000 ranks takes long."""
    layout, cluster = scenario.layout, Cluster(scenario)
    nodes = layout.nodes + scenario.spare_nodes
    facts = [(f"node-{n}", f"rack-{n // PER_RACK}", layout.devices_per_node) for n in range(nodes)]
    config = JobConfig(
        world_size=layout.devices,
        nodes=tuple(NodeSpec(*one) for one in facts),
        nproc_per_node=layout.devices_per_node,
        replicas=scenario.replicas,
    )
    core = Core(config)
    members = tuple(
        Member(
            f"p{rank}",
            RankStatus.LIVE,
            version=0,
            claims=(((rank,), "layout"),),
            node=rank // layout.devices_per_node,
            keepers=cluster.keepers[rank // layout.devices_per_node],
        )
        for rank in range(layout.devices)
    )
    standbys = tuple(Standby(f"s{node}", "forked", node) for node in range(layout.nodes))
    core.state = JobState(
        status=Status.RUNNING,
        members=members,
        nodes=tuple(NodeStatus(*one, spare=n >= layout.nodes) for n, one in enumerate(facts)),
        standbys=standbys,
        num_launched=2 * layout.devices,
        why_sealed="each rank alone holds a part",
    )
    for node in range(nodes):
        core.detector.heard(watch_of(node), 1.0)
    return core


def recovery_s(devices: int, scope: Scope, message_s: float) -> float:
    """Mean from the failure until training goes on, without the survivors' way to their gate: over phases of a step."""
    costs = replace(LINK, leader_message_s=message_s)
    layout = Layout(devices)
    base = FailureScenario(
        layout=layout, step_s=STEP_S, state_bytes=STATE_BYTES, data_parallel=1, duration_s=1000.0, costs=costs
    )
    step_s = base.effective_step_s()
    took = []
    for phase in range(PHASES):
        at_s = (20 + (phase + 0.5) / PHASES * (1 - costs.apply_share)) * step_s
        index = (devices if scope is Scope.RANK else layout.nodes) // 2
        run = FoldedRun(replace(base, trace=(Fault(at_s, scope, index),)))
        run.play(run.scenario.faults(), None)
        gate_s = (21 - costs.apply_share) * step_s - at_s
        detect_s = costs.detect_rank_s if scope is Scope.RANK else costs.detect_node_s
        took.append(run.recoveries_s[0] - max(gate_s - detect_s - costs.report_s, 0.0))
    return sum(took) / len(took)


def print_scales(scales: Iterable[int]) -> None:
    print("Recovery time against scale: rank lost, node lost (ms, net of the survivors' way to their gate)\n")
    print("| devices | leader's work, ms | of that: plan | rank lost | growth | node lost | growth |")
    print("|---|---|---|---|---|---|---|")
    first: tuple[float, float] | None = None
    for devices in scales:
        work = leader_work(devices)
        message_s = work.total_s / 2 / devices  # the model takes it once before the plan and once after
        rank_s, node_s = (recovery_s(devices, scope, message_s) for scope in (Scope.RANK, Scope.NODE))
        first = first or (rank_s, node_s)
        sampled = "*" if work.is_sampled else ""
        print(
            f"| {devices:,} | {1e3 * work.total_s:.0f}{sampled} | {1e3 * work.plan_s:.0f} | {1e3 * rank_s:.0f} | "
            f"{100 * (rank_s / first[0] - 1):+.0f} % | {1e3 * node_s:.0f} | {100 * (node_s / first[1] - 1):+.0f} % |",
            flush=True,
        )
    print(
        f"\n* Of each kind of message the last {SAMPLE} were handled at that size, and stand for all.\n"
        "Published for FlashRecovery (arXiv 2509.03047): +52 % from 32 to 4,800 devices.\n"
    )


def print_days(days: float, devices: int) -> None:
    scenario = FailureScenario(
        layout=Layout(devices),
        step_s=STEP_S,
        state_bytes=STATE_BYTES,
        duration_s=days * 86_400,
        data_parallel=8,
        costs=LINK,
        restart_s=RESTART_S,
        save_s=SAVE_S,
    )
    began = time.process_time()
    faults = scenario.faults()
    run = FoldedRun(scenario)
    run.play(faults, None)
    took_s = time.process_time() - began
    print(
        f"{days:g} days on {devices:,} devices, {len(faults)} failures: simulated in "
        f"{took_s:.1f} s of CPU time (budget 60 s)\n"
    )
    began = time.process_time()
    report = simulate_failures(scenario)
    print(report.table())
    guess = estimate(scenario)
    print(f"\nAll policies and K from 0 to 3: {time.process_time() - began:.1f} s.")
    began = time.process_time()
    estimate(scenario)
    print(
        f"Closed forms ({1e6 * (time.process_time() - began):.0f} µs): flashrec {guess.flashrec:.4f}, "
        f"checkpoint-restart {guess.checkpoint_restart:.4f}, replica-dropping {guess.replica_dropping:.4f}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scales", type=int, nargs="*", default=list(SCALES))
    parser.add_argument("--days", type=float, default=90.0)
    parser.add_argument("--devices", type=int, default=16_384)
    args = parser.parse_args()
    print(f"python {sys.version.split()[0]}, one core of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}\n")
    if args.scales:
        print_scales(args.scales)
    if args.days > 0:
        print_days(args.days, args.devices)
    return 0


if __name__ == "__main__":
    sys.exit(main())
