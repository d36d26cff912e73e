"""The chain of activities that makes a step as long as it is, found from its end backwards.

Every start in a time-line is the maximum of a few moments, and equals one of them exactly, in floats too: so the one
it waited for is found by comparison. Where two are equal the stage's own is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashrec.sim.operations import Kind
from flashrec.sim.timeline import KINDS, SENDS, Activity, bucket_name, complete_at

if TYPE_CHECKING:
    from flashrec.sim.timeline import Timeline


def trace(timeline: Timeline) -> list[Activity]:
    """The critical path of `timeline`, first to last; what takes no time is left out."""
    return _Walk(timeline).path()


class _Walk:
    def __init__(self, timeline: Timeline) -> None:
        self.line = timeline
        self.schedule, self.costs = timeline.schedule, timeline.costs
        self.transfers = timeline.costs.transfers()
        self.found: list[Activity] = []  # last to first

    def path(self) -> list[Activity]:
        line = self.line
        stage = int(line.finish_end.argmax())
        replica = int(line.optimizer_end[stage].argmax())
        self.add(stage, replica, "finish", "finish", line.finish_start[stage], line.finish_end[stage])
        begin = line.optimizer_start[stage, replica]
        self.add(stage, replica, "optimizer", "optimizer", begin, line.optimizer_end[stage, replica])
        last = self.schedule.num_stages - 1
        if self.costs.tied_sync and stage in (0, last):
            self.add(stage, replica, "tied embeddings", "tied_sync", line.tied_start_s, line.tied_end_s)
            begin = line.tied_start_s
            stage = next(s for s in dict.fromkeys((stage, last, 0)) if self.over(s) == begin)
            replica = int(line.free[stage].argmax())
        if line.free[stage, replica] == begin:
            self.operations(stage, self.last_position, replica)
        else:
            self.buckets(stage, begin)
        return self.found[::-1]

    def add(self, stage: int, replica: int, name: str, kind: str, start: float, end: float) -> None:
        if end > start:
            plain = [x.item() if isinstance(x, np.generic) else x for x in (start, end)]
            self.found.append(Activity(stage, replica, name, kind, plain[0], plain[1]))

    @property
    def last_position(self) -> int:
        return int(self.line.end.shape[1]) - 1

    def over(self, stage: int) -> float:
        """When the stage's own work and its gradients' communication are over on all replicas."""
        parts = slice(stage, None, self.schedule.num_stages)
        return float(max(self.line.free[stage].max(), self.line.sync_end[parts].max()))

    def buckets(self, stage: int, moment: float) -> None:
        """The gradient buckets of `stage` that end at `moment`, back to the one that waited for its gradients."""
        line, num_stages = self.line, self.schedule.num_stages
        order = sorted(
            range(stage, len(line.sync_end), num_stages), key=lambda part: int(self.schedule.plan.last[part])
        )
        queue = [(part, bucket) for part in order for bucket in range(line.sync_end.shape[1])]
        assert line.sync_end[queue[-1]] == moment
        while queue:
            at = part, bucket = queue.pop()
            self.add(stage, 0, bucket_name(part, bucket), "grad_sync", line.sync_start[at], line.sync_end[at])
            if line.sync_start[at] == line.sync_ready[at]:
                self.gradients_of(part, bucket)
                return
        raise AssertionError("the first bucket of a stage waits for its gradients alone")

    def gradients_of(self, part: int, bucket: int) -> None:
        """What completes the gradients of `bucket`, on the replica that is the last to do so."""
        line, num_buckets = self.line, self.line.sync_ready.shape[1]
        stage, position = part % self.schedule.num_stages, int(self.schedule.plan.last[part])
        if not self.costs.overlap_grad_sync:
            self.operations(stage, self.last_position, int(line.free[stage].argmax()))
            return
        start = line.start[stage, position]
        moments = complete_at(start, line.end[stage, position], bucket, num_buckets)
        replica = int(moments.argmax())
        op = self.schedule.ops[stage][position]
        self.add(stage, replica, str(op), KINDS[op.kind], start[replica], moments[replica])
        self.before(stage, position, replica)

    def operations(self, stage: int, position: int, replica: int) -> None:
        """The operation at `position` and, where sends block, its send; then all before it."""
        op = self.schedule.ops[stage][position]
        part = self.schedule.virtual_stage(stage, op.chunk)
        start, end = (times[stage, position, replica] for times in (self.line.start, self.line.end))
        if self.costs.sends_block and op.kind in SENDS:
            over = end + self.transfers[op.kind, part, replica]
            self.add(stage, replica, f"send {op}", SENDS[op.kind], end, over)
        self.add(stage, replica, str(op), KINDS[op.kind], start, end)
        self.before(stage, position, replica)

    def before(self, stage: int, position: int, replica: int) -> None:
        """All that the operation at `position` waited for, back to the step's begin."""
        plan = self.schedule.plan
        row, none = int(plan.rows[stage, position]), len(plan.stage)
        while True:
            begin = self.line.start[plan.stage[row], plan.position[row], replica]
            own, source = int(plan.before[row]), int(plan.source[row])
            if own < none and self.released(own, replica, self.costs.sends_block) == begin:
                row, sends = own, self.costs.sends_block
            elif source < none:
                row, sends = source, True
            else:
                return
            stage, position = int(plan.stage[row]), int(plan.position[row])
            op = self.schedule.ops[stage][position]
            start, end = (times[stage, position, replica] for times in (self.line.start, self.line.end))
            if sends and op.kind is not Kind.WEIGHT:
                self.add(stage, replica, f"send {op}", SENDS[op.kind], end, self.released(row, replica, True))
            self.add(stage, replica, str(op), KINDS[op.kind], start, end)

    def released(self, row: int, replica: int, sends: bool) -> float:
        """When the row's operation is over, and its transfer where it `sends`."""
        plan = self.schedule.plan
        end = self.line.end[plan.stage[row], plan.position[row], replica]
        kind, part = plan.kind[row], plan.virtual_stage[row]
        return float(end + self.transfers[kind, part, replica]) if sends else float(end)
