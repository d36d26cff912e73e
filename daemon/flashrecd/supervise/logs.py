"""What processes print: files laid out as torchrun lays them out, and a tail that streams them line by line.

A process writes straight into its files, so it never waits for the daemon and loses nothing when the daemon
dies. The tail looks at the files' sizes from time to time rather than asking the kernel for events: the
number of event queues a user may have is small, and shared with all else that watches files on a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flashrec.errors import EnvironmentFault, UsageError

STREAMS = ("stdout", "stderr")

Deliver = Callable[[str, str, bytes], None]
"""`(proc, stream, line)`: a line without its newline, bytes as they were printed."""

# How much of one file is read in one go: a process that prints without end must not hold up the loop.
_READ_BYTES = 64 * 1024


@dataclass(frozen=True)
class LogLayout:
    """Where output goes: `<log_dir>/<job>/attempt_<n>/<rank>/stdout.log`, as torchrun does it."""

    log_dir: Path
    job: str
    attempt: int = 0

    def rank_files(self, rank: int) -> dict[str, Path]:
        """The files of the first process in a rank, by stream; their folder is made."""
        return self._files(str(rank))

    def standby_files(self, number: int) -> dict[str, Path]:
        """The files of a process that holds no rank yet (and keeps them when it takes one)."""
        return self._files(f"standby_{number}")

    def link_replacement(self, rank: int, number: int) -> None:
        """Make a standby's files appear in the folder of the rank it took, as `stdout.<k>.log`.

        `k` counts the rank's processes, from 1 for the first replacement. Raises EnvironmentFault.
        """
        folder = self.rank_files(rank)["stdout"].parent
        k = 1
        while any((folder / f"{stream}.{k}.log").is_symlink() for stream in STREAMS):
            k += 1
        try:
            for stream, path in self.standby_files(number).items():
                (folder / f"{stream}.{k}.log").symlink_to(Path("..") / path.parent.name / path.name)
        except OSError as error:
            raise EnvironmentFault(f"cannot link the logs of rank {rank}: {error}") from error

    def _files(self, name: str) -> dict[str, Path]:
        folder = self.log_dir / self.job / f"attempt_{self.attempt}" / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"cannot make the log folder {folder}: {error}") from error
        return {stream: folder / f"{stream}.log" for stream in STREAMS}


@dataclass
class _Followed:
    proc: str
    stream: str
    path: Path
    position: int
    """Byte in the file up to which has been read."""
    delivered: int
    """The same, up to which has been delivered."""
    fd: int = -1
    unfinished: bytearray = field(default_factory=bytearray)
    """A line whose newline has not come yet; at most max_line_bytes."""
    has_failed: bool = False
    """It could not be read, once at least."""


class Tail:
    """Follows files and delivers what is appended, each file's lines complete and in order.

    A line longer than `max_line_bytes` is delivered in pieces of that size. Memory is bounded by one piece
    and one read for each file. What was in a file before `follow` is not delivered, unless it is told where to begin.
    """

    def __init__(
        self,
        deliver: Deliver,
        *,
        max_line_bytes: int = 64 * 1024,
        shortest_pause_s: float = 0.02,
        longest_pause_s: float = 0.2,
    ) -> None:
        if max_line_bytes < 1 or not 0 < shortest_pause_s <= longest_pause_s:
            raise UsageError("a tail needs max_line_bytes >= 1 and 0 < shortest_pause_s <= longest_pause_s")
        self._deliver = deliver
        self._max_line_bytes = max_line_bytes
        self._shortest_pause_s = shortest_pause_s
        self._longest_pause_s = longest_pause_s
        self._followed: dict[str, list[_Followed]] = {}
        self._unreadable: list[tuple[str, str, OSError]] = []

    def follow(self, proc: str, files: dict[str, Path], begin: Mapping[str, int] | None = None) -> None:
        """Start before the process does. `files` by stream; they need not exist yet. `begin`: bytes of each that were
        delivered before, by somebody else. Raises UsageError."""
        if proc in self._followed:
            raise UsageError(f"the output of process {proc!r} is followed already")
        followed = []
        for stream, path in files.items():
            if begin is not None:
                position = begin.get(stream, 0)
            else:
                try:
                    position = os.stat(path).st_size
                except FileNotFoundError:
                    position = 0
            followed.append(_Followed(proc, stream, path, position, position))
        self._followed[proc] = followed

    def delivered(self, proc: str, stream: str) -> int:
        """How many bytes of the file have been delivered, those included whose delivery is under way."""
        return next((one.delivered for one in self._followed.get(proc, []) if one.stream == stream), 0)

    def rewind(self, proc: str, begin: Mapping[str, int]) -> None:
        """Deliver again what comes after `begin`, by stream."""
        for followed in self._followed.get(proc, []):
            followed.position = followed.delivered = begin.get(followed.stream, 0)
            followed.unfinished.clear()

    def poll(self) -> bool:
        """Deliver what has arrived, at most one read for each file; whether there was anything. A file that cannot be
        read, which `unreadable()` tells, is tried again by the next call."""
        # A list: a callback may start or end the following of another process.
        everything = [followed for group in self._followed.values() for followed in group]
        num_read = 0
        for followed in everything:
            try:
                num_read += self._read(followed)
            except OSError as error:
                if not followed.has_failed:
                    followed.has_failed = True
                    self._unreadable.append((followed.proc, followed.stream, error))
        return num_read > 0

    def unreadable(self) -> list[tuple[str, str, OSError]]:
        """(proc, stream, why) of each file that `poll()` could not read, told once."""
        told, self._unreadable = self._unreadable, []
        return told

    async def run(self) -> None:
        """Poll until cancelled: often while there is output, seldom while there is none."""
        pause_s = self._shortest_pause_s
        while True:
            pause_s = self._shortest_pause_s if self.poll() else min(pause_s * 1.5, self._longest_pause_s)
            await asyncio.sleep(pause_s)

    async def finish(self, proc: str, room: Callable[[], Awaitable[None]] | None = None) -> None:
        """Deliver the rest of an ended process's output, a last line without newline included, and let go.
        `room` is awaited before each read: whoever takes the lines may not be ready for more.

        What its descendants print after the call may be missing from the stream; the files have it. Raises OSError for
        one that cannot be read, once all has been done for the others.
        """
        group = self._followed.get(proc, [])
        failed: OSError | None = None
        for followed in group:
            try:
                await self._read_to_end(followed, room)
            except OSError as error:
                failed = failed or error
        # Unless another call for the same process was faster.
        if self._followed.get(proc) is group and group:
            del self._followed[proc]
            for followed in group:
                self._let_go(followed)
        if failed is not None:
            raise failed

    async def _read_to_end(self, followed: _Followed, room: Callable[[], Awaitable[None]] | None) -> None:
        end = _size(followed)
        while followed.position < end:
            # Let a heartbeat through between two reads of a long file.
            await (room() if room is not None else asyncio.sleep(0))
            if not self._read(followed):
                break

    def close(self) -> None:
        """Let go of every file, delivering unfinished lines that have been read."""
        for group in list(self._followed.values()):
            for followed in group:
                self._let_go(followed)
        self._followed.clear()

    def _read(self, followed: _Followed) -> bool:
        """One read. A file that shrank was truncated by somebody: start again at its beginning."""
        if followed.fd < 0:
            try:
                followed.fd = os.open(followed.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
        size = _size(followed)
        if size < followed.position:
            followed.position = followed.delivered = 0
        if size == followed.position:
            return False
        data = os.pread(followed.fd, _READ_BYTES, followed.position)
        followed.position += len(data)
        self._split(followed, data)
        return bool(data)

    def _split(self, followed: _Followed, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            if followed.unfinished:
                followed.unfinished += line
                line = bytes(followed.unfinished)
                followed.unfinished.clear()
            self._in_pieces(followed, line)
        followed.unfinished += rest
        limit = self._max_line_bytes
        while len(followed.unfinished) > limit:
            piece = bytes(followed.unfinished[:limit])
            del followed.unfinished[:limit]
            self._hand_over(followed, piece)

    def _in_pieces(self, followed: _Followed, line: bytes) -> None:
        limit = self._max_line_bytes
        for start in range(0, max(len(line), 1), limit):
            self._hand_over(followed, line[start : start + limit], ends_line=start + limit >= len(line))

    def _hand_over(self, followed: _Followed, piece: bytes, *, ends_line: bool = False) -> None:
        followed.delivered += len(piece) + ends_line
        self._deliver(followed.proc, followed.stream, piece)

    def _let_go(self, followed: _Followed) -> None:
        if followed.unfinished:
            line = bytes(followed.unfinished)
            followed.unfinished.clear()
            self._hand_over(followed, line)
        if followed.fd >= 0:
            os.close(followed.fd)
            followed.fd = -1


def _size(followed: _Followed) -> int:
    """0 while there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        if followed.fd >= 0:
            return os.fstat(followed.fd).st_size
        return os.stat(followed.path).st_size
    return 0
