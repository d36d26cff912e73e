"""The event log: one JSON object a line, for people and programs. Every decision of the core is in it.

{"time": "2026-01-31T12:00:00.123456+00:00", "job": "k3f9", "generation": 2, "step": 17, "rank": 3,
 "event": "rank lost", "reason": "killed by SIGKILL"}
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

MAX_BYTES = 64 << 20


class EventLog:
    """Appends to `path`; past MAX_BYTES the file is turned over once to `<path>.1`.

    A line that cannot be written (a full disk) is lost, which standard error says once: whoever writes it may be
    in the midst of a recovery. The listener hears it all the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener: Callable[[str], None] | None = None
        self._complained = False
        self._fd = self._open()

    def _open(self) -> int:
        return os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )

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
        try:
            self._append(line.encode() + b"\n")
        except OSError as error:
            if not self._complained:
                self._complained = True
                with contextlib.suppress(OSError):  # it may lie on the same disk
                    print(
                        f"flashrecd: {self.path} loses lines: {error.strerror}", file=sys.stderr, flush=True
                    )
        if self.listener is not None:
            self.listener(line)

    def _append(self, data: bytes) -> None:
        os.write(self._fd, data)
        if os.fstat(self._fd).st_size > MAX_BYTES:
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            old, self._fd = self._fd, self._open()
            os.close(old)

    def close(self) -> None:
        os.close(self._fd)
