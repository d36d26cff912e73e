"""What a strategy refuses, and that each refusal names values that are then accepted."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.choices import nearest_divisors, nearest_multiples
from flashrec.sim.cluster import a100_cluster
from flashrec.sim.model import Transformer
from flashrec.sim.schedules import from_lists
from flashrec.sim.strategy import Compression, Replication, Strategy

MODEL = Transformer(num_layers=30, hidden=3072, num_heads=32, sequence=2048, vocabulary=51200)


@pytest.mark.parametrize(
    ("strategy", "batch", "says"),
    [
        (
            Strategy(data_parallel=64, micro_batch=3),
            512,
            r"nearest valid micro_batch: 2 or 4.*global_batch: 384 or 576",
        ),
        (
            Strategy(data_parallel=3, tensor_parallel=32),
            512,
            r"3 x 32 x 1 = 96.*nearest valid data_parallel: 2",
        ),
        (Strategy(data_parallel=16, pipeline_parallel=4), 512, r"num_layers \(30\).*\(4\).*: 3 or 5"),
        (
            Strategy(data_parallel=4, tensor_parallel=3),
            512,
            r"64 devices.*= 3\).*products: 2 or 4.*devices: 63 or 66",
        ),
        (Strategy(data_parallel=16, tensor_parallel=2), 512, r"nearest valid data_parallel: 32"),
        (
            Strategy(data_parallel=32, pipeline_parallel=2, schedule="interleaved", chunks=3),
            32 * 5,
            r"multiples of pipeline_parallel \(2\); nearest valid global_batch: 128 or 192",
        ),
        (
            Strategy(data_parallel=32, pipeline_parallel=2, stage_layers=(14, 15)),
            512,
            "adds up to 29; the model has 30",
        ),
    ],
)
def test_impossible_divisions_name_the_nearest_valid(strategy: Strategy, batch: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        strategy.check(MODEL, a100_cluster(8), batch)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"schedule": "1f1"}, "'1f1'.*nearest: '1f1b'"),
        ({"sharding": "zero4"}, "nearest: 'zero"),
        ({"recompute": "ful"}, "nearest: 'full'"),
        ({"chunks": 2}, "chunks is 2 with schedule '1f1b'"),
        ({"schedule": "interleaved"}, "pipeline_parallel of at least 2"),
        ({"data_parallel": 8, "shard_group": 3, "sharding": "zero3"}, r"shard_group \(3\).*: 2 or 4"),
        ({"shard_group": 1}, "sharding is 'none'"),
        ({"data_parallel": 8, "expert_parallel": 3}, r"expert_parallel \(3\).*: 2 or 4"),
        ({"stage_layers": (1, 2)}, "has 2 numbers; pipeline_parallel x chunks needs 1"),
        ({"micro_batch": 0}, "micro_batch is 0"),
    ],
)
def test_impossible_strategies_are_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Strategy(**given)  # type: ignore[arg-type]


def test_parts_are_checked() -> None:
    with pytest.raises(UsageError, match=r"nearest valid: 1.0"):
        Compression(ratio=2.0)
    with pytest.raises(UsageError, match=r"regime is 'seal'.*nearest: 'sealed'"):
        Replication(regime="seal")


def test_a_users_schedule_must_fit() -> None:
    schedule = from_lists([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]])
    with pytest.raises(UsageError, match=r"has 2 stages and 1 chunks"):
        Strategy(pipeline_parallel=4, schedule=schedule)
    strategy = Strategy(data_parallel=32, pipeline_parallel=2, schedule=schedule)
    strategy.check(MODEL, a100_cluster(8), 64)
    with pytest.raises(UsageError, match=r"of 2 micro-batches.*makes 4.*global_batch: 64"):
        strategy.check(MODEL, a100_cluster(8), 128)


@given(total=st.integers(1, 5000), wanted=st.integers(1, 5000))
def test_nearest_values_are_valid_and_nearest(total: int, wanted: int) -> None:
    divisors = nearest_divisors(total, wanted)
    assert all(total % d == 0 and d != wanted for d in divisors)
    between = range(divisors[0] + 1, divisors[-1]) if len(divisors) == 2 else ()
    assert not [d for d in between if total % d == 0 and d != wanted]
    for m in nearest_multiples(wanted, total):
        assert m % wanted == 0
        assert abs(m - total) <= wanted


@given(data=st.integers(1, 12), micro=st.integers(1, 12), batch=st.integers(1, 400))
def test_named_batches_are_then_accepted(data: int, micro: int, batch: int) -> None:
    strategy = Strategy(data_parallel=data, micro_batch=micro)
    try:
        assert strategy.num_micro_batches(batch) * data * micro == batch
    except UsageError as error:
        named = re.findall(r"\d+", str(error).split("nearest valid global_batch:")[1])
        assert named
        for value in named:
            strategy.num_micro_batches(int(value))


@pytest.mark.parametrize(("tensor", "near"), [(3, "2 or 4 or 8"), (6, "4 or 8"), (12, "8 or 16")])
def test_tensor_groups_that_straddle_nodes_are_refused(tensor: int, near: str) -> None:
    """On 12 nodes of 8 devices: some groups of 3 would lie in two nodes, and be priced as if in one."""
    model = Transformer(num_layers=40, hidden=6144, num_heads=48, sequence=2048, vocabulary=51200)
    strategy = Strategy(data_parallel=96 // tensor, tensor_parallel=tensor)
    says = rf"groups of tensor_parallel \({tensor}\) would straddle nodes of 8 devices; .*: {near}$"
    with pytest.raises(UsageError, match=says):
        strategy.check(model, a100_cluster(12), 384)
    for valid in (4, 8, 16):
        replace(strategy, data_parallel=96 // valid, tensor_parallel=valid).check(
            model, a100_cluster(12), 384
        )
