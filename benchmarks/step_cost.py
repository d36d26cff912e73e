"""What `flashrec.step()` costs, beside bare DDP on gloo in the same processes.

    python -m benchmarks.step_cost [--sizes small large] [--pairs 20] [--ranks 2] [--json]

Ranks train the same model in alternating blocks of steps, with bare DDP and under flashrec. The cost is the
median over pairs of neighbouring blocks of (flashrec's median step - bare's) / bare's, with a bootstrap
interval. CPU time counts every thread of a rank; the daemon's is apart. Then where the time goes, by part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.jobs import cpu_seconds, run_job
from benchmarks.model import SIZES

BUDGET_PERCENT = 1.0


def measure(size: str, ranks: int, pairs: int, block_steps: int, parallel: str = "ddp") -> report.Figures:
    """The figures of one model."""
    with tempfile.TemporaryDirectory(prefix="flashrec-bench-") as folder:
        out = Path(folder)
        args = ["--size", size, "--parallel", parallel, "--pairs", pairs]
        args += ["--block-steps", block_steps, "--out", out]
        with run_job("benchmarks.step_cost_rank", args, ranks=ranks) as job:
            started, cpu = time.monotonic(), cpu_seconds(job.daemon_pid)
            while job.ended is None:
                job.poll(0.2)
                if job.ended is None:
                    daemon_cpu = (cpu_seconds(job.daemon_pid) - cpu) / (time.monotonic() - started)
            job.wait(0)
        found = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return {"size": size, "daemon_cpu_percent": 100 * daemon_cpu, **compare(found)}


def compare(found: list[dict[str, Any]]) -> report.Figures:
    """Pairs of blocks, each the mean over ranks, and what follows from them."""
    blocks = {
        side: {
            what: [statistics.mean(values) for values in zip(*_series(found, side, what), strict=True)]
            for what in ("step_ms", "cpu_ms")
        }
        for side in ("bare", "flashrec")
    }
    figures: report.Figures = {}
    for what in ("step_ms", "cpu_ms"):
        bare, ours = blocks["bare"][what], blocks["flashrec"][what]
        over = [100 * (b / a - 1) for a, b in zip(bare, ours, strict=True)]
        figures[what] = {
            "bare": statistics.median(bare),
            "flashrec": statistics.median(ours),
            "overhead_percent": statistics.median(over),
            "overhead_percent_95": report.bootstrap(over),
            "overhead_us": 1000 * statistics.median(b - a for a, b in zip(bare, ours, strict=True)),
            "pairs": len(over),
        }
    if "sealing" in found[0]:
        figures["sealing"] = {
            what: statistics.mean(one["sealing"][what] for one in found) for what in found[0]["sealing"]
        }
    names = {name: None for one in found for name in one["parts"]}
    figures["parts"] = {
        name: {
            what: statistics.mean(one["parts"].get(name, {}).get(what, 0.0) for one in found)
            for what in ("us", "calls")
        }
        for name in names
    }
    return figures


def _series(found: list[dict[str, Any]], side: str, what: str) -> list[list[float]]:
    return [[block[what] for block in one[side]] for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["small", "large"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks per size")
    parser.add_argument("--block-steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    about = report.machine()
    sizes = [measure(size, options.ranks, options.pairs, options.block_steps) for size in options.sizes]
    figures = {"machine": about, "ranks": options.ranks, "budget_percent": BUDGET_PERCENT, "sizes": sizes}

    rows = []
    for one in sizes:
        for what, name in (("step_ms", "step time"), ("cpu_ms", "CPU time")):
            cost = one[what]
            low, high = cost["overhead_percent_95"]
            rows.append(
                (
                    f"{one['size']}: {name}",
                    f"{cost['bare']:.2f}",
                    f"{cost['flashrec']:.2f}",
                    f"{cost['overhead_percent']:+.2f} %",
                    f"{low:+.2f} .. {high:+.2f} %",
                    f"{cost['overhead_us']:+.0f}",
                )
            )
    columns = ("", "bare ms", "flashrec ms", "cost", "95 % interval", "µs a step")
    tables = [report.table(f"flashrec.step() against bare DDP, {options.ranks} ranks", columns, rows)]
    parts: list[tuple[object, ...]] = [
        (name, *[cell for one in sizes for cell in _cells(one, name)]) for name in sizes[0]["parts"]
    ]
    parts.append(
        ("sum", *[cell for one in sizes for cell in (sum(p["us"] for p in one["parts"].values()), "")])
    )
    columns = ("part", *[text for one in sizes for text in (f"{one['size']} µs", "calls")])
    tables.append(report.table("Where the time of a step goes (self times, medians)", columns, parts))
    daemon = ", ".join(f"{one['daemon_cpu_percent']:.2f} % ({one['size']})" for one in sizes)
    tables.append(report.table("The daemon meanwhile, of one core", ("",), [(daemon,)]))
    report.show(figures, tables, as_json=options.json)


def _cells(one: report.Figures, name: str) -> tuple[object, object]:
    part = one["parts"].get(name)
    return (part["us"], part["calls"]) if part else ("", "")


if __name__ == "__main__":
    main()
