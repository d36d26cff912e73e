"""What each device must hold during a step, and what does not fit.

Activations follow the schedule itself: a stage keeps those of a micro-batch from its forward to the last operation that
needs them (the backward, or the weights' gradients where these come later), and the peak over its list of operations
counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashrec.errors import UsageError
from flashrec.sim.architecture import Architecture
from flashrec.sim.bill import StepBill
from flashrec.sim.cluster import GIB, Cluster
from flashrec.sim.costs import make_schedule
from flashrec.sim.events import DTYPES
from flashrec.sim.schedules import Kind, Schedule
from flashrec.sim.strategy import Strategy

CONTEXT_BYTES = 1 << 30
"""The device's context, kernels and communicators: what is gone before a program allocates anything."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on one device of one pipeline stage at the worst moment of a step."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Kept from forwards to their backwards."""
    working: int
    """Of the block that is being recomputed, and gathered parameters (ZeRO-3)."""
    buffers: int
    """The context, activations received and sent, communication buckets."""
    live_micro_batches: int
    """The most that were kept at a time, counted over all chunks."""
    capacity: int

    @property
    def total(self) -> int:
        """All of it."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.working + self.buffers
        )

    @property
    def fits(self) -> bool:
        """Whether the device has so much."""
        return self.total <= self.capacity


def live_activations(schedule: Schedule, chunk_bytes: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Per stage: the peak of kept bytes, and of kept (micro-batch, chunk) pairs.

    `chunk_bytes[stage][chunk]`: what one micro-batch leaves there. From the order of operations alone, which is what a
    stage does whatever the durations are.
    """
    last = Kind.WEIGHT if schedule.splits_backward else Kind.BACKWARD
    peaks, counts = [], []
    for stage, ops in enumerate(schedule.ops):
        kept = peak = count = most = 0
        for op in ops:
            if op.kind == Kind.FORWARD:
                kept += chunk_bytes[stage][op.chunk]
                count += 1
            peak, most = max(peak, kept), max(most, count)
            if op.kind == last:
                kept -= chunk_bytes[stage][op.chunk]
                count -= 1
        peaks.append(peak)
        counts.append(most)
    return peaks, counts


def estimate(
    model: Architecture,
    cluster: Cluster,
    strategy: Strategy,
    global_batch: int,
    schedule: Schedule | None = None,
) -> tuple[StageMemory, ...]:
    """The memory of one device of each stage. Raises UsageError where the strategy is impossible."""
    strategy.check(model, cluster, global_batch)
    bill = StepBill(model, cluster, strategy)
    schedule = schedule or make_schedule(strategy, global_batch)
    stages, kind = strategy.pipeline_parallel, strategy.recompute
    saved = [
        sum(block.saved_bytes[kind] if block.recomputable else block.saved_bytes["none"] for block in blocks)
        for blocks in bill.stages
    ]
    chunks = [list(range(stage, len(bill.stages), stages)) for stage in range(stages)]
    peaks, counts = live_activations(schedule, [[saved[v] for v in of_stage] for of_stage in chunks])
    return tuple(
        _stage(bill, stage, chunks[stage], peaks[stage], counts[stage], int(cluster.device.memory_bytes))
        for stage in range(stages)
    )


def _stage(
    bill: StepBill, stage: int, chunks: list[int], activations: int, live: int, capacity: int
) -> StageMemory:
    strategy = bill.strategy
    parts = [bill.stage_parameters(v) for v in chunks]
    common, experts = sum(part[0] for part in parts), sum(part[1] for part in parts)
    parameters = common + experts
    blocks = [block for v in chunks for block in bill.stages[v]]
    level = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}[strategy.sharding]
    element, gradient = DTYPES[strategy.dtype], DTYPES[strategy.gradient_dtype]
    largest = max((b.parameters + b.expert_parameters for b in blocks), default=0)
    # A block that is recomputed has all its activations at once while its own backward runs.
    again = [b.saved_bytes["none"] - b.saved_bytes[strategy.recompute] for b in blocks if b.recomputable]
    working = max(again, default=0)
    if level == 3 and strategy.shards > 1:  # the block at work and, gathered ahead, the next
        working += (2 if strategy.overlap_parameters else 1) * element * largest
    buffers = CONTEXT_BYTES
    if strategy.pipeline_parallel > 1:
        buffers += 2 * max(block.output_bytes for block in blocks)
    if strategy.data_parallel > 1 and strategy.gradient_buckets > 1:
        buffers += gradient * parameters // strategy.gradient_buckets

    def held(size: float, sharded: bool) -> int:
        over, experts_over = (strategy.shards, strategy.expert_shards) if sharded else (1, 1)
        return math.ceil(size * common / over) + math.ceil(size * experts / experts_over)

    return StageMemory(
        stage=stage,
        parameters=held(element, level >= 3),
        gradients=held(gradient, level >= 2),
        optimizer=held(strategy.optimizer.state_bytes, level >= 1),
        activations=activations,
        working=working,
        buffers=buffers,
        live_micro_batches=live,
        capacity=capacity,
    )


def require_fit(stages: Sequence[StageMemory]) -> None:
    """Raises UsageError that says, stage by stage, what does not fit and what takes the room."""
    bad = [stage for stage in stages if not stage.fits]
    if not bad:
        return
    lines = []
    for s in bad:
        parts = {
            name: getattr(s, name)
            for name in ("parameters", "gradients", "optimizer", "activations", "working", "buffers")
        }
        most = ", ".join(
            f"{name} {size / GIB:.1f}" for name, size in sorted(parts.items(), key=lambda i: -i[1])
        )
        lines.append(
            f"  stage {s.stage}: {s.total / GIB:.1f} GiB of {s.capacity / GIB:.1f} ({most}; "
            f"{s.live_micro_batches} micro-batches kept)"
        )
    raise UsageError("does not fit in device memory:\n" + "\n".join(lines))
