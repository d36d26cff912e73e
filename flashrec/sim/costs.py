"""Model, cluster, strategy and durations -> the costs of a step's operations: events -> layers -> stages -> replicas.

A tensor group is as slow as its slowest device. Data-parallel replicas that are equal on every stage are one class,
with the number of them as its weight, so that a thousand equal replicas cost no more to simulate than one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashrec.sim.architecture import Architecture
from flashrec.sim.bill import Bill, BlockBill, Placement, StepBill, schedule_splits_backward
from flashrec.sim.cluster import Cluster
from flashrec.sim.engine import StepCosts
from flashrec.sim.events import DTYPES, Compute, Durations, Event
from flashrec.sim.profile import MissingEvents
from flashrec.sim.schedules import Schedule, gpipe, interleaved, one_f_one_b, zb_h1
from flashrec.sim.strategy import Strategy

Array = NDArray[np.float64]


def make_schedule(strategy: Strategy, global_batch: int) -> Schedule:
    """The strategy's schedule for that batch."""
    if isinstance(strategy.schedule, Schedule):
        return strategy.schedule
    stages, micro_batches = strategy.pipeline_parallel, strategy.num_micro_batches(global_batch)
    if strategy.schedule == "interleaved":
        return interleaved(stages, micro_batches, strategy.chunks)
    makers = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1}
    return makers[strategy.schedule](stages, micro_batches)


def build(
    model: Architecture, cluster: Cluster, strategy: Strategy, global_batch: int, durations: Durations
) -> StepCosts:
    """The costs of one step, for `flashrec.sim.engine.run` with `make_schedule`'s schedule.

    Raises UsageError where the strategy is impossible, and MissingEvents, which names every one, where `durations`
    lacks events.
    """
    strategy.check(model, cluster, global_batch)
    return price(StepBill(model, cluster, strategy), global_batch, durations)


@dataclass(frozen=True)
class _Seconds:
    """Of a device at normal speed; the exchanges apart, because they do not get faster or slower with it."""

    compute: float = 0.0
    exchange: float = 0.0

    def __add__(self, other: "_Seconds") -> "_Seconds":
        return _Seconds(self.compute + other.compute, self.exchange + other.exchange)


class _Prices:
    """Looks durations up, each event once. What is missing counts as nothing until `require_all`."""

    def __init__(self, durations: Durations):
        self._durations = durations
        self._known: dict[Event, float] = {}
        self._missing: list[Event] = []
        self._command = ""

    def of(self, event: Event) -> float:
        if event not in self._known:
            try:
                self._known[event] = self._durations.seconds(event)
            except MissingEvents as error:
                self._known[event] = 0.0
                self._missing.append(event)
                self._command = error.command
        return self._known[event]

    def require_all(self) -> None:
        if self._missing:
            raise MissingEvents(self._missing, self._command)

    def bill(self, bill: Bill) -> _Seconds:
        return _Seconds(
            sum(count * self.of(event) for event, count in bill.compute),
            sum(count * self.of(event) for event, count in bill.communication),
        )


def price(bill: StepBill, global_batch: int, durations: Durations) -> StepCosts:
    """The costs of a counted step."""
    return _Pricing(bill, global_batch, durations).costs()


