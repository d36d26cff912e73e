"""The time-line of one training step: the longest path through a static schedule (max-plus), without a heap.

An operation starts when its stage is free and what it waits for has arrived:

    start   = max(free of the operation before it on its stage, arrival from the neighbouring virtual stage)
    end     = start + duration
    arrival = end + transfer
    free    = arrival where sends block, else end

A transfer begins as soon as its operation ends, whether or not the receiver is idle, and takes nothing of the receiver;
transfers of one stage may overlap one another. Operations are swept level by level (see `ordering.Plan`): those of
a level wait for none of one another, so one NumPy operation does a level for all stages and all classes of replicas.
The work is proportional to the operations. After the last operation of a stage come its gradient buckets, one after
another, each a collective over all replicas; the all-reduce of tied embeddings; the optimizer; the finish.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import UsageError
from flashrec.sim.operations import Kind
from flashrec.sim.schedules import Schedule
from flashrec.sim.timeline import Timeline, complete_at

Times = NDArray[Any]  # float64 seconds, or integer ticks

ARRAYS = (
    "forward",
    "backward",
    "weight",
    "send_forward",
    "send_backward",
    "grad_sync",
    "optimizer",
    "finish",
    "weights",
)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What the operations of a step take, in seconds (float64), or in ticks (integers: the engine is exact in them).

    V virtual stages, P stages, K gradient buckets, D classes of data-parallel replicas; replicas that are equal in
    every figure are one class. Raises UsageError for a wrong shape, and for a figure that is negative or not finite.
    """

    forward: Times  # (V, D) one micro-batch through one virtual stage, its exposed communication included (TP, FSDP)
    backward: (
        Times  # (V, D) recomputation included; without the weights' part where the schedule splits it off
    )
    weight: Times  # (V, D) zeros where the schedule does not split
    send_forward: Times  # (V - 1, D) activations from v to v + 1; zeros where P = 1
    send_backward: Times  # (V - 1, D) gradients from v + 1 to v; zeros where P = 1
    sends_block: bool  # True: the sender does nothing else while it sends; False: only the receiver waits
    grad_sync: Times  # (V, K) bucket k of v, in the order in which its gradients become ready
    overlap_grad_sync: (
        bool  # True: a bucket starts during the last backward; False: after the stage's last operation
    )
    optimizer: Times  # (P, D) after the stage's own grad_sync
    finish: Times  # (P,) communication after the optimizer, of all replicas together (ZeRO's gather of parameters)
    weights: NDArray[Any]  # (D,) how many replicas each class stands for
    tied_sync: float = 0  # the first and the last stage's all-reduce of tied embeddings; 0 where none

    def __post_init__(self) -> None:
        for name in ARRAYS:
            object.__setattr__(self, name, np.asarray(getattr(self, name)))
        if self.forward.ndim != 2 or not self.forward.size:
            raise UsageError(f"forward has shape {self.forward.shape}; it must be (virtual stages, classes)")
        if self.grad_sync.ndim != 2 or not self.grad_sync.shape[1] or self.optimizer.ndim != 2:
            raise UsageError("grad_sync must be (virtual stages, buckets), and optimizer (stages, classes)")
        (parts, classes), stages = self.forward.shape, len(self.optimizer)
        wanted = {
            **dict.fromkeys(("forward", "backward", "weight"), (parts, classes)),
            **dict.fromkeys(("send_forward", "send_backward"), (parts - 1, classes)),
            "grad_sync": (parts, self.grad_sync.shape[1]),
            "optimizer": (stages, classes),
            "finish": (stages,),
            "weights": (classes,),
        }
        for name, shape in wanted.items():
            array = getattr(self, name)
            if array.shape != shape:
                raise UsageError(f"{name} has shape {array.shape}; forward and optimizer make it {shape}")
            if array.size and not (np.isfinite(array).all() and array.min() >= 0):
                raise UsageError(f"{name} holds a figure that is negative or not finite")
        if self.weights.min() < 1:
            raise UsageError(f"weights are {self.weights.tolist()}; each class stands for at least 1 replica")
        if not (np.isfinite(self.tied_sync) and self.tied_sync >= 0):
            raise UsageError(f"tied_sync is {self.tied_sync!r}; it must be at least 0")
        if stages == 1 and (self.tied_sync or self.send_forward.any() or self.send_backward.any()):
            raise UsageError("one stage has no other to send to: sends and tied_sync must be 0")

    @property
    def dtype(self) -> np.dtype[Any]:
        """int64 where every figure is an integer, else float64."""
        times = [getattr(self, name) for name in (*ARRAYS, "tied_sync") if name != "weights"]
        whole = all(np.asarray(time).dtype.kind in "iu" for time in times)
        return np.dtype(np.int64 if whole else np.float64)

    def durations(self) -> Times:
        """Of every operation, by kind and virtual stage: (3, V, D)."""
        return np.stack([self.forward, self.backward, self.weight]).astype(self.dtype, copy=False)

    def transfers(self) -> Times:
        """What follows every operation on its link, by kind and virtual stage: (3, V, D); 0 where nothing is sent."""
        table = np.zeros((3, *self.forward.shape), self.dtype)
        table[Kind.FORWARD, :-1] = self.send_forward
        table[Kind.BACKWARD, 1:] = self.send_backward
        return table


