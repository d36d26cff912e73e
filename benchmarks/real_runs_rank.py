"""One rank of `benchmarks.real_runs`: performs a step's schedule for real, and notes when everything happened.

Its compute is either a wait or torch's arithmetic. Activations, gradients and the exchanges of tensor parallelism are
real bytes through gloo. Every receive of a step is posted before the step begins: gloo's send meets its receiver (a
blocking one lasts until the other side receives), a posted one goes through at once and costs its sender nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from flashrec.prctl import die_with_parent, set_timer_slack
from flashrec.sim.bill import Bill, StepBill
from flashrec.sim.cluster import Cluster
from flashrec.sim.costs import make_schedule
from flashrec.sim.events import DTYPES, Communication, Compute, Event
from flashrec.sim.kernels import TorchKernels, exchange
from flashrec.sim.model import Transformer
from flashrec.sim.operations import Kind, Op
from flashrec.sim.profiler import distinct_events
from flashrec.sim.schedules import Schedule
from flashrec.sim.strategy import Strategy
from flashrec.sim.timing import kept_from_core_s

LEAD_S = 0.1  # from the agreement on a step's begin to it: others' turn on the cores
TIMEOUT_S = 120
AWAKE_S = 0.3e-3  # at the end of a timed wait
WARM_UP = 2  # steps that do not count


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step that is run and predicted."""

    name: str
    waits: bool
    model: Transformer
    cluster: Cluster
    strategy: Strategy
    global_batch: int

    @property
    def schedule(self) -> Schedule:
        """What each stage does."""
        return make_schedule(self.strategy, self.global_batch)

    @property
    def events(self) -> tuple[Event, ...]:
        """What is measured for it."""
        return distinct_events(self.model, self.cluster, self.strategy, self.global_batch)


@dataclass(frozen=True)
class WaitKernels:
    """Kernels that do nothing, for as long as the cluster's device would take at its peak."""

    cluster: Cluster
    repeat_s: float = 0.005

    def nominal_s(self, event: Compute) -> float:
        """How long it should take."""
        device = self.cluster.device
        traffic = event.traffic_bytes / device.memory_bandwidth_bytes_s
        return traffic + (event.flops / device.flops(event.dtype) if event.flops else 0.0)

    def seconds(self, event: Compute, times: int) -> float:
        """Back to back like a queue of kernels: one wait to the end of the last."""
        nominal = self.nominal_s(event)
        times = max(times, round(self.repeat_s / nominal))
        began = time.monotonic()
        wait_until(began + times * nominal)
        return (time.monotonic() - began) / times


def wait_until(deadline: float) -> None:
    """Sleeps until just before it, then looks at the clock: being woken takes a while, a longer one under load.

    The clock is CLOCK_MONOTONIC, which all processes of a machine share.
    """
    left = deadline - time.monotonic() - AWAKE_S
    if left > 0:
        time.sleep(left)
    while time.monotonic() < deadline:
        pass