class _Pricing:
    def __init__(self, bill: StepBill, global_batch: int, durations: Durations):
        self.bill = bill
        self.strategy = bill.strategy
        self.prices = _Prices(durations)
        self.splits = schedule_splits_backward(self.strategy.schedule)
        self.num_micro_batches = self.strategy.num_micro_batches(global_batch)
        self.slowness, self.weights = replica_classes(bill.cluster, self.strategy)

    def costs(self) -> StepCosts:
        blocks = {key: self._block(b) for key, b in self.bill.bills.items()}
        parts = [
            [sum((blocks[id(b)][part] for b in stage), _Seconds()) for stage in self.bill.stages]
            for part in range(3)
        ]
        forward, backward, weight = (self._per_class(part) for part in parts)
        sends = self._sends(len(self.weights))
        costs = StepCosts(
            forward=forward,
            backward=backward,
            weight=weight,
            send_forward=sends,
            send_backward=sends.copy(),
            sends_block=self.strategy.sends_block,
            grad_sync=np.array([self._grad_sync(v) for v in range(len(self.bill.stages))]),
            overlap_grad_sync=self.strategy.overlap_gradients,
            optimizer=self._optimizer(forward + backward + weight),
            finish=np.array([self._finish(p) for p in range(self.strategy.pipeline_parallel)]),
            weights=self.weights,
            tied_sync=self._tied_sync(),
        )
        self.prices.require_all()
        return costs

    def _block(self, bill: BlockBill) -> tuple[_Seconds, _Seconds, _Seconds]:
        """Forward, backward, weight. What ZeRO-3 gathers and scatters is exposed as far as nothing hides it."""
        forward, again, backward, weight = (
            self.prices.bill(b) for b in (bill.forward, bill.again, bill.backward, bill.weight)
        )
        if self.strategy.overlap_tensor and not self.splits:
            backward = _Seconds(backward.compute, max(0.0, backward.exchange - weight.compute))
        backward += again
        gather = self.prices.of(bill.gather) if bill.gather else 0.0
        scatter = self.prices.of(bill.scatter) if bill.scatter and self.num_micro_batches > 1 else 0.0
        hides_gather, hides_scatter = self.strategy.overlap_parameters, self.strategy.overlap_gradients
        hidden = gather * hides_gather + scatter * hides_scatter
        behind = backward.compute + weight.compute
        forward += _Seconds(0.0, max(0.0, gather - forward.compute * hides_gather))
        exposed = max(0.0, hidden - behind) + gather * (not hides_gather) + scatter * (not hides_scatter)
        backward += _Seconds(0.0, exposed)
        if not self.splits:
            backward, weight = backward + weight, _Seconds()
        return forward, backward, weight

    def _per_class(self, stages: Iterable[_Seconds]) -> Array:
        """(V, D): the compute of each virtual stage by the slowness of its devices."""
        rows = []
        for v, seconds in enumerate(stages):
            slowness = self.slowness[v % self.strategy.pipeline_parallel]
            rows.append(seconds.compute * slowness + seconds.exchange)
        return np.array(rows)

    def _sends(self, classes: int) -> Array:
        sends = [self.bill.send(v) for v in range(len(self.bill.stages) - 1)]
        seconds = [self.prices.of(event) if event else 0.0 for event in sends]
        if self.strategy.scatter_sends and not self.strategy.sequence_parallel:
            sizes = (stage[-1].output_bytes for stage in self.bill.stages[:-1])
            gathers = [self.bill.event("all_gather", size, self.bill.tensor_group) for size in sizes]
            seconds = [s + self.prices.of(g) for s, g in zip(seconds, gathers, strict=True)]
        return np.repeat(np.array(seconds, dtype=float).reshape(-1, 1), classes, axis=1)

    def _memory_seconds(self, size: float) -> float:
        """Of a kernel that moves so many bytes."""
        if size < 1:
            return 0.0
        device, dtype = self.bill.cluster.device.name, self.strategy.dtype
        return self.prices.of(Compute(operator="traffic", shape=(round(size),), dtype=dtype, device=device))

    def _grad_sync(self, stage: int) -> list[float]:
        """Seconds of each bucket of a virtual stage's gradients."""
        buckets = self.strategy.gradient_buckets
        return [self._bucket(stage, buckets)] * buckets

    def _bucket(self, stage: int, buckets: int) -> float:
        strategy, bill = self.strategy, self.bill
        if strategy.data_parallel == 1:
            return 0.0
        element = DTYPES[strategy.gradient_dtype] / buckets
        common, experts = (count * element for count in bill.stage_parameters(stage))
        seconds = 0.0
        if strategy.compression is not None:
            seconds += self._memory_seconds(strategy.compression.passes * 2 * (common + experts))
            common, experts = (size * strategy.compression.ratio for size in (common, experts))
        if strategy.expert_parallel > 1 and strategy.data_parallel > strategy.expert_parallel:
            seconds += self.prices.of(bill.event("all_reduce", experts, bill.expert_data_group))
        elif strategy.expert_parallel == 1:
            common += experts
        if strategy.shards == 1:
            return seconds + self.prices.of(bill.event("all_reduce", common, bill.data_group))
        if strategy.sharding == "zero1" or self.num_micro_batches == 1:
            seconds += self.prices.of(bill.shard_event("reduce_scatter", common))
        if strategy.data_parallel > strategy.shards:  # HSDP
            seconds += self.prices.of(
                bill.event("all_reduce", common / strategy.shards, bill.replicate_group)
            )
        return seconds

    def _device_parameters(self, stage: int) -> tuple[int, int]:
        """Parameters of one device of a pipeline stage, all its chunks: all but experts, and experts."""
        chunks = range(stage, len(self.bill.stages), self.strategy.pipeline_parallel)
        common, experts = zip(*(self.bill.stage_parameters(v) for v in chunks), strict=True)
        return sum(common), sum(experts)

    def _optimizer(self, micro_batch: Array) -> Array:
        """(P, D): the update of the parameters, after what replication makes the gate wait for."""
        strategy = self.strategy
        rows = []
        for stage in range(strategy.pipeline_parallel):
            common, experts = self._device_parameters(stage)
            owned = common / strategy.shards + experts / strategy.expert_shards
            gradients = strategy.optimizer.gradient_passes * DTYPES[strategy.gradient_dtype]
            seconds = self._memory_seconds(owned * (strategy.optimizer.traffic_bytes + gradients))
            busy = micro_batch[stage :: strategy.pipeline_parallel].sum(axis=0) * self.num_micro_batches
            rows.append(seconds * self.slowness[stage] + self._replication(owned, busy))
        return np.array(rows)

    def _replication(self, owned: float, busy: Array) -> Array:
        """Seconds at the gate. `busy`: forward and backward of the step, behind which sealing and sending hide."""
        replication, bill = self.strategy.replication, self.bill
        if replication is None:
            return np.zeros_like(busy)
        cluster = bill.cluster
        everyone = min(cluster.devices_per_node, self.strategy.num_devices)
        node = -(-self.strategy.num_devices // cluster.devices_per_node)
        world = bill.event(
            "all_reduce", replication.gate_bytes, Placement(self.strategy.num_devices, node, 1)
        )
        gate = self.prices.of(world)
        size: float = replication.private_bytes
        if replication.regime == "sealed":
            size += owned * (DTYPES[self.strategy.dtype] + self.strategy.optimizer.state_bytes)
        copy = self.prices.of(bill.event("host_copy", size, Placement(1, 1, 1)))
        away = 2 if cluster.num_nodes > 1 else 1
        send = self.prices.of(bill.event("send", size, Placement(2, away, everyone))) * replication.copies
        if replication.regime == "live":
            return np.full_like(busy, gate + copy + send)
        work = copy + send
        exposed = np.maximum(0.0, work - busy)
        hidden = np.minimum(work, busy)
        return np.asarray(gate + (exposed + replication.slowdown * hidden) / replication.every_steps)

    def _finish(self, stage: int) -> float:
        """ZeRO-1 and 2 gather the updated parameters; ZeRO-3 gathers them when they are used."""
        strategy = self.strategy
        if strategy.shards == 1 or strategy.sharding == "zero3":
            return 0.0
        common, experts = self._device_parameters(stage)
        size = DTYPES[strategy.dtype] * (common + (experts if strategy.expert_shards > 1 else 0))
        return self.prices.of(self.bill.shard_event("all_gather", size))

    def _tied_sync(self) -> float:
        strategy, bill = self.strategy, self.bill
        if not bill.model.tied_parameters or strategy.pipeline_parallel == 1:
            return 0.0
        size = DTYPES[strategy.gradient_dtype] * bill.model.tied_parameters / strategy.tensor_parallel
        width = strategy.data_parallel * strategy.tensor_parallel
        per_node = bill.cluster.devices_per_node
        apart = (strategy.pipeline_parallel - 1) * width // per_node > 0
        return self.prices.of(
            bill.event("all_reduce", size, Placement(2, 2 if apart else 1, min(per_node, width)))
        )


def replica_classes(cluster: Cluster, strategy: Strategy) -> tuple[Array, NDArray[np.int64]]:
    """How slow each class of replicas is, (P, D), and how many replicas each stands for, (D,).

    Slowness: 1 / speed of the slowest device of the tensor group.
    """
    stages, replicas, tensor = strategy.pipeline_parallel, strategy.data_parallel, strategy.tensor_parallel
    if not cluster.speed_factors:
        return np.ones((stages, 1)), np.array([replicas])
    speeds = np.ones(stages * replicas * tensor)
    for device, speed in cluster.speed_factors.items():
        if device < speeds.size:
            speeds[device] = speed
    slowest = speeds.reshape(stages, replicas, tensor).min(axis=2)
    classes, weights = np.unique(slowest, axis=1, return_counts=True)
    return 1 / classes, weights.astype(np.int64)
