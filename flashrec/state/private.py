"""Private state: the small things that differ by rank; and what a redo of a step must start from.

Private state is the random state of Python, numpy, torch and the device, module buffers, and what the user
adds. A snapshot of it is taken in every step, so its cost counts: the places of the buffers are looked up
once, when the object is built, and nothing is encoded before it has to be.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from flashrec import device, torch_private
from flashrec.errors import UsageError
from flashrec.state.capture import Captured
from flashrec.state.codec import checksum
from flashrec.state.names import stateful, unwrapped
from flashrec.state.tensors import LiveTensors, detached_copy, encode, local_of, read_bytes

# random.getstate()'s Mersenne Twister: 624 words and a position.
_PYTHON_VERSION = 3
_PYTHON_WORDS = 625
# numpy's: 624 words and a position, as in its header mt19937.h.
_MT19937_BYTES = 625 * 4


class PrivateState:
    """The private state of one rank. Buffers must be registered before this is built (protect() builds
    it)."""

    def __init__(
        self,
        models: torch.nn.Module | Iterable[torch.nn.Module],
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        self._extras = stateful(extras or {})
        self._numpy = _NumpyReader()
        modules = [models] if isinstance(models, torch.nn.Module) else list(models)
        # (name, module, attribute): walking all modules of a large model in every step would cost more than
        # everything else here; reading an attribute finds the buffer even if the module replaced it.
        self._buffers: list[tuple[str, torch.nn.Module, str]] = []
        for index, model in enumerate(modules):
            inner = unwrapped(model)
            owners = dict(inner.named_modules())
            for name, _ in inner.named_buffers():
                owner, _, attribute = name.rpartition(".")
                full_name = name if len(modules) == 1 else f"{index}.{name}"
                self._buffers.append((full_name, owners[owner], attribute))

    def snapshot(self) -> dict[str, Any]:
        """A copy of the private state, for `flashrec.state.tensors.encode`."""
        return {
            **self.random_state(),
            "buffers": {
                name: self._buffer(owner, attr).detach().clone() for name, owner, attr in self._buffers
            },
            "extras": {name: detached_copy(extra.state_dict()) for name, extra in self._extras.items()},
        }

    def random_state(self) -> dict[str, Any]:
        """A copy of the state of every random generator: Python's, numpy's, torch's and the device's."""
        version, words, gauss = random.getstate()
        if version != _PYTHON_VERSION or len(words) != _PYTHON_WORDS:
            raise UsageError(f"Python's random module has a state of an unknown form (version {version})")
        return {
            "random": (array.array("I", words).tobytes(), gauss),
            "numpy": self._numpy.read(),
            "torch": torch.get_rng_state(),
            "device": device.current().rng_states(),
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Put back what `snapshot` gave, here or in the process this rank had before.

        Raises UsageError, naming the part, when it is of another model or other extras; nothing is changed
        then."""
        buffers, extras = snapshot["buffers"], snapshot["extras"]
        mine = {name: self._buffer(owner, attr) for name, owner, attr in self._buffers}
        if mine.keys() != buffers.keys():
            raise UsageError(f"buffers differ: {sorted(mine.keys() ^ buffers.keys())[0]!r} is not in both")
        if self._extras.keys() != extras.keys():
            odd = sorted(self._extras.keys() ^ extras.keys())[0]
            raise UsageError(f"private state differs: {odd!r} is not in both")
        for name, buffer in mine.items():
            saved = buffers[name]
            if saved.shape != buffer.shape or saved.dtype != buffer.dtype:
                raise UsageError(
                    f"buffer {name!r} is {buffer.dtype}, shape {list(buffer.shape)} here and "
                    f"{saved.dtype}, shape {list(saved.shape)} in the state to be restored"
                )
        self.restore_random(snapshot)
        with torch.no_grad():
            for name, buffer in mine.items():
                buffer.copy_(buffers[name])
        for name, extra in self._extras.items():
            extra.load_state_dict(detached_copy(extras[name]))

    def restore_random(self, state: Mapping[str, Any]) -> None:
        """Put back what `random_state` (or `snapshot`) gave, exactly. Raises UsageError for a generator that
        this process does not have."""
        words, gauss = state["random"]
        random.setstate((_PYTHON_VERSION, tuple(array.array("I", words)), gauss))
        self._restore_numpy(state["numpy"])
        self._numpy = _NumpyReader()
        torch.set_rng_state(state["torch"])
        try:
            device.current().set_rng_states(state["device"])
        except ValueError as error:
            raise UsageError(f"cannot restore the device's random state: {error}") from error

    def quiet_digest(self, snapshot: Mapping[str, Any] | None = None) -> dict[str, int]:
        """Part name -> checksum of the private state now (or of `snapshot`): two digests that are equal mean
        that nothing changed between them, and `changed` names what did."""
        now = self.snapshot() if snapshot is None else snapshot
        words, gauss = now["random"]
        digest = {
            "random": checksum(words) ^ hash(gauss) & (1 << 64) - 1,
            "numpy": checksum(_numpy_bytes(now["numpy"])),
            "torch": checksum(read_bytes(now["torch"], 0, now["torch"].numel())),
        }
        for name, state in now["device"].items():
            digest[f"device {name}"] = checksum(state)
        for name, buffer in now["buffers"].items():
            digest[f"buffer {name}"] = checksum(read_bytes(buffer, 0, buffer.numel() * buffer.element_size()))
        for name, state in now["extras"].items():
            digest[f"private {name}"] = checksum(encode(state))
        return digest

    def changed_since(self, snapshot: Mapping[str, Any]) -> list[str]:
        """Names of the parts that are not as they were in `snapshot`, sorted. In a step where nothing changed,
        and without buffers and extras, a few comparisons; checksums are taken only where there is a doubt."""
        now = self.snapshot()
        if (
            now["random"] == snapshot["random"]
            and now["numpy"] is snapshot["numpy"]
            and torch.equal(now["torch"], snapshot["torch"])
            and now["device"] == snapshot["device"]
            and not now["buffers"]
            and not now["extras"]
        ):
            return []
        return changed(self.quiet_digest(snapshot), self.quiet_digest(now))

    @staticmethod
    def _buffer(owner: torch.nn.Module, attribute: str) -> torch.Tensor:
        buffer = getattr(owner, attribute)
        if not isinstance(buffer, torch.Tensor):
            raise UsageError(
                f"buffer {attribute!r} of {type(owner).__name__} was a tensor at protect() and is "
                f"{type(buffer).__name__} now"
            )
        return local_of(buffer)

    @staticmethod
    def _restore_numpy(state: dict[str, Any]) -> None:
        if np.random.get_state(legacy=False)["bit_generator"] != state["bit_generator"]:
            # set_state refuses another generator's state; the script that saved it had installed its own.
            cls = getattr(np.random, str(state["bit_generator"]), None)
            if not isinstance(cls, type) or not issubclass(cls, np.random.BitGenerator):
                raise UsageError(f"numpy has no bit generator {state['bit_generator']!r}")
            np.random.set_bit_generator(cls())  # type: ignore[attr-defined]  # public, not in the stubs
        np.random.set_state(state)


