"""Where the ranks of a generation find each other: values put once, and fetches that wait for them."""

from collections.abc import Callable

from flashrec.errors import ProtocolError

MAX_KEYS = 1 << 20
MAX_VALUE_BYTES = 1 << 20


class Rendezvous:
    """`answer(requester, generation, key, value)` is called for each fetch, as soon as its value is there."""

    def __init__(self, answer: Callable[[str, int, str, bytes], None]) -> None:
        self._answer = answer
        self._generation = 0
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[str]] = {}
        self._num_waiting = 0

    def put(self, generation: int, key: str, value: bytes) -> None:
        if not self._current(generation):
            return
        full = len(self._values) >= MAX_KEYS and key not in self._values
        if len(value) > MAX_VALUE_BYTES or full:
            raise ProtocolError(f"the rendezvous has no room for {key!r:.80} ({len(value)} bytes)")
        self._values[key] = value
        for requester in self._waiting.pop(key, []):
            self._num_waiting -= 1
            self._answer(requester, generation, key, value)

    def get(self, requester: str, generation: int, key: str) -> None:
        if not self._current(generation):
            return
        if key in self._values:
            self._answer(requester, generation, key, self._values[key])
        elif self._num_waiting >= MAX_KEYS:
            raise ProtocolError(f"the rendezvous has no room for another fetch of {key!r:.80}")
        else:
            self._num_waiting += 1
            self._waiting.setdefault(key, []).append(requester)

    def _current(self, generation: int) -> bool:
        """A newer generation clears the table; what bears an older one is fenced off."""
        if generation > self._generation:
            self._generation, self._values, self._waiting, self._num_waiting = generation, {}, {}, 0
        return generation == self._generation
