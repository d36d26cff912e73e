"""What depends on the kind of device, in one place: its random state, waiting for it, moving bytes off and
on it.

`Cpu` is complete. Another kind is one more subclass and one more line in `device_of`; nothing else in
flashrec asks where a tensor lives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from flashrec.errors import EnvironmentFault


class Device(ABC):
    """One kind of device, in this process."""

    name: str

    @abstractmethod
    def rng_states(self) -> dict[str, bytes]:
        """The state of every random generator on devices of this kind, by device ("cuda:0")."""

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


CPU = Cpu()


def device_of(tensor: torch.Tensor) -> Device:
    """The kind of device that holds `tensor`. Raises EnvironmentFault for one flashrec cannot read yet."""
    if tensor.device.type == "cpu":
        return CPU
    raise EnvironmentFault(
        f"a tensor on {tensor.device}: this release of flashrec protects state in host memory only"
    )


def current() -> Device:
    """The kind of device this process trains on."""
    return CPU