class Rank:
    """One rank's part of the case. Ranks are numbered tensor first, then data, then pipeline."""

    def __init__(self, case: Case, rank: int):
        self.case = case
        self.rank = rank
        self.bill = StepBill(case.model, case.cluster, case.strategy)
        self.schedule = case.schedule
        s = case.strategy
        self.tensor = rank % s.tensor_parallel
        self.replica = rank // s.tensor_parallel % s.data_parallel
        self.stage = rank // (s.tensor_parallel * s.data_parallel)
        self.width = s.tensor_parallel * s.data_parallel
        self.kernels = WaitKernels(case.cluster) if case.waits else TorchKernels()
        self._known = set(case.events)
        self._groups()
        self.work = {
            (kind, part): self._work(kind, part)
            for part in range(self.stage, self.schedule.num_virtual_stages, s.pipeline_parallel)
            for kind in Kind
        }
        self.buckets = [exchange(e, self.data_group) for e in self._bucket_events()]
        self.optimizer = Counter({self._optimizer_event(): 1})

    def _groups(self) -> None:
        """All ranks make all groups, in the same order."""
        s = self.case.strategy
        for stage in range(s.pipeline_parallel):
            ranks = torch.arange(self.width).reshape(s.data_parallel, s.tensor_parallel) + stage * self.width
            for row in ranks.tolist():
                group = dist.new_group(row)
                if self.rank in row:
                    self.tensor_group = group
            for column in ranks.T.tolist():
                group = dist.new_group(column)
                if self.rank in column:
                    self.data_group = group

    def _work(self, kind: Kind, part: int) -> list[tuple[Counter[Compute], list[object]]]:
        """Block by block: kernels, and the exchanges after them."""
        found = []
        blocks = self.bill.stages[part]
        for block in blocks if kind != Kind.BACKWARD else reversed(blocks):
            bill = self.bill.bills[id(block)]
            parts = {
                Kind.FORWARD: [bill.forward],
                Kind.BACKWARD: [bill.again, bill.backward],
                Kind.WEIGHT: [bill.weight],
            }[kind]
            if kind == Kind.BACKWARD and not self.schedule.splits_backward:
                parts.append(bill.weight)
            found.append((self._kernels(parts), self._exchanges(parts)))
        return found

    def _kernels(self, bills: list[Bill]) -> Counter[Compute]:
        counts: Counter[Compute] = Counter()
        for bill in bills:
            counts.update(dict(bill.compute))
        assert self._known.issuperset(counts), "every kernel performed is one that was profiled"
        return counts

    def _exchanges(self, bills: list[Bill]) -> list[object]:
        calls: list[object] = []
        for bill in bills:
            for event, count in bill.communication:
                assert event in self._known
                calls.extend([exchange(event, self.tensor_group)] * count)
        return calls

    def _bucket_events(self) -> list[Communication]:
        """The gradient buckets of this rank's virtual stages, after the stage's last operation."""
        s = self.case.strategy
        if s.data_parallel == 1:
            return []
        assert s.sharding == "none"
        assert not s.overlap_gradients
        events = []
        turns = sorted(self._parts(), key=lambda part: self.schedule.plan.last.reshape(-1)[part])
        for part in turns:
            common, experts = self.bill.stage_parameters(part)
            size = (common + experts) * DTYPES[s.gradient_dtype] / s.gradient_buckets
            event = self.bill.event("all_reduce", size, self.bill.data_group)
            assert event in self._known
            events.extend([event] * s.gradient_buckets)
        return events

    def _optimizer_event(self) -> Compute:
        s = self.case.strategy
        owned = sum(sum(self.bill.stage_parameters(part)) for part in self._parts())
        each = s.optimizer.traffic_bytes + s.optimizer.gradient_passes * DTYPES[s.gradient_dtype]
        device = self.case.cluster.device.name
        event = Compute(operator="traffic", shape=(round(owned * each),), dtype=s.dtype, device=device)
        assert event in self._known
        return event

    def _parts(self) -> range:
        return range(self.stage, self.schedule.num_virtual_stages, self.case.strategy.pipeline_parallel)

    def compute(self, counts: Counter[Compute]) -> None:
        """All of them, back to back."""
        if isinstance(self.kernels, WaitKernels):
            total = sum(count * self.kernels.nominal_s(event) for event, count in counts.items())
            wait_until(time.monotonic() + total)
            return
        for event, count in counts.items():
            launch = self.kernels.launch(event)
            for _ in range(count):
                launch()

    def _peer(self, part: int) -> int:
        stage = part % self.case.strategy.pipeline_parallel
        return stage * self.width + self.replica * self.case.strategy.tensor_parallel + self.tensor

    def _route(self, op: Op) -> tuple[int | None, int | None]:
        """The virtual stages that the operation's input comes from and its output goes to."""
        part = self.schedule.virtual_stage(self.stage, op.chunk)
        last = self.schedule.num_virtual_stages - 1
        before, after = (part - 1 if part else None), (part + 1 if part < last else None)
        if op.kind == Kind.FORWARD:
            return before, after
        return (after, before) if op.kind == Kind.BACKWARD else (None, None)

    def _tag(self, kind: Kind, micro_batch: int, receiver: int) -> int:
        parts = self.schedule.num_virtual_stages
        return (int(kind) * self.schedule.num_micro_batches + micro_batch) * parts + receiver

    def _message(self, left: int) -> torch.Tensor:
        event = self.bill.send(left)
        assert event is not None
        assert event in self._known
        return torch.zeros(max(1, event.size_bytes // 4))

    def step(self) -> dict[str, object]:
        """One step. Times in seconds from its begin, on which all ranks agreed."""
        ops = self.schedule.ops[self.stage]
        arrivals, sent = {}, []
        for op in ops:
            source, _ = self._route(op)
            part = self.schedule.virtual_stage(self.stage, op.chunk)
            if source is not None:
                buffer = self._message(min(source, part))
                tag = self._tag(op.kind, op.micro_batch, part)
                arrivals[op] = dist.irecv(buffer, self._peer(source), tag=tag)
        begin = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
        dist.barrier()
        begin[0] = time.monotonic() + LEAD_S
        dist.broadcast(begin, 0)
        zero = float(begin)
        wait_until(zero)
        kept_s = kept_from_core_s()
        starts, ends = [], []
        for op in ops:
            if op in arrivals:
                arrivals[op].wait()
            part = self.schedule.virtual_stage(self.stage, op.chunk)
            starts.append(time.monotonic() - zero)
            for counts, calls in self.work[op.kind, part]:
                self.compute(counts)
                for call in calls:
                    call()
            ends.append(time.monotonic() - zero)
            _, target = self._route(op)
            if target is not None:
                message = self._message(min(part, target))
                tag = self._tag(op.kind, op.micro_batch, target)
                sent.append(dist.isend(message, self._peer(target), tag=tag))
        for bucket in self.buckets:
            bucket()
        synchronised = time.monotonic() - zero
        self.compute(self.optimizer)
        done = time.monotonic() - zero
        kept_s = kept_from_core_s() - kept_s
        for work in sent:
            work.wait()
        return {"start": starts, "end": ends, "sync": synchronised, "done": done, "kept_s": kept_s}


def main(case: Case, rank: int, folder: Path, num_steps: int, parent: int) -> None:
    """The process of a rank: writes its steps to `folder`."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    try:
        set_timer_slack(1)
        torch.set_num_threads(1)
        if not case.waits:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=case.strategy.num_devices,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        member = Rank(case, rank)
        steps = [member.step() for _ in range(WARM_UP + num_steps)][WARM_UP:]
        (folder / f"rank{rank}.json").write_text(json.dumps(steps))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        (folder / f"failed{rank}").write_text(traceback.format_exc())
        sys.exit(1)
