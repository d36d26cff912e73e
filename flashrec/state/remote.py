"""One connection to a shard server: chunks asked for ahead, within a credit, and taken as they come. No
torch."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from flashrec.errors import ProtocolError
from flashrec.state.manifest import MAX_CHUNK_BYTES
from flashrec.state.shardwire import (
    MAX_HEADER_BYTES,
    PIECE_BYTES,
    Get,
    ReplyHeader,
    Request,
    Stats,
    pack_request,
    unpack_header,
)

# Requests under way: enough to keep the wire full (8 MiB with 1 MiB chunks), few enough to bound memory.
CREDIT = 8
_SOCKET_BUFFER_BYTES = 4 << 20
# How soon a cancellation is noticed.
_POLL_S = 0.05

# The socket says that the server is gone, or does not let us in, long before a time-out would.
GONE = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# Of what comes in pieces: more than anything that is described, far less than a machine has.
_MAX_DOCUMENT_BYTES = 4 << 30


def _keep_freed_memory() -> None:
    """Have malloc keep the memory of a freed message for the next one.

    As long as no large block has been freed, it gives such memory back to the kernel each time, and to have its pages
    again costs as much as to receive the bytes. Freeing one block of nearly 32 MiB, untouched, teaches glibc what
    it would learn by itself later; other libraries do not mind."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
    libc.free(libc.malloc((32 << 20) - 2 * mmap.PAGESIZE))


_keep_freed_memory()


class SourceFailed(Exception):
    """This source cannot give what it was asked for; try the next. The message says why."""


