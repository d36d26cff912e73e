"""How long a shard server goes on whose daemon has died: as long as somebody uses the job's directory, and a while."""

from __future__ import annotations

import os
import time
from pathlib import Path

from flashrec.protocol.jobdir import JobDirectory

LOOK_S = 0.5


class Lingering:
    """Of this process, which holds the directory, too: what it keeps for other nodes may be needed by them alone.
    Raises OSError."""

    def __init__(self, root: Path, owner_pid: int, linger_s: float) -> None:
        self._hold = JobDirectory.hold(root)
        self._owner_pid = owner_pid
        self._linger_s = linger_s
        self._look_at = 0.0
        self._alone_since: float | None = None

    def is_over(self) -> bool:
        """Cheap while the daemon that started this process lives."""
        now = time.monotonic()
        if os.getppid() == self._owner_pid or now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        if not self._hold.is_alone():
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        return self._alone_since is not None and now - self._alone_since > self._linger_s

    def leave(self) -> None:
        self._hold.leave()
