"""What both ends of a connection between two daemons have in common: a bound on what waits, and a socket monitor."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from flashrec.errors import ProtocolError
from flashrec.protocol.keys import ClusterKey
from flashrecd.cluster.info import NodeInfo

MAX_NODE_MESSAGE_BYTES = 4 << 20
"""Also what a stranger can make the leader hold, for each connection that is shaking hands."""
MAX_WAITING_BYTES = 64 << 20
"""Sent to a peer and not taken by it: one with more is too slow, and its connection ends."""
MESSAGE_OVERHEAD_BYTES = 256
MAX_QUEUED_MESSAGES = 1000
SUSPECT_AFTER_S = 3.0
_CONNECT_S = 5.0
T = TypeVar("T")
_serial = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Who is told what happens; see Cluster. All are called in the loop, one after the other."""

    log: Callable[[str, str], None]
    on_message: Callable[[str, Any], None]
    on_joined: Callable[[NodeInfo], None]
    on_heard: Callable[[str], None]
    on_closed: Callable[[str, str], None]


class Window:
    """How much waits between the two ends of a connection. Each end tells now and then what it has taken so far."""

    def __init__(self, limit_bytes: int = MAX_WAITING_BYTES) -> None:
        self.taken_bytes = 0
        """Of what came in."""
        self.limit_bytes = limit_bytes
        self._told = 0
        self._sent = 0
        self._acknowledged = 0

    def admit(self, size_bytes: int) -> bool:
        """Whether a message of that size may be sent; it counts as sent then."""
        if self._sent - self._acknowledged > self.limit_bytes:
            return False
        self._sent += size_bytes + MESSAGE_OVERHEAD_BYTES
        return True

    def acknowledge(self, taken_bytes: int) -> None:
        """The other end says how much it has taken. Raises ProtocolError for what cannot be."""
        if not self._acknowledged <= taken_bytes <= self._sent:
            raise ProtocolError(f"it has taken {taken_bytes} bytes of {self._sent}")
        self._acknowledged = taken_bytes

    def take(self, size_bytes: int) -> bool:
        """A message has been dealt with. Whether so much has that the other end should be told now."""
        self.taken_bytes += size_bytes + MESSAGE_OVERHEAD_BYTES
        return self.taken_bytes - self._told > self.limit_bytes // 8

    def told(self) -> int:
        """What to tell the other end, and that it is told."""
        self._told = self.taken_bytes
        return self.taken_bytes


def configure(socket: zmq.asyncio.Socket, *, suspect_after_s: float, host: str) -> None:
    """What a socket between nodes needs, whichever end it is."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_NODE_MESSAGE_BYTES)
    # From the start: a connection that fails keeps what it could not send as long as it is told by then.
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)  # a Window bounds it, and tells slow from dead
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    # libzmq's own heartbeats, answered by a busy daemon's I/O thread: they notice a host that is gone.
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(suspect_after_s * 1000 / 3)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(suspect_after_s * 1000)))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(_CONNECT_S * 1000))
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)


def secure(socket: zmq.asyncio.Socket, key: ClusterKey | None, *, server: bool) -> None:
    """With the key if there is one; without, the socket must be of the loopback interface."""
    if key is not None and server:
        key.as_server(socket)
    elif key is not None:
        key.as_client(socket)


class Monitor:
    """What happens to the connections of a socket: (event, value), in order."""

    def __init__(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, events: int) -> None:
        self._watched = socket
        self._pair = context.socket(zmq.PAIR)
        self._pair.linger = 0
        # Were it bounded, strangers could fill it, and libzmq's I/O thread would wait for us.
        self._pair.setsockopt(zmq.RCVHWM, 0)
        where = f"inproc://flashrec-monitor-{next(_serial)}"
        socket.monitor(where, events)
        self._pair.connect(where)

    async def wait(self) -> None:
        """Until something has happened, or a moment has passed."""
        await self._pair.poll(1000)

    def drain(self) -> list[tuple[int, int]]:
        """All that has happened so far, without waiting."""
        found: list[tuple[int, int]] = []
        while True:
            try:
                event = parse_monitor_message(_done(self._pair.recv_multipart(zmq.NOBLOCK)))
            except zmq.Again:
                return found
            found.append((int(event["event"]), int(event["value"])))

    def close(self) -> None:
        self._watched.disable_monitor()
        self._pair.close()


def receive_now(socket: zmq.asyncio.Socket) -> list[zmq.Frame] | None:
    """The next message if there is one."""
    try:
        return _done(socket.recv_multipart(zmq.NOBLOCK, copy=False))
    except zmq.Again:
        return None


def send_now(socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    """Send without waiting; nothing happens if the connection has closed."""
    with contextlib.suppress(zmq.ZMQError):
        _done(socket.send_multipart(frames, zmq.NOBLOCK))


def _done(operation: Awaitable[T]) -> T:
    """The outcome of what does not wait: pyzmq has it ready. (Its plain sockets would lose the loop's wake-ups.)"""
    assert isinstance(operation, asyncio.Future)
    outcome: T = operation.result()
    return outcome
