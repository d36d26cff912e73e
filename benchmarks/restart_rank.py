"""A rank of the comparison: plain torch under torchrun, saving to disk and starting again from there.

For every step that it has done it writes one line "<step> <monotonic ns>" to rank<r>.log.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import model as training


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", required=True, choices=list(training.SIZES))
    parser.add_argument("--every", type=int, required=True, help="steps between two checkpoints")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    size, checkpoint = training.SIZES[options.size], options.out / "checkpoint.pt"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (options.out / f"rank{rank}.pid").write_text(str(os.getpid()))
    model = DistributedDataParallel(training.build(size))
    optimizer = training.optimizer_of(model)
    batches = iter(training.loader(size, rank, num_batches=options.steps))
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    with open(options.out / f"rank{rank}.log", "a", buffering=1) as log:
        for step in range(first, options.steps):
            training.loss_of(model, next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write(f"{step} {time.monotonic_ns()}\n")
            if rank == 0 and (step + 1) % options.every == 0:
                state = {
                    "step": step + 1,
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                aside = checkpoint.with_suffix(".new")
                torch.save(state, aside)
                aside.rename(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
