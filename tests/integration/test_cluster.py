"""A cluster of daemons over real sockets: who comes in and who does not, who is heard, who has gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import zmq
import zmq.asyncio

from flashrec.errors import EnvironmentFault, ProtocolError, UsageError
from flashrec.protocol import agents as ag
from flashrec.protocol import nodes as nd
from flashrec.protocol.codec import encode
from flashrec.protocol.keys import ClusterKey
from flashrecd.cluster import Cluster, connections, links
from tests.integration.cluster_nodes import Node, info, leader, member, running, until

KEY, OTHER = ClusterKey.generate(), ClusterKey.generate()
CURVE_GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01CURVE" + b"\0" * 15 + b"\0" * 32


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await test()

    asyncio.run(bounded())


def note(text: str) -> ag.Envelope:
    return ag.Envelope("part", 1, 0, text.encode())


# --- members ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [KEY, None], ids=["key", "no key"])
def test_members_join_and_messages_pass_both_ways_in_order(key: ClusterKey | None) -> None:
    async def test() -> None:
        first = leader(key)
        async with running(first):
            one, two = member(key, first, "n1"), member(key, first, "n2", domain="rack-2")
            async with running(one, two):
                await first.until("joined", "n1")
                await first.until("joined", "n2")
                await one.until("joined", "n0")
                await two.until("joined", "n0")
                assert first.cluster.members == {"n1": one.cluster.me, "n2": two.cluster.me}
                assert one.cluster.members == {"": first.cluster.me}
                for number in range(500):
                    assert one.cluster.send("", note(f"{number}"))
                    assert first.cluster.send("n2", note(f"{number}"))
                await first.until("message", "n1", 500)
                await two.until("message", "", 500)
                said = [m for what, _, m in first.told if what == "message"]
                assert said == [note(f"{number}") for number in range(500)]
                assert [m for what, _, m in two.told if what == "message"] == said
                assert ("message", "") not in one.kinds()
                assert not first.cluster.send("n3", note("x"))
                assert not one.cluster.send("n2", note("members do not talk to each other"))
        assert first.cluster.num_refused == 0

    run(test)


def test_heartbeats_come_both_ways_where_nothing_else_is_said() -> None:
    async def test() -> None:
        first = leader(KEY)
        async with running(first):
            one = member(KEY, first)
            async with running(one):
                await until(lambda: first.heard.get("n1", 0) >= 4 and one.heard.get("", 0) >= 4)
                assert first.kinds() == [("joined", "n1")]

    run(test)


def test_a_member_that_ends_is_noticed_and_one_that_comes_back_joins() -> None:
    async def test() -> None:
        first = leader(KEY)
        async with running(first):
            one = member(KEY, first)
            async with running(one):
                await one.until("joined", "n0")
                one.cluster.send("", note("last words"))
            await first.until("closed", "n1")
            assert first.kinds() == [("joined", "n1"), ("message", "n1"), ("closed", "n1")]
            assert first.told[-1][2] == "its connection closed"
            assert first.cluster.members == {}
            again = member(KEY, first)
            async with running(again):
                await first.until("joined", "n1", 2)
                assert first.told[-1][2] == again.cluster.me.incarnation

    run(test)


def test_all_that_a_member_said_comes_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrecd.cluster.leader._BATCH", 1)

    async def test() -> None:
        num_messages = 800
        first = leader(KEY)
        async with running(first), speaker(KEY, first) as one:

            def end_meanwhile(node: str, message: Any) -> None:
                if message == note("0"):
                    one.socket.close(1000)
                    time.sleep(0.3)  # the loop is busy while the connection closes

            first.on_message = end_meanwhile
            await one.join()
            for number in range(num_messages):
                await one.socket.send(encode(note(f"{number}")))
            await first.until("closed", "n1")
        kinds = first.kinds()
        assert kinds == [("joined", "n1"), *[("message", "n1")] * num_messages, ("closed", "n1")]

    run(test)


def test_a_member_joins_the_next_leader_at_the_same_place() -> None:
    async def test() -> None:
        first = leader(KEY)
        await first.start()
        one = member(KEY, first)
        async with running(one):
            await one.until("joined", "n0")
            await first.stop()
            await one.until("closed", "")
            assert not one.cluster.send("", note("to nobody"))
            second = leader(KEY, listen=first.cluster.address)
            async with running(second):
                await second.until("joined", "n1")
                await one.until("joined", "n0", 2)
                one.cluster.send("", note("to the second"))
                await second.until("message", "n1")
        assert second.told[0] == ("joined", "n1", one.cluster.me.incarnation)
        assert [m for what, _, m in second.told if what == "message"] == [note("to the second")]

    run(test)


def test_a_member_waits_for_a_leader_and_says_why_once() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
        one = member(KEY, address)
        async with running(one):
            await until(lambda: one.reasons("not joined"))
            await asyncio.sleep(0.5)
            assert one.reasons("not joined") == [f"no leader at {address}: nobody listens there; trying on"]
            first = leader(KEY, listen=address)
            async with running(first):
                await first.until("joined", "n1")

    run(test)


@pytest.mark.parametrize("turns", range(8))
def test_a_member_ends_when_it_is_told_while_a_connection_ends(turns: int) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
        one = member(KEY, address)
        side: Any = one.cluster._side
        end = side._end
        loop = asyncio.get_running_loop()
        serving = asyncio.create_task(one.cluster.serve())

        def cancel_after(left: int) -> None:
            loop.call_soon(serving.cancel) if left == 0 else loop.call_soon(cancel_after, left - 1)

        def end_and_cancel(why: str) -> None:
            end(why)
            side._end = end
            cancel_after(turns)

        side._end = end_and_cancel
        await asyncio.wait([serving], timeout=5)
        assert serving.cancelled()

    run(test)


def test_two_nodes_with_one_name() -> None:
    async def test() -> None:
        first = leader(KEY)
        async with running(first):
            one, double = member(KEY, first), member(KEY, first)
            async with running(one):
                await first.until("joined", "n1")
                async with running(double):
                    await until(lambda: double.reasons("not joined"))
                    (why,) = double.reasons("not joined")
                    (refused,) = first.reasons("node refused")[:1]
                    for text in (why, refused):
                        assert "node n1 at 127.0.0.1:" in text
                        assert "the node at 127.0.0.1 has the same name" in text
                        assert "--name" in text
                    assert first.cluster.members["n1"].incarnation == one.cluster.me.incarnation
                    assert first.kinds() == [("joined", "n1")]
                    await one.stop()  # then the second one is a node that returns
                    await first.until("joined", "n1", 2)
                    assert first.cluster.members["n1"].incarnation == double.cluster.me.incarnation

    run(test)


def test_a_node_called_like_the_leader_is_refused() -> None:
    async def test() -> None:
        first = leader(KEY)
        async with running(first):
            double = member(KEY, first, "n0")
            async with running(double):
                await until(lambda: double.reasons("not joined"))
                assert (
                    f"the leader at {first.cluster.address} is called n0" in double.reasons("not joined")[0]
                )
        assert first.told == []

    run(test)


def test_another_release_is_refused() -> None:
    async def test() -> None:
        first = leader(KEY)
        async with running(first):
            old = member(KEY, first, release="0.0.1")
            async with running(old):
                await until(lambda: old.reasons("not joined"))
                assert "runs flashrec 0.0.1, the leader" in old.reasons("not joined")[0]
        assert first.told == []

    run(test)


def test_an_error_in_what_is_told_is_logged_and_the_next_message_heard() -> None:
    async def test() -> None:
        def fail(node: str, message: Any) -> None:
            if message == note("bad"):
                raise RuntimeError("a bug")

        first = leader(KEY)
        first.on_message = fail
        async with running(first):
            one = member(KEY, first)
            async with running(one):
                await one.until("joined", "n0")
                one.cluster.send("", note("bad"))
                one.cluster.send("", note("good"))
                await first.until("message", "n1", 2)
        assert "RuntimeError: a bug" in first.reasons("internal error")[0]

    run(test)


def test_a_leader_needs_a_free_port() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            node = leader(KEY, listen=f"127.0.0.1:{taken.getsockname()[1]}")
            with pytest.raises(EnvironmentFault, match="in use"):
                await node.start()

    run(test)


def test_without_a_key_only_the_loopback_interface_will_do() -> None:
    for where in ({"listen": "0.0.0.0:0", "join": None}, {"listen": None, "join": "192.0.2.1:7000"}):
        with pytest.raises(UsageError, match="flashrec keygen"):
            Node(info("n"), None, **where)


# --- too much, too slow, too still --------------------------------------------------------------------


class Speaker:
    """A holder of the key that says what it likes."""

    def __init__(self, key: ClusterKey | None, of: Node) -> None:
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        if key is not None:
            key.as_client(self.socket)
        self.socket.connect(f"tcp://{of.cluster.address}")

    async def join(self, name: str = "n1", **changes: Any) -> Any:
        me = info(name, **changes)
        fields = {f: getattr(me, f) for f in nd.JoinCluster.__slots__}
        await self.socket.send(encode(nd.JoinCluster(**fields)))
        return await self.socket.recv()

    async def disconnected(self) -> bool:
        """Whether the leader ends the connection."""
        return bool(await self._monitor.poll(20_000))

    def close(self) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()
        self._context.term()


@contextlib.asynccontextmanager
async def speaker(key: ClusterKey | None, of: Node) -> AsyncIterator[Speaker]:
    it = Speaker(key, of)
    try:
        yield it
    finally:
        it.close()


GARBAGE = [
    [b""],
    [b"\xc1"],
    [os.urandom(1000)],
    [b"\x93\x01\xa4Join\xc0"],
    [encode(nd.NodeHeartbeat(0)), b"and another frame"],
    [encode(nd.NodeHeartbeat(-1))],
    [encode(nd.NodeHeartbeat(1 << 60))],
    [encode(nd.Welcomed("n", "d", "a", "", "r", "0" * 16, 0))],
    [encode(nd.JoinCluster("n1", "d", "127.0.0.1", "", "1", "0" * 16, 0))],
    [encode(nd.CloseProbe(1))],
]


def test_garbage_from_a_member_is_refused_counted_and_harms_nothing() -> None:
    async def test() -> None:
        first = leader(KEY)
        async with running(first):
            one = member(KEY, first, "good")
            async with running(one):
                await one.until("joined", "n0")
                async with speaker(KEY, first) as bad:
                    await bad.join()
                    for frames in GARBAGE:
                        await bad.socket.send_multipart(frames)
                    await bad.socket.send(encode(note("and a message")))
                    await first.until("message", "n1")
                    assert first.cluster.num_refused == len(GARBAGE)
                    assert len(first.reasons("node refused")) == len(GARBAGE)
                one.cluster.send("", note("still here"))
                await first.until("message", "good")
        assert not first.reasons("internal error")

    run(test)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "", "wrong": "name"},
        {"name": "a/b", "wrong": "name"},
        {"name": "x" * 64, "wrong": "name"},
        {"data_address": "a b", "wrong": "data address"},
        {"shard_endpoint": "ipc:///tmp/x", "wrong": "shard endpoint"},
        {"incarnation": "1", "wrong": "incarnation"},
        {"memory_bytes": -1, "wrong": "memory"},
    ],
    ids=lambda change: f"{change['wrong']}",
)
def test_a_node_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    async def test() -> None:
        first = leader(KEY)
        fields = {f: getattr(info("n1"), f) for f in nd.JoinCluster.__slots__}
        fields.update({k: v for k, v in change.items() if k != "wrong"})
        async with running(first), speaker(KEY, first) as bad:
            await bad.socket.send(encode(nd.JoinCluster(**fields)))
            answer = await bad.socket.recv()
            assert change["wrong"].encode() in answer
        assert first.told == []
        assert first.cluster.num_refused == 1

    run(test)


def test_a_frame_that_is_too_large_ends_the_connection_and_nothing_else() -> None:
    async def test() -> None:
        first = leader(KEY)
        async with running(first):
            one = member(KEY, first, "good")
            async with running(one), speaker(KEY, first) as bad:
                await bad.join()
                await first.until("joined", "good")
                await bad.socket.send(b"\0" * (links.MAX_NODE_MESSAGE_BYTES + 1))
                await first.until("closed", "n1")
                with pytest.raises(ProtocolError, match="too many"):
                    one.cluster.send("", note("x" * links.MAX_NODE_MESSAGE_BYTES))
                one.cluster.send("", note("x" * (links.MAX_NODE_MESSAGE_BYTES - 1000)))
                await first.until("message", "good")
        assert ("closed", "good") not in first.kinds()

    run(test)


def test_a_member_that_takes_nothing_is_closed_with_the_reason() -> None:
    async def test() -> None:
        first = leader(KEY)
        async with running(first), speaker(KEY, first) as slow:
            await slow.join()
            await first.until("joined", "n1")
            message = note("x" * (1 << 20))
            for _ in range(2 * links.MAX_WAITING_BYTES // (1 << 20)):
                if not first.cluster.send("n1", message):
                    break
            await first.until("closed", "n1")
            assert "64 MiB wait for it, and it takes none" in first.told[-1][2]
            assert not first.cluster.send("n1", message)
            # Its connection is really cut, not only forgotten.
            assert await slow.disconnected()

    run(test)


def test_as_much_as_one_likes_passes_where_it_is_taken() -> None:
    async def test() -> None:
        first = leader(KEY, suspect_after_s=60.0)
        async with running(first):
            one = Node(info("n1"), KEY, join=first.cluster.address, suspect_after_s=60.0)
            async with running(one):
                await one.until("joined", "n0")
                for round_ in range(1, 5):
                    for _ in range(40):
                        one.cluster.send("", note("x" * (1 << 20)))
                    await first.until("message", "n1", 40 * round_)
                    # It is told so after each 8 MiB.
                    await until(lambda told=4 * round_: one.heard.get("", 0) >= told)
                assert ("closed", "n1") not in first.kinds()

    run(test)


def test_a_member_that_falls_silent_is_closed() -> None:
    """Its host is gone: nothing resets the connection, nothing answers."""

    async def test() -> None:
        first = leader(KEY)
        async with running(first):
            relay = Relay(first.cluster.address)
            await relay.start()
            one = member(KEY, relay.address)
            async with running(one):
                await first.until("joined", "n1")
                relay.pass_on = False
                await first.until("closed", "n1")
                await one.until("closed", "")
                relay.pass_on = True
                await first.until("joined", "n1", 2)
            await relay.stop()

    run(test)


def test_a_node_comes_back_while_its_old_connection_is_still_open() -> None:
    async def test() -> None:
        first = leader(KEY, suspect_after_s=2.0)
        async with running(first), speaker(KEY, first) as old:
            await old.join(incarnation="a" * 16)
            await first.until("joined", "n1")
            async with speaker(KEY, first) as new:
                # The first one answers libzmq's heartbeats and says nothing.
                answer = await new.join(incarnation="b" * 16)
                assert b"has the same name" in answer
            new_one = member(KEY, first)
            async with running(new_one):
                await first.until("joined", "n1", 2)
            assert "has come back as another daemon" in next(t[2] for t in first.told if t[0] == "closed")
            assert [t[1] for t in first.told if t[0] == "joined"] == ["n1", "n1"]

    run(test)


def test_the_same_daemon_over_a_second_connection_replaces_the_first() -> None:
    async def test() -> None:
        first = leader(KEY)
        async with running(first), speaker(KEY, first) as old, speaker(KEY, first) as new:
            await old.join(incarnation="a" * 16)
            await first.until("joined", "n1")
            await new.join(incarnation="a" * 16)
            assert first.kinds() == [("joined", "n1"), ("closed", "n1"), ("joined", "n1")]
            await new.socket.send(encode(note("new")))
            await first.until("message", "n1")
            assert ("closed", "n1") not in first.kinds()[3:]

    run(test)


# --- strangers ----------------------------------------------------------------------------------------


class Relay:
    """Passes bytes on between a node and the leader, and keeps what the node said. `pass_on`: or holds them."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self.recorded: list[bytes] = []
        self.pass_on = True
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there, back = await asyncio.open_connection(*self._to)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, back, keep=True))
                group.create_task(self._copy(there, writer, keep=False))
        except* (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            for end in (writer, back):
                end.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, keep: bool) -> None:
        while data := await reader.read(1 << 16):
            if keep:
                self.recorded.append(data)
            while not self.pass_on:
                await asyncio.sleep(0.01)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


