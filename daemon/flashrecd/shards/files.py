"""Complete files of a job, in pieces: the bulk of what a shard server gives.

Names are matched against the forms that exist before they come here, so no other file can be asked for. Bytes go from
the mapped file to the socket without a copy in Python.
"""

from __future__ import annotations

import collections
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from flashrec.state.shardwire import Get, ReplyHeader
from flashrecd.shards.counters import Counters

_MAX_MAPPED_FILES = 64


@dataclass(frozen=True)
class _MappedFile:
    identity: tuple[int, int, int]
    data: memoryview


class ShardFiles:
    """The files below `root`; knows nothing of sockets."""

    def __init__(self, root: Path, counters: Counters) -> None:
        self._root = root
        self._counters = counters
        self._mapped: collections.OrderedDict[str, _MappedFile] = collections.OrderedDict()

    def get(self, request: Get) -> tuple[ReplyHeader, bytes | memoryview]:
        try:
            data = self._open(request.name)
        except OSError as error:
            self._counters.add(missing_files=1)
            detail = f"{request.name}: {os.strerror(error.errno or 0)}"
            return ReplyHeader(request.request_id, "gone", detail), b""
        end = request.offset + request.size_bytes
        if end > data.nbytes:
            self._counters.add(missing_files=1)
            detail = f"{request.name} has {data.nbytes} bytes, not {end}"
            return ReplyHeader(request.request_id, "gone", detail), b""
        self._counters.sent_bytes += request.size_bytes  # by this thread alone
        return ReplyHeader(request.request_id, "ok"), data[request.offset : end]

    def _open(self, name: str) -> memoryview:
        """The file's bytes, mapped. Mappings are kept, the least used dropped; one that was replaced, cut or
        removed since is looked up anew. (Not one that was only written to: the mapping shows it, and keeps its
        number from being another's.) Raises OSError."""
        path = os.path.join(self._root, name)
        known = self._mapped.get(name)
        status = os.lstat(path)
        identity = (status.st_dev, status.st_ino, status.st_size)
        if known is not None and known.identity == identity:
            self._mapped.move_to_end(name)
            return known.data
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(22, "not a regular file")
            identity = (status.st_dev, status.st_ino, status.st_size)
            # A mapping holds its file; it goes when the last reply that shows part of it has been sent.
            data = memoryview(mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ) if status.st_size else b"")
        finally:
            os.close(fd)
        self._mapped[name] = _MappedFile(identity, data)
        self._mapped.move_to_end(name)
        while len(self._mapped) > _MAX_MAPPED_FILES:
            self._mapped.popitem(last=False)
        return data

    def forget_removed(self) -> None:
        """Let go of mappings whose file is no longer there: their memory counts as long as they are held."""
        for name in list(self._mapped):
            if not (self._root / name).exists():
                del self._mapped[name]
