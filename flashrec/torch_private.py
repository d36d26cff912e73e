"""Every private name of torch this package relies on, in one place.

Each was checked on the torch version beside it. `check()` says which one moved, at start and in
words, instead of an AttributeError in the middle of a recovery.

What DistributedDataParallel needs around a replacement
-------------------------------------------------------
DDP chooses its buckets twice: at construction by parameter order, and again before its second
forward by the order in which gradients arrived in the first backward, when rank 0's choice is
broadcast. A replacement would make that broadcast alone, and reduce with other buckets than the
survivors. So it *rehearses*: forward and backward while detached, then the rebuild. Survivors of a
failure in the first steps have seen a backward that did not count. Bits depend on the buckets (gloo
sums each element in an order that follows from its place in one), so before step `v` is done again
every rank, detached or latched, calls `settle_buckets(ddp, v)`, a replacement after
`rehearsals(ddp, v)` forwards and backwards (more do no harm). Then `bucket_digest` agrees everywhere,
and the buckets are those of an undisturbed run.

- `find_unused_parameters=True`: DDP never rebuilds, `has_rebuilt` stays False, nobody rehearses.
- `static_graph=True`: DDP learns the graph in its first backward and rebuilds before its *third*
  forward, so a rehearsal takes two passes from version 2 on. A standby that ran both ahead of time
  cannot join at version 1: its digest differs.
- Communication hooks go through the same in-place group and need nothing for the transport. Their
  *state* is another matter: PowerSGD keeps an iteration count, a low-rank basis and the error of the
  last compression. A rehearsal, and a step that is thrown away, change them. Whoever redoes a step
  must put them back, and a replacement must load them (its own rank's: the error differs by rank).
  `comm_hook_state` finds the object. The stateless hooks (all-reduce, fp16 and bf16 compression)
  need nothing.

FSDP2 (fully_shard)
-------------------
The sharded parameters are objects of their own: the modules hold them between steps, and others, unsharded,
from a forward to the end of its backward (`fsdp_sharded_parameters` leads back). FSDP gathers from the
memory behind their local tensors, padded, and only while it is sharded: whoever writes into them calls
`reset_fsdp` first, or the next forward goes on with what was gathered before. The same after a step that
was abandoned anywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flashrec.errors import EnvironmentFault

CHECKED_ON = "2.13.0"

try:
    # `torch.distributed.Store` at run time, which its type stubs do not show.
    from torch._C._distributed_c10d import Store as Store
except ImportError as error:
    raise EnvironmentFault(
        f"torch {torch.__version__} has no distributed package flashrec can use ({error}). "
        f"Install torch {CHECKED_ON}, the version flashrec was checked on."
    ) from error

# "module:attribute.attribute" -> the torch version it was last checked on.
NAMES: dict[str, str] = {
    "torch._C._distributed_c10d:ProcessGroup._register_backend": CHECKED_ON,
    "torch._C._distributed_c10d:ProcessGroup._set_default_backend": CHECKED_ON,
    "torch._C._distributed_c10d:ProcessGroup.BackendType.GLOO": CHECKED_ON,
    "torch._C._distributed_c10d:ProcessGroupGloo._Options": CHECKED_ON,
    "torch._C._distributed_c10d:ProcessGroupGloo._Options._devices": CHECKED_ON,
    "torch._C._distributed_c10d:ProcessGroupGloo._Options._threads": CHECKED_ON,
    "torch._C._distributed_c10d:ProcessGroupGloo._Options._timeout": CHECKED_ON,
    "torch._C._distributed_c10d:ProcessGroupGloo.create_device": CHECKED_ON,
    "torch._C._distributed_c10d:Work._source_rank": CHECKED_ON,
    "torch._C._distributed_c10d:_set_global_rank": CHECKED_ON,
    "torch._C._distributed_c10d:Reducer._rebuild_buckets": CHECKED_ON,
    "torch._C._distributed_c10d:Reducer._reset_state": CHECKED_ON,
    "torch._C._distributed_c10d:Reducer._set_ddp_runtime_logging_sample_rate": CHECKED_ON,
    "torch._C._distributed_c10d:Logger._get_ddp_logging_data": CHECKED_ON,
    "torch._C._distributed_c10d:Logger.set_runtime_stats_and_log": CHECKED_ON,
    "torch._C._distributed_c10d:_register_comm_hook": CHECKED_ON,
    "torch._C._distributed_c10d:BuiltinCommHookType.FP16_COMPRESS": CHECKED_ON,
    "torch.nn.parallel:DistributedDataParallel._build_params_for_reducer": CHECKED_ON,
    "torch.nn.parallel:DistributedDataParallel._build_debug_param_to_name_mapping": CHECKED_ON,
    "torch.nn.parallel:DistributedDataParallel._ddp_init_helper": CHECKED_ON,
    "torch.nn.parallel:DistributedDataParallel._register_builtin_comm_hook": CHECKED_ON,
    "torch.nn.parallel:DistributedDataParallel._set_static_graph": CHECKED_ON,
    "torch:Tensor._is_view": CHECKED_ON,
    "torch:Tensor._version": CHECKED_ON,
    "torch.distributed.distributed_c10d:Backend.backend_list": CHECKED_ON,
    "torch.distributed.distributed_c10d:all_gather_object": CHECKED_ON,
    "torch.distributed.distributed_c10d:gather_object": CHECKED_ON,
    "torch.distributed.distributed_c10d:scatter_object_list": CHECKED_ON,
    "torch.distributed.distributed_c10d:broadcast_object_list": CHECKED_ON,
    "torch.distributed.distributed_c10d:send_object_list": CHECKED_ON,
    "torch.distributed.distributed_c10d:recv_object_list": CHECKED_ON,
}

# Attributes DDP's constructor sets; there is no class attribute to look at without an instance.
DDP_ATTRIBUTES = (
    "_has_rebuilt_buckets",
    "_comm_hooks",
    "static_graph",
)

# The same, of modules that a script with sharded tensors imports and others need not: that takes seconds.
SHARDING_NAMES: dict[str, str] = {
    "torch.distributed.tensor:DTensor._local_tensor": CHECKED_ON,
    "torch.distributed.tensor.placement_types:_StridedShard": CHECKED_ON,
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state": CHECKED_ON,
    "torch.distributed.fsdp:FSDPModule.reset_iter_state": CHECKED_ON,
}

# Attributes of FSDP2's objects, set where there is an instance: (module, class) -> names.
FSDP_ATTRIBUTES = {
    ("_fsdp_state", "FSDPState"): ("_is_root", "_fsdp_param_groups"),
    ("_fsdp_param_group", "FSDPParamGroup"): ("fsdp_params",),
    ("_fsdp_param", "FSDPParam"): ("sharded_param", "_unsharded_param", "unsharded_accumulated_grad"),
}
_FSDP = "torch.distributed.fsdp._fully_shard"

_OBJECT_COLLECTIVES = (
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "send_object_list",
    "recv_object_list",
)

# kDDPRuntimeLoggingSampleRate in c10d/reducer.hpp; there is no way to read the present one.
_DDP_LOGGING_SAMPLE_RATE = 100


def check() -> None:
    """Raise EnvironmentFault that names every private name this torch no longer has."""
    moved = [f"{name.replace(':', '.')} (seen in {at})" for name, at in NAMES.items() if not _exists(name)]
    source = inspect.getsource(DistributedDataParallel)
    moved += [
        f"DistributedDataParallel.{name} (seen in {CHECKED_ON})"
        for name in DDP_ATTRIBUTES
        if f"self.{name}" not in source
    ]
    moved += [
        f"torch.nn.Module.{name} (seen in {CHECKED_ON})"
        for name in ("_parameters", "_modules")
        if not hasattr(nn.Module(), name)
    ]
    _refuse(moved)


def check_sharding() -> None:
    """As `check`, for DTensor and FSDP2, if the script has imported them."""
    moved = [
        f"{name.replace(':', '.')} (seen in {at})"
        for name, at in SHARDING_NAMES.items()
        if name.partition(":")[0] in sys.modules and not _exists(name)
    ]
    if "torch.distributed.fsdp" in sys.modules:
        for (module, name), attributes in FSDP_ATTRIBUTES.items():
            found = getattr(importlib.import_module(f"{_FSDP}.{module}"), name, None)
            source = "" if found is None else inspect.getsource(found)
            moved += [
                f"{name}.{one} (seen in {CHECKED_ON})" for one in attributes if f"self.{one}" not in source
            ]
    _refuse(moved)


def _refuse(moved: list[str]) -> None:
    if moved:
        raise EnvironmentFault(
            f"torch {torch.__version__} lacks what flashrec relies on: {', '.join(moved)}. "
            f"Install torch {CHECKED_ON}, the version flashrec was checked on."
        )


def object_collective_codes() -> frozenset[CodeType]:
    """Code objects of torch's object collectives, to recognise one on the stack."""
    return function_codes(*_OBJECT_COLLECTIVES)


