"""What a step's events are done with: kernels of torch (or of the caller's own), and collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from flashrec.errors import UsageError
from flashrec.sim.choices import require_choice
from flashrec.sim.events import Communication, Compute

if TYPE_CHECKING:
    import torch.distributed as dist

ELEMENT = 4  # collectives are of fp32


class Kernels(Protocol):
    """What performs compute events."""

    repeat_s: float
    """Shorter ones are repeated until they take so long together."""

    def seconds(self, event: Compute, times: int) -> float:
        """How long one took, of `times` done back to back."""
        ...


class TorchKernels:
    """Real arithmetic with torch. `device`: cpu or cuda. Operands are made once for each event.

    A CPU does each once, after others: repeated at once it would find its operands in the cache, as it seldom does in
    training. An accelerator does them back to back, for its queue is filled in training as well.
    """

    def __init__(self, device: str = "cpu") -> None:
        require_choice(device, ("cpu", "cuda"), "device")
        self.device = device
        self.repeat_s = 0.5e-3 if device == "cuda" else 0.0
        self._launches: dict[Compute, Callable[[], object]] = {}

    def seconds(self, event: Compute, times: int) -> float:
        """On cuda between two of its events, else by the clock."""
        launch = self.launch(event)
        if self.device == "cuda":
            return between_cuda_events(launch, times)
        began = time.perf_counter()
        for _ in range(times):
            launch()
        return (time.perf_counter() - began) / times

    def launch(self, event: Compute) -> Callable[[], object]:
        """Performs the event once (on cuda: queues it)."""
        if event not in self._launches:
            self._launches[event] = _launch(event, self.device)
        return self._launches[event]


def _launch(event: Compute, device: str) -> Callable[[], object]:
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if event.dtype not in dtypes:
        raise UsageError(f"{event} cannot be timed: no products of {event.dtype}; known: {', '.join(dtypes)}")
    dtype = dtypes[event.dtype]
    if event.operator == "traffic":
        # Half of the bytes are read and half written.
        size = max(1, event.shape[0] // 2)
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)
    batch, m, k, n = event.shape
    a = torch.randn(batch, m, k, device=device).to(dtype)
    b = torch.randn(batch, k, n, device=device).to(dtype)
    if batch == 1:
        out = torch.empty(m, n, dtype=dtype, device=device)
        return lambda: torch.mm(a[0], b[0], out=out)
    out = torch.empty(batch, m, n, dtype=dtype, device=device)
    return lambda: torch.bmm(a, b, out=out)


def between_cuda_events(launch: Callable[[], object], times: int) -> float:
    """Seconds of one of `times` launches on the device, the host's own time behind its queue left out."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        launch()
    end.record()
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms * 1e-3 / times


def exchange(event: Communication, group: dist.ProcessGroup | None = None) -> Callable[[], object]:
    """Performs the collective once among the ranks of `group`, with fp32 tensors of the event's size.

    Raises UsageError for a transfer, which has no group.
    """
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    whole = torch.zeros(max(1, event.size_bytes // ELEMENT // ranks) * ranks)
    part = torch.zeros(whole.numel() // ranks)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, part, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
    }
    if event.collective not in calls:
        raise UsageError(f"{event} is no collective")
    return calls[event.collective]
