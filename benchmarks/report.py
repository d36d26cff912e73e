"""What every benchmark says besides its figures: the machine, its load, the command; and how sure a ratio is."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]


def machine() -> Figures:
    """Where and when the figures were taken, and how busy the machine was just before."""
    import torch

    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "load_before": round(os.getloadavg()[0], 2),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
    }


def _module() -> str:
    path = Path(sys.argv[0])
    return f"{path.parent.name}.{path.stem}"


def spread(values: Sequence[float]) -> Figures:
    """Median, quartile range and extremes."""
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "median": statistics.median(ordered),
        "p10": _quantile(ordered, 0.1),
        "p90": _quantile(ordered, 0.9),
        "max": ordered[-1],
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def bootstrap(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = statistics.median,
    *,
    rounds: int = 2000,
    share: float = 0.95,
) -> tuple[float, float]:
    """The percentile interval of `statistic` over `values`, resampled with a fixed seed."""
    draw = random.Random(0)
    found = sorted(statistic(draw.choices(values, k=len(values))) for _ in range(rounds))
    return _quantile(found, (1 - share) / 2), _quantile(found, (1 + share) / 2)


def show(figures: Figures, tables: Sequence[Table], *, as_json: bool) -> None:
    """Print the figures: one JSON object, or tables and a line about the machine."""
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    console = Console()
    for table in tables:
        console.print(table)
    about = figures["machine"]
    console.print(
        f"{about['command']}\n{about['cpu']}, {about['cores']} cores, Python {about['python']}, "
        f"torch {about['torch']}, {about['date']}; load average before: {about['load_before']}",
        style="dim",
        highlight=False,
    )


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table whose first column is text and whose other columns are figures."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
    for row in rows:
        made.add_row(*[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row])
    return made
