"""What protect() was given, by name: models, optimizers, extras, and the models' parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flashrec import torch_private
from flashrec.errors import UsageError
from flashrec.state.tensors import local_of


class Stateful(Protocol):
    """A scheduler, a scaler, an average of weights: anything with these two methods."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def stateful(extras: Mapping[str, Any]) -> dict[str, Stateful]:
    """`extras`, if every one of them can be saved and loaded; raises UsageError naming one that cannot."""
    for name, extra in extras.items():
        if any(not callable(getattr(extra, method, None)) for method in ("state_dict", "load_state_dict")):
            raise UsageError(f"{name}={type(extra).__name__} has no state_dict() and load_state_dict()")
    return dict(extras)


def named(kind: str, given: Any, cls: type[Any]) -> dict[str, Any]:
    """{"model": m}, or {"model.<key>": m, ...} for several."""
    if isinstance(given, (list, tuple)) and len(given) == 1:
        given = given[0]
    if isinstance(given, cls):
        return {kind: given}
    items: Iterable[tuple[Any, Any]]
    if isinstance(given, Mapping):
        items = given.items()
        for key in given:
            # A dot in it could give two tensors the same name.
            if not isinstance(key, str) or not key.isidentifier():
                raise UsageError(f"the name of a {kind} must be an identifier, not {key!r}")
    elif isinstance(given, (list, tuple)):
        items = enumerate(given)
    else:
        raise UsageError(
            f"{kind} must be a {cls.__name__}, a list or a dict of them, not {type(given).__name__}"
        )
    named = {f"{kind}.{key}": value for key, value in items}
    for name, value in named.items():
        if not isinstance(value, cls):
            raise UsageError(f"{name} must be a {cls.__name__}, not {type(value).__name__}")
    if not named:
        raise UsageError(f"protect() was given no {kind}")
    return named


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside a data-parallel wrapper."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return model


def parameters_of(models: Mapping[str, torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Every Parameter of the models once, under its first name: with FSDP2 the sharded one, whatever the modules
    show now."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for model_name, model in models.items():
        sharded = torch_private.fsdp_sharded_parameters(model)
        for name, shown in model.named_parameters():
            parameter = sharded.get(id(shown), shown)
            found.setdefault(id(parameter), (f"{model_name}.{name}", parameter))
    return list(found.values())


def refuse_unsharded(
    models: Iterable[torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
) -> None:
    """UsageError naming an optimizer that holds what FSDP2 shows during a step, instead of what it keeps."""
    shown = {
        key: value for model in models for key, value in torch_private.fsdp_sharded_parameters(model).items()
    }
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if shown.get(id(parameter), parameter) is not parameter:
                    raise UsageError(
                        f"{name} was given parameters that fully_shard had gathered for a forward, and will not keep; "
                        "build it before the first forward, or call reshard() on the modules before"
                    )


def distinct(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Different Parameter objects over the very same memory (`b.weight.data = a.weight.data`) count once, like one
    that is tied."""
    found: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}
    for name, tensor in named:
        found.setdefault(_place(tensor), (name, tensor))
    return list(found.values())


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    tensor = local_of(tensor)
    lazy = isinstance(tensor, torch.nn.UninitializedParameter)
    if lazy or tensor.layout is not torch.strided or tensor.numel() == 0:
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
