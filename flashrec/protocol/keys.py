"""The cluster key: one CURVE pair that all nodes of a cluster share, and who else may connect.

    # flashrec cluster key ...
    public = <40 characters of Z85>
    secret = <40 characters of Z85>
    allow = <another public key>        (any number of lines)

Whoever has the file can join the cluster and read its state. Every socket between nodes uses the pair, as server
and as client; a server admits the pair's own public key and those of the `allow` lines (whose holders need the
public key of this file, too), and nobody else: that is what an Authenticator in its context checks, without which
it admits nobody at all.
"""

import contextlib
import difflib
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from flashrec.errors import EnvironmentFault, UsageError

HANDSHAKE_S = 5.0
"""How long a connection may take to show that it has the key."""
MAX_FILE_BYTES = 1 << 16
TOKEN_BYTES = 32
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"flashrec"
_FIELDS = ("public", "secret", "allow")
_HEADER = (
    "# flashrec cluster key: whoever has it can join the cluster and read its state.\n"
    "# Copy it to every node, readable by the daemon's user alone.\n"
)


@dataclass(frozen=True, kw_only=True)
class ClusterKey:
    """A pair and whom it admits; keys are Z85 text."""

    public: bytes
    secret: bytes = field(repr=False)
    allow: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        for name, key in (("public", self.public), *(("allow", key) for key in sorted(self.allow))):
            if not _is_key(key):
                raise UsageError(f"the {name} key is not a CURVE key of 40 characters in Z85")
        if not _is_key(self.secret) or zmq.curve_public(self.secret) != self.public:
            raise UsageError("the secret key does not belong to the public one")

    @classmethod
    def generate(cls) -> "ClusterKey":
        """A new pair, from the system's random numbers."""
        public, secret = zmq.curve_keypair()
        return cls(public=public, secret=secret)

    @classmethod
    def load(cls, path: Path) -> "ClusterKey":
        """The key in `path`. Raises UsageError if there is none, if others than this user could have read or
        written it, or if it is malformed."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UsageError(f"cannot read the cluster key {path}: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise UsageError(f"the cluster key {path} is not a regular file")
            if status.st_uid != os.geteuid():
                raise UsageError(f"the cluster key {path} belongs to user {status.st_uid}, not to you")
            if status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise UsageError(f"others may use the cluster key {path} (mode {mode:04o}): chmod 600 {path}")
            data = os.read(fd, MAX_FILE_BYTES + 1)
        finally:
            os.close(fd)
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"the cluster key {path} is longer than {MAX_FILE_BYTES} bytes")
        try:
            return cls._parse(data)
        except UsageError as error:
            raise UsageError(f"the cluster key {path} is malformed: {error}") from None

    @classmethod
    def _parse(cls, data: bytes) -> "ClusterKey":
        found: dict[str, list[bytes]] = {name: [] for name in _FIELDS}
        for number, line in enumerate(data.splitlines(), 1):
            line = line.strip()
            if not line or line.startswith(b"#"):
                continue
            word, equals, value = line.partition(b"=")
            name = word.strip().decode(errors="replace")
            if not equals or name not in found:
                # The line itself is not shown: it may hold the secret.
                close = difflib.get_close_matches(name, _FIELDS, 1) if equals else []
                hint = f" (did you mean {close[0]}?)" if close else ""
                raise UsageError(f"line {number} is none of {', '.join(_FIELDS)}{hint}")
            found[name].append(value.strip())
        for name in ("public", "secret"):
            if len(found[name]) != 1:
                raise UsageError(f"it has {len(found[name])} {name} keys instead of one")
        return cls(public=found["public"][0], secret=found["secret"][0], allow=frozenset(found["allow"]))

    def write(self, path: Path) -> None:
        """Into a new file of mode 0600. Raises UsageError if something is there already, EnvironmentFault if it
        cannot be written."""
        lines = [f"public = {self.public.decode()}", f"secret = {self.secret.decode()}"]
        lines += [f"allow = {key.decode()}" for key in sorted(self.allow)]
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise UsageError(f"{path} exists; a cluster key is never overwritten") from None
        except OSError as error:
            raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from error
        try:
            with open(fd, "w") as file:
                os.fchmod(fd, 0o600)
                file.write(_HEADER + "\n".join(lines) + "\n")
                file.flush()
                os.fsync(fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from error

    @property
    def admitted(self) -> frozenset[bytes]:
        """The public keys that a server with this key admits."""
        return self.allow | {self.public}

    def as_server(self, socket: zmq.Socket[Any]) -> None:
        """Before `bind`: admit only who has a key. Without an Authenticator in the socket's context: nobody."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        # libzmq by itself admits everyone who knows the server's public key while no authenticator answers.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))

    def as_client(self, socket: zmq.Socket[Any]) -> None:
        """Before `connect`: talk only to a server that has the key."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))

    def token(self) -> bytes:
        """TOKEN_BYTES bytes that only holders of the key know; the secret does not follow from them."""
        return hashlib.blake2b(self.secret, digest_size=TOKEN_BYTES, person=b"flashrec bulk").digest()


def _is_key(key: bytes) -> bool:
    if len(key) != 40 or not set(key) <= set(z85.Z85CHARS):
        return False
    try:
        zmq.curve_public(key)  # five characters can be more than four bytes hold
    except zmq.ZMQError:
        return False
    return True


class LogBudget:
    """A log that strangers cannot fill: `burst` lines, then one each `refill_s`, which says how many were left out.

    `clock` gives seconds. Not for several threads at once."""

    def __init__(
        self,
        log: Callable[[str], None],
        *,
        burst: int = 20,
        refill_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = 0
        """How often `write` was called."""
        self._log, self._clock = log, clock
        self._burst, self._refill_s = burst, refill_s
        self._left, self._at = float(burst), clock()
        self._unsaid = 0

    def write(self, reason: str) -> None:
        self.count += 1
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) / self._refill_s)
        self._at = now
        if self._left < 1:
            self._unsaid += 1
            return
        self._left -= 1
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        self._unsaid = 0
        self._log(reason + more)


class Authenticator:
    """Answers libzmq's question, for each connection to a server socket of `context`, whether it may come in.

    One for a context, made before its first server socket is bound. It has a thread of its own, which ends with the
    context (`term`) or by `close`. `log` is called from that thread, not one by one for ever.
    """

    def __init__(
        self, context: zmq.Context[Any], key: ClusterKey, log: Callable[[str], None] | None = None
    ) -> None:
        """Raises EnvironmentFault if the context has an authenticator already."""
        self._admitted = key.admitted
        self._denials = LogBudget(log or (lambda _: None))
        # Plain sockets, also in the context of an event loop.
        self._context = context
        self._plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
        self._stop_at = f"inproc://flashrec-authenticator-{id(self)}"
        self._socket = self._plain.socket(zmq.ROUTER)
        stop = self._plain.socket(zmq.PAIR)
        for socket in (self._socket, stop):
            socket.linger = 0
        try:
            self._socket.bind(_ZAP_ENDPOINT)
            stop.bind(self._stop_at)
        except zmq.ZMQError as error:
            self._socket.close()
            stop.close()
            raise EnvironmentFault(f"no authenticator in this context: {error.strerror}") from error
        self._thread = threading.Thread(
            target=self._serve, args=(stop,), name="flashrec-authenticator", daemon=True
        )
        self._thread.start()

    @property
    def denied(self) -> int:
        """How many connections have been turned away so far."""
        return self._denials.count

    def close(self) -> None:
        """End it before its context does: servers admit nobody from now on. May be called again."""
        if self._thread.is_alive() and not self._context.closed:
            with self._plain.socket(zmq.PAIR) as stop:
                stop.connect(self._stop_at)
                stop.send(b"")  # it waits there until it is taken: linger
        self._thread.join()

    def __enter__(self) -> "Authenticator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, stop: zmq.Socket[bytes]) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(stop, zmq.POLLIN)
            while stop not in (ready := dict(poller.poll())):
                if self._socket in ready:
                    self._answer(self._socket.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            with contextlib.suppress(zmq.ZMQError):  # the context has ended
                self._socket.unbind(_ZAP_ENDPOINT)  # at once; close would do it some time later
            self._socket.close()
            stop.close()

    def _answer(self, frames: list[bytes]) -> None:
        """One question, as in ZeroMQ's RFC 27: [route, "", "1.0", request id, domain, address, identity,
        mechanism, credentials ...], answered by [..., status, text, user id, metadata]."""
        route, question = frames[: frames.index(b"") + 1], frames[frames.index(b"") + 1 :]
        if len(question) < 6 or question[0] != b"1.0":
            return  # not libzmq's: nothing else can reach this endpoint
        _, request_id, domain, address, _, mechanism, *credentials = question
        public = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        if domain == _ZAP_DOMAIN and public in self._admitted:
            status, text, user = b"200", b"OK", public
        else:
            status, text, user = b"400", b"not a key of this cluster", b""
            who = f"public key {public.decode()}" if public else f"mechanism {mechanism.decode()}"
            self._denials.write(f"{address.decode(errors='replace')}: {who} is not admitted")
        self._socket.send_multipart([*route, b"1.0", request_id, status, text, user, b""], zmq.NOBLOCK)
