"""Members of a large job: as a tuple is, whatever is changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.sim.failures import FailureScenario, Fault, Layout, Scope
from flashrecd.core import ledger
from flashrecd.core.state import CHUNK, Member, Members
from flashrecd.simulate.whole import play_whole


def named(count: int) -> tuple[Member, ...]:
    return tuple(Member(f"p{number}") for number in range(count))


@given(st.integers(1, 3 * CHUNK), st.lists(st.integers(0, 10**6), max_size=8))
def test_a_changed_one_is_another_and_the_first_stays(count: int, places: list[int]) -> None:
    plain, first = list(named(count)), Members(named(count))
    many = first
    for number, place in enumerate(places):
        member = Member(f"new-{number}")
        plain[place % count] = member
        many = many.changed(place % count, member)
    assert list(many) == plain
    assert many == tuple(plain) == many
    assert hash(many) == hash(tuple(plain))
    assert len(many) == count
    assert [many[number] for number in range(count)] == plain
    assert many[-1] == plain[-1]
    assert many[1:7] == tuple(plain[1:7])
    assert first == named(count)
    assert (many == first) == (tuple(plain) == named(count))


def test_beyond_the_end_there_is_nobody() -> None:
    for wrong in (CHUNK + 1, -CHUNK - 2):
        with pytest.raises(IndexError):
            Members(named(CHUNK + 1))[wrong]


def test_a_core_decides_the_same_with_either(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = (Fault(10.3, Scope.RANK, 5), Fault(10.9, Scope.NODE, 3), Fault(30.0, Scope.NODE, 2, True))
    case = FailureScenario(
        layout=Layout(12, 2, 2), step_s=2.0, state_bytes=2e7, duration_s=60.0, trace=faults, data_parallel=2
    )
    plain = play_whole(case)
    assert isinstance(plain.core.state.members, tuple)
    monkeypatch.setattr(ledger, "SMALL", 0)
    shared = play_whole(case)
    assert isinstance(shared.core.state.members, Members)
    assert len(plain.recoveries) == 2
    assert shared.decisions == plain.decisions
    assert shared.core.state == plain.core.state
