"""Waits for a collective that can be given up.

gloo's cannot: when a connection breaks, gloo tells everyone who waits for a message on it, except
whoever waits for a message of which a part has already arrived. That one waits until the time-out,
on a thread of gloo's; the thread that asked for the collective need not.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Work

# How often a wait looks whether it should be given up. An ordinary wait ends before the first look.
_SLICE = timedelta(seconds=0.1)

CUT_OFF = "cut off in the middle of a message"


class LeftBehind(RuntimeError):
    """A collective has not ended, and is not waited for any longer."""


AwaitWork = Callable[[Work, Callable[[], bool], "timedelta | None"], None]


def await_work(work: Work, is_lost: Callable[[], bool], timeout: timedelta | None = None) -> None:
    """Wait until `work` has ended.

    Raises:
        LeftBehind: it has not, but `is_lost()`, or `timeout` (none if zero) has passed.
        RuntimeError: it failed.
    """
    deadline = time.monotonic() + timeout.total_seconds() if timeout else math.inf
    while True:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError as error:
            if work.is_completed():
                work.wait()  # raises what it failed with
                return
            if is_lost():
                raise LeftBehind(CUT_OFF) from error
            if time.monotonic() > deadline:
                raise LeftBehind(f"not finished after {timeout}") from error


class Bystander:
    """Waits for sends and receives in the caller's stead, so that the caller can leave.

    gloo's wait for these cannot be given up without breaking the connection.
    """

    def __init__(self) -> None:
        self._jobs: _Jobs | None = None

    def await_work(self, work: Work, is_lost: Callable[[], bool], timeout: timedelta | None = None) -> None:
        """As the function of this name, but without a time-out other than the group's."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._jobs,), name="flashrec-wait", daemon=True).start()
        errors: list[RuntimeError] = []
        done = threading.Event()
        self._jobs.put((work, errors, done))
        while not done.wait(_SLICE.total_seconds()):
            if is_lost():
                self.close()  # that thread is stuck until the time-out; the next wait gets another
                raise LeftBehind(CUT_OFF)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the thread as soon as it is free."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


_Jobs = queue.SimpleQueue[tuple[Work, list[RuntimeError], threading.Event] | None]


def _serve(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        work, errors, done = job
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(error)
        del work, job
        done.set()
