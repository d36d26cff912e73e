"""Where a step's time goes, event class by event class, and where the difference of two strategies comes from.

The mean device's step is cut into parts that add up to it exactly, in whole nanoseconds:

    products ... scatters    the schedule's operations. The step is priced with one class of events after another added
                             (products, kernels, recomputation, then each kind of exchange); what a class adds to the
                             operations is its part, so that an exchange counts only as far as nothing hides it
    transfers ... gather     communication that is waited for outside operations, as `Timeline.exposed` counts it
    optimizer                its update, with what replication makes the gate wait for
    idle                     all that is left: the pipeline's bubble, and waiting for slower devices

Breaking a strategy into classes of events follows DistSim (arXiv 2306.08423).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from flashrec.sim.bill import Bill, BlockBill, StepBill
from flashrec.sim.config import Config
from flashrec.sim.costs import price
from flashrec.sim.engine import StepCosts
from flashrec.sim.events import Durations, Event
from flashrec.sim.strategy import Strategy
from flashrec.sim.timeline import Timeline

LABELS = {
    "products": "matrix products",
    "kernels": "memory-bound kernels",
    "recomputation": "recomputation",
    "tensor": "tensor-parallel exchanges",
    "experts": "expert exchanges",
    "gathers": "parameter gathers (ZeRO-3)",
    "scatters": "gradient scatters (ZeRO-2, 3)",
    "transfers": "pipeline transfers",
    "gradients": "gradient synchronisation",
    "tied": "tied embeddings",
    "gather": "parameter gather after the step",
    "optimizer": "optimizer",
    "idle": "idle (pipeline bubble, slower devices)",
}
OPERATIONS = ("products", "kernels", "recomputation", "tensor", "experts", "gathers", "scatters")
COMMUNICATION = ("tensor", "experts", "gathers", "scatters", "transfers", "gradients", "tied", "gather")
NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Count:
    """Events of a class on the mean device in one step, and the mean seconds of one of them, hidden or not."""

    events: float
    mean_s: float


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """A step of the mean device in nanoseconds by class; the parts add up to `total_ns`."""

    parts_ns: dict[str, int]
    counts: dict[str, Count]

    @property
    def total_ns(self) -> int:
        """The whole step."""
        return sum(self.parts_ns.values())

    def exposed_s(self) -> dict[str, float]:
        """Communication that nothing hides, by kind, in seconds of the mean device."""
        return {name: self.parts_ns[name] / NS for name in COMMUNICATION}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What one class has in two strategies."""

    part: str
    first_ns: int
    second_ns: int

    @property
    def difference_ns(self) -> int:
        """Second less first."""
        return self.second_ns - self.first_ns


def compare(first: Breakdown, second: Breakdown) -> tuple[Difference, ...]:
    """All classes, the greatest difference first. The differences add up to that of the two steps, exactly."""
    rows = [
        Difference(part=part, first_ns=first.parts_ns[part], second_ns=second.parts_ns[part])
        for part in LABELS
    ]
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_ns)))


def in_words(rows: Iterable[Difference], most: int = 3) -> str:
    """`idle -0.81 s, matrix products +0.20 s`: the differences that matter."""
    rows = list(rows)
    total = sum(abs(row.difference_ns) for row in rows)
    told = [row for row in rows[:most] if total and abs(row.difference_ns) >= total / 50]
    return ", ".join(f"{LABELS[row.part]} {row.difference_ns / NS:+.3g} s" for row in told) or "nothing"


def break_down(config: Config, strategy: Strategy, durations: Durations, timeline: Timeline) -> Breakdown:
    """The classes of a step that was simulated from `durations`."""
    bill = StepBill(config.model, config.cluster, strategy)
    known = Remembered(durations)
    stages = [0.0]
    for keep in filters():
        costs = price(narrowed(bill, keep), config.global_batch, known)
        stages.append(_operations_s(costs, timeline))
    exposed = timeline.exposed_s()
    weights = timeline.costs.weights
    devices = timeline.schedule.num_stages * int(weights.sum())
    seconds = {
        name: after - before for name, (before, after) in zip(OPERATIONS, pairwise(stages), strict=True)
    }
    seconds["transfers"] = exposed["send_forward"] + exposed["send_backward"]
    seconds["gradients"] = exposed["grad_sync"]
    seconds["tied"] = exposed["tied_sync"]
    seconds["gather"] = exposed["finish"]
    seconds["optimizer"] = float((timeline.costs.optimizer * weights).sum()) / devices
    return Breakdown(
        parts_ns=_whole(seconds, round(timeline.batch_s * NS)),
        counts=_counts(bill, timeline.schedule.num_micro_batches, known),
    )


