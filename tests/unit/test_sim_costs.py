"""Events -> layers -> stages -> replicas, with durations that can be summed by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.sim.architecture import Division
from flashrec.sim.bill import StepBill, place
from flashrec.sim.cluster import Cluster, a100_cluster
from flashrec.sim.costs import build, make_schedule, replica_classes
from flashrec.sim.engine import StepCosts, run
from flashrec.sim.events import Communication, Event, parse
from flashrec.sim.model import Transformer
from flashrec.sim.profile import MissingEvents, Profile, Sample
from flashrec.sim.strategy import Compression, Replication, Strategy

MODEL = Transformer(num_layers=8, hidden=1024, num_heads=16, sequence=512, vocabulary=32000)
CLUSTER = a100_cluster(4)  # 32 devices


class Counted:
    """A kernel takes 1 s, a collective 1,000 s, so that a sum tells how many of each it has."""

    def seconds(self, key: Event) -> float:
        return 1000.0 if isinstance(key, Communication) else 1.0


class Volume:
    """A collective takes a second a byte, kernels nothing."""

    def __init__(self) -> None:
        self.asked: list[Communication] = []

    def seconds(self, key: Event) -> float:
        if isinstance(key, Communication):
            self.asked.append(key)
            return float(key.size_bytes) if key.participants > 1 or key.collective == "host_copy" else 0.0
        return 0.0


def costs(strategy: Strategy, batch: int = 64, cluster: Cluster = CLUSTER) -> StepCosts:
    return build(MODEL, cluster, strategy, batch, Counted())


def test_stages_have_their_layers_embedding_first_and_head_last() -> None:
    found = costs(Strategy(data_parallel=8, pipeline_parallel=4, stage_layers=(1, 3, 2, 2)))
    blocks = MODEL.blocks(Division(micro_batch=1))
    embedding, layer, head = (
        len(b.forward.gemms) + len(b.forward.traffic) for b in (blocks[0], blocks[1], blocks[-1])
    )
    assert found.forward[:, 0].tolist() == [embedding + layer, 3 * layer, 2 * layer, 2 * layer + head]
    assert found.weights.tolist() == [8]
    assert found.send_forward[:, 0].tolist() == [1000.0] * 3


@pytest.mark.parametrize(("sequence_parallel", "forward", "backward"), [(False, 2, 2), (True, 4, 6)])
def test_tensor_parallel_exchanges_of_a_layer(sequence_parallel: bool, forward: int, backward: int) -> None:
    found = costs(
        Strategy(data_parallel=2, tensor_parallel=8, pipeline_parallel=2, sequence_parallel=sequence_parallel)
    )
    bigger = costs(
        Strategy(
            data_parallel=2,
            tensor_parallel=8,
            pipeline_parallel=2,
            sequence_parallel=sequence_parallel,
            stage_layers=(5, 3),
        )
    )
    assert (bigger.forward - found.forward)[0, 0] // 1000 == forward
    assert (bigger.backward - found.backward)[0, 0] // 1000 == backward


def test_full_recomputation_adds_a_forward_and_selective_the_attention() -> None:
    base = {"data_parallel": 2, "tensor_parallel": 8, "pipeline_parallel": 2}
    none, selective, full = (
        costs(Strategy(**base, recompute=kind))
        for kind in ("none", "selective", "full")  # type: ignore[arg-type]
    )
    layer = MODEL.blocks(Division(micro_batch=1, tensor_parallel=8))[1]
    kernels = len(layer.forward.gemms) + len(layer.forward.traffic)
    assert (full.backward - none.backward)[:, 0].tolist() == [4 * (kernels + 2000)] * 2
    again = len(layer.selective.gemms) + len(layer.selective.traffic)
    assert (selective.backward - none.backward)[:, 0].tolist() == [4 * again] * 2
    assert np.array_equal(full.forward, none.forward)


def test_zero_bubble_splits_the_same_backward() -> None:
    whole = costs(Strategy(data_parallel=8, pipeline_parallel=4))
    split = costs(Strategy(data_parallel=8, pipeline_parallel=4, schedule="zb-h1"))
    assert np.array_equal(split.backward + split.weight, whole.backward)
    assert split.weight.min() > 0
    assert not whole.weight.any()


def test_a_slow_device_slows_its_tensor_group_and_splits_a_class_off() -> None:
    strategy = Strategy(data_parallel=4, tensor_parallel=4, pipeline_parallel=2)
    even = costs(strategy)
    device = 1 * 16 + 2 * 4 + 3  # stage 1, replica 2, tensor rank 3
    uneven = costs(strategy, cluster=dataclasses.replace(CLUSTER, speed_factors={device: 0.5}))
    assert sorted(uneven.weights.tolist()) == [1, 3]
    slow = int(uneven.weights.argmin())
    exchange = even.forward // 1000 * 1000
    assert uneven.forward[1, slow] - exchange[1, 0] == 2 * (even.forward - exchange)[1, 0]
    assert uneven.forward[0, slow] == even.forward[0, 0]
    assert np.array_equal(uneven.forward[:, 1 - slow], even.forward[:, 0])


@given(speeds=st.lists(st.sampled_from([0.5, 0.8, 1.0]), min_size=32, max_size=32))
def test_classes_stand_for_every_replica(speeds: list[float]) -> None:
    strategy = Strategy(data_parallel=8, tensor_parallel=2, pipeline_parallel=2)
    cluster = dataclasses.replace(CLUSTER, speed_factors=dict(enumerate(speeds)))
    slowness, weights = replica_classes(cluster, strategy)
    assert weights.sum() == 8
    expected = np.array(speeds).reshape(2, 8, 2).min(axis=2)
    assert sorted(map(tuple, np.repeat(1 / slowness, weights, axis=1).T)) == sorted(map(tuple, expected.T))


def gradients(**given: object) -> tuple[StepCosts, Volume]:
    volume = Volume()
    strategy = Strategy(data_parallel=32, **given)  # type: ignore[arg-type]
    return build(MODEL, CLUSTER, strategy, 64, volume), volume


def test_gradients_are_exchanged_once_whatever_the_buckets() -> None:
    size = 2 * MODEL.parameters
    one, _ = gradients(gradient_buckets=1)
    many, _ = gradients(gradient_buckets=7)
    assert one.grad_sync.tolist() == [[size]]
    assert many.grad_sync.shape == (1, 7)
    assert many.grad_sync.sum() == pytest.approx(size, abs=7)
    fp32, _ = gradients(gradient_dtype="fp32", gradient_buckets=1)
    assert fp32.grad_sync.sum() == 2 * size
    small, _ = gradients(compression=Compression(ratio=0.25), gradient_buckets=1)
    assert small.grad_sync.sum() == size // 4


def test_zero_scatters_gradients_and_gathers_parameters() -> None:
    size = 2 * MODEL.parameters
    zero1, asked = gradients(sharding="zero1", gradient_buckets=1)
    assert zero1.grad_sync.sum() == size
    assert zero1.finish.tolist() == [size]
    assert {e.collective for e in asked.asked} == {"reduce_scatter", "all_gather"}
    zero3, asked = gradients(sharding="zero3", gradient_buckets=1)
    assert zero3.finish.tolist() == [0]
    # Kernels take nothing here, so that nothing is hidden: parameters twice, gradients once a micro-batch.
    assert zero3.forward.sum() == size
    assert zero3.backward.sum() == 2 * size
    _, asked = gradients(sharding="zero1", shard_group=8, gradient_buckets=1)
    replicated = [e for e in asked.asked if e.collective == "all_reduce"]
    assert [(e.size_bytes, e.participants, e.nodes, e.groups) for e in replicated] == [(size // 8, 4, 4, 8)]


def test_zero3_hides_gathers_behind_enough_compute() -> None:
    class Fast(Counted):
        def seconds(self, key: Event) -> float:
            return 0.5 if isinstance(key, Communication) else 1.0

    plain = build(MODEL, CLUSTER, Strategy(data_parallel=32), 64, Fast())
    hidden = build(MODEL, CLUSTER, Strategy(data_parallel=32, sharding="zero3"), 64, Fast())
    assert np.array_equal(plain.forward, hidden.forward)
    shown = build(
        MODEL, CLUSTER, Strategy(data_parallel=32, sharding="zero3", overlap_parameters=False), 64, Fast()
    )
    assert shown.forward.sum() == plain.forward.sum() + 0.5 * (MODEL.num_layers + 2)


def test_replication_shows_only_what_the_step_does_not_hide() -> None:
    def optimizer(replication: Replication | None, kernel_s: float) -> float:
        class Timed(Volume):
            def seconds(self, key: Event) -> float:
                return super().seconds(key) if isinstance(key, Communication) else kernel_s

        strategy = Strategy(data_parallel=32, replication=replication)
        return float(build(MODEL, CLUSTER, strategy, 64, Timed()).optimizer[0, 0])

    gate, state = 64, 14 * MODEL.parameters + 4096
    assert optimizer(None, 0.0) == 0
    assert optimizer(Replication(regime="live"), 0.0) == gate + 2 * 4096
    assert optimizer(Replication(regime="sealed", copies=2), 0.0) == pytest.approx(gate + 3 * state)
    assert optimizer(Replication(regime="sealed", copies=2, every_steps=4), 0.0) == pytest.approx(
        gate + 3 * state / 4
    )
    long = 1e9  # each kernel: more than the copies take
    assert optimizer(Replication(regime="sealed"), long) == pytest.approx(long + gate)
    slowed = optimizer(Replication(regime="sealed", slowdown=0.1), long)
    assert slowed == pytest.approx(long + gate + 0.1 * 2 * state)


def test_tied_embeddings_are_summed_between_the_ends() -> None:
    volume = Volume()
    tied = build(
        MODEL, CLUSTER, Strategy(data_parallel=8, tensor_parallel=2, pipeline_parallel=2), 64, volume
    )
    assert tied.tied_sync == 2 * MODEL.vocabulary * MODEL.hidden / 2
    untied = dataclasses.replace(MODEL, tied_embeddings=False)
    strategy = Strategy(data_parallel=8, tensor_parallel=2, pipeline_parallel=2)
    assert build(untied, CLUSTER, strategy, 64, volume).tied_sync == 0


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (8, 1, (8, 1, 1)),
        (16, 1, (16, 2, 1)),
        (4, 8, (4, 4, 8)),
        (32, 1, (32, 4, 1)),
        (8, 2, (8, 2, 2)),
        (4, 1, (4, 1, 2)),
    ],
)
def test_groups_lie_where_their_ranks_do(size: int, stride: int, expected: tuple[int, int, int]) -> None:
    assert dataclasses.astuple(place(CLUSTER, size, stride)) == expected


def test_sends_cross_nodes_only_where_stages_do() -> None:
    inside = StepBill(
        MODEL, a100_cluster(1), Strategy(data_parallel=1, tensor_parallel=4, pipeline_parallel=2)
    ).send(0)
    across = StepBill(MODEL, a100_cluster(2), Strategy(tensor_parallel=8, pipeline_parallel=2)).send(0)
    assert inside is not None
    assert across is not None
    assert (inside.nodes, across.nodes, across.groups) == (1, 2, 8)
    assert across.size_bytes == 2 * 512 * 1024
    parts = Strategy(tensor_parallel=8, pipeline_parallel=2, scatter_sends=True)
    part = StepBill(MODEL, a100_cluster(2), parts).send(0)
    assert part is not None
    assert part.size_bytes == across.size_bytes // 8


def test_everything_missing_is_named_at_once() -> None:
    strategy = Strategy(data_parallel=8, tensor_parallel=2, pipeline_parallel=2)
    with pytest.raises(MissingEvents) as raised:
        build(MODEL, CLUSTER, strategy, 64, Profile())
    missing = set(raised.value.events)
    assert {str(e) for e in StepBill(MODEL, CLUSTER, strategy).events()} <= missing
    assert any(text.startswith("all_reduce") for text in missing)
    one = Sample(min_s=1, median_s=1, count=1)
    full = Profile({parse(text): one for text in missing})
    assert build(MODEL, CLUSTER, strategy, 64, full).forward.min() > 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_the_engine_runs_what_is_built(schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    strategy = Strategy(data_parallel=8, pipeline_parallel=4, schedule=schedule, chunks=chunks)
    found = costs(strategy)
    timeline = run(make_schedule(strategy, 64), found)
    assert timeline.batch_s > 8 * (found.forward + found.backward).sum(axis=1).max()
