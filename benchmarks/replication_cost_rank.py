"""A rank of `replication_cost`: the same training in blocks by turns, with bare torch, under flashrec without keepers,
and with the job's own.

The job has keepers. A block without them is one for which this rank is told that there are none; where it has them
again, the first steps, in which the keeper catches up, are not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import torch.distributed as dist
from torch import nn

import flashrec
from benchmarks import model as training
from benchmarks.cluster_jobs import shard_servers
from benchmarks.jobs import cpu_seconds
from benchmarks.step_cost_rank import Bare, bare_group, shared
from flashrec import session
from flashrec.engine import Engine
from flashrec.keeping import Keeper
from flashrec.state.remote import ShardConnection

UNCOUNTED_STEPS = 2
FROZEN_PART = 9
"""So many times what is trained is frozen."""


def build(size: training.Size, *, is_frozen: bool) -> training.Transformer:
    """`is_frozen`: with an embedding that is most of the state, and not trained."""
    model = training.build(size)
    if is_frozen:
        trained = 3 * sum(one.numel() for one in model.parameters())  # with AdamW's state
        model.tokens = nn.Embedding(FROZEN_PART * trained // size.width, size.width)
        model.tokens.weight.requires_grad_(False)
    return model


class Protected:
    """The training under flashrec. `uses(keepers)` says who keeps replicas from here on."""

    def __init__(self, size: training.Size, options: argparse.Namespace, rank: int) -> None:
        self.model = shared(build(size, is_frozen=options.frozen), options.parallel, None)
        self.optimizer = training.optimizer_of(self.model)
        flashrec.protect(model=self.model, optimizer=self.optimizer, seal_every=options.seal_every)
        self._steps = iter(flashrec.steps(training.loader(size, rank), total=1 << 40))
        engine = session.current_engine()
        assert engine is not None
        assert engine._keeper is not None
        self.engine: Engine = engine
        self.keeper: Keeper = engine._keeper
        self.waited_s = 0.0
        self._await_kept = self.keeper.await_kept
        self.keeper.await_kept = self._timed  # type: ignore[method-assign]
        assert self.keeper._replicator is not None
        self.replicator = self.keeper._replicator
        self._keepers = ()

    def run(self, num_steps: int, between: Callable[[], None]) -> None:
        for _ in range(num_steps):
            between()
            with next(self._steps) as step:
                training.loss_of(self.model, step.batch).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        between()

    def uses(self, *, keepers: bool) -> None:
        if not self._keepers:
            self._keepers = tuple(self.replicator._keepers)
        self.replicator.set_keepers(self._keepers if keepers else (), self.replicator._generation)

    def _timed(self, *args: Any, **kwargs: Any) -> None:
        started = time.perf_counter()
        try:
            self._await_kept(*args, **kwargs)
        finally:
            self.waited_s += time.perf_counter() - started


class Nodes:
    """The shard processes of all nodes, which are on this machine."""

    def __init__(self, engine: Engine) -> None:
        self._pids = shard_servers(engine.link.welcome.job)
        sockets = [
            words[words.index(b"--bind") + 1].decode()
            for pid in self._pids
            if (words := Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
        ]
        self._sockets: Sequence[str] = sockets

    def cpu_ms(self) -> float:
        return 1000 * sum(map(cpu_seconds, self._pids))

    def received_bytes(self) -> int:
        total = 0
        for address in self._sockets:
            with ShardConnection(address, b"", lambda: False) as server:
                total += msgpack.unpackb(server.stats(10))["received_bytes"]
        return total


def block(side: Bare | Protected, num_steps: int, nodes: Nodes, meet: Callable[[], None]) -> dict[str, float]:
    """Of a step: medians of wall time, means of the rest. `received_bytes` and `shards_ms`: of all nodes."""
    laps: list[int] = []

    def between() -> None:
        laps.append(time.perf_counter_ns())

    received, shards = nodes.received_bytes(), nodes.cpu_ms()
    waited = side.waited_s if isinstance(side, Protected) else 0.0
    meet()  # nobody counts what others do before the block
    cpu = time.process_time_ns()
    side.run(num_steps, between)
    cpu = time.process_time_ns() - cpu
    meet()
    steps = [after - before for before, after in itertools.pairwise(laps)]
    return {
        "step_ms": statistics.median(steps) / 1e6,
        "cpu_ms": cpu / num_steps / 1e6,
        "waited_ms": 1000 * (side.waited_s - waited) / num_steps if isinstance(side, Protected) else 0.0,
        "shards_ms": (nodes.cpu_ms() - shards) / num_steps,
        "received_bytes": (nodes.received_bytes() - received) / num_steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", required=True, choices=list(training.SIZES))
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], required=True)
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--seal-every", type=int)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--block-steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("error")
    # Nobody writes into the logits.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    size, num_steps = training.SIZES[options.size], options.block_steps

    flashrec.init()
    rank, world_size = flashrec.rank(), flashrec.world_size()
    group = bare_group(options.out / "meeting", rank, world_size)
    bare = Bare(size, options.parallel, group, rank, build(size, is_frozen=options.frozen))
    protected = Protected(size, options, rank)

    def meet() -> None:
        with flashrec.section():
            group.barrier(dist.BarrierOptions()).wait()

    found: dict[str, Any] = {"bare": [], "alone": [], "replicas": []}
    protected.run(UNCOUNTED_STEPS, lambda: None)
    nodes = Nodes(protected.engine)
    for number in range(-1, options.rounds):
        # A B C C B A ...: a drift of the machine falls on all alike.
        sides = list(found)
        for name in sides if number % 2 else reversed(sides):
            if name == "bare":
                with flashrec.section():  # what happens in here is none of flashrec's business
                    measured = block(
                        bare, num_steps, nodes, lambda: group.barrier(dist.BarrierOptions()).wait()
                    )
            else:
                protected.uses(keepers=name == "replicas")
                protected.run(UNCOUNTED_STEPS, lambda: None)
                measured = block(protected, num_steps, nodes, meet)
            if number >= 0:  # the first round warms up
                found[name].append(measured)
    assert protected.engine.state is not None
    found["owned_bytes"] = protected.engine.state.captured.rank_layout().owned_bytes
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