def _whole(seconds: dict[str, float], total_ns: int) -> dict[str, int]:
    """Parts in nanoseconds, rounded so that they and what is left, the idle time, add up to the total."""
    parts, passed, rounded = {}, 0.0, 0
    for name, part in seconds.items():
        passed += part
        until = min(round(passed * NS), total_ns)
        parts[name] = until - rounded
        rounded = until
    return {**parts, "idle": total_ns - rounded}


def _operations_s(costs: StepCosts, timeline: Timeline) -> float:
    """Seconds of the mean device's operations at `costs`."""
    weights = costs.weights
    devices = timeline.schedule.num_stages * int(weights.sum())
    one = float((costs.durations().sum(axis=0) * weights).sum())
    return one * timeline.schedule.num_micro_batches / devices


class Remembered:
    """`Durations` that asks another source for each event once."""

    def __init__(self, durations: Durations):
        self._durations = durations
        self._known: dict[Event, float] = {}

    def seconds(self, key: Event) -> float:
        """As the other source has it."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._durations.seconds(key)
        return found


Filter = Callable[[BlockBill], BlockBill]


def _only(bill: Bill, operators: tuple[str, ...], collectives: Callable[[str], bool]) -> Bill:
    return Bill(
        tuple(item for item in bill.compute if item[0].operator in operators),
        tuple(item for item in bill.communication if collectives(item[0].collective)),
    )


def filters() -> list[Filter]:
    """What is priced: each filter lets one class more through than the one before it, in the order of OPERATIONS."""
    everything, none = ("gemm", "traffic"), Bill((), ())

    def through(
        operators: tuple[str, ...],
        *,
        again: bool = True,
        collectives: Callable[[str], bool] = lambda _: False,
        gather: bool = False,
        scatter: bool = False,
    ) -> Filter:
        def keep(block: BlockBill) -> BlockBill:
            def only(bill: Bill) -> Bill:
                return _only(bill, operators, collectives)

            return replace(
                block,
                forward=only(block.forward),
                again=only(block.again) if again else none,
                backward=only(block.backward),
                weight=only(block.weight),
                gather=block.gather if gather else None,
                scatter=block.scatter if scatter else None,
            )

        return keep

    def tensor(collective: str) -> bool:
        return collective != "all_to_all"

    def any_kind(_: str) -> bool:
        return True

    return [
        through(("gemm",), again=False),
        through(everything, again=False),
        through(everything),
        through(everything, collectives=tensor),
        through(everything, collectives=any_kind),
        through(everything, collectives=any_kind, gather=True),
        through(everything, collectives=any_kind, gather=True, scatter=True),
    ]


def narrowed(bill: StepBill, keep: Filter) -> StepBill:
    """The same step with only some of its blocks' events."""
    part = copy.copy(bill)
    part.bills = {key: keep(block) for key, block in bill.bills.items()}
    return part


def _counts(bill: StepBill, num_micro_batches: int, durations: Durations) -> dict[str, Count]:
    """How many events of each class of operations the mean device has in a step, and how long one takes."""
    times: dict[str, list[tuple[int, float]]] = {name: [] for name in OPERATIONS}
    for blocks in bill.stages:
        for block in blocks:
            for name, event, count in _events(bill.bills[id(block)]):
                times[name].append((count, durations.seconds(event)))
    scale = num_micro_batches / bill.strategy.pipeline_parallel
    found = {}
    for name, rows in times.items():
        number = sum(count for count, _ in rows)
        mean = sum(count * seconds for count, seconds in rows) / number if number else 0.0
        found[name] = Count(events=number * scale, mean_s=mean)
    return found


def _events(block: BlockBill) -> Iterable[tuple[str, Event, int]]:
    """The class of each event of a block, and how often a micro-batch has it."""
    for bill in (block.forward, block.backward, block.weight, block.again):
        for kernel, count in bill.compute:
            again = bill is block.again
            yield (
                "recomputation" if again else "products" if kernel.operator == "gemm" else "kernels",
                kernel,
                count,
            )
        for exchange, count in bill.communication:
            yield "experts" if exchange.collective == "all_to_all" else "tensor", exchange, count
    if block.gather is not None:
        yield "gathers", block.gather, 2
    if block.scatter is not None:
        yield "scatters", block.scatter, 1
