"""Who reaches whom: real listeners and transfers on the loopback interface's many addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator

import pytest
import zmq
import zmq.asyncio

from flashrec.protocol.keys import ClusterKey
from flashrec.protocol.nodes import Probe, Probed
from flashrecd.cluster import PairReport
from flashrecd.cluster.reach import Listeners, is_refused, reach
from tests.integration.cluster_nodes import Node, info, leader, member, running, until

KEY = ClusterKey.generate()
TOKEN = bytes(range(32))


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


def by_pair(reports: list[PairReport]) -> dict[tuple[str, str], PairReport]:
    return {(report.by, report.node): report for report in reports}


@contextlib.contextmanager
def zmq_endpoint() -> Iterator[str]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        yield f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


@contextlib.contextmanager
def other_program() -> Iterator[str]:
    """It listens, and says something else than ZeroMQ would."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client_side: list[socket.socket] = []
        loop = asyncio.get_running_loop()

        def answer() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"220 ready\r\n\r\n")
            client_side.append(connection)

        loop.add_reader(listener, answer)
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loop.remove_reader(listener)
            for connection in client_side:
                connection.close()


def test_only_a_machines_own_word_counts_for_nobody_listening_there() -> None:
    async def test() -> None:
        with zmq_endpoint() as endpoint:
            assert not await is_refused(endpoint)
        assert await is_refused(endpoint)
        assert not await is_refused("tcp://no-such-host.invalid:1")

    run(test)


def test_every_pair_is_measured_over_both_addresses() -> None:
    async def test() -> None:
        first = Node(info("n0", data_address="127.0.0.10"), KEY, listen="127.0.0.1:0")
        async with running(first):
            one = member(KEY, first, "n1", data_address="127.0.0.11")
            two = member(KEY, first, "n2", data_address="127.0.0.1")  # that of its cluster messages
            async with running(one, two):
                await one.until("joined", "n0")
                await two.until("joined", "n0")
                with zmq_endpoint() as endpoint:
                    reports = by_pair(
                        await first.cluster.check(["n0", "n1", "n2"], shard_endpoints={"n1": endpoint})
                    )
                assert len(reports) == 6
                for (_, node), report in reports.items():
                    assert report.problem == ""
                    assert report.data_bytes_per_s is not None
                    assert (report.control_bytes_per_s is None) == (node == "n2")
                # What was opened for the check is closed again.
                again = by_pair(await first.cluster.check(["n0", "n1"]))
                assert {r.problem for r in again.values()} == {""}

    run(test)


def test_what_cannot_be_reached_is_named_with_its_pair_and_port() -> None:
    async def test() -> None:
        first = leader(KEY)
        async with running(first):
            wrong = member(KEY, first, "n1", data_address="192.0.2.1")
            right = member(KEY, first, "n2")
            async with running(wrong, right):
                await wrong.until("joined", "n0")
                await right.until("joined", "n0")
                with socket.create_server(("127.0.0.1", 0)) as nobody:
                    port = nobody.getsockname()[1]
                with other_program() as other:
                    reports = by_pair(
                        await first.cluster.check(
                            ["n0", "n1", "n2"], shard_endpoints={"n2": f"tcp://127.0.0.1:{port}", "n0": other}
                        )
                    )
        for by in ("n0", "n2"):
            assert f"node {by} does not reach node n1" in reports[by, "n1"].warning
            assert "cannot listen at its data address 192.0.2.1" in reports[by, "n1"].problem
        for by in ("n0", "n1"):
            assert f"shard endpoint tcp://127.0.0.1:{port} refuses" in reports[by, "n2"].problem
            assert reports[by, "n2"].data_bytes_per_s is not None
        for by in ("n1", "n2"):
            assert f"{other} cannot be reached: another program" in reports[by, "n0"].problem

    run(test)


def test_a_member_that_goes_in_the_middle_ends_the_check() -> None:
    async def test() -> None:
        first = leader(KEY)
        async with running(first):
            one = member(KEY, first)
            async with running(one):
                await one.until("joined", "n0")
                check = asyncio.create_task(first.cluster.check(["n0", "n1"]))
            reports = by_pair(await check)
        assert "gone" in reports["n0", "n1"].problem or "not in the cluster" in reports["n0", "n1"].problem

    run(test)


def test_only_the_token_gets_anything_from_a_listener() -> None:
    async def test() -> None:
        listeners = Listeners()
        ((_, host, port),), problem = await listeners.open([("data", "127.0.0.1")], TOKEN)
        assert problem == ""
        for says in (b"", TOKEN[:-1] + b"\0" + struct.pack(">Q", 100), b"GET / HTTP/1.1\r\n\r\n" * 10):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(says)
            if not says:
                writer.write_eof()
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(TOKEN + struct.pack(">Q", 1 << 60))
        assert len(await reader.read(100)) > 0  # and far less than it asks for, if it read on
        writer.close()
        probed = await reach(Probe(1, "n", (("data", host, port),), "", TOKEN, 1 << 20))
        assert isinstance(probed, Probed)
        assert probed.problem == ""
        assert probed.rates[0][1] > 0
        listeners.close()
        listeners.close()
        closed = await reach(Probe(1, "n", (("data", host, port),), "", TOKEN, 1 << 20))
        assert f"its data address {host}:{port} refuses" in closed.problem

    run(test)


def test_one_that_accepts_and_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrecd.cluster.reach.CONNECT_S", 0.3)

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            probe = Probe(1, "n", (("data", "127.0.0.1", port),), f"tcp://127.0.0.1:{port}", TOKEN, 1 << 20)
            answer = await reach(probe)
        assert answer.problem.count("does not answer") == 2

    run(test)


def test_strangers_at_a_listener_are_bounded() -> None:
    async def test() -> None:
        listeners = Listeners()
        ((_, host, port),), _ = await listeners.open([("data", "127.0.0.1")], TOKEN)
        strangers = [await asyncio.open_connection(host, port) for _ in range(100)]
        turned_away = [reader for reader, _ in strangers]
        await until(lambda: sum(reader.at_eof() for reader in turned_away) >= 100 - 64)
        listeners.close()
        for _, writer in strangers:
            writer.close()

    run(test)
