"""What a search found: the best strategies, and why each of the others is not among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashrec.sim.report import describe
from flashrec.sim.strategy import Strategy

REASONS = {
    "states": "too large: states",  # parameters, gradients, optimizer
    "activations": "too large: activations",
    "buffers": "too large: buffers",
    "kernels": "slower kernels",  # smaller products, uneven stages
    "recomputation": "recomputation",
    "exchanges": "exchanges in layers",  # tensor and expert parallelism's
    "bubble": "pipeline bubble",
    "communication": "communication, optimizer",  # between layers and at the step's end
    "failures": "failures",
}
PARTS = ("kernels", "recomputation", "exchanges", "bubble", "communication")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of a step, or of its bound, by what may be a reason."""

    kernels: float
    recomputation: float
    exchanges: float
    bubble: float
    communication: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A strategy that was simulated. `score_s`: what it is ranked by: its step, over goodput where that was asked."""

    strategy: Strategy
    batch_s: float
    score_s: float
    goodput: float | None
    bubble: float
    memory_bytes: int
    parts: Parts


@dataclass(frozen=True, kw_only=True)
class Loser:
    """A strategy that is not among the best, and why. `seconds`: its step where it `was_simulated`, else what it takes
    at least; None where it does not fit. `over_bytes`: how much too much it needs, at least."""

    strategy: Strategy
    reason: str
    detail: str
    seconds: float | None = None
    was_simulated: bool = False
    over_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a search found. `num_considered` = best + losers."""

    best: tuple[Ranked, ...]
    losers: tuple[Loser, ...]
    num_considered: int
    num_priced: int
    num_simulated: int
    took_s: float

    def by_reason(self) -> dict[str, list[Loser]]:
        """Losers, the nearest first, by reason; the reasons in the order of REASONS."""
        found: dict[str, list[Loser]] = {}
        for loser in self.losers:
            found.setdefault(loser.reason, []).append(loser)
        return {
            reason: sorted(found[reason], key=lambda loser: (loser.seconds or 0.0, loser.over_bytes))
            for reason in REASONS
            if reason in found
        }

    def to_json(self) -> dict[str, Any]:
        """For programs; every loser is in it."""
        return {
            "considered": self.num_considered,
            "priced": self.num_priced,
            "simulated": self.num_simulated,
            "took_s": self.took_s,
            "best": [
                {
                    "strategy": describe(one.strategy),
                    "batch_s": one.batch_s,
                    "goodput": one.goodput,
                    "score_s": one.score_s,
                    "bubble": one.bubble,
                    "memory_bytes": one.memory_bytes,
                    "parts_s": {name: getattr(one.parts, name) for name in PARTS},
                }
                for one in self.best
            ],
            "losers": [
                {
                    "strategy": describe(loser.strategy),
                    "reason": loser.reason,
                    "detail": loser.detail,
                    "seconds": loser.seconds,
                    "simulated": loser.was_simulated,
                    "over_bytes": loser.over_bytes,
                }
                for loser in self.losers
            ],
        }
