"""Which operation each pipeline stage performs, and in which order.

A schedule is static: every stage has a list of operations that it performs one after another, and an operation
begins when the one before it on its stage is over and what it needs has arrived. Virtual stage
`v = chunk * num_stages + stage` is the model's v-th part, v from 0 to V - 1 with V = num_stages * num_chunks:

    F(m, v)   needs F(m, v - 1) and the transfer of its activations
    B(m, v)   needs B(m, v + 1), the transfer of its gradients, and F(m, v)
    W(m, v)   needs B(m, v)

B is the whole backward, or only the gradient of the input where a schedule has W, the gradient of the weights.

Sources of the orders: GPipe (arXiv 1811.06965), 1F1B (arXiv 2006.09503), interleaved 1F1B (arXiv 2104.04473), ZB-H1
(arXiv 2401.10241, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from flashrec.errors import UsageError
from flashrec.sim.choices import require_count
from flashrec.sim.operations import Kind, Op, operation
from flashrec.sim.ordering import Plan, check_complete, make_plan

__all__ = ["Kind", "Op", "Schedule", "from_lists", "gpipe", "interleaved", "one_f_one_b", "zb_h1"]


@dataclass(frozen=True)
class Schedule:
    """What every stage performs: `ops[stage]` in that stage's order. Micro-batches and chunks count from 0.

    Raises UsageError, with the operation that never becomes ready and what it waits for, where an operation is
    missing, stands twice, is out of range, or where operations wait for one another in a circle.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_chunks: int
    ops: tuple[tuple[Op, ...], ...]

    def __post_init__(self) -> None:
        for what in ("num_stages", "num_micro_batches", "num_chunks"):
            require_count(getattr(self, what), f"schedule {self.name!r}: {what}")
        if len(self.ops) != self.num_stages:
            raise UsageError(f"schedule {self.name!r} lists {len(self.ops)} stages; it has {self.num_stages}")
        check_complete(self)
        self.plan  # noqa: B018 (found once, and refuses a circle)

    @property
    def num_virtual_stages(self) -> int:
        """V, the parts that the model is cut into."""
        return self.num_stages * self.num_chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the gradient of the weights is an operation of its own."""
        return any(op.kind is Kind.WEIGHT for op in self.ops[0])

    @cached_property
    def plan(self) -> Plan:
        """The schedule as arrays, sorted by level; found once, in time proportional to the operations."""
        return make_plan(self)

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Which part of the model `chunk` of `stage` is."""
        return chunk * self.num_stages + stage

    def peak_in_flight(self) -> tuple[int, ...]:
        """How many chunks of micro-batches each stage holds at most: forward done, gradients not yet complete."""
        last = Kind.WEIGHT if self.splits_backward else Kind.BACKWARD
        peaks = []
        for ops in self.ops:
            held = peak = 0
            for op in ops:
                held += (op.kind is Kind.FORWARD) - (op.kind is last)
                peak = max(peak, held)
            peaks.append(peak)
        return tuple(peaks)


@lru_cache(maxsize=64)
def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards in the reverse order (arXiv 1811.06965, figure 2c)."""
    require_count(num_stages, "num_stages")
    require_count(num_micro_batches, "num_micro_batches")
    ops = [operation(Kind.FORWARD, i) for i in range(num_micro_batches)]
    ops += [operation(Kind.BACKWARD, i) for i in reversed(range(num_micro_batches))]
    return Schedule("gpipe", num_stages, num_micro_batches, 1, (tuple(ops),) * num_stages)


@lru_cache(maxsize=64)
def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Stage s performs P - s - 1 forwards, then a forward and a backward in turn (arXiv 2006.09503)."""
    require_count(num_stages, "num_stages")
    require_count(num_micro_batches, "num_micro_batches")
    forwards = [operation(Kind.FORWARD, i) for i in range(num_micro_batches)]
    backwards = [operation(Kind.BACKWARD, i) for i in range(num_micro_batches)]
    return Schedule(
        "1f1b",
        num_stages,
        num_micro_batches,
        1,
        tuple(_in_turn(forwards, backwards, num_stages - stage - 1) for stage in range(num_stages)),
    )


