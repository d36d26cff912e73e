"""Failures before and in the first three steps, where DDP's buckets are not yet what they will be.

Step 0 reduces in the buckets DDP starts with, later steps in those it chose by the order in which gradients
arrived; bits follow from the buckets, so a redo must use the ones an undisturbed run uses.
"""

import pytest

from chaos.faults.kill_at_place import KillAtPlace
from chaos.recipe import Recipe
from chaos.scenario import Scenario

MODELS = {
    "one bucket": {},
    "many buckets": {"model": "deep", "bucket_mb": 0.002},
    "finds unused": {"model": "deep", "bucket_mb": 0.002, "find_unused": True},
    "static graph": {"model": "deep", "bucket_mb": 0.002, "static_graph": True},
}
EARLY = [
    KillAtPlace(1, "forward", 0),
    KillAtPlace(0, "backward", 0),
    KillAtPlace(2, "vote", 0),
    KillAtPlace(1, "forward", 1),
    KillAtPlace(0, "backward", 1),
    KillAtPlace(2, "between", 1),
    KillAtPlace(0, "forward", 2),
    KillAtPlace(1, "apply", 2),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("standby", ["built", "forked"])
def test_first_three_steps(model: str, standby: str, play) -> None:  # type: ignore[no-untyped-def]
    world_size = 4 if model == "many buckets" else 3
    recipe = Recipe(steps=6, standby=standby, **MODELS[model])
    play(Scenario(recipe=recipe, faults=EARLY, world_size=world_size))


@pytest.mark.parametrize("place", ["backward", "voted", "tail"])
def test_only_step_0_fails(place: str, play) -> None:  # type: ignore[no-untyped-def]
    """Nobody has rebuilt its buckets, and nobody but the survivors ever ran step 0."""
    recipe = Recipe(steps=5, standby="built", model="deep", bucket_mb=0.002)
    play(Scenario(recipe=recipe, faults=[KillAtPlace(1, place, 0)]))