class _NumpyReader:
    """numpy's state, read in full only when it may have moved: get_state() copies the Mersenne Twister word by
    word, and would cost a step more than all other random state together.

    What does not show in the generator's own memory is a normal deviate kept for the next call. With none
    kept, one can only come about by drawing, which does show.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory = b""
        self._state: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """As np.random.get_state(legacy=False); not to be changed."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, not in the stubs
        if type(generator) is not np.random.MT19937:
            return np.random.get_state(legacy=False)
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if generator is not self._generator or memory != self._memory or self._state["has_gauss"]:
            self._generator, self._memory = generator, memory
            self._state = np.random.get_state(legacy=False)
        return self._state


def changed(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Names of the parts that differ between two digests, sorted."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _numpy_bytes(state: dict[str, Any]) -> bytes:
    if state["bit_generator"] == "MT19937":
        inner = state["state"]
        rest = (inner["pos"], state.get("has_gauss"), state.get("gauss"))
        words: bytes = inner["key"].tobytes()
        return words + repr(rest).encode()
    return encode(state)


class Redo:
    """What a redo of a step must start from, noted at its Enter and put back before it is done again.

    That is: private state, every parameter's `.grad` (None is not zero; a gradient that is there is
    copied), the optimizers' hyper-parameters, and the state of the common extras. Extras that are modules
    (an average of the weights) are not copied: they change after the gate, if at all, and `put_back`
    refuses when one changed before."""

    def __init__(self, private: PrivateState, captured: Captured) -> None:
        self._private = private
        self._captured = captured
        self._parameters = list(captured.parameters())
        self._fsdp_parameters = [
            one for model in captured.models for one in torch_private.fsdp_parameters(model)
        ]
        self._snapshot: dict[str, Any] | None = None
        # A gradient that was there, and a copy of its values (of a DTensor's those of this rank's shard).
        self._grads: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        self._hyper_parameters: list[list[dict[str, Any]]] = []
        self._extras: dict[str, Any] = {}
        self._module_marks: dict[str, list[tuple[int, int]]] = {}

    def note(self, snapshot: dict[str, Any] | None = None) -> None:
        """Note the state now. `snapshot`: the private state, if it has just been taken anyway.

        Raises UsageError where FSDP2 holds gradients that it has not reduced: they are nowhere to be noted."""
        if torch_private.unreduced_gradient(self._fsdp_parameters):
            raise UsageError(
                "a step begins with gradients that fully_shard was told not to reduce "
                "(set_requires_gradient_sync(False)); let one step have all its micro-batches, with the last one "
                "reducing: steps(..., micro=n)"
            )
        self._snapshot = self._private.snapshot() if snapshot is None else snapshot
        grads: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                grad = parameter.grad
                if grad is None:
                    grads.append(None)
                    continue
                values = local_of(grad)
                before = self._grads[index] if index < len(self._grads) else None
                # The same memory step after step: fresh pages would cost more than the copy.
                if before is not None and before[1].shape == values.shape and before[1].dtype == values.dtype:
                    before[1].copy_(values)
                    grads.append((grad, before[1]))
                else:
                    grads.append((grad, values.detach().clone()))
        self._grads = grads
        self._hyper_parameters = [state.hyper_parameters() for state in self._captured.optimizers]
        self._extras, self._module_marks = {}, {}
        for name, extra in self._captured.common.items():
            if isinstance(extra, torch.nn.Module):
                self._module_marks[name] = _marks(extra)
            else:
                self._extras[name] = detached_copy(extra.state_dict())

    def put_back(self) -> None:
        """Make everything noted as it was; may be called several times. Raises UsageError when an extra
        that is a module has changed since, and RuntimeError when nothing was noted."""
        if self._snapshot is None:
            raise RuntimeError("put_back() without note()")
        for name, marks in self._module_marks.items():
            if _marks(self._module(name)) != marks:
                raise UsageError(
                    f"{name} changed before the optimizer's step; change it after that, so that a step "
                    "can be redone"
                )
        for model in self._captured.models:
            torch_private.reset_fsdp(model)
        with torch.no_grad():
            for parameter, noted in zip(self._parameters, self._grads, strict=True):
                if noted is None:
                    parameter.grad = None
                    continue
                grad, values = noted
                # The same object again: DDP's gradients can be views of its buckets. A view that is there now
                # is one of newer buckets, made since the note.
                now = parameter.grad
                if (
                    now is not None
                    and torch_private.is_view(now)
                    and now.shape == grad.shape
                    and now.dtype == grad.dtype
                ):
                    grad = now
                local_of(grad).copy_(values)
                parameter.grad = grad
        for state, groups in zip(self._captured.optimizers, self._hyper_parameters, strict=True):
            state.load_hyper_parameters(groups)
        for name, noted_state in self._extras.items():
            extra = self._captured.common[name]
            if isinstance(extra, torch.amp.GradScaler) and extra.is_enabled():
                _forget_unscaled(extra)
            extra.load_state_dict(detached_copy(noted_state))
        # Last: nothing above may leave its mark on the random state.
        self._private.restore(self._snapshot)

    def reader(self, captured: Captured, index: int) -> LiveTensors:
        """The bytes of `captured.rank_layout().sets[index]` as they were noted: while a step computes, gradients
        change, and nothing else of them. Valid until the next `note`."""
        return captured.of_set(index, [None if noted is None else noted[1] for noted in self._grads])

    def common_state(self) -> Any:
        """As `Captured.common_state`, as of the note; of extras that are modules as of now."""
        grads = [None if noted is None else noted[0] for noted in self._grads]
        return self._captured.common_state(self._hyper_parameters, self._extras, grads)

    def _module(self, name: str) -> torch.nn.Module:
        module = self._captured.common[name]
        assert isinstance(module, torch.nn.Module)
        return module


def _marks(module: torch.nn.Module) -> list[tuple[int, int]]:
    """Changes whenever a tensor of the module is replaced or written in place."""
    tensors = [*module.parameters(), *module.buffers()]
    return [(id(tensor), torch_private.num_writes(tensor)) for tensor in tensors]


def _forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let the scaler forget that the abandoned step unscaled its gradients: else the redo would take them
    for unscaled already and apply gradients that are too large by the scale. No public method does just
    that; update() does it besides setting the scale, which the caller puts back."""
    with contextlib.suppress(AssertionError):  # it has never scaled anything, so it has nothing to forget
        scaler.update(new_scale=scaler.get_scale())
