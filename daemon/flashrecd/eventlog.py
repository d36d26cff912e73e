"""The event log: one JSON object a line, for people and programs. Every decision of the core is in it.

{"time": "2026-01-31T12:00:00.123456+00:00", "job": "k3f9", "generation": 2, "step": 17, "rank": 3,
 "event": "rank lost", "reason": "killed by SIGKILL"}
"""

import json
import os
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

KEPT_LINES = 200
MAX_BYTES = 64 << 20


class EventLog:
    """Appends to `path`; past MAX_BYTES the file is turned over once to `<path>.1`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recent: deque[str] = deque(maxlen=KEPT_LINES)
        self.listener: Callable[[str], None] | None = None
        self._open()

    def _open(self) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._file = os.fdopen(fd, "a", buffering=1)

    def write(
        self,
        event: str,
        reason: str,
        *,
        job: str | None = None,
        generation: int | None = None,
        step: int | None = None,
        rank: int | None = None,
    ) -> None:
        line = json.dumps(
            {
                "time": datetime.now(UTC).isoformat(),
                "job": job,
                "generation": generation,
                "step": step,
                "rank": rank,
                "event": event,
                "reason": reason,
            }
        )
        self.recent.append(line)
        self._file.write(line + "\n")
        if self._file.tell() > MAX_BYTES:
            self._file.close()
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            self._open()
        if self.listener is not None:
            self.listener(line)

    def close(self) -> None:
        self._file.close()
