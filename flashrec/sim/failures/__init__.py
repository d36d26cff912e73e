"""What failures cost a job, and what may be done about them. `flashrecd.simulate` drives the daemon's core with it."""

from flashrec.sim.failures.costs import RecoveryCosts
from flashrec.sim.failures.estimate import GoodputEstimate, estimate, expected_goodput
from flashrec.sim.failures.report import FailureReport, PolicyResult
from flashrec.sim.failures.scenario import FailureScenario
from flashrec.sim.failures.traces import FailureRates, Fault, Layout, Scope, draw, read_trace, write_trace

__all__ = [
    "FailureRates",
    "FailureReport",
    "FailureScenario",
    "Fault",
    "GoodputEstimate",
    "Layout",
    "PolicyResult",
    "RecoveryCosts",
    "Scope",
    "draw",
    "estimate",
    "expected_goodput",
    "read_trace",
    "write_trace",
]
