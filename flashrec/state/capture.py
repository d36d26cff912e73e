"""The tensor state and the common state of a rank: live torch objects seen as a layout of bytes.

`capture(model, optimizer)` names every parameter and every tensor in the optimizers' state. Nothing is
wrapped or moved, no collective is run, and the structure of the modules is never touched: the objects are
only read, and written in place. Names are those of the modules' own trees, with data-parallel wrappers left
out:

    model.layers.0.weight               a parameter (a tied one once, under its first name)
    optimizer.params.3                  a parameter the optimizer has and no model does
    optimizer.state.3.exp_avg           the state of the optimizer's third parameter
    optimizer.state.3.history[1]        nested state: ".key" for a dict, "[index]" for a list
    model.layers.0.weight.grad          with `include_grads`

With several models (or optimizers) the names start with model.<key>. instead, the key being that of the
mapping or the index in the list.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flashrec.device import device_of
from flashrec.errors import LayoutMismatch, UsageError
from flashrec.state.codec import Buffer
from flashrec.state.layout import Layout, Piece
from flashrec.state.optimizer import OptimizerState
from flashrec.state.tensors import DTYPES, detached_copy, read_bytes, spec_of, write_bytes


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


def capture(
    models: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer],
    *,
    include_grads: bool = False,
    common: Mapping[str, Any] | None = None,
) -> Captured:
    """The tensor state of `models` and `optimizers`, and the common state of the optimizers and `common`.

    `include_grads`: `.grad` tensors that exist are part of the layout too (for a job that carries gradients
    from one step into the next). Raises UsageError naming what cannot be captured."""
    extras = stateful(common or {})
    named_models = _named("model", models, torch.nn.Module)
    named_optimizers = _named("optimizer", optimizers, torch.optim.Optimizer)
    return Captured(named_models, named_optimizers, extras, include_grads=include_grads)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside a data-parallel wrapper."""
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    return model


