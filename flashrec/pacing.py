"""How often a full version may be sealed in the live regime, by what one takes of this rank's time. No torch.

A step's time is the shorter of what passes and of the process's CPU time: where ranks outnumber cores a step takes
longer than its work, and sealing is work too. This is one rank's wish. The ranks agree on the longest of them in each
gate, and seal the same versions.
"""

import math
import statistics
from collections import deque

from flashrec.happenings import NEVER

BUDGET = 0.01
"""Of a step's time, what sealing may take on average."""

_STEPS = 15  # as many make a step's time: their median


class Pace:
    """`every`: the user's word, steps from one full version to the next (0: none); None: by the budget."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._committed: tuple[int, int, int] | None = None  # version, instant, CPU time by then
        self._cost_s: float | None = None
        self.why_never = "the script says so: protect(seal_every=0)" if every == 0 else ""

    def refuse(self, why: str) -> None:
        """No more from now on."""
        self.why_never = self.why_never or why

    def sealed(self, cost_s: float) -> None:
        """A full version took `cost_s` of this rank's time."""
        self._cost_s = cost_s

    def committed(self, version: int, now_ns: int, cpu_ns: int) -> None:
        """A step is over. `cpu_ns`: what the process has had of CPU time by now, on all threads."""
        if self._committed is not None and self._committed[0] == version - 1:
            _, then_ns, cpu_then_ns = self._committed
            self._steps_s.append(max(1, min(now_ns - then_ns, cpu_ns - cpu_then_ns)) / 1e9)
        self._committed = version, now_ns, cpu_ns

    def disturbed(self) -> None:
        """What passes until the next commit is no step's time."""
        self._committed = None

    def wanted(self, first: int, newest: int) -> int:
        """Steps from one full version to the next, at least; `newest` is the last (-1: there is none yet). `first`: as
        long as there is none, or it is not known what one takes."""
        if self.why_never:
            return NEVER
        if newest < 0:
            return first
        if self._every is not None:
            return self._every
        if self._cost_s is None or not self._steps_s:
            return first
        return min(NEVER - 1, max(1, math.ceil(self._cost_s / (BUDGET * statistics.median(self._steps_s)))))
