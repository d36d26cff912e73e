"""Whatever a fork server says, the daemon's end stays in order; fork servers here are a bare socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import EnvironmentFault, VersionMismatch
from flashrec.protocol.spawn import MAX_PACKET_BYTES, SPAWN_PROTOCOL, ProcSpec
from flashrecd.supervise.forkclient import ForkClient, ForkRefused, ForkServerGone, Launch

LAUNCH = Launch(name="job", python="python", env={}, cwd="/", preload=())
READY = {"ready": 12.5, "protocol": SPAWN_PROTOCOL}


def spec(proc: str) -> ProcSpec:
    return ProcSpec(proc=proc, entry="module:main", stdout_path="", stderr_path="", cwd="/")


class Server:
    """The other end, and what the client reported."""

    def __init__(self) -> None:
        ours, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.forked: list[tuple[str, int, bool]] = []
        self.num_gone = 0
        self.fails: OSError | None = None
        self.client = ForkClient(LAUNCH, ours, self._on_forked, self._on_gone)

    def _on_forked(self, client: ForkClient, proc: str, pid: int) -> None:
        if self.fails is not None:
            raise self.fails
        self.forked.append((proc, pid, client.wants(proc)))

    def _on_gone(self, _: ForkClient) -> None:
        self.num_gone += 1

    def say(self, message: object) -> None:
        self.sock.send(message if isinstance(message, bytes) else msgpack.packb(message))

    async def asked(self, proc: str) -> asyncio.Task[int]:
        """A fork that has been asked for and not answered."""
        task = asyncio.ensure_future(self.client.fork(spec(proc)))
        while not self.client.wants(proc):
            await asyncio.sleep(0)
        return task


def with_server(test: Callable[[Server], Awaitable[None]]) -> None:
    async def main() -> None:
        server = Server()
        try:
            await test(server)
        finally:
            server.client.close("the test is over")
            server.sock.close()

    asyncio.run(main())


def test_answers_reach_who_asked_in_any_order() -> None:
    async def test(server: Server) -> None:
        server.say(READY)
        assert await server.client.ready() == 12.5
        first, second = await server.asked("r1"), await server.asked("r2")
        server.say({"forked": "r2", "pid": 22})
        server.say({"refused": "r1", "reason": "two threads"})
        assert await second == 22
        with pytest.raises(ForkRefused, match=r"r1.*two threads"):
            await first
        assert server.forked == [("r2", 22, True)]
        assert server.client.gone is None

    with_server(test)


def test_an_answer_nobody_waits_for_is_reported_as_such() -> None:
    async def test(server: Server) -> None:
        server.say(READY)
        task = await server.asked("r1")
        task.cancel()
        await asyncio.wait([task])
        server.say({"forked": "r1", "pid": 11})
        server.client.drain()
        assert server.forked == [("r1", 11, False)]

    with_server(test)


def test_a_process_that_cannot_be_watched_fails_its_request_alone() -> None:
    async def test(server: Server) -> None:
        server.say(READY)
        task = await server.asked("r1")
        server.fails = OSError("too many open files")
        server.say({"forked": "r1", "pid": 11})
        with pytest.raises(EnvironmentFault, match=r"r1.*too many open files"):
            await task
        assert server.client.gone is None

    with_server(test)


def test_the_end_of_the_server_ends_every_wait() -> None:
    async def test(server: Server) -> None:
        server.say(READY)
        tasks = [await server.asked(f"r{number}") for number in range(3)]
        server.say({"forked": "r0", "pid": 11})
        server.sock.close()
        assert await tasks[0] == 11  # what was said before the end counts
        for task in tasks[1:]:
            with pytest.raises(ForkServerGone, match="job"):
                await task
        with pytest.raises(ForkServerGone, match="job"):
            await server.client.fork(spec("r9"))
        server.client.close("again")
        assert server.num_gone == 1

    with_server(test)


def test_another_release_is_named() -> None:
    async def test(server: Server) -> None:
        server.say({"ready": 1, "protocol": SPAWN_PROTOCOL + 1})
        with pytest.raises(VersionMismatch, match="same release"):
            await server.client.ready()
        assert server.num_gone == 1

    with_server(test)


@pytest.mark.parametrize(
    "packet",
    [
        b"\xc1",
        b"x" * (MAX_PACKET_BYTES + 100),
        [],
        {},
        {"forked": "r1"},
        {"forked": "r1", "pid": "11"},
        {"forked": "r1", "pid": -1},
        {"forked": 1, "pid": 1},
        {"refused": "r1", "reason": None},
        {"ready": "soon", "protocol": 1},
        {1: 2},
    ],
    ids=str,
)
def test_a_message_that_is_none_closes_the_connection(packet: object) -> None:
    async def test(server: Server) -> None:
        server.say(READY)
        task = await server.asked("r1")
        server.say(packet)
        with pytest.raises(ForkServerGone, match="it sent"):
            await task
        assert server.forked == []
        assert server.num_gone == 1

    with_server(test)


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=5))
def test_noise_never_escapes(packets: list[bytes]) -> None:
    async def test(server: Server) -> None:
        for packet in packets:
            server.say(packet)
        server.client.drain()
        assert server.client.gone is not None or not packets
        assert server.forked == []

    with_server(test)
