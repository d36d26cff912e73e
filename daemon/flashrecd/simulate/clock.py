"""Steps in simulated time: which version a job is at, and what of it is sealed and kept elsewhere by then."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashrec.sim.failures.scenario import FailureScenario


@dataclass(slots=True)
class Steps:
    """Since `began_s` all ranks step in unison from `version` on; from `stopped_s` on the gate passes no more."""

    step_s: float
    gate_s: float  # from a step's beginning
    seal_s: float
    replicate_s: float
    every: int
    is_sealed: bool
    began_s: float = 0.0
    version: int = 0
    stopped_s: float = math.inf

    @classmethod
    def of(cls, scenario: FailureScenario) -> Steps:
        step_s = scenario.effective_step_s()
        return cls(
            step_s,
            step_s * (1 - scenario.costs.apply_share),
            scenario.seal_s(),
            scenario.replicate_s(),
            scenario.seal_every,
            scenario.is_sealed,
        )

    def resume(self, at_s: float, version: int, wait_s: float) -> None:
        self.began_s, self.version, self.stopped_s = at_s + wait_s, version, math.inf

    def stop(self, at_s: float) -> None:
        self.stopped_s = min(self.stopped_s, at_s)

    def step(self, at_s: float) -> int:
        """The step that ranks are in, or wait in."""
        free = self._free(at_s)
        # Whoever saw the gate of the step in which it stopped leaves it, and enters the next one.
        if self.stopped_s <= at_s and self._passed(self.stopped_s) and at_s >= self._enter(free + 1):
            return free + 1
        return free

    def _free(self, at_s: float) -> int:
        until = max(min(at_s, self.stopped_s) - self.began_s, 0.0)
        return self.version + math.floor(until / self.step_s)

    def _enter(self, step: int) -> float:
        return self.began_s + (step - self.version) * self.step_s

    def _passed(self, at_s: float) -> bool:
        return at_s >= self._enter(self._free(at_s)) + self.gate_s

    def held(self) -> int:
        """The version that survivors are at when all have parked."""
        return self._free(self.stopped_s) + self._passed(self.stopped_s)

    def parked_s(self, told_s: float) -> float:
        """When a survivor that is told to park does: at its gate, or where it enters the next step."""
        step = self._free(self.stopped_s)
        if not self._passed(self.stopped_s):
            return max(told_s, self._enter(step) + self.gate_s)
        if told_s <= self._enter(step + 1):
            return self._enter(step + 1)
        return max(told_s, self._enter(step + 1) + self.gate_s)

    def progress(self, at_s: float) -> int:
        """Grows all the time while ranks compute; stands still in the wait for a gate that does not pass."""
        ends = self.parked_s(-math.inf) if self.stopped_s <= at_s else at_s
        return max(int(min(at_s, ends) * 1000), 0)

    def sealed(self, at_s: float, *, kept: bool = False) -> tuple[int, ...]:
        """The newest two whole versions in an arena (`kept`: at a keeper) at `at_s`, if their rank lived until then."""
        if not self.is_sealed:
            return ()
        # What enters after the failure knows of it, and seals nothing more.
        newest = self._free(at_s)
        delay_s = self.seal_s + (self.replicate_s if kept else 0.0)
        found = [
            v
            for v in range(max(self.version, newest - 2 * self.every - 1), newest + 1)
            if v == self.version or (v % self.every == 0 and self._enter(v) + delay_s <= at_s)
        ]
        return tuple(found[-2:])

    def private(self, at_s: float) -> tuple[int, ...]:
        """Private state is sealed, and kept elsewhere, before the vote: that of the step, and of the next one."""
        step = self.step(at_s)
        voted = at_s >= self._enter(step) + self.gate_s
        return tuple(sorted({step, *([step + 1] if voted else []), *self.sealed(at_s)}))
