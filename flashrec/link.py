"""The rank's line to its daemon: one thread, one socket.

The thread sends heartbeats, passes what the main thread wants to say, and acts at once on the one thing
that cannot wait: an abort, which must cut the groups while the main thread sits in a collective. All
else it queues for the main thread, which alone changes the session's state.

When the daemon's process ends the link is an orphan: training goes on, what is said waits, and every half second
it offers itself (Rejoin) to whichever daemon has come to the same address, until one takes it.
"""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

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
from flashrec.protocol.phase import Phase

GREETING_S = 30.0
REFUSALS: dict[str, type[FlashrecError]] = {
    "version": VersionMismatch,
    "UsageError": UsageError,
    "ended": RecoveryFailed,
}
OFFER_S = 0.5  # between two offers of an orphan
ANSWER_S = 5.0  # for a daemon's answer to one
MAX_UNSENT = 1 << 16


class _Process:
    """This process's one link; without `flashrec run` there is none before init()."""

    link: "Link | None" = None


def attach(link: "Link") -> None:
    """For the runner: the process is connected, and waits for its script."""
    _Process.link = link


def attached() -> "Link | None":
    return _Process.link


class DaemonLost:
    """Queued for the main thread when the daemon's process has ended, and when no other will take this one."""


class DaemonFound:
    """Queued for the main thread when another daemon has adopted this process."""


