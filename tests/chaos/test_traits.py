"""What scripts do, and what a recovery must cope with: one recipe each, killed in several places."""

import pytest

from chaos.faults.kill_at_place import KillAtPlace
from chaos.faults.kill_in_recovery import KillInRecovery
from chaos.recipe import Recipe
from chaos.scenario import Scenario

TRAITS = {
    "common state": Recipe(
        extras=("scheduler", "averaged", "scaler"),
        optimizer="sgd",
        prelude=True,
        section_every=2,
        standby="forked",
    ),
    "micro-batches": Recipe(
        micro=2, model="norm", optimizer="two", objects=True, swallow=True, extras=("scheduler",)
    ),
    "loader workers": Recipe(
        loader="iterable", workers=2, standby="forked", zero_grad="keep", bucket_view=True
    ),
    "own loop": Recipe(loop="own", model="norm", zero_grad="start"),
    "decorated": Recipe(loop="decorated", optimizer="closure", extras=("ema",)),
    "finds unused": Recipe(find_unused=True, model="deep", bucket_mb=0.002),
    "static graph": Recipe(static_graph=True, model="deep", bucket_mb=0.002),
}
FAULTS = (
    KillAtPlace(1, "backward", 3),
    KillAtPlace(0, "forward", 5),
    KillAtPlace(2, "tail", 6),
    KillAtPlace(1, "voted", 7),
    KillAtPlace(0, "vote", 8),
    KillAtPlace(2, "between", 9),
)


@pytest.mark.parametrize("trait", TRAITS)
def test_bits_survive(trait: str, play) -> None:  # type: ignore[no-untyped-def]
    play(Scenario(recipe=TRAITS[trait], faults=FAULTS))


def test_collectives_after_the_gate_lead_to_the_sealed_regime(play) -> None:  # type: ignore[no-untyped-def]
    """In step 0 they are first seen, and a loss there starts the job anew; from step 1 on the others, torn by the
    loss, load what they have sealed."""
    faults = [KillAtPlace(rank, "apply", step) for step, rank in enumerate((1, 0, 2, 1))]
    faults += [KillAtPlace(2, "voted", 5), KillAtPlace(0, "backward", 6), KillAtPlace(1, "tail", 7)]
    outcome = play(Scenario(recipe=Recipe(steps=9, extras=("tail",), standby="forked"), faults=faults))
    assert outcome.job.final_status["regime"] == "sealed"
    assert "between the gate and the end of a step" in outcome.job.final_status["why_sealed"]


def test_gradients_that_add_up_over_steps(play) -> None:  # type: ignore[no-untyped-def]
    """Never zeroed: a step begins with the gradients of the one before, which a replacement needs too; here
    it gets them through the shard server."""
    faults = [*FAULTS[:3], KillInRecovery(1, "backward", 8, 1, "pulled")]
    recipe = Recipe(zero_grad="never", extras=("ema",), standby="forked")
    play(Scenario(recipe=recipe, faults=faults, pull="zmq"))


def test_fresh_interpreters(play) -> None:  # type: ignore[no-untyped-def]
    play(Scenario(recipe=Recipe(standby="forked"), faults=FAULTS[:1], world_size=2, start_method="fresh"))
