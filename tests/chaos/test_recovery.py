"""Failures while the job recovers from another, and what else can go wrong in a recovery."""

import pytest

from chaos.faults.corrupt_export import CorruptExport
from chaos.faults.kill_at_place import KillAtPlace
from chaos.faults.kill_at_random import KillAtRandom
from chaos.faults.kill_in_recovery import KillInRecovery
from chaos.faults.kill_standby import KillStandby
from chaos.faults.kill_together import KillTogether
from chaos.recipe import Recipe
from chaos.scenario import Scenario

DEPTHS = {"built": ("built", 1), "none": ("forked", 0)}


def second_strikes(standby: str, standbys: int) -> list[KillInRecovery]:
    """Replacements and survivors, in every stage of a recovery."""
    stages = ["install", "pull", "pulled", "form", "formed"]
    if standbys == 0:
        stages = ["build", "rehearsal backward", *stages]
    faults = [
        KillInRecovery(number % 2, ("backward", "tail")[number % 2], 3 + 2 * number, number % 2, stage)
        for number, stage in enumerate(stages)
    ]
    step = 3 + 2 * len(stages)
    for number, stage in enumerate(["serve", "form", "formed"]):
        faults.append(KillInRecovery(1, "backward", step + 2 * number, 0, stage))
    return faults


@pytest.mark.parametrize("depth", DEPTHS)
def test_killed_during_recovery(depth: str, play) -> None:  # type: ignore[no-untyped-def]
    standby, standbys = DEPTHS[depth]
    faults = second_strikes(standby, standbys)
    # Without full versions, for where one is at hand nobody has to serve.
    recipe = Recipe(steps=max(fault.step for fault in faults) + 4, standby=standby, seal_every=0)
    play(Scenario(recipe=recipe, faults=faults, standbys=standbys, deadline_s=120))


def test_same_step_fails_for_one_rank_after_another(play) -> None:  # type: ignore[no-untyped-def]
    """Each in the redo of the step that the one before had broken: what it begins from must be what it was."""
    faults = [
        KillAtPlace(0, "vote", 4),
        KillAtPlace(1, "vote", 4, after=("kill-r0-vote-4",)),
        KillAtPlace(2, "backward", 4, after=("kill-r1-vote-4",)),
        KillAtPlace(1, "tail", 7),
        # Rank 2 may be far ahead of the tail of step 7 when rank 1 dies in it, but step 8 it must do again.
        KillAtPlace(2, "forward", 8, after=("kill-r1-tail-7",)),
    ]
    play(Scenario(recipe=Recipe(steps=10, loader="callable", workers=1), faults=faults, standbys=2))


def test_two_of_four_at_once(play) -> None:  # type: ignore[no-untyped-def]
    faults = [
        KillTogether((0, 2), "backward", 3),
        KillTogether((1, 3), "voted", 6),
        KillTogether((0, 1), "tail", 9),
    ]
    play(Scenario(recipe=Recipe(steps=12), faults=faults, world_size=4, standbys=2))


def test_all_but_one(play) -> None:  # type: ignore[no-untyped-def]
    faults = [KillTogether((0, 1), "forward", 3), KillTogether((1, 2), "apply", 5)]
    play(Scenario(recipe=Recipe(steps=8), faults=faults, standbys=1))


def test_world_of_two(play) -> None:  # type: ignore[no-untyped-def]
    places = ("forward", "backward", "vote", "voted", "apply", "tail", "between")
    faults = [KillAtPlace(number % 2, place, 1 + 2 * number) for number, place in enumerate(places)]
    play(Scenario(recipe=Recipe(steps=18), faults=faults, world_size=2))


def test_a_corrupt_export_is_never_used(play) -> None:  # type: ignore[no-untyped-def]
    """The replacement refuses it and dies; the next one pulls what is served anew."""
    faults = [CorruptExport(1, 3), KillAtPlace(0, "tail", 6)]
    play(Scenario(recipe=Recipe(steps=9, extras=("ema",)), faults=faults))


def test_a_standby_that_dies_harms_nobody(play) -> None:  # type: ignore[no-untyped-def]
    outcome = play(Scenario(recipe=Recipe(steps=12), faults=[KillStandby(2), KillAtPlace(1, "backward", 9)]))
    assert len(outcome.job.final_status["recoveries"]) == 1


def test_at_random_moments(play) -> None:  # type: ignore[no-untyped-def]
    faults = [KillAtRandom(seed % 3, 3 + 9 * seed, seed) for seed in range(6)]
    play(Scenario(recipe=Recipe(steps=60, workers=0), faults=faults, deadline_s=90))
