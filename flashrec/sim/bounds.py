"""What a strategy cannot be better than, found without laying its step out: a search prunes with it.

Time. In any schedule, on stage p of P (virtual stages v, m micro-batches; F, B, W, sf, sb: seconds of a forward, a
backward, a weight gradient, and of what is sent after the first two):

    fill(p)    sum over v < p of F(v) + sf(v)          before stage p has anything to do
    work(p)    m * sum over its chunks of F + B + W    (and the sends, but the last, where they block)
    drain(p)   from its last backward to that of stage 0: sum of B(v) for v < p and sb(v) for 0 < v <= p

    step >= fill(p) + work(p) + tail(p)                                 every p
    step >= fill(p) + work(p) less its W + drain(p) + W(0) + tail(0)    every p

where tail is what must follow a stage's last operation: its last gradient bucket (all of them where they do not
overlap), tied embeddings, optimizer, finish. 1F1B with equal stages meets the second exactly.

Memory. States and the activations that the schedule's warm-up keeps, of the first and the last stage; working memory
and buffers are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flashrec.sim.engine import StepCosts
from flashrec.sim.events import DTYPES
from flashrec.sim.memory import CONTEXT_BYTES
from flashrec.sim.strategy import Strategy

SLACK = 1e-12  # sums are taken in another order than the engine's, and may be greater by a rounding

Array = NDArray[np.float64]


def step_bound(costs: StepCosts, num_micro_batches: int) -> float:
    """Seconds that a step at `costs` takes at least, whatever its schedule."""
    stages, (parts, classes), m = len(costs.optimizer), costs.forward.shape, num_micro_batches
    forward, backward, weight = costs.durations()
    send_f, send_b, _ = costs.transfers()

    def of_stages(table: Array) -> Array:
        return np.asarray(table.reshape(parts // stages, stages, classes))

    fill, drain = np.zeros((stages, classes)), np.zeros((stages, classes))
    fill[1:] = (forward + send_f)[: stages - 1].cumsum(axis=0)
    drain[1:] = (backward[: stages - 1] + send_b[1:stages]).cumsum(axis=0)
    sends, last = np.zeros((stages, classes)), np.zeros((stages, classes))
    if costs.sends_block:
        sends = m * of_stages(send_f + send_b).sum(axis=0)
        last = of_stages(np.maximum(send_f, send_b)).max(axis=0)
    busy = fill + np.maximum(sends - last, 0)
    end = busy + m * of_stages(forward + backward + weight).sum(axis=0)
    drained = busy + m * of_stages(forward + backward).sum(axis=0) + drain + weight[0]
    end[0] = np.maximum(end[0], drained.max(axis=0))

    buckets = costs.grad_sync.reshape(parts // stages, stages, -1)
    sync = buckets[:, :, -1].min(axis=0) if costs.overlap_grad_sync else buckets.sum(axis=(0, 2))
    over = end.max(axis=1) + sync
    if costs.tied_sync:
        over[[0, -1]] = max(over[0], over[-1]) + costs.tied_sync
    return float((over + costs.optimizer.max(axis=1) + costs.finish).max()) * (1 - SLACK)


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of a block's forward, backward and weight gradient (0 where the backward has it), one micro-batch."""

    forward: float
    backward: float
    weight: float

    def plus(self, other: Passes, times: int = 1) -> Passes:
        """This and so many of the other."""
        return Passes(
            self.forward + times * other.forward,
            self.backward + times * other.backward,
            self.weight + times * other.weight,
        )

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True, slots=True)
class Blocks:
    """The first block, one layer and the last block."""

    first: Passes
    layer: Passes
    last: Passes


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """A bound and what it is made of: the busiest stage's operations, and its waiting."""

    operations_s: float
    bubble_s: float

    @property
    def total_s(self) -> float:
        """The bound."""
        return self.operations_s + self.bubble_s


