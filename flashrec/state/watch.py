"""Notices, in every step, whether the tensors of a rank are still the ones that were last looked at.

By identity, and in C loops where there are thousands: an optimizer makes its state in its first step and
keeps it, so that in nearly every step there is nothing new.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from flashrec import torch_private
from flashrec.errors import UsageError
from flashrec.state.optimizer import OptimizerState, leaves
from flashrec.state.tensors import dtype_name


class Watch:
    """`parameters`: every parameter with its name; `places`: those among them that a module must go on
    showing, with (the module's own dict of parameters, the key in it)."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.Tensor]],
        places: Sequence[tuple[str, dict[str, Any], str]],
        optimizers: Sequence[OptimizerState],
        *,
        include_grads: bool,
    ) -> None:
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._sharded = [one for one in self._parameters if torch_private.is_dtensor(one)]
        self._shards: list[torch.Tensor] = []
        self._place_names = [name for name, _, _ in places]
        self._places = [(owner, key) for _, owner, key in places]
        self._shown = [owner.get(key) for _, owner, key in places]
        self._optimizers = list(optimizers)
        self._given = [state.parameters() for state in self._optimizers]
        self._include_grads = include_grads
        self._grads: list[torch.Tensor | None] = []
        self._states: list[_Seen] | None = None

    def remember(self) -> None:
        """What is there now is what `unchanged` compares with."""
        self._shards = [torch_private.local_shard(parameter) for parameter in self._sharded]
        self._states = [_Seen(state) for state in self._optimizers]
        if self._include_grads:
            self._grads = [parameter.grad for parameter in self._parameters]

    def forget(self) -> None:
        """`unchanged` is False until the next `remember`."""
        self._states = None

    def unchanged(self) -> bool:
        """Whether every tensor but gradients is the very object it was at `remember`.

        Raises UsageError naming a parameter that was replaced, resized or given another dtype."""
        self._check_parameters()
        if self._states is None:
            return False
        shards = [torch_private.local_shard(parameter) for parameter in self._sharded]
        return all(map(is_, shards, self._shards)) and all(seen.unchanged() for seen in self._states)

    def new_grads(self) -> list[tuple[int, torch.Tensor | None]]:
        """(number of the parameter, its gradient) where that is not the object it was at `remember`, or at the last
        call."""
        if not self._include_grads:
            return []
        grads = [one.grad for one in self._parameters]
        if all(map(is_, grads, self._grads)):
            return []
        before, self._grads = self._grads, grads
        return [(number, now) for number, now in enumerate(grads) if now is not before[number]]

    def _check_parameters(self) -> None:
        if [one.shape for one in self._parameters] != self._shapes:
            self._explain("resized")
        if [one.dtype for one in self._parameters] != self._dtypes:
            self._explain("given another dtype")
        if not all(map(is_, [owner.get(key) for owner, key in self._places], self._shown)):
            self._explain("replaced")
        for state, given in zip(self._optimizers, self._given, strict=True):
            now = state.parameters()
            if len(now) != len(given) or not all(map(is_, now, given)):
                raise UsageError(
                    f"{state.name} has other parameters than at protect(): {_first_other(now, given)}; call protect() "
                    "after the last add_param_group()"
                )

    def _explain(self, what: str) -> None:
        advice = "; call protect() when the model has the form it is trained in"
        for (owner, key), shown, name in zip(self._places, self._shown, self._place_names, strict=True):
            if owner.get(key) is not shown:
                raise UsageError(f"parameter {name!r} was replaced since protect(){advice}")
        for name, one, shape, dtype in zip(
            self._names, self._parameters, self._shapes, self._dtypes, strict=True
        ):
            if (one.shape, one.dtype) != (shape, dtype):
                raise UsageError(
                    f"parameter {name!r} was {dtype_name(dtype)}, shape {list(shape)}, at protect() and is "
                    f"{dtype_name(one.dtype)}, shape {list(one.shape)}, now: it was {what}{advice}"
                )


class _Seen:
    """The state of one optimizer, as objects."""

    def __init__(self, state: OptimizerState) -> None:
        self._state = state.keeper.state
        self._entries = list(self._state.values())
        self._values = list(self._flat())
        # Plain values change from step to step and matter to nobody here; containers may have tensors inside.
        self._plain = {
            position for position, value in enumerate(self._values) if not isinstance(value, torch.Tensor)
        }
        self._inside = self._nested()

    def unchanged(self) -> bool:
        entries = self._state
        if len(entries) != len(self._entries) or not all(map(is_, entries.values(), self._entries)):
            return False
        values = list(self._flat())
        if len(values) != len(self._values):
            return False
        if not self._plain:
            return all(map(is_, values, self._values))
        pairs = zip(values, self._values, strict=True)
        if any(
            position not in self._plain or isinstance(now, torch.Tensor)
            for position, (now, before) in enumerate(pairs)
            if now is not before
        ):
            return False
        self._values = values
        inside = self._nested()
        return len(inside) == len(self._inside) and all(
            name == before and tensor is same
            for (name, tensor), (before, same) in zip(inside, self._inside, strict=True)
        )

    def _flat(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(map(dict.values, self._entries))

    def _nested(self) -> list[tuple[str, torch.Tensor]]:
        return [
            leaf
            for position in sorted(self._plain)
            if isinstance(self._values[position], (dict, list, tuple))
            for leaf in leaves(self._values[position], str(position))
        ]


def places(model_name: str, model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where `model` shows its parameters, for `Watch`; without those that FSDP2 replaces in every step."""
    sharded = torch_private.fsdp_sharded_parameters(model)
    for prefix, module in model.named_modules():
        shown = torch_private.shown_parameters(module)
        for key, parameter in shown.items():
            if parameter is not None and id(parameter) not in sharded:
                yield ".".join(part for part in (model_name, prefix, key) if part), shown, key


def _first_other(now: list[torch.Tensor], before: list[torch.Tensor]) -> str:
    for index, (mine, theirs) in enumerate(zip(now, before, strict=False)):
        if mine is not theirs:
            return f"number {index} is another one"
    return f"{len(before)} then, {len(now)} now"
