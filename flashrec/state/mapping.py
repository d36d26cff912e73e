"""Files in shared memory, mapped once in a process. Free of torch and numpy, as the daemon is."""

from __future__ import annotations

import mmap
import os
import weakref

_mapped: weakref.WeakValueDictionary[tuple[int, int], mmap.mmap] = weakref.WeakValueDictionary()


def map_file(fd: int, size_bytes: int) -> mmap.mmap:
    """The file's first `size_bytes` as shared, writable memory. As long as somebody here has a mapping of it, that
    one: its pages are there already, and to map 4 KiB costs more than to copy them."""
    found = mapping_of(fd)
    if found is None or len(found) < size_bytes:
        found = mmap.mmap(fd, size_bytes)
        _mapped[_identity(fd)] = found
    return found


def mapping_of(fd: int) -> mmap.mmap | None:
    """What `map_file` gave for this file and somebody still has. The mapping keeps the file, so no other can get its
    number meanwhile."""
    return _mapped.get(_identity(fd))


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
