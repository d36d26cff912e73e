"""What both programs of the demo train: same options, same model, same data, same optimizer.

`train.py` runs it under flashrec, `reference.py` in plain torch; they differ in their loops alone.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import gpt
import text

Batch = tuple[torch.Tensor, torch.Tensor]
Loader = DataLoader[Batch]

STANDBY_DEPTHS = ("built", "forked")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command-line options of both programs."""

    steps: int
    seed: int
    out: Path
    """Directory for each rank's log and outcome."""
    batch: int
    """Windows per rank and step."""
    context: int
    width: int
    layers: int
    epoch_steps: int
    """Steps until the loader starts again."""
    workers: int
    """Loader worker processes per rank."""
    quiet: bool
    standby: str
    """How far a standby goes on its own (`train.py` only)."""


def parse_options(description: str | None, *, with_standby: bool = False) -> Options:
    """Read the command line; a value that cannot work ends the program with argparse's usage message."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=_positive, default=100, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="directory for logs and outcomes")
    parser.add_argument("--batch", type=_positive, default=2, help="windows per rank and step")
    parser.add_argument("--context", type=_positive, default=64, help="characters per window")
    parser.add_argument("--width", type=_positive, default=192, help="a multiple of 32")
    parser.add_argument("--layers", type=_positive, default=6)
    parser.add_argument("--epoch-steps", type=_positive, default=40, help="steps per epoch")
    parser.add_argument("--workers", type=int, default=1, help="loader worker processes per rank")
    parser.add_argument("--quiet", action="store_true", help="print no losses")
    if with_standby:
        parser.add_argument("--standby", choices=STANDBY_DEPTHS, default="built")
    else:
        parser.set_defaults(standby="forked")
    options = Options(**vars(parser.parse_args()))
    if options.width % 32:
        parser.error(f"--width {options.width} is not a multiple of 32")
    return options


def _positive(argument: str) -> int:
    value = int(argument)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def build_model(options: Options) -> gpt.GPT:
    """The model, with the same weights in every process.

    One thread per rank: the demo runs more ranks than most laptops have cores.
    """
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    config = gpt.GPTConfig(
        vocab_size=text.VOCAB_SIZE,
        context=options.context,
        width=options.width,
        num_layers=options.layers,
        num_heads=options.width // 32,
    )
    return gpt.GPT(config)


def build_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW with the usual settings for a small GPT."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def build_scheduler(optimizer: torch.optim.Optimizer, options: Options) -> LambdaLR:
    """Ten steps of warm-up, then a cosine down to a tenth of the learning rate."""
    warmup_steps = 10

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, options.steps - warmup_steps)
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, factor)


def loader_factory(options: Options, corpus: torch.Tensor) -> Callable[[int, int], Loader]:
    """A function (rank, world size) -> the rank's loader, which seeds the process for that rank.

    Nothing before its call depends on the rank, so a standby can have built everything else already.
    """

    def loader_of(rank: int, world_size: int) -> Loader:
        torch.manual_seed(options.seed + rank)
        windows = text.Windows(
            corpus,
            num_windows=options.epoch_steps * options.batch * world_size,
            context=options.context,
        )
        sampler: DistributedSampler[Batch] = DistributedSampler(
            windows, num_replicas=world_size, rank=rank, shuffle=True, seed=options.seed, drop_last=True
        )
        return DataLoader(
            windows,
            batch_size=options.batch,
            sampler=sampler,
            num_workers=options.workers,
            persistent_workers=False,
            drop_last=True,
        )

    return loader_of
