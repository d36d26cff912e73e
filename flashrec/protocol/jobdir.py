"""A job's directory in shared memory: made, held, and removed however the job ends.

    /dev/shm/flashrec-<uid>-<job>-<random>/     0700, everything in it 0600

Whoever uses it, the daemon and each of the job's processes, holds a shared lock (flock) on the directory
itself. The kernel lets go of a dead process's lock, so whoever gets it exclusively knows that nobody uses the
directory any more, and removes it: a rank that outlived its daemon at its own end, or the next daemon.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

from flashrec.errors import EnvironmentFault

PARENT = Path("/dev/shm")
FOLDERS = ("private", "arena", "layout", "prelude", "export", "process")
MIN_FREE_BYTES = 16 << 20
_NAME = re.compile(r"flashrec-(\d+)-\w+-\w+")


class JobDirectory:
    """One process's hold on a job's directory."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, job: str, parent: Path = PARENT) -> "JobDirectory":
        """A new one; EnvironmentFault when shared memory is full, too small or not writable."""
        path = parent / f"flashrec-{os.getuid()}-{job}-{secrets.token_hex(4)}"
        try:
            space = os.statvfs(parent)
            free_bytes = space.f_bavail * space.f_frsize
            if free_bytes < MIN_FREE_BYTES:
                raise EnvironmentFault(
                    f"{parent} has {free_bytes / 2**20:.0f} MiB free; a job needs at least "
                    f"{MIN_FREE_BYTES >> 20} MiB there, and room for its state"
                )
            path.mkdir(mode=0o700)
            made = cls.hold(path)
            try:
                for folder in FOLDERS:
                    (path / folder).mkdir(mode=0o700)
            except BaseException:
                made.remove()
                raise
        except OSError as error:
            raise EnvironmentFault(f"cannot make {path}: {error.strerror}") from None
        return made

    @classmethod
    def hold(cls, path: Path) -> "JobDirectory":
        """Join those who use it. Raises OSError when it is not there, or is being removed."""
        lock = _open(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink == 0:
                raise FileNotFoundError(2, os.strerror(2), str(path))
        except BaseException:
            os.close(lock)
            raise
        return cls(path, lock)

    def remove(self) -> None:
        """With all that is in it; for the daemon, once the job's processes are gone."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._close()

    def is_alone(self) -> bool:
        """Whether nobody else holds it. For an instant nobody can join, if so."""
        alone = _nobody_else(self._lock)
        with contextlib.suppress(OSError):  # another asks just now
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return alone

    def leave(self) -> bool:
        """Let go of it; whoever is the last removes it (True)."""
        last = self._lock >= 0 and _nobody_else(self._lock)
        if last:
            shutil.rmtree(self.path, ignore_errors=True)
        self._close()
        return last

    def _close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def remove_stale(parent: Path = PARENT) -> list[Path]:
    """Remove this user's directories that no process holds; returns them."""
    removed = []
    for path in job_directories(parent):
        with contextlib.suppress(OSError):  # somebody else's under our name, or just removed
            if path.lstat().st_uid == os.getuid() and JobDirectory(path, _open(path)).leave():
                removed.append(path)
    return removed


def job_directories(parent: Path = PARENT) -> list[Path]:
    """What is called as a directory of this user's jobs is; whose it is, and what, is yet to be seen."""
    try:
        matches = [(path, _NAME.fullmatch(path.name)) for path in parent.iterdir()]
    except OSError:
        return []
    return sorted(path for path, match in matches if match and int(match[1]) == os.getuid())


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _nobody_else(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
