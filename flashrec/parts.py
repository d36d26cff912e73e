"""The parts of the state that survivors announce to a replacement, gathered by the link's thread."""

import threading
from collections.abc import Sequence

from flashrec.errors import GroupsAborted, RecoveryFailed
from flashrec.protocol import messages as msg

DEADLINE_S = 600.0


class Parts:
    """Those of one generation at a time; `wait()` on the main thread, the rest on the link's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generation = 0
        self._aborted = 0
        self._parts: dict[int, msg.PartReady] = {}

    def add(self, part: msg.PartReady) -> None:
        with self._changed:
            if part.generation < self._generation:
                return
            if part.generation > self._generation:
                self._generation, self._parts = part.generation, {}
            self._parts[part.rank] = part
            self._changed.notify_all()

    def abort(self, generation: int) -> None:
        with self._changed:
            self._aborted = max(self._aborted, generation)
            self._changed.notify_all()

    def aborted(self, generation: int) -> bool:
        return self._aborted >= generation

    def wait(self, generation: int, ranks: Sequence[int]) -> list[msg.PartReady]:
        """What `ranks` announce, in order; at once if there are none. GroupsAborted when the generation is given up
        meanwhile."""
        if not ranks:
            return []
        with self._changed:

            def complete() -> bool:
                return self._generation == generation and all(rank in self._parts for rank in ranks)

            if not self._changed.wait_for(lambda: self._aborted >= generation or complete(), DEADLINE_S):
                raise RecoveryFailed(
                    f"generation {generation}: no answer from {list(ranks)} in {DEADLINE_S:.0f} s"
                )
            if self._aborted >= generation:
                raise GroupsAborted(f"generation {generation} was given up")
            return [self._parts[rank] for rank in ranks]
