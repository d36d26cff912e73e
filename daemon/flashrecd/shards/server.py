"""The shard server: complete files of this node's jobs, in pieces, to whoever may ask.

A process of its own, so that moving gigabytes delays no heartbeat. It serves one job's directory in shared
memory, read-only: names are matched against the two forms that exist, so no other file can be asked for.
Bytes go from the mapped file to the socket without a copy in Python. What is malformed is refused, logged
and counted.
"""

from __future__ import annotations

import collections
import hmac
import json
import mmap
import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgpack
import zmq

from flashrec.errors import EnvironmentFault, ProtocolError, UsageError
from flashrec.state.shardwire import (
    MAX_REQUEST_BYTES,
    Get,
    ReplyHeader,
    Stats,
    pack_header,
    unpack_request,
)

_MAX_MAPPED_FILES = 32
_SOCKET_BUFFER_BYTES = 4 << 20
# Replies waiting for one peer: several times the credit of an honest one. A peer that asks for more without
# reading loses replies; nobody else notices.
_MAX_QUEUED_REPLIES = 64
_MAX_QUEUED_REQUESTS = 1024
# So many refusals are logged one by one, later ones only now and then.
_LOGGED_REFUSALS = 20
_LOG_EVERY = 1000
_MAX_IPC_PATH = 107
_LOOPBACK = re.compile(r"tcp://(?:127(?:\.[0-9]{1,3}){3}|\[::1\]):(?:[0-9]+|\*)")


@dataclass
class Counters:
    """Since the server started."""

    requests: int = 0
    refused_requests: int = 0
    missing_files: int = 0
    dropped_replies: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True)
class _MappedFile:
    identity: tuple[int, int, int, int]
    data: memoryview


class ShardFiles:
    """Answers requests from the files below `root`; knows nothing of sockets."""

    def __init__(self, root: Path, key: bytes = b"") -> None:
        self.counters = Counters()
        self._root = root
        self._key = key
        self._mapped: collections.OrderedDict[str, _MappedFile] = collections.OrderedDict()

    def answer(self, frames: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        """Header and data for one request's frames; never raises for what a peer sent."""
        self.counters.requests += 1
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a request of {len(frames)} frames")
            request, key = unpack_request(frames[0])
            if not hmac.compare_digest(key, self._key):
                raise ProtocolError("a request with a wrong key")
        except ProtocolError as error:
            self._refuse(str(error))
            return [pack_header(ReplyHeader(-1, "refused", str(error)[:200])), b""]
        if isinstance(request, Stats):
            return [pack_header(ReplyHeader(request.request_id, "ok", "")), _pack(asdict(self.counters))]
        return self._get(request)

    def _get(self, request: Get) -> list[bytes | memoryview]:
        try:
            data = self._open(request.name)
        except OSError as error:
            self.counters.missing_files += 1
            detail = f"{request.name}: {os.strerror(error.errno or 0)}"
            return [pack_header(ReplyHeader(request.request_id, "gone", detail)), b""]
        end = request.offset + request.size_bytes
        if end > data.nbytes:
            self.counters.missing_files += 1
            detail = f"{request.name} has {data.nbytes} bytes, not {end}"
            return [pack_header(ReplyHeader(request.request_id, "gone", detail)), b""]
        self.counters.sent_bytes += request.size_bytes
        return [pack_header(ReplyHeader(request.request_id, "ok", "")), data[request.offset : end]]

    def _open(self, name: str) -> memoryview:
        """The file's bytes, mapped. Mappings are kept, the least used dropped; one that was replaced, cut or
        removed since is looked up anew. Raises OSError."""
        path = self._root / name
        known = self._mapped.get(name)
        status = os.lstat(path)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if known is not None and known.identity == identity:
            self._mapped.move_to_end(name)
            return known.data
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(22, "not a regular file")
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
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

    def _refuse(self, reason: str) -> None:
        self.counters.refused_requests += 1
        count = self.counters.refused_requests
        if count <= _LOGGED_REFUSALS or count % _LOG_EVERY == 0:
            event = {"event": "request refused", "reason": reason, "count": count}
            print(json.dumps(event), file=sys.stderr, flush=True)


def check_endpoint(endpoint: str, key: bytes) -> None:
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
        if not key:
            raise UsageError(f"{endpoint} is open to every user of this machine: give a key file")
    else:
        raise UsageError(f"cannot serve on {endpoint}: only ipc:// and tcp:// on the loopback interface")


def serve(root: Path, endpoints: Sequence[str], key: bytes = b"", *, exit_with_stdin: bool = False) -> None:
    """Serve until SIGTERM or SIGINT (or, if so asked, until standard input closes: the parent has died).

    Prints one line of JSON once it answers: {"ready": [endpoints], "pid": ...}. Raises UsageError and
    EnvironmentFault as `check_endpoint`, and when an endpoint cannot be bound."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    os.umask(0o077)
    files = ShardFiles(root, key)
    with zmq.Context(io_threads=2) as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.maxmsgsize = MAX_REQUEST_BYTES
        router.sndhwm, router.rcvhwm = _MAX_QUEUED_REPLIES, _MAX_QUEUED_REQUESTS
        router.sndbuf = router.rcvbuf = _SOCKET_BUFFER_BYTES
        router.router_mandatory = True
        bound = []
        for endpoint in endpoints:
            check_endpoint(endpoint, key)
            try:
                router.bind(endpoint)
            except zmq.ZMQError as error:
                raise EnvironmentFault(f"cannot serve on {endpoint}: {error.strerror}") from error
            address = router.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(address, bytes)
            bound.append(address.rstrip(b"\0").decode())
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(wake_read, zmq.POLLIN)
        if exit_with_stdin:
            poller.register(sys.stdin.fileno(), zmq.POLLIN)
        print(json.dumps({"ready": bound, "pid": os.getpid()}), flush=True)
        while True:
            ready = dict(poller.poll(1000))
            if wake_read in ready:
                break
            if exit_with_stdin and sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
                break
            if router in ready:
                _answer_all(router, files)
            elif not ready:
                files.forget_removed()
        for endpoint in bound:
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
    signal.set_wakeup_fd(-1)
    os.close(wake_read)
    os.close(wake_write)


def _answer_all(router: zmq.Socket[bytes], files: ShardFiles) -> None:
    """Answer what has arrived, but look up from it now and then: a flood must not hide a signal."""
    for _ in range(64):
        try:
            peer, *frames = router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        header, data = files.answer(frames)
        try:
            router.send_multipart([peer, header], zmq.NOBLOCK | zmq.SNDMORE)
            router.send(data, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # The peer has gone, or reads nothing: its loss alone.
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            files.counters.dropped_replies += 1


def _pack(value: dict[str, int]) -> bytes:
    packed = msgpack.packb(value)
    assert isinstance(packed, bytes)
    return packed
