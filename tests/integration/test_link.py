"""A rank's line to its daemon when that dies, against a daemon made of a socket and of a process that can be killed."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from flashrec import link as link_module
from flashrec.errors import ProtocolError
from flashrec.link import DaemonFound, DaemonLost, Link
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import decode, encode
from flashrec.protocol.phase import Phase

DEADLINE_MS = 20_000


class FakeDaemon:
    """A ROUTER at `address`, and a process whose death is this daemon's."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)
        self.process = subprocess.Popen(["sleep", "1000"])
        self.peer = b""

    def next(self, *kinds: type) -> msg.Message:
        """The next message of one of `kinds`; heartbeats and others are passed over."""
        while self.socket.poll(DEADLINE_MS):
            self.peer, data = self.socket.recv_multipart()
            message = decode(data)
            if isinstance(message, kinds):
                return message
        raise AssertionError(f"none of {kinds} came")

    def say(self, message: msg.Message | bytes) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        self.socket.send_multipart([self.peer, data])

    def welcome(self, *, patience_s: float = 60.0, rank: int | None = 1) -> msg.Welcome:
        return msg.Welcome(
            proc="p1",
            job="job", shm_dir="/nowhere", rank=rank, world_size=2, generation=1, replacement=False, pull="shm",
            shard_address="", heartbeat_s=5.0, daemon_pid=self.process.pid, external=False, patience_s=patience_s,
        )  # fmt: skip

    def die(self) -> None:
        self.socket.close()
        self._context.term()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(link_module, "OFFER_S", 0.02)
    return f"ipc://{tmp_path / 'sock'}"


@pytest.fixture
def first(address: str) -> Iterator[FakeDaemon]:
    made = FakeDaemon(address)
    yield made
    if made.process.poll() is None:
        made.die()


def connected(address: str, daemon: FakeDaemon, **welcome: float | None) -> Link:
    """The link greets while it is made, so the answer is there before the question."""

    def answer() -> None:
        daemon.next(msg.Hello)
        daemon.say(daemon.welcome(**welcome))  # type: ignore[arg-type]

    thread = threading.Thread(target=answer)
    thread.start()
    made = Link(address, msg.Hello("p1", os.getpid(), "1.0"))
    thread.join()
    return made


def test_an_orphan_offers_itself_and_is_adopted(address: str, first: FakeDaemon) -> None:
    link = connected(address, first)
    asked: list[int] = []
    link.on_adopted = lambda: asked.append(1)
    link.standing = lambda offer: replace(offer, phase=Phase.PARKED, version=7, generation=3)
    first.die()
    assert isinstance(link.receive(20), DaemonLost)
    assert link.daemon_lost
    link.send(msg.Noted("p1", "said meanwhile", None, ""))
    second = FakeDaemon(address)
    try:
        offer = second.next(msg.Rejoin)
        assert isinstance(offer, msg.Rejoin)
        assert (offer.proc, offer.job, offer.rank, offer.release) == ("p1", "job", 1, "1.0")
        assert (offer.phase, offer.version, offer.generation) == (Phase.PARKED, 7, 3)
        second.say(second.welcome())
        assert isinstance(link.receive(20), DaemonFound)
        assert not link.daemon_lost
        # What was said while nobody heard it comes after the offer, and messages of both ways go on.
        noted = second.next(msg.Noted)
        assert isinstance(noted, msg.Noted)
        assert noted.event == "said meanwhile"
        second.say(msg.Released())
        assert link.receive(20) == msg.Released()
        assert asked == [1]
        # It can be orphaned again.
        second.die()
        assert isinstance(link.receive(20), DaemonLost)
    finally:
        link.close()
        if second.process.poll() is None:
            second.die()


def test_an_offer_says_what_is_so_when_a_daemon_is_there(address: str, first: FakeDaemon) -> None:
    """Not what was so when the daemon died: training goes on."""
    link = connected(address, first)
    version = [5]
    link.standing = lambda offer: replace(offer, version=version[0])
    first.die()
    assert isinstance(link.receive(20), DaemonLost)
    version[0] = 6
    second = FakeDaemon(address)
    offer = second.next(msg.Rejoin)
    assert isinstance(offer, msg.Rejoin)
    assert offer.version == 6
    link.close()
    second.die()


def test_whom_a_daemon_refuses_it_asks_no_more(address: str, first: FakeDaemon) -> None:
    link = connected(address, first)
    forsaken: list[str] = []
    link.on_forsaken = lambda: forsaken.append(link.forsaken)
    first.die()
    assert isinstance(link.receive(20), DaemonLost)
    second = FakeDaemon(address)
    second.next(msg.Rejoin)
    second.say(msg.Refused("job", "no such job"))
    assert isinstance(link.receive(20), DaemonLost)
    assert "no such job" in link.forsaken
    link.close()
    assert forsaken == [link.forsaken]
    second.die()


def test_a_malformed_message_ends_the_rank_with_its_reason_and_not_the_link(
    address: str, first: FakeDaemon
) -> None:
    link = connected(address, first)
    told: list[str] = []
    link.on_garbled = told.append
    first.say(msg.Prepare())
    first.say(b"\x00garbage")
    first.say(msg.Released())
    assert link.receive(20) == msg.Prepare()
    with pytest.raises(ProtocolError, match="a message of the daemon's is malformed: not"):
        link.receive(20)
    assert link.receive(20) == msg.Released()
    assert len(told) == 1
    link.send(msg.Noted("p1", "it still talks", None, ""))
    assert isinstance(first.next(msg.Noted), msg.Noted)
    link.close()


def test_a_malformed_answer_to_an_offer_is_none(address: str, first: FakeDaemon) -> None:
    link = connected(address, first)
    first.die()
    assert isinstance(link.receive(20), DaemonLost)
    second = FakeDaemon(address)
    second.next(msg.Rejoin)
    second.say(b"garbage")
    second.next(msg.Rejoin)
    second.say(second.welcome())
    assert isinstance(link.receive(20), DaemonFound)
    link.close()
    second.die()


def test_without_patience_there_is_no_other_daemon(address: str, first: FakeDaemon) -> None:
    link = connected(address, first, patience_s=0.0)
    first.die()
    assert isinstance(link.receive(20), DaemonLost)
    assert link.forsaken
    link.close()


def test_a_standby_without_a_rank_offers_itself_to_nobody(address: str, first: FakeDaemon) -> None:
    link = connected(address, first, rank=None)
    first.die()
    assert isinstance(link.receive(20), DaemonLost)
    second = FakeDaemon(address)
    assert not second.socket.poll(200)
    # One that had been given a rank, and learns it only now, is a rank like any other.
    link.take_rank(msg.Assign(1, 3))
    offer = second.next(msg.Rejoin)
    assert isinstance(offer, msg.Rejoin)
    assert (offer.rank, offer.generation) == (1, 3)
    link.close()
    second.die()


def test_when_no_daemon_comes_whoever_waits_is_told_and_the_search_goes_on(
    address: str, first: FakeDaemon
) -> None:
    link = connected(address, first, patience_s=0.01)
    told = threading.Event()
    link.on_forsaken = told.set
    first.die()
    assert told.wait(20)
    assert link.forsaken == ""
    second = FakeDaemon(address)
    second.next(msg.Rejoin)
    link.close()
    second.die()
