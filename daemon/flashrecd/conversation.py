"""What a leader and an agent say about a part, heard once and in order, over connections that may break.

Each side keeps what it has said until the other has it. When there is a new connection, both say how far they have
heard, and what came after is said again. That is bounded: a side that is owed too much is given up.

An agent's daemon may die, and another take its place, which knows from a record what had been heard (`resume`). What
the dead one had said and the leader not heard is lost: who takes its place says how things stand instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from flashrec.errors import ProtocolError
from flashrec.protocol import agents as ag
from flashrec.protocol.codec import decode, encode

MAX_UNHEARD_BYTES = 256 << 20
TELL_EVERY = 64
"""So many messages may be heard before the other side, which keeps them, is told."""


class Conversation:
    """One side of it. `send(message)` says whether there is a connection; `hear(message)` gets one of the union
    `expected`; `given_up(why)` is called once, when the other side is owed more than can be kept. `record(number)` is
    told of each message before it is acknowledged or heard."""

    def __init__(
        self,
        part: str,
        expected: Any,
        *,
        send: Callable[[ag.FROM_LEADER], bool],
        hear: Callable[[Any], None],
        given_up: Callable[[str], None],
        record: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.part = part
        self.hear = hear
        self._expected = expected
        self._send = send
        self._given_up = given_up
        self._unheard: deque[ag.Envelope] = deque()
        self._unheard_bytes = 0
        self._number = 0
        self._received = 0
        self._told = 0
        self._is_over = False
        self._record = record
        self._untold: list[Any] | None = None  # until the other side has said what it has heard

    @property
    def received(self) -> int:
        """The number of the last message that was heard."""
        return self._received

    def resume(self, received: int) -> None:
        """Take the place of one that has died, and had heard `received`."""
        self._received = self._told = received
        self._untold = []

    def say(self, message: Any) -> None:
        if self._is_over:
            return
        if self._untold is not None:
            self._untold.append(message)
            return
        self._number += 1
        envelope = ag.Envelope(self.part, self._number, self._received, encode(message))
        self._unheard.append(envelope)
        self._unheard_bytes += len(envelope.data)
        if self._unheard_bytes > MAX_UNHEARD_BYTES:
            self.end()
            self._given_up(f"more than {MAX_UNHEARD_BYTES >> 20} MiB wait for it")
            return
        self._told = self._received
        self._send(envelope)

    def connected(self) -> None:
        """There is a new connection, over which nothing has been said."""
        if not self._is_over:
            self._told = self._received
            self._send(ag.Resume(self.part, self._received, True))

    def take(self, message: ag.Envelope | ag.Resume) -> None:
        """Raises ProtocolError for what cannot be."""
        if self._untold is not None:
            if isinstance(message, ag.Resume):
                self._number = message.received
                untold, self._untold = self._untold, None
                for one in untold:
                    self.say(one)
            return  # anything else will be said again
        self._heard(message.received)
        if isinstance(message, ag.Resume):
            if message.repeat:
                for envelope in tuple(self._unheard):
                    self._send(envelope)
            return
        if message.number <= self._received:
            return  # said again, and heard before
        if message.number != self._received + 1:
            return  # what comes between was lost with a connection, and will be said again, and then this
        self._received = message.number
        self._record(message.number)
        if self._received - self._told >= TELL_EVERY:
            self._told = self._received
            self._send(ag.Resume(self.part, self._received, False))
        self.hear(decode(message.data, self._expected))

    def end(self) -> None:
        """Nothing is said or heard any more."""
        self._is_over = True
        self._unheard.clear()
        self.hear = lambda message: None

    def _heard(self, received: int) -> None:
        if received > self._number:
            raise ProtocolError(
                f"{received} messages of part {self.part} heard, where {self._number} were said"
            )
        while self._unheard and self._unheard[0].number <= received:
            self._unheard_bytes -= len(self._unheard.popleft().data)
