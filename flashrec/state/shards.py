"""DTensors made from a rank's own memory, and described as plain data. Nothing here runs a collective."""

from __future__ import annotations

from typing import Any

import torch

from flashrec import torch_private
from flashrec.errors import UsageError
from flashrec.state.tensors import local_of


def made_like(parameter: torch.Tensor, dtype: torch.dtype, local_shape: tuple[int, ...]) -> torch.Tensor:
    """A new tensor for the state of `parameter`, with undefined values and, if it fits, the parameter's strides;
    for a DTensor one of the same mesh and placements, if the shape is that of its shard."""
    local = local_of(parameter)
    if tuple(local.shape) != local_shape:
        # A step counter and its like. Where they belong when the parameter is elsewhere is a matter for the
        # device that will be added then (torch keeps them on the host unless the optimizer is capturable or
        # fused).
        return torch.empty(local_shape, dtype=dtype, device=parameter.device)
    made = torch.empty_like(
        local.detach(), dtype=dtype, requires_grad=False, memory_format=torch.preserve_format
    )
    if not torch_private.is_dtensor(parameter):
        return made
    return _wrapped(made, parameter, parameter.placements, parameter.shape, parameter.stride())  # type: ignore[attr-defined]


def description(tensor: Any) -> list[Any]:
    """What of a DTensor is neither in its shard nor its mesh: for `as_described`."""
    placements = torch_private.placements_to_wire(tensor.placements)
    return [placements, list(tensor.shape), list(tensor.stride())]


def like_parameter(grad: Any, parameter: Any) -> bool:
    """Whether the DTensor `grad` is spread over the ranks as `parameter` is."""
    return torch_private.is_dtensor(parameter) and bool(grad.placements == parameter.placements)


def alike(grad: Any, other: Any) -> bool:
    """Whether the one could be in the other's place: of the same kind and form, and spread over the same ranks."""
    if type(grad) is not type(other) or (grad.dtype, grad.layout) != (other.dtype, other.layout):
        return False
    mine, theirs = local_of(grad), local_of(other)
    if (mine.shape, mine.device) != (theirs.shape, theirs.device):
        return False
    return not torch_private.is_dtensor(grad) or (
        bool(grad.placements == other.placements and grad.device_mesh == other.device_mesh)
        and (grad.shape, grad.stride()) == (other.shape, other.stride())
    )


def as_described(tensor: torch.Tensor, parameter: Any, described: list[Any]) -> torch.Tensor:
    """`tensor` if it is as `described`, else a DTensor that is, over the same memory and on the mesh of
    `parameter`."""
    if torch_private.is_dtensor(tensor) and description(tensor) == described:
        return tensor
    if not isinstance(parameter, torch.Tensor) or not torch_private.is_dtensor(parameter):
        raise UsageError(
            "the state to be restored has a DTensor where this rank's parameter is a plain tensor"
        )
    placements, shape, stride = described
    return _wrapped(
        local_of(tensor),
        parameter,
        torch_private.placements_from_wire(placements),
        torch.Size(shape),
        tuple(stride),
    )


def same_mesh(tensor: Any, parameter: Any) -> bool:
    return torch_private.is_dtensor(parameter) and bool(tensor.device_mesh == parameter.device_mesh)


def _wrapped(
    local: torch.Tensor, parameter: Any, placements: Any, shape: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = type(parameter).from_local(
            local.detach(), parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )
    return made
