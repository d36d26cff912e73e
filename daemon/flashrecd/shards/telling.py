"""What a shard server tells others of what is sealed here: descriptions and private state, in pieces."""

from __future__ import annotations

import collections
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flashrec.errors import FlashrecError
from flashrec.state.arena import Arena
from flashrec.state.describing import describe, enclose
from flashrec.state.manifest import ARENA, REPLICA
from flashrec.state.private_slots import FULL, PRIVATE, REPLICA_FULL, REPLICA_PRIVATE, read_first
from flashrec.state.shardwire import PIECE_BYTES, Describe, Private, ReplyHeader
from flashrecd.shards.answering import Later, piece_of
from flashrecd.shards.counters import Counters

# What is larger than a piece is kept while it is asked for; the last one whatever its size.
_MAX_DOCUMENTS_BYTES = 256 << 20
# More than ask at once.
_MAX_TELLING = 256


class Telling:
    """Of `job`, below `root`; on a thread of its own, since it may have to read much."""

    def __init__(self, root: Path, job: str, counters: Counters) -> None:
        self._root = root
        self._job = job
        self._counters = counters
        self._lock = threading.Lock()
        self._num_telling = 0
        self._documents: collections.OrderedDict[tuple[type, str, int, int], bytes] = (
            collections.OrderedDict()
        )
        self._teller = ThreadPoolExecutor(1, thread_name_prefix="flashrec-tell")

    def close(self) -> None:
        self._teller.shutdown(cancel_futures=True)

    def tell(self, request: Describe | Private, later: Later) -> None:
        """A piece of a description or of private state."""
        with self._lock:
            if self._num_telling >= _MAX_TELLING:
                later(ReplyHeader(request.request_id, "failed", "too many ask at once"), b"")
                return
            self._num_telling += 1
        self._teller.submit(self._tell, request, later)

    def _tell(self, request: Describe | Private, later: Later) -> None:
        try:
            header, data = piece_of(self._document(request), request.offset, request.request_id)
        except (FlashrecError, OSError) as error:
            header, data = ReplyHeader(request.request_id, "gone", str(error)[:1000]), b""
        finally:
            with self._lock:
                self._num_telling -= 1
        self._counters.add(told_bytes=memoryview(data).nbytes)
        later(header, data)

    def _document(self, request: Describe | Private) -> bytes:
        """What the piece is of: made when the first is asked for, and kept for those who ask for the others."""
        key = (type(request), request.where, request.rank, request.version)
        found = self._documents.pop(key, None)
        if found is None or request.offset == 0:
            if isinstance(request, Describe):
                directory = self._root / (ARENA if request.where == "arena" else REPLICA)
                arena = Arena(directory, request.rank, self._job)
                found = describe(arena.read(request.version))
            else:
                names = (PRIVATE, FULL) if request.where == "arena" else (REPLICA_PRIVATE, REPLICA_FULL)
                found = enclose(read_first(self._root, names, request.rank, request.version))
        if len(found) > PIECE_BYTES:
            self._documents[key] = found
        while len(self._documents) > 1 and sum(map(len, self._documents.values())) > _MAX_DOCUMENTS_BYTES:
            self._documents.popitem(last=False)
        return found
