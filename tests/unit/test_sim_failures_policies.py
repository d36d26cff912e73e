"""Checkpoint-restart and replica-dropping: the simulation against closed forms, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.failures.dropping import dropping_goodput, simulate_dropping
from flashrec.sim.failures.restarts import (
    daly_interval,
    restart_goodput,
    simulate_restarts,
    young_interval,
)

DAY_S = 86_400.0


def poisson(mtbf_s: float, duration_s: float, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return list(np.sort(rng.random(rng.poisson(duration_s / mtbf_s)) * duration_s))


@pytest.mark.parametrize(
    ("interval_s", "save_s", "restart_s", "mtbf_s"),
    [(800, 30, 300, 11_000), (3600, 60, 600, 7200), (100, 30, 60, 1000), (2000, 10, 900, 1500)],
)
def test_restarts_agree_with_the_closed_form(
    interval_s: float, save_s: float, restart_s: float, mtbf_s: float
) -> None:
    """Mean over 60 seeds, within 3.5 standard errors, which are under 1 %."""
    duration_s = 300 * mtbf_s
    runs = [
        simulate_restarts(
            poisson(mtbf_s, duration_s, seed), duration_s, interval_s, save_s, restart_s
        ).goodput
        for seed in range(60)
    ]
    error = float(np.std(runs, ddof=1)) / math.sqrt(len(runs))
    exact = restart_goodput(interval_s, save_s, restart_s, mtbf_s)
    assert error < 0.01
    # The last, unfinished segment of a run of 300 failures is worth at most 1/300.
    assert abs(float(np.mean(runs)) - exact) < 3.5 * error + interval_s / duration_s * exact


@given(st.floats(0.1, 1e4), st.floats(10, 1e7), st.floats(0, 1e4))
def test_daly_is_the_best_interval_and_young_its_first_order(
    save_s: float, mtbf_s: float, restart_s: float
) -> None:
    best = daly_interval(save_s, mtbf_s)
    at_best = restart_goodput(best, save_s, restart_s, mtbf_s)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert restart_goodput(best * factor, save_s, restart_s, mtbf_s) <= at_best * (1 + 1e-9)
    if save_s < mtbf_s / 1000:
        assert young_interval(save_s, mtbf_s) == pytest.approx(best, rel=0.03)


def test_dalys_series_is_the_exact_minimum_to_its_order() -> None:
    """Daly 2006, eq. 37: sqrt(2 d M) [1 + 1/3 (d / 2M)^(1/2) + 1/9 (d / 2M)] - d."""
    for share in (1e-4, 1e-3, 1e-2):
        save_s, mtbf_s = share * 1e4, 1e4
        root = math.sqrt(save_s / (2 * mtbf_s))
        series = math.sqrt(2 * save_s * mtbf_s) * (1 + root / 3 + root**2 / 9) - save_s
        assert daly_interval(save_s, mtbf_s) == pytest.approx(series, rel=share)


def test_restarts_by_hand() -> None:
    ran = simulate_restarts([250.0, 255.0, 400.0], 600.0, 90.0, 10.0, 20.0)
    # 0-250: two segments, 50 lost. 250-255: the restart is struck, and begins again: 255-275. 275-400: one, 25 lost.
    # 420-600: one whole segment, and 80 s of work that nothing takes away.
    assert ran.useful_s == 180 + 90 + 90 + 80
    assert ran.lost_s == 50 + 25
    assert ran.outages_s == (70.0, 20.0, 45.0)
    assert simulate_restarts([], 600.0, 90.0, 10.0, 20.0).useful_s == 540.0


@example([15.698556935338786], 15.698556935338786, 0.0, 0.0)  # whose segments add up to an ulp too much
@given(st.lists(st.floats(0, 1000), max_size=10), st.floats(1, 500), st.floats(0, 50), st.floats(0, 100))
def test_more_failures_or_a_longer_restart_never_help(
    times: list[float], interval_s: float, save_s: float, restart_s: float
) -> None:
    times.sort()
    ran = simulate_restarts(times, 1000.0, interval_s, save_s, restart_s)
    assert 0 <= ran.goodput <= 1
    assert ran.useful_s + ran.lost_s <= 1000.0 + 1e-6
    none = simulate_restarts([], 1000.0, interval_s, save_s, restart_s)
    assert ran.useful_s <= none.useful_s + 1e-6 + interval_s  # a failure may spare a saving, never more


def drop(faults: list[tuple[float, tuple[int, ...]]], duration_s: float = 1000.0, replicas: int = 4) -> float:
    ran = simulate_dropping(
        faults, duration_s=duration_s, replicas=replicas, step_s=2.0, away_s=100.0, drop_s=3.0, join_s=5.0
    )
    return ran.useful_s


def test_dropping_by_hand() -> None:
    assert drop([]) == 1000.0
    # 100 whole; half a step thrown away; 3 s pause, 97 s at 3/4; 5 s pause; the rest whole.
    assert drop([(100.0, (2,))]) == pytest.approx(100 - 1 + 97 * 0.75 + (1000 - 205))
    # Struck again while it restarts: away until 250, and nobody else is disturbed.
    assert drop([(100.0, (2,)), (150.0, (2,))]) == pytest.approx(100 - 1 + 147 * 0.75 + (1000 - 255))
    # All of them: nothing until they are back.
    ran = simulate_dropping(
        [(100.0, (0, 1))],
        duration_s=1000.0,
        replicas=2,
        step_s=2.0,
        away_s=100.0,
        drop_s=3.0,
        join_s=5.0,
        interval_s=40.0,
    )
    assert ran.restarts == 1
    assert ran.lost_s == 20.0
    assert ran.useful_s == pytest.approx(100 - 20 + 1000 - 205)


def test_dropping_agrees_with_the_closed_form() -> None:
    replicas, replica_mtbf_s, duration_s = 8, 40_000.0, 4e6
    runs = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        faults = sorted(
            (t, (replica,))
            for replica in range(replicas)
            for t in poisson(replica_mtbf_s, duration_s, rng.integers(1e9))
        )
        ran = simulate_dropping(
            faults,
            duration_s=duration_s,
            replicas=replicas,
            step_s=10.0,
            away_s=600.0,
            drop_s=2.0,
            join_s=4.0,
        )
        runs.append(ran.goodput)
    error = float(np.std(runs, ddof=1)) / math.sqrt(len(runs))
    exact = dropping_goodput(replicas, replica_mtbf_s, 600.0, 2.0, 4.0, 5.0)
    assert error < 5e-4
    assert abs(float(np.mean(runs)) - exact) < 3.5 * error + 2e-4


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: young_interval(0, 1), "save_s must be positive and finite, not 0"),
        (lambda: daly_interval(1, math.inf), "mtbf_s must be positive"),
        (lambda: simulate_restarts([], 10, 1, -1, 0), "cannot be negative"),
        (lambda: drop([], replicas=0), "must be positive"),
    ],
)
def test_what_cannot_be_is_refused(wrong: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        wrong()  # type: ignore[operator]
