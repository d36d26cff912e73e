"""The transport of a step's one agreement, behind a small seam.

`SharedMemoryGate` is for ranks that are all on one node: an agreement costs each of them one sleep in the
kernel. `AllReduceGate` needs nothing but the world group, and spans nodes; between gloo's threads a few
numbers take ten times as long (`python -m benchmarks.gate`). `open_gate` chooses.

One thread agrees; `abort()` may come from any other, at any moment. A gate belongs to one generation.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import select
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from flashrec.errors import EnvironmentFault, UsageError
from flashrec.groups import GateBroken, GroupSet
from flashrec.state.codec import checksum

MAX_VALUES = 6
"""How many numbers an agreement can be about; the shared memory has room for so many."""


class Gate(ABC):
    """One generation's agreements, among all its ranks."""

    generation: int

    @abstractmethod
    def agree(self, values: Sequence[int]) -> list[int]:
        """Element-wise minimum of all ranks' `values` (64-bit integers, 1 to MAX_VALUES, equally many on each).

        Raises:
            GateBroken: no result arrived here. That does not mean none arrived elsewhere. Every later call
                raises it too.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End the wait of an `agree()` under way, and refuse every later one. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds; not while `agree()` runs. May be called twice."""


class AllReduceGate(Gate):
    """An all-reduce on the world group, which must be formed in this generation before anybody agrees."""

    def __init__(self, groups: GroupSet, generation: int) -> None:
        self._groups = groups
        self.generation = generation

    def agree(self, values: Sequence[int]) -> list[int]:
        return self._groups.agree(values)

    def abort(self, reason: str) -> None:
        self._groups.abort(reason, self.generation)

    def close(self) -> None:
        pass


