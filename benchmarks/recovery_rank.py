"""A rank of `recovery`: trains under flashrec until it is ended, with a bound on its steps only for safety."""

from __future__ import annotations

import argparse
import functools

from torch.nn.parallel import DistributedDataParallel

import flashrec
from benchmarks import model as training


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", required=True, choices=list(training.SIZES))
    parser.add_argument("--standby", choices=["built", "forked"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    size = training.SIZES[options.size]
    flashrec.init(standby=options.standby)
    model = DistributedDataParallel(training.build(size))
    optimizer = training.optimizer_of(model)
    flashrec.protect(model=model, optimizer=optimizer)
    data = functools.partial(_loader, size)
    for step in flashrec.steps(data, total=options.steps):
        with step:
            training.loss_of(model, step.batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def _loader(size: training.Size, rank: int, _world_size: int) -> training.Loader:
    # A short epoch: a replacement reads its way to where the lost rank was in it, and that is not what is measured.
    return training.loader(size, rank, num_batches=40)


if __name__ == "__main__":
    main()
