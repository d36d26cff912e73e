"""How well the performance model predicts real runs on this machine.

    python -m benchmarks.real_runs [--rounds 3] [--steps 8] [--only NAME] [--realtime] [--json]

Ranks are processes that follow the schedule for real and exchange real bytes through gloo. Two kinds, told apart:

    waits        4 to 12 ranks whose compute is a timed wait, so that two cores can carry them
    arithmetic   2 ranks with torch's products and copies, one core each

Everything is predicted from events that `flashrec.sim.profiler` times on two ranks. What is compared:

    batch        predicted batch time over the measured one, less 1
    busy         the same for each rank's share of the step in which it performs operations; the worst rank
    moments      how far each operation's predicted begin and end are from the measured ones, the mean over a rank's
                 operations, in parts of the measured batch time; the worst rank

How noise is tamed. Each round profiles and then runs, so both see the same machine; events are pooled over the
rounds, and so are steps. Times are medians, operation by operation. The kernel counts how long a rank was kept from
a core by other processes (schedstat); of each case the half of the steps in which the worst rank was kept the least
is used: that choice knows nothing of the predictions, nor of the measured times. `--realtime` (a right of root's)
is for a machine that others use too: SCHED_RR, so that a rank whose wait is over, and gloo's threads, get a core at
once instead of after the time slice (3 ms) of whoever has it. Waits need little of the cores; arithmetic rests
between its steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real_runs_rank import Case, WaitKernels
from benchmarks.real_runs_rank import main as rank_main
from benchmarks.report import machine, show, table
from flashrec.sim import costs, engine
from flashrec.sim.cluster import Cluster, Device, Link
from flashrec.sim.events import Event
from flashrec.sim.kernels import Kernels, TorchKernels
from flashrec.sim.model import Transformer
from flashrec.sim.profile import Profile
from flashrec.sim.profiler import measure, plan, summary
from flashrec.sim.strategy import Strategy
from flashrec.sim.timeline import Timeline

RUN_S = 180.0
BATCH_TARGET, ACTIVITY_TARGET = 0.04, 0.05
PAUSE_S = 0.005


def cluster(name: str, ranks: int, flops: float, bandwidth_bytes_s: float) -> Cluster:
    """One node of `ranks` devices; only the waits' length comes from the figures, none of the predictions."""
    link = Link(bandwidth_bytes_s=1e9, latency_s=1e-4)
    device = Device(
        name=name, peak_flops={"fp32": flops}, memory_bytes=1e12, memory_bandwidth_bytes_s=bandwidth_bytes_s
    )
    return Cluster(device=device, num_nodes=1, devices_per_node=ranks, intra_link=link, inter_link=link)


def case(waits: bool, name: str, *, layers: int, micro_batches: int, **strategy: Any) -> Case:
    """A case; transformer and device are those of its kind.

    With tensor parallelism the waits' device is four times slower: a ring of gloo takes a millisecond however little
    it carries, and would else be most of the step.
    """
    shapes = {"hidden": 64, "sequence": 32, "vocabulary": 128} if waits else WIDE
    model = Transformer(num_layers=layers, num_heads=4, tied_embeddings=False, dropout=False, **shapes)
    options = {"schedule": "1f1b", "gradient_buckets": 2, **strategy}
    chosen = Strategy(
        dtype="fp32", gradient_dtype="fp32", overlap_gradients=False, sends_block=False, **options
    )
    slowness = 4 if chosen.tensor_parallel > 1 else 1
    where = cluster("wait" if waits else "core", chosen.num_devices, 6e8 / slowness, 2e8 / slowness)
    batch = micro_batches * chosen.data_parallel * chosen.micro_batch
    return Case(name=name, waits=waits, model=model, cluster=where, strategy=chosen, global_batch=batch)


WIDE = {"hidden": 512, "sequence": 256, "vocabulary": 512}