def _in_turn(forwards: Sequence[Op], backwards: Sequence[Op], num_warm_up: int) -> tuple[Op, ...]:
    """`num_warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    num_warm_up = min(num_warm_up, len(forwards))
    ops = [*forwards[:num_warm_up]]
    for forward, backward in zip(forwards[num_warm_up:], backwards, strict=False):
        ops += (forward, backward)
    return (*ops, *backwards[len(forwards) - num_warm_up :])


@lru_cache(maxsize=64)
def interleaved(num_stages: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """1F1B over `num_chunks` parts a stage (arXiv 2104.04473, section 2.2), in the order Megatron performs it.

    Micro-batches go in groups of P: a stage performs a group through its first chunk, then through its second; in
    the backward through its last chunk first. Stage s warms up with 2 (P - s - 1) + (chunks - 1) P forwards. One
    chunk is plain 1F1B. Raises UsageError unless P divides the micro-batches.
    """
    for value, what in (
        (num_stages, "num_stages"),
        (num_micro_batches, "num_micro_batches"),
        (num_chunks, "num_chunks"),
    ):
        require_count(value, what)
    if num_chunks == 1:
        return one_f_one_b(num_stages, num_micro_batches)
    if num_micro_batches % num_stages:
        below = num_micro_batches - num_micro_batches % num_stages
        nearest = ([below] if below else []) + [below + num_stages]
        raise UsageError(
            f"interleaved 1F1B on {num_stages} stages takes a multiple of {num_stages} micro-batches, not "
            f"{num_micro_batches}; nearest valid: {' or '.join(map(str, nearest))}"
        )
    turns = [
        (group + i, chunk)
        for group in range(0, num_micro_batches, num_stages)
        for chunk in range(num_chunks)
        for i in range(num_stages)
    ]
    forwards = [operation(Kind.FORWARD, i, chunk) for i, chunk in turns]
    backwards = [operation(Kind.BACKWARD, i, num_chunks - 1 - chunk) for i, chunk in turns]
    ops = tuple(
        _in_turn(forwards, backwards, 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages)
        for stage in range(num_stages)
    )
    return Schedule("interleaved", num_stages, num_micro_batches, num_chunks, ops)


@lru_cache(maxsize=64)
def zb_h1(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-H1 (arXiv 2401.10241, section 2.1): 1F1B with the weights' gradients s micro-batches behind on stage s.

    The rule: stage s warms up as in 1F1B; then every backward B(i) is followed by W(i - s), and the W that are left
    close the stage. A forward whose W is not over holds its activations: P - s of 1F1B and s of the delay, so that
    no stage holds more than P micro-batches, as many as the first stage of 1F1B. The W that a late stage puts off
    lets its gradients leave earlier, which shortens the bubble from (P - 1)(F + B + W) to (P - 1)(F + B - W): exactly
    so for equal stages, no transfers, at least P micro-batches, and W no longer than F and than B.
    """
    base = one_f_one_b(num_stages, num_micro_batches)
    ops = []
    for stage, ops_1f1b in enumerate(base.ops):
        order: list[Op] = []
        for op in ops_1f1b:
            order.append(op)
            if op.kind is Kind.BACKWARD and op.micro_batch >= stage:
                order.append(operation(Kind.WEIGHT, op.micro_batch - stage))
        left = range(max(num_micro_batches - stage, 0), num_micro_batches)
        ops.append((*order, *(operation(Kind.WEIGHT, i) for i in left)))
    return Schedule("zb-h1", num_stages, num_micro_batches, 1, tuple(ops))


def from_lists(lists: Sequence[Sequence[str]], name: str = "user") -> Schedule:
    """The schedule that a user wrote: for every stage its operations in order, such as "F0", "B0", "W0", "F0.1".

    Micro-batches and chunks are as many as the highest named. Raises UsageError as `Schedule` does.
    """
    if not lists or not any(lists):
        raise UsageError(f"schedule {name!r} lists no operation; a stage looks like ['F0', 'B0']")
    ops = tuple(tuple(Op.parse(text) for text in stage) for stage in lists)
    num_micro_batches = 1 + max(op.micro_batch for stage in ops for op in stage)
    num_chunks = 1 + max(op.chunk for stage in ops for op in stage)
    return Schedule(name, len(ops), num_micro_batches, num_chunks, ops)
