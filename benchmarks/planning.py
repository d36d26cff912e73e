"""How long a search over all strategies takes, on one core, and how much of it bounds save.

    python -m benchmarks.planning [--rounds 3] [--json]

Each case is searched from nothing: strategies enumerated, bounded, priced, simulated as far as the bounds leave any
doubt, and the reasons of all losers given. Medians of the rounds; processor time beside wall time, for a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks import report
from flashrec.sim.cluster import a100_cluster
from flashrec.sim.model import Transformer
from flashrec.sim.report import one_line
from flashrec.sim.schedules import gpipe, interleaved, one_f_one_b, zb_h1
from flashrec.sim.search import search

SMALL = Transformer(
    name="GPT-1.7B", num_layers=24, hidden=2304, num_heads=24, sequence=2048, vocabulary=51_200
)
MIDDLE = Transformer(
    name="GPT-18B", num_layers=40, hidden=6144, num_heads=48, sequence=2048, vocabulary=51_200
)
LARGE = Transformer(
    name="GPT-175B", num_layers=96, hidden=12_288, num_heads=96, sequence=2048, vocabulary=51_200
)
EXPERTS = Transformer(
    name="MoE-8x7B",
    num_layers=32,
    hidden=4096,
    num_heads=32,
    kv_heads=8,
    ffn_hidden=14_336,
    gated=True,
    num_experts=8,
    experts_per_token=2,
    sequence=4096,
    vocabulary=32_000,
    biases=False,
    rms_norm=True,
    learned_positions=False,
    tied_embeddings=False,
    dropout=False,
    fused_attention=True,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A search."""

    model: Transformer
    devices: int
    global_batch: int
    slow: bool = False
    """One device runs at 0.8 of its speed."""
    budget_s: float | None = None


CASES = (
    Case(model=SMALL, devices=64, global_batch=512),
    Case(model=MIDDLE, devices=256, global_batch=1024),
    Case(model=LARGE, devices=1024, global_batch=1536, budget_s=10.0),
    Case(model=LARGE, devices=1024, global_batch=2048, slow=True, budget_s=10.0),
    Case(model=SMALL, devices=1024, global_batch=2048, budget_s=10.0),
    Case(model=EXPERTS, devices=1024, global_batch=1024, budget_s=10.0),
    Case(model=LARGE, devices=8192, global_batch=8192),
)


def measure(case: Case, rounds: int) -> report.Figures:
    cluster = a100_cluster(case.devices // 8, inter_bandwidth_bytes_s=200e9)
    if case.slow:
        cluster.speed_factors[17] = 0.8
    wall, processor = [], []
    for _ in range(rounds):
        for maker in (gpipe, one_f_one_b, interleaved, zb_h1):
            maker.cache_clear()
        began, busy = time.perf_counter(), time.process_time()
        outcome = search(case.model, cluster, case.global_batch)
        wall.append(time.perf_counter() - began)
        processor.append(time.process_time() - busy)
    return {
        "case": f"{case.model.name}, batch {case.global_batch:,}" + (", a slow device" if case.slow else ""),
        "devices": case.devices,
        "strategies": outcome.num_considered,
        "priced": outcome.num_priced,
        "simulated": outcome.num_simulated,
        "wall_s": statistics.median(wall),
        "worst_s": max(wall),
        "processor_s": statistics.median(processor),
        "budget_s": case.budget_s,
        "best": one_line(outcome.best[0].strategy),
        "best_s": outcome.best[0].batch_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    figures = [measure(case, chosen.rounds) for case in CASES]
    if chosen.json:
        print(json.dumps({"machine": report.machine(), "planning": figures}, indent=2))
        return
    table = Table(title="A search over all strategies, on one core (median s)")
    columns = (
        "search",
        "devices",
        "strategies",
        "priced",
        "simulated",
        "wall",
        "worst",
        "processor",
        "budget",
        "best",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("search", "best") else "right")
    for row in figures:
        counts = [f"{row[key]:,}" for key in ("devices", "strategies", "priced", "simulated")]
        times = [f"{row[key]:.2f}" for key in ("wall_s", "worst_s", "processor_s")]
        budget = f"{row['budget_s']:.0f}" if row["budget_s"] else ""
        table.add_row(row["case"], *counts, *times, budget, f"{row['best_s']:.3f} s: {row['best']}")
    Console(width=190).print(table)
    print(report.machine())


if __name__ == "__main__":
    main()
