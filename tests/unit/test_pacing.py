"""How often one rank wishes for a full version."""

import pytest

from flashrec.happenings import NEVER
from flashrec.pacing import BUDGET, Pace

STEP_S = 0.25


def paced(every: int | None = None, *, wall_s: float = STEP_S, cpu_s: float = STEP_S) -> Pace:
    pace = Pace(every)
    for version in range(1, 7):
        pace.committed(version, round(version * wall_s * 1e9), round(version * cpu_s * 1e9))
    return pace


def test_sealing_takes_no_more_than_its_budget_of_the_steps_between() -> None:
    pace = paced()
    pace.sealed(0.1)
    every = pace.wanted(1, 1)
    assert 0.1 <= every * STEP_S * BUDGET < 0.1 + STEP_S * BUDGET
    pace.sealed(0.2)
    assert pace.wanted(1, 1) == 2 * every
    pace.sealed(0.0)
    assert pace.wanted(1, 1) == 1


@pytest.mark.parametrize("long", ["wall_s", "cpu_s"])
def test_a_step_that_waits_for_a_core_or_has_several_is_no_longer_for_that(long: str) -> None:
    pace, other = paced(), paced(**{long: 5 * STEP_S})
    for one in (pace, other):
        one.sealed(0.1)
    assert other.wanted(1, 1) == pace.wanted(1, 1)


@pytest.mark.parametrize("every", [None, 7])
def test_the_first_comes_soon(every: int | None) -> None:
    assert paced(every).wanted(2, -1) == 2


def test_as_soon_as_there_is_one_the_user_s_number_counts_whatever_it_costs() -> None:
    pace = paced(7)
    pace.sealed(100.0)
    assert pace.wanted(1, 3) == 7


def test_what_it_takes_is_measured_again_by_a_process_that_does_not_know_it() -> None:
    assert paced().wanted(1, 40) == 1


def test_a_recovery_is_no_step() -> None:
    pace = paced()
    pace.disturbed()
    pace.committed(7, 10**12, 10**12)
    pace.committed(9, 2 * 10**12, 2 * 10**12)
    pace.sealed(0.1)
    undisturbed = paced()
    undisturbed.sealed(0.1)
    assert pace.wanted(1, 1) == undisturbed.wanted(1, 1)


def test_who_cannot_seal_keeps_all_from_it() -> None:
    pace = paced()
    pace.refuse("")
    assert pace.wanted(1, -1) == 1
    pace.refuse("no room")
    pace.refuse("another reason")
    assert pace.wanted(1, -1) == NEVER
    assert pace.why_never == "no room"
    assert paced(0).wanted(1, -1) == NEVER
    assert "seal_every=0" in paced(0).why_never
