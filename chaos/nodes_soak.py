"""Many losses of nodes in one job: what survives them must not grow. `python -m chaos.soak --nodes` runs it.

The leader's node is never lost: its daemon, its shard process and its rank are read before every loss, when all is
quiet, and after the last.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.faults.lose_nodes_in_a_row import LoseNodesInARow
from chaos.nodes_job import NodesJob
from chaos.recipe import Recipe
from chaos.scenario import Outcome, Scenario, run
from flashrec.cli.demo.nodes.node import children_of

PER_LOSS_S = 30.0
# What grows by the loss and may: a line of history (the status shows the last thousand recoveries), the name of a node
# that is no more. What a leak would leave (a rank's buffers, a connection, a thread's stack) is far more.
WARM_UP = 10
"""So many losses teach an allocator what a recovery needs: a rank's memory grows by 6 MB in the first eight."""
MAX_KIB_PER_LOSS = 24.0
MAX_GROWTH_KIB = 2 * 1024
"""Below it nothing is said: an allocator's whims."""
COUNTED = ("threads", "descriptors", "sockets")


@dataclass(frozen=True, slots=True)
class Vitals:
    """Of one process. Memory is its own, not what it shares with others."""

    memory_kib: int
    threads: int
    descriptors: int
    sockets: int

    @staticmethod
    def of(pid: int) -> Vitals:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        links = []
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
            except FileNotFoundError:  # closed meanwhile
                continue
        sockets = sum(link.startswith("socket:") for link in links)
        return Vitals(int(status["RssAnon"].split()[0]), int(status["Threads"]), len(links), sockets)


@dataclass
class Readings:
    """Before each loss, and after the last."""

    of: dict[str, list[Vitals]] = field(default_factory=dict)
    shared_kib: list[int] = field(default_factory=list)
    """Shared memory of all of the job's nodes."""
    shared_files: list[int] = field(default_factory=list)
    status_kib: list[float] = field(default_factory=list)
    """The status document, which names every node that ever took part."""

    def take(self, job: NodesJob, status: dict[str, Any]) -> None:
        daemon = job.cluster.process(job.cluster.leader).pid
        pids = {"daemon": daemon, "rank 0": status["ranks"][0]["pid"], "shards": _shard_server(daemon)}
        for name, pid in pids.items():
            self.of.setdefault(name, []).append(Vitals.of(pid))
        files = [
            path.stat()
            for memory in {node.memory for node in job.cluster.nodes}
            for directory in memory.glob(f"*-{status['job']}-*")
            for path in directory.rglob("*")
            if path.is_file()
        ]
        self.shared_kib.append(sum(one.st_blocks for one in files) // 2)
        self.shared_files.append(len(files))
        self.status_kib.append(len(repr(status)) / 1024)

    def grown(self) -> list[str]:
        """What grew, in words."""
        found = []
        for name, vitals in self.of.items():
            memory = [float(one.memory_kib) for one in vitals]
            first, last = quarters(memory)
            growth = last - first
            if growth > MAX_GROWTH_KIB and growth / _apart(memory) > MAX_KIB_PER_LOSS:
                found.append(f"{name}: memory grew from {first:.0f} to {last:.0f} KiB")
            for what in COUNTED:
                first, last = quarters([float(getattr(one, what)) for one in vitals])
                if last > first + 2:
                    found.append(f"{name}: {what} grew from {first:.0f} to {last:.0f}")
        first, last = quarters([float(one) for one in self.shared_kib])
        if last > 1.1 * first + 256:
            found.append(f"shared memory grew from {first:.0f} to {last:.0f} KiB")
        first, last = quarters([float(one) for one in self.shared_files])
        if last > first + 3:
            found.append(f"files in shared memory grew from {first:.0f} to {last:.0f}")
        return found

    def table(self) -> list[str]:
        """For a person: medians of the first and of the last quarter after the warm-up."""
        lines = [f"{'':28}{'first quarter':>14}{'last quarter':>14}{'a loss':>10}"]
        rows: list[tuple[str, list[float], str]] = []
        for name, vitals in self.of.items():
            rows.append((f"{name}, memory, KiB", [float(one.memory_kib) for one in vitals], ".1f"))
            rows += [
                (f"{name}, {what}", [float(getattr(one, what)) for one in vitals], ".2f") for what in COUNTED
            ]
        rows.append(("shared memory, KiB", [float(one) for one in self.shared_kib], ".1f"))
        rows.append(("files in it", [float(one) for one in self.shared_files], ".2f"))
        rows.append(("status document, KiB", self.status_kib, ".2f"))
        for name, values, digits in rows:
            first, last = quarters(values)
            each = (last - first) / _apart(values)
            lines.append(f"{name:28}{first:14.0f}{last:14.0f}{each:>+10{digits}}")
        return lines


def quarters(values: list[float]) -> tuple[float, float]:
    """Medians of the first and of the last quarter, of what follows the warm-up."""
    values = values[min(WARM_UP, len(values) // 3) :]
    quarter = max(1, len(values) // 4)
    return statistics.median(values[:quarter]), statistics.median(values[-quarter:])


def _apart(values: list[float]) -> float:
    """Losses between the middles of the quarters that are compared."""
    return 0.75 * (len(values) - min(WARM_UP, len(values) // 3))


def soak_nodes(
    losses: int, spare_nodes: int, seed: int, folder: Path
) -> tuple[Outcome, Readings, LoseNodesInARow]:
    """One job of two nodes with a rank each, which loses as many."""
    readings = Readings()
    fault = LoseNodesInARow(losses, seed, readings.take, say=True)
    scenario = Scenario(
        recipe=Recipe(steps=fault.steps, standby="forked", parallel="fsdp", paced=True),
        faults=[fault],
        world_size=2,
        nodes=2,
        spare_nodes=spare_nodes,
        replicas=1,
        deadline_s=60 + PER_LOSS_S * losses,
    )
    return run(scenario, folder), readings, fault


def _shard_server(daemon: int) -> int:
    for pid in children_of(daemon):
        if b"flashrecd.shards" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("the leader's daemon has no shard server")
