"""What both programs of the demo train: same options, same model, same data, same schedule.

`train.py` runs it under flashrec, `reference.py` in plain torch; they differ in their loops alone. How the
model is spread over the ranks is in `parallelism.py`.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import gpt
import text

Batch = tuple[torch.Tensor, torch.Tensor]
Loader = DataLoader[Batch]

STANDBY_DEPTHS = ("built", "forked")
SURVIVE = ("ranks", "all-ranks")
PARALLEL = ("ddp", "zero", "fsdp", "hsdp", "tp", "pp", "tp+fsdp", "pp+fsdp")
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
SCHEDULES = ("1f1b", "interleaved", "gpipe")


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
    survive: str = "ranks"
    """What flashrec.protect() is asked to survive (`train.py` only)."""
    parallel: str = "ddp"
    schedule: str = "1f1b"
    """Of a pipeline."""
    mixed_precision: bool = False
    frozen: bool = False
    uneven: bool = False
    tied: bool = True
    moe: bool = False

    @property
    def pipelined(self) -> bool:
        return self.parallel in ("pp", "pp+fsdp")

    @property
    def tensor_parallel(self) -> bool:
        return self.parallel in ("tp", "tp+fsdp")

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of every parameter it works with."""
        return self.parallel.endswith(("fsdp", "hsdp"))


def ranks_per_batch(parallel: str, world_size: int) -> int:
    """How many neighbouring ranks work on one batch; the others of their kind have batches of their own."""
    return {"tp": world_size, "pp": world_size, "tp+fsdp": 2, "pp+fsdp": 2}.get(parallel, 1)


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
    parser.add_argument("--parallel", choices=PARALLEL, default="ddp", help="how ranks share the work")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of a pipeline")
    parser.add_argument("--mixed-precision", action="store_true", help="compute in bfloat16")
    parser.add_argument("--frozen", action="store_true", help="do not train embeddings and first attention")
    parser.add_argument("--uneven", action="store_true", help="sizes that do not divide among ranks")
    parser.add_argument(
        "--tied",
        action=argparse.BooleanOptionalAction,
        help="embedding and head are one tensor (default: where no pipeline is between them)",
    )
    parser.add_argument("--moe", action="store_true", help="experts in every second block")
    if with_standby:
        parser.add_argument("--standby", choices=STANDBY_DEPTHS, help="default: built if ranks are alike")
        parser.add_argument("--survive", choices=SURVIVE, default="ranks", help="losses to be prepared for")
    else:
        parser.set_defaults(standby="forked")
    given = vars(parser.parse_args())
    if given["tied"] is None:
        given["tied"] = not given["parallel"].startswith("pp")
    if given["standby"] is None:
        given["standby"] = "built" if given["parallel"] == "ddp" else "forked"
    options = Options(**given)
    if options.width % 32:
        parser.error(f"--width {options.width} is not a multiple of 32")
    if options.standby == "built" and options.parallel != "ddp":
        # A mesh, a stage, a shard: what is built follows from the rank, which a built standby does not know.
        parser.error(f"--standby built is not possible with --parallel {options.parallel}")
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
        vocab_size=text.VOCAB_SIZE + options.uneven,
        context=options.context,
        width=options.width,
        num_layers=options.layers,
        num_heads=4 if options.tensor_parallel else options.width // 32,
        hidden=4 * options.width + 1 if options.uneven else 0,
        tied=options.tied,
        heads_first=options.tensor_parallel,
        num_experts=8 if options.moe else 0,
        # Ranks reduce a parameter's gradient together, so under FSDP each of them must have one.
        use_all_experts=options.sharded,
        temperature=options.uneven,  # one number: all but one of the ranks have an empty part of it
        bfloat16=options.mixed_precision and not options.sharded,
    )
    model = gpt.GPT(config)
    if options.frozen:
        for name, parameter in model.named_parameters():
            if name.startswith(("characters", "positions", "blocks.0.query_key_value", "blocks.0.attention")):
                parameter.requires_grad_(False)
    return model


def build_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW with the usual settings for a small GPT."""
    return torch.optim.AdamW(parameters, **ADAMW)


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
    Ranks that work on one batch have the same loader and the same seed: each reads the batch for itself.
    """

    def loader_of(rank: int, world_size: int) -> Loader:
        sharing = ranks_per_batch(options.parallel, world_size)
        replica = rank // sharing
        torch.manual_seed(options.seed + replica)
        windows = text.Windows(
            corpus,
            num_windows=options.epoch_steps * options.batch * world_size,
            context=options.context,
            # Stages draw different numbers of random numbers, and must read the same text all the same.
            seed=options.seed if sharing > 1 else None,
        )
        sampler: DistributedSampler[Batch] = DistributedSampler(
            windows,
            num_replicas=world_size // sharing,
            rank=replica,
            shuffle=True,
            seed=options.seed,
            drop_last=True,
        )
        return DataLoader(
            windows,
            batch_size=options.batch * sharing,
            sampler=sampler,
            num_workers=options.workers,
            persistent_workers=False,
            drop_last=True,
        )

    return loader_of
