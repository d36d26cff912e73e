"""How long the performance model takes to lay out one step of a large job, all ranks' time-lines.

    python -m benchmarks.simulator [--rounds 9] [--json]

A round is what a first question costs: the schedule made, checked and sorted, tensor-parallel groups brought to their
slowest member, equal replicas collapsed, the step swept. `again` is a round that finds the schedule made before.
The time-lines are arrays of every operation's start and end by stage and class of replicas; `per rank` also copies them
out for every single rank. Medians of the rounds; the work runs on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import report
from flashrec.sim.engine import StepCosts, classes_of, run, slowest_of_groups
from flashrec.sim.operations import operation
from flashrec.sim.schedules import Schedule, interleaved, one_f_one_b, zb_h1
from flashrec.sim.timeline import Timeline

MAKERS = (one_f_one_b, zb_h1, interleaved)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and how its devices' speeds differ."""

    name: str
    make: Callable[[], Schedule]
    tensor: int
    replicas: int
    speeds: str  # "equal", "replicas" (one speed a replica), "devices" (one speed a device)
    budget_s: float | None = None


CASES = (
    Case(
        name="4,800 devices TP8 PP75 DP8, 32 micro-batches, 1F1B, equal",
        make=partial(one_f_one_b, 75, 32),
        tensor=8,
        replicas=8,
        speeds="equal",
        budget_s=0.1,
    ),
    Case(
        name="the same, each device of another speed",
        make=partial(one_f_one_b, 75, 32),
        tensor=8,
        replicas=8,
        speeds="devices",
        budget_s=0.1,
    ),
    Case(
        name="the same under ZB-H1",
        make=partial(zb_h1, 75, 32),
        tensor=8,
        replicas=8,
        speeds="devices",
        budget_s=0.1,
    ),
    Case(
        name="100,000 devices TP8 PP25 DP500, 32 micro-batches, each of another speed",
        make=partial(one_f_one_b, 25, 32),
        tensor=8,
        replicas=500,
        speeds="devices",
        budget_s=0.5,
    ),
    Case(
        name="100,000 devices TP8 PP25 DP500, 100 micro-batches, each of another speed",
        make=partial(one_f_one_b, 25, 100),
        tensor=8,
        replicas=500,
        speeds="devices",
        budget_s=0.5,
    ),
    Case(
        name="100,000 devices TP8 PP25 DP500, interleaved, 4 chunks, 50 micro-batches",
        make=partial(interleaved, 25, 50, 4),
        tensor=8,
        replicas=500,
        speeds="devices",
    ),
    Case(
        name="100,000 devices TP8 PP1 DP12,500, 8 micro-batches, each of another speed",
        make=partial(one_f_one_b, 1, 8),
        tensor=8,
        replicas=12_500,
        speeds="devices",
        budget_s=0.5,
    ),
)


def speeds_of(case: Case, num_stages: int) -> np.ndarray:
    """Relative speeds of all devices: (P, R, TP)."""
    shape = (num_stages, case.replicas, case.tensor)
    return np.ones(shape) if case.speeds == "equal" else np.random.default_rng(0).uniform(0.9, 1.1, shape)


def lay_out(case: Case, speed: np.ndarray) -> tuple[Timeline, np.ndarray]:
    """The whole answer: the time-line, and the class of every replica."""
    schedule = case.make()
    by_class, weights, class_of = classes_of(slowest_of_groups(speed))
    stages, parts = schedule.num_stages, schedule.num_virtual_stages
    slowness = np.tile(1 / by_class, (schedule.num_chunks, 1))
    backward_s = 0.010 if schedule.splits_backward else 0.020
    sends = np.full((parts - 1, len(weights)), 0.0005 * (stages > 1))
    costs = StepCosts(
        forward=0.010 * slowness,
        backward=backward_s * slowness,
        weight=0.010 * slowness * schedule.splits_backward,
        send_forward=sends,
        send_backward=sends,
        sends_block=False,
        grad_sync=np.full((parts, 4), 0.008),
        overlap_grad_sync=True,
        optimizer=0.004 / by_class,
        finish=np.full(stages, 0.002),
        weights=weights,
    )
    return run(schedule, costs), class_of


def per_rank(case: Case, line: Timeline, class_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every rank's own starts and ends: (P, N, R) seen through (P, N, R, TP), for a tensor group moves as one."""
    shape = (*line.start.shape[:2], case.replicas, case.tensor)
    first, second = (
        np.broadcast_to(times[:, :, class_of][..., None], shape) for times in (line.start, line.end)
    )
    return first, second


def measure(case: Case, rounds: int) -> report.Figures:
    speed = speeds_of(case, case.make().num_stages)
    cold, warm, copied = [], [], []
    for _ in range(rounds):
        for maker in MAKERS:
            maker.cache_clear()
        operation.cache_clear()
        begin = time.perf_counter()
        line, class_of = lay_out(case, speed)
        cold.append(time.perf_counter() - begin)
        per_rank(case, line, class_of)
        copied.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        lay_out(case, speed)
        warm.append(time.perf_counter() - begin)
    return {
        "case": case.name,
        "classes": len(line.costs.weights),
        "operations": line.schedule.num_stages * len(line.schedule.ops[0]),
        "first_s": statistics.median(cold),
        "worst_s": max(cold),
        "again_s": statistics.median(warm),
        "per_rank_s": statistics.median(copied),
        "budget_s": case.budget_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    figures = [measure(case, chosen.rounds) for case in CASES]
    if chosen.json:
        print(json.dumps({"machine": report.machine(), "simulator": figures}, indent=2))
        return
    table = Table(title="One step laid out, all ranks (median ms)")
    for column in ("job", "classes", "operations", "first", "worst", "again", "per rank", "budget"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for row in figures:
        times = [f"{row[key] * 1e3:.1f}" for key in ("first_s", "worst_s", "again_s", "per_rank_s")]
        budget = f"{row['budget_s'] * 1e3:.0f}" if row["budget_s"] else ""
        table.add_row(row["case"], f"{row['classes']:,}", f"{row['operations']:,}", *times, budget)
    Console(width=140).print(table)
    print(report.machine())


if __name__ == "__main__":
    main()
