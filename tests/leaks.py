"""What a test must not leave behind: processes, threads, descriptors, shared memory, temporary files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from flashrec.prctl import is_subreaper
from flashrecd.supervise.descendants import descendants_of, process_stat

MARK = "FLASHREC_TEST"
"""Set to another value in each test: a process that inherited it is this test's, whoever its parent is now."""
PATIENCE_S = 20.0
SHARED_MEMORY = Path("/dev/shm")
# A process killed with SIGKILL cannot remove what torch and multiprocessing keep in the temporary directory.
NOT_OURS = re.compile(r"pymp-|torchinductor_|torchelastic_")


class Census:
    """What there was before a test; `left()` names what there is besides, once it has had time to go."""

    def __init__(self, mark: str, temporary: Path) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self._temporary = temporary
        self._processes = set(descendants_of(os.getpid()))
        self._shared = set(os.listdir(SHARED_MEMORY))
        self._threads = set(threading.enumerate())
        self._descriptors = _descriptors()
        self._subreaper = is_subreaper()

    def left(self, patience_s: float = PATIENCE_S) -> list[str]:
        """One line for each thing."""
        deadline = time.monotonic() + patience_s
        while (found := self._now()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _now(self) -> list[str]:
        processes = set(descendants_of(os.getpid())) - self._processes | self._marked()
        names = [f"process {pid}: {_command(pid)}" for pid in sorted(processes) if process_stat(pid)]
        names += [f"{SHARED_MEMORY / name}" for name in self._shared_memory()]
        names += [
            f"thread {t.name}" for t in threading.enumerate() if t not in self._threads and not _pool(t)
        ]
        names += [f"descriptor {fd}: {what}" for fd, what in sorted(_descriptors() - self._descriptors)]
        names += [
            f"temporary {path.name}" for path in self._temporary.iterdir() if not NOT_OURS.match(path.name)
        ]
        if is_subreaper() != self._subreaper:
            names.append(f"a child subreaper: {not self._subreaper}, where it was {self._subreaper}")
        return names

    def _marked(self) -> set[int]:
        found = set()
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) != os.getpid():
                with contextlib.suppress(OSError):
                    if self._mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        found.add(int(name))
        return found

    def _shared_memory(self) -> list[str]:
        """New files that no live process uses: another test run on this machine has files there, too."""
        return [name for name in set(os.listdir(SHARED_MEMORY)) - self._shared if _abandoned(name)]


def _abandoned(name: str) -> bool:
    if made_by := re.match(r"torch_(\d+)_", name):
        return process_stat(int(made_by[1])) is None
    if not re.fullmatch(r"flashrec-\d+-\w+-\w+", name):
        return False
    try:
        fd = os.open(SHARED_MEMORY / name, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _descriptors() -> set[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("/proc/"):  # the listing itself
                found.add((int(name), target))
    return found


def _pool(thread: threading.Thread) -> bool:
    """Kept by libraries for the whole process, on purpose."""
    return thread.name.startswith(("ThreadPoolExecutor", "QueueFeederThread", "pytest_timeout"))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "?"


def wait_until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> bool:
    """Poll; whether it came true in time."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
