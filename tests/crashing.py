"""Processes that die at a chosen system call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class CrashingOs:
    """`os`, but the process ends right before or right after the n-th call that changes anything.

    `write_at_most`: writev() takes only so many bytes, as it may."""

    CHANGING = ("open", "posix_fallocate", "pwrite", "writev", "close", "rename", "unlink")

    def __init__(self, survive_calls: int, *, after: bool, write_at_most: int | None = None) -> None:
        self._left = survive_calls
        self._after = after
        self._write_at_most = write_at_most

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        if name not in self.CHANGING:
            return real

        def call(*args: Any) -> object:
            if self._left == 0 and not self._after:
                os._exit(77)
            if name == "writev" and self._write_at_most is not None:
                args = (args[0], [args[1][0][: self._write_at_most]])
            result = real(*args)
            if self._left == 0:
                os._exit(77)
            self._left -= 1
            return result

        return call


def in_crashing_child(
    modules: Sequence[ModuleType],
    survive_calls: int,
    *,
    after: bool,
    act: Callable[[], None],
    write_at_most: int | None = None,
) -> bool:
    """Run `act` in a forked child in which `modules` see a CrashingOs; whether it died there (or got through)."""
    pid = os.fork()
    if pid == 0:
        try:
            crashing = CrashingOs(survive_calls, after=after, write_at_most=write_at_most)
            for module in modules:
                module.os = crashing  # type: ignore[attr-defined]
            act()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 77), f"the child ended with code {code}"
    return code == 77
