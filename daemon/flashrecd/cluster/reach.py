"""One node's part in finding out who reaches whom: listeners on its own addresses, and connections to those of others.

A listener sends zeros to who shows the token of this check, and hangs up on everybody else. The transfer is plain TCP
in the daemon's own loop: it tells a slow or wrong interface from a right one, and no more than about 1 GB/s.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import struct
from collections.abc import Sequence

from flashrec.protocol.nodes import Probe, Probed
from flashrecd.cluster.info import format_address, parse_address, resolve

CONNECT_S = 2.0
TRANSFER_S = 1.0
"""A transfer that takes longer is ended, and its rate is that of what has come."""
MAX_TRANSFER_BYTES = 16 << 20
LIFETIME_S = 300.0
"""Listeners close after that, whatever happened to the leader."""
_MAX_CONNECTIONS = 64
_CHUNK = memoryview(bytes(1 << 18))
_SIGNATURE_BYTES = 10

Listener = tuple[str, str, int]
"""(which address, host, port)."""


class Listeners:
    """Of this node, while a check runs."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def open(
        self, addresses: Sequence[tuple[str, str]], token: bytes
    ) -> tuple[tuple[Listener, ...], str]:
        """Listen at each (which, host): the listeners, and what was wrong. Those of before are closed."""
        self.close()
        self._timer = asyncio.get_running_loop().call_later(LIFETIME_S, self.close)
        listeners, problems = [], []
        for which, host in addresses:
            try:
                server = await asyncio.start_server(
                    lambda r, w: self._serve(r, w, token), resolve(host)[0], 0
                )
            except (OSError, ValueError) as error:
                problems.append(f"it cannot listen at its {which} address {host}: {error}")
                continue
            self._servers.append(server)
            listeners.append((which, host, int(server.sockets[0].getsockname()[1])))
        return tuple(listeners), "; ".join(problems)

    def close(self) -> None:
        """Listen no more; may be called again."""
        if self._timer is not None:
            self._timer.cancel()
        for server in self._servers:
            server.close()
        for task in self._serving:
            task.cancel()
        self._servers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._serving) >= _MAX_CONNECTIONS:
                return
            self._serving.add(task)
            async with asyncio.timeout(CONNECT_S + 2 * TRANSFER_S):
                shown = await reader.readexactly(len(token) + 8)
                if not hmac.compare_digest(shown[:-8], token):
                    return
                (left,) = struct.unpack(">Q", shown[-8:])
                left = min(left, MAX_TRANSFER_BYTES)
                while left > 0:
                    writer.write(_CHUNK[: min(left, len(_CHUNK))])
                    left -= len(_CHUNK)
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()  # a stranger's, or the end of the check; nobody waits for what is left
        finally:
            self._serving.discard(task)
            writer.close()


async def reach(message: Probe) -> Probed:
    """Do what a Probe says. Raises nothing for what cannot be reached: that is the answer."""
    rates, problems = [], []
    for which, host, port in message.listeners:
        try:
            rates.append((which, await _fetch(host, port, message.token, message.num_bytes)))
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            problems.append(f"its {which} address {format_address(host, port)} {_why(error)}")
    if message.shard_endpoint:
        try:
            await _greet(message.shard_endpoint)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            problems.append(f"its shard endpoint {message.shard_endpoint} {_why(error)}")
    return Probed(message.request, message.node, tuple(rates), "; ".join(problems))


async def is_refused(endpoint: str) -> bool:
    """Whether nobody listens at tcp://host:port, by the word of its machine. False where that is not known."""
    try:
        _, writer = await _connect_to(endpoint)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    writer.close()
    return False


async def _fetch(host: str, port: int, token: bytes, num_bytes: int) -> float:
    """Bytes a second of a transfer; 0.0 if none was wanted. Raises OSError and IncompleteReadError."""
    loop = asyncio.get_running_loop()
    reader, writer = await _connect(host, port)
    try:
        writer.write(token + struct.pack(">Q", num_bytes))
        got = 0
        if num_bytes > 0:
            async with asyncio.timeout(CONNECT_S):
                got = len(await reader.readexactly(1))
        begun = loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TRANSFER_S):
                while got < num_bytes:
                    data = await reader.read(1 << 20)
                    if not data:
                        raise asyncio.IncompleteReadError(b"", num_bytes - got)
                    got += len(data)
        return got / max(loop.time() - begun, 1e-6) if num_bytes > 0 else 0.0
    finally:
        writer.close()


async def _greet(endpoint: str) -> None:
    """Whether what listens there speaks ZeroMQ: the first bytes it says are fixed, and it says them first."""
    reader, writer = await _connect_to(endpoint)
    try:
        async with asyncio.timeout(CONNECT_S):
            said = await reader.readexactly(_SIGNATURE_BYTES)
        if said[0] != 0xFF or said[-1] != 0x7F:
            raise ConnectionError("another program listens there")
    finally:
        writer.close()


async def _connect_to(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await _connect(*parse_address(endpoint.removeprefix("tcp://"), option="shard endpoint"))


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(CONNECT_S):
        return await asyncio.open_connection(host, port)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"does not answer within {CONNECT_S:.0f} s"
    if isinstance(error, asyncio.IncompleteReadError):
        return "hangs up"
    if isinstance(error, ConnectionRefusedError):
        return "refuses the connection: nobody listens there, or a firewall is between"
    return f"cannot be reached: {error}"
