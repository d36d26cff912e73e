"""The shard server: sealed bytes of this node, served to others, and what this node keeps for them.

A process of its own, so that moving gigabytes delays no heartbeat. Each endpoint has a socket of its own: what comes by
ipc comes from this node, and may ask for more; what comes by tcp must show that it belongs to the cluster. What is
malformed is refused, logged and counted.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from flashrec.errors import EnvironmentFault, UsageError
from flashrec.state.codec import Buffer
from flashrec.state.shardwire import MAX_REQUEST_BYTES, PIECE_BYTES, ReplyHeader, pack_header
from flashrecd.shards.answering import Answers
from flashrecd.shards.counters import Counters

_SOCKET_BUFFER_BYTES = 4 << 20
# Replies waiting for one peer: several times the credit of an honest one. A peer that asks for more without
# reading loses replies; nobody else notices.
_MAX_QUEUED_REPLIES = 64
_MAX_QUEUED_REQUESTS = 256
_MAX_IPC_PATH = 107
# What is smaller is copied into its message: less work than to keep track of it.
_COPIED_BYTES = 16 << 10
_LOOPBACK = re.compile(r"tcp://(?:127(?:\.[0-9]{1,3}){3}|\[::1\]):(?:[0-9]+|\*)")
_ONE_ADDRESS = re.compile(r"tcp://(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|\[[0-9a-fA-F:]+\]):(?:[0-9]+|\*)")
_EVERY_ADDRESS = ("tcp://0.0.0.0:", "tcp://[::]:")


@dataclass(frozen=True)
class Security:
    """What tcp endpoints ask of a peer: a key in every request, CURVE (`as_server` sets a socket up for it, and
    `authenticate` decides, in a context, whom it lets in), or nothing, on the loopback interface. `is_cluster`: it is
    the cluster's, and lets other machines in."""

    key: bytes = b""
    is_cluster: bool = False
    is_open_on_loopback: bool = False
    as_server: Callable[[zmq.Socket[Any]], None] | None = None
    authenticate: Callable[[zmq.Context[Any]], contextlib.AbstractContextManager[object]] | None = None


@dataclass(frozen=True)
class _Door:
    socket: zmq.Socket[bytes]
    endpoint: str
    is_local: bool
    key: bytes


