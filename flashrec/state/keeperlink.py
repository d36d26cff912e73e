"""A rank's connection to one of its keepers: what is to be said is said, again after it breaks, and answers are told
apart. No torch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import zmq
from zmq.utils.monitor import recv_monitor_message

from flashrec.errors import ProtocolError
from flashrec.state.manifest import MAX_CHUNK_BYTES
from flashrec.state.remote import GONE
from flashrec.state.shardwire import ReplyHeader, Request, pack_request, unpack_header

Secure = Callable[[Any], None]
"""Sets a socket's security before it is connected."""

Kind = Literal["sealed", "private", "full"]

_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0


@dataclass(frozen=True)
class KeeperAddress:
    """A node that keeps replicas, and where its shard server is."""

    node: int
    address: str

    def __str__(self) -> str:
        return f"node {self.node} ({self.address})"


@dataclass(frozen=True)
class Said:
    """One thing said about a version; `serial` tells it from what was said before."""

    kind: Kind
    version: int
    generation: int
    serial: int
    payload: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        what = "sealed version" if self.kind == "sealed" else "the private state of version"
        return f"{what} {self.version}"


Saying = Callable[[Said], Iterator[tuple[Request, memoryview | None]]]
"""The messages that say something, their data beside them; ids are given when they are sent."""


class Broken(Exception):
    """A connection has ended; the message says how."""


class KeeperLink:
    """The connection to one keeper; made when there is something to say, and again when it breaks. Belongs to the
    replicator's thread."""

    def __init__(self, address: KeeperAddress, secure: Secure, token: bytes) -> None:
        self._address = address
        self._secure = secure
        self._token = token
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: Any = None
        self._ids = itertools.count(1)
        # Request id -> what it says, and whether its answer is the one that counts.
        self._under_way: dict[int, tuple[Said, bool]] = {}
        self._later: dict[int, float] = {}
        self._retry_s = _FIRST_RETRY_S
        self.retry_at = 0.0

    def say(
        self,
        context: zmq.Context[Any],
        what: Sequence[Said],
        make: Saying,
        now: float,
    ) -> float:
        """Send what is not under way yet; returns when to look again. Raises Broken."""
        serials = {said.serial for said in what}
        self._later = {serial: at for serial, at in self._later.items() if serial in serials}
        under_way = {said.serial for said, _ in self._under_way.values()}
        waiting = [said for said in what if said.serial not in under_way]
        if not waiting:
            return float("inf")
        if now < self.retry_at:
            return self.retry_at
        due = [said for said in waiting if self._later.get(said.serial, 0) <= now]
        if self._socket is None and due:
            self._connect(context)
        for said in due:
            requests = list(make(said))
            for number, (request, data) in enumerate(requests, 1):
                self._send(request, data, said, number == len(requests))
        return min((self._later[said.serial] for said in waiting if said not in due), default=float("inf"))

    def later(self, said: Said) -> None:
        """It could not be done now; say it again in a while."""
        self._later[said.serial] = time.monotonic() + self._back_off()

    def register(self, poller: zmq.Poller) -> None:
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)

    def listen(self, ready: dict[Any, int]) -> list[tuple[Said, ReplyHeader]]:
        """What has been answered. Raises Broken."""
        if self._socket is None:
            return []
        answers = []
        while self._socket in ready:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            answer = self._answer(frames)
            if answer is not None:
                answers.append(answer)
        if not answers and self._monitor in ready:
            event = recv_monitor_message(self._monitor)
            name = zmq.Event(event["event"]).name or ""
            self._break(f"the connection ended ({name.lower()})")
        return answers

    def close(self) -> None:
        if self._socket is not None:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
            self._socket.close(linger=0)
        self._socket = self._monitor = None
        self._under_way.clear()

    def _connect(self, context: zmq.Context[Any]) -> None:
        self._socket = context.socket(zmq.DEALER)
        try:
            self._socket.linger = 0
            self._socket.maxmsgsize = MAX_CHUNK_BYTES
            self._secure(self._socket)
            self._monitor = self._socket.get_monitor_socket(GONE)
            self._monitor.linger = 0
            self._socket.connect(self._address.address)
        except zmq.ZMQError as error:
            self._break(f"cannot connect: {error}")

    def _send(self, request: Request, data: memoryview | None, said: Said, is_last: bool) -> None:
        assert self._socket is not None
        request_id = next(self._ids)
        frames: list[Any] = [pack_request(replace(request, request_id=request_id), self._token)]
        if data is not None:
            frames.append(data)
        self._under_way[request_id] = (said, is_last)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._break("it takes no more messages")

    def _answer(self, frames: Sequence[bytes]) -> tuple[Said, ReplyHeader] | None:
        try:
            if len(frames) != 2:
                raise ProtocolError(f"{len(frames)} frames")
            header = unpack_header(frames[0])
        except ProtocolError as error:
            self._break(f"it sent something else than a reply: {error}")
        if header.request_id == -1:
            self._break(f"it does not understand: {header.detail}")
        said, is_last = self._under_way.pop(header.request_id, (None, False))
        if said is None or (header.status == "ok" and not is_last):
            return None
        if header.status != "ok":
            # Of one thing in several pieces: the others have failed with it.
            self._under_way = {key: value for key, value in self._under_way.items() if value[0] is not said}
        else:
            self._retry_s = _FIRST_RETRY_S
        return said, header

    def _break(self, reason: str) -> NoReturn:
        self.close()
        self.retry_at = time.monotonic() + self._back_off()
        raise Broken(reason)

    def _back_off(self) -> float:
        wait_s, self._retry_s = self._retry_s, min(2 * self._retry_s, _LAST_RETRY_S)
        return wait_s
