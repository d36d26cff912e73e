"""What failures cost, by the daemon's own core in simulated time."""

from flashrecd.simulate.run import simulate_failures

__all__ = ["simulate_failures"]
