"""Chunks made smaller before they are sent, on threads of their own: the server's loop goes on meanwhile."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from flashrec.state.codec import Buffer
from flashrec.state.packing import pack
from flashrec.state.shardwire import ReplyHeader
from flashrecd.shards.answering import Later
from flashrecd.shards.counters import Counters

_NUM_THREADS = 2
# Of chunks that wait; with more, they go as they are.
_MAX_WAITING = 32
_NICENESS = 10
"""Training comes first."""


class Packer:
    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._threads = ThreadPoolExecutor(
            _NUM_THREADS,
            thread_name_prefix="flashrec-pack",
            initializer=lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS),
        )

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def take(self, header: ReplyHeader, data: Buffer, later: Later) -> bool:
        """Whether the reply will be given to `later`, packed where that pays. No: too many wait."""
        with self._lock:
            if self._num_waiting >= _MAX_WAITING:
                return False
            self._num_waiting += 1
        self._threads.submit(self._pack, header, data, later)
        return True

    def _pack(self, header: ReplyHeader, data: Buffer, later: Later) -> None:
        try:
            packed = pack(data)
        finally:
            with self._lock:
                self._num_waiting -= 1
        if packed is None:
            later(header, data)
            return
        self._counters.add(packed_bytes=memoryview(data).nbytes - len(packed))
        later(ReplyHeader(header.request_id, "packed"), packed)
