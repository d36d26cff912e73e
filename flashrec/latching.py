"""A collective's failure, noted instead of raised.

An error that left a collective in the middle of a backward pass would leave FSDP2's prefetch state
and DDP's reducer unusable. So the pass runs to its end on garbage, and the step is thrown away at
the gate. What must not be garbage is whatever the host would act on: integer outputs are zeroed,
and an object collective, which would unpickle it, raises StepAbandoned.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
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
from flashrec.waiting import CUT_OFF, AwaitWork, LeftBehind

_OBJECT_COLLECTIVES = object_collective_codes()
_TENSOR_COLLECTIVES = function_codes("broadcast", "reduce")


# How long after the latch a collective may take to fail by itself before it is left behind. Nearly
# all do within milliseconds of the cut. Not those in the middle of a received message: gloo tells
# whoever waits for a message of a closed connection, unless part of it has arrived.
PATIENCE_S = 0.3


class Latch:
    """The first error of a generation, and the collectives under way in it.

    Thread-safe: it is tripped from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.epoch = 0
        self.text: str | None = None
        self.on_first: Callable[[str], None] | None = None
        self._since = 0.0
        self._under_way = 0
        self._watched: weakref.WeakSet[GuardedWork] = weakref.WeakSet()
        self._timer: threading.Timer | None = None

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
            self._since = time.monotonic()
            self._release_later()
            return True

    def renew(self) -> None:
        """Begin a new epoch with nothing latched. What is left of the old one is left behind."""
        with self._lock:
            self.epoch += 1
            self.text = None
            self._under_way = 0
        self._leave_behind()

    def begin(self) -> int:
        """A collective is issued; returns its epoch."""
        with self._lock:
            self._under_way += 1
            return self.epoch

    def end(self, epoch: int) -> None:
        """A collective has finished, or failed: nothing of it will touch a tensor any more."""
        with self._lock:
            if epoch == self.epoch:
                self._under_way -= 1

    @property
    def idle(self) -> bool:
        """Whether every collective of this epoch is known to have ended."""
        return self._under_way == 0

    def is_lost(self, epoch: int) -> bool:
        """Whether a collective of `epoch` that has not ended by now is not worth waiting for."""
        if epoch != self.epoch:
            return True
        return self.text is not None and time.monotonic() - self._since >= PATIENCE_S

    def watch(self, work: GuardedWork) -> None:
        """See to it that whoever waits for this work's future is released."""
        with self._lock:
            self._watched.add(work)
            self._release_later()

    def unwatch(self, work: GuardedWork) -> None:
        with self._lock:
            self._watched.discard(work)

    def _release_later(self) -> None:
        if self._timer is None and self.text is not None and self._watched:
            self._timer = threading.Timer(PATIENCE_S, self._on_timer)
            self._timer.daemon = True
            self._timer.start()

    def _on_timer(self) -> None:
        self._leave_behind()
        with self._lock:
            self._timer = None
            self._release_later()

    def _leave_behind(self) -> None:
        with self._lock:
            lost = [work for work in self._watched if work.is_lost()]
        for work in lost:
            work.leave_behind()


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
    """A real collective under way, whose failure is latched instead of raised.

    Waiting for it ends when it does, or soon after the latch: see PATIENCE_S.
    """

    def __init__(
        self,
        latch: Latch,
        epoch: int,
        what: str,
        work: Work,
        await_it: AwaitWork,
        result: Any,
        spoils: Any,
        entry: Entry | None,
        stand_in_source: int,
    ) -> None:
        super().__init__()
        self._latch = latch
        self._epoch = epoch
        self._what = what
        self._work = work
        self._await_it = await_it
        self._result = result
        self._spoils = spoils
        self._entry = entry
        self._stand_in_source = stand_in_source
        self._ended = False
        self._failed = False
        self._released = False
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not (self._ended or self._failed):
            try:
                self._await_it(self._work, self.is_lost, timeout)
            except RuntimeError as error:
                self._fail(error)
            else:
                self._complete()
        if self._failed:
            abandon_if_object_collective(self._what)
        return True

    def get_future(self) -> Future[Any]:
        if self._future is None:
            inner = self._work.get_future()
            self._future = Future()
            self._latch.watch(self)
            inner.add_done_callback(self._arrive)
        return self._future

    def is_completed(self) -> bool:
        return self._ended or self._work.is_completed()

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

    def is_lost(self) -> bool:
        return self._latch.is_lost(self._epoch)

    def leave_behind(self) -> None:
        """Release whoever waits for the future; the collective itself may be stuck."""
        self._fail(LeftBehind(CUT_OFF))
        self._release()

    def _arrive(self, future: Future[Any]) -> None:
        try:
            future.value()
        except RuntimeError as error:
            self._fail(error)
        else:
            self._complete()
        self._release()

    def _release(self) -> None:
        with self._lock:
            first, self._released = not self._released, True
        if first and self._future is not None:
            self._latch.unwatch(self)
            self._future.set_result(self._result)

    def _fail(self, error: RuntimeError) -> None:
        if self._ended:
            return
        self._failed = True
        self._latch.trip(describe(self._what, error), self._epoch)
        zero_integers(self._spoils)
        if self._entry is not None:
            self._entry.fail()
        if not isinstance(error, LeftBehind):
            self._end()

    def _complete(self) -> None:
        if self._entry is not None:
            entry, self._entry = self._entry, None
            source = self._work._source_rank() if entry.op == "recv_anysource" else None
            entry.fill(self._result, source)
        self._end()

    def _end(self) -> None:
        with self._lock:
            first, self._ended = not self._ended, True
        if first:
            self._latch.end(self._epoch)


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
