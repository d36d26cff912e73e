"""What a simulation of failures found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flashrec.sim.failures.estimate import fatal_rate, outage_s
from flashrec.sim.failures.restarts import daly_interval, young_interval
from flashrec.sim.failures.scenario import FailureScenario
from flashrec.sim.failures.traces import Scope

NEGLIGIBLE = 1e-4  # of goodput: fewer replicas are better then, for they cost memory


def quantiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """p50, p90, p99; nan without any."""
    if not seconds:
        return (float("nan"),) * 3
    p50, p90, p99 = np.quantile(np.asarray(seconds), (0.5, 0.9, 0.99))
    return float(p50), float(p90), float(p99)


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """`goodput`: useful undisturbed steps over the whole time. `lost_steps`: committed, and done again. Seconds are
    from a failure until training goes on (replica-dropping: for the others). `fatal`: how often all state came from
    disk although the policy is to avoid that."""

    policy: str
    goodput: float
    lost_steps: float
    recoveries: int
    p50_s: float
    p90_s: float
    p99_s: float
    recovery_bytes: float
    replication_bytes: float
    fatal: int


@dataclass(frozen=True, slots=True)
class FailureReport:
    """`replica_choices`: goodput by K. `disk_interval_s`: the best for flashrec, whose checkpoints are for the loss of
    owner and replicas only; `restart_interval_s`: for checkpoint-restart, `young_s` its first order."""

    scenario: FailureScenario
    policies: tuple[PolicyResult, ...]
    replica_choices: Mapping[int, float]
    best_replicas: int
    disk_interval_s: float
    restart_interval_s: float
    young_s: float
    why_fatal: Mapping[str, int]

    @classmethod
    def of(
        cls,
        scenario: FailureScenario,
        policies: tuple[PolicyResult, ...],
        choices: Mapping[int, float],
        why_fatal: Mapping[str, int],
    ) -> FailureReport:
        best = scenario.replicas
        if choices:
            most = max(choices.values())
            best = min(k for k, goodput in choices.items() if goodput >= most - NEGLIGIBLE)
        mtbf_s = scenario.mtbf_s()
        fatal = fatal_rate(scenario.with_replicas(best), outage_s(scenario, Scope.NODE))
        # The leader's node is one of them, and has no replica.
        fatal += scenario.rates.rate_per_s(scenario.layout, Scope.NODE) / scenario.layout.nodes
        stall_s = max(scenario.save_s * scenario.costs.step_overhead, 1e-3)
        longest_s = scenario.duration_s
        disk_s = min(daly_interval(stall_s, 1 / fatal), longest_s) if fatal > 0 else longest_s
        return cls(
            scenario,
            policies,
            dict(choices),
            best,
            max(disk_s, scenario.save_s),
            daly_interval(scenario.save_s, mtbf_s),
            young_interval(scenario.save_s, mtbf_s),
            dict(why_fatal),
        )

    @property
    def goodput(self) -> float:
        """flashrec's."""
        return self.policies[0].goodput

    def policy(self, name: str) -> PolicyResult:
        return next(one for one in self.policies if one.policy == name)

    def table(self) -> str:
        """For a person, in Markdown."""
        head = (
            *("policy", "goodput", "steps done again", "recoveries", "p50 s", "p90 s", "p99 s"),
            *("recovery TB", "replication TB", "from disk"),
        )
        rows = [
            (
                *(one.policy, f"{one.goodput:.4f}", f"{one.lost_steps:.0f}", str(one.recoveries)),
                *(f"{seconds:.2f}" for seconds in (one.p50_s, one.p90_s, one.p99_s)),
                *(f"{one.recovery_bytes / 1e12:.3f}", f"{one.replication_bytes / 1e12:.0f}", str(one.fatal)),
            )
            for one in self.policies
        ]
        lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
        lines.insert(1, "|---" * len(head) + "|")
        choices = ", ".join(f"K = {k}: {g:.5f}" for k, g in self.replica_choices.items())
        lines.append("")
        if choices:
            lines.append(f"Best K: {self.best_replicas} ({choices}).")
        lines.append(
            f"Disk checkpoints every {self.disk_interval_s:.0f} s (flashrec), {self.restart_interval_s:.0f} s "
            f"(checkpoint-restart; Young: {self.young_s:.0f} s)."
        )
        if self.why_fatal:
            lines.append("From disk: " + ", ".join(f"{n} x {why}" for why, n in self.why_fatal.items()) + ".")
        return "\n".join(lines)
