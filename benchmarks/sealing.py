"""Sealing a rank's tensors in its arena, and getting them back, by the size of its state.

    python -m benchmarks.sealing [--sizes 32 256 1000] [--rounds 5] [--json]

The state is a model's and its AdamW's, alone on the rank; sizes in MB (10^6 bytes). Bandwidths are the best of
the rounds, times the median. `memcpy` copies the same number of bytes from one array to another on one thread.

seal        begin() and finish() at once: the sealing thread and the caller share the work. "First" has its
            memory to find; "all" finds every byte changed; "none" finds all as they were, and hashes only.
thread      the sealing thread alone, while the caller sleeps; `finish` is what is left to do at the gate then
step        how much longer a step of small matrix products takes while its version is sealed beside it; small ones,
            so that it takes the interpreter's lock as often as a step can
pull        from the arena into the tensors that were sealed, verified in place: memory that is there already
replace     the same in a fresh process whose optimizer has no state yet, CPU time of all its threads: "cold" has to
            get the memory for it; "ahead" had it before, as a replacement that rehearses until there is a plan.
            Beside memcpy in that process
memory      of the arena, above that of the two versions it holds
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks import report
from benchmarks.jobs import ROOT, search_path
from flashrec.state.arena import Arena
from flashrec.state.capture import Captured, capture
from flashrec.state.manifest import Source
from flashrec.state.pull import Puller
from flashrec.state.sealing import Sealer

RANK, JOB = 0, "benchmark"
NUM_LAYERS = 16
BLOB = bytes(10_000)
DEADLINE_S = 300
REPLACED = [(how, what) for how in ("cold", "ahead") for what in ("restore_cpu_gbps", "memcpy_cpu_gbps")]


def state_of(size_mb: int, *, stepped: bool = True) -> tuple[list[torch.Tensor], Captured]:
    """All tensors of a model and its optimizer, `size_mb` in sum once it has `stepped`; and the two as they are
    sealed."""
    side = math.isqrt(size_mb * 1_000_000 // (3 * 4 * NUM_LAYERS))
    model = nn.ModuleList([nn.Linear(side, side) for _ in range(NUM_LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters())
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    tensors = [parameter.data for parameter in model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    return tensors, capture(model, optimizer)


def restore(directory: Path, captured: Captured) -> None:
    """Become the newest version that is sealed there."""
    arena = Arena(directory, RANK, JOB)
    state = arena.read(arena.sealed()[-1].version)
    captured.prepare(state.layout)
    for index, (one, manifest) in enumerate(zip(state.layout.sets, state.manifests, strict=True)):
        Puller().pull(
            captured.of_set(index),
            one.layout,
            [[Source(manifest)]],
            version=state.sealed.version,
            generation=1,
            deadline_s=DEADLINE_S,
        )


class Bench:
    """One rank that seals version after version."""

    def __init__(self, directory: Path, size_mb: int) -> None:
        self.directory = directory
        self.size_mb = size_mb
        self.tensors, self.captured = state_of(size_mb)
        self.layout = self.captured.rank_layout()
        self.size_bytes = self.layout.owned_bytes
        self.sealer = Sealer(directory, RANK, JOB)
        self.version = -1

    def change_all(self) -> None:
        for tensor in self.tensors:
            tensor.add_(1)

    def begin(self) -> None:
        self.version += 1
        readers = [self.captured.of_set(index) for index in range(len(self.layout.sets))]
        self.sealer.begin(self.version, 1, self.layout, readers, lambda: BLOB)

    def seal_at_once(self) -> float:
        """Seconds for a version, all told."""
        started = time.perf_counter()
        self.begin()
        self.sealer.finish()
        return time.perf_counter() - started

    def seal_in_background(self) -> tuple[float, float, float]:
        """Seconds of the caller in begin(), of the thread, of the caller in finish()."""
        started = time.perf_counter()
        self.begin()
        begun = time.perf_counter()
        while self.sealer.newest() != self.version:
            time.sleep(0.0002)
        sealed = time.perf_counter()
        self.sealer.finish()
        return begun - started, sealed - started, time.perf_counter() - sealed

    def pull(self) -> None:
        restore(self.directory, self.captured)


def measure(size_mb: int, rounds: int) -> report.Figures:
    with tempfile.TemporaryDirectory(prefix="flashrec-bench-", dir="/dev/shm") as name:
        directory = Path(name) / "arena"
        bench = Bench(directory, size_mb)
        try:
            return _measure(bench, directory, rounds)
        finally:
            bench.sealer.close()


def _measure(bench: Bench, directory: Path, rounds: int) -> report.Figures:
    source, target = np.ones(bench.size_bytes, np.uint8), np.zeros(bench.size_bytes, np.uint8)

    def gbps(act: Callable[[], object]) -> float:
        return bench.size_bytes / min(_timed(act) for _ in range(rounds)) / 1e9

    figures: report.Figures = {"size_mb": bench.size_bytes / 1e6}
    figures["memcpy_gbps"] = gbps(lambda: np.copyto(target, source))
    figures["seal_first_gbps"] = bench.size_bytes / bench.seal_at_once() / 1e9
    bench.change_all()
    bench.seal_at_once()  # the other slot's memory is touched for the first time
    changed, alone = [], []
    for _ in range(rounds):
        bench.change_all()
        changed.append(bench.seal_at_once())
        bench.change_all()
        alone.append(bench.seal_in_background())
    figures["seal_all_gbps"] = bench.size_bytes / min(changed) / 1e9
    figures["thread_gbps"] = bench.size_bytes / min(thread for _, thread, _ in alone) / 1e9
    figures["begin_us"] = report.spread([begin * 1e6 for begin, _, _ in alone])
    figures["finish_us"] = report.spread([finish * 1e6 for _, _, finish in alone])
    figures["step_percent"] = _step_percent(bench, rounds)
    bench.seal_at_once()
    bench.seal_at_once()  # both slots hold the present bytes
    figures["seal_none_gbps"] = bench.size_bytes / min(bench.seal_at_once() for _ in range(rounds)) / 1e9
    kept = [tensor.clone() for tensor in bench.tensors]
    bench.change_all()
    figures["pull_gbps"] = gbps(bench.pull)
    figures["replace"] = {
        how: _in_fresh_process(bench, directory, options)
        for how, options in (("cold", ()), ("ahead", ("--ahead",)))
    }
    assert all(torch.equal(one, other) for one, other in zip(kept, bench.tensors, strict=True))
    figures["arena_bytes"] = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    figures["held_bytes"] = 2 * (bench.size_bytes + len(BLOB))
    return figures


def _step_percent(bench: Bench, rounds: int) -> float:
    """How much longer a step takes when its version is sealed beside it, in percent of the step alone."""
    weights, data = torch.randn(64, 64), torch.randn(16, 64)

    def step() -> None:
        for _ in range(1000):
            torch.relu(data @ weights)

    ratios = []
    for _ in range(2 * rounds):
        alone = _timed(step)
        bench.change_all()
        bench.begin()
        beside = _timed(step)
        bench.sealer.stop()
        ratios.append(100 * (beside / alone - 1))
    return statistics.median(ratios)


def _in_fresh_process(bench: Bench, directory: Path, options: Sequence[str]) -> report.Figures:
    command = [sys.executable, "-m", "benchmarks.restore_rank", "--directory", str(directory)]
    command += ["--size-mb", str(bench.size_mb), *options]
    environment = {**os.environ, "PYTHONPATH": search_path()}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    figures: report.Figures = json.loads(done.stdout)
    return figures


def _timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 256, 1000], help="MB of state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = report.machine()
    sizes = [measure(size_mb, options.rounds) for size_mb in options.sizes]
    speeds = [
        (
            f"{one['size_mb']:.0f} MB",
            one["memcpy_gbps"],
            one["seal_first_gbps"],
            one["seal_all_gbps"],
            one["seal_none_gbps"],
            one["thread_gbps"],
            one["pull_gbps"],
        )
        for one in sizes
    ]
    costs = [
        (
            f"{one['size_mb']:.0f} MB",
            one["begin_us"]["median"],
            one["begin_us"]["max"],
            one["finish_us"]["median"],
            one["finish_us"]["max"],
            one["step_percent"],
            100 * (one["arena_bytes"] / one["held_bytes"] - 1),
        )
        for one in sizes
    ]
    replaced = [
        (f"{one['size_mb']:.0f} MB", *(f"{one['replace'][how][what]:.2f}" for how, what in REPLACED))
        for one in sizes
    ]
    tables = [
        report.table(
            "Sealing and pulling, GB/s", ("", "memcpy", "first", "all", "none", "thread", "pull"), speeds
        ),
        report.table(
            "What the caller pays",
            ("", "begin µs", "max", "finish µs", "max", "step +%", "memory +%"),
            costs,
        ),
        report.table(
            "What a replacement does, GB/s of CPU time",
            ("", *(f"{how}: {what.removesuffix('_cpu_gbps')}" for how, what in REPLACED)),
            replaced,
        ),
    ]
    report.show({"machine": about, "sizes": sizes}, tables, as_json=options.json)


if __name__ == "__main__":
    main()
