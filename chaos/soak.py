"""Many recoveries in one job: what survives it must not grow.

python -m chaos.soak [--recoveries N] [--ranks N] [--standby built|forked|none] [--seed N]

Rank 0 is never struck: its memory, threads and descriptors, and the daemon's, are read after every recovery.
The others are killed in a place and step drawn by the seed. At the end every bit is compared with an
undisturbed run, as ever.

python -m chaos.soak --nodes [LOSSES] [--spares N] [--seed N]

The same with whole nodes: one is lost with its memory, its rank goes on on a spare, its daemon is started again and
becomes a spare (`chaos.nodes_soak`).
"""

import argparse
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from chaos.cues import Cue
from chaos.faults.base import Evidence, Fault
from chaos.faults.kill_at_place import KillAtPlace
from chaos.job import Job
from chaos.nodes_soak import soak_nodes
from chaos.recipe import Recipe
from chaos.reference import Reference
from chaos.scenario import Outcome, Scenario, objections, run

PLACES = ("forward", "backward", "seal", "vote", "voted", "apply", "tail", "between")
DEPTHS = {"built": ("built", 1), "forked": ("forked", 1), "none": ("forked", 0)}
# Of 200 recoveries. What a process keeps for each (a line of history, say) is bytes; a leak of one export, one
# thread's stack or one socket's buffers per recovery is far more.
MAX_GROWTH_KIB = 8 * 1024
WARM_UP = 0.25


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one process."""

    memory_kib: int
    num_threads: int
    num_descriptors: int

    @staticmethod
    def of(pid: int) -> "Reading":
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        # Not the pages it shares with others (the fork server's, files in shared memory), but its own.
        memory = int(status["RssAnon"].split()[0])
        return Reading(memory, int(status["Threads"]), len(list(Path(f"/proc/{pid}/fd").iterdir())))


@dataclass
class Growth(Fault):
    """No fault: reads the processes that must not grow, once after each recovery."""

    name: str = "growth"
    readings: dict[str, list[Reading]] = field(default_factory=lambda: {"daemon": [], "rank 0": []})
    num_files: list[int] = field(default_factory=list)
    """In the job's shared memory."""

    def cues(self) -> list[Cue]:
        return []

    def poll(self, job: Job) -> None:
        if len(job.happened("recovered")) <= len(self.num_files):
            return
        pid = job.pid(0)
        if pid is not None:
            self.readings["daemon"].append(Reading.of(job.daemon.pid))
            self.readings["rank 0"].append(Reading.of(pid))
            self.num_files.append(sum(1 for path in job.shm_dir.rglob("*") if path.is_file()))

    def missing(self, evidence: Evidence) -> str | None:
        grown = [line for name, readings in self.readings.items() for line in _grown(name, readings)]
        files = _halves([float(number) for number in self.num_files])
        if files[1] > files[0] + 3:
            grown.append(f"files in shared memory grew from {files[0]:.0f} to {files[1]:.0f}")
        return "; ".join(grown) or None

    @property
    def num_recoveries(self) -> int:
        return 0


def _halves(values: list[float]) -> tuple[float, float]:
    """Medians of the first and the last third of what follows the warm-up."""
    settled = values[int(len(values) * WARM_UP) :]
    third = max(1, len(settled) // 3)
    return statistics.median(settled[:third] or [0.0]), statistics.median(settled[-third:] or [0.0])


def _grown(name: str, readings: list[Reading]) -> list[str]:
    grown = []
    memory = _halves([float(reading.memory_kib) for reading in readings])
    if memory[1] - memory[0] > MAX_GROWTH_KIB:
        grown.append(f"{name}: memory grew from {memory[0]:.0f} to {memory[1]:.0f} KiB")
    for what in ("num_threads", "num_descriptors"):
        numbers = _halves([float(getattr(reading, what)) for reading in readings])
        # A recovery under way may hold some more; a leak holds more each time.
        if numbers[1] > numbers[0] + 2:
            grown.append(f"{name}: {what} grew from {numbers[0]:.0f} to {numbers[1]:.0f}")
    return grown


def soak(recoveries: int, world_size: int, depth: str, seed: int, folder: Path) -> tuple[Outcome, Growth]:
    """One job with as many recoveries."""
    rng = random.Random(seed)
    faults = [
        KillAtPlace(rng.randrange(1, world_size), rng.choice(PLACES), 3 + 2 * number)
        for number in range(recoveries)
    ]
    growth = Growth()
    standby, standbys = DEPTHS[depth]
    recipe = Recipe(steps=3 + 2 * recoveries + 2, standby=standby, extras=("scheduler",))
    scenario = Scenario(
        recipe=recipe,
        faults=[*faults, growth],
        world_size=world_size,
        standbys=standbys,
        deadline_s=60 + 10 * recoveries,
    )
    return run(scenario, folder), growth


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.soak", description=__doc__)
    parser.add_argument("--recoveries", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--standby", choices=tuple(DEPTHS), default="built")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--nodes", type=int, nargs="?", const=200, metavar="LOSSES", help="lose nodes instead"
    )
    parser.add_argument("--spares", type=int, default=1, help="of nodes")
    options = parser.parse_args()
    if options.nodes is not None:
        return _nodes(options.nodes, options.spares, options.seed)
    with (
        tempfile.TemporaryDirectory(prefix="flashrec-r-") as kept,
        tempfile.TemporaryDirectory(prefix="flashrec-c-") as folder,
        Reference(Path(kept)) as reference,
    ):
        outcome, growth = soak(options.recoveries, options.ranks, options.standby, options.seed, Path(folder))
        found = objections(outcome, reference)
    for name, readings in growth.readings.items():
        for label, reading in (("first", readings[0]), ("last", readings[-1])):
            print(
                f"{name:8} {label:5} {reading.memory_kib:8} KiB {reading.num_threads:3} threads "
                f"{reading.num_descriptors:4} descriptors"
            )
    print(f"{len(growth.num_files)} recoveries; files in shared memory: {growth.num_files[-1]}")
    print("\n".join(found) or "every bit as in the undisturbed run, nothing grew")
    return 1 if found else 0


def _nodes(losses: int, spares: int, seed: int) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="flashrec-r-") as kept,
        tempfile.TemporaryDirectory(prefix="flashrec-c-") as folder,
        Reference(Path(kept)) as reference,
    ):
        outcome, readings, fault = soak_nodes(losses, spares, seed, Path(folder))
        found = [*readings.grown(), *objections(outcome, reference)]
    print("\n" + "\n".join(readings.table()))
    print(
        f"{losses} losses, {statistics.median(fault.cycles_s):.1f} s each (median), {sum(fault.cycles_s):.0f} s in all"
    )
    print("\n".join(found) or "every bit as in the undisturbed run, at most a step done again, nothing grew")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
