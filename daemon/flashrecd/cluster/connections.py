"""The TCP connections of the leader's socket, those of strangers among them.

libzmq accepts without a bound, and has no way to end one connection. Its monitor tells the descriptor of each, which
is shut down here where a connection has to end; libzmq then closes it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio

from flashrecd.cluster.links import Monitor

MAX_PENDING = 64
"""Connections that have not joined: of more than these the oldest are cut."""
JOIN_S = 10.0
"""How long a connection may take to join."""


@dataclass(eq=False)
class Connection:
    """One, from ACCEPTED to DISCONNECTED. `address`: (host, port) of the other end, None if it had gone already."""

    fd: int
    address: tuple[str, int] | None
    since: float
    member: bool = False
    is_open: bool = True


class Connections:
    """`turned_away(reason)` is called for each that ends without having joined."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        router: zmq.asyncio.Socket,
        clock: Callable[[], float],
        turned_away: Callable[[str], None],
    ) -> None:
        self._monitor = Monitor(context, router, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._clock = clock
        self._turned_away = turned_away
        self._by_fd: dict[int, Connection] = {}
        self._pending: dict[Connection, None] = {}
        self._closed: list[Connection] = []
        self._port = 0

    def listens_at(self, port: int) -> None:
        self._port = port

    async def wait(self) -> None:
        await self._monitor.wait()

    def drain(self) -> None:
        """Take note of what has happened so far."""
        for event, fd in self._monitor.drain():
            if event == zmq.EVENT_ACCEPTED:
                connection = Connection(fd, self._peer_of(fd), self._clock())
                self._by_fd[fd] = connection
                self._pending[connection] = None
                if len(self._pending) > MAX_PENDING:
                    self._end_oldest()
            elif (ended := self._by_fd.pop(fd, None)) is not None:
                ended.is_open = False
                if ended.member:
                    self._closed.append(ended)
                elif ended in self._pending:
                    del self._pending[ended]
                    self._turned_away(f"{_text(ended.address)} went without having joined")

    def claim(self, fd: int) -> Connection | None:
        """The connection of a message that came through `fd` just now, which joins; None if it is closed already."""
        self.drain()
        connection = self._by_fd.get(fd)
        if connection is not None:
            connection.member = True
            self._pending.pop(connection, None)
        return connection

    def take_closed(self) -> list[Connection]:
        """Connections of members that have closed since the last call."""
        closed, self._closed = self._closed, []
        return closed

    def cut(self, connection: Connection) -> None:
        """End it, if it has not ended."""
        self.drain()
        if connection.is_open:
            self._shut(connection)

    def cut_late(self) -> None:
        """End those that have been here for long and have not joined."""
        self.drain()
        while self._pending:
            oldest = next(iter(self._pending))
            if self._clock() - oldest.since < JOIN_S:
                return
            self._end_oldest()

    def close(self) -> None:
        self._monitor.close()

    def _end_oldest(self) -> None:
        oldest = next(iter(self._pending))
        del self._pending[oldest]
        self._turned_away(f"{_text(oldest.address)} did not join")
        self._shut(oldest)

    def _shut(self, connection: Connection) -> None:
        # A copy of the descriptor stays what it is, whatever gets the number meanwhile.
        copy = _copy(connection.fd)
        if copy is not None:
            with copy:
                if _ends(copy) == (self._port, connection.address):
                    with contextlib.suppress(OSError):  # reset by the other end
                        copy.shutdown(socket.SHUT_RDWR)

    def _peer_of(self, fd: int) -> tuple[str, int] | None:
        copy = _copy(fd)
        if copy is None:
            return None
        with copy:
            return _ends(copy)[1]


def _copy(fd: int) -> socket.socket | None:
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:  # no socket any more
        os.close(copy)
        return None


def _ends(of: socket.socket) -> tuple[int, tuple[str, int] | None]:
    """(own port, address of the other end)."""
    try:
        own, other = of.getsockname(), of.getpeername()
        return int(own[1]), (str(other[0]), int(other[1]))
    except (OSError, IndexError, ValueError):  # not connected, or of another family
        return 0, None


def _text(address: tuple[str, int] | None) -> str:
    return "a connection" if address is None else f"the connection from {address[0]}:{address[1]}"
