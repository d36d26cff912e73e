"""One simulated step as figures: what `flashrec simulate` prints, and a program reads as JSON.

Formulas: tokens/s = global_batch * sequence / batch_s; MFU = FLOPs of the model's forward and backward, nothing
recomputed, / (batch_s * devices * peak FLOP/s), as in arXiv 2204.02311, appendix B, but with the FLOPs that
`architecture.model_flops` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flashrec.errors import UsageError
from flashrec.sim.analytic import AnalyticDurations
from flashrec.sim.architecture import model_flops
from flashrec.sim.config import Config
from flashrec.sim.costs import build, make_schedule
from flashrec.sim.engine import run
from flashrec.sim.events import Durations
from flashrec.sim.explain import Breakdown, break_down
from flashrec.sim.memory import StageMemory, estimate, require_fit
from flashrec.sim.profile import ProfileOr
from flashrec.sim.strategy import Strategy
from flashrec.sim.timeline import Timeline


class DoesNotFit(UsageError):
    """A strategy needs more memory than its devices have; the message says which stage, and for what."""


@dataclass(frozen=True, kw_only=True)
class PathShare:
    """What one kind of activity has of the critical path."""

    kind: str
    seconds: float
    count: int
    stages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A step of `config` laid out. `calibrated`: whether its durations were measured on this kind of device."""

    config: Config
    strategy: Strategy
    durations: Durations
    timeline: Timeline
    memory: tuple[StageMemory, ...]
    calibrated: bool

    @property
    def batch_s(self) -> float:
        """Seconds of one step."""
        return self.timeline.batch_s

    @property
    def tokens_per_s(self) -> float:
        """Of the whole cluster."""
        return self.config.global_batch * self.config.model.sequence / self.batch_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, 0 to 1."""
        flops = model_flops(self.config.model, self.config.global_batch)
        peak = self.config.cluster.device.flops(self.strategy.dtype) * self.config.cluster.num_devices
        return flops / (self.batch_s * peak)

    @cached_property
    def breakdown(self) -> Breakdown:
        """Where the mean device's time goes; adds up to the step."""
        return break_down(self.config, self.strategy, self.durations, self.timeline)

    @cached_property
    def critical_path(self) -> tuple[PathShare, ...]:
        """The critical path by kind, longest first; the seconds add up to `batch_s`."""
        seconds: dict[str, list[float]] = {}
        stages: dict[str, set[int]] = {}
        for activity in self.timeline.critical_path():
            seconds.setdefault(activity.kind, []).append(activity.end - activity.start)
            stages.setdefault(activity.kind, set()).add(activity.stage)
        shares = [
            PathShare(kind=kind, seconds=sum(times), count=len(times), stages=tuple(sorted(stages[kind])))
            for kind, times in seconds.items()
        ]
        return tuple(sorted(shares, key=lambda share: -share.seconds))

    def to_json(self) -> dict[str, Any]:
        """All figures, in seconds and bytes."""
        return {
            "model": self.config.model.name,
            "parameters": self.config.model.parameters,
            "devices": self.config.cluster.num_devices,
            "device": self.config.cluster.device.name,
            "calibrated": self.calibrated,
            "strategy": describe(self.strategy),
            "global_batch": self.config.global_batch,
            "micro_batches": self.timeline.schedule.num_micro_batches,
            "batch_s": self.batch_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "bubble": self.timeline.bubble(),
            "exposed_s": self.breakdown.exposed_s(),
            "breakdown_ns": dict(self.breakdown.parts_ns),
            "memory": [
                {
                    "stage": stage.stage,
                    "total_bytes": stage.total,
                    "capacity_bytes": stage.capacity,
                    **{part: getattr(stage, part) for part in MEMORY_PARTS},
                    "live_micro_batches": stage.live_micro_batches,
                }
                for stage in self.memory
            ],
            "critical_path": [
                {
                    "kind": share.kind,
                    "seconds": share.seconds,
                    "activities": share.count,
                    "stages": list(share.stages),
                }
                for share in self.critical_path
            ],
        }


MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "working", "buffers")


def simulate(config: Config, durations: Durations | None = None) -> Report:
    """One step of `config`, whose strategy must be given. `durations`: None for the analytic model.

    Raises UsageError where the strategy is impossible; DoesNotFit, before anything is simulated, where it does not fit
    in memory; MissingEvents where `durations` lacks events.
    """
    if config.strategy is None:
        raise UsageError(
            "the configuration has no [strategy]; add one, or let `flashrec plan` search for the best"
        )
    strategy = config.strategy
    schedule = make_schedule(strategy, config.global_batch)
    memory = estimate(config.model, config.cluster, strategy, config.global_batch, schedule)
    try:
        require_fit(memory)
    except UsageError as error:
        raise DoesNotFit(f"{one_line(strategy)}: {error}") from None
    analytic = AnalyticDurations(config.cluster)
    costs = build(config.model, config.cluster, strategy, config.global_batch, durations or analytic)
    return Report(
        config=config,
        strategy=strategy,
        durations=durations or analytic,
        timeline=run(schedule, costs),
        memory=memory,
        calibrated=analytic.calibrated or _is_measured(durations),
    )


def _is_measured(durations: Durations | None) -> bool:
    """Whether all of them were; of a profile that something else fills up, not where it did."""
    return durations is not None and not (isinstance(durations, ProfileOr) and durations.used)


def describe(strategy: Strategy) -> dict[str, Any]:
    """The strategy's figures that tell it from others, for JSON."""
    schedule = strategy.schedule if isinstance(strategy.schedule, str) else strategy.schedule.name
    return {
        "data_parallel": strategy.data_parallel,
        "tensor_parallel": strategy.tensor_parallel,
        "pipeline_parallel": strategy.pipeline_parallel,
        "expert_parallel": strategy.expert_parallel,
        "sequence_parallel": strategy.sequence_parallel,
        "micro_batch": strategy.micro_batch,
        "schedule": schedule,
        "chunks": strategy.chunks,
        "recompute": strategy.recompute,
        "sharding": strategy.sharding,
    }


def one_line(strategy: Strategy) -> str:
    """`TP8 PP4 DP2, 1f1b, micro-batch 1, recompute selective, zero1`."""
    found = describe(strategy)
    sizes = [
        f"TP{strategy.tensor_parallel}",
        f"PP{strategy.pipeline_parallel}",
        f"DP{strategy.data_parallel}",
    ]
    if strategy.expert_parallel > 1:
        sizes.append(f"EP{strategy.expert_parallel}")
    parts = [" ".join(sizes)]
    if strategy.pipeline_parallel > 1:
        parts.append(found["schedule"] + (f" x{strategy.chunks}" if strategy.chunks > 1 else ""))
    parts.append(f"micro-batch {strategy.micro_batch}")
    if strategy.recompute != "none":
        parts.append(f"recompute {strategy.recompute}")
    if strategy.sharding != "none":
        parts.append(strategy.sharding)
    return ", ".join(parts)


def spans(numbers: Sequence[int]) -> str:
    """`0-3, 6`, as people write it; `numbers` ascend."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)