def cases() -> list[Case]:
    """All of them."""
    parallel = ("data_parallel", "tensor_parallel", "pipeline_parallel")

    def made(waits: bool, name: str, sizes: tuple[int, int, int], layers: int, m: int, **more: Any) -> Case:
        return case(
            waits, name, layers=layers, micro_batches=m, **dict(zip(parallel, sizes, strict=True)), **more
        )

    return [
        made(True, "DP 4", (4, 1, 1), 2, 2),
        made(True, "TP 4", (1, 4, 1), 4, 2),
        made(True, "PP 4, GPipe", (1, 1, 4), 4, 8, schedule="gpipe"),
        made(True, "PP 4, 1F1B", (1, 1, 4), 4, 8),
        made(True, "PP 4, interleaved x2", (1, 1, 4), 8, 4, schedule="interleaved", chunks=2),
        made(True, "PP 4, ZB-H1", (1, 1, 4), 4, 8, schedule="zb-h1"),
        made(True, "DP 2 x PP 4, 1F1B", (2, 1, 4), 4, 8),
        made(True, "DP 2 x TP 2 x PP 2, GPipe", (2, 2, 2), 4, 4, schedule="gpipe"),
        made(True, "DP 2 x TP 2 x PP 2, 1F1B", (2, 2, 2), 4, 4),
        made(True, "DP 2 x TP 2 x PP 3, 1F1B", (2, 2, 3), 3, 6),
        made(True, "DP 3 x PP 4, 1F1B", (3, 1, 4), 4, 8),
        made(True, "PP 12, 1F1B", (1, 1, 12), 12, 12),
        made(False, "DP 2", (2, 1, 1), 1, 3),
        made(False, "TP 2", (1, 2, 1), 2, 3),
        made(False, "PP 2, GPipe", (1, 1, 2), 2, 4, schedule="gpipe"),
        made(False, "PP 2, 1F1B", (1, 1, 2), 2, 4),
    ]


