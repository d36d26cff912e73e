"""What the daemon has to say to its peers, and what becomes of it if one does not read.

ZeroMQ holds MAX_LINE messages for a peer, and lets a sender wait after that. Waiting for one would keep the news from
all others, so what does not go waits here, in order, up to a bound. A peer that reads nothing and is owed more than
that is cut off: it will get all that waits, but nothing that is said from then on, until it has read on. Who must not
miss anything, as a rank must not, is cut off for good.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

MAX_LINE = 1000
MAX_UNREAD_BYTES = 64 << 20
"""Eight times what a job's output may be ahead of who shows it: enough for that, and for a long event log."""
RETRY_S = 0.01

Send = Callable[[bytes, bytes], Awaitable[bool]]
"""`(peer, message)`: False if the peer's line is full. Never waits for the peer."""


@dataclass
class _Line:
    waiting: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0
    is_cut: bool = False
    for_good: bool = False


class Outbox:
    """`cut_off(peer, num_bytes)` is called once each time; it says whether that is for good. A peer for which it is
    stays known until `forget()`; of all others nothing is kept beyond what waits."""

    def __init__(
        self, cut_off: Callable[[bytes, int], bool], max_unread_bytes: int = MAX_UNREAD_BYTES
    ) -> None:
        self._cut_off = cut_off
        self._max_unread_bytes = max_unread_bytes
        self._lines: dict[bytes, _Line] = {}
        self._filled = asyncio.Event()

    def put(self, peer: bytes, data: bytes, *, is_last: bool = False) -> None:
        """`is_last`: goes even to a peer that was cut off, unless for good."""
        line = self._lines.setdefault(peer, _Line())
        if line.for_good or (line.is_cut and not is_last):
            return
        line.waiting.append(data)
        line.num_bytes += len(data)
        self._filled.set()
        # A single message, however large, is not what piles up.
        if not line.is_cut and line.num_bytes > self._max_unread_bytes and len(line.waiting) > 1:
            line.is_cut = True  # before anybody is told, who may want to tell the peer
            line.for_good = self._cut_off(peer, line.num_bytes)

    def is_cut_off(self, peer: bytes | None) -> bool:
        line = self._lines.get(peer) if peer is not None else None
        return line is not None and line.is_cut

    def forget(self, peer: bytes) -> None:
        """It is gone."""
        self._lines.pop(peer, None)

    async def deliver(self, send: Send) -> None:
        """Until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            if await self.flush(send):
                await asyncio.sleep(RETRY_S)
                self._filled.set()

    async def flush(self, send: Send) -> bool:
        """Hand over what goes now; whether anything is left."""
        is_left = False
        for peer, line in list(self._lines.items()):
            while line.waiting:
                if not await send(peer, line.waiting[0]):
                    is_left = True
                    break
                line.num_bytes -= len(line.waiting.popleft())
            if not line.waiting and not line.for_good and self._lines.get(peer) is line:
                del self._lines[peer]
        return is_left
