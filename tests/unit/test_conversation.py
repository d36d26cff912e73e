"""Each message of a part is heard once and in order, whatever becomes of the connections it travels over."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import ProtocolError
from flashrec.protocol import agents as ag
from flashrec.protocol.codec import encode
from flashrecd.conversation import MAX_UNHEARD_BYTES, TELL_EVERY, Conversation


class Line:
    """Two sides and a connection between them. What is under way is lost when it breaks."""

    def __init__(self) -> None:
        self.is_up = True
        self.wires: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self.heard: tuple[list[Any], list[Any]] = ([], [])
        self.given_up: list[str] = []
        self.sides = tuple(
            Conversation(
                "job.1",
                ag.PartNote | ag.PartEnded,
                send=lambda message, side=side: self._send(side, message),  # type: ignore[misc]
                hear=self.heard[side].append,
                given_up=self.given_up.append,
            )
            for side in (0, 1)
        )

    def _send(self, side: int, message: Any) -> bool:
        if self.is_up:
            self.wires[1 - side].append(message)
        return self.is_up

    def deliver(self, side: int) -> None:
        """One message to `side`, if one is under way."""
        if self.wires[side]:
            self.sides[side].take(self.wires[side].popleft())

    def cut(self) -> None:
        self.is_up = False
        for wire in self.wires:
            wire.clear()

    def connect(self) -> None:
        if not self.is_up:
            self.is_up = True
            for side in self.sides:
                side.connected()

    def settle(self) -> None:
        while any(self.wires):
            for side in (0, 1):
                self.deliver(side)


def note(number: int) -> ag.PartNote:
    return ag.PartNote("event", str(number), None)


@given(st.lists(st.sampled_from(["say 0", "say 1", "to 0", "to 1", "cut", "connect"]), max_size=60))
def test_all_is_heard_once_and_in_order(what: list[str]) -> None:
    line = Line()
    said: tuple[list[Any], list[Any]] = ([], [])
    for number, step in enumerate(what):
        match step.split():
            case ["say", side]:
                line.sides[int(side)].say(note(number))
                said[int(side)].append(note(number))
            case ["to", side]:
                line.deliver(int(side))
            case ["cut"]:
                line.cut()
            case ["connect"]:
                line.connect()
        for side in (0, 1):
            assert line.heard[1 - side] == said[side][: len(line.heard[1 - side])]
    line.connect()
    line.settle()
    assert line.heard == (said[1], said[0])


def test_what_has_been_heard_is_not_kept() -> None:
    line = Line()
    for number in range(1000):
        line.sides[0].say(note(number))
        line.deliver(1)
    line.settle()
    assert len(line.sides[0]._unheard) < 100
    assert line.heard[1] == [note(number) for number in range(1000)]


def test_a_side_that_is_owed_too_much_is_given_up() -> None:
    line = Line()
    line.cut()
    big = ag.PartNote("event", "x" * (MAX_UNHEARD_BYTES // 8), None)
    for _ in range(20):
        line.sides[0].say(big)
    assert len(line.given_up) == 1
    assert not line.sides[0]._unheard
    line.connect()
    line.settle()
    assert line.heard[1] == []


def test_who_has_heard_more_than_was_said_is_refused() -> None:
    line = Line()
    with pytest.raises(ProtocolError, match="5 messages"):
        line.sides[0].take(ag.Resume("job.1", 5, True))


def test_what_is_no_report_is_refused() -> None:
    line = Line()
    line.sides[0].say(ag.EndPart())
    with pytest.raises(ProtocolError, match="EndPart"):
        line.settle()


def resumed(line: Line, heard: int) -> Conversation:
    """The second side dies, having written down that it has heard so many, and another takes its place."""
    line.cut()
    line.heard[1].clear()
    side = Conversation(
        "job.1",
        ag.PartNote | ag.PartEnded,
        send=lambda message: line._send(1, message),
        hear=line.heard[1].append,
        given_up=line.given_up.append,
    )
    side.resume(heard)
    line.sides = (line.sides[0], side)
    return side


@given(
    st.lists(st.sampled_from(["say 0", "say 1", "to 0", "to 1", "cut", "connect"]), max_size=40),
    st.lists(st.sampled_from(["say 0", "say 1", "to 0", "to 1", "cut", "connect"]), max_size=40),
)
def test_who_takes_the_place_of_a_dead_side_hears_what_that_had_not_and_is_heard(
    before: list[str], after: list[str]
) -> None:
    line = Line()
    said: tuple[list[Any], list[Any]] = ([], [])

    def do(steps: list[str]) -> None:
        for step in steps:
            match step.split():
                case ["say", side]:
                    said[int(side)].append(note(len(said[int(side)])))
                    line.sides[int(side)].say(said[int(side)][-1])
                case ["to", side]:
                    line.deliver(int(side))
                case ["cut"]:
                    line.cut()
                case ["connect"]:
                    line.connect()

    do(before)
    heard, heard_of_it = len(line.heard[1]), len(line.heard[0])
    del line.heard[0][:]
    said[1].clear()  # what it has said and the other not heard is lost
    resumed(line, line.sides[1].received)
    assert line.sides[1].received == heard
    do(after)
    line.connect()
    line.settle()
    assert line.heard[1] == said[0][heard:]
    assert line.heard[0] == said[1]
    assert heard_of_it + len(said[1]) == line.sides[0].received


def test_a_message_is_written_down_before_it_is_acknowledged_or_carried_out() -> None:
    happened: list[Any] = []
    side = Conversation(
        "job.1",
        ag.PartNote,
        send=lambda message: happened.append(message) or True,  # type: ignore[func-returns-value]
        hear=happened.append,
        given_up=happened.append,
        record=happened.append,
    )
    data = encode(note(1))
    for number in range(1, TELL_EVERY + 1):
        happened.clear()
        side.take(ag.Envelope("job.1", number, 0, data))
    assert happened == [TELL_EVERY, ag.Resume("job.1", TELL_EVERY, False), note(1)]
    happened.clear()
    side.take(ag.Envelope("job.1", TELL_EVERY, 0, data))
    assert happened == []