@dataclass
class Observed:
    """What was measured of one case so far."""

    seconds: dict[Event, list[float]] = field(default_factory=dict)
    steps: list[list[dict[str, Any]]] = field(default_factory=list)
    """Of each step, what each rank noted."""
    loads: list[float] = field(default_factory=list)
    """The machine's load average after each round."""

    def add(self, seconds: dict[Event, list[float]], steps: list[list[dict[str, Any]]]) -> None:
        """One round's."""
        for event, values in seconds.items():
            self.seconds.setdefault(event, []).extend(values)
        self.steps.extend(steps)
        self.loads.append(os.getloadavg()[0])

    def quiet(self) -> list[list[dict[str, Any]]]:
        """The half of the steps in which the worst rank was kept from a core the least."""
        ranked = sorted(self.steps, key=lambda ranks: max(r["kept_s"] for r in ranks))
        return ranked[: max(1, -(-len(ranked) // 2))]


def profile_events(case: Case, rounds: int) -> dict[Event, list[float]]:
    """All that two ranks can time of the case's events."""
    planned = plan(Profile().missing(case.events))
    assert not planned.impossible, planned.impossible
    kernels: Kernels = WaitKernels(case.cluster) if case.waits else TorchKernels()
    return measure(
        planned.events,
        rounds=rounds,
        kernels=kernels,
        pause_s=PAUSE_S if case.waits else 0.0,
        fork=True,
        pinned=not case.waits,
        threads=1,
        timeout_s=RUN_S,
    )


def run_case(case: Case, num_steps: int) -> list[list[dict[str, Any]]]:
    """Real processes, gone when this returns. Of each step, what each rank noted."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="flashrec-real-runs-") as name:
        folder = Path(name)
        ranks = [
            context.Process(target=rank_main, args=(case, rank, folder, num_steps, os.getpid()))
            for rank in range(case.strategy.num_devices)
        ]
        try:
            for process in ranks:
                process.start()
            deadline = time.monotonic() + RUN_S
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in ranks:
                if process.pid is not None and process.is_alive():
                    process.kill()
                    process.join()
        for failed in folder.glob("failed*"):
            raise RuntimeError(f"{case.name}: {failed.name}\n{failed.read_text()}")
        found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(len(ranks))]
    return [list(step) for step in zip(*found, strict=True)]


def predict(case: Case, seconds: dict[Event, list[float]]) -> Timeline:
    """The step, from events that two ranks measured."""
    built = costs.build(case.model, case.cluster, case.strategy, case.global_batch, Profile(summary(seconds)))
    return engine.run(case.schedule, built)


def compare(case: Case, observed: Observed) -> dict[str, Any]:
    """Errors, as the module's docstring says."""
    timeline = predict(case, observed.seconds)
    steps = observed.quiet()
    batch_s = statistics.median(max(rank["done"] for rank in step) for step in steps)
    busy, moments, worst = [], [], []
    for rank in range(case.strategy.num_devices):
        stage = rank // (case.strategy.data_parallel * case.strategy.tensor_parallel)
        measured = {
            key: np.median([step[rank][key] for step in steps], axis=0) for key in ("start", "end", "done")
        }
        predicted = {"start": timeline.start[stage, :, 0], "end": timeline.end[stage, :, 0]}
        apart = np.concatenate([np.abs(predicted[key] - measured[key]) for key in predicted]) / batch_s
        share = float((predicted["end"] - predicted["start"]).sum()) / timeline.batch_s
        real = float((measured["end"] - measured["start"]).sum()) / batch_s
        busy.append(share / real - 1)
        moments.append(float(apart.mean()))
        worst.append(float(apart.max()))
    return {
        "name": case.name,
        "kind": "waits" if case.waits else "arithmetic",
        "ranks": case.strategy.num_devices,
        "measured_ms": batch_s * 1e3,
        "predicted_ms": timeline.batch_s * 1e3,
        "batch_error": timeline.batch_s / batch_s - 1,
        "busy_error": max(busy, key=abs),
        "moments_error": max(moments),
        "worst_moment": max(worst),
        "steps": len(steps),
        "of_steps": len(observed.steps),
        "load": round(statistics.median(observed.loads), 1),
    }


def observe(chosen: Sequence[Case], rounds: int, num_steps: int, profile_rounds: int) -> list[Observed]:
    """Round by round: each case is profiled, then run."""
    found = [Observed() for _ in chosen]
    for number in range(rounds):
        for case, observed in zip(chosen, found, strict=True):
            print(f"round {number + 1} of {rounds}: {case.name:30}", end="\r", file=sys.stderr, flush=True)
            observed.add(profile_events(case, profile_rounds), run_case(case, num_steps))
    print(" " * 60, end="\r", file=sys.stderr)
    return found


def report(figures: list[dict[str, Any]]) -> list[Any]:
    """A table of each kind, and what of the targets is met."""
    tables = []
    for kind in ("waits", "arithmetic"):
        rows = [f for f in figures if f["kind"] == kind]
        cells = [
            [
                *(f["name"], f["ranks"], f["measured_ms"], f["predicted_ms"]),
                *(f"{100 * f[key]:+.1f} %" for key in ("batch_error", "busy_error")),
                *(f"{100 * f[key]:.1f} %" for key in ("moments_error", "worst_moment")),
                *(f"{f['steps']}/{f['of_steps']}", f["load"]),
            ]
            for f in rows
        ]
        if not rows:
            continue
        batch = [abs(f["batch_error"]) for f in rows]
        activity = [max(abs(f["busy_error"]), f["moments_error"]) for f in rows]
        met = (
            f"batch within {100 * BATCH_TARGET:.0f} %: {sum(b <= BATCH_TARGET for b in batch)} of {len(rows)}, "
            f"activity within {100 * ACTIVITY_TARGET:.0f} %: "
            f"{sum(a <= ACTIVITY_TARGET for a in activity)} of {len(rows)}; "
            f"medians {100 * statistics.median(batch):.1f} % and {100 * statistics.median(activity):.1f} %"
        )
        columns = (
            *("", "ranks", "measured ms", "predicted ms", "batch", "busy", "moments", "worst moment"),
            *("steps", "load"),
        )
        tables.append(table(f"{kind}: {met}", columns, cells))
    return tables


def prefer() -> None:
    """This process and those it starts run as soon as they can. Raises PermissionError."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="of profiling and running")
    parser.add_argument("--steps", type=int, default=8, help="in each run")
    parser.add_argument("--profile-rounds", type=int, default=10, help="of each event, in each round")
    parser.add_argument("--only", default="", help="cases whose kind or name contains this")
    parser.add_argument("--realtime", action="store_true", help="get a core at once, before other programs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.realtime:
        prefer()
    about = machine()
    chosen = [c for c in cases() if options.only in f"{'waits' if c.waits else 'arithmetic'} {c.name}"]
    found = observe(chosen, options.rounds, options.steps, options.profile_rounds)
    figures = [compare(c, o) for c, o in zip(chosen, found, strict=True)]
    show({"machine": about, "cases": figures}, report(figures), as_json=options.json)


if __name__ == "__main__":
    main()