def function_codes(*names: str) -> frozenset[CodeType]:
    """Code objects of functions of torch.distributed, below the wrappers around them."""
    module = importlib.import_module("torch.distributed.distributed_c10d")
    return frozenset(inspect.unwrap(getattr(module, name)).__code__ for name in names)


def set_global_rank(rank: int) -> None:
    """Tell c10d's own log lines which rank this process has become."""
    module: Any = importlib.import_module("torch._C._distributed_c10d")
    module._set_global_rank(rank)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a view of another, as a gradient is with DDP's gradient_as_bucket_view."""
    return bool(tensor._is_view())


def num_writes(tensor: torch.Tensor) -> int:
    """Grows whenever `tensor`, or a view that shares its memory, is written in place: the counter that autograd's
    documentation describes, and gives no other name."""
    return int(tensor._version)


def ddp_modules(model: nn.Module) -> list[DistributedDataParallel]:
    """The DistributedDataParallel modules in `model` (itself included), outermost first."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def rebuild_buckets(ddp: DistributedDataParallel) -> bool:
    """Choose the final buckets now, by the gradient arrival order of the last backward.

    Broadcasts rank 0's choice, so either every rank calls it or the groups are detached.

    Returns:
        True if the buckets were rebuilt by this call; False if they had been before, never are
        (`find_unused_parameters`), or no backward has run yet.
    """
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
        return True
    return False


def reset_buckets(ddp: DistributedDataParallel) -> None:
    """Give `ddp` a fresh reducer, with the buckets it had before its first backward.

    Gradients stay as they are, communication hooks are registered again. Runs no collective.
    """
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    builtin_hook = str(_logging_data(ddp).get("comm_hook", ""))
    ddp._has_rebuilt_buckets = False
    del ddp.reducer, ddp.logger  # the reducer's hooks on the parameters go with it
    static_graph, ddp.static_graph = ddp.static_graph, False
    ddp._ddp_init_helper(parameters, expect_sparse, names, static_graph)
    if ddp.mixed_precision is not None:
        reducer: Any = ddp.reducer
        reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    if static_graph:
        ddp._set_static_graph()
    module: Any = importlib.import_module("torch._C._distributed_c10d")
    for hook, state in ddp._comm_hooks:
        module._register_comm_hook(ddp.reducer, state, hook)
    if builtin_hook.startswith("BuiltinCommHookType."):
        kind = getattr(module.BuiltinCommHookType, builtin_hook.partition(".")[2])
        ddp._register_builtin_comm_hook(kind)


def settle_buckets(ddp: DistributedDataParallel, version: int) -> None:
    """Bring DDP's buckets to where an undisturbed run has them before step `version`.

    May rebuild them, which is a broadcast: call it while the groups are detached or latched.
    """
    due = backwards_to_rebuild(ddp)
    if version == 0:
        reset_buckets(ddp)
    elif version >= due:
        rebuild_buckets(ddp)
    elif not has_rebuilt(ddp):
        # Static graph at version 1: forget the arrival order of a backward that did not count.
        ddp.reducer._reset_state()


def rehearsals(ddp: DistributedDataParallel, version: int) -> int:
    """How many detached forwards and backwards a replacement runs before it settles at `version`."""
    return min(version, backwards_to_rebuild(ddp))


def has_rebuilt(ddp: DistributedDataParallel) -> bool:
    """Whether DDP has chosen its final buckets."""
    if ddp._has_rebuilt_buckets:
        return True
    return bool(_logging_data(ddp).get("has_rebuilt_buckets", 0))


def bucket_digest(ddp: DistributedDataParallel) -> str:
    """Hex digest of which parameters share which bucket; equal on all ranks or they cannot reduce.

    Returns "" if DDP reduces nothing (no parameter requires a gradient). Costs tens of
    microseconds and no memory: it reads DDP's own description of its buckets.
    """
    data = _logging_data(ddp)
    if data.get("rebuilt_per_bucket_param_indices"):
        layout = f"{data['rebuilt_bucket_sizes']}|{data['rebuilt_per_bucket_param_indices']}"
    elif data.get("bucket_sizes"):
        # Before the rebuild the buckets follow from the parameters' order and sizes alone.
        layout = f"initial|{data['bucket_sizes']}"
    else:
        return ""
    return hashlib.blake2b(layout.encode(), digest_size=16).hexdigest()


def backwards_to_rebuild(ddp: DistributedDataParallel) -> int:
    """How many backward passes a fresh `ddp` needs to choose its final buckets; 0 if it never does."""
    if ddp.static_graph:
        return 2
    return 0 if ddp.find_unused_parameters else 1


def comm_hook_state(ddp: DistributedDataParallel) -> list[Any]:
    """States of the Python communication hooks registered on `ddp` (None where one has none)."""
    return [state for _hook, state in ddp._comm_hooks]


def ddp_ignored(ddp: DistributedDataParallel) -> set[str]:
    """Names, below `ddp.module`, of the parameters that DDP neither broadcast nor reduces."""
    return set(ddp.parameters_to_ignore)


def lets_models_differ(comm_hook_state: Any) -> bool:
    """Whether a communication hook with this state lets the ranks' models drift apart (local SGD)."""
    return type(comm_hook_state).__name__ == "PostLocalSGDState"


