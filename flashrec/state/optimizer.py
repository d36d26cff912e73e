"""One optimizer's state: its tensors by name, and the rest of it as plain data.

Any optimizer of torch's shape is understood: `optimizer.state` maps parameters (or, with some, string keys)
to dicts that hold tensors, plain values, and dicts, lists and tuples of them. A ZeroRedundancyOptimizer has
groups of all parameters, and inside it another optimizer of this rank's, which keeps the state: both have
hyper-parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from flashrec import torch_private
from flashrec.errors import UsageError
from flashrec.state.codec import Foreign
from flashrec.state.shards import as_described, description, same_mesh
from flashrec.state.tensors import decode, detached_copy, encode, local_of

# In the plain part of the state, these stand where a tensor of the layout belongs.
_TENSOR = "flashrec.tensor"
_DTENSOR = "flashrec.dtensor"
_MAX_STRUCTURE_BYTES = 1 << 30

# A key that is not a simple word is quoted in a tensor's name, so that no two paths give the same name.
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class OptimizerState:
    """`own_parameters` are those no model has: they have no other name than their place in the optimizer."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, *, known_parameters: set[int]) -> None:
        self.name = name
        self.optimizer = optimizer
        # The optimizer that keeps the state.
        self.keeper: torch.optim.Optimizer = optimizer
        if torch_private.is_zero(optimizer):
            self.keeper = getattr(optimizer, "optim", optimizer)
            if not isinstance(self.keeper, torch.optim.Optimizer) or self.keeper is optimizer:
                raise UsageError(
                    f"cannot protect {name}: ZeroRedundancyOptimizer(overlap_with_ddp=True) applies gradients inside "
                    "backward, before all ranks can agree to; leave overlap_with_ddp out"
                )
        self._known = frozenset(known_parameters)
        # Tensors that `prepare` made for places which only `load_common_state` knows how to build.
        self._prepared: dict[str, torch.Tensor] = {}

    def parameters(self) -> list[torch.Tensor]:
        """In the order that state_dict() numbers them in."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def own_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, parameter in enumerate(self.parameters()):
            if id(parameter) not in self._known:
                yield f"{self.name}.params.{index}", parameter

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the state with its name, in an order that does not depend on history."""
        for name, tensor, _ in self.owned_tensors():
            yield name, tensor

    def owned_tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Those of `tensors`, each with the parameter it belongs to (None: the whole optimizer)."""
        parameters = self.parameters()
        for key, state in self._entries():
            owner = parameters[int(key)] if key.isdigit() else None
            for name, tensor in leaves(state, f"{self.name}.state.{key}"):
                if torch_private.is_dtensor(tensor) and (owner is None or not same_mesh(tensor, owner)):
                    raise UsageError(
                        f"cannot protect tensor {name!r}: it is a DTensor on another mesh than its parameter, so a "
                        "replacement could not make it; keep it on the parameter's mesh"
                    )
                yield name, tensor, owner

    def owners(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Of `names`, those that can be state of this optimizer, each with the parameter it belongs to."""
        parameters = self.parameters()
        prefix = f"{self.name}.state."
        for name in names:
            if name.startswith(prefix):
                key = re.match(r"\d+|[^.\[]+", name[len(prefix) :])
                if key is None or not parameters:
                    continue
                if not key[0].isdigit():
                    yield name, parameters[0]
                elif int(key[0]) < len(parameters):
                    yield name, parameters[int(key[0])]

    def install(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the state hold exactly those of `tensors` that are named as its own, and its plain values."""
        live = dict(self.tensors())
        wanted = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{self.name}.state.")}
        if live.keys() == wanted.keys() and all(live[name] is tensor for name, tensor in wanted.items()):
            return
        self._prepared = wanted
        state = self.keeper.state
        parameters = self.parameters()
        for key, entry in list(self._entries()):
            owner = _owner(key, parameters)
            for name in [name for name in entry if any(True for _ in leaves(entry[name], ""))]:
                del entry[name]
            if not entry:
                del state[owner]
        for name, tensor in wanted.items():
            key, _, path = name.removeprefix(f"{self.name}.state.").partition(".")
            # Deeper places are built by load_common_state, which knows their structure.
            if _WORD.fullmatch(path):
                state.setdefault(_owner(key, parameters), {})[path] = tensor

    def structure(self) -> bytes:
        """The parts of the state that are not tensors of the layout, which appear as references: encoded, because
        where there are thousands that takes time, and it seldom changes."""
        entries = {key: _with_references(entry, f"{self.name}.state.{key}") for key, entry in self._entries()}
        return encode(entries)

    def hyper_parameters(self) -> list[dict[str, Any]]:
        """A copy of all that param_groups hold besides the parameters themselves."""
        groups = []
        for group in self._groups():
            values = {key: detached_copy(value) for key, value in group.items() if key != "params"}
            groups.append({"num_params": len(group["params"]), "values": values})
        return groups

    def load_common_state(self, common: dict[str, Any]) -> None:
        """Put back {"groups": what `hyper_parameters`, "state": what `structure` gave}. Raises UsageError when it is of
        an optimizer with other groups."""
        self.load_hyper_parameters(common["groups"])
        known = {**dict(self.tensors()), **self._prepared}
        state = self.keeper.state
        parameters = self.parameters()
        entries = {}
        for key, entry in decode(common["state"], _MAX_STRUCTURE_BYTES).items():
            owner = _owner(key, parameters)
            entries[owner] = _with_tensors(entry, known, owner)
        for owner in [owner for owner in state if owner not in entries]:
            del state[owner]
        state.update(entries)
        self._prepared = {}

    def load_hyper_parameters(self, groups: list[dict[str, Any]]) -> None:
        """Raises UsageError when `groups` are not of as many parameters."""
        mine = self._groups()
        if [len(group["params"]) for group in mine] != [group["num_params"] for group in groups]:
            raise UsageError(
                f"{self.name} has groups of {[len(group['params']) for group in mine]} parameters, "
                f"the state to be restored has {[group['num_params'] for group in groups]}"
            )
        for group, saved in zip(mine, groups, strict=True):
            values = saved["values"]
            for key in [key for key in group if key != "params" and key not in values]:
                del group[key]
            for key, value in values.items():
                current = group.get(key)
                if (
                    isinstance(current, torch.Tensor)
                    and isinstance(value, torch.Tensor)
                    and (current.shape, current.dtype) == (value.shape, value.dtype)
                ):
                    # In place: a learning rate that is a tensor may be held elsewhere too (by a scheduler).
                    with torch.no_grad():
                        current.copy_(value)
                else:
                    group[key] = detached_copy(value)

    def _entries(self) -> list[tuple[str, dict[str, Any]]]:
        """(parameter's number or string key, its state), ordered by number, then key."""
        numbers = {id(parameter): index for index, parameter in enumerate(self.parameters())}
        numbered: list[tuple[int, dict[str, Any]]] = []
        named: list[tuple[str, dict[str, Any]]] = []
        owner: Any
        entry: Any
        for owner, entry in self.keeper.state.items():
            if not isinstance(entry, dict):
                raise UsageError(
                    f"cannot protect {self.name}: its state of a {type(owner).__name__} is no dict"
                )
            if isinstance(owner, torch.Tensor):
                if id(owner) not in numbers:
                    raise UsageError(f"cannot protect {self.name}: it has state for a tensor of no group")
                numbered.append((numbers[id(owner)], entry))
            elif isinstance(owner, str) and _WORD.fullmatch(owner):
                named.append((owner, entry))
            else:
                raise UsageError(f"cannot protect {self.name}: it has state under the key {owner!r:.60}")
        numbered.sort(key=lambda item: item[0])
        named.sort(key=lambda item: item[0])
        return [(str(index), entry) for index, entry in numbered] + named

    def _groups(self) -> list[dict[str, Any]]:
        groups = list(self.optimizer.param_groups)
        return groups if self.keeper is self.optimizer else groups + list(self.keeper.param_groups)


def _owner(key: str, parameters: list[torch.Tensor]) -> Any:
    return parameters[int(key)] if key.isdigit() else key


def _children(value: Any, path: str) -> list[tuple[Any, str, Any]]:
    """(key or index, name, child) of a container, dict items in an order that does not depend on history."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (type(key).__name__, repr(key)))
        words = [key if isinstance(key, str) and _WORD.fullmatch(key) else repr(key) for key in keys]
        return [(key, f"{path}.{word}", value[key]) for key, word in zip(keys, words, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(index, f"{path}[{index}]", item) for index, item in enumerate(value)]
    return []


def leaves(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested state, named from `path` on."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    for _, name, child in _children(value, path):
        yield from leaves(child, name)


def _with_references(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        if torch_private.is_dtensor(value):
            return Foreign(_DTENSOR, [path, description(value)])
        return Foreign(_TENSOR, path)
    if isinstance(value, dict):
        names = {key: name for key, name, _ in _children(value, path)}
        return {key: _with_references(child, names[key]) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_with_references(child, name) for _, name, child in _children(value, path)])
    return detached_copy(value)


def _with_tensors(value: Any, known: Mapping[str, torch.Tensor], owner: Any) -> Any:
    if isinstance(value, Foreign):
        name, described = value.body if value.kind == _DTENSOR else (value.body, None)
        if name not in known:
            raise UsageError(f"the tensor {name!r} of the state to be restored does not exist here")
        # What `prepare` made for it, by its shape alone, may be a DTensor or not.
        return local_of(known[name]) if described is None else as_described(known[name], owner, described)
    if isinstance(value, dict):
        return {key: _with_tensors(child, known, owner) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_with_tensors(child, known, owner) for child in value])
    return detached_copy(value)
