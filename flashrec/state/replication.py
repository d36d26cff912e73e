"""Who else holds the very same bytes of a tensor: told from structure, never from content.

    DTensor                       the ranks along the mesh dimensions it is replicated on; any other
                                  placement gives each rank bytes of its own
    parameter under DDP           the ranks of DDP's process group
    optimizer state, gradient     those that hold its parameter; ZeRO's state: this rank alone
    named by `replicated_over`    the group the user says
    all else                      this rank alone, which is always safe: it costs memory, never a loss

A set that is too small is safe too; one that is too large is not. So whoever sets up replicas in a way
that is not listed here has unique state until `replicated_over` says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashrec import torch_private
from flashrec.errors import UsageError

# Global ranks, ascending; None: this rank alone, whichever it is.
Holders = tuple[int, ...] | None

Hint = dist.ProcessGroup | Mapping[Any, dist.ProcessGroup | None]


class Replication:
    """Answers for one rank's tensors. With a world of one, everything is this rank's alone."""

    def __init__(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        rank: int | None,
        world_size: int,
        replicated_over: Hint | None = None,
    ) -> None:
        self.rank = rank
        self._world_size = world_size
        self._parameters: dict[int, Holders] = {}
        self._optimizers: dict[int, Holders] = {}
        self._otherwise: Holders = None
        self._by_placement: dict[tuple[Any, ...], tuple[Any, Holders]] = {}
        optimizers = list(optimizers)
        for model in models:
            _refuse_fsdp1(model)
            if world_size > 1:
                self._find_ddp(model)
        if replicated_over is not None:
            self._take_hint(replicated_over, optimizers)

    def of_parameter(self, name: str, parameter: torch.Tensor) -> Holders:
        """Raises UsageError, naming it, for one whose value is spread over ranks as a sum (Partial)."""
        if self._world_size == 1:
            return None
        if torch_private.is_dtensor(parameter):
            return self._of_dtensor(name, parameter)
        return self._parameters.get(id(parameter), self._otherwise)

    def of_state(
        self, name: str, tensor: torch.Tensor, optimizer: torch.optim.Optimizer, parameter: Holders
    ) -> Holders:
        """Of a tensor in the state of `optimizer`, whose parameter is held by `parameter`."""
        if self._world_size == 1 or torch_private.is_zero(optimizer):
            return None
        if torch_private.is_dtensor(tensor):
            return self._of_dtensor(name, tensor)
        return self._optimizers.get(id(optimizer), parameter)

    def of_grad(self, name: str, grad: torch.Tensor, parameter: Holders) -> Holders:
        """A gradient that is still to be summed over ranks (Partial) is unique to each of them."""
        if self._world_size > 1 and torch_private.is_dtensor(grad):
            return self._of_dtensor(name, grad, allow_partial=True)
        return parameter

    def _of_dtensor(self, name: str, tensor: Any, *, allow_partial: bool = False) -> Holders:
        mesh, placements = tensor.device_mesh, tensor.placements
        # Of sums only the plain ones can be described to a replacement.
        partial = [type(placement).__name__ for placement in placements if placement.is_partial()]
        if partial and (not allow_partial or set(partial) != {"Partial"}):
            raise UsageError(
                f"cannot protect tensor {name!r}: its placements are {list(placements)}, so its value is a sum "
                "over ranks that was not taken; redistribute it to Replicate() or Shard() before protect()"
            )
        key = (id(mesh), placements)
        if key not in self._by_placement:
            coordinate = mesh.get_coordinate()
            if coordinate is None:
                return None
            index = tuple(
                slice(None) if placement.is_replicate() else at
                for placement, at in zip(placements, coordinate, strict=True)
            )
            # The mesh is kept, lest another one get its id.
            self._by_placement[key] = mesh, tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))
        return self._by_placement[key][1]

    def _find_ddp(self, model: nn.Module) -> None:
        # Outermost first, so that of nested ones the innermost has the last word.
        for ddp in torch_private.ddp_modules(model):
            if any(torch_private.lets_models_differ(state) for state in torch_private.comm_hook_state(ddp)):
                continue
            ranks = ranks_of(ddp.process_group)
            ignored = torch_private.ddp_ignored(ddp)
            for name, parameter in ddp.module.named_parameters(remove_duplicate=False):
                if name not in ignored:
                    self._parameters[id(parameter)] = ranks

    def _take_hint(self, hint: Hint, optimizers: list[torch.optim.Optimizer]) -> None:
        if isinstance(hint, dist.ProcessGroup):
            self._otherwise = self._hinted(hint)
            return
        if not isinstance(hint, Mapping):
            raise UsageError(
                "replicated_over must be a process group, or a dict of modules (or optimizers) to process "
                f"groups, not {type(hint).__name__}"
            )
        for part, group in hint.items():
            holders = None if group is None else self._hinted(group)
            if isinstance(part, nn.Module):
                for parameter in part.parameters():
                    self._parameters[id(parameter)] = holders
            elif isinstance(part, torch.optim.Optimizer) and any(part is one for one in optimizers):
                self._optimizers[id(part)] = holders
            else:
                raise UsageError(
                    "replicated_over={...} has keys that are modules or protected optimizers, not "
                    f"{type(part).__name__}"
                )

    def _hinted(self, group: Any) -> Holders:
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(f"replicated_over names a {type(group).__name__}, which is no process group")
        ranks = ranks_of(group)
        if self.rank is not None and self.rank not in ranks:
            raise UsageError(
                f"replicated_over names a group of the ranks {list(ranks)}, and this is rank {self.rank}; give "
                "each rank the group it is in"
            )
        return ranks


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a process group, ascending."""
    ranks = getattr(group, "ranks", None)  # flashrec's own groups say it even before this process has a rank
    return tuple(sorted(dist.get_process_group_ranks(group) if ranks is None else ranks))


def _refuse_fsdp1(model: nn.Module) -> None:
    # Nothing can be an instance of what was never imported.
    fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp):
            raise UsageError(
                f"cannot protect module {name or 'model'!r}: it is wrapped in FullyShardedDataParallel, which moves "
                "its parameters' memory about in every step; use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
