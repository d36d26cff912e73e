"""Faults that are no clean death: silence, standing still, exceptions, ends that come too early."""

from chaos.faults.exit_early import ExitEarly
from chaos.faults.hang import Hang
from chaos.faults.hard_exit import HardExit
from chaos.faults.kill_together import KillTogether
from chaos.faults.raise_error import RaiseError
from chaos.faults.stop import Stop
from chaos.recipe import Recipe
from chaos.scenario import Scenario, run

QUICK = 1.0  # seconds of silence after which a rank is suspected


def test_stopped_ranks_are_replaced(play) -> None:  # type: ignore[no-untyped-def]
    faults = [Stop(1, "backward", 3), Stop(0, "vote", 5), Stop(2, "tail", 7)]
    play(Scenario(recipe=Recipe(steps=10), faults=faults, suspect_after_s=QUICK))


def test_ranks_that_sleep_for_ever_are_replaced(play) -> None:  # type: ignore[no-untyped-def]
    """In a body, and between two: the second is noticed no later than the first."""
    faults = [Hang(1, "forward", 3), Hang(0, "between", 5)]
    play(Scenario(recipe=Recipe(steps=8), faults=faults, suspect_after_s=0.8, deadline_s=90))


def test_exceptions_and_early_ends(play) -> None:  # type: ignore[no-untyped-def]
    faults = [
        RaiseError(1, "forward", 2),
        RaiseError(0, "backward", 4, times=2),
        HardExit(2, "backward", 6),
        HardExit(0, "apply", 8, code=3),
        ExitEarly(1, "forward", 10),
        ExitEarly(0, "tail", 12),
        ExitEarly(2, "between", 14),
    ]
    play(Scenario(recipe=Recipe(steps=18), faults=faults))


def test_a_step_that_always_fails_ends_the_job_with_its_traceback(folder) -> None:  # type: ignore[no-untyped-def]
    fault = RaiseError(1, "forward", 3, times=20)
    outcome = run(Scenario(recipe=Recipe(steps=6), faults=[fault]), folder)
    assert outcome.ended.code == 1
    assert outcome.ended.reason.startswith("step 3 failed ")
    assert "rank 1 failed first" in outcome.ended.reason
    assert f"ChaosError: on purpose, by cue {fault.name}" in outcome.ended.reason
    shown = outcome.job.text("stderr")
    assert "Traceback (most recent call last)" in shown
    assert "scripts/train.py" in shown
    assert fault.name in shown


def test_the_restart_budget_ends_the_job(folder) -> None:  # type: ignore[no-untyped-def]
    fault = RaiseError(1, "forward", 3, times=20)
    outcome = run(Scenario(recipe=Recipe(steps=6), faults=[fault], max_restarts=1), folder)
    assert outcome.ended.code == 1
    assert "restart budget of 1 is spent" in outcome.ended.reason
    assert "rank 1" in outcome.ended.reason
    assert fault.name in outcome.ended.reason


def test_every_rank_killed_names_what_has_no_source(folder) -> None:  # type: ignore[no-untyped-def]
    fault = KillTogether((0, 1, 2), "backward", 4)
    outcome = run(Scenario(recipe=Recipe(steps=8, seal_every=0), faults=[fault]), folder)
    assert fault.missing(outcome.evidence) is None
    assert outcome.ended.code == 1
    assert "cannot recover" in outcome.ended.reason
    assert "no rank is left that holds the tensor state" in outcome.ended.reason
    assert "failed first: killed by SIGKILL" in outcome.ended.reason
