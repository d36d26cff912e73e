"""State on an accelerator, read and written through a few pinned buffers, beside the training. No torch.

Training queues its work on its own stream; copies are queued on a second one, the side. A mark is a place in a
stream's queue; it is *reached* when all before it is done.

    sealing     begin (Enter)      take a mark of the training stream: the side copies nothing before it is reached
                lend ...           device -> buffer on the side; the *host* thread waits for the copy, the training
                                   stream does not
                end (gate, stop)   what training queues from here on waits for the copies that are queued, on the device
    restoring   begin              the same
                write_piece ...    host -> buffer -> device on the side
                read_piece ...     and back, to be checked
                end                what training queues from here on sees what was written

So training waits at the gate only, for what is not sealed by then. A buffer belongs to one of

    free -> copying -> lent -> free     (read)
    free -> copying -> free             (written, or read ahead and not wanted any more)

and leaves `copying` only when the host has seen its copy's mark reached. There is a fixed number of them: whoever finds
none waits for the oldest copy, or for a buffer to be given back.

Shown so far: this class, against a double of an accelerator that runs both streams as unfavourably as their marks
allow and notices what is read, written or used again too early (`tests/unit/test_staging.py`). It has not run on an
accelerator; `tests/integration/test_accelerator.py` does that where there is one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from flashrec.errors import EnvironmentFault
from flashrec.state.codec import Buffer
from flashrec.state.layout import Piece
from flashrec.state.manifest import CHUNK_BYTES
from flashrec.state.memory import copy_bytes

T = TypeVar("T")
TensorT_contra = TypeVar("TensorT_contra", contravariant=True)
MarkT = TypeVar("MarkT")

NUM_BUFFERS = 4
# Nobody keeps a buffer for longer than a chunk takes.
STUCK_S = 120.0


class Lane(Protocol[TensorT_contra, MarkT]):
    """What an accelerator is to `Staging`. Nothing but `wait` blocks the caller."""

    def pinned(self, size_bytes: int) -> memoryview:
        """Host memory that copies can be queued to and from."""

    def training_mark(self) -> MarkT:
        """After all that the calling thread's training stream has been given so far."""

    def side_mark(self) -> MarkT:
        """After all that the side has been given so far."""

    def side_waits(self, mark: MarkT) -> None:
        """What the side is given from here on starts when `mark` is reached."""

    def training_waits(self, mark: MarkT) -> None:
        """What the calling thread's training stream is given from here on starts when `mark` is reached."""

    def fetch(self, tensor: TensorT_contra, offset: int, buffer: memoryview) -> None:
        """Queue on the side: bytes of the tensor, from `offset` in C order on, fill `buffer`."""

    def store(self, tensor: TensorT_contra, offset: int, buffer: memoryview) -> None:
        """Queue on the side: `buffer` becomes those bytes."""

    def wait(self, mark: MarkT) -> None:
        """Block this thread until `mark` is reached."""


class _Copy(Generic[MarkT]):
    """A buffer whose copies are queued up to `mark`."""

    def __init__(self, buffer: memoryview, mark: MarkT) -> None:
        self.buffer = buffer
        self.mark = mark


