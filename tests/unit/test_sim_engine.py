"""The engine against an independent simulation, closed forms, published rates, and what must hold of any time-line."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.engine import StepCosts, classes_of, run, slowest_of_groups
from flashrec.sim.schedules import Schedule, from_lists, gpipe, interleaved, one_f_one_b, zb_h1
from tests.unit.sim_cases import cases, make_costs, per_replica, take_classes, texts
from tests.unit.sim_reference import Reference

PROFILES = Path(__file__).parents[2] / "benchmarks" / "reference" / "zero_bubble_profiles.csv"
TIMES = ("forward", "backward", "weight", "send_forward", "send_backward", "grad_sync", "optimizer", "finish")


@settings(max_examples=400, deadline=None)
@given(cases())
def test_equals_a_simulation_of_every_rank(case: tuple[Schedule, StepCosts]) -> None:
    schedule, costs = case
    line = run(schedule, costs)
    ranks_of = np.repeat(np.arange(len(costs.weights)), costs.weights)
    reference = Reference(texts(schedule), per_replica(costs), len(ranks_of))
    assert line.batch_s == reference.run()
    for rank in reference.ranks:
        column = ranks_of[rank.replica]
        assert line.start[rank.stage, :, column].tolist() == rank.starts
        assert line.end[rank.stage, :, column].tolist() == rank.ends
        assert line.free[rank.stage, column] == rank.free
        times = (line.optimizer_start[rank.stage, column], line.optimizer_end[rank.stage, column])
        assert times == rank.optimizer
    for at, (start, end) in reference.sync.items():
        assert (line.sync_start[at], line.sync_end[at]) == (start, end)
    for stage, times in reference.finish.items():
        assert (line.finish_start[stage], line.finish_end[stage]) == times


def test_integers_stay_integers() -> None:
    schedule = one_f_one_b(2, 3)
    assert isinstance(run(schedule, make_costs(schedule, forward=2, backward=3)).batch_s, int)
    assert isinstance(run(schedule, make_costs(schedule, forward=2.0, backward=3)).batch_s, float)
    # Beyond what a float holds exactly.
    assert run(gpipe(1, 1), make_costs(gpipe(1, 1), forward=2**53, backward=1)).batch_s == 2**53 + 1


small = st.integers(1, 6)
length = st.integers(1, 50)


@given(st.sampled_from([gpipe, one_f_one_b]), small, small, length, length)
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_turns(maker: Any, p: int, m: int, f: int, b: int) -> None:
    schedule = maker(p, m)
    line = run(schedule, make_costs(schedule, forward=f, backward=b))
    assert line.pipeline_s == line.batch_s == (m + p - 1) * (f + b)
    assert line.bubble() == pytest.approx((p - 1) / (m + p - 1))


@given(small, st.integers(1, 3), st.integers(1, 4), length, length)
def test_chunks_divide_the_bubble_of_1f1b(p: int, groups: int, chunks: int, f: int, b: int) -> None:
    schedule = interleaved(p, groups * p, chunks)
    line = run(schedule, make_costs(schedule, forward=f, backward=b))
    # f and b are of one chunk here, so the whole stage's are `chunks` times as long and the bubble (p - 1)(f + b).
    assert line.batch_s - groups * p * chunks * (f + b) == (p - 1) * (f + b)


@given(small, st.integers(0, 6), length, length, length)
def test_zb_h1_takes_the_weights_out_of_the_bubble(p: int, more: int, f: int, b: int, w: int) -> None:
    f, b, w = w + f, w + b, w  # arXiv 2401.10241 supposes that W is no longer than F and B
    m = p + more
    schedule = zb_h1(p, m)
    line = run(schedule, make_costs(schedule, forward=f, backward=b, weight=w))
    assert line.batch_s - m * (f + b + w) == (p - 1) * (f + b - w)


def profiles() -> list[dict[str, str]]:
    with PROFILES.open(newline="") as file:
        return list(csv.DictReader(file))


def profiled(row: dict[str, str], *, sends_block: bool) -> float:
    """The bubble of a published profile. A transfer follows every forward and every backward that has a neighbour
    to send to; with `sends_block` False the sender goes on at once, as with asynchronous sends."""
    schedule = one_f_one_b(int(row["pipeline_stages"]), int(row["micro_batches"]))
    costs = make_costs(
        schedule,
        forward=float(row["forward_ms"]) / 1e3,
        backward=(float(row["backward_input_ms"]) + float(row["backward_weight_ms"])) / 1e3,
        send_forward=float(row["transfer_ms"]) / 1e3,
        send_backward=float(row["transfer_ms"]) / 1e3,
        sends_block=sends_block,
    )
    return run(schedule, costs).bubble()


@pytest.mark.parametrize("row", profiles(), ids=lambda row: f"{row['model']}-{row['micro_batches']}")
def test_bubble_of_published_profiles(row: dict[str, str]) -> None:
    """arXiv 2401.10241: only the receiver waits, and with it all rows agree to all digits published."""
    assert round(profiled(row, sends_block=False), 4) == float(row["bubble_1f1b"])
    # The figures tell the two apart: were the sender busy while it sends, no row would agree.
    assert round(profiled(row, sends_block=True), 4) != float(row["bubble_1f1b"])


def test_who_waits_while_a_stage_sends() -> None:
    schedule = gpipe(2, 2)
    given_costs: dict[str, Any] = {"forward": 10, "backward": 10, "send_forward": 4, "send_backward": 3}
    line = run(schedule, make_costs(schedule, sends_block=False, **given_costs))
    assert line.start[:, :, 0].tolist() == [[0, 10, 47, 57], [14, 24, 34, 44]]
    line = run(schedule, make_costs(schedule, sends_block=True, **given_costs))
    # The second forward waits for the first one's send, and the last stage's B0 for the send of B1.
    assert line.start[:, :, 0].tolist() == [[0, 14, 51, 64], [14, 28, 38, 51]]


def test_transfers_of_one_stage_overlap() -> None:
    schedule = gpipe(2, 3)
    line = run(schedule, make_costs(schedule, forward=1, backward=1, send_forward=100))
    assert line.start[1, :3, 0].tolist() == [101, 102, 103]


def test_buckets_overlap_the_last_backward_and_wait_for_the_slowest_replica() -> None:
    schedule = gpipe(1, 2)
    costs = make_costs(
        schedule,
        classes=2,
        forward=[[10, 10]],
        backward=[[10, 12]],
        grad_sync=[[5, 9]],
        optimizer=[[3, 1]],
        finish=[2],
    )
    line = run(schedule, replace(costs, overlap_grad_sync=True))
    assert line.sync_start.tolist() == [[38, 44]]  # half of the last backward of the slower, which ends at 44
    assert line.sync_end.tolist() == [[43, 53]]
    assert line.optimizer_end.tolist() == [[56, 54]]
    assert line.batch_s == 58
    line = run(schedule, costs)
    assert line.sync_start.tolist() == [[44, 49]]
    assert line.batch_s == 44 + 5 + 9 + 3 + 2


def test_tied_embeddings_wait_for_both_ends() -> None:
    schedule = gpipe(3, 1)
    line = run(
        schedule,
        make_costs(schedule, forward=1, backward=1, grad_sync=[[1], [30], [10]], optimizer=5, tied_sync=7),
    )
    # Stage 2 is over at 4 and synchronised at 14; stage 0 at 6 and 7; so both ends hold until 21.
    assert (line.tied_start_s, line.tied_end_s) == (14, 21)
    assert line.optimizer_start[:, 0].tolist() == [21, 35, 21]


@given(cases(), st.integers(2, 9))
def test_scaled_costs_scale_the_step(case: tuple[Schedule, StepCosts], factor: int) -> None:
    schedule, costs = case
    buckets = costs.grad_sync.shape[1]  # whole shares of a backward, so that nothing is rounded
    whole = scaled(costs, buckets)
    assert run(schedule, scaled(whole, factor)).batch_s == factor * run(schedule, whole).batch_s


def scaled(costs: StepCosts, factor: int) -> StepCosts:
    times = {name: getattr(costs, name) * factor for name in TIMES}
    return replace(costs, **times, tied_sync=costs.tied_sync * factor)


@given(cases(), st.sampled_from(TIMES), st.integers(0, 10**6), st.integers(1, 20))
def test_nothing_that_takes_longer_shortens_the_step(
    case: tuple[Schedule, StepCosts], name: str, place: int, more: int
) -> None:
    schedule, costs = case
    times = getattr(costs, name).copy()
    if not times.size or (name == "weight" and not schedule.splits_backward):
        return
    if name.startswith("send") and schedule.num_stages == 1:
        return
    times.flat[place % times.size] += more
    before, after = run(schedule, costs), run(schedule, replace(costs, **{name: times}))
    assert after.batch_s >= before.batch_s
    assert (after.end >= before.end).all()


@given(cases())
def test_equal_replicas_apart_or_together_are_the_same(case: tuple[Schedule, StepCosts]) -> None:
    schedule, costs = case
    together, apart = run(schedule, costs), run(schedule, per_replica(costs))
    assert apart.batch_s == together.batch_s
    assert (apart.end == np.repeat(together.end, costs.weights, axis=2)).all()
    assert apart.bubble() == pytest.approx(together.bubble())
    assert apart.exposed_s() == pytest.approx(together.exposed_s())


@given(cases())
def test_a_replica_less_or_in_another_order(case: tuple[Schedule, StepCosts]) -> None:
    schedule, costs = case
    classes = np.arange(len(costs.weights))
    batch_s = run(schedule, costs).batch_s
    assert run(schedule, take_classes(costs, classes[::-1])).batch_s == batch_s
    assert run(schedule, take_classes(costs, classes[:1])).batch_s <= batch_s


@given(cases())
def test_overlap_and_free_senders_never_lengthen_the_step(case: tuple[Schedule, StepCosts]) -> None:
    schedule, costs = case
    for name in ("sends_block", "overlap_grad_sync"):
        off, on = (run(schedule, replace(costs, **{name: value})).batch_s for value in (False, True))
        assert off <= on if name == "sends_block" else on <= off


@given(cases(), st.sampled_from([gpipe, one_f_one_b, zb_h1, interleaved]))
def test_another_micro_batch_never_shortens_the_step(case: tuple[Schedule, StepCosts], maker: Any) -> None:
    shape, costs = case
    if maker is interleaved:
        smaller, larger = (
            interleaved(shape.num_stages, n * shape.num_stages, shape.num_chunks) for n in (2, 3)
        )
    elif shape.num_chunks == 1:
        m = shape.num_micro_batches
        smaller, larger = maker(shape.num_stages, m), maker(shape.num_stages, m + 1)
    else:
        return
    if not smaller.splits_backward:
        costs = replace(costs, weight=costs.weight * 0)
    assert run(larger, costs).batch_s >= run(smaller, costs).batch_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward": np.ones((3, 1))}, r"backward has shape \(2, 1\).*\(3, 1\)"),
        ({"send_forward": np.ones((2, 1))}, r"send_forward has shape \(2, 1\)"),
        ({"optimizer": np.array([[-1], [0]])}, "optimizer holds a figure that is negative"),
        ({"finish": np.array([np.inf, 0])}, "finish holds a figure that is negative or not finite"),
        ({"weights": np.array([0])}, "at least 1 replica"),
        ({"tied_sync": -1}, "tied_sync is -1"),
        ({"grad_sync": np.zeros((2, 0))}, "grad_sync must be"),
        ({"forward": np.zeros(2)}, r"forward has shape \(2,\)"),
    ],
)
def test_refuses_costs(change: dict[str, Any], message: str) -> None:
    costs = make_costs(gpipe(2, 1))
    with pytest.raises(UsageError, match=message):
        replace(costs, **change)


def test_refuses_costs_of_another_schedule() -> None:
    with pytest.raises(UsageError, match="2 virtual stages on 2 stages; schedule 'gpipe' has 3 on 3"):
        run(gpipe(3, 1), make_costs(gpipe(2, 1)))
    with pytest.raises(UsageError, match="no W operations"):
        run(gpipe(2, 1), make_costs(gpipe(2, 1), weight=1))
    with pytest.raises(UsageError, match="one stage has no other"):
        make_costs(gpipe(1, 1), tied_sync=1)
    with pytest.raises(UsageError, match="one stage has no other"):
        make_costs(from_lists([["F0", "F0.1", "B0.1", "B0"]]), send_forward=1)


def test_slowest_of_groups_and_classes_of_replicas() -> None:
    speed = np.array(
        [[[1.0, 0.5], [1.0, 1.0], [0.5, 1.0]], [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]]
    )  # (P, R, TP)
    distinct, weights, class_of = classes_of(slowest_of_groups(speed))
    assert distinct.tolist() == [[0.5, 1.0], [1.0, 1.0]]
    assert weights.tolist() == [2, 1]
    assert class_of.tolist() == [0, 1, 0]
