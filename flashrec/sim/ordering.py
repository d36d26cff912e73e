"""A schedule checked, and sorted so that every operation stands behind all that it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import UsageError
from flashrec.sim.operations import Kind, Op

if TYPE_CHECKING:
    from flashrec.sim.schedules import Schedule

IntArray = NDArray[np.intp]


@dataclass(frozen=True)
class Plan:
    """A schedule as arrays, its N operations sorted so that each stands behind all that it waits for.

    Operations of equal level wait for none of one another: level l is rows `bounds[l]` to `bounds[l + 1]`, and is
    computed at once. The longest way to an operation, counted in operations, is its level.
    """

    stage: IntArray  # (N,) the stage that performs the row's operation
    position: IntArray  # (N,) its index in that stage's list
    kind: IntArray  # (N,)
    virtual_stage: IntArray  # (N,)
    before: IntArray  # (N,) row of the operation before it on its stage; N where it is the first
    source: IntArray  # (N,) row of the operation of the neighbouring virtual stage it waits for; N where none
    bounds: tuple[int, ...]
    rows: IntArray  # (P, N / P) the row of an operation, by stage and position
    last: IntArray  # (V,) position of the last operation of a virtual stage: its gradients are complete after it


def check_complete(schedule: Schedule) -> None:
    """Refuses a schedule in which an operation is missing, stands twice, or is of a micro-batch or chunk too high."""
    where = f"schedule {schedule.name!r}"
    splits = any(op.kind is Kind.WEIGHT for ops in schedule.ops for op in ops)
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT) if splits else (Kind.FORWARD, Kind.BACKWARD)
    for stage, ops in enumerate(schedule.ops):
        seen: dict[Op, int] = {}
        for position, op in enumerate(ops):
            if not (0 <= op.micro_batch < schedule.num_micro_batches and 0 <= op.chunk < schedule.num_chunks):
                raise UsageError(
                    f"{where}: stage {stage} performs {op}, but micro-batches are 0 to "
                    f"{schedule.num_micro_batches - 1} and chunks 0 to {schedule.num_chunks - 1}"
                )
            if seen.setdefault(op, position) != position:
                raise UsageError(
                    f"{where}: stage {stage} performs {op} twice, at positions {seen[op]} and {position}"
                )
        if len(seen) == len(kinds) * schedule.num_micro_batches * schedule.num_chunks:
            continue
        for kind in kinds:
            for chunk in range(schedule.num_chunks):
                for micro_batch in range(schedule.num_micro_batches):
                    missing = Op(kind, micro_batch, chunk)
                    if missing not in seen:
                        raise UsageError(f"{where}: {_who_waits_for(missing, stage, schedule)}")


def _who_waits_for(missing: Op, stage: int, schedule: Schedule) -> str:
    """What does not happen for want of `missing` on `stage`: the operation that needs it, or the step's end."""
    last = schedule.num_stages * schedule.num_chunks - 1
    part = schedule.virtual_stage(stage, missing.chunk)
    kind, to = missing.kind, part
    if missing.kind is Kind.FORWARD:
        kind, to = (Kind.FORWARD, part + 1) if part < last else (Kind.BACKWARD, part)
    elif missing.kind is Kind.BACKWARD:
        to = part - 1
        if part == 0 and any(op.kind is Kind.WEIGHT for op in schedule.ops[stage]):
            kind, to = Kind.WEIGHT, 0
    absent = f"{missing} of stage {stage}, which that stage never performs"
    if to < 0 or missing.kind is Kind.WEIGHT:
        return f"the optimizer of stage {stage} never becomes ready: it waits for {absent}"
    waiting = Op(kind, missing.micro_batch, to // schedule.num_stages)
    return f"{waiting} of stage {to % schedule.num_stages} never becomes ready: it waits for {absent}"


def make_plan(schedule: Schedule) -> Plan:
    """Sorts the operations by level (Kahn's order, one visit each). Raises UsageError where they wait in a circle."""
    num_stages, num_parts = schedule.num_stages, schedule.num_virtual_stages
    length, num_micro_batches = len(schedule.ops[0]), schedule.num_micro_batches
    flat = [(op.kind, op.micro_batch, op.chunk) for ops in schedule.ops for op in ops]
    kind, micro_batch, chunk = np.array(flat, dtype=np.intp).T
    total = len(flat)
    number = np.arange(total)
    stage, position = number // length, number % length
    part = chunk * num_stages + stage

    # Where each operation stands, by kind, part and micro-batch; the edges of the table stand for "waits for none".
    place = np.full((3, num_parts + 2, num_micro_batches), total)
    place[kind, part + 1, micro_batch] = number
    nearer = np.where(kind == Kind.FORWARD, part, part + 2)
    source = np.where(kind == Kind.WEIGHT, total, place[kind, nearer, micro_batch])
    # The operation of its own stage that it needs: it stands before it, or the stage can never go on.
    needs = np.where(kind == Kind.FORWARD, total, place[np.maximum(kind - 1, 0), part + 1, micro_batch])
    late = (needs < total) & (needs > number)
    if late.any():
        at = int(np.flatnonzero(late)[0])
        op, need = schedule.ops[at // length][at % length], schedule.ops[at // length][needs[at] % length]
        raise UsageError(
            f"schedule {schedule.name!r}: {op} of stage {at // length} never becomes ready: it waits for {need}, "
            f"which stands behind it on that stage"
        )

    sources = source.tolist()
    followers = [total] * total  # at most one operation waits for another across stages
    for row, at in enumerate(sources):
        if at < total:
            followers[at] = row
    waits = [(row % length > 0) + (at < total) for row, at in enumerate(sources)]
    ready = [row for row, left in enumerate(waits) if not left]
    order: list[int] = []
    bounds = [0]
    while ready:
        order += ready
        bounds.append(len(order))
        following: list[int] = []
        for row in ready:
            after, follower = row + 1, followers[row]
            if after % length:
                waits[after] -= 1
                if not waits[after]:
                    following.append(after)
            if follower < total:
                waits[follower] -= 1
                if not waits[follower]:
                    following.append(follower)
        ready = following
    if len(order) < total:
        raise UsageError(f"schedule {schedule.name!r}: {_circle(schedule, waits, sources)}")

    sorted_to = np.array(order)
    rows = np.empty(total + 1, dtype=np.intp)
    rows[sorted_to] = number
    rows[total] = total
    last = np.zeros(num_parts, dtype=np.intp)
    np.maximum.at(last, part, position)
    before = np.where(position > 0, rows[number - 1], total)
    return Plan(
        stage=stage[sorted_to],
        position=position[sorted_to],
        kind=kind[sorted_to],
        virtual_stage=part[sorted_to],
        before=before[sorted_to],
        source=rows[source[sorted_to]],
        bounds=tuple(bounds),
        rows=rows[:total].reshape(num_stages, length),
        last=last,
    )


def _circle(schedule: Schedule, waits: Sequence[int], sources: Sequence[int]) -> str:
    """The circle of operations that wait for one another, beginning with one that would be its stage's next."""
    length = len(schedule.ops[0])
    next_up = {row // length: row for row in reversed(range(len(waits))) if waits[row]}

    def named(row: int) -> str:
        return f"{schedule.ops[row // length][row % length]} of stage {row // length}"

    def awaited(row: int) -> int:
        """Of what `row` waits for, one that never happens either: its stage's next operation, or its source."""
        head = next_up[row // length]
        return sources[row] if row == head else head

    row = next_up[min(next_up)]
    seen: list[int] = []
    while row not in seen:
        seen.append(row)
        row = awaited(row)
    circle = seen[seen.index(row) :]
    if (
        circle[0] not in next_up.values()
    ):  # entered at an operation that stands behind another; begin with the other
        circle = circle[1:] + circle[:1]
    text = f"{named(circle[0])} never becomes ready: it waits for "
    for here, then in pairwise([*circle, circle[0]]):
        text += (
            ""
            if here == circle[0]
            else ", which stands behind "
            if sources[here] != then
            else ", which waits for "
        )
        text += named(then)
    return text
