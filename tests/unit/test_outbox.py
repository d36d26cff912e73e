"""What waits for a peer that does not read is bounded, and a rank never misses a message unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flashrec.protocol import messages as msg
from flashrec.protocol.codec import decode
from flashrecd.outbox import MAX_UNREAD_BYTES, Outbox
from flashrecd.shell import Daemon


class Peers:
    """Those in `full` take nothing."""

    def __init__(self, *full: bytes) -> None:
        self.full = set(full)
        self.got: list[tuple[bytes, bytes]] = []

    async def send(self, peer: bytes, data: bytes) -> bool:
        if peer not in self.full:
            self.got.append((peer, data))
        return peer not in self.full


def test_who_does_not_read_holds_up_nobody_else_and_misses_nothing() -> None:
    peers, outbox = Peers(b"slow"), Outbox(lambda peer, num_bytes: False)
    for peer in (b"slow", b"quick", b"slow"):
        outbox.put(peer, peer + b"'s")
    assert asyncio.run(outbox.flush(peers.send))
    assert peers.got == [(b"quick", b"quick's")]
    peers.full.clear()
    assert not asyncio.run(outbox.flush(peers.send))
    assert peers.got[1:] == [(b"slow", b"slow's")] * 2


def test_who_is_owed_too_much_is_cut_off_until_it_has_read_on() -> None:
    cut: list[tuple[bytes, int]] = []

    def cut_off(peer: bytes, num_bytes: int) -> bool:
        cut.append((peer, num_bytes))
        outbox.put(peer, b"you are cut off")  # it is not told that either
        return False

    peers, outbox = Peers(b"p"), Outbox(cut_off, max_unread_bytes=10)
    for letter in b"abcdef":
        outbox.put(b"p", bytes([letter]) * 4)
    assert cut == [(b"p", 12)]
    assert outbox.is_cut_off(b"p")
    outbox.put(b"p", b"the end", is_last=True)
    peers.full.clear()
    asyncio.run(outbox.flush(peers.send))
    assert [data for _, data in peers.got] == [b"aaaa", b"bbbb", b"cccc", b"the end"]
    assert not outbox.is_cut_off(b"p")
    outbox.put(b"p", b"again")
    asyncio.run(outbox.flush(peers.send))
    assert peers.got[-1] == (b"p", b"again")


def test_who_must_miss_nothing_is_cut_off_for_good() -> None:
    peers, outbox = Peers(b"p"), Outbox(lambda peer, num_bytes: True, max_unread_bytes=10)
    for letter in b"abcd":
        outbox.put(b"p", bytes([letter]) * 4)
    peers.full.clear()
    asyncio.run(outbox.flush(peers.send))
    outbox.put(b"p", b"later", is_last=True)
    asyncio.run(outbox.flush(peers.send))
    assert [data for _, data in peers.got] == [b"aaaa", b"bbbb", b"cccc"]
    outbox.forget(b"p")
    outbox.put(b"p", b"another's")
    asyncio.run(outbox.flush(peers.send))
    assert peers.got[-1] == (b"p", b"another's")


def test_one_message_may_be_large() -> None:
    outbox = Outbox(lambda peer, num_bytes: pytest.fail("nothing has piled up"), max_unread_bytes=10)
    outbox.put(b"p", b"x" * 11)
    assert not outbox.is_cut_off(b"p")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "run")
    yield made
    made.log.close()
    made.run.close()


LINE = msg.Happened("x" * (1 << 20))
NUM_LINES = (MAX_UNREAD_BYTES >> 20) + 10


def test_a_command_line_that_does_not_read_hears_the_jobs_end_all_the_same(daemon: Daemon) -> None:
    daemon._service = cast(Any, SimpleNamespace(client=b"client"))
    daemon.log.listener = lambda line: daemon._reply(b"client", msg.Happened(line))
    for _ in range(NUM_LINES):
        daemon._reply(b"client", LINE)
    daemon._reply(b"client", msg.JobEnded("job", 0, "done"))
    assert daemon.log.path.read_text().count("command line cut off") == 1
    peers = Peers()
    asyncio.run(daemon._outbox.flush(peers.send))
    assert len(peers.got) < NUM_LINES
    assert decode(peers.got[-1][1]) == msg.JobEnded("job", 0, "done")


@pytest.mark.parametrize("rank", [3, None])
def test_a_rank_or_standby_that_does_not_read_is_ended(daemon: Daemon, rank: int | None) -> None:
    ended: list[tuple[str, str]] = []

    async def run() -> None:
        job = SimpleNamespace(
            core=SimpleNamespace(rank_of=lambda proc: rank),
            condemn=lambda proc, why: ended.append(("condemned", proc)),
            log=lambda event, reason: None,
        )
        daemon._service = cast(Any, SimpleNamespace(job=job))
        daemon.supervisor = cast(Any, SimpleNamespace(kill_group=lambda proc: ended.append(("killed", proc))))
        daemon._bind(b"rank", "p4")
        for _ in range(NUM_LINES):
            daemon._reply(b"rank", LINE)
        assert not ended, "the core is told in a turn of its own"
        await asyncio.sleep(0)

    asyncio.run(run())
    assert ended == [("condemned" if rank is not None else "killed", "p4")]
