"""Processes whose daemon was killed: they become this process's children, which then ends them."""

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

from flashrec.prctl import is_subreaper, set_subreaper

_ROUNDS = 100
"""An orphan that dies leaves orphans of its own."""


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Within it, orphans below this process become its children; after it, as it was before. Raises OSError."""
    before = is_subreaper()
    set_subreaper(True)
    try:
        yield
    finally:
        set_subreaper(before)


def end_orphans(spared: Collection[int] = ()) -> None:
    """Kill the children of this process, and wait for them. `spared`: those that somebody else waits for."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for _ in range(_ROUNDS):
        pids = {int(pid) for pid in children.read_text().split()} if children.exists() else set()
        if not pids.difference(spared):
            return
        for pid in pids.difference(spared):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
