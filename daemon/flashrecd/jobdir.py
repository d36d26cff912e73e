"""A job's directory in shared memory: made, measured, and removed however the job ends.

    /dev/shm/flashrec-<uid>-<daemon pid>-<job>/     0700, everything in it 0600

The name carries the daemon's pid, so that a daemon that starts can tell which ones nobody owns any more.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

from flashrec.errors import EnvironmentFault

PARENT = Path("/dev/shm")
FOLDERS = ("private", "layout", "prelude", "export")
MIN_FREE_BYTES = 16 << 20
_NAME = re.compile(r"flashrec-(\d+)-(\d+)-\w+")


def make(job: str, parent: Path = PARENT) -> Path:
    """A new directory for `job`; EnvironmentFault when shared memory is full, too small or not writable."""
    path = parent / f"flashrec-{os.getuid()}-{os.getpid()}-{job}"
    try:
        free = os.statvfs(parent)
        if free.f_bavail * free.f_frsize < MIN_FREE_BYTES:
            raise EnvironmentFault(
                f"{parent} has {free.f_bavail * free.f_frsize >> 20} MiB free; a job needs at least "
                f"{MIN_FREE_BYTES >> 20} MiB there, and room for its state"
            )
        path.mkdir(mode=0o700)
        for folder in FOLDERS:
            (path / folder).mkdir(mode=0o700)
    except OSError as error:
        raise EnvironmentFault(f"cannot make {path}: {error.strerror}") from None
    return path


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def remove_stale(parent: Path = PARENT) -> list[Path]:
    """Remove this user's directories whose daemon has died; returns them."""
    removed = []
    with contextlib.suppress(OSError):
        for path in parent.iterdir():
            match = _NAME.fullmatch(path.name)
            mine = match is not None and int(match[1]) == path.lstat().st_uid == os.getuid()
            if match is not None and mine and not _alive(int(match[2])):
                remove(path)
                removed.append(path)
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
