"""The orders of the schedules, written out; their memory; and what is refused of a schedule."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.schedules import Kind, Op, Schedule, from_lists, gpipe, interleaved, one_f_one_b, zb_h1
from tests.unit.sim_cases import random_lists, schedules, texts


def lines(schedule: Schedule) -> list[str]:
    return [" ".join(ops) for ops in texts(schedule)]


def test_gpipe() -> None:
    assert lines(gpipe(2, 3)) == ["F0 F1 F2 B2 B1 B0"] * 2


def test_1f1b() -> None:
    assert lines(one_f_one_b(3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert lines(one_f_one_b(4, 1)) == ["F0 B0"] * 4


def test_interleaved() -> None:
    # Megatron's order for 2 stages, 4 micro-batches, 2 chunks: warm-up 2 (P - s - 1) + (chunks - 1) P = 4 and 2.
    assert lines(interleaved(2, 4, 2)) == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]
    assert interleaved(3, 5, 1) == one_f_one_b(3, 5)


def test_zb_h1() -> None:
    assert lines(zb_h1(3, 4)) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


@given(st.integers(1, 8), st.integers(1, 20))
def test_zb_h1_holds_no_more_than_1f1b(p: int, m: int) -> None:
    assert max(zb_h1(p, m).peak_in_flight()) <= max(one_f_one_b(p, m).peak_in_flight())
    assert one_f_one_b(p, m).peak_in_flight() == tuple(min(p - s, m) for s in range(p))
    assert gpipe(p, m).peak_in_flight() == (m,) * p


@pytest.mark.parametrize(("m", "nearest"), [(6, "4 or 8"), (3, "4"), (5, "4 or 8")])
def test_interleaved_refuses_micro_batches_that_the_stages_do_not_divide(m: int, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"multiple of 4 micro-batches, not {m}; nearest valid: {nearest}$"):
        interleaved(4, m, 2)


@pytest.mark.parametrize("maker", [gpipe, one_f_one_b, zb_h1, lambda p, m: interleaved(p, m, 2)])
@pytest.mark.parametrize(("p", "m"), [(0, 4), (4, 0), (-1, 4), (2, 1.5)])
def test_makers_refuse_what_is_no_count(maker: Any, p: int, m: int) -> None:
    with pytest.raises(UsageError, match="must be an integer of at least 1"):
        maker(p, m)


@given(schedules())
def test_the_plan_puts_every_operation_behind_what_it_waits_for(schedule: Schedule) -> None:
    plan, last = schedule.plan, schedule.num_virtual_stages - 1
    total = sum(len(ops) for ops in schedule.ops)
    level = {row: n for n, (low, high) in enumerate(pairwise(plan.bounds)) for row in range(low, high)}
    assert sorted(level) == list(range(total))
    at = {}
    for stage, ops in enumerate(schedule.ops):
        for position, op in enumerate(ops):
            row = int(plan.rows[stage, position])
            assert (plan.stage[row], plan.position[row], plan.kind[row]) == (stage, position, op.kind)
            assert plan.virtual_stage[row] == schedule.virtual_stage(stage, op.chunk)
            at[op.kind, op.micro_batch, op.chunk * schedule.num_stages + stage] = row
            assert plan.before[row] == (plan.rows[stage, position - 1] if position else total)
    for (kind, micro_batch, part), row in at.items():
        source = total
        if kind is Kind.FORWARD and part > 0:
            source = at[kind, micro_batch, part - 1]
        if kind is Kind.BACKWARD and part < last:
            source = at[kind, micro_batch, part + 1]
        assert plan.source[row] == source
        behind = [level[int(other)] for other in (plan.before[row], plan.source[row]) if other < total]
        assert level[row] == 1 + max(behind, default=-1)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_a_user_schedule_that_lacks_an_operation_or_has_one_twice(
    seed: int, stages: int, micro_batches: int, chunks: int, split: bool
) -> None:
    chance = random.Random(seed)
    lists = random_lists(chance, stages, micro_batches, chunks, split)
    schedule = from_lists(lists)
    assert texts(schedule) == lists
    assert schedule.splits_backward == split
    stage = chance.randrange(stages)
    position = chance.randrange(len(lists[stage]))
    text = lists[stage][position]
    lists[stage].insert(position + 1, text)
    with pytest.raises(UsageError, match=f"stage {stage} performs {re.escape(text)} twice, at positions"):
        from_lists(lists)
    lists[stage][position : position + 2] = []
    if micro_batches * chunks * stages == 1:
        return  # without its only W it is a schedule that does not split
    with pytest.raises(UsageError) as caught:
        build(stages, micro_batches, chunks, lists)
    assert "never becomes ready: it waits for" in str(caught.value)
    assert f"{text} of stage {stage}, which that stage never performs" in str(caught.value)


def build(stages: int, micro_batches: int, chunks: int, lists: list[list[str]]) -> Schedule:
    ops = tuple(tuple(Op.parse(text) for text in ops) for ops in lists)
    return Schedule("user", stages, micro_batches, chunks, ops)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            ["F0 B0", "F0"],
            "B0 of stage 0 never becomes ready: it waits for B0 of stage 1, which that stage never",
        ),
        (
            ["B0", "F0 B0"],
            "F0 of stage 1 never becomes ready: it waits for F0 of stage 0, which that stage never",
        ),
        (
            ["F0 B0", "B0"],
            "B0 of stage 1 never becomes ready: it waits for F0 of stage 1, which that stage never",
        ),
        (["F0", "F0 B0"], "the optimizer of stage 0 never becomes ready: it waits for B0 of stage 0"),
        (["F0 B0 W0", "F0 B0"], "the optimizer of stage 1 never becomes ready: it waits for W0 of stage 1"),
        (["F0 W0", "F0 B0 W0"], "W0 of stage 0 never becomes ready: it waits for B0 of stage 0"),
        (["B0 F0"], "B0 of stage 0 never becomes ready: it waits for F0, which stands behind it"),
        (["F0 W0 B0"], "W0 of stage 0 never becomes ready: it waits for B0, which stands behind it"),
        (
            ["F0 B0 F1 B1", "F0 F1 B0 B1"],
            (
                "B0 of stage 0 never becomes ready: it waits for B0 of stage 1, which stands behind F1 of stage 1, "
                "which waits for F1 of stage 0, which stands behind B0 of stage 0"
            ),
        ),
        (["F0 F0 B0"], "stage 0 performs F0 twice, at positions 0 and 1"),
        (["F0 B0 X1"], "'X1' is no operation"),
        (["F0 B0 F-1"], "'F-1' is no operation"),
        ([], "lists no operation"),
        ([""], "lists no operation"),
    ],
)
def test_refuses_a_user_schedule(stages: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        from_lists([ops.split() for ops in stages])


def test_refuses_what_is_out_of_range() -> None:
    with pytest.raises(
        UsageError, match="stage 0 performs F1, but micro-batches are 0 to 0 and chunks 0 to 0"
    ):
        build(1, 1, 1, [["F0", "F1", "B0"]])
    with pytest.raises(UsageError, match="lists 1 stages; it has 2"):
        build(2, 1, 1, [["F0", "B0"]])
    with pytest.raises(UsageError, match="num_chunks is 0"):
        build(1, 1, 0, [["F0", "B0"]])


@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(1, 4))
def test_a_shuffled_schedule_is_refused_with_a_circle_or_is_possible(seed: int, stages: int, m: int) -> None:
    """Each stage forwards and backwards in its own random order: what cannot end is told from what can."""
    chance = random.Random(seed)
    lists = []
    for _ in range(stages):
        order = [*range(m)]
        chance.shuffle(order)
        lists.append([f"F{i}" for i in order] + [f"B{i}" for i in chance.sample(range(m), m)])
        for i in range(m):  # move some backwards as early as their forward allows
            if chance.random() < 0.5:
                lists[-1].remove(f"B{i}")
                lists[-1].insert(lists[-1].index(f"F{i}") + 1, f"B{i}")
    try:
        from_lists(lists)
    except UsageError as error:
        assert not possible(lists)
        first, _, rest = str(error).partition(" never becomes ready: it waits for ")
        assert rest.endswith(first.removeprefix("schedule 'user': "))  # the circle closes
    else:
        assert possible(lists)


def possible(lists: list[list[str]]) -> bool:
    """Whether the stages, each performing what it can, come to the end."""
    done: set[tuple[str, int]] = set()
    heads = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for stage, ops in enumerate(lists):
            while heads[stage] < len(ops):
                text = ops[heads[stage]]
                need = stage - 1 if text[0] == "F" else stage + 1
                if 0 <= need < len(lists) and (text, need) not in done:
                    break
                done.add((text, stage))
                heads[stage] += 1
                moved = True
    return all(head == len(ops) for head, ops in zip(heads, lists, strict=True))