class Staging(Generic[T, MarkT]):
    """`tensors`, on one accelerator, to those who seal and restore them (`PieceReader`, `PieceWriter`): piece numbers
    refer to them. `begin` and `end` belong to the thread that trains; any thread may do the rest in between."""

    def __init__(
        self,
        lane: Lane[T, MarkT],
        tensors: Sequence[T],
        *,
        buffer_bytes: int = CHUNK_BYTES,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        assert num_buffers >= 1
        self._lane = lane
        self._tensors = list(tensors)
        self._buffer_bytes = buffer_bytes
        self._num_buffers = num_buffers
        # Whoever holds it may queue on the side.
        self._condition = threading.Condition()
        self._free = [lane.pinned(buffer_bytes) for _ in range(num_buffers)]
        self._ahead: dict[tuple[Piece, ...], _Copy[MarkT]] = {}
        self._draining: deque[_Copy[MarkT]] = deque()
        self._is_open = False

    def begin(self) -> None:
        """What the training stream has been given so far is what is read, and comes before what is written."""
        with self._condition:
            assert not self._is_open, "begin() without an end() to the last one"
            self._lane.side_waits(self._lane.training_mark())
            self._is_open = True

    def end(self) -> None:
        """What the training stream is given from here on comes after every copy. Nothing is queued any more until
        `begin`. Does not block. Safe to call twice."""
        with self._condition:
            if not self._is_open:
                return
            self._is_open = False
            self._draining += self._ahead.values()
            self._ahead.clear()
            self._lane.training_waits(self._lane.side_mark())

    def close(self) -> None:
        """End, and wait until no copy needs a buffer any more: before that its memory must not go."""
        self.end()
        with self._condition:
            self._lane.wait(self._lane.side_mark())
            self._free += [copy.buffer for copy in self._draining]
            self._draining.clear()

    @contextlib.contextmanager
    def lend(self, pieces: Sequence[Piece], ahead: Sequence[Piece] = ()) -> Iterator[list[memoryview]]:
        """The bytes of `pieces` (at most a buffer's worth), valid inside the block. `ahead`: what is likely to be asked
        for next; it is queued if a buffer is free."""
        wanted = tuple(pieces)
        copy = self._copy_of(wanted)
        try:
            self._read_ahead(tuple(ahead))
            self._lane.wait(copy.mark)
            yield _cut(copy.buffer, wanted)
        except BaseException:
            # Its copy may still be under way.
            with self._condition:
                self._drain(copy.buffer)
            raise
        self._give_back(copy.buffer)

    def read_piece(self, piece: Piece) -> memoryview:
        """A copy of the piece's bytes."""
        copied = np.empty(piece.size_bytes, np.uint8)
        for part in self._parts(piece):
            with self.lend([part]) as (view,):
                start = part.offset - piece.offset
                copy_bytes(copied[start : start + part.size_bytes], np.frombuffer(view, np.uint8))
        return copied.data

    def piece_memory(self, piece: Piece) -> memoryview | None:
        """None: the host cannot address it."""
        return None

    def write_piece(self, piece: Piece, data: Buffer) -> None:
        """Put the piece's bytes in place; returns when `data` is not needed any more."""
        source = np.frombuffer(data, np.uint8)
        if source.nbytes != piece.size_bytes:
            raise ValueError(f"{source.nbytes} bytes for {piece}")
        for part in self._parts(piece):
            start = part.offset - piece.offset
            with self._condition:
                self._check_open()
                buffer = self._free_buffer()
            try:
                copy_bytes(
                    np.frombuffer(buffer, np.uint8)[: part.size_bytes],
                    source[start : start + part.size_bytes],
                )
                with self._condition:
                    self._check_open()
                    self._lane.store(self._tensors[part.tensor_index], part.offset, buffer[: part.size_bytes])
            finally:
                with self._condition:
                    self._drain(buffer)

    # --- buffers ----------------------------------------------------------------------------------------------

    def _parts(self, piece: Piece) -> Iterator[Piece]:
        """The piece in shares of a buffer at most."""
        for start in range(0, piece.size_bytes, self._buffer_bytes):
            size_bytes = min(self._buffer_bytes, piece.size_bytes - start)
            yield Piece(piece.tensor_index, piece.offset + start, size_bytes)

    def _copy_of(self, pieces: tuple[Piece, ...]) -> _Copy[MarkT]:
        assert sum(piece.size_bytes for piece in pieces) <= self._buffer_bytes, "more than a buffer holds"
        with self._condition:
            found = self._ahead.pop(pieces, None)
            return found if found is not None else self._queue(self._free_buffer(), pieces)

    def _read_ahead(self, pieces: tuple[Piece, ...]) -> None:
        with self._condition:
            # The last free buffer is left to those who cannot do without.
            if pieces and pieces not in self._ahead and len(self._free) > 1 and self._is_open:
                self._ahead[pieces] = self._queue(self._free.pop(), pieces)

    def _queue(self, buffer: memoryview, pieces: Sequence[Piece]) -> _Copy[MarkT]:
        try:
            self._check_open()
            for piece, view in zip(pieces, _cut(buffer, pieces), strict=True):
                self._lane.fetch(self._tensors[piece.tensor_index], piece.offset, view)
        except BaseException:
            self._drain(buffer)
            raise
        return _Copy(buffer, self._lane.side_mark())

    def _free_buffer(self) -> memoryview:
        """Whoever calls holds the condition, and may lose it for a while."""
        while not self._free:
            if not self._draining and self._ahead:
                # Read ahead for somebody who has not come.
                self._draining.append(self._ahead.pop(next(iter(self._ahead))))
            if self._draining:
                # The side goes first in, first out: no other copy is done before this one.
                copy = self._draining.popleft()
                self._condition.release()
                try:
                    self._lane.wait(copy.mark)
                except BaseException:
                    self._condition.acquire()
                    self._draining.appendleft(copy)
                    raise
                self._condition.acquire()
                self._free.append(copy.buffer)
                self._condition.notify_all()
            elif not self._condition.wait_for(lambda: self._free or self._draining, STUCK_S):
                raise EnvironmentFault(
                    f"none of {self._num_buffers} pinned buffers has been given back for {STUCK_S:g} s: "
                    "sealing is stuck"
                )
        return self._free.pop()

    def _drain(self, buffer: memoryview) -> None:
        """Free once what the side has been given so far is done."""
        self._draining.append(_Copy(buffer, self._lane.side_mark()))
        self._condition.notify_all()

    def _give_back(self, buffer: memoryview) -> None:
        with self._condition:
            self._free.append(buffer)
            self._condition.notify_all()

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("state on an accelerator is read and written between begin() and end()")


def _cut(buffer: memoryview, pieces: Sequence[Piece]) -> list[memoryview]:
    """The pieces' places in the buffer, one after another."""
    views = []
    offset = 0
    for piece in pieces:
        views.append(buffer[offset : offset + piece.size_bytes])
        offset += piece.size_bytes
    return views
