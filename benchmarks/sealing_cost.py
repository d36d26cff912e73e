"""What the sealed regime costs a step, beside bare FSDP2 on gloo in the same processes, by the size of the state.

    python -m benchmarks.sealing_cost [--sizes 8MB 128MB 512MB] [--ranks 2 1] [--pairs 10] [--json]

As `step_cost`: blocks of steps by turns, the medians over pairs of neighbouring blocks and a bootstrap interval.
With as many ranks as there are cores, sealing takes its time from the step; with fewer, as in a job that has
cores to spare, it runs beside it.

waited      in SealReport's words: how long the main thread was at the gate with what the thread had not sealed
begin       looking for what changed, making readers, handing over; private, vote: as in every regime
thread      CPU time of the sealing thread
"""

from __future__ import annotations

import argparse

from benchmarks import report
from benchmarks.model import SIZES
from benchmarks.step_cost import measure

PARTS = {
    "begin": ("sealing: begin", "sealing: layout and readers"),
    "at the gate": ("sealing: what is left at the gate",),
    "private": (
        "seal: private",
        "seal: encode",
        "seal: write",
        "seal: data position",
        "private state: snapshot",
        "private state: comparison",
    ),
    "vote": ("gate: vote", "gate: agreement, with waiting"),
    "the rest": (),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["8MB", "128MB", "512MB"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks per size")
    parser.add_argument("--block-steps", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    about = report.machine()
    found = [
        {"ranks": ranks, **measure(size, ranks, options.pairs, options.block_steps, "fsdp")}
        for ranks in options.ranks
        for size in options.sizes
    ]
    for one in found:
        one["summary_us"] = _summary(one)
    report.show({"machine": about, "sizes": found}, _tables(found), as_json=options.json)


def _summary(one: report.Figures) -> dict[str, float]:
    """Microseconds of a step on the main thread, by what for."""
    times = {part: found["us"] for part, found in one["parts"].items()}
    summary = {what: sum(times.pop(part, 0.0) for part in parts) for what, parts in PARTS.items()}
    summary["the rest"] = sum(times.values())
    return summary


def _name(one: report.Figures) -> str:
    return f"{one['ranks']} x {one['sealing']['owned_bytes'] / 1e6:.0f} MB"


def _tables(found: list[report.Figures]) -> list[report.Table]:
    costs, wheres = [], []
    for one in found:
        for what, name in (("step_ms", "step time"), ("cpu_ms", "CPU time")):
            cost = one[what]
            low, high = cost["overhead_percent_95"]
            costs.append(
                (
                    f"{_name(one)}: {name}",
                    f"{cost['bare']:.1f}",
                    f"{cost['flashrec']:.1f}",
                    f"{cost['overhead_percent']:+.1f} %",
                    f"{low:+.1f} .. {high:+.1f} %",
                    f"{cost['overhead_us'] / 1000:+.1f}",
                )
            )
        sealing = one["sealing"]
        memory = 100 * (sealing["arena_bytes"] / sealing["held_bytes"] - 1)
        wheres.append(
            (
                _name(one),
                *(f"{one['summary_us'][what] / 1000:.2f}" for what in PARTS),
                f"{sealing['waited_ms']:.2f}",
                f"{sealing['thread_cpu_ms']:.1f}",
                f"{memory:.2f}",
            )
        )
    columns = ("", "bare ms", "flashrec ms", "cost", "95 % interval", "ms a step")
    return [
        report.table("The sealed regime against bare FSDP2, ranks x state of each", columns, costs),
        report.table(
            "Where the time of a step goes: main thread, sealing thread, ms; arena's memory above its content, %",
            ("", *PARTS, "waited", "thread CPU", "memory +%"),
            wheres,
        ),
    ]


if __name__ == "__main__":
    main()
