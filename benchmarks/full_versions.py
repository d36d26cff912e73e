"""What full versions cost in the live regime, as often as the budget lets them be sealed.

    python -m benchmarks.full_versions [--sizes small large] [--ranks 2] [--steps 120] [--json]

One job of plain DDP. Each step in which a full version is sealed is compared with the steps just before and after it:
what it takes beyond their median, of wall and of CPU time (all of a rank's threads), means over ranks. That, over the
steps from one full version to the next, is the share of the training's time. The first full version, which also makes
the arena's file, is shown apart.

full, first  what a full version takes, and what the first one did
pace         what a rank holds against the budget: time on its main thread, and CPU time of the sealing thread
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.jobs import run_job
from benchmarks.model import SIZES
from flashrec.pacing import BUDGET

NEIGHBOURS = 2  # on each side


def measure(size: str, ranks: int, steps: int) -> report.Figures:
    """The figures of one model."""
    with tempfile.TemporaryDirectory(prefix="flashrec-bench-") as folder:
        args = ["--size", size, "--steps", steps, "--out", folder]
        with run_job("benchmarks.full_versions_rank", args, ranks=ranks) as job:
            job.wait(3600)
        found = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return {"size": size, **compare(found)}


def compare(found: list[dict[str, Any]]) -> report.Figures:
    """Full steps against their neighbours."""
    series = {
        what: [statistics.mean(values) for values in zip(*(one[what] for one in found), strict=True)]
        for what in ("step_ms", "cpu_ms")
    }
    full = found[0]["full"]
    assert all(one["full"] == full for one in found), "ranks sealed different versions"
    between = [after - before for before, after in itertools.pairwise(full[1:])]
    figures: report.Figures = {
        "full_versions": len(full),
        "every": statistics.median(between),
        "pace_ms": statistics.mean(statistics.median(one["pace_ms"][1:]) for one in found),
        "sealed_mb": statistics.mean(one["owned_bytes"] for one in found) / 1e6,
    }
    for what, values in series.items():
        extra = {version: _beyond(values, full, version) for version in full}
        known = [one for version, one in extra.items() if version != full[0] and one is not None]
        plain = statistics.median(v for step, v in enumerate(values) if step not in full)
        median = statistics.median(known)
        per_step = plain * figures["every"]
        figures[what] = {
            "plain": plain,
            "extra": median,
            "extra_95": report.bootstrap(known),
            "first_extra": extra[full[0]],
            "share_percent": 100 * median / per_step,
            "share_percent_95": [100 * one / per_step for one in report.bootstrap(known)],
            "pairs": len(known),
        }
    return figures


def _beyond(values: list[float], full: list[int], version: int) -> float | None:
    """What the step of a full version takes beyond its neighbours that seal none."""
    near = range(version - NEIGHBOURS, version + NEIGHBOURS + 1)
    beside = [values[step] for step in near if 0 < step < len(values) and step not in full]
    return values[version] - statistics.median(beside) if beside and version < len(values) else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["small", "large"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    about = report.machine()
    sizes = [measure(size, options.ranks, options.steps) for size in options.sizes]
    rows = []
    for one in sizes:
        for what, name in (("step_ms", "step time"), ("cpu_ms", "CPU time")):
            cost = one[what]
            low, high = cost["share_percent_95"]
            rows.append(
                (
                    f"{one['size']}: {name}",
                    f"{cost['plain']:.1f}",
                    f"{cost['extra']:+.1f}",
                    f"{one['every']:.0f}",
                    f"{cost['share_percent']:+.2f} %",
                    f"{low:+.2f} .. {high:+.2f} %",
                    f"{one['pace_ms']:.1f}",
                    f"{cost['first_extra']:+.1f}",
                    cost["pairs"],
                )
            )
    columns = ("", "step", "full", "every", "share", "95 % interval", "pace", "first", "pairs")
    sealed = ", ".join(f"{one['sealed_mb']:.0f} MB ({one['size']})" for one in sizes)
    title = f"Full versions, {options.ranks} ranks, budget {100 * BUDGET:.0f} %, ms; a rank seals {sealed}"
    figures = {"machine": about, "ranks": options.ranks, "budget": BUDGET, "sizes": sizes}
    report.show(figures, [report.table(title, columns, rows)], as_json=options.json)


if __name__ == "__main__":
    main()