def check_endpoint(endpoint: str, security: Security) -> None:
    """Raises UsageError for an endpoint on which a stranger could read, EnvironmentFault for one in use."""
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if len(path.encode()) > _MAX_IPC_PATH:
            raise UsageError(f"the socket's path is longer than {_MAX_IPC_PATH} bytes: {path}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            # libzmq would take the path from a live server without a word.
            if probe.connect_ex(path) == 0:
                raise EnvironmentFault(f"another server answers at {endpoint}")
    elif _LOOPBACK.fullmatch(endpoint):
        if not (security.key or security.is_cluster or security.is_open_on_loopback):
            raise UsageError(f"{endpoint} is open to every user of this machine: give a key file")
    elif _ONE_ADDRESS.fullmatch(endpoint) and not endpoint.startswith(_EVERY_ADDRESS):
        if not security.is_cluster:
            raise UsageError(f"{endpoint} is open to every machine that reaches it: give a cluster key")
    else:
        raise UsageError(
            f"cannot serve on {endpoint}: only ipc:// and tcp:// on one address of this machine, given as a number"
        )


class Server:
    """The loop around `Answers`. `post` takes answers from any thread."""

    def __init__(self, answers: Answers, counters: Counters) -> None:
        self._answers = answers
        self._counters = counters
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._posted: collections.deque[tuple[_Door, bytes, list[Buffer]]] = collections.deque()
        self._lock = threading.Lock()

    def run(self, doors: Sequence[_Door], *, exit_with_stdin: bool, is_over: Callable[[], bool]) -> None:
        """Until SIGTERM or SIGINT, or standard input closes, or `is_over()`."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        ended: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: ended.append(number))
        poller = zmq.Poller()
        for door in doors:
            poller.register(door.socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        if exit_with_stdin:
            poller.register(sys.stdin.fileno(), zmq.POLLIN)
        print(json.dumps({"ready": [door.endpoint for door in doors], "pid": os.getpid()}), flush=True)
        while not ended and not is_over():
            ready = dict(poller.poll(1000))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._send_posted()
            if exit_with_stdin and sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
                break
            for door in doors:
                if door.socket in ready:
                    self._answer_all(door)
            if not ready:
                self._answers.files.forget_removed()

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        with self._lock:
            for fd in (self._wake_read, self._wake_write):
                os.close(fd)
            self._wake_write = -1

    def _post(self, door: _Door, peer: bytes, header: ReplyHeader, data: Buffer) -> None:
        self._posted.append((door, peer, [pack_header(header), data]))
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake_write >= 0:
                os.write(self._wake_write, b"\0")

    def _send_posted(self) -> None:
        while self._posted:
            self._send(*self._posted.popleft())

    def _answer_all(self, door: _Door) -> None:
        """Answer what has arrived, but look up from it now and then: a flood must not hide a signal."""
        for _ in range(64):
            try:
                peer, *frames = door.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

            def later(header: ReplyHeader, data: Buffer, peer: bytes = peer) -> None:
                self._post(door, peer, header, data)

            reply = self._answers.answer(frames, later, key=door.key, is_local=door.is_local)
            if reply is not None:
                self._send(door, peer, reply)

    def _send(self, door: _Door, peer: bytes, reply: Sequence[Buffer]) -> None:
        header, data = reply
        try:
            door.socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            door.socket.send(header, zmq.NOBLOCK | zmq.SNDMORE)
            door.socket.send(data, zmq.NOBLOCK, copy=memoryview(data).nbytes < _COPIED_BYTES)
        except zmq.ZMQError as error:
            # The peer has gone, or reads nothing: its loss alone.
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._counters.add(dropped_replies=1)


def serve(
    root: Path,
    endpoints: Sequence[str],
    security: Security,
    replicas: Callable[[Counters], contextlib.AbstractContextManager[Any]] | None = None,
    *,
    exit_with_stdin: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until SIGTERM or SIGINT (or, if so asked, until standard input closes: the parent has died), or until
    `is_over()`, which is asked about every second. `replicas` makes the Replicas of this node, where others take part.

    Prints one line of JSON once it answers: {"ready": [endpoints], "pid": ...}. Raises UsageError and
    EnvironmentFault as `check_endpoint`, and when an endpoint cannot be bound."""
    os.umask(0o077)
    counters = Counters()
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context(io_threads=2))
        if security.authenticate is not None:
            stack.enter_context(security.authenticate(context))
        doors = [
            stack.enter_context(_opened(context, one, security, replicas is not None)) for one in endpoints
        ]
        kept = None if replicas is None else stack.enter_context(replicas(counters))
        packer = None
        if kept is not None:
            from flashrecd.shards.packing import Packer  # with numpy, which replicas bring anyway

            packer = Packer(counters)
            stack.callback(packer.close)
        server = Server(Answers(root, counters, kept, packer), counters)
        stack.callback(server.close)
        server.run(doors, exit_with_stdin=exit_with_stdin, is_over=is_over)


@contextlib.contextmanager
def _opened(
    context: zmq.Context[Any], endpoint: str, security: Security, takes_replicas: bool
) -> Iterator[_Door]:
    check_endpoint(endpoint, security)
    is_local = endpoint.startswith("ipc://")
    with context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.maxmsgsize = PIECE_BYTES if takes_replicas else MAX_REQUEST_BYTES
        router.sndhwm, router.rcvhwm = _MAX_QUEUED_REPLIES, _MAX_QUEUED_REQUESTS
        router.sndbuf = router.rcvbuf = _SOCKET_BUFFER_BYTES
        router.router_mandatory = True
        if not is_local and security.as_server is not None:
            security.as_server(router)
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            raise EnvironmentFault(f"cannot serve on {endpoint}: {error.strerror}") from error
        address = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        bound = address.rstrip(b"\0").decode()
        try:
            yield _Door(router, bound, is_local, b"" if is_local else security.key)
        finally:
            if is_local:
                Path(bound.removeprefix("ipc://")).unlink(missing_ok=True)
