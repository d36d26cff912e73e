"""One generation's gloo connections: made, found again among all descriptors, and cut.

gloo offers no way to end a collective that waits for a silent peer, nor a forming that waits for
one. What ends both is the socket: `shutdown(2)` on a *connected* socket of the group makes gloo
fail the pending operation at once. (A listening socket must be left alone, or gloo ends the
process.) So this module has to know which sockets are gloo's. A socket of ours has either our
listener as its local address or a peer's listener as its remote one; the peers' listeners are
learnt from the rendezvous store, through which gloo's own addresses pass (`ExchangeStore`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo

from flashrec.errors import EnvironmentFault
from flashrec.torch_private import Store

Address = tuple[str, int]

BURIAL = "flashrec-bury"
"""Name of the threads that destroy a generation's groups."""

# gloo's default; more threads per group would only reorder what c10d issues in order.
_NUM_THREADS = 2
_LISTENER_TRIES = 5

# A worker thread of a dropped group that is seen asleep this often in a row waits for a message
# that never comes. One that is still at work is given up on only after the deadline.
_WORKER_NAME = "pt_gloo_runloop"
_QUIET_SAMPLES = 5
_QUIET_INTERVAL_S = 0.05
_QUIET_DEADLINE_S = 5.0


class ExchangeStore(Store):
    """The rendezvous store as gloo sees it: one generation's keys, with listeners attached.

    gloo publishes its address under its rank and reads everyone else's. Each value carries the
    writer's listener in front, so that all learn it without a round trip of its own, and the first
    read fetches all ranks' values at once: it returns when every rank has arrived.
    """

    def __init__(self, store: Store, prefix: str, size: int, listener: Address) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._size = size
        self._listener = f"{listener[0]}:{listener[1]}".encode()
        self._values: dict[str, bytes] = {}
        self.peers: set[Address] = set()

    def set(self, key: str, value: bytes | str) -> None:
        data = value if isinstance(value, bytes) else value.encode()
        framed: Any = struct.pack("!H", len(self._listener)) + self._listener + data
        self._store.set(self._prefix + key, framed)

    def get(self, key: str) -> bytes:
        if key not in self._values:
            head, separator, last = key.rpartition("/")
            keys = [f"{head}{separator}{rank}" for rank in range(self._size)] if last.isdigit() else [key]
            values = self._store.multi_get([self._prefix + name for name in keys])
            for name, framed in zip(keys, values, strict=True):
                self._values[name] = self._unframe(bytes(framed))
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Nothing: `get` waits, and one wait is a round trip less than two."""

    def check(self, keys: list[str]) -> bool:
        return True

    def _unframe(self, framed: bytes) -> bytes:
        (length,) = struct.unpack_from("!H", framed)
        host, _, port = framed[2 : 2 + length].decode().rpartition(":")
        self.peers.add((host, int(port)))
        return framed[2 + length :]


class Transport:
    """A gloo device of its own, the groups built on it, and the sockets between them.

    `cut()` may be called from any thread at any time, also while `build()` waits.
    """

    def __init__(self, address: str) -> None:
        """Listen on `address` (host name or IP) at a free port.

        Raises:
            EnvironmentFault: nothing can be bound to this address.
        """
        self._foreign = {inode for _, inode in _socket_descriptors()}
        self._device, self.listener = _listen(address)
        self._lock = threading.Lock()
        self._stores: list[ExchangeStore] = []
        self._kept: dict[int, socket.socket] = {}  # inode -> a duplicate, so that no number is reused
        self._num_pairs = 0
        self._building = False
        self._cut = False
        self._closed = False

    def build(self, store: Store, prefix: str, rank: int, size: int, timeout_s: float) -> ProcessGroup | None:
        """Meet the other ranks of one group in `store` and connect to each.

        Returns None if `cut()` came before it began. If it comes while this waits, the group that
        is returned is already broken, or gloo's error is raised.
        """
        exchange = ExchangeStore(store, prefix, size, self.listener)
        with self._lock:
            if self._cut:
                return None
            self._num_pairs += size
            self._building = True
            self._stores.append(exchange)
        try:
            return self._connect(exchange, rank, size, timeout_s)
        finally:
            with self._lock:
                self._building = False

    def _connect(self, exchange: ExchangeStore, rank: int, size: int, timeout_s: float) -> ProcessGroup:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._threads = _NUM_THREADS
        options._timeout = timedelta(seconds=timeout_s)
        gloo: Any = ProcessGroupGloo(exchange, rank, size, options)
        # Behind a ProcessGroup, since that one knows every collective by its old and new name.
        group = ProcessGroup(exchange, rank, size)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        return group

    def keep_sockets(self) -> None:
        """Hold a duplicate of every socket connected by now.

        From here on `cut()` touches exactly these, whatever happens to ports and descriptors.
        """
        with self._lock:
            for sock, inode in self._find_sockets():
                self._kept[inode] = sock

    def cut(self) -> None:
        """Shut all connections down: whoever waits on one, here or at the other end, fails at once."""
        with self._lock:
            if self._closed:  # its port may be somebody else's by now
                return
            self._cut = True
            num_pairs = self._num_pairs if self._building else 0
            for sock in self._kept.values():
                _shut_down(sock)
            for sock, _ in self._find_sockets():
                _shut_down(sock)
                sock.close()
        self._knock(num_pairs)

    def bury(self, groups: list[ProcessGroup], *, wait: bool) -> threading.Thread:
        """Destroy `groups`, built here, and the device, on a thread of its own; `cut()` comes first.

        gloo's destructor waits for its threads: ten milliseconds for the loop's next tick, and as
        long as the time-out if a collective is stuck in the middle of a message. Emptied by this
        call, `groups` must hold the last references.

        Args:
            wait: a collective may still be running, so return only when none can write to a tensor
                any more: when all is destroyed, or every thread that could is asleep for good.
        """
        with self._lock:
            self._closed = True
            for sock in self._kept.values():
                sock.close()
            self._kept.clear()
            self._stores.clear()
        # The device goes with the last group that uses it: on its own it would be destroyed, and its
        # loop waited for, under the interpreter's lock.
        remains: list[Any] = [self._device, *groups]
        groups.clear()
        self._device = None
        thread = threading.Thread(target=_destroy, args=(remains,), name=BURIAL, daemon=True)
        thread.start()
        if wait:
            _await_quiet(thread)
        return thread

    def _find_sockets(self) -> Iterator[tuple[socket.socket, int]]:
        peers = {peer for store in self._stores for peer in store.peers} - {self.listener}
        for descriptor, inode in _socket_descriptors():
            if inode in self._foreign or inode in self._kept:
                continue
            # The addresses are read from the duplicate: the number itself may change hands meanwhile.
            sock = _duplicate(descriptor)
            if sock is None:
                continue
            local, remote = _ends(sock)
            if remote is not None and (local == self.listener or remote in peers):
                yield sock, inode
            else:
                sock.close()

    def _knock(self, num_pairs: int) -> None:
        """Release a `build()` that waits for a peer which published its address and then fell silent.

        gloo waits for a connection that says which pair it is for: an 8-byte number, counted from
        0 in each device. Say all of them; the connections are closed at once, which breaks the
        pairs. Where gloo no longer listens, or counts otherwise, this does nothing and the wait
        ends at its time-out.
        """
        for pair in range(num_pairs):
            with contextlib.suppress(OSError), socket.create_connection(self.listener, timeout=1) as sock:
                sock.sendall(struct.pack("=q", pair))


def _destroy(remains: list[Any]) -> None:
    while remains:
        del remains[0]


def _await_quiet(burial: threading.Thread) -> None:
    deadline = time.monotonic() + _QUIET_DEADLINE_S
    asleep = 0
    while asleep < _QUIET_SAMPLES and time.monotonic() < deadline:
        burial.join(_QUIET_INTERVAL_S)
        if not burial.is_alive():
            return
        asleep = asleep + 1 if _workers_asleep() else 0


def _workers_asleep() -> bool:
    """Whether there are gloo worker threads left, all of them waiting (not running, not ready to)."""
    states = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name == _WORKER_NAME:
                states.append(rest.split()[0])
    return bool(states) and all(state == "S" for state in states)


def _listen(address: str) -> tuple[Any, Address]:
    for _ in range(_LISTENER_TRIES):
        before = {inode for _, inode in _socket_descriptors()}
        try:
            device = ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
        except RuntimeError as error:
            raise EnvironmentFault(f"cannot listen on {address!r} for collectives: {error}") from error
        found: list[Address] = []
        for descriptor, inode in _socket_descriptors():
            sock = _duplicate(descriptor) if inode not in before else None
            if sock is not None:
                with sock:
                    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.append(sock.getsockname()[:2])
        if len(found) == 1:
            return device, found[0]
        # Another thread opened a listener in these microseconds: try until it is clear which is ours.
    raise EnvironmentFault(f"cannot tell gloo's listening socket on {address!r} from others being opened")


def _socket_descriptors() -> list[tuple[int, int]]:
    """(descriptor, inode) of every socket of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.append((int(name), status.st_ino))
    return found


def _duplicate(descriptor: int) -> socket.socket | None:
    """An internet stream socket's duplicate; None for other sockets, or if it was closed meanwhile."""
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    try:
        sock = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return None
    if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
        return sock
    sock.close()
    return None


def _ends(sock: socket.socket) -> tuple[Address | None, Address | None]:
    """Local and remote address; the remote one is None unless the socket is connected."""
    try:
        local: Sequence[Any] = sock.getsockname()
        remote: Sequence[Any] = sock.getpeername()
    except OSError:
        return None, None
    return (str(local[0]), int(local[1])), (str(remote[0]), int(remote[1]))


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected any more: what was wanted
        sock.shutdown(socket.SHUT_RDWR)
