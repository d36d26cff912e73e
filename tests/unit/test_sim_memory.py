"""Bytes on each device: closed forms, the schedule's peak, and what is said when it does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.architecture import Division
from flashrec.sim.cluster import a100_cluster
from flashrec.sim.memory import estimate, live_activations, require_fit
from flashrec.sim.model import Transformer
from flashrec.sim.schedules import gpipe, interleaved, one_f_one_b, zb_h1
from flashrec.sim.strategy import Strategy

MODEL = Transformer(num_layers=32, hidden=3072, num_heads=32, sequence=2048, vocabulary=51200)


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12))
def test_live_micro_batches_are_the_schedules(stages: int, micro_batches: int) -> None:
    ones = [[1]] * stages
    assert live_activations(gpipe(stages, micro_batches), ones)[0] == [micro_batches] * stages
    expected = [min(stages - s, micro_batches) for s in range(stages)]
    assert live_activations(one_f_one_b(stages, micro_batches), ones)[0] == expected
    zero_bubble = live_activations(zb_h1(stages, micro_batches), ones)[0]
    assert max(zero_bubble) <= max(expected) + 1  # ZB-H1 keeps 1F1B's memory


def test_interleaving_keeps_more() -> None:
    plain = live_activations(one_f_one_b(4, 8), [[2]] * 4)[0][0]
    parts = live_activations(interleaved(4, 8, 2), [[1, 1]] * 4)[0][0]
    assert parts > plain


def test_sixteen_bytes_a_parameter_and_what_zero_divides() -> None:
    stages = {}
    for sharding in ("none", "zero1", "zero2", "zero3"):
        strategy = Strategy(data_parallel=64, sharding=sharding, recompute="full")
        (stages[sharding],) = estimate(MODEL, a100_cluster(8), strategy, 64)
    p = MODEL.parameters
    assert (stages["none"].parameters, stages["none"].gradients, stages["none"].optimizer) == (
        2 * p,
        2 * p,
        12 * p,
    )
    assert stages["zero1"].optimizer == -(-12 * p // 64)
    assert stages["zero1"].gradients == 2 * p
    assert stages["zero2"].gradients == -(-2 * p // 64)
    assert stages["zero2"].parameters == 2 * p
    assert stages["zero3"].parameters == -(-2 * p // 64)
    hybrid = Strategy(data_parallel=64, sharding="zero3", shard_group=8, recompute="full")
    assert estimate(MODEL, a100_cluster(8), hybrid, 64)[0].parameters == -(-2 * p // 8)


def test_experts_are_sharded_over_those_that_hold_the_same() -> None:
    model = Transformer(
        num_layers=4,
        hidden=1024,
        num_heads=16,
        sequence=512,
        vocabulary=32000,
        num_experts=8,
        experts_per_token=2,
    )
    strategy = Strategy(data_parallel=64, expert_parallel=8, sharding="zero1")
    (stage,) = estimate(model, a100_cluster(8), strategy, 64)
    blocks = model.blocks(Division(micro_batch=1, expert_parallel=8))
    common, experts = (sum(getattr(b, n) for b in blocks) for n in ("parameters", "expert_parameters"))
    assert stage.parameters == 2 * (common + experts)
    assert stage.optimizer == -(-12 * common // 64) + -(-12 * experts // 8)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_of_the_first_stage(recompute: str) -> None:
    strategy = Strategy(data_parallel=2, tensor_parallel=8, pipeline_parallel=4, recompute=recompute)
    stages = estimate(MODEL, a100_cluster(8), strategy, 32)
    blocks = MODEL.blocks(Division(micro_batch=1, tensor_parallel=8))
    one = 8 * blocks[1].saved_bytes[recompute]
    assert stages[0].activations == 4 * (one + blocks[0].saved_bytes["none"])
    assert stages[1].activations == 3 * one
    assert [s.live_micro_batches for s in stages] == [4, 3, 2, 1]


def test_what_does_not_fit_is_said_by_stage() -> None:
    strategy = Strategy(data_parallel=16, pipeline_parallel=4, micro_batch=8)
    stages = estimate(MODEL, a100_cluster(8), strategy, 2048)
    assert not stages[0].fits
    with pytest.raises(
        UsageError, match=r"stage 0: .* GiB of 80\.0 \(activations .*; 4 micro-batches kept\)"
    ):
        require_fit(stages)
    small = Strategy(data_parallel=2, tensor_parallel=8, pipeline_parallel=4, recompute="full")
    require_fit(estimate(MODEL, a100_cluster(8), small, 32))