def run(schedule: Schedule, costs: StepCosts) -> Timeline:
    """The time-line of one step of `schedule` at `costs`; O(operations * classes).

    Exact where all costs are integers. Raises UsageError where the costs are of other stages than the schedule's,
    or hold WEIGHT time that the schedule has no operation for.
    """
    shape = (len(costs.forward), len(costs.optimizer))
    if shape != (schedule.num_virtual_stages, schedule.num_stages):
        raise UsageError(
            f"the costs are of {shape[0]} virtual stages on {shape[1]} stages; schedule {schedule.name!r} has "
            f"{schedule.num_virtual_stages} on {schedule.num_stages}"
        )
    if costs.weight.any() and not schedule.splits_backward:
        raise UsageError(
            f"schedule {schedule.name!r} has no W operations: the weights' gradients belong into backward, "
            "and zeros into weight"
        )
    start, end = _sweep(schedule, costs)
    return _finish(schedule, costs, start, end)


def _sweep(schedule: Schedule, costs: StepCosts) -> tuple[Times, Times]:
    """Start and end of every operation, (P, N, D) each."""
    plan = schedule.plan
    total, classes = len(plan.kind), costs.forward.shape[1]
    duration = costs.durations()[plan.kind, plan.virtual_stage]
    transfer = costs.transfers()[plan.kind, plan.virtual_stage]
    start = np.empty((total, classes), costs.dtype)
    # One row more than there are operations: what waits for none waits for that one, which is over at 0.
    end = np.zeros((total + 1, classes), costs.dtype)
    arrival = np.zeros((total + 1, classes), costs.dtype) if transfer.any() else end
    free = arrival if costs.sends_block else end
    for low, high in pairwise(plan.bounds):
        begin = start[low:high]
        np.maximum(free.take(plan.before[low:high], 0), arrival.take(plan.source[low:high], 0), out=begin)
        np.add(begin, duration[low:high], out=end[low:high])
        if arrival is not end:
            np.add(end[low:high], transfer[low:high], out=arrival[low:high])
    return start[plan.rows], end[plan.rows]


def _finish(schedule: Schedule, costs: StepCosts, start: Times, end: Times) -> Timeline:
    """What follows the operations: gradient buckets, tied embeddings, optimizer, finish."""
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    parts, num_buckets = costs.grad_sync.shape
    stages, part = np.arange(num_stages), np.arange(parts)
    free = _free(schedule, costs, end)
    ready = np.empty((parts, num_buckets), costs.dtype)
    if costs.overlap_grad_sync:
        at = (part % num_stages, schedule.plan.last)
        for bucket in range(num_buckets):
            ready[:, bucket] = complete_at(start[at], end[at], bucket, num_buckets).max(axis=1)
    else:
        ready[:] = free.max(axis=1)[part % num_stages, None]

    sync_start, sync_end = np.empty_like(ready), np.empty_like(ready)
    link = np.zeros(num_stages, costs.dtype)
    turns = np.argsort(schedule.plan.last.reshape(num_chunks, num_stages), axis=0, kind="stable")
    for turn in range(num_chunks):
        at = turns[turn] * num_stages + stages
        for bucket in range(num_buckets):
            sync_start[at, bucket] = np.maximum(link, ready[at, bucket])
            link = sync_end[at, bucket] = sync_start[at, bucket] + costs.grad_sync[at, bucket]

    optimizer_start = np.maximum(free, link[:, None])
    ends = [0, num_stages - 1]
    tied_start = optimizer_start[ends].max()
    tied_end = tied_start + costs.tied_sync
    if costs.tied_sync:
        optimizer_start[ends] = tied_end
    optimizer_end = optimizer_start + costs.optimizer
    finish_start = optimizer_end.max(axis=1)
    finish_end = finish_start + costs.finish
    return Timeline(
        schedule=schedule,
        costs=costs,
        start=start,
        end=end,
        free=free,
        sync_ready=ready,
        sync_start=sync_start,
        sync_end=sync_end,
        tied_start_s=tied_start.item(),
        tied_end_s=tied_end.item(),
        optimizer_start=optimizer_start,
        optimizer_end=optimizer_end,
        finish_start=finish_start,
        finish_end=finish_end,
        batch_s=finish_end.max().item(),
    )


def _free(schedule: Schedule, costs: StepCosts, end: Times) -> Times:
    """When each stage has no operation left, nor a blocking send: (P, D)."""
    last: Times = end[:, -1]
    if not costs.sends_block:
        return last
    plan = schedule.plan
    rows = plan.rows[:, -1]
    last = last + costs.transfers()[plan.kind[rows], plan.virtual_stage[rows]]
    return last


def slowest_of_groups(speed: Times) -> Times:
    """The speed of each tensor-parallel group from its members' along the last axis: that of the slowest, for
    every layer waits for all of them."""
    slowest: Times = speed.min(axis=-1)
    return slowest


def classes_of(speed: Times) -> tuple[Times, NDArray[np.intp], NDArray[np.intp]]:
    """Replicas that are equal on every stage, collapsed.

    `speed` (P, R), of each stage of each of R replicas. Returns the classes' speeds (P, D), how many replicas each
    stands for (D,), and the class of each replica (R,).
    """
    distinct, class_of, counts = np.unique(speed, axis=1, return_inverse=True, return_counts=True)
    return distinct, counts, class_of.reshape(-1)
