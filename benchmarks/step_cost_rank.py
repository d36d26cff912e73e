"""A rank of `step_cost` and `sealing_cost`: the same training in alternating blocks, with bare DDP or FSDP2 on
gloo and under flashrec.

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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flashrec
from benchmarks import model as training
from benchmarks.profile_step import Profile
from flashrec import session
from flashrec.engine import Engine
from flashrec.state.arena import Arena
from flashrec.state.sealing import SealReport

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
    # A device mesh asks c10d's books for the group's ranks.
    group._set_group_name("bare")
    ranks = {one: one for one in range(world_size)}
    books: Any = dist.distributed_c10d
    books._register_pg_in_world(group, "gloo", store, "bare", "cpu:gloo", ranks)
    return group


def shared(model: training.Transformer, parallel: str, group: dist.ProcessGroup | None) -> nn.Module:
    """The model on the ranks of `group`; None: all ranks."""
    if parallel == "ddp":
        return DistributedDataParallel(model, process_group=group)
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Bare:
    """The training without flashrec, a few steps at a time."""

    def __init__(
        self,
        size: training.Size,
        parallel: str,
        group: dist.ProcessGroup,
        rank: int,
        model: training.Transformer | None = None,
    ) -> None:
        self.model = shared(model or training.build(size), parallel, group)
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

    def __init__(self, size: training.Size, parallel: str, rank: int) -> None:
        self.model = shared(training.build(size), parallel, None)
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


class Sealing:
    """What the sealed regime does for the steps from here on."""

    def __init__(self, engine: Engine) -> None:
        assert engine._keeper is not None
        assert engine.state is not None
        self._engine = engine
        self._layout = engine.state.captured.rank_layout()
        self._sealer = engine._keeper._sealer
        self._finish = self._sealer.finish
        self._sealer.finish = self._reported  # type: ignore[method-assign]
        self._reports: list[SealReport] = []
        self._thread_s = self._thread_cpu()

    def figures(self) -> dict[str, float]:
        """Of one step, medians save for the CPU time; and of the arena."""
        steps = len(self._reports)
        newest = Arena(self._engine.shm_dir / "arena", self._engine.rank, self._engine.link.welcome.job)
        blob = len(newest.read(newest.sealed()[-1].version).blob)
        files = (self._engine.shm_dir / "arena").glob(f"r{self._engine.rank}.*")
        return {
            "waited_ms": 1000 * statistics.median(one.waited_s for one in self._reports),
            "copied_bytes": statistics.median(one.copied_bytes for one in self._reports),
            "unchanged_bytes": statistics.median(one.unchanged_bytes for one in self._reports),
            "thread_cpu_ms": 1000 * (self._thread_cpu() - self._thread_s) / steps,
            "owned_bytes": self._layout.owned_bytes,
            "held_bytes": 2 * (self._layout.owned_bytes + blob),
            "arena_bytes": sum(path.stat().st_blocks * 512 for path in files),
        }

    def _reported(self) -> SealReport:
        self._reports.append(self._finish())
        return self._reports[-1]

    def _thread_cpu(self) -> float:
        thread = self._sealer._thread.ident
        assert thread is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread))


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
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--block-steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module .* returned a view"
    )  # nobody writes into the logits
    size, num_steps = training.SIZES[options.size], options.block_steps

    flashrec.init()
    rank, world_size = flashrec.rank(), flashrec.world_size()
    group = bare_group(options.out / "meeting", rank, world_size)
    bare = Bare(size, options.parallel, group, rank)
    protected = Protected(size, options.parallel, rank)
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
    sealing = Sealing(engine) if engine.sealing else None
    protected.run(2 * num_steps, profile.lap)
    found["parts"] = profile.parts()
    if sealing is not None:
        found["sealing"] = sealing.figures()
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
