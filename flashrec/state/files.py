"""Files in shared memory that are complete or not there: written aside, then renamed. Free of torch."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from flashrec.errors import EnvironmentFault
from flashrec.state.codec import Buffer

# A name that starts with this is being written (or its writer died): no reader looks at it.
ASIDE = "."

_GATHER_BYTES = 4 << 20
_IOV_MAX = 512
_counter = itertools.count()


def make_directory(path: Path) -> None:
    """Make `path` (and its parents) as a directory of mode 0700, if it is not there."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise fault(path, 0, error) from error


def write_whole(path: Path, buffers: Iterable[Buffer], size_bytes: int) -> None:
    """Make the file `path`, mode 0600, of the concatenated `buffers` (`size_bytes` in all), replacing one
    that is there. The buffers are taken one by one, so a generator need not hold them all.

    Whoever opens `path` finds it whole, whenever this process dies. Raises EnvironmentFault, leaving nothing
    behind, when the file cannot be written. (No fsync: the file need survive its writer, not the machine.)"""
    # Strings, not paths: this runs in every step, and a Path costs as much as a system call.
    directory, name = os.path.split(path)
    aside = os.path.join(directory, f"{ASIDE}{name}.{os.getpid()}.{next(_counter)}")
    try:
        fd = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise fault(path.parent, size_bytes, error) from error
    try:
        try:
            _write_all(fd, buffers)
        finally:
            os.close(fd)
        os.rename(aside, path)
    except BaseException as error:
        # Free bytes are counted before the torso is removed: they say why.
        problem = fault(path.parent, size_bytes, error) if isinstance(error, OSError) else None
        with contextlib.suppress(OSError):
            os.unlink(aside)
        if problem is not None:
            raise problem from error
        raise


def remove(path: Path) -> bool:
    """Remove a file; False when it is not there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise fault(path.parent, 0, error) from error
    return True


def free_bytes(directory: Path) -> int:
    """Bytes an unprivileged process can still write there; 0 when that cannot be found out."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def fault(directory: Path, needed_bytes: int, error: OSError) -> EnvironmentFault:
    """The error of the environment that a failed system call in `directory` amounts to."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return no_space(directory, needed_bytes)
    what = os.strerror(error.errno) if error.errno is not None else str(error)
    return EnvironmentFault(f"cannot write in {directory}: {what} ({needed_bytes} bytes to write)")


def no_space(directory: Path, needed_bytes: int) -> EnvironmentFault:
    return EnvironmentFault(
        f"{directory} is full: {needed_bytes} bytes needed, {free_bytes(directory)} free; "
        "give it more room (for /dev/shm: mount -o remount,size=...; in a container: --shm-size)"
    )


def _write_all(fd: int, buffers: Iterable[Buffer]) -> None:
    """All of `buffers`, gathered into few calls."""
    pending: list[memoryview] = []
    pending_bytes = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if view.nbytes:
            pending.append(view)
            pending_bytes += view.nbytes
        if pending_bytes >= _GATHER_BYTES or len(pending) == _IOV_MAX:
            _write_views(fd, pending)
            pending, pending_bytes = [], 0
    _write_views(fd, pending)


def _write_views(fd: int, views: list[memoryview]) -> None:
    """All of `views`, whatever part of them each call takes."""
    first = 0
    while first < len(views):
        written = os.writev(fd, views[first:])
        while first < len(views) and written >= views[first].nbytes:
            written -= views[first].nbytes
            first += 1
        if written:
            views[first] = views[first][written:]
