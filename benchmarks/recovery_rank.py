"""A rank of `recovery` and `node_loss`: trains under flashrec until it is ended; steps are bounded for safety."""

from __future__ import annotations

import argparse
import functools

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flashrec
from benchmarks import model as training


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", required=True, choices=list(training.SIZES))
    parser.add_argument("--standby", choices=["built", "forked"], required=True)
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    size = training.SIZES[options.size]
    flashrec.init(standby=options.standby)
    model = _shared(training.build(size), options.parallel)
    optimizer = training.optimizer_of(model)
    flashrec.protect(model=model, optimizer=optimizer)
    data = functools.partial(_loader, size)
    for step in flashrec.steps(data, total=options.steps):
        with step:
            training.loss_of(model, step.batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def _shared(model: training.Transformer, parallel: str) -> nn.Module:
    if parallel == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (flashrec.world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _loader(size: training.Size, rank: int, _world_size: int) -> training.Loader:
    # A short epoch: a replacement reads its way to where the lost rank was in it, and that is not what is measured.
    return training.loader(size, rank, num_batches=40)


if __name__ == "__main__":
    main()
