"""Random small schedules and integer costs for the tests of the performance model's engine."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from flashrec.sim.engine import StepCosts
from flashrec.sim.schedules import Schedule, from_lists, gpipe, interleaved, one_f_one_b, zb_h1


def random_lists(
    chance: random.Random, stages: int, micro_batches: int, chunks: int, split: bool
) -> list[list[str]]:
    """A valid schedule, found by letting one stage after another perform any operation whose inputs are there."""
    last = stages * chunks - 1
    done: set[tuple[str, int, int]] = set()
    lists: list[list[str]] = [[] for _ in range(stages)]
    letters = "FBW" if split else "FB"
    left = {(x, m, v) for x in letters for m in range(micro_batches) for v in range(last + 1)}

    def possible(letter: str, m: int, v: int) -> bool:
        if letter == "F":
            return v == 0 or ("F", m, v - 1) in done
        if letter == "B":
            return ("F", m, v) in done and (v == last or ("B", m, v + 1) in done)
        return ("B", m, v) in done

    while left:
        op = chance.choice(sorted(op for op in left if possible(*op)))
        left.remove(op)
        done.add(op)
        letter, m, v = op
        lists[v % stages].append(f"{letter}{m}" + (f".{v // stages}" if v >= stages else ""))
    return lists


def texts(schedule: Schedule) -> list[list[str]]:
    return [[str(op) for op in ops] for ops in schedule.ops]


def make_costs(schedule: Schedule, classes: int = 1, **given: Any) -> StepCosts:
    """Costs of `schedule` in which all is 0 but what is given; a number stands for all of its array."""
    parts, stages = schedule.num_virtual_stages, schedule.num_stages
    buckets = np.shape(given["grad_sync"])[1] if np.ndim(given.get("grad_sync", 0)) else 1
    shapes = {
        **dict.fromkeys(("forward", "backward", "weight"), (parts, classes)),
        **dict.fromkeys(("send_forward", "send_backward"), (parts - 1, classes)),
        "grad_sync": (parts, buckets),
        "optimizer": (stages, classes),
        "finish": (stages,),
    }
    arrays = {name: np.broadcast_to(np.asarray(given.get(name, 0)), shape) for name, shape in shapes.items()}
    rest = {name: value for name, value in given.items() if name not in shapes}
    defaults = {"sends_block": False, "overlap_grad_sync": False, "weights": np.ones(classes, dtype=int)}
    return StepCosts(**arrays, **{**defaults, **rest})


def random_costs(seed: int, schedule: Schedule, *, block: bool, overlap: bool, tied: bool) -> StepCosts:
    """Integers, zeros among them."""
    rng = np.random.default_rng(seed)
    classes, buckets = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    parts, stages = schedule.num_virtual_stages, schedule.num_stages

    def times(*shape: int, most: int = 12) -> Any:
        return rng.integers(0, most, shape) * rng.integers(0, 5, shape).astype(bool)

    sends = [times(parts - 1, classes, most=6) * (stages > 1) for _ in range(2)]
    return StepCosts(
        forward=times(parts, classes),
        backward=times(parts, classes),
        weight=times(parts, classes) * schedule.splits_backward,
        send_forward=sends[0],
        send_backward=sends[1],
        sends_block=block,
        grad_sync=times(parts, buckets, most=20),
        overlap_grad_sync=overlap,
        optimizer=times(stages, classes),
        finish=times(stages),
        weights=rng.integers(1, 4, classes),
        tied_sync=int(rng.integers(0, 9)) * (tied and stages > 1),
    )


def per_replica(costs: StepCosts) -> StepCosts:
    """The same, with every replica a class of its own."""
    return take_classes(costs, np.repeat(np.arange(len(costs.weights)), costs.weights))


def take_classes(costs: StepCosts, classes: Any) -> StepCosts:
    """Costs whose classes are the given ones of `costs`, one replica each."""
    names = ("forward", "backward", "weight", "send_forward", "send_backward", "optimizer")
    picked = {name: getattr(costs, name)[:, classes] for name in names}
    return replace(costs, **picked, weights=np.ones(len(classes), dtype=int))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Every maker, and random valid schedules such as a user may write."""
    stages, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 3))
    maker = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "user", "user", "user"]))
    if maker == "user":
        chance = random.Random(draw(st.integers(0, 2**32)))
        return from_lists(random_lists(chance, stages, micro_batches, chunks, draw(st.booleans())))
    if maker == "interleaved":
        return interleaved(stages, stages * draw(st.integers(1, 3)), chunks)
    return {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1}[maker](stages, micro_batches)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, StepCosts]:
    schedule = draw(schedules())
    block, overlap, tied = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    seed = draw(st.integers(0, 2**32))
    return schedule, random_costs(seed, schedule, block=block, overlap=overlap, tied=tied)
