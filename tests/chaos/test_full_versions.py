"""Plain data parallelism, and every rank dies: full versions, sealed now and then, are what is left."""

import pytest

from chaos.faults.base import Fault
from chaos.faults.kill_at_place import KillAtPlace
from chaos.faults.kill_in_recovery import KillInRecovery
from chaos.faults.kill_together import KillTogether
from chaos.faults.kill_with import KillWith
from chaos.recipe import Recipe
from chaos.redone import read_commits, redone_steps
from chaos.scenario import Outcome, Scenario

ALL = (0, 1, 2)


def redone(outcome: Outcome) -> list[int]:
    """By recovery, how many committed steps it gave up."""
    commits = read_commits(outcome.folder / "out", outcome.scenario.world_size)
    return [redone_steps(one, commits) for one in outcome.job.final_status["recoveries"]]


def test_all_ranks_and_then_one(play) -> None:  # type: ignore[no-untyped-def]
    recipe = Recipe(steps=20, standby="forked", parallel="ddp", seal_every=4)
    faults: list[Fault] = [KillTogether(ALL, "backward", 8), KillAtPlace(1, "vote", 14)]
    outcome = play(Scenario(recipe=recipe, faults=faults, deadline_s=120))
    assert outcome.job.final_status["regime"] == "live"
    first, second = outcome.job.final_status["recoveries"]
    assert first["version"] == 5  # 1, 5, 9, ...
    assert redone(outcome)[1] == 0, second


def test_all_ranks_one_of_which_a_built_standby_takes(play) -> None:  # type: ignore[no-untyped-def]
    """Nobody is left whose gradient buckets it could have learnt."""
    recipe = Recipe(steps=240, standby="built", parallel="ddp", seal_every=40)
    outcome = play(Scenario(recipe=recipe, faults=[KillTogether(ALL, "backward", 220)], deadline_s=180))
    found = [one["reason"] for one in outcome.job.happened("replacement")]
    assert any("a built standby, takes the rank" in one for one in found), outcome.job.story()


@pytest.mark.parametrize("place", ["finish", "sealed", "voted"])
def test_while_a_full_version_is_sealed(place: str, play) -> None:  # type: ignore[no-untyped-def]
    """Versions 1, 4, 7: the one of step 4 is what all meet at if its gate was passed, else that of step 1."""
    recipe = Recipe(steps=10, standby="forked", parallel="ddp", seal_every=3)
    outcome = play(Scenario(recipe=recipe, faults=[KillWith(0, place, 4, (1, 2))], deadline_s=120))
    (recovery,) = outcome.job.final_status["recoveries"]
    assert recovery["version"] in ({4} if place == "voted" else {1, 4})


def test_all_ranks_during_recoveries(play) -> None:  # type: ignore[no-untyped-def]
    recipe = Recipe(steps=16, standby="forked", parallel="ddp", seal_every=4)
    faults: list[Fault] = [
        KillInRecovery(1, "vote", 7, 0, "serve"),
        KillTogether(ALL, "backward", 10),
        KillInRecovery(0, "vote", 12, 0, "pulled"),
    ]
    play(Scenario(recipe=recipe, faults=faults, deadline_s=120))


def test_all_ranks_with_a_budget_of_time(play) -> None:  # type: ignore[no-untyped-def]
    """Every trait of a script's state goes back with it: buffers, scheduler, average, data of worker processes."""
    recipe = Recipe(
        steps=12, standby="forked", model="norm", workers=1, extras=("scheduler", "ema"), zero_grad="never"
    )
    play(Scenario(recipe=recipe, faults=[KillTogether(ALL, "tail", 6)], deadline_s=120))


@pytest.mark.parametrize("loop", ["own", "decorated"])
def test_all_ranks_in_a_loop_of_ones_own(loop: str, play) -> None:  # type: ignore[no-untyped-def]
    recipe = Recipe(steps=12, standby="forked", loop=loop, seal_every=3)
    play(Scenario(recipe=recipe, faults=[KillTogether(ALL, "backward", 6)], deadline_s=120))
