"""A strategy's events, counted: which distinct things a step is made of, and how often each happens.

Counting needs no durations. The same `StepBill` can be priced with a profile, with the analytic model, or many times
over while the analytic model's constants are fitted.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from flashrec.sim.architecture import Architecture, Block, Work
from flashrec.sim.cluster import Cluster
from flashrec.sim.events import DTYPES, Communication, Compute, Event
from flashrec.sim.schedules import Schedule
from flashrec.sim.strategy import Strategy


@dataclass(frozen=True)
class Bill:
    """Events of one device with how often each happens, kernels and exchanges apart."""

    compute: tuple[tuple[Compute, int], ...]
    communication: tuple[tuple[Communication, int], ...]


@dataclass(frozen=True, kw_only=True)
class BlockBill:
    """One block's events: forward, what the backward does again, backward to its input, weights' gradients."""

    name: str
    forward: Bill
    again: Bill
    backward: Bill
    weight: Bill
    gather: Communication | None
    """ZeRO-3: its parameters, before its forward and again before its backward."""
    scatter: Communication | None
    """ZeRO-2 and 3: its gradients, each micro-batch."""


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a group are: how many, on how many nodes, and how many such groups a node has."""

    participants: int
    nodes: int
    groups: int


def place(cluster: Cluster, size: int, stride: int) -> Placement:
    """A group of `size` ranks, `stride` ranks apart, from the first of a node on."""
    per_node = cluster.devices_per_node
    members = min(size, max(1, per_node // stride))
    return Placement(size, math.ceil(size / members), max(1, per_node // members))


class StepBill:
    """The events of one training step of `strategy`, which must have been checked."""

    def __init__(self, model: Architecture, cluster: Cluster, strategy: Strategy):
        self.model = model
        self.cluster = cluster
        self.strategy = strategy
        self.blocks = model.blocks(strategy.division)
        self.bills = self._block_bills()
        self.stages = self._stages()

    def _block_bills(self) -> dict[int, BlockBill]:
        """By the identity of the block: equal layers are one object and are counted once."""
        return {id(block): self._block_bill(block) for block in self.blocks}

    def _stages(self) -> list[list[Block]]:
        """Blocks of each virtual stage: the embedding on the first, the loss head on the last."""
        layers = iter(self.blocks[1:-1])
        stages = [[next(layers) for _ in range(n)] for n in self.strategy.layers(self.model.num_layers)]
        stages[0].insert(0, self.blocks[0])
        stages[-1].append(self.blocks[-1])
        return stages

    def _block_bill(self, block: Block) -> BlockBill:
        kind = self.strategy.recompute
        again = Work()
        if block.recomputable and kind == "full":
            again = block.forward
        elif block.recomputable and kind == "selective":
            again = block.selective
        sharding, shards = self.strategy.sharding, self.strategy.shards
        # Experts that no other rank holds are neither gathered nor scattered.
        shared = block.parameters + (block.expert_parameters if self.strategy.expert_shards > 1 else 0)
        size = DTYPES[self.strategy.dtype] * shared
        gradient = DTYPES[self.strategy.gradient_dtype] * shared
        sharded = shards > 1
        return BlockBill(
            name=block.name,
            forward=self.bill(block.forward),
            again=self.bill(again),
            backward=self.bill(block.backward_input),
            weight=self.bill(block.backward_weight),
            gather=self.shard_event("all_gather", size) if sharded and sharding == "zero3" else None,
            scatter=self.shard_event("reduce_scatter", gradient)
            if sharded and sharding in ("zero2", "zero3")
            else None,
        )

    def bill(self, work: Work) -> Bill:
        """The events of `work` on this cluster, equal ones together."""
        device, dtype = self.cluster.device.name, self.strategy.dtype
        compute: Counter[Compute] = Counter()
        for g in work.gemms:
            compute[Compute(operator="gemm", shape=(g.batch, g.m, g.k, g.n), dtype=dtype, device=device)] += 1
        for size in work.traffic:
            compute[Compute(operator="traffic", shape=(max(1, size),), dtype=dtype, device=device)] += 1
        communication: Counter[Communication] = Counter()
        for exchange in work.exchanges:
            where = self.tensor_group if exchange.axis == "tensor" else self.expert_group
            communication[self.event(exchange.collective, exchange.size_bytes, where)] += 1
        return Bill(tuple(compute.items()), tuple(communication.items()))

    def event(self, collective: str, size_bytes: float, where: Placement) -> Communication:
        """A collective of `size_bytes` on a group placed so."""
        return Communication(
            collective=collective,
            size_bytes=round(size_bytes),
            participants=where.participants,
            nodes=where.nodes,
            groups=where.groups if where.nodes > 1 else 1,
            device=self.cluster.device.name,
        )

    def shard_event(self, collective: str, size_bytes: float) -> Communication:
        """A collective among the ranks that hold the shards of one state."""
        return self.event(collective, size_bytes, self.shard_group)

    @cached_property
    def tensor_group(self) -> Placement:
        """A tensor-parallel group."""
        return place(self.cluster, self.strategy.tensor_parallel, 1)

    @cached_property
    def expert_group(self) -> Placement:
        """An expert-parallel group: neighbouring data-parallel ranks."""
        return place(self.cluster, self.strategy.expert_parallel, self.strategy.tensor_parallel)

    @cached_property
    def data_group(self) -> Placement:
        """A data-parallel group."""
        return place(self.cluster, self.strategy.data_parallel, self.strategy.tensor_parallel)

    @cached_property
    def expert_data_group(self) -> Placement:
        """Ranks that hold the same experts."""
        s = self.strategy
        return place(
            self.cluster, s.data_parallel // s.expert_parallel, s.tensor_parallel * s.expert_parallel
        )

    @cached_property
    def shard_group(self) -> Placement:
        """Ranks among which the optimizer's states (gradients, parameters) are divided."""
        return place(self.cluster, self.strategy.shards, self.strategy.tensor_parallel)

    @cached_property
    def replicate_group(self) -> Placement:
        """HSDP: ranks that hold the same shard."""
        s = self.strategy
        return place(self.cluster, s.data_parallel // s.shards, s.tensor_parallel * s.shards)

    def stage_parameters(self, stage: int) -> tuple[int, int]:
        """Parameters of one device of virtual stage `stage`: all but experts, and experts.

        Tied embeddings are on the last stage as well, where that is another device.
        """
        common = sum(b.parameters for b in self.stages[stage])
        experts = sum(b.expert_parameters for b in self.stages[stage])
        if stage == len(self.stages) - 1 and self.strategy.pipeline_parallel > 1:
            common += -(-self.model.tied_parameters // self.strategy.tensor_parallel)
        return common, experts

    def send(self, stage: int) -> Communication | None:
        """What goes from virtual stage `stage` to the next for one micro-batch; None on one device."""
        s = self.strategy
        if s.pipeline_parallel == 1:
            return None
        size = self.stages[stage][-1].output_bytes
        if s.sequence_parallel or s.scatter_sends:
            size = -(-size // s.tensor_parallel)
        width = s.data_parallel * s.tensor_parallel
        here, there = (v % s.pipeline_parallel * width for v in (stage, stage + 1))
        per_node = self.cluster.devices_per_node
        nodes = 1 if here // per_node == there // per_node else 2
        return self.event("send", size, Placement(2, nodes, min(per_node, width)))

    def events(self) -> set[Event]:
        """Every distinct event of the forward and backward passes and the sends."""
        found: set[Event] = set()
        for bill in self.bills.values():
            for part in (bill.forward, bill.again, bill.backward, bill.weight):
                found.update(event for event, _ in part.compute)
                found.update(event for event, _ in part.communication)
            found.update(event for event in (bill.gather, bill.scatter) if event is not None)
        sends = (self.send(v) for v in range(len(self.stages) - 1))
        found.update(event for event in sends if event is not None)
        return found


def schedule_splits_backward(schedule: str | Schedule) -> bool:
    """Whether the schedule has operations of their own for the weights' gradients."""
    return schedule.splits_backward if isinstance(schedule, Schedule) else schedule == "zb-h1"