class Captured:
    """Tensor and common state of one rank. Piece numbers refer to the layout last returned or prepared."""

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        common: Mapping[str, Stateful],
        *,
        include_grads: bool,
    ) -> None:
        self._models = {name: unwrapped(model) for name, model in models.items()}
        self._include_grads = include_grads
        self._common = dict(common)
        known = {id(tensor) for _, tensor in self._named_parameters()}
        self._optimizers = [
            OptimizerState(name, optimizer, known_parameters=known) for name, optimizer in optimizers.items()
        ]
        self._tensors: list[torch.Tensor] = []
        # Where a tensor's memory is not one run of bytes, a piece is written by reading its surroundings and
        # writing them back, and two threads could undo each other's work.
        self._indirect_write = threading.Lock()
        self.layout()

    def layout(self) -> Layout:
        """The layout as it is now; an optimizer's state appears in it after its first step."""
        specs, self._tensors = [], []
        for name, tensor in self._named_tensors():
            specs.append(spec_of(name, tensor))
            self._tensors.append(tensor)
        return Layout(specs)

    def read_piece(self, piece: Piece) -> memoryview:
        """The piece's bytes: the tensor's own memory where it is contiguous on the host, else a copy."""
        return read_bytes(self._tensor(piece), piece.offset, piece.size_bytes)

    def piece_memory(self, piece: Piece) -> memoryview | None:
        """The piece's memory itself, writable, or None where `write_piece` has to be used."""
        tensor = self._tensor(piece)
        direct = device_of(tensor).direct_bytes(tensor)
        return None if direct is None else direct[piece.offset : piece.offset + piece.size_bytes]

    def write_piece(self, piece: Piece, data: Buffer) -> None:
        """Put the piece's bytes in place. Safe from several threads for different pieces."""
        if memoryview(data).nbytes != piece.size_bytes:
            raise ValueError(f"{memoryview(data).nbytes} bytes for {piece}")
        memory = self.piece_memory(piece)
        if memory is not None:
            memory[:] = data
        else:
            with self._indirect_write:
                write_bytes(self._tensor(piece), piece.offset, data)

    def prepare(self, layout: Layout) -> None:
        """Make the live objects have exactly `layout`, so that pieces of it can be written.

        Optimizer state (and, with `include_grads`, gradients) that the layout has is created, with
        undefined values; what it has not is dropped. Raises LayoutMismatch naming the first tensor that the
        model cannot have; nothing is changed then."""
        live = dict(self._named_tensors())
        specs = {spec.name: spec for spec in layout}
        parameters = dict(self._fixed_tensors())
        creatable = {name: parameter for state in self._optimizers for name, parameter in state.owners(specs)}
        if self._include_grads:
            creatable |= {f"{name}.grad": parameter for name, parameter in parameters.items()}
        for name, tensor in parameters.items():
            mine, wanted = spec_of(name, tensor), specs.get(name)
            if wanted != mine:
                raise LayoutMismatch(f"{mine} here is {wanted or 'absent'} in the state to be restored")
        for spec in layout:
            if spec.name not in parameters and spec.name not in creatable:
                raise LayoutMismatch(f"{spec} of the state to be restored does not exist here")
            if spec.dtype not in DTYPES:
                raise LayoutMismatch(
                    f"{spec} of the state to be restored has a dtype this torch does not know"
                )
        tensors = {}
        for spec in layout:
            current = live.get(spec.name)
            if current is None or spec_of(spec.name, current) != spec:
                current = _like(creatable[spec.name], DTYPES[spec.dtype], spec.shape)
            tensors[spec.name] = current
        for state in self._optimizers:
            state.install(tensors)
        if self._include_grads:
            for name, parameter in parameters.items():
                grad = tensors.get(f"{name}.grad")
                if grad is not parameter.grad:
                    parameter.grad = grad
        self._tensors = [tensors[spec.name] for spec in layout]

    def common_state(self) -> Any:
        """Hyper-parameters, the parts of optimizer state that are not tensors, and the state of every
        extra: a copy, for `flashrec.state.tensors.encode`."""
        return {
            "optimizers": {state.name: state.common_state() for state in self._optimizers},
            "extras": {name: detached_copy(extra.state_dict()) for name, extra in self._common.items()},
        }

    def load_common_state(self, common: Any) -> None:
        """Put back what `common_state` gave, here or on another rank. Call it after `prepare` (nested
        optimizer state gets its structure here). Raises UsageError when it is of other objects than
        these."""
        try:
            optimizers, extras = common["optimizers"], common["extras"]
            mine = {state.name for state in self._optimizers}
            same = set(optimizers) == mine and set(extras) == set(self._common)
        except (TypeError, KeyError) as error:
            raise UsageError("not a common state of a captured model and optimizer") from error
        if not same:
            raise UsageError(
                f"a common state of {sorted(optimizers)} and {sorted(extras)}, but this rank protects "
                f"{sorted(mine)} and {sorted(self._common)}"
            )
        for state in self._optimizers:
            state.load_common_state(optimizers[state.name])
        for name, extra in self._common.items():
            # A copy: many load_state_dict keep what they are given, and a redo may load the same again.
            extra.load_state_dict(detached_copy(extras[name]))

    @property
    def common(self) -> Mapping[str, Stateful]:
        """The extras that are equal on all ranks, by name."""
        return self._common

    @property
    def optimizers(self) -> Sequence[OptimizerState]:
        return self._optimizers

    def parameters(self) -> Iterator[torch.Tensor]:
        """Every parameter of the models and optimizers, each once."""
        return (tensor for _, tensor in self._fixed_tensors())

    def _tensor(self, piece: Piece) -> torch.Tensor:
        tensor = self._tensors[piece.tensor_index]
        if piece.offset + piece.size_bytes > tensor.numel() * tensor.element_size():
            raise ValueError(f"{piece} reaches beyond its tensor")
        return tensor

    def _named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for model_name, model in self._models.items():
            for name, parameter in model.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{model_name}.{name}", parameter

    def _fixed_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters: what only the script can make, never `prepare`. Different Parameter objects over the
        very same memory (`b.weight.data = a.weight.data`) count once, like one that is tied."""
        seen: set[tuple[Any, ...]] = set()
        for name, tensor in self._named_parameters():
            if _place(tensor) not in seen:
                seen.add(_place(tensor))
                yield name, tensor
        for state in self._optimizers:
            yield from state.own_parameters()

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = list(self._fixed_tensors())
        yield from parameters
        for state in self._optimizers:
            yield from state.tensors()
        if self._include_grads:
            for name, parameter in parameters:
                if parameter.grad is not None:
                    yield f"{name}.grad", parameter.grad


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    lazy = isinstance(tensor, torch.nn.UninitializedParameter)
    if lazy or tensor.layout is not torch.strided or tensor.numel() == 0:
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _like(parameter: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A new tensor for the state of `parameter`; undefined values, and the parameter's strides if it fits."""
    if tuple(parameter.shape) == shape:
        return torch.empty_like(
            parameter, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format
        )
    # A step counter and its like. Where they belong when the parameter is elsewhere is a matter for the
    # device that will be added then (torch keeps them on the host unless the optimizer is capturable or
    # fused).
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _named(kind: str, given: Any, cls: type[Any]) -> dict[str, Any]:
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