def places(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where `model` holds its modules and parameters: (a module's own dict, the key in it). Without the parameters
    that FSDP2 exchanges in every step."""
    sharded = fsdp_sharded_parameters(model)
    found: list[tuple[dict[str, Any], str]] = []
    for module in model.modules():
        found += [(module._modules, key) for key in module._modules]
        found += [
            (module._parameters, key) for key, one in module._parameters.items() if id(one) not in sharded
        ]
    return found


def is_dtensor(tensor: torch.Tensor) -> bool:
    cls: type = type(tensor)
    if cls is torch.Tensor or cls is nn.Parameter:
        return False
    # Nothing can be an instance of what was never imported, and the import takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(cls, module.DTensor)


def local_shard(dtensor: Any) -> torch.Tensor:
    """The very tensor object that holds this rank's part. `to_local()` gives another one for parameters, and
    this is asked for every parameter in every step."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def placements_to_wire(placements: Any) -> list[list[Any]]:
    """Placements of a DTensor as plain data."""
    wire: list[list[Any]] = []
    for placement in placements:
        if placement.is_replicate():
            wire.append(["replicate"])
        elif placement.is_partial():
            wire.append(["partial", placement.reduce_op])
        elif placement.is_shard():
            wire.append(["shard", placement.dim])
        else:
            wire.append(["strided", placement.dim, placement.split_factor])
    return wire


def placements_from_wire(wire: list[list[Any]]) -> tuple[Any, ...]:
    """What `placements_to_wire` was given."""
    types: Any = importlib.import_module("torch.distributed.tensor.placement_types")
    make = {
        "replicate": types.Replicate,
        "partial": types.Partial,
        "shard": types.Shard,
        "strided": lambda dim, split_factor: types._StridedShard(dim, split_factor=split_factor),
    }
    return tuple(make[kind](*rest) for kind, *rest in wire)


def is_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is a ZeroRedundancyOptimizer, which keeps its state in its `.optim`."""
    module = sys.modules.get("torch.distributed.optim")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def fsdp_sharded_parameters(model: nn.Module) -> dict[int, nn.Parameter]:
    """id of every parameter that FSDP2 may show in place of a sharded one -> the sharded one."""
    shown: dict[int, nn.Parameter] = {}
    for one in fsdp_parameters(model):
        for name in ("sharded_param", "_unsharded_param", "_sharded_post_forward_param"):
            if getattr(one, name, None) is not None:
                shown[id(getattr(one, name))] = one.sharded_param
    return shown


def unreduced_gradient(fsdp_parameters: list[Any]) -> bool:
    """Whether FSDP2 holds gradients that it was told not to reduce yet."""
    return any(
        one.unsharded_accumulated_grad is not None
        or getattr(getattr(one, "_unsharded_param", None), "grad", None) is not None
        for one in fsdp_parameters
    )


def reset_fsdp(model: nn.Module) -> None:
    """Bring FSDP2 to where it is between two steps, wherever in one it was left: sharded, and without a
    gradient that is not reduced yet. Runs no collective."""
    for module in _fsdp_modules(model):
        if module._get_fsdp_state()._is_root:  # None before the first forward
            module.reset_iter_state()
        module.reshard()
    for one in fsdp_parameters(model):
        one.unsharded_accumulated_grad = None
        if getattr(one, "_unsharded_param", None) is not None:
            one._unsharded_param.grad = None


def _fsdp_modules(model: nn.Module) -> list[Any]:
    fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp)]


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """FSDP2's own objects, one for each parameter that it shards."""
    return [
        one
        for module in _fsdp_modules(model)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for one in group.fsdp_params
    ]


def _logging_data(ddp: DistributedDataParallel) -> dict[str, Any]:
    # The description is refreshed every 100th iteration only, unless asked for each.
    reducer, logger = ddp.reducer, ddp.logger
    assert logger is not None
    reducer._set_ddp_runtime_logging_sample_rate(1)
    try:
        logger.set_runtime_stats_and_log()
    finally:
        reducer._set_ddp_runtime_logging_sample_rate(_DDP_LOGGING_SAMPLE_RATE)
    data = logger._get_ddp_logging_data()
    return {**data.strs_map, **data.ints_map}


def _exists(name: str) -> bool:
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Within it tensors have shapes, dtypes and gradients, but neither values nor memory. Checked on 2.13.0."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: contextlib.AbstractContextManager[Any] = FakeTensorMode()
    return mode


def watch_operators(
    seen: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None],
) -> contextlib.AbstractContextManager[Any]:
    """Within it every operator that runs is told to `seen`: the overload, its arguments, its result.

    Those that autograd and composite operators are made of, not what was called. Checked on 2.13.0.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            seen(func, args, kwargs or {}, result)
            return result

    mode: contextlib.AbstractContextManager[Any] = Watch()  # type: ignore[no-untyped-call]  # as torch declares its base
    return mode
