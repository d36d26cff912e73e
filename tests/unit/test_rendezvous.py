"""Ranks of one generation find each other, whoever comes first; ranks of an older one find nobody."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import ProtocolError
from flashrec.protocol import messages as msg
from flashrec.rendezvous import RendezvousStore
from flashrecd import rendezvous
from flashrecd.rendezvous import Rendezvous


class Table:
    def __init__(self) -> None:
        self.answers: list[tuple[str, int, str, bytes]] = []
        self.rendezvous = Rendezvous(lambda *answer: self.answers.append(answer))
        self.put, self.get = self.rendezvous.put, self.rendezvous.get


def test_a_value_that_is_there_is_answered_at_once() -> None:
    table = Table()
    table.put(1, "k", b"v")
    table.get("p1", 1, "k")
    assert table.answers == [("p1", 1, "k", b"v")]


def test_a_fetch_waits_for_its_value_and_is_answered_once() -> None:
    table = Table()
    table.get("p1", 1, "k")
    table.get("p2", 1, "k")
    table.get("p1", 1, "other")
    assert table.answers == []
    table.put(1, "k", b"v")
    table.put(1, "k", b"w")
    assert table.answers == [("p1", 1, "k", b"v"), ("p2", 1, "k", b"v")]
    table.get("p3", 1, "k")
    assert table.answers[2:] == [("p3", 1, "k", b"w")]


def test_a_newer_generation_clears_and_an_older_one_changes_nothing() -> None:
    table = Table()
    table.put(1, "k", b"old")
    table.get("p1", 1, "awaited")
    table.get("p2", 2, "k")
    assert table.answers == []
    table.put(1, "k", b"late")
    table.put(1, "awaited", b"late")
    table.get("p1", 1, "k")
    assert table.answers == []
    table.put(2, "k", b"new")
    assert table.answers == [("p2", 2, "k", b"new")]


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_KEYS", 2)
    monkeypatch.setattr(rendezvous, "MAX_VALUE_BYTES", 10)
    table = Table()
    with pytest.raises(ProtocolError, match="no room for 'k' \\(11 bytes\\)"):
        table.put(1, "k", b"x" * 11)
    table.put(1, "a", b"")
    table.put(1, "b", b"")
    table.put(1, "a", b"again")
    with pytest.raises(ProtocolError, match="no room"):
        table.put(1, "c", b"")
    table.get("p", 1, "a")
    table.get("p", 1, "c")
    table.get("p", 1, "d")
    with pytest.raises(ProtocolError, match="no room"):
        table.get("p", 1, "d")
    table.put(2, "c", b"")


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get"]), st.integers(1, 3), st.sampled_from("ab"), st.integers(0, 3))
)


@given(OPERATIONS)
def test_answers_belong_to_the_newest_generation_and_to_a_fetch(
    operations: list[tuple[str, int, str, int]],
) -> None:
    table, newest = Table(), 0
    fetched: set[tuple[str, int, str]] = set()
    put: set[tuple[int, str, bytes]] = set()
    for kind, generation, key, number in operations:
        newest = max(newest, generation)
        before = len(table.answers)
        if kind == "put":
            put.add((generation, key, bytes([number])))
            table.put(generation, key, bytes([number]))
        else:
            fetched.add((f"p{number}", generation, key))
            table.get(f"p{number}", generation, key)
        for requester, answered, answered_key, value in table.answers[before:]:
            assert answered == newest == generation
            assert (requester, answered, answered_key) in fetched
            assert (answered, answered_key, value) in put


def test_what_a_daemon_took_with_it_is_said_again_to_the_next() -> None:
    said: list[msg.Message] = []
    asked = threading.Event()

    def send(message: msg.Message) -> None:
        said.append(message)
        if isinstance(message, msg.Get):
            asked.set()

    store = RendezvousStore("p1", 3, send)
    store.set("mine", b"here")
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(store.get("theirs")))
    waiting.start()
    assert asked.wait(20)
    before = list(said)
    store.say_again()
    assert said == before * 2 == [msg.Put("p1", 3, "mine", b"here"), msg.Get("p1", 3, "theirs")] * 2
    store.take(msg.Value(3, "theirs", b"there"))
    waiting.join(20)
    assert found == [b"there"]
    store.say_again()
    assert said[4:] == [msg.Put("p1", 3, "mine", b"here")]
