"""Small models under each kind of parallelism, for four ranks."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from flashrec import torch_private

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its own torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer

WORLD = (0, 1, 2, 3)


class Net(nn.Module):
    """5x3 over four ranks: two rows, two, one, none."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.first = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.second = nn.Linear(5, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.norm(self.first(self.embed(index))).relu()))


class Block(nn.Module):
    """For tensor parallelism: even dimensions, and a norm over the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(self.embed(index))).relu())


@dataclass
class Case:
    """`holders(name)`: the global ranks that must hold the tensor of that name. `data_rank`: which batches."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    holders: Callable[[str], tuple[int, ...]]
    data_rank: int = 0
    replicated_over: Any = None
    keep_grads: bool = False
    groups: Any = None

    def train(self, step: int) -> None:
        if self.keep_grads:
            self._zero()
        self.half_a_step(step)
        for optimizer in self.optimizers:
            optimizer.step()
        if not self.keep_grads:
            self._zero()

    def half_a_step(self, step: int) -> None:
        """Forward and backward, and no more."""
        generator = torch.Generator().manual_seed(100 * step + self.data_rank)
        for model in self.models:
            index = torch.randint(0, 6, (2, 4), generator=generator)
            model(index).float().square().sum().backward()

    def broken_off(self, step: int, *, inside: bool) -> None:
        """A forward without a backward; with `inside` not even that to its end."""
        part = self.models[0].get_submodule("norm")

        def stop(*_: Any) -> None:
            raise ConnectionError("a peer is gone")

        hook = part.register_forward_hook(stop) if inside else None
        with contextlib.suppress(ConnectionError):
            self.models[0](torch.full((2, 4), step % 6))
        if hook is not None:
            hook.remove()

    def rehearse(self) -> None:
        """Let DDP choose the buckets it has after its first step; the order of its sums depends on them."""
        for model in self.models:
            for ddp in torch_private.ddp_modules(model):
                self.half_a_step(0)
                self._zero()
                torch_private.rebuild_buckets(ddp)

    def _zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.05)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Gathers what it applies, after the gate."""
    matrices = [one for one in model.parameters() if one.dim() == 2]
    rest = [one for one in model.parameters() if one.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(rest, lr=0.05)]


def _alone(rank: int) -> Callable[[str], tuple[int, ...]]:
    return lambda name: (rank,)


def _everyone(name: str) -> tuple[int, ...]:
    return WORLD


def _ddp(rank: int, *, dtype: torch.dtype = torch.float32, frozen: bool = False, tied: bool = False) -> Case:
    model = Net(tied).to(dtype)
    if frozen:
        model.first.weight.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    return Case([wrapped], [adamw(model)], _everyone, data_rank=rank)


def _fsdp(
    rank: int,
    *,
    dtype: torch.dtype = torch.float32,
    frozen: bool = False,
    tied: bool = False,
    keep_grads: bool = False,
    make: Callable[[nn.Module], Any] = adamw,
    shape: tuple[int, ...] = (4,),
    evaluate: bool = False,
    **options: Any,
) -> Case:
    model = Net(tied).to(dtype)
    if frozen:
        model.first.weight.requires_grad_(False)
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in () if tied else (model.first, model.second):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = make(model)
    if evaluate:  # leaves the unsharded parameters on show
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.int64))
        assert not hasattr(model.embed.weight, "to_local")
    holders = _alone(rank) if len(shape) == 1 else (lambda name: (rank % 2, rank % 2 + 2))
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    return Case([model], optimizers, holders, data_rank=rank, keep_grads=keep_grads)


def _tp(rank: int, *, sequence: bool = False, hint: bool = False, keep_grads: bool = False) -> Case:
    model = Block()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    if sequence:
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "down": RowwiseParallel(),
        }
        model = parallelize_module(model, mesh, plan)
        model = parallelize_module(model, mesh, {"up": ColwiseParallel()})
    else:
        model = parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def holders(name: str) -> tuple[int, ...]:
        number = re.match(r"optimizer\.state\.(\d+)", name)
        if number is not None:
            name = f"model.{[key for key, _ in model.named_parameters()][int(number[1])]}"
        if name.startswith(("model.up.", "model.down.weight")):
            return (rank,)
        if name.startswith("model.down.bias"):
            return WORLD
        if sequence:
            # Autograd spreads gradients as the backward left them: the embedding's is summed already, the norm's
            # is still a sum over ranks.
            if name.endswith(".grad"):
                return WORLD if name.startswith("model.embed") else (rank,)
            return WORLD if name.startswith("model.norm") else (rank,)
        return WORLD if hint else (rank,)

    world = dist.group.WORLD
    return Case(
        [model], [adamw(model)], holders, replicated_over=world if hint else None, keep_grads=keep_grads
    )


def _tp_fsdp(rank: int) -> Case:
    model = Block()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model.up, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    pair = (rank // 2 * 2, rank // 2 * 2 + 1)

    def holders(name: str) -> tuple[int, ...]:
        number = re.match(r"optimizer\.state\.(\d+)", name)
        if number is not None:
            name = f"model.{[key for key, _ in model.named_parameters()][int(number[1])]}"
        # Sharded over dp, the same on both ranks of a tp group; what TP leaves alone, structure knows nothing of.
        return pair if name.startswith("model.down.bias") else (rank,)

    return Case([model], [adamw(model)], holders, data_rank=rank // 2)


def _zero(rank: int, cls: type[torch.optim.Optimizer], **options: Any) -> Case:
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=cls, lr=0.05, **options)
    return Case(
        [model],
        [optimizer],
        lambda name: (rank,) if name.startswith("optimizer.") else WORLD,
        data_rank=rank,
    )


def _stages(rank: int, *, replicated: bool) -> Case:
    """Different modules on different ranks; with `replicated` each stage on two of them, under DDP."""
    stage = rank // 2 if replicated else rank
    torch.manual_seed(torch.initial_seed() + stage)
    model: nn.Module = nn.Sequential(nn.Embedding(6, 4), *[nn.Linear(4, 4) for _ in range(stage)])
    if not replicated:
        return Case([model], [sgd(model)], _alone(rank), data_rank=rank)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    wrapped = DistributedDataParallel(model, process_group=groups[stage])
    ranks = (2 * stage, 2 * stage + 1)
    return Case([wrapped], [sgd(model)], lambda name: ranks, data_rank=rank, groups=groups)


def _hinted(rank: int) -> Case:
    """Replicas without any structure that says so; their optimizer's state is said to be the rank's own."""
    model = Block()
    optimizer = adamw(model)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return Case(
        [model],
        [optimizer],
        lambda name: (rank,) if name.startswith("optimizer.") else (rank % 2, rank % 2 + 2),
        replicated_over={model: pairs[rank % 2], optimizer: None},
        data_rank=rank % 2,
        groups=pairs,
    )


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

CASES: dict[str, Callable[[int], Case]] = {
    "ddp": _ddp,
    "ddp-bf16": lambda rank: _ddp(rank, dtype=torch.bfloat16),
    "ddp-frozen": lambda rank: _ddp(rank, frozen=True),
    "ddp-tied": lambda rank: _ddp(rank, tied=True),
    "fsdp": _fsdp,
    "fsdp-sgd": lambda rank: _fsdp(rank, make=sgd),
    "fsdp-no-reshard": lambda rank: _fsdp(rank, reshard_after_forward=False),
    "fsdp-half-reshard": lambda rank: _fsdp(rank, reshard_after_forward=2),
    "fsdp-muon": lambda rank: _fsdp(rank, make=muon),
    "fsdp-evaluated": lambda rank: _fsdp(rank, evaluate=True),
    "fsdp-mixed": lambda rank: _fsdp(rank, mp_policy=HALF),
    "fsdp-bf16": lambda rank: _fsdp(rank, dtype=torch.bfloat16),
    "fsdp-frozen": lambda rank: _fsdp(rank, frozen=True),
    "fsdp-tied": lambda rank: _fsdp(rank, tied=True),
    "fsdp-grads": lambda rank: _fsdp(rank, keep_grads=True),
    "hsdp": lambda rank: _fsdp(rank, shape=(2, 2)),
    "hsdp-grads": lambda rank: _fsdp(rank, shape=(2, 2), keep_grads=True),
    "tp": _tp,
    "tp-hint": lambda rank: _tp(rank, hint=True),
    "tp-sequence": lambda rank: _tp(rank, sequence=True),
    "tp-sequence-grads": lambda rank: _tp(rank, sequence=True, keep_grads=True),
    "tp-fsdp": _tp_fsdp,
    "zero-adamw": lambda rank: _zero(rank, torch.optim.AdamW),
    "zero-sgd": lambda rank: _zero(rank, torch.optim.SGD, momentum=0.9),
    "zero-buckets": lambda rank: _zero(rank, torch.optim.AdamW, parameters_as_bucket_view=True),
    "stages": lambda rank: _stages(rank, replicated=False),
    "stages-ddp": lambda rank: _stages(rank, replicated=True),
    "hinted": _hinted,
}


def build(name: str, rank: int, seed: int) -> Case:
    torch.manual_seed(seed)
    return CASES[name](rank)
