"""How the demo's model is spread over its ranks, in plain torch: one function for each parallelism.

    ddp        every rank has all of the model, and its own batch
    zero       as ddp, but each rank has the optimizer's state for a part of the parameters
    fsdp       each rank has a part of every parameter, and its own batch
    hsdp       as fsdp in each half of the ranks, with the same parts in both
    tp         each rank has some heads and some of each feed-forward layer; all work on one batch
    pp         each rank has some of the blocks; all work on one batch, micro-batch after micro-batch
    tp+fsdp    pairs of neighbours are tensor-parallel, and fsdp goes across the pairs
    pp+fsdp    pairs of neighbours are pipelines, and fsdp goes across the pairs

Nothing of flashrec is imported here: under flashrec the very same objects are built, on its groups.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import gpt
import recipe
from gpt import loss_of

TENSOR_PARALLEL = 2
STAGES = 2
HALVES = 2


class Training:
    """A model on its ranks, with its optimizer.

    model       what computes, as the ranks share it
    plain       what holds this rank's parameters (`model`, or the module that it wraps)
    optimizer   of this rank's parameters
    replicated_over   the ranks that have equal values of the plain tensors (DTensors tell by themselves), if they do
    """

    replicated_over: ProcessGroup | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        plain: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model = model
        self.plain = plain or model
        self.optimizer = optimizer or recipe.build_optimizer(model.parameters())

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """Leave gradients behind; returns the batch's loss, or None where another rank has it."""
        loss = loss_of(self.model(inputs), targets)
        loss.backward()
        return loss.detach()

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradients down to `max_norm`, that of all ranks' parts together."""
        clip_grad_norm_(self.model.parameters(), max_norm)


class TensorParallelTraining(Training):
    """A model of which some parts are split, and others the same on every rank of `group`."""

    def __init__(self, model: nn.Module, group: ProcessGroup) -> None:
        super().__init__(model)
        self.replicated_over = group

    def clip_gradients(self, max_norm: float) -> None:
        clip_by_hand(self.model.parameters(), max_norm)


class PipelinedTraining(Training):
    """One or several stages of a pipeline. Only a rank that has the last stage has the loss."""

    def __init__(
        self,
        stages: nn.ModuleList,
        schedule: Any,
        *,
        num_ranks: int,
        has_last: bool,
        shared: torch.Tensor | None = None,
        ends: ProcessGroup | None = None,
    ) -> None:
        """`num_ranks`: of one pipeline. `shared`: this rank's copy of the embedding that is also the head, which
        both ranks of `ends` have."""
        super().__init__(stages)
        self._schedule = schedule
        self._num_ranks = num_ranks
        self._has_last = has_last
        self._shared, self._ends = shared, ends

    def forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        self._schedule.step(inputs, target=targets, losses=losses)
        if self._shared is not None and self._shared.grad is not None:
            grad = self._shared.grad
            dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=self._ends)
        return torch.stack(losses).mean().detach() if self._has_last else None

    def clip_gradients(self, max_norm: float) -> None:
        clip_by_hand(self.model.parameters(), max_norm, self._num_ranks)


def build(options: recipe.Options) -> Training:
    """The training that `options.parallel` names, on the ranks there are. ValueError if it cannot be on so many."""
    model = recipe.build_model(options)
    builders: dict[str, Callable[[recipe.Options, gpt.GPT], Training]] = {
        "ddp": data_parallel,
        "zero": zero,
        "fsdp": fully_sharded,
        "hsdp": fully_sharded,
        "tp": tensor_parallel,
        "tp+fsdp": tensor_parallel,
        "pp": pipelined,
        "pp+fsdp": pipelined,
    }
    return builders[options.parallel](options, model)


def data_parallel(options: recipe.Options, model: gpt.GPT) -> Training:
    return Training(DistributedDataParallel(model, find_unused_parameters=options.moe), plain=model)


def zero(options: recipe.Options, model: gpt.GPT) -> Training:
    # Here, because this import takes as long as all others below torch together, and nobody else needs it.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, **recipe.ADAMW)
    replicated = DistributedDataParallel(model, find_unused_parameters=options.moe)
    return Training(replicated, plain=model, optimizer=optimizer)


