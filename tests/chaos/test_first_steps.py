"""Failures before and in the first three steps, where DDP's buckets are not yet what they will be.

Step 0 reduces in the buckets DDP starts with, later steps in those it chose by the order in which gradients
arrived; bits follow from the buckets, so a redo must use the ones an undisturbed run uses.
"""

import pytest

from chaos.faults.kill_at_place import KillAtPlace
from chaos.recipe import Recipe
from chaos.scenario import Scenario, run

DEEP = {"model": "deep", "bucket_mb": 0.002}
MODELS = {
    "one bucket": {},
    "many buckets": DEEP,
    "finds unused": {**DEEP, "find_unused": True},
    "static graph": {**DEEP, "static_graph": True},
    "micro-batches": {**DEEP, "micro": 2, "no_sync": False},
}
EARLY = (
    KillAtPlace(1, "forward", 0),
    KillAtPlace(0, "backward", 0),
    KillAtPlace(2, "vote", 0),
    KillAtPlace(1, "forward", 1),
    KillAtPlace(0, "backward", 1),
    KillAtPlace(2, "between", 1),
    KillAtPlace(0, "forward", 2),
    KillAtPlace(1, "apply", 2),
)


@pytest.mark.parametrize(
    ("model", "standby"),
    [
        ("one bucket", "forked"),
        ("many buckets", "built"),
        ("finds unused", "built"),
        ("static graph", "built"),
        ("micro-batches", "forked"),
    ],
)
def test_first_three_steps(model: str, standby: str, play) -> None:  # type: ignore[no-untyped-def]
    world_size = 4 if model == "many buckets" else 3
    recipe = Recipe(steps=6, standby=standby, **MODELS[model])
    # A static graph is the one case with three stages of buckets; the second lasts for one step.
    faults = [f for f in EARLY if model != "static graph" or f.step != 1 or f.place == "between"]
    play(Scenario(recipe=recipe, faults=faults, world_size=world_size))


def test_a_static_graph_cannot_go_back_to_its_second_step(folder) -> None:  # type: ignore[no-untyped-def]
    recipe = Recipe(steps=4, **MODELS["static graph"])
    outcome = run(Scenario(recipe=recipe, faults=[KillAtPlace(1, "backward", 1)]), folder)
    assert outcome.ended.code == 1
    assert "static_graph=True" in outcome.ended.reason
    assert "step 1" in outcome.ended.reason


@pytest.mark.parametrize("place", ["backward", "tail"])
def test_only_step_0_fails(place: str, play) -> None:  # type: ignore[no-untyped-def]
    """Nobody has rebuilt its buckets, and nobody but the survivors ever ran step 0."""
    recipe = Recipe(steps=5, standby="built", model="deep", bucket_mb=0.002)
    play(Scenario(recipe=recipe, faults=[KillAtPlace(1, place, 0)]))
