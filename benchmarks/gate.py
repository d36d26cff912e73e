"""The gate alone, by number of ranks: an all-reduce on gloo against shared memory.

    python -m benchmarks.gate [--ranks 2 4 8] [--rounds 2000] [--json]

Ranks do nothing but agree, in alternating blocks of either kind; a block's first agreement, which waits for
whoever is late, is not counted. Times are wall time of one agreement (median over all ranks and rounds) and
CPU time on all threads of a rank. `latency` leaves a pause of half a millisecond before each agreement, as
between two steps: then ranks are asleep when the last one votes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import report

DEADLINE_S = 120
BLOCKS = 10
PAUSE_S = 0.0005


def rank_main(rank: int, world_size: int, folder: Path, rounds: int, line: Connection) -> None:
    """One rank: both gates, agreeing by turns; tells (kind, pause, wall ns of each, CPU ns per agreement)."""
    import torch
    import torch.distributed as dist

    from flashrec.gate import AllReduceGate, Gate, SharedMemoryGate
    from flashrec.groups import GroupSet

    torch.set_num_threads(1)
    groups = GroupSet()
    groups.start(rank, world_size)
    groups.form(dist.FileStore(str(folder / "meeting"), world_size), 1, timeout_s=DEADLINE_S)
    gates: dict[str, Gate] = {
        "all-reduce": AllReduceGate(groups, 1),
        "shared memory": SharedMemoryGate(folder, rank, world_size, 1, timeout_s=DEADLINE_S),
    }
    found: list[tuple[str, bool, list[int], float]] = []
    for block in range(2 * BLOCKS):
        for kind in list(gates) if block % 2 else reversed(gates):
            pause = block >= BLOCKS
            wall, cpu = _block(gates[kind].agree, rounds // BLOCKS, pause)
            found.append((kind, pause, wall, cpu))
    line.send(found)
    for gate in gates.values():
        gate.close()
    groups.close()


def _block(agree: Callable[[list[int]], list[int]], rounds: int, pause: bool) -> tuple[list[int], float]:
    agree([1, 0])
    cpu, wall = time.process_time_ns(), []
    for version in range(rounds):
        if pause:
            time.sleep(PAUSE_S)
        started = time.perf_counter_ns()
        agree([1, version])
        wall.append(time.perf_counter_ns() - started)
    return wall, (time.process_time_ns() - cpu) / rounds


def measure(world_size: int, rounds: int) -> list[report.Figures]:
    """Both gates among `world_size` ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "flashrec.gate"])
    with tempfile.TemporaryDirectory(prefix="flashrec-bench-", dir="/dev/shm") as name:
        lines, processes = [], []
        try:
            for rank in range(world_size):
                mine, theirs = context.Pipe(duplex=False)
                args = (rank, world_size, Path(name), rounds, theirs)
                process = context.Process(target=rank_main, args=args, daemon=True)
                process.start()
                theirs.close()
                lines.append(mine)
                processes.append(process)
            found = [_hear(line) for line in lines]
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
    return [_figures(found, world_size, kind) for kind in ("all-reduce", "shared memory")]


def _hear(line: Connection) -> Any:
    if not line.poll(DEADLINE_S):
        raise TimeoutError("a rank of the gate's benchmark said nothing")
    return line.recv()


def _figures(found: list[Any], world_size: int, kind: str) -> report.Figures:
    figures: report.Figures = {"ranks": world_size, "kind": kind}
    for pause, prefix in ((False, "busy"), (True, "latency")):
        blocks = [b for one in found for b in one if b[0] == kind and b[1] == pause]
        figures[f"{prefix}_us"] = report.spread([ns / 1000 for block in blocks for ns in block[2]])
        figures[f"{prefix}_cpu_us"] = sum(block[3] for block in blocks) / len(blocks) / 1000
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=2000, help="agreements of each kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    about = report.machine()
    gates = [one for ranks in options.ranks for one in measure(ranks, options.rounds)]
    rows = [
        (
            f"{one['ranks']} ranks, {one['kind']}",
            one["busy_us"]["median"],
            one["busy_us"]["p90"],
            one["busy_cpu_us"],
            one["latency_us"]["median"],
            one["latency_us"]["p90"],
            one["latency_cpu_us"],
        )
        for one in gates
    ]
    columns = ("", "busy µs", "90 %", "CPU µs", "latency µs", "90 %", "CPU µs")
    tables = [report.table("The gate alone, one agreement", columns, rows)]
    report.show({"machine": about, "gates": gates}, tables, as_json=options.json)


if __name__ == "__main__":
    main()