class Garbled:
    """Queued for the main thread when a message of the daemon's was malformed: nobody knows what it said."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


Incoming = msg.Message | ph.Latch | DaemonLost | DaemonFound


class Link:
    """`send()` may be called from any thread, `receive()` from the main thread only."""

    def __init__(self, address: str, greeting: msg.Hello | msg.Join) -> None:
        """Connects, and says who this process is. UsageError, VersionMismatch or DaemonUnavailable when the daemon
        does not want it, or does not answer."""
        self.daemon_lost = False
        self.forsaken = ""
        """Why no daemon will take this process any more; "" while one may."""
        self.on_abort: Callable[[int, str], None] | None = None
        self.on_value: Callable[[msg.Value], None] | None = None
        self.parts = Parts()  # here, for they may arrive before the script has got to init()
        self.on_inspect: Callable[[], None] | None = None
        self.standing: Callable[[msg.Rejoin], msg.Rejoin] = lambda offer: offer
        """Says in an offer where the rank stands; called by the link's thread."""
        self.on_adopted: Callable[[], None] | None = None
        self.on_forsaken: Callable[[], None] | None = None
        self.on_garbled: Callable[[str], None] | None = None
        self._address = address
        self._release = greeting.release
        self._outbox: deque[bytes] = deque(maxlen=MAX_UNSENT)
        self._inbox: queue.SimpleQueue[Incoming | Garbled] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._connect(immediate=False)
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

    def _connect(self, *, immediate: bool) -> "zmq.Socket[bytes]":
        """`immediate`: a message is taken only for a daemon that is there by then."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, int(immediate))
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.connect(self._address)
        return socket

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
        """The next message for the main thread; None after `timeout_s`. ProtocolError in the place of one that was
        malformed: a rank that goes on without it may wait for ever for what it said."""
        try:
            if timeout_s is not None and timeout_s <= 0:
                message = self._inbox.get_nowait()
            else:
                message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(message, Garbled):
            raise ProtocolError(f"a message of the daemon's is malformed: {message.reason}")
        return message

    def take_rank(self, assigned: msg.Assign) -> None:
        """A standby has been assigned a rank: from now on another daemon may adopt it."""
        self.welcome = replace(
            self.welcome,
            rank=assigned.rank,
            generation=assigned.generation,
            local_rank=assigned.local_rank,
        )

    def close(self) -> None:
        """Sends what is still to be said, ends the thread."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=5)
        os.close(self._wake)
        self._socket.close(linger=0 if self.daemon_lost else None)
        self._context.term()

    # --- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._serve()
            if self._closing:
                return
            self._lose_daemon()
            if not self._find_another():
                return

    def _serve(self) -> None:
        """Until the daemon's process has ended, or `close()`."""
        try:
            daemon = os.pidfd_open(self.welcome.daemon_pid)
        except OSError:
            return
        poller = zmq.Poller()
        for readable in (self._socket, self._wake, daemon):
            poller.register(readable, zmq.POLLIN)
        beat_at = 0.0
        try:
            while not self._closing or self._outbox:
                now = time.monotonic()
                if now >= beat_at:
                    with contextlib.suppress(zmq.Again):  # a daemon that reads nothing has heard enough of us
                        self._socket.send(encode(msg.Heartbeat(self.proc)), zmq.NOBLOCK)
                    beat_at = now + self.welcome.heartbeat_s
                ready = dict(poller.poll(max(0, int((beat_at - now) * 1000))))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._socket in ready:
                    self._read_all()
                if daemon in ready:
                    return
                self._send_waiting()
        finally:
            os.close(daemon)

    def _send_waiting(self) -> None:
        """Never waits: a daemon that reads nothing must not keep this thread from seeing that it has died."""
        while self._outbox:
            data = (
                self._outbox.popleft()
            )  # before it is sent: a full box lets go of its oldest when one is added
            try:
                self._socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                if self._closing:
                    self._outbox.clear()
                else:
                    self._outbox.appendleft(data)
                return  # tried again at the next heartbeat

    def _read_all(self) -> None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode(data, msg.TO_PROCESS)
            except ProtocolError as error:  # this thread goes on: it beats, and says how the rank ends
                self._inbox.put(Garbled(str(error)))
                if self.on_garbled is not None:
                    self.on_garbled(str(error))
                continue
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

    # --- without a daemon ---------------------------------------------------------------------------------

    def _lose_daemon(self) -> None:
        self.daemon_lost = True
        self._socket.close(linger=0)
        if not self.welcome.patience_s:
            self.forsaken = "no other takes its place"
        self._inbox.put(DaemonLost())

    def _find_another(self) -> bool:
        """Waits for a daemon that adopts this process. False: `close()`, or none ever will."""
        lost_at = time.monotonic()
        self._socket = self._connect(immediate=True)  # what an offer says of the rank must be new
        warned = False
        while not self._closing and not self.forsaken:
            # A standby that holds no rank ends by itself; one that has just been given a rank will know soon.
            if self.welcome.rank is not None and (answer := self._offer()) is not None:
                if isinstance(answer, msg.Welcome):
                    self._be_adopted(answer)
                    return True
                self.forsaken = f"the one that took its place does not adopt this rank: {answer.reason}"
                self._inbox.put(DaemonLost())
                break
            if not warned and time.monotonic() - lost_at > self.welcome.patience_s:
                warned = True
                self._tell_forsaken()
            self._sleep(OFFER_S)
        if self.forsaken:
            self._tell_forsaken()
        return False

    def _tell_forsaken(self) -> None:
        if self.on_forsaken is not None:
            self.on_forsaken()

    def _offer(self) -> "msg.Welcome | msg.Refused | None":
        """The answer of the daemon that is there; None if none is, or it does not answer."""
        welcome = self.welcome
        assert welcome.rank is not None
        offer = msg.Rejoin(
            proc=self.proc,
            pid=os.getpid(),
            release=self._release,
            job=welcome.job,
            rank=welcome.rank,
            generation=welcome.generation,
            phase=Phase.BUILDING if welcome.replacement else Phase.STARTING,
            version=None,
            can_advance=False,
            claims=None,
            why_sealed="",
            arena_bytes=0,
            built_offered=False,
        )
        try:
            self._socket.send(encode(self.standing(offer)), zmq.NOBLOCK)
        except zmq.Again:
            return None
        deadline = time.monotonic() + ANSWER_S
        while not self._closing and (left_s := deadline - time.monotonic()) > 0:
            if self._socket.poll(int(min(left_s, OFFER_S) * 1000)):
                try:
                    answer = decode(self._socket.recv(), msg.TO_PROCESS)
                except ProtocolError:
                    return None  # no answer: it is asked again
                if isinstance(answer, msg.Welcome | msg.Refused):
                    return answer
        return None

    def _be_adopted(self, welcome: msg.Welcome) -> None:
        self.welcome = replace(welcome, replacement=self.welcome.replacement)
        self.daemon_lost = False
        self._inbox.put(DaemonFound())
        if self.on_adopted is not None:
            self.on_adopted()

    def _sleep(self, seconds: float) -> None:
        """Or until `close()`; what anybody has to say waits."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        until = time.monotonic() + seconds
        while not self._closing and (left_s := until - time.monotonic()) > 0:
            if poller.poll(int(left_s * 1000) + 1):
                os.eventfd_read(self._wake)
