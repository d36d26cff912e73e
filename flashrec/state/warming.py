"""Memory had before it is needed. No torch.

Fresh memory is zeroed by the kernel when it is first written to, page by page: where much is to be filled, that
takes longer than all the rest. A replacement knows what it will fill long before it may.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

_NICENESS = 15
_TOUCHED_AT_ONCE = 4 << 20


class Warmer:
    """Writes to every page of `memories`, whose values must not matter yet, in a thread of low priority."""

    def __init__(self, memories: Sequence[memoryview]) -> None:
        self._memories = list(memories)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashrec-warm", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """When this returns nothing is written any more: what has not been touched is not. Safe to call twice."""
        self._stopped.set()
        self._thread.join()
        self._memories.clear()

    def wait(self) -> None:
        """Until all is touched."""
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + _NICENESS)
        for memory in self._memories:
            pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
            at_once = _TOUCHED_AT_ONCE // mmap.PAGESIZE
            for start in range(0, len(pages), at_once):
                if self._stopped.is_set():
                    return
                pages[start : start + at_once] = 0
