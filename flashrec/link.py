"""The rank's line to its daemon: one thread, one socket.

The thread sends heartbeats, passes what the main thread wants to say, and acts at once on the one thing
that cannot wait: an abort, which must cut the groups while the main thread sits in a collective. All
else it queues for the main thread, which alone changes the session's state.
"""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from flashrec import phases as ph
from flashrec.errors import (
    DaemonUnavailable,
    FlashrecError,
    ProtocolError,
    RecoveryFailed,
    UsageError,
    VersionMismatch,
)
from flashrec.parts import Parts
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import MAX_MESSAGE_BYTES, decode, encode

GREETING_S = 30.0
REFUSALS: dict[str, type[FlashrecError]] = {
    "version": VersionMismatch,
    "UsageError": UsageError,
    "ended": RecoveryFailed,
}


class _Process:
    """This process's one link; without `flashrec run` there is none before init()."""

    link: "Link | None" = None


def attach(link: "Link") -> None:
    """For the runner: the process is connected, and waits for its script."""
    _Process.link = link


def attached() -> "Link | None":
    return _Process.link


class DaemonLost:
    """Queued for the main thread when the daemon's process has ended."""


Incoming = msg.Message | ph.Latch | DaemonLost


class Link:
    """`send()` may be called from any thread, `receive()` from the main thread only."""

    def __init__(self, address: str, greeting: msg.Hello | msg.Join) -> None:
        """Connects, and says who this process is. UsageError, VersionMismatch or DaemonUnavailable when the daemon
        does not want it, or does not answer."""
        self.daemon_lost = False
        self.on_abort: Callable[[int, str], None] | None = None
        self.on_value: Callable[[msg.Value], None] | None = None
        self.parts = Parts()  # here, for they may arrive before the script has got to init()
        self.on_inspect: Callable[[], None] | None = None
        self._outbox: deque[bytes] = deque()
        self._inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.connect(address)
        self._closing = False
        try:
            self.welcome = self._greet(greeting)
        except BaseException:
            os.close(self._wake)
            self._socket.close(linger=0)
            self._context.term()
            raise
        self.proc = self.welcome.proc
        self._thread = threading.Thread(target=self._run, name="flashrec-link", daemon=True)
        self._thread.start()

    def _greet(self, greeting: msg.Hello | msg.Join) -> msg.Welcome:
        self._socket.send(encode(greeting))
        if not self._socket.poll(int(GREETING_S * 1000)):
            who = greeting.proc if isinstance(greeting, msg.Hello) else f"rank {greeting.rank}"
            raise DaemonUnavailable(f"no daemon answered {who} within {GREETING_S:.0f} s")
        answer = decode(self._socket.recv(), msg.TO_PROCESS)
        if isinstance(answer, msg.Refused):
            raise REFUSALS.get(answer.kind, DaemonUnavailable)(answer.reason)
        if not isinstance(answer, msg.Welcome):
            raise ProtocolError(f"expected a Welcome, not {type(answer).__name__}")
        return answer

    def send(self, message: msg.Message) -> None:
        self._outbox.append(encode(message))
        os.eventfd_write(self._wake, 1)

    def post(self, event: ph.Latch) -> None:
        """Queue something of this process's own for the main thread; from any thread."""
        self._inbox.put(event)

    def receive(self, timeout_s: float | None = None) -> Incoming | None:
        """The next message for the main thread; None after `timeout_s`."""
        try:
            if timeout_s == 0:
                return self._inbox.get_nowait()
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Sends what is still to be said, ends the thread."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=5)
        os.close(self._wake)
        self._socket.close()
        self._context.term()

    # --- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            daemon: int | None = os.pidfd_open(self.welcome.daemon_pid)
            poller.register(daemon, zmq.POLLIN)
        except OSError:
            daemon = None
            self._lose_daemon()
        beat_at = 0.0
        while not self._closing or self._outbox:
            now = time.monotonic()
            if now >= beat_at:
                with contextlib.suppress(zmq.Again):  # a daemon that reads nothing has heard enough of us
                    self._socket.send(encode(msg.Heartbeat(self.proc)), zmq.NOBLOCK)
                beat_at = now + self.welcome.heartbeat_s
            ready = dict(poller.poll(max(0, int((beat_at - now) * 1000))))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if daemon in ready and daemon is not None:
                poller.unregister(daemon)
                os.close(daemon)
                daemon = None
                self._lose_daemon()
            if self.daemon_lost:
                self._outbox.clear()
                beat_at = now + 3600
            self._send_waiting()
            if self._socket in ready:
                self._read_all()
        if daemon is not None:
            os.close(daemon)

    def _send_waiting(self) -> None:
        """Never waits: a daemon that reads nothing must not keep this thread from seeing that it has died."""
        while self._outbox:
            try:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                if self._closing:
                    self._outbox.clear()
                return  # tried again at the next heartbeat
            self._outbox.popleft()

    def _lose_daemon(self) -> None:
        self.daemon_lost = True
        self._inbox.put(DaemonLost())

    def _read_all(self) -> None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode(data, msg.TO_PROCESS)
            if isinstance(message, msg.Value):
                if self.on_value is not None:
                    self.on_value(message)
                continue
            if isinstance(message, msg.PartReady):
                self.parts.add(message)
                continue
            if isinstance(message, msg.Inspect):
                if self.on_inspect is not None:
                    self.on_inspect()
                continue
            self._inbox.put(message)  # before the cut: whoever wakes up by it must find the reason here
            if isinstance(message, msg.Abort):
                self.parts.abort(message.generation)
                if self.on_abort is not None:
                    self.on_abort(message.generation, message.reason)
