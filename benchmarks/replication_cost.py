"""What replicas on another node cost a step, beside flashrec without replicas and bare torch in the same processes.

    python -m benchmarks.replication_cost [--cases encrypted plain capped frozen live] [--sizes 16MB 128MB]
                                          [--intervals 1 4] [--rounds 8] [--json]

Two nodes of this machine with a rank each, so bytes go through the loopback interface. Three sides by turns, blocks of
steps: bare torch; flashrec with nobody who keeps replicas; and with the other node as keeper. Costs are medians over
rounds of what two neighbouring blocks say.

encrypted  FSDP2, the sealed regime: every version is replicated. `plain`: --bulk plain
capped     at most --cap MB/s; `frozen`: as encrypted, and only a tenth of the state changes (a frozen embedding)
live       DDP, the live regime: full versions are replicated, one every --intervals steps

sent       MB that came to the keeper's node in a step, of the MB that a rank seals
rank       CPU time of a step on all threads of a rank beyond that without replicas; shards: that of a node's shard
           process; per GB: both of all nodes, over what was sent
waited     of a step, beyond that without replicas, at the gate for the keeper
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cluster_jobs import run_on_nodes
from benchmarks.model import SIZES

SIDES = ("bare", "alone", "replicas")
CASES = ("encrypted", "plain", "capped", "frozen", "live")
RANKS = 2
DEADLINE_S = 3600.0


def measure(
    case: str, size: str, rounds: int, block_steps: int, cap_mbps: float, interval: int | None
) -> report.Figures:
    options: list[str] = []
    if case == "plain":
        options += ["--bulk", "plain"]
    if case == "capped":
        options += ["--replica-mbps", str(cap_mbps)]
    with tempfile.TemporaryDirectory(prefix="flashrec-bench-") as folder:
        args = ["--size", size, "--rounds", rounds, "--block-steps", block_steps, "--out", folder]
        args += ["--parallel", "ddp" if case == "live" else "fsdp"]
        if case == "frozen":
            args.append("--frozen")
        if interval is not None:
            args += ["--seal-every", interval]
        with run_on_nodes(
            "benchmarks.replication_cost_rank",
            args,
            ranks=RANKS,
            replicas=1,
            standbys=0,
            suspect_after_s=20.0,
            options=options,
        ) as (job, _):
            job.wait(DEADLINE_S)
        found = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    name = f"{case}, {size}" + ("" if interval is None else f", every {interval}")
    return {"case": case, "size": size, "interval": interval, "name": name, **compare(found)}


def compare(found: list[dict[str, Any]]) -> report.Figures:
    """Blocks are means over ranks; of shard processes and bytes, which rank 0 has read, sums over nodes."""

    def series(side: str, what: str) -> list[float]:
        return [
            statistics.mean(values)
            for values in zip(*([block[what] for block in one[side]] for one in found), strict=True)
        ]

    def of_nodes(side: str, what: str) -> list[float]:
        return [block[what] for block in found[0][side]]

    figures: report.Figures = {"state_mb": statistics.mean(one["owned_bytes"] for one in found) / 1e6}
    for what in ("step_ms", "cpu_ms"):
        sides = {side: series(side, what) for side in SIDES}
        figures[what] = {side: statistics.median(values) for side, values in sides.items()}
        for base in SIDES[:-1]:
            over = [100 * (b / a - 1) for a, b in zip(sides[base], sides["replicas"], strict=True)]
            figures[what][f"over_{base}_percent"] = statistics.median(over)
            figures[what][f"over_{base}_percent_95"] = report.bootstrap(over)
    rank_ms = statistics.median(
        b - a for a, b in zip(series("alone", "cpu_ms"), series("replicas", "cpu_ms"), strict=True)
    )
    shards_ms = statistics.median(
        b - a for a, b in zip(of_nodes("alone", "shards_ms"), of_nodes("replicas", "shards_ms"), strict=True)
    )
    sent = statistics.median(of_nodes("replicas", "received_bytes"))
    figures["replication"] = {
        "sent_mb": sent / 1e6 / len(found),
        "rank_cpu_ms": rank_ms,
        "shards_cpu_ms": shards_ms / len(found),
        "waited_ms": statistics.median(
            b - a for a, b in zip(series("alone", "waited_ms"), series("replicas", "waited_ms"), strict=True)
        ),
        "rank_cpu_s_per_gb": 1e6 * rank_ms * len(found) / sent if sent else 0.0,
        "shards_cpu_s_per_gb": 1e6 * shards_ms / sent if sent else 0.0,
        "rounds": len(found[0]["bare"]),
    }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["16MB", "128MB"])
    parser.add_argument("--intervals", type=int, nargs="+", default=[1, 4], help="of the live regime")
    parser.add_argument("--cap", type=float, default=100.0, metavar="MB/s")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block-steps", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    about = report.machine()
    found = [
        measure(case, size, options.rounds, options.block_steps, options.cap, interval)
        for case in options.cases
        for size in options.sizes
        for interval in (options.intervals if case == "live" else [None])
    ]
    report.show(
        {"machine": about, "cap_mbps": options.cap, "cases": found}, _tables(found), as_json=options.json
    )


def _tables(found: list[report.Figures]) -> list[report.Table]:
    costs, moved = [], []
    for one in found:
        for what, name in (("step_ms", "step"), ("cpu_ms", "CPU")):
            cost = one[what]
            over = [
                "{:+.1f} % ({:+.1f} .. {:+.1f})".format(
                    cost[f"over_{base}_percent"], *cost[f"over_{base}_percent_95"]
                )
                for base in SIDES[:-1]
            ]
            costs.append((f"{one['name']}: {name}", *(f"{cost[side]:.1f}" for side in SIDES), *over))
        part = one["replication"]
        moved.append(
            (
                one["name"],
                *(f"{value:.1f}" for value in (one["state_mb"], part["sent_mb"])),
                *(f"{part[what]:.1f}" for what in ("waited_ms", "rank_cpu_ms", "shards_cpu_ms")),
                *(f"{part[what]:.2f}" for what in ("rank_cpu_s_per_gb", "shards_cpu_s_per_gb")),
            )
        )
    columns = ("", "bare ms", "alone", "replicas", "over bare", "over alone")
    return [
        report.table(f"A step with replicas on another node, {RANKS} ranks", columns, costs),
        report.table(
            "What replication takes of a step",
            ("", "MB", "sent", "waited", "rank ms", "shards", "rank s/GB", "shards"),
            moved,
        ),
    ]


if __name__ == "__main__":
    main()
