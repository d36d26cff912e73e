"""The tensor state and the common state of a rank: live torch objects seen as layouts of bytes.

`capture(model, optimizer)` names every parameter and every tensor in the optimizers' state, and divides them
into replica sets (see `replication`). Of a DTensor it sees this rank's shard. Nothing is wrapped or moved, no
collective is run, and the structure of the modules is never touched: the objects are only read, and written
in place. Parameters are looked up once, here: FSDP2 shows others while a step is under way. Names are those
of the modules' own trees, with data-parallel wrappers left out:

    model.layers.0.weight               a parameter (a tied one once, under its first name)
    optimizer.params.3                  a parameter the optimizer has and no model does
    optimizer.state.3.exp_avg           the state of the optimizer's third parameter
    optimizer.state.3.history[1]        nested state: ".key" for a dict, "[index]" for a list
    model.layers.0.weight.grad          with `include_grads`

With several models (or optimizers) the names start with model.<key>. instead, the key being that of the
mapping or the index in the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from flashrec import torch_private
from flashrec.errors import LayoutMismatch, UsageError
from flashrec.state.estimate import state_to_come
from flashrec.state.layout import Layout, RankLayout, ReplicaSet, TensorSpec
from flashrec.state.names import (
    Stateful,
    distinct,
    named,
    parameters_of,
    refuse_unsharded,
    stateful,
    unwrapped,
)
from flashrec.state.optimizer import OptimizerState
from flashrec.state.replication import Hint, Holders, Replication
from flashrec.state.shards import alike, as_described, description, like_parameter, made_like
from flashrec.state.tensors import DTYPES, LiveTensors, detached_copy, direct_bytes, spec_of
from flashrec.state.watch import Watch


def capture(
    models: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer],
    *,
    include_grads: bool = False,
    common: Mapping[str, Any] | None = None,
    rank: int | None = 0,
    world_size: int = 1,
    replicated_over: Hint | None = None,
) -> Captured:
    """The tensor state of `models` and `optimizers`, and the common state of the optimizers and `common`.

    `include_grads`: `.grad` tensors that exist are part of the layout too (for a job that carries gradients
    from one step into the next). `rank`: the global one; None for a process that learns it later, by
    `take_rank`. `replicated_over`: the process group whose ranks hold equal values of the tensors of which
    structure does not tell, or {module or optimizer: process group, or None for "this rank alone"}. Raises
    UsageError naming what cannot be captured, EnvironmentFault for a torch that lacks what this relies on."""
    torch_private.check_sharding()
    extras = stateful(common or {})
    named_models = named("model", models, torch.nn.Module)
    named_optimizers = named("optimizer", optimizers, torch.optim.Optimizer)
    replication = Replication(
        named_models.values(),
        named_optimizers.values(),
        rank=rank,
        world_size=world_size,
        replicated_over=replicated_over,
    )
    return Captured(named_models, named_optimizers, extras, replication, include_grads=include_grads)


@dataclass(slots=True)
class _Held:
    """One tensor of the layout. `grad_of`: the number of the parameter whose gradient it is."""

    spec: TensorSpec
    tensor: torch.Tensor
    holders: Holders
    grad_of: int | None = None


class Captured:
    """Tensor and common state of one rank."""

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        common: Mapping[str, Stateful],
        replication: Replication,
        *,
        include_grads: bool,
    ) -> None:
        self._models = {name: unwrapped(model) for name, model in models.items()}
        self._include_grads = include_grads
        self._common = dict(common)
        self._replication = replication
        refuse_unsharded(self._models.values(), optimizers)
        in_models = parameters_of(self._models)
        known = {id(tensor) for _, tensor in in_models}
        self._optimizers = [
            OptimizerState(name, optimizer, known_parameters=known) for name, optimizer in optimizers.items()
        ]
        self._parameters = distinct(in_models)
        for state in self._optimizers:
            self._parameters += state.own_parameters()
        for name, parameter in self._parameters:
            spec_of(name, parameter)
        self._holders = {
            id(parameter): replication.of_parameter(name, parameter) for name, parameter in self._parameters
        }
        for _, parameter in in_models:  # those that share another one's memory
            self._holders.setdefault(id(parameter), None)
        self._watch = Watch(self._parameters, self._models, self._optimizers, include_grads=include_grads)
        self._held: list[_Held] = []
        # Kept until the tensors change: what would be the same in every step.
        self._structures: dict[int, bytes] = {}
        self._readers: dict[int, LiveTensors] = {}
        self._copy_readers: dict[int, tuple[list[torch.Tensor | None], LiveTensors]] = {}
        # Gradients of DTensors: how they are spread over the ranks only load_common_state knows.
        self._prepared_grads: dict[str, torch.Tensor] = {}
        self._ahead: dict[TensorSpec, torch.Tensor] = {}
        self._sets: list[tuple[tuple[int, ...], list[_Held]]] = []
        self._rank_layout: RankLayout | None = None
        self.refresh()

    # --- layout ---------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Look for tensors that came, went or were replaced since the last time; True if that changes the layout.
        An optimizer's state appears in it after its first step.

        Raises UsageError naming a parameter that was replaced, resized or given another dtype."""
        if self._watch.unchanged() and self._adopt_grads(self._watch.new_grads()):
            return False
        before = [(one.spec, one.holders) for one in self._held]
        self._hold(list(self._look()))
        self._watch.remember()
        return before != [(one.spec, one.holders) for one in self._held]

    def rank_layout(self) -> RankLayout:
        """The layout as of the last `refresh`, or as last prepared. RuntimeError without a rank."""
        if self._rank_layout is None:
            rank = self._replication.rank
            if rank is None:
                raise RuntimeError("a process without a rank has no layout of one: take_rank() first")
            sets: dict[tuple[int, ...], list[_Held]] = {}
            for one in self._held:
                sets.setdefault(one.holders or (rank,), []).append(one)
            self._sets = sorted(sets.items())
            self._rank_layout = RankLayout(
                rank,
                tuple(ReplicaSet(ranks, Layout([one.spec for one in held])) for ranks, held in self._sets),
            )
        return self._rank_layout

    def take_rank(self, rank: int) -> None:
        """Be `rank`, after having been built as nobody in particular."""
        if rank != self._replication.rank:
            self._replication.rank = rank
            self._rank_layout = None

    def of_set(self, index: int, grads: Sequence[torch.Tensor | None] = ()) -> LiveTensors:
        """The bytes of `rank_layout().sets[index]`: of the tensors as of now, even if the layout changes later.

        `grads`: copies to read instead of the gradients, in the order of `parameters`."""
        self.rank_layout()
        held = self._sets[index][1]
        copies = [None if one.grad_of is None else grads[one.grad_of] for one in held] if grads else []
        if any(copy is not None for copy in copies):
            kept = self._copy_readers.get(index)
            if kept is None or not all(map(is_, copies, kept[0])):
                tensors = [
                    one.tensor if copy is None else copy for one, copy in zip(held, copies, strict=True)
                ]
                kept = self._copy_readers[index] = (copies, LiveTensors([one.spec for one in held], tensors))
            return kept[1]
        if index not in self._readers:
            self._readers[index] = LiveTensors([one.spec for one in held], [one.tensor for one in held])
        return self._readers[index]

    def prepare(self, layout: RankLayout) -> None:
        """Make the live objects have exactly `layout`, so that pieces of it can be written (`of_set`).

        Optimizer state (and, with `include_grads`, gradients) that the layout has is created, with undefined
        values; what it has not is dropped. FSDP2 is brought to where it gathers what is written. Raises
        LayoutMismatch naming the first tensor that the model cannot have; nothing is changed then."""
        ahead, self._ahead = self._ahead, {}
        holders = self._holders_in(layout)
        wanted = [spec for one in layout.sets for spec in one.layout]
        specs = {spec.name: spec for spec in wanted}
        live = {one.spec.name: one for one in self._look()}
        owners = self._owners(specs)
        self._check_can_have(specs, owners)
        held = []
        for spec in wanted:
            one = live.get(spec.name)
            if one is None or one.spec != spec:
                tensor = ahead.get(spec)
                if tensor is None:
                    tensor = made_like(owners[spec.name], DTYPES[spec.dtype], spec.shape)
                one = _Held(spec, tensor, self._holders.get(id(owners[spec.name])))
            one.holders = holders[spec.name]
            held.append(one)
        for model in self._models.values():
            torch_private.reset_fsdp(model)
        tensors = {one.spec.name: one.tensor for one in held}
        for state in self._optimizers:
            state.install(tensors)
        self._prepared_grads = {}
        if self._include_grads:
            for name, parameter in self._parameters:
                grad = tensors.get(f"{name}.grad")
                if torch_private.is_dtensor(parameter) and grad is not None:
                    self._prepared_grads[name] = grad
                elif grad is not parameter.grad:
                    parameter.grad = grad
        self._hold(held)
        self._watch.forget()

    def prepare_ahead(self, layout: RankLayout) -> list[memoryview]:
        """Make what `prepare(layout)` would have to make, and keep it aside for that. The live objects do not change.

        Returns its memory, to which anything may be written until `prepare` is called."""
        specs = {spec.name: spec for one in layout.sets for spec in one.layout}
        for one in self._look():
            specs.pop(one.spec.name, None)
        self._ahead = {
            specs[name]: made_like(owner, DTYPES[specs[name].dtype], specs[name].shape)
            for name, owner in self._owners(specs).items()
            if name in specs and specs[name].dtype in DTYPES
        }
        found = [direct_bytes(tensor) for tensor in self._ahead.values()]
        return [memory for memory in found if memory is not None]

    def _owners(self, specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
        """The parameters whose state, or gradients, tensors of these names would be."""
        owners = {name: owner for state in self._optimizers for name, owner in state.owners(specs)}
        if self._include_grads:
            owners |= {f"{name}.grad": parameter for name, parameter in self._parameters}
        return owners

    def sealing_estimate(self) -> int | None:
        """Bytes of tensor state that this rank will have after the optimizers' first step, beyond what it has now
        (all of it, also what other ranks help to seal); None when it cannot be told."""
        expected = [state_to_come(state) for state in self._optimizers]
        return None if None in expected else sum(one for one in expected if one is not None)

    # --- common state ---------------------------------------------------------------------------------------

    def common_state(
        self,
        hyper_parameters: Sequence[list[dict[str, Any]]] | None = None,
        extras: Mapping[str, Any] | None = None,
        grads: Sequence[torch.Tensor | None] | None = None,
    ) -> Any:
        """Hyper-parameters, the parts of optimizer state that are not tensors, and the state of every
        extra: a copy, for `flashrec.state.tensors.encode`.

        `hyper_parameters` of the optimizers, `extras` and `grads` (one for each of `parameters`): taken before,
        to be used instead of those of now."""
        groups = hyper_parameters or [state.hyper_parameters() for state in self._optimizers]
        if grads is None:
            grads = [parameter.grad for _, parameter in self._parameters]
        described = {
            name: None if like_parameter(grad, parameter) else description(grad)
            for (name, parameter), grad in zip(self._parameters, grads, strict=True)
            if self._include_grads and grad is not None and torch_private.is_dtensor(grad)
        }
        return {
            "optimizers": {
                state.name: {"groups": mine, "state": self._structure(index)}
                for index, (state, mine) in enumerate(zip(self._optimizers, groups, strict=True))
            },
            "extras": {
                name: extras[name] if extras and name in extras else detached_copy(extra.state_dict())
                for name, extra in self._common.items()
            },
            "grads": described,
        }

    def _structure(self, index: int) -> bytes:
        encoded = self._structures.get(index)
        if encoded is None or not self._watch.settled(index):
            encoded = self._structures[index] = self._optimizers[index].structure()
        return encoded

    def load_common_state(self, common: Any) -> None:
        """Put back what `common_state` gave, here or on another rank. Call it after `prepare` (nested
        optimizer state gets its structure here). Raises UsageError when it is of other objects than
        these."""
        try:
            optimizers, extras, grads = common["optimizers"], common["extras"], common["grads"]
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
        if self._include_grads:
            for name, parameter in self._parameters:
                if name in grads and name in self._prepared_grads:
                    described = grads[name] or description(parameter)
                    parameter.grad = as_described(self._prepared_grads[name], parameter, described)
            self._prepared_grads = {}
        self._watch.forget()
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

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """The models, without data-parallel wrappers around them."""
        return list(self._models.values())

    def parameters(self) -> Iterator[torch.Tensor]:
        """Every parameter of the models and optimizers, each once."""
        return (tensor for _, tensor in self._parameters)

    # --- tensors ----------------------------------------------------------------------------------------------

    def _look(self) -> Iterator[_Held]:
        """Every tensor as it is now: parameters, which only the script can make, then what `prepare` can."""
        for name, parameter in self._parameters:
            yield _Held(spec_of(name, parameter), parameter, self._holders[id(parameter)])
        for state in self._optimizers:
            shared = {self._holders.get(id(parameter)) for parameter in state.parameters()}
            unowned = next(iter(shared)) if len(shared) == 1 else None
            for name, tensor, owner in state.owned_tensors():
                of_owner = unowned if owner is None else self._holders.get(id(owner))
                holders = self._replication.of_state(name, tensor, state.optimizer, of_owner)
                yield _Held(spec_of(name, tensor), tensor, holders)
        if self._include_grads:
            for number, (name, parameter) in enumerate(self._parameters):
                grad = parameter.grad
                if grad is not None:
                    holders = self._replication.of_grad(f"{name}.grad", grad, self._holders[id(parameter)])
                    yield _Held(spec_of(f"{name}.grad", grad), grad, holders, number)

    def _hold(self, held: list[_Held]) -> None:
        self._held = held
        self._rank_layout = None
        self._structures, self._readers, self._copy_readers = {}, {}, {}

    def _adopt_grads(self, new: list[tuple[int, torch.Tensor | None]]) -> bool:
        """Take new gradients where they leave the layout as it is; False where they do not."""
        if not new:
            return True
        self._readers, self._copy_readers = {}, {}
        holding = {one.grad_of: one for one in self._held if one.grad_of is not None}
        for number, grad in new:
            one = holding.get(number)
            if grad is None or one is None or not alike(grad, one.tensor):
                return False
            one.tensor = grad
        return True

    def _holders_in(self, layout: RankLayout) -> dict[str, tuple[int, ...]]:
        rank = self._replication.rank
        if rank != layout.rank:
            raise LayoutMismatch(
                f"the state to be restored is of rank {layout.rank}, and this is rank {rank}"
            )
        holders = {spec.name: one.ranks for one in layout.sets for spec in one.layout}
        if len(holders) != sum(len(one.layout) for one in layout.sets):
            raise LayoutMismatch("the state to be restored has two tensors of the same name")
        for name, parameter in self._parameters:
            mine = self._holders[id(parameter)] or (rank,)
            if holders.get(name, mine) != mine:
                raise LayoutMismatch(
                    f"tensor {name!r} is the same on ranks {list(mine)} here, and on ranks {list(holders[name])} in "
                    "the state to be restored"
                )
        return holders

    def _check_can_have(self, specs: Mapping[str, TensorSpec], owners: Mapping[str, torch.Tensor]) -> None:
        names = set()
        for name, parameter in self._parameters:
            names.add(name)
            mine, wanted = spec_of(name, parameter), specs.get(name)
            if wanted != mine:
                raise LayoutMismatch(f"{mine} here is {wanted or 'absent'} in the state to be restored")
        for spec in specs.values():
            if spec.name not in names and spec.name not in owners:
                raise LayoutMismatch(f"{spec} of the state to be restored does not exist here")
            if spec.dtype not in DTYPES:
                raise LayoutMismatch(
                    f"{spec} of the state to be restored has a dtype this torch does not know"
                )
