"""The daemon's end of the socket to a fork server (`flashrec.forkserver`)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgpack

from flashrec.errors import EnvironmentFault, ProtocolError, UsageError, VersionMismatch
from flashrec.protocol.spawn import (
    MAX_PACKET_BYTES,
    SPAWN_PROTOCOL,
    ProcSpec,
    spec_file,
    unpack_map,
)

MAX_FORKS_IN_FLIGHT = 64
"""Requests sent and not answered; the socket's buffer holds several times as many."""


class ForkServerGone(EnvironmentFault):
    """The fork server died, or does not answer; a new one may do better."""


class ForkRefused(EnvironmentFault):
    """The fork server lives and cannot fork; a fresh interpreter can still be asked for."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the processes of one job are started."""

    name: str
    """Of the job; there is one fork server for each."""
    python: str
    """The interpreter, in the job's own environment."""
    env: Mapping[str, str]
    """The whole environment; a process adds its own variables."""
    cwd: str
    preload: tuple[str, ...] = ("flashrec.warm",)
    """Modules that the fork server imports."""
    log_path: Path | None = None
    """File for what the fork server itself prints, and modules while they are imported; None: nowhere."""
    ready_timeout_s: float = 120.0
    """For the imports: torch takes seconds from a local disk, minutes from a cold network file system."""
    fork_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("ready_timeout_s", "fork_timeout_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be positive, not {getattr(self, name)}")


class ForkClient:
    """Requests in flight to one fork server, and what it said.

    `on_forked(client, proc, pid)` is called while a packet is read, so that after `drain` the daemon knows
    every process that can have been re-parented to it; an OSError it raises fails the request.
    `on_gone(client)` is called once, when no more can be asked of this server: what is left is to be killed.
    """

    def __init__(
        self,
        launch: Launch,
        sock: socket.socket,
        on_forked: Callable[[ForkClient, str, int], None],
        on_gone: Callable[[ForkClient], None],
    ) -> None:
        self.launch = launch
        self._sock = sock
        self._on_forked = on_forked
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[float] = self._loop.create_future()
        # Nobody may be waiting when it fails; the next fork tells.
        self._ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._pending: dict[str, asyncio.Future[int]] = {}
        self._in_flight = asyncio.Semaphore(MAX_FORKS_IN_FLIGHT)
        self.gone: str | None = None
        """Why no more can be asked of this server; None while it is in use."""
        sock.setblocking(False)
        self._loop.add_reader(sock, self.drain)

    async def ready(self) -> float:
        """Waits until the imports are done; returns how long they took, in ms.

        Raises ForkServerGone, or EnvironmentFault when an import failed, VersionMismatch.
        """
        try:
            async with asyncio.timeout(self.launch.ready_timeout_s):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            self.close(f"not ready within {self.launch.ready_timeout_s} s")
            raise ForkServerGone(self._describe()) from None

    async def fork(self, spec: ProcSpec) -> int:
        """The pid of a new process that becomes `spec`. Raises as `ready` does, and ForkRefused."""
        await self.ready()
        async with self._in_flight:
            if self.gone is not None:
                raise ForkServerGone(self._describe())
            answer: asyncio.Future[int] = self._loop.create_future()
            self._pending[spec.proc] = answer
            try:
                self._send(spec)
                async with asyncio.timeout(self.launch.fork_timeout_s):
                    return await answer
            except TimeoutError:
                self.close(f"no answer within {self.launch.fork_timeout_s} s")
                raise ForkServerGone(self._describe()) from None
            finally:
                self._pending.pop(spec.proc, None)

    def _send(self, spec: ProcSpec) -> None:
        fd = spec_file(spec)
        try:
            socket.send_fds(self._sock, [msgpack.packb({"fork": spec.proc})], [fd])
        except OSError as error:
            self.close(f"cannot be written to: {error}")
            raise ForkServerGone(self._describe()) from error
        finally:
            os.close(fd)

    def drain(self) -> None:
        """Read what has arrived, without waiting."""
        while self.gone is None:
            try:
                # One byte more than allowed, so that a packet that was cut off is seen to be too large.
                data = self._sock.recv(MAX_PACKET_BYTES + 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It died with a request unread. The kernel says so once, before what it had still said.
                continue
            except OSError as error:
                return self.close(f"its socket failed: {error}")
            if not data:
                return self.close("it ended")
            try:
                self._understand(unpack_map(data, MAX_PACKET_BYTES))
            except ProtocolError as error:
                return self.close(f"it sent {error}")

    def _understand(self, message: dict[str, object]) -> None:
        match message:
            case {"ready": int() | float() as ready_ms, "protocol": int() as protocol}:
                if protocol != SPAWN_PROTOCOL:
                    error = VersionMismatch(
                        f"flashrec as installed for {self.launch.python} speaks version {protocol} of the"
                        f" fork server's protocol, this daemon {SPAWN_PROTOCOL}: install the same release"
                    )
                    self._fail(error)
                elif not self._ready.done():
                    self._ready.set_result(float(ready_ms))
            case {"failed": str(reason)}:
                self._fail(EnvironmentFault(f"the fork server of job {self.launch.name!r} failed: {reason}"))
            case {"forked": str(proc), "pid": int(pid)} if pid > 0:
                answer = self._pending.get(proc)
                try:
                    self._on_forked(self, proc, pid)
                except OSError as error:
                    if answer is not None and not answer.done():
                        answer.set_exception(EnvironmentFault(f"cannot watch process {proc!r}: {error}"))
                else:
                    if answer is not None and not answer.done():
                        answer.set_result(pid)
            case {"refused": str(proc), "reason": str(reason)}:
                answer = self._pending.get(proc)
                if answer is not None and not answer.done():
                    answer.set_exception(ForkRefused(f"process {proc!r} was not forked: {reason}"))
            case _:
                raise ProtocolError(f"a message nobody knows: {sorted(message)}")

    def wants(self, proc: str) -> bool:
        """Whether somebody still waits for `proc`: a caller that was cancelled does not."""
        answer = self._pending.get(proc)
        return answer is not None and not answer.done()

    def _fail(self, error: Exception) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        self.close(str(error))

    def close(self, reason: str) -> None:
        """Ends the server, and every wait for it with ForkServerGone; a second call changes nothing."""
        if self.gone is not None:
            return
        self.gone = reason
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if not self._ready.done():
            self._ready.set_exception(ForkServerGone(self._describe()))
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ForkServerGone(self._describe()))
        self._on_gone(self)

    def _describe(self) -> str:
        log = f"; see {self.launch.log_path}" if self.launch.log_path is not None else ""
        return f"the fork server of job {self.launch.name!r} is gone: {self.gone}{log}"
