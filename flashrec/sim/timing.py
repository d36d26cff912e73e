"""What the two processes of a profile do: every event in every round, each timed on its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashrec.sim.events import Communication, Compute, Event, parse
from flashrec.sim.kernels import ELEMENT, Kernels, between_cuda_events, exchange

if TYPE_CHECKING:
    import torch.distributed as dist

MOST_TIMES = 1000
Seconds = dict[Event, list[float]]


def perform(events: Sequence[Event], rounds: int, pause_s: float, kernels: Kernels) -> Seconds | None:
    """Both ranks: all rounds of rank 0's events. Rank 0 returns the seconds."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    rounds_text, *texts = _from_rank_0([str(rounds), *map(str, events)])
    rounds, events = int(rounds_text), [parse(text) for text in texts]
    timers = [_timer(event, pause_s, kernels) for event in events]
    seconds = torch.zeros(rounds, len(events), dtype=torch.float64)
    kept = torch.zeros(rounds, dtype=torch.float64)
    for timer in timers:
        timer()  # connections, operands, caches
    for row in range(rounds):
        before = kept_from_core_s()
        for column, timer in enumerate(timers):
            seconds[row, column] = timer()
        kept[row] = kept_from_core_s() - before
    collective = [isinstance(e, Communication) and e.collective != "host_copy" for e in events]
    least = seconds.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    seconds[:, collective] = least[:, collective]
    dist.all_reduce(kept, op=dist.ReduceOp.MAX)
    if rank:
        return None
    quiet = seconds[kept.argsort(stable=True)[: -(-rounds // 2)]]
    return {event: quiet[:, column].tolist() for column, event in enumerate(events)}


def kept_from_core_s() -> float:
    """Seconds so far in which a thread of this process could have run, but something else had the core."""
    waited_ns = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that ended meanwhile
            waited_ns += int((task / "schedstat").read_text().split()[1])
    return waited_ns * 1e-9


def _from_rank_0(texts: list[str]) -> list[str]:
    import torch
    import torch.distributed as dist

    encoded = bytearray("\n".join(texts).encode())
    size = torch.tensor([len(encoded)])
    dist.broadcast(size, 0)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        data = torch.frombuffer(encoded, dtype=torch.uint8)
    dist.broadcast(data, 0)
    return bytes(data.tolist()).decode().split("\n")


def _timer(event: Event, pause_s: float, kernels: Kernels) -> Callable[[], float]:
    """Performs the event, together with the other rank, and says how long it took."""
    if isinstance(event, Compute):
        return _KernelTimer(event, kernels)
    if event.collective == "host_copy":
        return _host_copy(event, getattr(kernels, "device", "cpu"))
    call = _there_and_back(event) if event.collective == "send" else exchange(event)
    legs = 2 if event.collective == "send" else 1
    return lambda: _together(call, pause_s) / legs


class _KernelTimer:
    def __init__(self, event: Compute, kernels: Kernels) -> None:
        self._event = event
        self._kernels = kernels
        self._times = 0

    def __call__(self) -> float:
        if self._times == 0:
            self._kernels.seconds(self._event, 1)
            once = self._kernels.seconds(self._event, 1)
            self._times = max(1, min(MOST_TIMES, round(self._kernels.repeat_s / max(once, 1e-9))))
        return self._kernels.seconds(self._event, self._times)


def _together(call: Callable[[], object], pause_s: float) -> float:
    import torch.distributed as dist

    if pause_s:
        time.sleep(pause_s)
    dist.barrier()
    if pause_s:
        time.sleep(pause_s)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _there_and_back(event: Communication) -> Callable[[], None]:
    """A message to the other rank, which waits for it, and one back."""
    import torch
    import torch.distributed as dist

    data = torch.zeros(max(1, event.size_bytes // ELEMENT))
    got = torch.zeros_like(data)
    first = dist.get_rank() == 0
    peer = 1 - dist.get_rank()

    def call() -> None:
        arrival = dist.irecv(got, peer)
        if first:
            sending = dist.isend(data, peer)
            _finish(arrival, sending)
        else:
            _finish(arrival)
            _finish(dist.isend(data, peer))

    return call


def _finish(*works: dist.Work | None) -> None:
    for work in works:
        assert work is not None, "both ranks are in the group"
        work.wait()


def _host_copy(event: Communication, device: str) -> Callable[[], float]:
    import torch

    size = max(1, event.size_bytes)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros(size, dtype=torch.uint8, pin_memory=device == "cuda")
    if device == "cuda":
        return lambda: between_cuda_events(lambda: target.copy_(source, non_blocking=True), 1)

    def timed() -> float:
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began

    return timed
