"""The demo's faults: seeded, spread over every place, and never so dense that a job must fail."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.cli.demo.injector import Distance, distance
from flashrec.cli.demo.schedule import FIRST_STEP, PLACES, SLOT_STEPS, Fault, least_steps, make_schedule
from flashrec.errors import UsageError
from flashrec.protocol.phase import Phase
from flashrec.protocol.tag import BACKWARD, FORWARD, Tag
from flashrec.protocol.tag import PLACES as TAG_PLACES

MANY_STEPS = 400
counts = st.integers(0, 40)
seeds = st.integers(-(1 << 40), 1 << 40)
worlds = st.integers(2, 9)


@given(counts, worlds, seeds)
def test_the_seed_decides(num_faults: int, ranks: int, seed: int) -> None:
    first = make_schedule(steps=MANY_STEPS, ranks=ranks, num_faults=num_faults, seed=seed)
    assert first == make_schedule(steps=MANY_STEPS, ranks=ranks, num_faults=num_faults, seed=seed)
    assert [fault.index for fault in first] == list(range(num_faults))


def test_seeds_differ() -> None:
    schedules = {tuple(make_schedule(steps=100, ranks=4, num_faults=10, seed=seed)) for seed in range(20)}
    assert len(schedules) == 20


@given(counts, worlds, seeds)
def test_every_place_and_every_rank_comes_up(num_faults: int, ranks: int, seed: int) -> None:
    faults = make_schedule(steps=MANY_STEPS, ranks=ranks, num_faults=num_faults, seed=seed)
    assert sum(fault.place is None for fault in faults) == num_faults // 5
    placed = [fault.place for fault in faults if fault.place is not None and not fault.follows]
    assert {placed.count(place) for place in PLACES} <= {len(placed) // 6, len(placed) // 6 + 1}
    of_their_own = [fault.rank for fault in faults if not fault.follows]
    assert len(set(of_their_own)) == min(ranks, len(of_their_own))


@given(counts, worlds, seeds)
def test_some_strike_in_a_recovery(num_faults: int, ranks: int, seed: int) -> None:
    faults = make_schedule(steps=MANY_STEPS, ranks=ranks, num_faults=num_faults, seed=seed)
    following = [fault for fault in faults if fault.follows]
    assert len(following) == (num_faults >= 8) + (num_faults >= 9)
    for fault in following:
        first = faults[fault.index - 1]
        assert first.place in PLACES
        assert first.step == fault.step
        assert ranks > 2 or first.rank == fault.rank, "nobody would be left"
    same = [fault.rank == faults[fault.index - 1].rank for fault in following]
    assert not following or any(same), "one rank is killed twice"
    assert len(following) < 2 or ranks == 2 or not all(same), "and one in another's recovery"


@given(counts, worlds, seeds, st.integers(0, 60))
def test_faults_keep_their_distance(num_faults: int, ranks: int, seed: int, more_steps: int) -> None:
    """A step is recovered twice at most; the daemon gives up at the fourth time."""
    slots = num_faults - (num_faults >= 8) - (num_faults >= 9)
    steps = least_steps(slots) + more_steps
    faults = make_schedule(steps=steps, ranks=ranks, num_faults=num_faults, seed=seed)
    of_their_own = [fault for fault in faults if not fault.follows]
    for before, after in itertools.pairwise(of_their_own):
        assert after.step - max(before.step, before.patience) >= SLOT_STEPS
    for fault in of_their_own:
        assert fault.step >= FIRST_STEP
        assert max(fault.step, fault.patience) <= steps - SLOT_STEPS - 4
    assert all(fault.wait >= 0 for fault in faults)


def test_too_few_steps_says_how_many_it_takes() -> None:
    with pytest.raises(UsageError, match=r"10 faults do not fit into 20 steps; take --steps (\d+)") as caught:
        make_schedule(steps=20, ranks=4, num_faults=10, seed=0)
    enough = int(re.findall(r"--steps (\d+)", str(caught.value))[0])
    assert len(make_schedule(steps=enough, ranks=4, num_faults=10, seed=0)) == 10
    with pytest.raises(UsageError):
        make_schedule(steps=enough - 1, ranks=4, num_faults=10, seed=0)


def test_one_rank_cannot_survive() -> None:
    with pytest.raises(UsageError, match="with one rank nothing survives its death"):
        make_schedule(steps=100, ranks=1, num_faults=1, seed=0)
    assert make_schedule(steps=1, ranks=1, num_faults=0, seed=0) == []


def test_negative_number_of_faults_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be -1"):
        make_schedule(steps=100, ranks=4, num_faults=-1, seed=0)


def tag(phase: Phase, step: int, body: int = FORWARD) -> Tag:
    return Tag(phase, body, 0, 1, step, 0, 0, 0, step, float("nan"))


@pytest.mark.parametrize(
    ("place", "seen", "expected"),
    [
        ("forward", tag(Phase.COMPUTING, 3), Distance.FAR),
        ("forward", tag(Phase.COMPUTING, 9), Distance.NEAR),
        ("forward", tag(Phase.COMPUTING, 10), Distance.HERE),
        ("forward", tag(Phase.COMPUTING, 10, BACKWARD), Distance.NEAR),
        ("backward", tag(Phase.COMPUTING, 12, BACKWARD), Distance.HERE),
        ("gate", tag(Phase.GATED, 9), Distance.NEAR),
        ("gate", tag(Phase.GATED, 10), Distance.HERE),
        ("tail", tag(Phase.APPLYING, 9), Distance.NEAR),
        ("tail", tag(Phase.APPLYING, 10), Distance.NEXT),
        ("tail", tag(Phase.TAIL, 10), Distance.HERE),
        ("between", tag(Phase.APPLYING, 9), Distance.NEXT),
        ("between", tag(Phase.IDLE, 9), Distance.NEAR),
        ("between", tag(Phase.IDLE, 10), Distance.HERE),
    ],
)
def test_how_far_a_rank_is_from_a_place(place: str, seen: Tag, expected: Distance) -> None:
    assert distance(place, 10, seen) is expected


def test_places_are_those_of_the_tag() -> None:
    assert {*PLACES, "recovery"} <= set(TAG_PLACES)
    assert Fault(index=0, rank=0, step=0, place="recovery").follows
