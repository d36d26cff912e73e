"""Losses under every parallelism: what `tests/chaos/test_parallel.py` takes a part of, and the matrix all.

A pipeline's stages wait for one another, so a place is struck when one rank is there; whoever is to die with it
dies wherever it is.
"""

from collections.abc import Iterator
from typing import Any

from chaos.faults.base import Fault
from chaos.faults.kill_in_recovery import KillInRecovery
from chaos.faults.kill_with import KillWith
from chaos.recipe import Recipe
from chaos.scenario import Scenario

WORLD_SIZE = 4
DEADLINE_S = 300.0
PLACES = ("forward", "backward", "finish", "sealed", "seal", "vote", "voted", "apply", "tail", "between")
LOSSES = {"rank": 1, "two ranks": 2, "all ranks": WORLD_SIZE}
STAGES = ("build", "rehearsal forward", "rehearsal backward", "install", "pull", "pulled", "form", "formed")

Kind = dict[str, Any]
KINDS: dict[str, Kind] = {
    "ddp": {"parallel": "ddp", "survive": "all-ranks"},
    "zero": {"parallel": "zero"},
    "fsdp": {"parallel": "fsdp"},
    "hsdp": {"parallel": "hsdp"},
    "tp": {"parallel": "tp"},
    "pp": {"parallel": "pp"},
    "tp+fsdp": {"parallel": "tp+fsdp"},
    "pp+fsdp": {"parallel": "pp+fsdp"},
}
PECULIAR: dict[str, Kind] = {
    "ddp, bfloat16, experts": {
        "parallel": "ddp",
        "survive": "all-ranks",
        "sizes": ("mixed_precision", "moe"),
    },
    "zero, uneven, frozen": {"parallel": "zero", "sizes": ("uneven", "frozen")},
    "fsdp, uneven, frozen": {"parallel": "fsdp", "sizes": ("uneven", "frozen")},
    "fsdp, bfloat16, experts": {"parallel": "fsdp", "sizes": ("mixed_precision", "moe")},
    "hsdp, uneven, experts": {"parallel": "hsdp", "sizes": ("uneven", "moe")},
    "tp, uneven, experts": {"parallel": "tp", "sizes": ("uneven", "moe")},
    "pp, tied": {"parallel": "pp", "sizes": ("tied",)},
    "pp, gpipe, experts": {"parallel": "pp", "schedule": "gpipe", "sizes": ("moe",)},
    "pp, interleaved, frozen": {"parallel": "pp", "schedule": "interleaved", "sizes": ("frozen",)},
    "tp+fsdp, uneven, bfloat16": {"parallel": "tp+fsdp", "sizes": ("uneven", "mixed_precision")},
    "pp+fsdp, tied, uneven": {"parallel": "pp+fsdp", "sizes": ("tied", "uneven")},
    "pp+fsdp, interleaved, experts": {"parallel": "pp+fsdp", "schedule": "interleaved", "sizes": ("moe",)},
}


def scenario(kind: Kind, faults: list[Fault]) -> Scenario:
    steps = max(getattr(fault, "step", 0) for fault in faults) + 3
    recipe = Recipe(steps=steps, standby="forked", **kind)
    return Scenario(recipe=recipe, faults=faults, world_size=WORLD_SIZE, deadline_s=DEADLINE_S)


def kill(first: int, number: int, place: str, step: int) -> KillWith:
    """`first` and the `number` - 1 ranks after it."""
    ranks = [(first + offset) % WORLD_SIZE for offset in range(number)]
    return KillWith(ranks[0], place, step, tuple(ranks[1:]))


def sample(index: int) -> list[Fault]:
    """One of each kind of loss; with consecutive indices each place meets each loss."""
    return [
        kill(index + turn, number, PLACES[(index + 3 * turn) % len(PLACES)], 2 + 2 * turn)
        for turn, number in enumerate(LOSSES.values())
    ]


def scenarios(kinds: list[str]) -> Iterator[tuple[str, Scenario]]:
    """Every place, for each loss, and then losses during recoveries. `kinds`: prefixes of names; none: all."""
    for name, kind in (KINDS | PECULIAR).items():
        if kinds and not any(name == one or name.startswith(f"{one},") for one in kinds):
            continue
        for loss, number in LOSSES.items():
            faults: list[Fault] = [
                kill(turn, number, place, 2 + 2 * turn) for turn, place in enumerate(PLACES)
            ]
            yield f"{name}: {loss}", scenario(kind, faults)
        seconds = [(1, stage) for stage in STAGES] + [(2, stage) for stage in ("form", "formed")]
        yield (
            f"{name}: during recoveries",
            scenario(
                kind,
                [
                    KillInRecovery(1, "vote", 2 + 2 * turn, second, stage)
                    for turn, (second, stage) in enumerate(seconds)
                ],
            ),
        )
