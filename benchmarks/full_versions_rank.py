"""A rank of `full_versions`: plain DDP under flashrec, every step timed, and what was sealed in it."""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

import flashrec
from benchmarks import model as training
from flashrec import session


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", required=True, choices=list(training.SIZES))
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("error")
    size = training.SIZES[options.size]

    flashrec.init()
    rank = flashrec.rank()
    model = DistributedDataParallel(training.build(size))
    optimizer = training.optimizer_of(model)
    flashrec.protect(model=model, optimizer=optimizer)
    engine = session.current_engine()
    assert engine is not None
    assert engine.state is not None
    paces_s: list[float] = []
    held_against_it = engine._pace.sealed

    def sealed(cost_s: float) -> None:
        paces_s.append(cost_s)
        held_against_it(cost_s)

    engine._pace.sealed = sealed  # type: ignore[method-assign]
    laps, cpu = [time.perf_counter_ns()], [time.process_time_ns()]
    full: list[int] = []
    for step in flashrec.steps(training.loader(size, rank), total=options.steps):
        sealed_before = len(paces_s)
        with step:
            training.loss_of(model, step.batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if len(paces_s) > sealed_before:
            full.append(step.index)
        laps.append(time.perf_counter_ns())
        cpu.append(time.process_time_ns())
    found = {
        "step_ms": [(after - before) / 1e6 for before, after in itertools.pairwise(laps)],
        "cpu_ms": [(after - before) / 1e6 for before, after in itertools.pairwise(cpu)],
        "full": full,
        "pace_ms": [1000 * one for one in paces_s],
        "owned_bytes": engine.state.captured.rank_layout().owned_bytes,
    }
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
