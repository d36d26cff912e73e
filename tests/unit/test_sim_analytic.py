"""The device model and the ring, against closed forms and measured all-reduces."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.analytic import AnalyticDurations, Constants, load_constants
from flashrec.sim.cluster import DEVICES, Cluster, Link, a100_cluster
from flashrec.sim.collectives import MeasuredTable, RingConstants, ring_seconds
from flashrec.sim.events import Communication, Compute

REFERENCE = Path(__file__).parents[2] / "benchmarks" / "reference"
PERFECT = RingConstants()
CONSTANTS = Constants(
    gemm_efficiency=0.5, memory_efficiency=0.25, kernel_start_s=1e-6, meeting_s=1e-4, ring=PERFECT
)


def collective(name: str, size: int, participants: int, nodes: int = 1, groups: int = 1) -> Communication:
    return Communication(
        collective=name,
        size_bytes=size,
        participants=participants,
        nodes=nodes,
        groups=groups,
        device="A100-80GB",
    )


def cluster(**changes: float) -> Cluster:
    return dataclasses.replace(
        Cluster(
            device=DEVICES["A100-80GB"],
            num_nodes=4,
            devices_per_node=8,
            intra_link=Link(bandwidth_bytes_s=100e9),
            inter_link=Link(bandwidth_bytes_s=40e9),
        ),
        **changes,  # type: ignore[arg-type]
    )


@given(size=st.integers(1, 1 << 34), n=st.integers(2, 8))
def test_a_perfect_ring_takes_its_volume(size: int, n: int) -> None:
    assert ring_seconds(collective("all_reduce", size, n), cluster(), PERFECT) == pytest.approx(
        2 * (n - 1) / n * size / 100e9
    )
    halves = [
        ring_seconds(collective(c, size, n), cluster(), PERFECT) for c in ("reduce_scatter", "all_gather")
    ]
    assert sum(halves) == pytest.approx(ring_seconds(collective("all_reduce", size, n), cluster(), PERFECT))


def test_the_network_is_shared_by_the_groups_of_a_node() -> None:
    whole = ring_seconds(collective("all_reduce", 1 << 30, 32, nodes=4), cluster(), PERFECT)
    assert whole == pytest.approx(2 * 31 / 32 * (1 << 30) / 40e9)
    eighth = ring_seconds(collective("all_reduce", 1 << 30, 4, nodes=4, groups=8), cluster(), PERFECT)
    assert eighth == pytest.approx(2 * 3 / 4 * (1 << 30) / 5e9)
    alone = ring_seconds(collective("all_reduce", 1 << 30, 4, nodes=4, groups=1), cluster(), PERFECT)
    assert alone == pytest.approx(eighth)  # one device has its own cards only
    blocked = ring_seconds(collective("send", 1 << 30, 2, 2, 8), cluster(oversubscription=2.0), PERFECT)
    assert blocked == pytest.approx((1 << 30) / 2.5e9)


@given(size=st.integers(1, 1 << 34), n=st.integers(1, 8), more=st.integers(0, 1 << 30))
def test_more_bytes_never_take_less(size: int, n: int, more: int) -> None:
    ring = RingConstants(intra_efficiency=0.9, copy_share=0.5, start_s=1e-5, step_s=1e-6)
    less, greater = (
        ring_seconds(collective("all_reduce", s, n), cluster(), ring) for s in (size, size + more)
    )
    assert less <= greater


def test_kernels_take_arithmetic_operands_and_a_start() -> None:
    durations = AnalyticDurations(cluster(), CONSTANTS)
    gemm = Compute(operator="gemm", shape=(2, 64, 128, 256), dtype="bf16", device="A100-80GB")
    bandwidth = 0.25 * 2.039e12
    assert durations.seconds(gemm) == pytest.approx(
        gemm.flops / 156e12 + gemm.traffic_bytes / bandwidth + 1e-6
    )
    traffic = Compute(operator="traffic", shape=(1 << 20,), dtype="bf16", device="A100-80GB")
    assert durations.seconds(traffic) == pytest.approx((1 << 20) / bandwidth + 1e-6)


def test_ranks_meet_before_collectives_but_not_before_sends() -> None:
    durations = AnalyticDurations(cluster(), CONSTANTS)
    for name, wait in (("all_reduce", 1e-4), ("all_gather", 1e-4), ("send", 0.0)):
        event = collective(name, 1 << 20, 2)
        assert durations.seconds(event) == pytest.approx(ring_seconds(event, cluster(), PERFECT) + wait)
    assert durations.seconds(collective("all_reduce", 1 << 20, 1)) == 0.0


@given(side=st.integers(1, 8192))
def test_efficiency_rises_with_size_and_stays_below_its_limit(side: int) -> None:
    durations = AnalyticDurations(cluster(), CONSTANTS)

    def efficiency(m: int) -> float:
        event = Compute(operator="gemm", shape=(1, m, m, m), dtype="bf16", device="A100-80GB")
        return event.flops / durations.seconds(event) / 312e12

    assert efficiency(side) < efficiency(side + 1) < 0.5


def test_fitted_constants_are_in_the_package_and_other_devices_say_they_are_not_calibrated() -> None:
    constants = load_constants()
    assert 0.5 < constants.gemm_efficiency <= 1
    assert AnalyticDurations(a100_cluster(1)).calibrated
    h100 = dataclasses.replace(cluster(), device=DEVICES["H100-80GB"])
    assert not AnalyticDurations(h100).calibrated


def test_constants_are_read_strictly() -> None:
    found = json.loads(json.dumps(CONSTANTS.to_json()))
    assert Constants.from_json(found) == CONSTANTS
    with pytest.raises(UsageError, match=r"did you mean 'meeting_s'"):
        Constants.from_json({**found, "meting_s": 1})
    del found["meeting_s"]
    with pytest.raises(UsageError, match=r"missing meeting_s"):
        Constants.from_json(found)
    with pytest.raises(UsageError, match=r"at most 1"):
        dataclasses.replace(CONSTANTS, gemm_efficiency=1.1)


def test_a_table_gives_back_what_was_measured() -> None:
    table = MeasuredTable.from_csv(REFERENCE / "allreduce_a100_node.csv")
    for ranks, (sizes, times) in table.rows.items():
        for size, seconds in zip(sizes, times, strict=True):
            assert table.seconds(size, ranks) == pytest.approx(seconds)


def test_a_table_goes_on_above_and_between() -> None:
    table = MeasuredTable.from_csv(REFERENCE / "allreduce_a100_node.csv")
    above = table.seconds(4 << 30, 8)
    assert above == pytest.approx(4 * table.seconds(1 << 30, 8), rel=0.05)
    for left_out in (5, 6, 7):
        rest = table.without(left_out)
        errors = [
            abs(rest.seconds(size, left_out) / seconds - 1)
            for size, seconds in zip(*table.rows[left_out], strict=True)
        ]
        assert sum(errors) / len(errors) < 0.03
    with pytest.raises(UsageError, match=r"one size measured"):
        MeasuredTable.from_samples([(2, 1, 1.0)])
