"""A double of an accelerator for `flashrec.staging`: two streams that run as unfavourably as their marks allow.

Work is done when somebody waits for it, and a random part of it in between; of two streams that could go on, `policy`
says which does. Whatever real streams could get wrong by chance goes wrong here for certain, and raises `Violation`:

- the host reads a buffer, or has another copy put into it, before it has waited for the copy into it
- the host changes a buffer before the copy out of it has run
- a copy reads a tensor before what training was given for it has run, or after what it was given later
- training reads a tensor before what is written to it
- a wait that can never end
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

POLICIES = ("training first", "side first", "random")
POISON = 0xEE


class Violation(AssertionError):
    pass


class Tensor:
    """Memory on the device; `generation` counts what training has written to it."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)
        self.generation = 0


class Mark:
    def __init__(self, stream: str, place: int) -> None:
        self.stream = stream
        self.place = place
        self.is_reached = False


@dataclass
class Work:
    """One entry of a stream's queue: something to do, a mark to reach, or one to wait for."""

    act: Callable[[], None] | None = None
    reaches: Mark | None = None
    waits_for: Mark | None = None


class Double:
    """A `Lane`, and what stands for the training: `train` and `read`."""

    def __init__(self, policy: str, seed: int = 0) -> None:
        self._policy = policy
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._queues: dict[str, deque[Work]] = {"training": deque(), "side": deque()}
        self._num_copies = 0
        self._seen = 0  # how many of them the host has waited for
        self._in_buffer: dict[int, int] = {}  # number of the last copy, by buffer
        self._loading: int | None = None
        # Writes of training: given, done, and given when the copies that come were begun.
        self._given = self._done = self._begun = 0
        self.buffers: list[bytearray] = []
        self.num_host_waits = 0

    # --- training -----------------------------------------------------------------------------------------------

    def train(self, tensor: Tensor, data: bytes) -> None:
        """Queue: `tensor` becomes `data`."""
        with self._lock:
            self._given += 1
            generation = self._given

            def act() -> None:
                tensor.data[:] = data
                tensor.generation = self._done = generation

            self._give("training", Work(act))

    def read(self, tensor: Tensor) -> bytes:
        """What training sees of it when it has come to here."""
        seen: list[bytes] = []
        with self._lock:
            self._give("training", Work(lambda: seen.append(bytes(tensor.data))))
            while not seen:
                self._run_one("training")
        return seen[0]

    def finish(self) -> None:
        """Run all there is."""
        with self._lock:
            while any(self._queues.values()):
                self._run_one("training")

    def host_reads(self, buffer: memoryview) -> bytes:
        with self._lock:
            self._check_seen(buffer, "read")
            return bytes(buffer)

    # --- the lane -----------------------------------------------------------------------------------------------

    def pinned(self, size_bytes: int) -> memoryview:
        self.buffers.append(bytearray(size_bytes))
        return memoryview(self.buffers[-1])

    def training_mark(self) -> Mark:
        with self._lock:
            self._begun = self._given
            return self._mark("training")

    def side_mark(self) -> Mark:
        with self._lock:
            self._loading = None
            return self._mark("side")

    def side_waits(self, mark: Mark) -> None:
        with self._lock:
            self._give("side", Work(waits_for=mark))

    def training_waits(self, mark: Mark) -> None:
        with self._lock:
            self._give("training", Work(waits_for=mark))

    def fetch(self, tensor: Tensor, offset: int, buffer: memoryview) -> None:
        with self._lock:
            begun = self._begun
            # Several copies of one loan go into one buffer, one right after the other, before there is a mark of it.
            if self._loading != id(buffer.obj):
                self._check_seen(buffer, "used again")
            self._loading = id(buffer.obj)
            buffer[:] = bytes([POISON]) * len(buffer)

            def act() -> None:
                if self._done < begun:
                    raise Violation("a copy read a tensor that training had not written yet")
                if tensor.generation > begun:
                    raise Violation("a copy read what training wrote later")
                buffer[:] = tensor.data[offset : offset + len(buffer)]

            self._give_copy(buffer, act)

    def store(self, tensor: Tensor, offset: int, buffer: memoryview) -> None:
        with self._lock:
            begun = self._begun
            self._check_seen(buffer, "used again")
            expected = bytes(buffer)

            def act() -> None:
                if bytes(buffer) != expected:
                    raise Violation("a buffer was changed before the copy out of it had run")
                if self._done < begun:
                    raise Violation("a copy wrote a tensor that training was still using")
                tensor.data[offset : offset + len(buffer)] = buffer

            self._give_copy(buffer, act)

    def wait(self, mark: Mark) -> None:
        with self._lock:
            self.num_host_waits += 1
            while not mark.is_reached:
                self._run_one(mark.stream)
            if mark.stream == "side":
                self._seen = max(self._seen, mark.place)

    # --- how it runs --------------------------------------------------------------------------------------------

    def _check_seen(self, buffer: memoryview, what: str) -> None:
        if self._in_buffer.get(id(buffer.obj), 0) > self._seen:
            raise Violation(f"a buffer was {what} before its copy was complete")

    def _give_copy(self, buffer: memoryview, act: Callable[[], None]) -> None:
        self._num_copies += 1
        self._in_buffer[id(buffer.obj)] = self._num_copies
        self._give("side", Work(act))

    def _give(self, stream: str, work: Work) -> None:
        self._queues[stream].append(work)
        # The stream that comes second gets nowhere until somebody waits for it.
        ahead = {"training first": ["training"], "side first": ["side"], "random": ["training", "side"]}
        for _ in range(self._random.randrange(4)):
            if any(self._can_run(one) for one in ahead[self._policy]):
                self._run_one(stream)

    def _mark(self, stream: str) -> Mark:
        mark = Mark(stream, self._num_copies)
        self._give(stream, Work(reaches=mark))
        return mark

    def _can_run(self, stream: str) -> bool:
        queue = self._queues[stream]
        return bool(queue) and (queue[0].waits_for is None or queue[0].waits_for.is_reached)

    def _run_one(self, wanted: str) -> None:
        """The first in the queue of the stream that the policy prefers."""
        order = {
            "training first": ["training", "side"],
            "side first": ["side", "training"],
            "random": self._random.sample(["training", "side"], 2),
        }[self._policy]
        for stream in order:
            if self._can_run(stream):
                work = self._queues[stream].popleft()
                if work.reaches is not None:
                    work.reaches.is_reached = True
                if work.act is not None:
                    work.act()
                return
        raise Violation(f"the {wanted} stream waits for what can never be")
