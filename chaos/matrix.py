"""Every place x standby depth x rank x trait: more than the test-suite has time for.

python -m chaos.matrix [--traits] [--ranks N] [--rounds N]
python -m chaos.matrix --parallel [KIND ...] [--rounds N]      instead, every place x loss x parallelism
python -m chaos.matrix --nodes [KIND ...] [--rounds N]         instead, every place x loss of a node x parallelism

Prints a line for each job, and the objections to it, if any; the exit code is the number of jobs objected to.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from chaos import nodes, parallel
from chaos.faults.base import Fault
from chaos.faults.kill_at_place import KillAtPlace
from chaos.faults.kill_in_recovery import KillInRecovery
from chaos.job import JobStuck
from chaos.recipe import Recipe
from chaos.reference import Reference
from chaos.scenario import Scenario, objections, run

PLACES = ("forward", "backward", "seal", "vote", "voted", "apply", "tail", "between")
STAGES = ("install", "pull", "pulled", "form", "formed")
DEPTHS = {"built": ("built", 1), "two built": ("built", 2), "forked": ("forked", 1), "none": ("forked", 0)}
TRAITS = {
    "plain": {},
    "scheduler, ema, scaler": {"extras": ("scheduler", "ema", "scaler"), "optimizer": "sgd"},
    "averaged model": {"extras": ("averaged",), "model": "norm"},
    "gradients in buckets": {"bucket_view": True, "zero_grad": "keep", "model": "deep", "bucket_mb": 0.002},
    "prelude, sections": {"prelude": True, "section_every": 2},
    "micro-batches": {"micro": 2, "model": "norm"},
    "micro-batches, all reduced": {"micro": 2, "no_sync": False},
    "loader workers": {"workers": 2},
    "own loop": {"loop": "own", "model": "norm"},
    "decorated": {"loop": "decorated"},
    "closure": {"optimizer": "closure"},
    "two optimizers": {"optimizer": "two", "objects": True},
    "zeroed at the start": {"zero_grad": "start"},
    "zeroed in place": {"zero_grad": "keep", "extras": ("scaler",)},
    "never zeroed": {"zero_grad": "never"},
    "exceptions swallowed": {"swallow": True, "objects": True},
    "many buckets": {"model": "deep", "bucket_mb": 0.002},
    "finds unused": {"model": "deep", "bucket_mb": 0.002, "find_unused": True},
    "static graph": {"model": "deep", "bucket_mb": 0.002, "static_graph": True},
}


def scenarios(world_size: int, with_traits: bool) -> Iterator[tuple[str, Scenario]]:
    for depth, trait in product(DEPTHS, TRAITS if with_traits else ("plain",)):
        standby, standbys = DEPTHS[depth]
        for kind, faults in {"places": _places(world_size, trait), "recoveries": _recoveries(depth)}.items():
            steps = max(getattr(fault, "step", 0) for fault in faults) + 3
            # Without full versions, for where one is at hand nobody has to serve.
            recipe = Recipe(steps=steps, standby=standby, seal_every=0, **TRAITS[trait])  # type: ignore[arg-type]
            yield (
                f"{depth}, {trait}, {kind}",
                Scenario(
                    recipe=recipe, faults=faults, world_size=world_size, standbys=standbys, deadline_s=300
                ),
            )


def _places(world_size: int, trait: str) -> list[Fault]:
    # With a closure the script's hook before the optimizer comes before the gate, not after it.
    places = [place for place in PLACES if place != "apply" or trait != "closure"]
    ranks = sorted({0, 1, world_size - 1})
    return [
        KillAtPlace(rank, place, 2 + 2 * number)
        for number, (place, rank) in enumerate(product(places, ranks))
    ]


def _recoveries(depth: str) -> list[Fault]:
    stages = STAGES if depth != "none" else ("build", "rehearsal backward", *STAGES)
    seconds = [(1, stage) for stage in stages] + [(0, stage) for stage in ("serve", "form", "formed")]
    return [
        KillInRecovery(1, "backward", 2 + 2 * number, second, stage)
        for number, (second, stage) in enumerate(seconds)
    ]


def chosen(options: argparse.Namespace) -> Iterator[tuple[str, Scenario]]:
    if options.nodes is not None:
        return nodes.scenarios(options.nodes)
    if options.parallel is not None:
        return parallel.scenarios(options.parallel)
    return scenarios(options.ranks, options.traits)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.matrix", description=__doc__)
    parser.add_argument(
        "--traits", action="store_true", help="every trait of a recipe, not the plain one only"
    )
    parser.add_argument(
        "--parallel", nargs="*", metavar="KIND", help="losses under every parallelism, or these"
    )
    parser.add_argument(
        "--nodes", nargs="*", metavar="KIND", help="losses of nodes under every parallelism, or these"
    )
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="flashrec-r-") as kept, Reference(Path(kept)) as reference:
        for _ in range(options.rounds):
            for name, scenario in chosen(options):
                began = time.monotonic()
                with tempfile.TemporaryDirectory(prefix="flashrec-c-") as folder:
                    try:
                        found = objections(run(scenario, Path(folder)), reference)
                    except JobStuck as stuck:
                        found = [str(stuck)]
                print(f"{time.monotonic() - began:6.1f} s  {'no' if found else 'ok'}  {name}", flush=True)
                for objection in found:
                    print(f"    {objection}", flush=True)
                failed += bool(found)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 99))
