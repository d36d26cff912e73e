"""One connection to a shard server: chunks asked for ahead, within a credit, and taken as they come. No
torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

import zmq
from zmq.utils.monitor import recv_monitor_message

from flashrec.errors import ProtocolError
from flashrec.state.manifest import MAX_CHUNK_BYTES
from flashrec.state.shardwire import (
    MAX_HEADER_BYTES,
    Get,
    Stats,
    pack_request,
    unpack_header,
)

# Requests under way: enough to keep the wire full (8 MiB with 1 MiB chunks), few enough to bound memory.
CREDIT = 8
_SOCKET_BUFFER_BYTES = 4 << 20
# How soon a cancellation is noticed.
_POLL_S = 0.05

# The socket says that the server is gone long before a time-out would.
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED


class SourceFailed(Exception):
    """This source cannot give what it was asked for; try the next. The message says why."""


class ShardConnection:
    """A DEALER to the shard server at `address`, closed with the `with` block. Belongs to one thread."""

    def __init__(self, address: str, key: bytes, is_cancelled: Callable[[], bool]) -> None:
        self._address = address
        self._key = key
        self._is_cancelled = is_cancelled

    def __enter__(self) -> ShardConnection:
        # A context of its own: two I/O threads move more than one, and closing it leaves nothing behind.
        self._context = zmq.Context(io_threads=2)
        try:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._socket.rcvbuf = self._socket.sndbuf = _SOCKET_BUFFER_BYTES
            self._socket.maxmsgsize = MAX_CHUNK_BYTES
            self._monitor = self._socket.get_monitor_socket(_GONE)
            self._monitor.linger = 0
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SourceFailed(f"cannot connect to {self._address}: {error}") from error
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def fetch(
        self, name: str, ranges: Mapping[int, tuple[int, int]], stall_s: float, deadline: float
    ) -> Iterator[tuple[int, memoryview]]:
        """(id, bytes) of each of `ranges` (id -> (offset, size)), in any order; ends early when cancelled.

        Raises SourceFailed when the server is gone, refuses, or sends nothing for `stall_s` seconds."""
        waiting = iter(ranges.items())
        under_way: dict[int, int] = {}

        def ask() -> None:
            for request_id, (offset, size_bytes) in waiting:
                under_way[request_id] = size_bytes
                self._send(Get(request_id, name, offset, size_bytes), stall_s)
                return

        for _ in range(CREDIT):
            ask()
        while under_way:
            frames = self._receive(stall_s, deadline)
            if frames is None:
                return
            request_id, data = self._reply(frames)
            size_bytes = under_way.pop(request_id, None)
            if size_bytes is None:
                raise SourceFailed(f"it answered request {request_id}, which was not under way")
            if data.nbytes != size_bytes:
                raise SourceFailed(f"it sent {data.nbytes} bytes where {size_bytes} were asked for")
            ask()
            yield request_id, data

    def stats(self, timeout_s: float) -> bytes:
        """The server's counters as msgpack. Raises SourceFailed like `fetch`."""
        self._send(Stats(0), timeout_s)
        frames = self._receive(timeout_s, time.monotonic() + timeout_s)
        return b"" if frames is None else bytes(self._reply(frames)[1])

    def _send(self, request: Get | Stats, timeout_s: float) -> None:
        self._socket.sndtimeo = max(1, int(timeout_s * 1000))
        try:
            self._socket.send(pack_request(request, self._key))
        except zmq.Again:
            raise SourceFailed(f"it took no request for {timeout_s:g} s") from None

    def _receive(self, stall_s: float, deadline: float) -> list[zmq.Frame] | None:
        """The next message, or None when cancelled."""
        stalled_at = time.monotonic() + stall_s
        while not self._is_cancelled():
            now = time.monotonic()
            if now >= deadline:
                raise SourceFailed("the time was over")
            if now >= stalled_at:
                raise SourceFailed(f"it sent nothing for {stall_s:g} s")
            wait_s = min(_POLL_S, deadline - now, stalled_at - now)
            ready = dict(self._poller.poll(max(1, int(wait_s * 1000))))
            if self._socket in ready:
                frames = self._socket.recv_multipart(copy=False)
                assert all(isinstance(frame, zmq.Frame) for frame in frames)
                return frames
            if self._monitor in ready:
                event = recv_monitor_message(self._monitor)
                name = zmq.Event(event["event"]).name or ""
                raise SourceFailed(f"the connection ended ({name.lower()})")
        return None

    def _reply(self, frames: list[zmq.Frame]) -> tuple[int, memoryview]:
        if len(frames) != 2 or frames[0].buffer.nbytes > MAX_HEADER_BYTES:
            raise SourceFailed(f"its reply has {len(frames)} frames")
        try:
            header = unpack_header(frames[0].buffer)
        except ProtocolError as error:
            raise SourceFailed(f"it sent something else than a reply: {error}") from error
        if header.status != "ok":
            raise SourceFailed(f"it answered {header.status}: {header.detail}")
        return header.request_id, frames[1].buffer