class ShardConnection:
    """A DEALER to the shard server at `address`, closed with the `with` block. Belongs to one thread. `secure` sets the
    socket's security before it is connected."""

    def __init__(
        self,
        address: str,
        key: bytes,
        is_cancelled: Callable[[], bool],
        secure: Callable[[Any], None] | None = None,
    ) -> None:
        self._address = address
        self._key = key
        self._is_cancelled = is_cancelled
        self._secure = secure

    def __enter__(self) -> ShardConnection:
        # A context of its own: two I/O threads move more than one, and closing it leaves nothing behind.
        self._context = zmq.Context(io_threads=2)
        try:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._socket.rcvbuf = self._socket.sndbuf = _SOCKET_BUFFER_BYTES
            self._socket.maxmsgsize = MAX_CHUNK_BYTES
            if self._secure is not None:
                self._secure(self._socket)
            self._monitor = self._socket.get_monitor_socket(GONE)
            self._monitor.linger = 0
            self._socket.connect(self._address)
        except BaseException as error:
            self._context.destroy(linger=0)
            if isinstance(error, zmq.ZMQError):
                raise SourceFailed(f"cannot connect to {self._address}: {error}") from error
            raise
        self._socket.rcvtimeo = int(1000 * _POLL_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def has_ended(self) -> bool:
        """Whether it has broken since it was used last."""
        return bool(self._monitor.poll(0))

    def fetch(
        self,
        name: str,
        ranges: Mapping[int, tuple[int, int]],
        stall_s: float,
        deadline: float,
        *,
        packed: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[int, memoryview]]:
        """(id, bytes) of each of `ranges` (id -> (offset, size)), in any order; ends early when cancelled. `packed`:
        let them travel packed where that pays, and hear of each chunk that did its bytes on the wire and those it has.

        Raises SourceFailed when the server is gone, refuses, or sends nothing for `stall_s` seconds."""
        may_pack = packed is not None
        asked = (Get(key, name, offset, size_bytes, may_pack) for key, (offset, size_bytes) in ranges.items())
        for header, data in self._exchange(asked, stall_s, deadline):
            size_bytes = ranges[header.request_id][1]
            if header.status == "packed":
                if packed is None:
                    raise SourceFailed("it packed what was to come as it is")
                packed(data.nbytes, size_bytes)
                data = _unpacked(data, size_bytes)
            if data.nbytes != size_bytes:
                raise SourceFailed(f"it sent {data.nbytes} bytes where {size_bytes} were asked for")
            yield header.request_id, data

    def document(self, ask: Callable[[int], Request], stall_s: float, deadline: float) -> bytearray | None:
        """What comes in pieces: `ask` makes the request for the one at an offset, with that as its id. None when
        cancelled. Raises SourceFailed like `fetch`."""
        whole: bytearray | None = None
        for header, data in self._exchange(iter([ask(0)]), stall_s, deadline):
            if header.total_bytes > _MAX_DOCUMENT_BYTES:
                raise SourceFailed(f"it has {header.total_bytes} bytes to tell, which nothing has")
            whole = bytearray(header.total_bytes)
            self._place(whole, 0, data)
        if whole is None:
            return None
        count = 1
        rest = range(PIECE_BYTES, len(whole), PIECE_BYTES)
        for header, data in self._exchange(map(ask, rest), stall_s, deadline):
            if header.total_bytes != len(whole):
                raise SourceFailed("what it tells has changed meanwhile")
            self._place(whole, header.request_id, data)
            count += 1
        return whole if count == 1 + len(rest) else None

    def _place(self, whole: bytearray, offset: int, data: memoryview) -> None:
        size_bytes = min(PIECE_BYTES, len(whole) - offset)
        if data.nbytes != size_bytes:
            raise SourceFailed(f"it sent {data.nbytes} bytes where {size_bytes} were asked for")
        whole[offset : offset + size_bytes] = data

    def call(self, request: Request, timeout_s: float) -> bytes:
        """The data of one answer; b"" when cancelled. Raises SourceFailed like `fetch`."""
        deadline = time.monotonic() + timeout_s
        return b"".join(bytes(data) for _, data in self._exchange(iter([request]), timeout_s, deadline))

    def stats(self, timeout_s: float) -> bytes:
        """The server's counters as msgpack. Raises SourceFailed like `fetch`."""
        return self.call(Stats(0), timeout_s)

    def _exchange(
        self, requests: Iterator[Request], stall_s: float, deadline: float
    ) -> Iterator[tuple[ReplyHeader, memoryview]]:
        """Ask all of `requests`, CREDIT of them at a time; the answers as they come, until cancelled."""
        under_way: set[int] = set()

        def ask() -> None:
            request = next(requests, None)
            if request is not None:
                under_way.add(request.request_id)
                self._send(request, stall_s)

        for _ in range(CREDIT):
            ask()
        while under_way:
            frames = self._receive(stall_s, deadline)
            if frames is None:
                return
            header, data = self._reply(frames)
            if header.request_id not in under_way:
                raise SourceFailed(f"it answered request {header.request_id}, which was not under way")
            under_way.remove(header.request_id)
            ask()
            yield header, data

    def _send(self, request: Request, timeout_s: float) -> None:
        data = pack_request(request, self._key)
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self._socket.sndtimeo = max(1, int(timeout_s * 1000))
            try:
                self._socket.send(data)
            except zmq.Again:
                raise SourceFailed(f"it took no request for {timeout_s:g} s") from None

    def _receive(self, stall_s: float, deadline: float) -> list[zmq.Frame] | None:
        """The next message, or None when cancelled."""
        stalled_at = time.monotonic() + stall_s
        while not self._is_cancelled():
            try:
                # Nothing is polled in between: where messages come thick and fast, that costs as much as they do.
                return self._socket.recv_multipart(copy=False)
            except zmq.Again:
                pass
            if self._monitor.poll(0):
                event = recv_monitor_message(self._monitor)
                name = zmq.Event(event["event"]).name or ""
                raise SourceFailed(f"the connection ended ({name.lower()})")
            now = time.monotonic()
            if now >= deadline:
                raise SourceFailed("the time was over")
            if now >= stalled_at:
                raise SourceFailed(f"it sent nothing for {stall_s:g} s")
        return None

    def _reply(self, frames: list[zmq.Frame]) -> tuple[ReplyHeader, memoryview]:
        if len(frames) != 2 or frames[0].buffer.nbytes > MAX_HEADER_BYTES:
            raise SourceFailed(f"its reply has {len(frames)} frames")
        try:
            header = unpack_header(frames[0].buffer)
        except ProtocolError as error:
            raise SourceFailed(f"it sent something else than a reply: {error}") from error
        if header.status not in ("ok", "packed"):
            raise SourceFailed(f"it answered {header.status}: {header.detail}")
        return header, frames[1].buffer


def _unpacked(data: memoryview, size_bytes: int) -> memoryview:
    # Not before it is needed: it costs numpy and zstandard.
    from flashrec.state.packing import unpack

    try:
        return memoryview(unpack(data, size_bytes))
    except ProtocolError as error:
        raise SourceFailed(f"it sent {error}") from error
