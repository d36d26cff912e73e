"""Checkpoint-restart: a job that saves to disk every so often, and starts again from there after each failure.

Derivation of the expected time. Failures are exponential with mean M. A segment is tau of useful work and delta of
saving; if a failure strikes within it, a restart of R must pass (itself exposed to failures) and the segment begins
anew. The expected number of failures before w = tau + delta passes without one is e^(w/M) - 1. The expected time
spent in the attempts is M (e^(w/M) - 1), and a restart that must pass without failure takes M (e^(R/M) - 1) in
expectation, for each of those failures. The sum is M e^(R/M) (e^(w/M) - 1): Daly 2006 (J. T. Daly, A higher order
estimate of the optimum checkpoint interval for restart dumps, FGCS 22), where the useful share is tau over it. Young
1974 (J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17) minimises delta / tau +
tau / 2M: tau = sqrt(2 delta M).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashrec.errors import UsageError


def _check(**positive: float) -> None:
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name} must be positive and finite, not {value}")


def young_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between two savings: the first order."""
    _check(save_s=save_s, mtbf_s=mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """The minimum of the expected time over tau. Its derivative is nil where (1 - tau/M) e^((tau + delta)/M) = 1; with
    x = tau/M that is found by bisection on (0, 1), exactly, where Daly 2006 gives a series."""
    _check(save_s=save_s, mtbf_s=mtbf_s)
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle < 1 and math.log1p(-middle) + middle + save_s / mtbf_s > 0:
            low = middle
        else:
            high = middle
    return max(low, 1e-12) * mtbf_s


def restart_goodput(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """The expected useful share of time, in closed form (see above). May be 0 where nothing ever gets done."""
    _check(interval_s=interval_s, mtbf_s=mtbf_s)
    exponent = (restart_s + interval_s + save_s) / mtbf_s
    if exponent > 600:
        return 0.0
    segment = math.expm1((interval_s + save_s) / mtbf_s)
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * segment)


@dataclass(frozen=True, slots=True)
class Restarts:
    """What checkpoint-restart did in `duration_s`. `useful_s`: work that was saved, or not lost by the end.
    `outages_s`: from each failure until training is where it had been: the restart, and the work done again."""

    duration_s: float
    useful_s: float
    lost_s: float
    outages_s: tuple[float, ...]

    @property
    def goodput(self) -> float:
        return self.useful_s / self.duration_s


def simulate_restarts(
    fault_times_s: Sequence[float], duration_s: float, interval_s: float, save_s: float, restart_s: float
) -> Restarts:
    """One run through `fault_times_s` (ascending); O(faults). A failure during a restart begins it anew."""
    _check(duration_s=duration_s, interval_s=interval_s)
    if save_s < 0 or restart_s < 0:
        raise UsageError(f"save_s and restart_s cannot be negative: {save_s}, {restart_s}")
    segment = interval_s + save_s
    useful = lost = 0.0
    began, outages = 0.0, []
    for at_s in (*fault_times_s, None):
        end = duration_s if at_s is None else min(at_s, duration_s)
        ran = end - began
        if ran > 0:
            whole = math.floor(ran / segment)
            rest = min(ran - whole * segment, interval_s)
            useful += whole * interval_s
            if at_s is None or at_s >= duration_s:
                useful += rest
            else:
                lost += rest
        if at_s is None or at_s >= duration_s:
            break
        outages.append(restart_s + (rest if ran > 0 else 0.0))
        began = at_s + restart_s
    # A sum over many segments may come out an ulp above the time that they share.
    return Restarts(duration_s, min(useful, duration_s), lost, tuple(outages))