async def ended(reader: asyncio.StreamReader) -> bool:
    """The other end closes the connection; what it says before does not matter."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass
    return True


async def unharmed(first: Node, one: Node) -> None:
    """The member is still one, and messages pass both ways."""
    before = first.kinds().count(("message", "good"))
    one.cluster.send("", note("still here"))
    await first.until("message", "good", before + 1)
    assert ("closed", "good") not in first.kinds()
    assert set(first.cluster.members) == {"good"}


def with_a_member(test: Callable[[Node, Node], Awaitable[None]]) -> None:
    async def whole() -> None:
        first = leader(KEY)
        async with running(first):
            one = member(KEY, first, "good")
            async with running(one):
                await one.until("joined", "n0")
                await test(first, one)
                await unharmed(first, one)
        assert not first.reasons("internal error")

    run(whole)


@pytest.mark.parametrize("key", [OTHER, None], ids=["wrong key", "no key"])
def test_a_stranger_cannot_join(key: ClusterKey | None) -> None:
    async def test(first: Node, one: Node) -> None:
        stranger = member(key, first, "stranger")
        async with running(stranger):
            await until(lambda: stranger.reasons("not joined") and first.reasons("stranger"))
            await until(lambda: first.cluster.num_refused >= 3)  # it tries on
        assert stranger.told == []
        assert "went without having joined" in first.reasons("stranger")[0]

    with_a_member(test)


def test_one_who_knows_the_public_key_alone_cannot_join() -> None:
    async def test(first: Node, one: Node) -> None:
        context = zmq.asyncio.Context()
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            OTHER.as_client(dealer)
            dealer.curve_serverkey = KEY.public
            dealer.connect(f"tcp://{first.cluster.address}")
            await dealer.send(b"let me in")
            await until(lambda: [r for r in first.reasons("stranger") if OTHER.public.decode() in r])
        context.term()

    with_a_member(test)


def test_recorded_bytes_of_a_member_get_nobody_in() -> None:
    async def test(first: Node, one: Node) -> None:
        relay = Relay(first.cluster.address)
        await relay.start()
        recorded = member(KEY, relay.address, "recorded")
        async with running(recorded):
            await first.until("joined", "recorded")
            recorded.cluster.send("", note("once"))
            await first.until("message", "recorded")
        await first.until("closed", "recorded")
        await relay.stop()
        said = b"".join(relay.recorded)
        assert len(said) > 500
        assert b"recorded" not in said  # nothing of it can be read
        assert b"once" not in said
        host, _, port = first.cluster.address.rpartition(":")
        for chunks in ([said], relay.recorded):
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(ConnectionError):
                for chunk in chunks:
                    writer.write(chunk)
                    await writer.drain()
                    await asyncio.sleep(0.02)  # each step of the handshake by itself
            assert await ended(reader)
            writer.close()
        assert first.kinds().count(("joined", "recorded")) == 1
        assert first.kinds().count(("message", "recorded")) == 1

    with_a_member(test)


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" + b"\0" * 8,
        CURVE_GREETING,
        CURVE_GREETING + b"\x04\xff" + b"\x05HELLO" + b"\0" * 249,
        CURVE_GREETING + b"\x06" + struct.pack(">Q", 1 << 40) + b"x" * 100,
        CURVE_GREETING + b"\x06" + struct.pack(">Q", 1 << 20) + b"x" * (1 << 20),
        os.urandom(4096),
    ],
    ids=["nothing", "http", "half", "greeting", "hello", "huge", "large", "random"],
)
def test_one_who_never_shows_a_key_is_disconnected(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrec.protocol.keys.HANDSHAKE_S", 0.5)
    monkeypatch.setattr(connections, "JOIN_S", 1000.0)

    async def test(first: Node, one: Node) -> None:
        host, _, port = first.cluster.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(says)
        assert await ended(reader)
        writer.close()
        await until(lambda: first.reasons("stranger"))

    with_a_member(test)


def test_one_who_has_the_key_and_does_not_join_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "JOIN_S", 0.5)

    async def test(first: Node, one: Node) -> None:
        async with speaker(KEY, first) as idle:
            assert await idle.disconnected()
        assert "did not join" in first.reasons("stranger")[0]

    with_a_member(test)


def test_what_is_said_before_joining_is_refused() -> None:
    async def test(first: Node, one: Node) -> None:
        async with speaker(KEY, first) as early:
            await early.socket.send(encode(note("I never joined")))
            assert b"Envelope from who is no member" in await early.socket.recv()

    with_a_member(test)


def test_many_strangers_exhaust_neither_descriptors_nor_the_log() -> None:
    async def test(first: Node, one: Node) -> None:
        host, _, port = first.cluster.address.rpartition(":")
        num_before = len(os.listdir("/proc/self/fd"))
        writers = []
        for _ in range(400):
            _, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
        # Ours are 400 themselves; the leader keeps MAX_PENDING of the other ends.
        bound = num_before + len(writers) + connections.MAX_PENDING + 40
        await until(lambda: len(os.listdir("/proc/self/fd")) <= bound)
        assert one.cluster.members
        newcomer = member(KEY, first, "late")
        async with running(newcomer):
            await first.until("joined", "late")
        await first.until("closed", "late")
        assert first.cluster.num_refused >= 400 - connections.MAX_PENDING
        assert len(first.reasons("stranger")) <= 25
        for writer in writers:
            writer.close()

    with_a_member(test)


def test_strangers_that_come_and_go_leave_nothing() -> None:
    async def test(first: Node, one: Node) -> None:
        host, _, port = first.cluster.address.rpartition(":")

        async def come_and_go(number: int) -> None:
            for _ in range(number):
                with contextlib.suppress(ConnectionError):
                    reader, writer = await asyncio.open_connection(host, int(port))
                    writer.write(os.urandom(200))
                    await ended(reader)
                    writer.close()

        await come_and_go(200)
        num_before = len(os.listdir("/proc/self/fd"))
        memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await come_and_go(2000)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= num_before + 4)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < 16 << 10  # in KiB
        assert len(first.reasons("stranger")) <= 30

    with_a_member(test)


def test_a_cluster_listens_or_joins() -> None:
    for where in ({"listen": None, "join": None}, {"listen": "127.0.0.1:0", "join": "127.0.0.1:1"}):
        with pytest.raises(UsageError, match="either listens or joins"):
            Cluster(
                info("n"),
                **where,
                key=None,
                log=print,
                on_message=print,
                on_joined=print,
                on_heard=print,
                on_closed=print,
            )
