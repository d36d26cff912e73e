"""A rank of `step_cost`: the same training in alternating blocks, with bare DDP on gloo and under flashrec.

Both have a model, an optimizer and a loader of their own, in this one process. What differs is everything
flashrec does: its groups, its gate, its seal, its notes for a redo, its loop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flashrec
from benchmarks import model as training
from benchmarks.profile_step import Profile
from flashrec import session

TIMEOUT = timedelta(seconds=60)


def bare_group(meeting: Path, rank: int, world_size: int) -> dist.ProcessGroup:
    """What init_process_group("gloo") makes, beside the session's own groups."""
    store = dist.FileStore(str(meeting), world_size)
    options: Any = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._threads = 2
    options._timeout = TIMEOUT
    gloo: Any = dist.ProcessGroupGloo(store, rank, world_size, options)
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


class Bare:
    """The training without flashrec, a few steps at a time."""

    def __init__(self, size: training.Size, group: dist.ProcessGroup, rank: int) -> None:
        self.model = DistributedDataParallel(training.build(size), process_group=group)
        self.optimizer = training.optimizer_of(self.model)
        self.loader = training.loader(size, rank)
        self._batches: Iterator[Any] = iter(())

    def run(self, num_steps: int, between: Callable[[], None]) -> None:
        """`between` is called before each step, and after the last."""
        for _ in range(num_steps):
            between()
            batch = next(self._batches, None)
            if batch is None:
                self._batches = iter(self.loader)
                batch = next(self._batches)
            training.loss_of(self.model, batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        between()


class Protected:
    """The same under flashrec."""

    def __init__(self, size: training.Size, rank: int) -> None:
        self.model = DistributedDataParallel(training.build(size))
        self.optimizer = training.optimizer_of(self.model)
        flashrec.protect(model=self.model, optimizer=self.optimizer)
        self._steps = iter(flashrec.steps(training.loader(size, rank), total=1 << 40))

    def run(self, num_steps: int, between: Callable[[], None]) -> None:
        for _ in range(num_steps):
            between()
            with next(self._steps) as step:
                training.loss_of(self.model, step.batch).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        between()


def block(side: Bare | Protected, num_steps: int) -> dict[str, float]:
    """Medians of one block: wall time of a step, and CPU time of it on all the process's threads."""
    laps: list[int] = []
    cpu = time.process_time_ns()
    if isinstance(side, Bare):
        with flashrec.section():  # what happens in here is none of flashrec's business
            cpu = time.process_time_ns()
            side.run(num_steps, lambda: laps.append(time.perf_counter_ns()))
            cpu = time.process_time_ns() - cpu
    else:
        side.run(num_steps, lambda: laps.append(time.perf_counter_ns()))
        cpu = time.process_time_ns() - cpu
    steps = [after - before for before, after in itertools.pairwise(laps)]
    return {"step_ms": statistics.median(steps) / 1e6, "cpu_ms": cpu / num_steps / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", required=True, choices=list(training.SIZES))
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--block-steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("error")
    size, num_steps = training.SIZES[options.size], options.block_steps

    flashrec.init()
    rank, world_size = flashrec.rank(), flashrec.world_size()
    bare = Bare(size, bare_group(options.out / "meeting", rank, world_size), rank)
    protected = Protected(size, rank)
    found: dict[str, Any] = {"bare": [], "flashrec": []}
    for number in range(-1, options.pairs):
        # A B B A A B B A ...: a drift of the machine falls on both alike.
        sides: dict[str, Bare | Protected] = {"bare": bare, "flashrec": protected}
        for name in list(sides) if number % 2 else reversed(sides):
            measured = block(sides[name], num_steps)
            if number >= 0:  # the first pair warms up
                found[name].append(measured)
    engine = session.current_engine()
    assert engine is not None
    profile = Profile(engine)
    protected.run(2 * num_steps, profile.lap)
    found["parts"] = profile.parts()
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
