"""How much state an optimizer will have once it has stepped, without stepping it.

A stand-in of the same class and settings steps once on small parameters, one for each kind there is. The
sizes of their dimensions are primes, so that a state's shape tells which dimensions of its parameter it has:
for a parameter of 3x5, a state of 3x5 is as large as the parameter, one of 3x1 has a value for each row.
"""

from __future__ import annotations

import collections
import copy
import inspect
import random
from math import prod
from typing import Any

import numpy as np
import torch

from flashrec.state.optimizer import OptimizerState, leaves
from flashrec.state.tensors import detached_copy, local_of

_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23)


def state_to_come(state: OptimizerState) -> int | None:
    """Bytes of the state that this rank's parameters have not got yet and will have after a step in which all that
    require a gradient get one; None when it cannot be told (the step is not torch's own, and might do anything).

    The optimizer, random state and gradients stay as they are, and no collective runs."""
    optimizer = state.keeper
    step = inspect.unwrap(type(optimizer).step)
    if not step.__module__.startswith("torch.optim."):
        return None
    num_bytes = 0
    for group in optimizer.param_groups:
        kinds: dict[tuple[torch.dtype, int], list[torch.Size]] = {}
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                local = local_of(parameter)
                kinds.setdefault((local.dtype, local.dim()), []).append(local.shape)
        for (dtype, num_dims), shapes in kinds.items():
            made = _state_of_one(optimizer, step, group, dtype, num_dims)
            if made is None:
                return None
            num_bytes += sum(_scaled(one, shape, num_dims) for shape in shapes for one in made)
    return num_bytes


def _state_of_one(
    optimizer: torch.optim.Optimizer, step: Any, group: dict[str, Any], dtype: torch.dtype, num_dims: int
) -> list[torch.Tensor] | None:
    """The state of a stand-in for a parameter of `num_dims` dimensions; None where the step does not work on it, or
    the shape of what it makes says nothing."""
    if num_dims > len(_PRIMES):
        return None
    parameter = torch.nn.Parameter(torch.ones(_PRIMES[:num_dims], dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    # The hooks stay behind: they are asked for by the wrapper around `step`, which is not called.
    stand_in = copy.copy(optimizer)
    stand_in.state = collections.defaultdict(dict)
    settings = {key: detached_copy(value) for key, value in group.items() if key != "params"}
    stand_in.param_groups = [{**settings, "params": [parameter]}]
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            step(stand_in)
        except (RuntimeError, ValueError, TypeError):
            return None
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
    made = [tensor for _, tensor in leaves(dict(stand_in.state.get(parameter, {})), "")]
    sizes = {1, *_PRIMES[:num_dims]}
    return made if all(set(one.shape) <= sizes for one in made) else None


def _scaled(made: torch.Tensor, shape: torch.Size, num_dims: int) -> int:
    """Bytes of what `made` stands for, if the parameter has `shape`."""
    sizes = {1: 1, **dict(zip(_PRIMES[:num_dims], shape, strict=True))}
    return prod(sizes[size] for size in made.shape) * made.element_size()