_WORD = struct.Struct("<I")
_VOTE = struct.Struct(f"<Q{MAX_VALUES}q")
_CHECKSUM = struct.Struct("<Q")
_LINE_BYTES = 192
_PID_AT = 8
_VOTE_AT = (64, 128)
_BROKEN = 0xFFFFFFFF
_LOOK_AGAIN_S = 0.5
# The kernel's numbers for the futex call, which libc gives no name to.
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class SharedMemoryGate(Gate):
    """Ranks of one node agree through a file in shared memory; who waits sleeps in the kernel (a futex).

    The file is <directory>/gate.g<generation>, so nothing of an older generation can be mistaken for a vote.
    It has one line for each rank, and one for the result; each has one writer:

        0     u32   word     the newest round whose numbers are in this line; sleepers wait for it to change
        8     u32   pid      of the line's writer
        64    numbers of even rounds: u64 round, 6 x i64 values, u64 checksum
        128   numbers of odd rounds

    In round n = 1, 2, ... every rank writes its numbers, then its word: n-1 -> n. Rank 0 waits for each word
    in turn, writes the minimum into the result line, and that line's word; all others wait for this one. So
    nobody is more than one round ahead, and numbers of round n are never overwritten before all have read
    them. The checksum covers generation, line and round: numbers that are not (yet) whole are not taken.

    `abort()` writes the final value BROKEN into every word, so one rank's abort ends the wait of all: a
    generation is over when one of its ranks gives it up. A rank whose vote is out may still see others pass
    or break; that is what GateBroken says.

    Nobody is told by the kernel when a peer dies, as with a connection: the daemon's abort comes within
    milliseconds. Should the daemon be gone too, a sleeper looks now and then whether the process it waits
    for is alive (its pid is at offset 8 of its line).
    """

    @staticmethod
    def is_possible() -> bool:
        """Whether this machine's futex call is known here."""
        return platform.machine() in _FUTEX_CALL

    def __init__(
        self, directory: Path | str, rank: int, world_size: int, generation: int, timeout_s: float = 1800
    ) -> None:
        """Make or open the file; ranks may come in any order.

        Raises:
            UsageError: the rank is not in the world.
            EnvironmentFault: no room, no permission, or a machine whose futex call is not known here.
        """
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is not in a world of {world_size}")
        call = _FUTEX_CALL.get(platform.machine())
        if call is None:
            raise EnvironmentFault(f"no shared-memory gate on {platform.machine()}: use the all-reduce")
        self._call = call
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self._timeout_s = timeout_s
        self._round = 0
        self._reason: str | None = None
        self._lock = threading.Lock()
        self._path = Path(directory) / f"gate.g{generation}"
        self._map: mmap.mmap | None = _map(self._path, (world_size + 1) * _LINE_BYTES)
        self._words = [
            ctypes.c_uint32.from_buffer(self._map, line * _LINE_BYTES) for line in range(world_size + 1)
        ]
        self._watched: dict[int, int] = {}  # line -> pidfd of its writer
        for line in (rank, world_size) if rank == 0 else (rank,):
            _WORD.pack_into(self._map, line * _LINE_BYTES + _PID_AT, os.getpid())

    def agree(self, values: Sequence[int]) -> list[int]:
        if not 0 < len(values) <= MAX_VALUES:
            raise UsageError(f"an agreement is about 1 to {MAX_VALUES} numbers, not {len(values)}")
        number = self._round + 1
        if self._reason is not None or self._map is None:
            raise GateBroken(self._reason or "the gate is closed")
        self._round = number
        deadline = time.monotonic() + self._timeout_s
        mine = [*values, *[0] * (MAX_VALUES - len(values))]
        if self.rank:
            self._write(self.rank, number, mine)
            return self._read(self.world_size, number, deadline)[: len(values)]
        for peer in range(1, self.world_size):
            mine = [min(pair) for pair in zip(mine, self._read(peer, number, deadline), strict=True)]
        self._write(self.world_size, number, mine)
        return mine[: len(values)]

    def abort(self, reason: str) -> None:
        with self._lock:
            if self._reason is None:
                self._reason = reason
            if self._map is not None:
                for line in range(self.world_size + 1):
                    self._set_word(line, _BROKEN)

    def close(self) -> None:
        with self._lock:
            self._words.clear()
            mapped, self._map = self._map, None
        if mapped is not None:
            mapped.close()
            self._path.unlink(missing_ok=True)  # others keep their mapping; nobody meets here any more
        while self._watched:
            os.close(self._watched.popitem()[1])

    # --- one line ---------------------------------------------------------------------------------------

    def _write(self, line: int, number: int, values: Sequence[int]) -> None:
        assert self._map is not None
        vote = _VOTE.pack(number, *values)
        at = line * _LINE_BYTES + _VOTE_AT[number % 2]
        self._map[at : at + len(vote)] = vote
        _CHECKSUM.pack_into(self._map, at + len(vote), self._checksum(line, vote))
        with self._lock:
            if self._reason is None:  # else the word is BROKEN, for good
                self._set_word(line, number)

    def _read(self, line: int, number: int, deadline: float) -> list[int]:
        """The numbers of `line` in round `number`, waited for."""
        assert self._map is not None
        word = self._words[line]
        at = line * _LINE_BYTES + _VOTE_AT[number % 2]
        while True:
            seen = word.value
            if seen == number:
                vote = self._map[at : at + _VOTE.size]
                found, *values = _VOTE.unpack(vote)
                told = _CHECKSUM.unpack_from(self._map, at + _VOTE.size)[0]
                if found == number and told == self._checksum(line, vote):
                    return list(values)
                # The word came into sight before the numbers, as some processors allow: look again soon.
                time.sleep(0.0001)
            elif self._reason is not None or seen == _BROKEN:
                raise GateBroken(self._reason or "another rank gave this generation up")
            elif not self._sleep(word, seen, deadline):
                if time.monotonic() > deadline:
                    self.abort(f"no agreement in {self._timeout_s:.0f} s")
                elif self._has_died(line):
                    self.abort("the process of a rank it waits for has ended")

    def _checksum(self, line: int, vote: bytes) -> int:
        return checksum(b"%d %d " % (self.generation, line) + vote)

    # --- words, and sleeping on them ------------------------------------------------------------------------

    def _set_word(self, line: int, value: int) -> None:
        self._words[line].value = value
        self._futex(self._words[line], _FUTEX_WAKE, _EVERYBODY, None)

    def _sleep(self, word: ctypes.c_uint32, seen: int, deadline: float) -> bool:
        """Until `word` is no longer `seen`; False when a while has passed instead."""
        left_ns = int(1e9 * min(_LOOK_AGAIN_S, max(0.0, deadline - time.monotonic())))
        timespec = (ctypes.c_int64 * 2)(left_ns // 10**9, left_ns % 10**9)
        return self._futex(word, _FUTEX_WAIT, seen, timespec)

    def _has_died(self, line: int) -> bool:
        assert self._map is not None
        (pid,) = _WORD.unpack_from(self._map, line * _LINE_BYTES + _PID_AT)
        if pid == 0:
            return False  # it has not come yet
        try:
            if line not in self._watched:
                self._watched[line] = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return bool(select.select([self._watched[line]], [], [], 0)[0])

    def _futex(self, word: ctypes.c_uint32, operation: int, value: int, timespec: object) -> bool:
        """False when a sleep took its whole time."""
        result = self._libc.syscall(
            ctypes.c_long(self._call),
            ctypes.byref(word),
            ctypes.c_long(operation),
            ctypes.c_long(value),
            timespec,
            None,
            ctypes.c_long(0),
        )
        if result < 0:
            problem = ctypes.get_errno()
            if problem not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise EnvironmentFault(f"the gate's futex call failed: {os.strerror(problem)}")
            return problem != errno.ETIMEDOUT
        return True


def open_gate(groups: GroupSet, directory: Path | None, rank: int, world_size: int, generation: int) -> Gate:
    """The cheapest gate for ranks that all share `directory`, which lies in this node's shared memory; None: they are
    on several nodes, and share nothing."""
    if directory is not None and SharedMemoryGate.is_possible():
        return SharedMemoryGate(directory, rank, world_size, generation)
    return AllReduceGate(groups, generation)


def _map(path: Path, size_bytes: int) -> mmap.mmap:
    """The file at `path`, made of zeros by whoever comes first, as shared memory."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)  # leaves what another rank has written as it is
            return mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentFault(f"cannot map {size_bytes} bytes at {path}: {reason}") from error
