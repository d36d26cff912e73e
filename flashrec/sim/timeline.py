"""What every device does in one step, and what the step's time is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashrec.sim.operations import Kind

if TYPE_CHECKING:
    from flashrec.sim.engine import StepCosts
    from flashrec.sim.schedules import Schedule

Times = NDArray[Any]  # float64 seconds, or integer ticks

KINDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight"}
SENDS = {Kind.FORWARD: "send_forward", Kind.BACKWARD: "send_backward"}


class Activity(NamedTuple):
    """Something that a device (all those of `stage` in replicas of `replica_class`) does from `start` to `end`.

    `kind`: forward, backward, weight, optimizer (the device computes); send_forward, send_backward (its link is busy;
    so is it where sends block); grad_sync, tied_sync, finish (a collective, alike in all classes).
    """

    stage: int
    replica_class: int
    name: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Starts and ends in seconds (or ticks) from the step's begin.

    P stages, N operations a stage, D classes of replicas, V virtual stages, K gradient buckets.
    """

    schedule: Schedule
    costs: StepCosts
    start: Times  # (P, N, D) by the position of the operation in its stage's list
    end: Times  # (P, N, D)
    free: Times  # (P, D) the stage has no operation left, nor a blocking send
    sync_ready: Times  # (V, K) the bucket's gradients are complete on all replicas
    sync_start: Times  # (V, K)
    sync_end: Times  # (V, K)
    tied_start_s: float  # both equal where there are no tied embeddings
    tied_end_s: float
    optimizer_start: Times  # (P, D)
    optimizer_end: Times  # (P, D)
    finish_start: Times  # (P,)
    finish_end: Times  # (P,)
    batch_s: float

    @property
    def pipeline_s(self) -> float:
        """When the last operation of the schedule ends."""
        return float(self.end.max()) if self.end.dtype.kind == "f" else int(self.end.max())

    def busy(self) -> Times:
        """Seconds in which each stage of each class performs the schedule's operations: (P, D)."""
        durations = self.costs.durations().sum(axis=0)
        by_chunk = durations.reshape(self.schedule.num_chunks, self.schedule.num_stages, -1)
        total: Times = by_chunk.sum(axis=0) * self.schedule.num_micro_batches
        return total

    def bubble(self) -> float:
        """Share of the pipeline's time in which a device performs no operation, over all devices and replicas.

        1 - busy / (devices * makespan), the makespan that of the schedule's operations alone (`pipeline_s`): what
        follows them is no bubble. Transfers that are waited for are part of it. 0 where nothing takes time.
        """
        weights = self.costs.weights
        available = self.schedule.num_stages * int(weights.sum()) * self.pipeline_s
        return 1 - float((self.busy() * weights).sum()) / available if available else 0.0

    def exposed(self) -> dict[str, Times]:
        """Seconds in which each stage of each class waits for communication alone, by kind: (P, D) each.

        send_forward, send_backward: the operation's stage was free and its input computed, but still under way, and,
        where sends block, the time it spends sending. grad_sync: buckets on the wire after the stage's own work.
        tied_sync; finish. What is waited for because another device computes is no communication.
        """
        plan, costs, length = self.schedule.plan, self.costs, self.start.shape[1]
        stages, classes = self.optimizer_end.shape
        by_kind = {kind: np.zeros((stages, classes), self.end.dtype) for kind in SENDS.values()}
        transfers = costs.transfers()[plan.kind, plan.virtual_stage]
        rows = plan.rows.reshape(-1)
        end = np.zeros((len(rows) + 1, classes), self.end.dtype)
        end[rows] = self.end.reshape(-1, classes)
        free = end.copy()
        if costs.sends_block:
            free[:-1] += transfers
        start = np.empty((len(rows), classes), self.end.dtype)
        start[rows] = self.start.reshape(-1, classes)
        waited = start - np.maximum(free[plan.before], end[plan.source])
        for kind, name in SENDS.items():
            of_kind = (plan.kind == kind)[plan.rows]
            by_kind[name] += (waited[plan.rows] * of_kind[..., None]).sum(axis=1)
            if costs.sends_block:
                by_kind[name] += (transfers[plan.rows] * of_kind[..., None]).sum(axis=1)
        assert length * stages == len(rows)
        parts = np.arange(len(self.sync_end))
        after = self.free[parts % stages][:, None, :]
        on_wire = self.sync_end[..., None] - np.maximum(self.sync_start[..., None], after)
        sync = np.maximum(on_wire, 0).sum(axis=1)
        by_kind["grad_sync"] = sync.reshape(-1, stages, classes).sum(axis=0)
        by_kind["tied_sync"] = np.zeros_like(by_kind["grad_sync"])
        by_kind["tied_sync"][[0, -1]] = self.tied_end_s - self.tied_start_s
        by_kind["finish"] = np.repeat((self.finish_end - self.finish_start)[:, None], classes, axis=1)
        return by_kind

    def exposed_s(self) -> dict[str, float]:
        """`exposed`, the mean over all devices."""
        weights = self.costs.weights
        devices = self.schedule.num_stages * int(weights.sum())
        return {kind: float((times * weights).sum()) / devices for kind, times in self.exposed().items()}

    def activity(self) -> Iterator[Activity]:
        """All that happens, stage by stage and class by class, each in order of time (transfers behind their
        operation); what takes no time is left out."""
        for stage, ops in enumerate(self.schedule.ops):
            for replica_class in range(self.end.shape[2]):
                yield from self._of_device(stage, replica_class, ops)

    def _of_device(self, stage: int, replica_class: int, ops: tuple[Any, ...]) -> Iterator[Activity]:
        def shown(name: str, kind: str, start: Any, end: Any) -> Iterator[Activity]:
            if end > start:
                yield Activity(stage, replica_class, name, kind, start, end)

        starts = self.start[stage, :, replica_class].tolist()
        ends = self.end[stage, :, replica_class].tolist()
        sends = self._transfers[:, :, replica_class]
        for op, start, end in zip(ops, starts, ends, strict=True):
            yield from shown(str(op), KINDS[op.kind], start, end)
            part = self.schedule.virtual_stage(stage, op.chunk)
            if op.kind in SENDS:
                yield from shown(f"send {op}", SENDS[op.kind], end, end + sends[op.kind, part].item())
        buckets = [
            (self.sync_start[part, bucket].item(), self.sync_end[part, bucket].item(), part, bucket)
            for part in range(stage, len(self.sync_end), self.schedule.num_stages)
            for bucket in range(self.sync_end.shape[1])
        ]
        for start, end, part, bucket in sorted(buckets):
            yield from shown(bucket_name(part, bucket), "grad_sync", start, end)
        if stage in (0, self.schedule.num_stages - 1):
            yield from shown("tied embeddings", "tied_sync", self.tied_start_s, self.tied_end_s)
        at = (stage, replica_class)
        yield from shown(
            "optimizer", "optimizer", self.optimizer_start[at].item(), self.optimizer_end[at].item()
        )
        yield from shown("finish", "finish", self.finish_start[stage].item(), self.finish_end[stage].item())

    @cached_property
    def _transfers(self) -> Times:
        return self.costs.transfers()

    def critical_path(self) -> list[Activity]:
        """The activities that make the step as long as it is, first to last.

        Each begins when the one before it ends, the first at 0, the last ends at `batch_s`; so their times add up to
        it. A backward that a bucket of gradients leaves early ends, here, where the bucket's gradients are complete.
        """
        from flashrec.sim.criticalpath import trace  # which needs this module's names

        return trace(self)


def bucket_name(part: int, bucket: int) -> str:
    """How a gradient bucket is called in traces and paths."""
    return f"gradients {part}.{bucket}"


def complete_at(start: Times, end: Times, bucket: int, num_buckets: int) -> Times:
    """When bucket `bucket` of a virtual stage has its gradients: (bucket + 1) / num_buckets through the last backward.

    Counted from the end, so that the last bucket is complete exactly then; integers are rounded up.
    """
    left = (end - start) * (num_buckets - 1 - bucket)
    moment: Times = end - (left // num_buckets if left.dtype.kind == "i" else left / num_buckets)
    return moment
