"""flashrec's calls, done by plain torch: what a chaos script imports for its undisturbed reference run.

Nothing here imports flashrec, so whatever flashrec might do wrong the reference does not do.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist


class _Section:
    valid = True


class PlainStep(AbstractContextManager["PlainStep"]):
    attempt = 0
    committed = False

    def __init__(self, index: int, batches: list[Any], epoch: int) -> None:
        self.index, self.batches, self.epoch = index, batches, epoch

    @property
    def batch(self) -> Any:
        return self.batches[0]

    def __exit__(self, *error: object) -> None:
        self.committed = error[0] is None
        global _next
        _next = self.index + 1


_next = 0
store: Any = None
"""Where the ranks meet; set by whoever starts them."""


def init(*, standby: str = "forked") -> None:
    dist.init_process_group("gloo", store=store, rank=rank(), world_size=world_size())


def protect(**objects: Any) -> None:
    pass


def steps(data: Any, total: int, micro: int = 1) -> Iterator[PlainStep]:
    loader: Iterable[Any] = data(rank(), world_size()) if callable(data) else data
    epoch, iterator = 0, _begin_epoch(loader, 0)
    for index in range(total):
        batches: list[Any] = []
        while len(batches) < micro:
            try:
                batches.append(next(iterator))
            except StopIteration:
                epoch += 1
                iterator = _begin_epoch(loader, epoch)
        yield PlainStep(index, batches, epoch)


def _begin_epoch(loader: Iterable[Any], epoch: int) -> Iterator[Any]:
    sampler = getattr(loader, "sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return iter(loader)


def step() -> Any:
    return _OwnStep()


class _OwnStep:
    def __enter__(self) -> PlainStep:
        self._step = PlainStep(_next, [], 0)
        return self._step

    def __exit__(self, *error: object) -> None:
        self._step.__exit__(*error)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def whole_step(*args: Any) -> Any:
            with self:
                return function(*args)

        return whole_step


def section() -> AbstractContextManager[_Section]:
    return nullcontext(_Section())


def current_step() -> int:
    return _next


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def report_loss(loss: float) -> None:
    pass
