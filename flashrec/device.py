"""What depends on the kind of device, in one place: its random state, waiting for it, moving bytes off and
on it.

`Cpu` is complete. `Accelerator` and `TorchLane` (what `flashrec.staging` drives) are written for any accelerator that
torch knows, on its device-agnostic interface of 2.13, and have not run on one yet; `device_of` goes on refusing their
tensors, because training on one needs more than this and says so. Nothing else in flashrec asks where a tensor lives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from flashrec.errors import EnvironmentFault


class Device(ABC):
    """One kind of device, in this process."""

    name: str

    @abstractmethod
    def rng_states(self) -> dict[str, bytes]:
        """The state of this process's random generators on devices of this kind, by kind ("cuda": that of the device
        it trains on, whose number another process of this rank may not share)."""

    @abstractmethod
    def set_rng_states(self, states: dict[str, bytes]) -> None:
        """Put back what `rng_states` gave. Raises ValueError when a device of that name is not here."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything queued on the device is done, and its memory can be read."""

    @abstractmethod
    def direct_bytes(self, tensor: torch.Tensor) -> memoryview | None:
        """The tensor's own memory as writable bytes, in C order, without a copy; None when the host cannot
        address it that way (other strides, other memory)."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `tensor` in host memory."""


class Cpu(Device):
    """Host memory. torch's default generator is not here but with the private state: every process has it."""

    name = "cpu"

    def rng_states(self) -> dict[str, bytes]:
        return {}

    def set_rng_states(self, states: dict[str, bytes]) -> None:
        if states:
            raise ValueError(f"random state of {', '.join(states)}, which this process does not have")

    def synchronize(self) -> None:
        pass

    def direct_bytes(self, tensor: torch.Tensor) -> memoryview | None:
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        return tensor.detach().reshape(-1).view(torch.uint8).numpy().data

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        return copy.copy_(tensor.detach())


class Accelerator(Device):
    """Devices of `kind` ("cuda", "xpu" ...), of which this process uses the current one."""

    def __init__(self, kind: str) -> None:
        self.name = kind
        self._module: Any = torch.get_device_module(kind)

    def rng_states(self) -> dict[str, bytes]:
        # The generator's seed and offset lie in host memory; nothing waits for the device.
        return {self.name: self._module.get_rng_state().numpy().tobytes()}

    def set_rng_states(self, states: dict[str, bytes]) -> None:
        if set(states) != {self.name}:
            raise ValueError(
                f"random state of {', '.join(sorted(states)) or 'no device'}, but this process trains on {self.name}"
            )
        self._module.set_rng_state(torch.frombuffer(bytearray(states[self.name]), dtype=torch.uint8))

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def direct_bytes(self, tensor: torch.Tensor) -> memoryview | None:
        return None

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Waits for what is queued on the current stream; `flashrec.staging` does not."""
        return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()


class TorchLane:
    """`flashrec.staging.Lane` on `device`. The training stream is the one that is current in the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device=device)

    def pinned(self, size_bytes: int) -> memoryview:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy().data

    def training_mark(self) -> torch.Event:
        return torch.accelerator.current_stream(self._device).record_event()

    def side_mark(self) -> torch.Event:
        return self._side.record_event()

    def side_waits(self, mark: torch.Event) -> None:
        self._side.wait_event(mark)

    def training_waits(self, mark: torch.Event) -> None:
        torch.accelerator.current_stream(self._device).wait_event(mark)

    def fetch(self, tensor: torch.Tensor, offset: int, buffer: memoryview) -> None:
        if buffer.nbytes:
            with self._side:
                # A copy, where there has to be one, belongs to the side: its memory is used again in the side's order.
                source = flat_bytes(tensor)[offset : offset + buffer.nbytes]
                torch.frombuffer(buffer, dtype=torch.uint8).copy_(source, non_blocking=True)

    def store(self, tensor: torch.Tensor, offset: int, buffer: memoryview) -> None:
        if buffer.nbytes:
            with self._side:
                store_bytes(tensor, offset, torch.frombuffer(buffer, dtype=torch.uint8))

    def wait(self, mark: torch.Event) -> None:
        mark.synchronize()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the tensor's elements in C order: its own memory where that is so laid out, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def store_bytes(tensor: torch.Tensor, offset: int, data: torch.Tensor) -> None:
    """Make `data` those of them from `offset` on, in the order of the current stream. Where the memory is not so laid
    out all of it is read and written back, so two such writers must not run at the same time."""
    tensor = tensor.detach()
    flat = flat_bytes(tensor)
    flat[offset : offset + data.numel()].copy_(data, non_blocking=True)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.dtype).reshape(tensor.shape))


CPU = Cpu()


def device_of(tensor: torch.Tensor) -> Device:
    """The kind of device that holds `tensor`. Raises EnvironmentFault for one flashrec cannot read yet."""
    if tensor.device.type == "cpu":
        return CPU
    raise EnvironmentFault(
        f"a tensor on {tensor.device}: this release of flashrec protects state in host memory only. Copying state off "
        "and on an accelerator is written, but has not run on one; groups that can be cut and formed again (over NCCL "
        "or its like), a vote that knows what has completed on the device, and standbys with a device are missing"
    )


def current() -> Device:
    """The kind of device this process trains on."""
    return CPU