def fully_sharded(options: recipe.Options, model: gpt.GPT) -> Training:
    world_size = dist.get_world_size()
    if options.parallel == "hsdp":
        mesh = init_device_mesh("cpu", _two_dims(HALVES, world_size), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    _shard(options, model, mesh)
    return Training(model)


def tensor_parallel(options: recipe.Options, model: gpt.GPT) -> Training:
    world_size = dist.get_world_size()
    sharded = options.parallel == "tp+fsdp"
    sizes = _two_dims(TENSOR_PARALLEL, world_size)[::-1] if sharded else (1, world_size)
    if model.config.num_heads % sizes[1]:
        raise ValueError(f"{model.config.num_heads} heads do not divide among {sizes[1]} ranks")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "tensor"))
    plan = {
        "query_key_value": ColwiseParallel(),
        "attention_out": RowwiseParallel(),
        # What goes from one to the other stays a DTensor, which knows of parts of different sizes.
        "feed_forward.1": ColwiseParallel(use_local_output=False),
        "feed_forward.3": RowwiseParallel(),
    }
    for block in model.blocks.values():
        # Experts are not split: each rank of a group has all of them, and chooses the same.
        whole = any(isinstance(module, gpt.Experts) for module in block.modules())
        names = [name for name in plan if not (whole and name.startswith("feed_forward"))]
        parallelize_module(block, mesh["tensor"], {name: plan[name] for name in names})
    if sharded:
        _shard(options, model, mesh["replica"])
    return TensorParallelTraining(model, mesh.get_group("tensor"))


def pipelined(options: recipe.Options, model: gpt.GPT) -> Training:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sharded = options.parallel == "pp+fsdp"
    sizes = _two_dims(STAGES, world_size)[::-1] if sharded else (1, world_size)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "stage"))
    group = mesh.get_group("stage")
    num_ranks = sizes[1]
    place = mesh.get_local_rank("stage")
    num_stages = num_ranks * (2 if options.schedule == "interleaved" else 1)
    if options.layers < num_stages:
        raise ValueError(f"{options.layers} layers are too few for {num_stages} stages: see --layers")

    parts: list[gpt.GPT] = []
    stages: list[Any] = []
    for index in range(place, num_stages, num_ranks):
        blocks = range(options.layers * index // num_stages, options.layers * (index + 1) // num_stages)
        part = model.stage(blocks, first=index == 0, last=index == num_stages - 1)
        if sharded:
            _shard(options, part, mesh["replica"])
        parts.append(part)
        stages.append(PipelineStage(part, index, num_stages, torch.device("cpu"), group=group))
    num_micro = num_ranks  # of a batch that is as many times larger than one rank's
    schedule: Any
    if options.schedule == "interleaved":
        schedule = ScheduleInterleaved1F1B(stages, num_micro, loss_fn=loss_of)
    elif options.schedule == "gpipe":
        schedule = ScheduleGPipe(stages[0], num_micro, loss_fn=loss_of)
    else:
        schedule = Schedule1F1B(stages[0], num_micro, loss_fn=loss_of)

    both: nn.Embedding | nn.Linear | None = None
    ends: ProcessGroup | None = None
    if options.tied:
        both = parts[0].characters or parts[-1].head
        for start in range(0, world_size, num_ranks):  # every rank creates every group
            pair = dist.new_group([start, start + num_ranks - 1])
            ends = pair if start == rank - place else ends
    return PipelinedTraining(
        nn.ModuleList(parts),
        schedule,
        num_ranks=num_ranks,
        has_last=place == num_ranks - 1,
        shared=None if both is None else both.weight,
        ends=ends,
    )


def _two_dims(first: int, world_size: int) -> tuple[int, int]:
    if world_size % first or world_size == first:
        raise ValueError(f"{world_size} ranks do not make {first} groups of several")
    return first, world_size // first


def _shard(options: recipe.Options, model: gpt.GPT, mesh: DeviceMesh) -> None:
    """FSDP2 for each block, and for the rest of the model."""
    policy = MixedPrecisionPolicy()
    if options.mixed_precision:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def clip_by_hand(parameters: Iterable[nn.Parameter], max_norm: float, num_stages: int = 1) -> None:
    """As `clip_grad_norm_`, for a model of which ranks have unlike parts: on several meshes, in several stages.

    Each rank adds up the squares of what it has, a value that is on n ranks counts 1/n on each, and one all-reduce
    tells everybody the whole.
    """
    ranks_of_a_stage = dist.get_world_size() // num_stages
    grads: list[torch.Tensor] = []
    total = torch.zeros(())
    for parameter in parameters:
        grad, num_parts = parameter.grad, 1
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
                num_parts *= 1 if placement.is_replicate() else size
            grad = grad.to_local()
        grads.append(grad)
        total += grad.square().sum() * (num_parts / ranks_of_a_stage)
    dist.all_reduce(total)
    factor = (max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor)
