"""Notices, in every step, whether the tensors of a rank are still the ones that were last looked at.

By identity, and in C loops where there are thousands: an optimizer makes its state in its first step and
keeps it, so that in nearly every step there is nothing new.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

from flashrec import torch_private
from flashrec.errors import UsageError
from flashrec.state.names import parameters_of
from flashrec.state.optimizer import OptimizerState, leaves
from flashrec.state.tensors import dtype_name

_ADVICE = "; call protect() when the model has the form it is trained in"


class Watch:
    """`parameters`: every parameter with its name. `models` are looked through again where one of their modules no
    longer shows what it did."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.Tensor]],
        models: Mapping[str, nn.Module],
        optimizers: Sequence[OptimizerState],
        *,
        include_grads: bool,
    ) -> None:
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._sharded = [one for one in self._parameters if torch_private.is_dtensor(one)]
        self._shards: list[torch.Tensor] = []
        # A DTensor gets another form only with another shard.
        self._plain = [one for one in self._parameters if not torch_private.is_dtensor(one)]
        self._forms = [(one.shape, one.dtype) for one in self._parameters]
        self._plain_shapes = [one.shape for one in self._plain]
        self._plain_dtypes = [one.dtype for one in self._plain]
        self._models = models
        self._in_models = {id(one): name for name, one in parameters_of(models)}
        self._look_through()
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
        if not all(map(is_, shards, self._shards)):
            self._check_forms()
            return False
        return all(seen.unchanged() for seen in self._states)

    def settled(self, index: int) -> bool:
        """Whether the state of optimizer number `index` is all tensors, the very objects it had at `remember`. May be
        asked from another thread."""
        if self._states is None:
            return False
        seen = self._states[index]
        return not seen.has_plain_values and seen.unchanged()

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
        if [one.shape for one in self._plain] != self._plain_shapes:
            self._check_forms()
        if [one.dtype for one in self._plain] != self._plain_dtypes:
            self._check_forms()
        if not all(map(is_, [owner.get(key) for owner, key in self._places], self._shown)):
            self._check_models()
        for state, given in zip(self._optimizers, self._given, strict=True):
            now = state.parameters()
            if len(now) != len(given) or not all(map(is_, now, given)):
                raise UsageError(
                    f"{state.name} has other parameters than at protect(): {_first_other(now, given)}; call protect() "
                    "after the last add_param_group()"
                )

    def _check_models(self) -> None:
        """Modules may be wrapped or exchanged, as long as the parameters are the same."""
        now = {id(one): name for name, one in parameters_of(self._models)}
        for key, name in self._in_models.items():
            if key not in now:
                raise UsageError(f"parameter {name!r} was replaced since protect(){_ADVICE}")
        for key, name in now.items():
            if key not in self._in_models:
                raise UsageError(f"parameter {name!r} was added since protect(){_ADVICE}")
        self._look_through()

    def _look_through(self) -> None:
        self._places = [place for model in self._models.values() for place in torch_private.places(model)]
        self._shown = [shown.get(key) for shown, key in self._places]

    def _check_forms(self) -> None:
        for name, one, (shape, dtype) in zip(self._names, self._parameters, self._forms, strict=True):
            if (one.shape, one.dtype) != (shape, dtype):
                what = "resized" if one.dtype == dtype else "given another dtype"
                raise UsageError(
                    f"parameter {name!r} was {what} since protect(): from {dtype_name(dtype)}, shape {list(shape)}, to "
                    f"{dtype_name(one.dtype)}, shape {list(one.shape)}{_ADVICE}"
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

    @property
    def has_plain_values(self) -> bool:
        return bool(self._plain)

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


def _first_other(now: list[torch.Tensor], before: list[torch.Tensor]) -> str:
    for index, (mine, theirs) in enumerate(zip(now, before, strict=False)):
        if mine is not theirs:
            return f"number {index} is another one"
    return f"{len(before)} then, {len(now)} now"
