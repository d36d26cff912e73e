"""Any `nn.Module` as the cost model sees it: traced with tensors that have shapes and no memory.

The module is made on the meta device, run forward and backward once under fake tensors, cut before each of its layers
and after the last: there the activations are detached, so that each part's backward can be run alone. What each part
does is noted operator by operator: products, convolutions and fused attention as `Gemm`, everything else that reads
and writes memory as traffic, views as nothing. A backward pass to the part's input alone, and one to its input and
its parameters, tell what the weights' gradients cost. Activations are what autograd saves, each storage once,
parameters left out.

    def gpt() -> TracedModule:                          # in mine.py: flashrec profile --model mine:gpt ...
        return TracedModule(
            name="mine", make=lambda: GPT(config), sequence=1024, layers="blocks",
            inputs=lambda micro_batch: (torch.zeros(micro_batch, 1024, dtype=torch.long),),
        )
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flashrec.errors import UsageError
from flashrec.sim.architecture import RECOMPUTE, Block, Division, Work
from flashrec.sim.choices import nearest_key, require_count
from flashrec.sim.operators import Noted, note

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class TracedModule:
    """An `Architecture` of a module. It is not divided: tensor and expert parallelism are for `Transformer`.

    Selective recomputation knows nothing of the module's attention: it does nothing again, and keeps what "none" keeps.
    """

    name: str
    make: Callable[[], nn.Module] = field(repr=False)
    """Makes the module; called on the meta device, so one of any size will do."""
    inputs: Callable[[int], tuple[Any, ...]] = field(repr=False)
    """The module's positional arguments for a micro-batch of that many samples; called under fake tensors."""
    layers: str | None = None
    """Name of the ModuleList or Sequential whose members a pipeline distributes. None: the longest."""
    sequence: int = 1
    """Tokens of one sample."""
    loss: Callable[[Any], torch.Tensor] | None = field(default=None, repr=False)
    """From the module's output. None: the backward pass begins at its first tensor."""
    _traces: dict[int, tuple[_Part, ...]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_count(self.sequence, "traced module: sequence")

    @property
    def num_layers(self) -> int:
        """How many layers the pipeline distributes."""
        return len(self._parts(1)) - 2

    @property
    def parameters(self) -> int:
        """All parameters, shared ones once."""
        return sum(sum(part.parameters.values()) for part in self._parts(1))

    @cached_property
    def tied_parameters(self) -> int:
        """Parameters that are used before the first layer and again after the last."""
        return self._parts(1)[-1].shared

    def check_division(self, tensor_parallel: int, expert_parallel: int) -> None:
        """Raises UsageError unless both are 1."""
        for name, degree in (("tensor_parallel", tensor_parallel), ("expert_parallel", expert_parallel)):
            if degree != 1:
                raise UsageError(
                    f"{name} is {degree}, but {self.name!r} is a traced module, which is not divided; nearest valid: 1"
                )

    def blocks(self, division: Division) -> tuple[Block, ...]:
        """What comes before the layers, the layers, and what comes after; equal ones are one object.

        Raises UsageError where the module cannot be traced.
        """
        self.check_division(division.tensor_parallel, division.expert_parallel)
        parts = self._parts(division.micro_batch)
        made: dict[int, Block] = {}
        last = len(parts) - 1
        for index, part in enumerate(parts):
            if id(part) not in made:
                made[id(part)] = part.block(division.gradient_bytes, inner=0 < index < last)
        return tuple(made[id(part)] for part in parts)

    def _parts(self, micro_batch: int) -> tuple[_Part, ...]:
        if micro_batch not in self._traces:
            self._traces[micro_batch] = _Trace(self, micro_batch).parts()
        return self._traces[micro_batch]


@dataclass(kw_only=True)
class _Part:
    """A piece of the module between two cuts."""

    name: str
    leaf: torch.Tensor | None
    output: torch.Tensor | None = None
    forward: Noted = field(default_factory=Noted)
    backward: Noted = field(default_factory=Noted)
    weight: Noted = field(default_factory=Noted)
    saved_bytes: int = 0
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    """Its parameters by identity, while tracing; those of an earlier part too where they are used again."""
    parameters: dict[int, int] = field(default_factory=dict)
    """Elements of each parameter that is first used here."""
    element_bytes: dict[int, int] = field(default_factory=dict)
    shared: int = 0
    """Elements of the parameters that an earlier part uses too."""

    def key(self) -> tuple[Any, ...]:
        """Equal for parts that cost the same. Known once the forward pass is over."""
        shapes = sorted((p.shape, str(p.dtype), p.requires_grad) for p in self.tensors.values())
        leaf, output = self.leaf, self.output
        ends = [(t.shape, t.dtype) for t in (leaf, output) if t is not None]
        return (
            tuple(self.forward.gemms),
            tuple(self.forward.traffic),
            self.saved_bytes,
            shapes,
            ends,
            self.shared,
        )

    def block(self, gradient_bytes: int, *, inner: bool) -> Block:
        kept = max(1, self.saved_bytes)
        saved = dict.fromkeys(RECOMPUTE, kept)
        if inner and self.leaf is not None:
            saved["full"] = _size(self.leaf)
        assert self.output is not None, "every part was closed"
        accumulate = tuple(
            (self.element_bytes[key] + 2 * gradient_bytes) * count for key, count in self.parameters.items()
        )
        return Block(
            name=self.name,
            parameters=sum(self.parameters.values()),
            forward=self.forward.work(),
            backward_input=self.backward.work(),
            backward_weight=self.weight.work() + Work(traffic=accumulate),
            saved_bytes=saved,
            output_bytes=_size(self.output),
            recomputable=inner,
        )


class _Trace:
    """One forward and backward pass of the module."""

    def __init__(self, traced: TracedModule, micro_batch: int):
        self.traced = traced
        self.micro_batch = micro_batch
        self.done: list[_Part] = []
        self.part = _Part(name="first", leaf=None)
        self._storages: set[int] = set()

    def parts(self) -> tuple[_Part, ...]:
        """Of equal ones, one object."""
        import torch

        from flashrec.torch_private import fake_tensors

        try:
            with torch.device("meta"):
                model = self.traced.make()
            with fake_tensors():
                _fake(model)
                self._run(model)
        except UsageError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.traced.name!r} cannot be traced with tensors that have no values: {error}"
            ) from error
        return tuple(self.done)

    def _run(self, model: nn.Module) -> None:
        import torch

        layers = _layers(model, self.traced.layers)
        self._model = model
        hooks = [layer.register_forward_pre_hook(self._before_layer, with_kwargs=True) for layer in layers]
        hooks.append(layers[-1].register_forward_hook(self._after_layers))
        hooks.extend(module.register_forward_pre_hook(self._uses) for module in model.modules())
        inside = {id(p) for layer in layers for p in layer.parameters()}
        self._use(p for p in model.parameters(recurse=False) if id(p) not in inside)
        arguments = self.traced.inputs(self.micro_batch)
        try:
            with (
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor),
                self._noting(lambda: self.part.forward),
            ):
                output = model(*arguments)
                if self.traced.loss is not None:
                    output = self.traced.loss(output)
            self._close(_first_tensor(output, "the module's output"))
        finally:
            for hook in hooks:
                hook.remove()
        if len(self.done) != len(layers) + 2:
            raise UsageError(
                f"{self.traced.name!r}: its {len(layers)} layers ran {len(self.done) - 2} times; "
                "each must run once in a forward pass"
            )
        self._give_unused(model)
        self._count_parameters()
        self._backward_passes()

    def _noting(self, where: Callable[[], Noted]) -> Any:
        from flashrec.torch_private import watch_operators

        return watch_operators(lambda func, args, kwargs, result: note(where(), func, args, kwargs, result))

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage).cdata
        if key not in self._storages and key not in self._parameter_storages:
            self._storages.add(key)
            self.part.saved_bytes += storage.nbytes()
        return tensor

    @cached_property
    def _parameter_storages(self) -> set[int]:
        from torch.multiprocessing.reductions import StorageWeakRef

        return {StorageWeakRef(p.untyped_storage()).cdata for p in self._model.parameters()}

    def _uses(self, module: nn.Module, args: Any) -> None:
        self._use(module.parameters(recurse=False))

    def _use(self, parameters: Iterable[torch.Tensor]) -> None:
        self.part.tensors.update((id(p), p) for p in parameters)

    def _before_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = _first_tensor((args, list(kwargs.values())), "a layer's arguments")
        leaf = self._cut(tensor, "layer")
        self._use(layer.parameters())
        return _replaced(args, tensor, leaf), {k: _replaced(v, tensor, leaf) for k, v in kwargs.items()}

    def _after_layers(self, layer: nn.Module, args: Any, output: Any) -> Any:
        tensor = _first_tensor(output, "a layer's output")
        return _replaced(output, tensor, self._cut(tensor, "last"))

    def _cut(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        leaf = tensor.detach().requires_grad_()
        self._close(tensor)
        self.part = _Part(name=name, leaf=leaf)
        return leaf

    def _close(self, output: torch.Tensor) -> None:
        self.part.output = output
        self.done.append(self.part)

    def _give_unused(self, model: nn.Module) -> None:
        """Parameters that no module call claimed (used by another module than their own) are the first part's."""
        used = {key for part in self.done for key in part.tensors}
        self.done[0].tensors.update((id(p), p) for p in model.parameters() if id(p) not in used)

    def _count_parameters(self) -> None:
        seen: set[int] = set()
        for part in self.done:
            for key, parameter in part.tensors.items():
                if key in seen:
                    part.shared += parameter.numel()
                    continue
                seen.add(key)
                part.parameters[key] = parameter.numel()
                part.element_bytes[key] = parameter.element_size()

    def _backward_passes(self) -> None:
        known: dict[Any, _Part] = {}
        for index, part in enumerate(self.done):
            inner = 0 < index < len(self.done) - 1
            key = repr(part.key()) if inner else index
            if key in known:
                self.done[index] = known[key]
                continue
            known[key] = part
            self._backward(part)
        for part in self.done:  # nothing of the graph stays
            part.tensors = {}
            part.leaf = part.leaf.detach() if part.leaf is not None else None
            part.output = part.output.detach() if part.output is not None else None

    def _backward(self, part: _Part) -> None:
        import torch

        output = part.output
        assert output is not None, "every part was closed"
        if not output.requires_grad:
            return
        gradient = torch.ones_like(output)
        parameters = [p for p in part.tensors.values() if p.requires_grad]
        inputs = [part.leaf] if part.leaf is not None else []

        def noted(towards: list[torch.Tensor]) -> Noted:
            found = Noted()
            if towards:
                with self._noting(lambda: found):
                    torch.autograd.grad(output, towards, gradient, retain_graph=True, allow_unused=True)
            return found

        part.backward = noted(inputs)
        part.weight = noted([*inputs, *parameters]).less(part.backward)


def _fake(model: nn.Module) -> None:
    """Fake tensors in place of parameters and buffers; what was one stays one.

    (Not made fake from the start: conversions in `make`, `.to(torch.bfloat16)` say, are refused by fake parameters.)
    """
    import torch
    from torch import nn

    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
        return made[id(tensor)]

    originals = []  # kept, so that no identity is used twice
    for module in model.modules():
        for kind in (module.named_parameters, module.named_buffers):
            for name, tensor in list(kind(recurse=False, remove_duplicate=False)):
                originals.append(tensor)
                setattr(module, name, fake(tensor))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _layers(model: nn.Module, name: str | None) -> list[nn.Module]:
    """The members of the container that `name` says, or of the longest one."""
    from torch import nn

    lists = {
        path: list(module)
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module)
    }
    if name is None:
        if not lists:
            raise UsageError("the module has no ModuleList or Sequential whose members could be layers")
        return max(lists.values(), key=len)
    if name not in lists:
        raise UsageError(
            f"layers: the module has no ModuleList or Sequential {name!r}; nearest: {nearest_key(name, lists)!r}"
        )
    return lists[name]


def _first_tensor(value: Any, what: str) -> torch.Tensor:
    """The first floating-point tensor in nested tuples, lists, mappings and objects with fields."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            return value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            try:
                return _first_tensor(item, what)
            except UsageError:
                continue
    raise UsageError(f"no floating-point tensor is in {what}")


def _replaced(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    if value is old:
        return new
    if type(value) in (tuple, list):
        return type(value)(_replaced(item, old, new) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, old, new) for key, item in value.items()}
    return value
