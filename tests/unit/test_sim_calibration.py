"""The fit finds known constants again, is not bent by wild rows, and the figures of merit are what they say."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from flashrec.sim import calibration as cal
from flashrec.sim.analytic import Constants, load_constants
from flashrec.sim.cluster import a100_cluster
from flashrec.sim.collectives import MeasuredTable, RingConstants, ring_seconds
from flashrec.sim.events import Communication
from flashrec.sim.memory import estimate

REFERENCE = Path(__file__).parents[2] / "benchmarks" / "reference"
RING = RingConstants(intra_efficiency=0.9, copy_share=0.4, start_s=2e-5, step_s=3e-6)
TRUE = Constants(
    gemm_efficiency=0.8,
    memory_efficiency=0.75,
    kernel_start_s=cal.KERNEL_START_S,
    meeting_s=2e-4,
    ring=dataclasses.replace(RING, inter_efficiency=0.5),
)


@pytest.fixture(scope="module")
def cases() -> list[cal.Case]:
    return cal.read_steps(REFERENCE / "step_times_a100_cluster.csv")


def made(cases: list[cal.Case]) -> list[cal.Case]:
    """The rows with the times that TRUE would make of them."""
    return [dataclasses.replace(case, measured_s=case.predict(TRUE)) for case in cases]


def distance(found: Constants) -> float:
    pairs = [
        (found.gemm_efficiency, TRUE.gemm_efficiency),
        (found.memory_efficiency, TRUE.memory_efficiency),
        (found.meeting_s, TRUE.meeting_s),
        (found.ring.inter_efficiency, TRUE.ring.inter_efficiency),
    ]
    return max(abs(a / b - 1) for a, b in pairs)


def test_known_constants_are_found_again(cases: list[cal.Case]) -> None:
    rows = made(cases)[::3]
    found = cal.fit_steps(rows, RING)
    assert distance(found) < 0.08  # typical values count as a row each, and draw a little
    assert cal.assess(rows, [case.predict(found) for case in rows]).worst_error < 0.01


def test_wild_rows_do_not_bend_the_fit(cases: list[cal.Case]) -> None:
    rows = made(cases)[::2]
    for wild in (3, 10, 17):
        rows[wild] = dataclasses.replace(rows[wild], measured_s=1.6 * rows[wild].measured_s)
    found = cal.fit_steps(rows, RING)
    usual = [row for i, row in enumerate(rows) if i not in (3, 10, 17)]
    merit = cal.assess(usual, [row.predict(found) for row in usual])
    assert merit.mean_error < 0.02  # plain least squares would be 5 % off
    assert merit.worst_error < 0.06


def test_a_known_ring_is_found_again() -> None:
    cluster = a100_cluster(1)
    samples = []
    for ranks in range(2, 9):
        for size in (1 << 20, 1 << 24, 1 << 28, 1 << 30):
            event = Communication(
                collective="all_reduce", size_bytes=size, participants=ranks, device="A100-80GB"
            )
            samples.append((ranks, size, ring_seconds(event, cluster, RING)))
    found = cal.fit_ring(MeasuredTable.from_samples(samples))
    for name in ("intra_efficiency", "copy_share", "start_s", "step_s"):
        assert getattr(found, name) == pytest.approx(getattr(RING, name), rel=1e-6)


def test_the_ring_left_without_a_number_of_ranks_still_tells_it() -> None:
    table = MeasuredTable.from_csv(REFERENCE / "allreduce_a100_node.csv")
    for _, _, ring_mean, ring_worst in cal.all_reduce_errors(table).values():
        assert ring_mean < 0.06
        assert ring_worst < 0.25


def test_every_measured_step_is_said_to_fit(cases: list[cal.Case]) -> None:
    """They ran: an estimate above 80 GiB would be wrong."""
    for case in cases:
        stages = estimate(case.bill.model, case.bill.cluster, case.strategy, case.global_batch)
        assert all(stage.fits for stage in stages), case.name


def test_left_out_rows_are_not_seen(cases: list[cal.Case]) -> None:
    """Spoiling a fold's own times must not change what is predicted for it."""
    rows = made(cases)[::5]
    spoiled = [
        dataclasses.replace(r, measured_s=r.measured_s * (2 if i % 2 else 1)) for i, r in enumerate(rows)
    ]
    clean, constants = cal.cross_validate(rows, RING, lambda case, i: i % 2)
    other, _ = cal.cross_validate(spoiled, RING, lambda case, i: i % 2)
    assert clean[1::2] == other[1::2]
    assert clean[0::2] != other[0::2]
    assert len(constants) == 2


def test_figures_of_merit(cases: list[cal.Case]) -> None:
    rows = [dataclasses.replace(cases[0], name=str(t), measured_s=t) for t in (1.0, 2.0, 4.0)]
    merit = cal.assess(rows, [1.1, 2.0, 2.0])
    assert merit.mean_error == pytest.approx((0.1 + 0 + 0.5) / 3)
    assert (merit.worst_error, merit.worst_case) == (pytest.approx(0.5), "4.0")
    assert merit.within == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert merit.regret == 0
    assert cal.assess(rows, [3.0, 2.5, 9.0]).regret == pytest.approx(1.0)
    assert cal.spearman(np.array([1.0, 2, 3]), np.array([3.0, 5, 9])) == pytest.approx(1)
    assert cal.spearman(np.array([1.0, 2, 3]), np.array([9.0, 5, 3])) == pytest.approx(-1)


def test_the_package_carries_what_the_fit_gives(cases: list[cal.Case]) -> None:
    """The data file is the command's output, not typed in."""
    ring = cal.fit_ring(MeasuredTable.from_csv(REFERENCE / "allreduce_a100_node.csv"))
    found, kept = cal.fit_steps(cases, ring), load_constants()
    assert found.gemm_efficiency == pytest.approx(kept.gemm_efficiency, rel=1e-3)
    assert found.memory_efficiency == pytest.approx(kept.memory_efficiency, rel=1e-3)
    assert found.meeting_s == pytest.approx(kept.meeting_s, rel=1e-2)
    assert found.ring.inter_efficiency == pytest.approx(kept.ring.inter_efficiency, rel=1e-3)


def test_accuracy_of_what_the_package_carries(cases: list[cal.Case]) -> None:
    """Guards the figures that the documents give."""
    constants = load_constants()
    merit = cal.assess(cases, [case.predict(constants) for case in cases])
    assert merit.median_error < 0.04
    assert merit.mean_error < 0.08
    assert merit.within[1] > 0.8


def test_megatron_rows_are_read_with_their_assumptions() -> None:
    rows = cal.read_megatron(REFERENCE / "megatron_sc21_weak_scaling.csv")
    assert [row.strategy.schedule for row in rows] == ["1f1b", "1f1b", "interleaved", "interleaved", "1f1b"]
    constants = load_constants()
    assert all(abs(row.predict(constants) / row.measured_s - 1) < 0.25 for row in rows)