def pipeline_bound(
    blocks: Blocks, num_layers: int, stages: int, chunks: int, micro_batches: int
) -> PipelineTime:
    """`step_bound` of equally divided layers without any transfer or tail, in constant time."""
    layers = num_layers // (stages * chunks)
    part = Passes(0.0, 0.0, 0.0).plus(blocks.layer, layers)
    first = part.plus(blocks.first)
    if stages == 1:
        work = micro_batches * Passes(0, 0, 0).plus(part, chunks).plus(blocks.first).plus(blocks.last).total
        return PipelineTime(work * (1 - SLACK), 0.0)
    found = PipelineTime(0.0, 0.0)
    for stage in {0, stages - 2, stages - 1}:
        own = Passes(0.0, 0.0, 0.0).plus(part, chunks)
        if stage == 0:
            own = own.plus(blocks.first)
        elif stage == stages - 1:
            own = own.plus(blocks.last)
        between = max(stage - 1, 0)
        fill = (first.forward if stage else 0.0) + between * part.forward
        drain = (first.backward if stage else 0.0) + between * part.backward
        work = micro_batches * own.total
        idle = max(fill, fill + drain + first.weight - micro_batches * own.weight)
        if work + idle > found.total_s:
            found = PipelineTime(work * (1 - SLACK), idle * (1 - SLACK))
    return found


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Parameters on one device, and bytes kept of one micro-batch, of a block."""

    parameters: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Of the first block, one layer, the last block; and the parameters that first and last share."""

    first: BlockSizes
    layer: BlockSizes
    last: BlockSizes
    tied: int


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a device of `stage` must hold at least."""

    stage: int
    size_bytes: float
    state_bytes: float
    activation_bytes: float
    lasting_bytes: float
    """Parameters and optimizer of the stage that has most of them: what a failure must not lose."""


def live_chunks(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int) -> int:
    """The (micro-batch, chunk) pairs whose activations a stage keeps at the worst moment."""
    if schedule == "gpipe":
        return micro_batches
    if schedule == "1f1b":
        return min(stages - stage, micro_batches)
    if schedule == "zb-h1":
        return min(stages, micro_batches)
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(warm_up + 1, micro_batches * chunks)


def memory_bound(sizes: ModelSizes, num_layers: int, strategy: Strategy, micro_batches: int) -> MemoryNeed:
    """The greater need of the first and the last stage, of a strategy whose schedule has a name."""
    assert isinstance(strategy.schedule, str)
    stages, chunks, shards = strategy.pipeline_parallel, strategy.chunks, strategy.shards
    level = ("none", "zero1", "zero2", "zero3").index(strategy.sharding)
    lasts = DTYPES[strategy.dtype] / (shards if level >= 3 else 1) + strategy.optimizer.state_bytes / (
        shards if level >= 1 else 1
    )
    gradients = DTYPES[strategy.gradient_dtype] / (shards if level >= 2 else 1)
    layers = num_layers // (stages * chunks)
    worst, lasting = MemoryNeed(0, 0.0, 0.0, 0.0, 0.0), 0.0
    for stage in {0, stages - 1}:
        parameters = chunks * layers * sizes.layer.parameters
        saved = layers * sizes.layer.saved_bytes
        if stage == 0:
            parameters += sizes.first.parameters
            saved += sizes.first.saved_bytes if chunks == 1 else 0
        if stage == stages - 1:
            parameters += sizes.last.parameters + (sizes.tied if stages > 1 else 0)
            saved += sizes.last.saved_bytes if chunks == 1 else 0
        kept = live_chunks(strategy.schedule, stage, stages, chunks, micro_batches) * saved
        lasting = max(lasting, parameters * lasts * (1 - SLACK))
        state = parameters * (lasts + gradients) * (1 - SLACK)
        total = state + kept + CONTEXT_BYTES
        if total > worst.size_bytes:
            worst = MemoryNeed(stage, total, state, float(kept), 0.0)
    return replace(worst, lasting_bytes=lasting)
