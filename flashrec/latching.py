"""A collective's failure, noted instead of raised.

An error that left a collective in the middle of a backward pass would leave FSDP2's prefetch state
and DDP's reducer unusable. So the pass runs to its end on garbage, and the step is thrown away at
the gate. What must not be garbage is whatever the host would act on: integer outputs are zeroed,
and an object collective, which would unpickle it, raises StepAbandoned.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed import DistError, Work
from torch.futures import Future

from flashrec.detached import zero_integers
from flashrec.errors import StepAbandoned
from flashrec.prelude import Entry
from flashrec.torch_private import function_codes, object_collective_codes

_OBJECT_COLLECTIVES = object_collective_codes()
_TENSOR_COLLECTIVES = function_codes("broadcast", "reduce")


class Latch:
    """The first error of a generation. Thread-safe: it is tripped from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.epoch = 0
        self.text: str | None = None
        self.on_first: Callable[[str], None] | None = None

    def trip(self, reason: str, epoch: int) -> None:
        """A collective issued in `epoch` failed. Says so once, and only if that epoch still is."""
        if self.set(reason, epoch) and self.on_first is not None:
            self.on_first(reason)

    def set(self, reason: str, epoch: int | None = None) -> bool:
        """Latch without telling anyone; True if this was the first reason."""
        with self._lock:
            if self.text is not None or (epoch is not None and epoch != self.epoch):
                return False
            self.text = reason
            return True

    def renew(self) -> None:
        """Begin a new epoch with nothing latched."""
        with self._lock:
            self.epoch += 1
            self.text = None


class FinishedWork(Work):
    """What a collective returns while detached or latched: done, whatever it did."""

    def __init__(self, result: Any, source: int) -> None:
        super().__init__()
        self._result = result
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None

    def result(self) -> Any:
        return self._result

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank


class GuardedWork(Work):
    """A real collective under way, whose failure is latched instead of raised."""

    def __init__(
        self,
        latch: Latch,
        what: str,
        work: Work,
        result: Any,
        spoils: Any,
        epoch: int,
        entry: Entry | None,
        stand_in_source: int,
    ) -> None:
        super().__init__()
        self._latch = latch
        self._what = what
        self._work = work
        self._result = result
        self._spoils = spoils
        self._epoch = epoch
        self._entry = entry
        self._stand_in_source = stand_in_source
        self._failed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            if timeout:
                self._work.wait(timeout)
            else:
                self._work.wait()
        except RuntimeError as error:
            self._fail(error)
            abandon_if_object_collective(self._what)
            return True
        self._complete()
        return True

    def get_future(self) -> Future[Any]:
        return self._work.get_future().then(self._value_or_latch)

    def is_completed(self) -> bool:
        return self._failed or self._work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._result

    def source_rank(self) -> int:
        return self._stand_in_source if self._failed else self._work._source_rank()

    _source_rank = source_rank

    def _value_or_latch(self, future: Future[Any]) -> Any:
        try:
            value = future.value()
        except RuntimeError as error:
            self._fail(error)
            return self._result
        self._complete()
        return value

    def _fail(self, error: RuntimeError) -> None:
        self._failed = True
        self._latch.trip(describe(self._what, error), self._epoch)
        zero_integers(self._spoils)
        if self._entry is not None:
            self._entry.fail()

    def _complete(self) -> None:
        if self._entry is not None:
            entry, self._entry = self._entry, None
            source = self._work._source_rank() if entry.op == "recv_anysource" else None
            entry.fill(self._result, source)


def describe(what: str, error: BaseException) -> str:
    """One line: which collective, and the first line of what the transport said."""
    lines = str(error).splitlines()
    return f"{what}: {lines[0] if lines else type(error).__name__}"


def called_through_torch() -> bool:
    """Whether the collective two calls up was asked for by torch.distributed's Python function.

    If not, it was torch's C++ (DDP's reducer, say), or someone who holds the group itself.
    """
    return sys._getframe(3).f_code in _TENSOR_COLLECTIVES


def comes_from_transport(error: RuntimeError) -> bool:
    """Whether issuing a collective failed because a connection had, rather than being refused."""
    return isinstance(error, DistError) or "gloo/transport" in str(error)


def abandon_if_object_collective(what: str) -> None:
    """Raise StepAbandoned if torch is about to unpickle what this failed collective "received"."""
    name = object_collective()
    if name is not None:
        raise StepAbandoned(f"{name} ({what}) cannot finish: a failure elsewhere ended this step")


def object_collective() -> str | None:
    """Name of the torch object collective that is calling, if one is."""
    # Looked for on the stack, and only where something went wrong: replacing torch's functions
    # would miss whoever imported them before.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _OBJECT_COLLECTIVES:
            return frame.f_code.co_name
        frame = frame.f_back
    return None
