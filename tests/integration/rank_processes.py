"""Ranks for the group tests: forked from the test (torch is imported already), meeting in a store."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer step imports it, for seconds; here once for all ranks
import torch.distributed as dist

from flashrec.errors import GroupsAborted

DEADLINE_S = 60
_context = multiprocessing.get_context("fork")


class MeetingStore(dist.Store):
    """A rendezvous store in Python whose blocked reads `abort()` ends, like the daemon's.

    Values are files: no server, no thread and no socket that a test would have to tell from gloo's.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._aborted = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        whole = self._path(key)
        part = whole.with_suffix(f".{os.getpid()}")
        part.write_bytes(value)
        part.rename(whole)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        deadline = time.monotonic() + DEADLINE_S
        while not path.exists():
            if self._aborted.wait(0.001):
                raise GroupsAborted("the store was aborted")
            assert time.monotonic() < deadline, f"nobody set {key}"
        return path.read_bytes()

    def abort(self) -> None:
        self._aborted.set()

    def _path(self, key: str) -> Path:
        return self._directory / (key.replace("/", "_") + ".value")


class Rank:
    """What a rank's function gets: who it is, where to meet, and a line to the test."""

    def __init__(self, rank: int, size: int, meeting: Path, line: Connection) -> None:
        self.rank = rank
        self.size = size
        self.meeting = meeting
        self._line = line

    def store(self) -> MeetingStore:
        return MeetingStore(self.meeting)

    def tell(self, message: Any) -> None:
        self._line.send(message)

    def hear(self) -> Any:
        assert self._line.poll(DEADLINE_S), f"rank {self.rank} heard nothing"
        return self._line.recv()


class Ranks:
    """Starts ranks, talks to them, stops them; everything it started is gone at `__exit__`."""

    def __init__(self) -> None:
        self._meeting = tempfile.TemporaryDirectory()
        self._started: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process, line in self._started:
            process.kill()
            process.join()
            process.close()
            line.close()
        self._meeting.cleanup()

    def start(self, function: Callable[..., Any], rank: int, size: int, *args: Any) -> int:
        """Fork `function(Rank, *args)`; returns its number here. Its result is told at the end."""
        mine, theirs = _context.Pipe()
        who = Rank(rank, size, Path(self._meeting.name), theirs)
        process = _context.Process(target=_main, args=(function, who, args))
        process.start()
        theirs.close()
        self._started.append((process, mine))
        return len(self._started) - 1

    def start_all(self, function: Callable[..., Any], size: int, *args: Any) -> list[int]:
        return [self.start(function, rank, size, *args) for rank in range(size)]

    def hear(self, number: int) -> Any:
        """The next message of a rank. A rank's failure is raised here."""
        line = self._started[number][1]
        assert line.poll(DEADLINE_S), f"process {number} said nothing"
        message = line.recv()
        if isinstance(message, _Failure):
            raise AssertionError(f"process {number} failed:\n{message.text}")
        return message

    def tell(self, number: int, message: Any) -> None:
        self._started[number][1].send(message)

    def signal(self, number: int, which: signal.Signals) -> None:
        os.kill(self._started[number][0].pid, which)

    def results(self, numbers: list[int]) -> list[Any]:
        return [self.hear(number) for number in numbers]


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _main(function: Callable[..., Any], rank: Rank, args: tuple[Any, ...]) -> None:
    gc.freeze()  # what the test still holds is not ours to finalise
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(DEADLINE_S - 5, exit=False)
    try:
        rank.tell(function(rank, *args))
    except BaseException:
        rank.tell(_Failure(traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # what pytest registered at exit is the parent's


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> list[str]:
    """Names of this process's threads."""
    found = [
        Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")
    ]
    return sorted(found)
