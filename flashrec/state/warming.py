"""Memory had before it is needed. No torch.

Fresh memory is zeroed by the kernel when it is first written to, page by page: where much is to be filled, that
takes longer than all the rest; and to map a page that is there costs more than to copy it. A replacement knows what
it will fill, and from where, long before it may.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np

from flashrec.errors import EnvironmentFault
from flashrec.state.memory import populate

_NICENESS = 15
_TOUCHED_AT_ONCE = 4 << 20
STUCK_S = 120.0  # for these: enough for a machine that pages


class Warmer:
    """Writes to every page of `memories`, whose values must not matter yet, then has every page of `mappings` there,
    whose bytes stay, in a thread of low priority. Holds the mappings until `let_go`."""

    def __init__(self, memories: Sequence[memoryview], mappings: Sequence[mmap.mmap] = ()) -> None:
        self._memories = list(memories)
        self._mappings = list(mappings)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashrec-warm", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """When this returns nothing is written any more: what has not been touched is not. Safe to call twice. Raises
        EnvironmentFault when the thread does not come back from what it touches."""
        self._stopped.set()
        self._thread.join(STUCK_S)
        if self._thread.is_alive():
            raise EnvironmentFault(
                f"a thread that touches memory has not come to {_TOUCHED_AT_ONCE >> 20} MiB in {STUCK_S:.0f} s"
            )
        self._memories.clear()

    def wait(self) -> None:
        """Until all is touched."""
        self._thread.join()

    def let_go(self) -> None:
        """Stop, and leave the mappings to whoever else has them."""
        self.stop()
        self._mappings.clear()

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
        for mapping in self._mappings:
            for offset in range(0, len(mapping), _TOUCHED_AT_ONCE):
                if self._stopped.is_set():
                    return
                populate(mapping, offset, _TOUCHED_AT_ONCE)
