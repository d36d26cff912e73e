"""Max-min fairness: by hand, against its definition, and against a simulation in small steps of time."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.sharing import fair_rates, finish_times

LINKS = "abcd"
flow_lists = st.lists(st.lists(st.sampled_from(LINKS), min_size=1, max_size=3), min_size=1, max_size=6)
capacities = st.fixed_dictionaries({link: st.integers(1, 30).map(Fraction) for link in LINKS})


def test_flows_share_a_link_and_take_what_others_leave() -> None:
    # b lets its two flows have 1 each; so one of them leaves 9 of a's 10 to the flow that crosses a alone.
    assert fair_rates([["a"], ["a", "b"], ["b"]], {"a": 10, "b": 2}) == [9, 1, 1]
    assert fair_rates([["a"], []], {"a": 10}) == [10, math.inf]
    assert fair_rates([["a", "a"]], {"a": 10}) == [10]
    assert fair_rates([], {}) == []


def test_rates_change_when_a_flow_ends() -> None:
    # 5 each until the first is over at 4; then the other has the link: 20 of 50 are gone, 30 more at 10.
    assert finish_times([["a"], ["a"]], [20, 50], {"a": 10}) == [4, 7]
    assert finish_times([["a"], ["a"], []], [0, 50, 10], {"a": 10}) == [0, 5, 0]
    assert finish_times([], [], {}) == []


@given(flow_lists, capacities)
def test_every_flow_has_a_link_that_holds_it_back(
    flows: list[list[str]], capacity: dict[str, Fraction]
) -> None:
    """The definition: rates are max-min fair if and only if each flow crosses a link that is full, and on which no
    other flow is faster (Bertsekas and Gallager, Data Networks, section 6.5.2)."""
    rates = fair_rates(flows, capacity)
    on = {link: [i for i, flow in enumerate(flows) if link in flow] for link in LINKS}
    for link, users in on.items():
        assert sum(rates[i] for i in users) <= capacity[link]
    for flow, rate in zip(flows, rates, strict=True):
        assert any(
            sum(rates[i] for i in on[link]) == capacity[link] and rate == max(rates[i] for i in on[link])
            for link in flow
        )


def brute_rates(flows: list[list[str]], capacity: dict[str, Fraction]) -> list[Fraction]:
    """All grow together to the next moment at which any link is full."""
    rates, growing = [Fraction(0)] * len(flows), set(range(len(flows)))
    while growing:
        room = {}
        for link in LINKS:
            users = [i for i in growing if link in flows[i]]
            if users:
                used = sum(rates[i] for i, flow in enumerate(flows) if link in flow)
                room[link] = (capacity[link] - used) / len(users)
        step = min(room.values())
        for i in growing:
            rates[i] += step
        full = {link for link, left in room.items() if left == step}
        growing = {i for i in growing if not full.intersection(flows[i])}
    return rates


@given(flow_lists, capacities, st.lists(st.integers(0, 40), min_size=6, max_size=6))
def test_equals_brute_force(flows: list[list[str]], capacity: dict[str, Fraction], sizes: list[int]) -> None:
    sizes = sizes[: len(flows)]
    assert fair_rates(flows, capacity) == brute_rates(flows, capacity)
    left = {i: Fraction(size) for i, size in enumerate(sizes) if size}
    ends, now = [Fraction(0)] * len(flows), Fraction(0)
    while left:
        rates = dict(zip(left, brute_rates([flows[i] for i in left], capacity), strict=True))
        step = min(left[i] / rates[i] for i in left)
        now += step
        left = {i: size - rates[i] * step for i, size in left.items()}
        for i in [i for i, size in left.items() if size == 0]:
            ends[i] = now
            del left[i]
    exact = finish_times(flows, [Fraction(size) for size in sizes], capacity)
    assert exact == ends
    floats = finish_times(flows, [float(size) for size in sizes], {k: float(v) for k, v in capacity.items()})
    assert floats == pytest.approx([float(end) for end in ends])


@given(flow_lists, capacities, st.integers(2, 5))
def test_scaling(flows: list[list[str]], capacity: dict[str, Fraction], factor: int) -> None:
    sizes = [Fraction(i + 1) for i in range(len(flows))]
    faster = {link: carries * factor for link, carries in capacity.items()}
    assert [end / factor for end in finish_times(flows, sizes, capacity)] == finish_times(
        flows, sizes, faster
    )


def test_refuses() -> None:
    with pytest.raises(UsageError, match="no capacity is given for link b"):
        fair_rates([["a"], ["b"]], {"a": 1})
    with pytest.raises(UsageError, match="link a carries 0; it must be above 0"):
        fair_rates([["a"]], {"a": 0})
    with pytest.raises(UsageError, match="2 flows have 1 sizes"):
        finish_times([["a"], ["a"]], [1], {"a": 1})
    with pytest.raises(UsageError, match="less than 0 bytes"):
        finish_times([["a"]], [-1], {"a": 1})
