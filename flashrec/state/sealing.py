"""Sealing a rank's tensors while the step computes: a thread that yields to everything, and a gate that helps
it. No torch.

`begin` at a step's Enter, `finish` at its gate: in between the tensors do not change, and a thread of low
priority copies them to the arena (`flashrec.state.arena_writer`), chunk by chunk. What is left at the gate
is shared with it by the main thread. Work is taken one unit at a time:

    open    blob(), and a slot to write in (a new file, where one is needed)
    chunk   ... each of the slot's chunks, by any thread
    seal    the version becomes visible

so that `stop` waits for one chunk at most, and whoever is waiting for the other waits for no more than that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashrec.errors import EnvironmentFault, FlashrecError, UsageError
from flashrec.state.arena import Arena
from flashrec.state.arena_writer import ArenaWriter, GivenUp, OpenSlot
from flashrec.state.export import PieceReader
from flashrec.state.layout import RankLayout

# Not the lowest there is: where ranks outnumber cores, a thread that loses its core while it holds the
# interpreter's lock stops the main thread until it gets one again, and at 19 that took up to 0.3 s.
_NICENESS = 15

# A unit of work is one chunk, or the making of a file: a thread that takes longer for it is in a system call that will
# not come back. Long enough for a machine that pages, and for a debugger that holds one thread.
STUCK_S = 120.0


class SealStuck(EnvironmentFault):
    """The sealing thread does not come back from what it is doing: nothing can be sealed any more, and the tensors are
    perhaps still read."""


class SealStopped(FlashrecError):
    """`stop` was called while `finish` waited; the version is not sealed."""


@dataclass(frozen=True)
class SealReport:
    """What sealing a version took: `waited_s` is how long the caller was in `finish`. Nothing was copied or
    compared if the version had been sealed before."""

    version: int
    copied_bytes: int
    unchanged_bytes: int
    waited_s: float


class _Task:
    """One version on its way. Guarded by the sealer's condition."""

    def __init__(
        self,
        version: int,
        generation: int,
        layout: RankLayout,
        readers: Sequence[PieceReader],
        blob: Callable[[], bytes],
        on_sealed: Callable[[], None] | None,
    ) -> None:
        self.on_sealed = on_sealed
        self.version = version
        self.generation = generation
        self.layout = layout
        self.readers = readers
        self.make_blob = blob
        self.blob = b""
        self.slot: OpenSlot | None = None
        self.next_chunk = 0
        self.copied_bytes = 0
        self.unchanged_bytes = 0
        self.is_sealed = False
        self.is_given_up = False
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.is_sealed or self.is_given_up or self.error is not None


class Sealer:
    """Seals the versions of `rank` of `job` in `directory` (`arena/` below the job's directory in shared
    memory). One per rank process; its methods belong to the main thread, but `stop` may come from any.

    Takes over what a dead process of this rank left there. Raises EnvironmentFault when that cannot be
    done."""

    def __init__(self, directory: Path | str, rank: int, job: str) -> None:
        self._writer = ArenaWriter(directory, rank, job)
        self._arena = Arena(directory, rank, job)
        self._condition = threading.Condition()
        self._task: _Task | None = None
        # Units under way, of whichever task: the next one starts when none is, for they write to the same slots.
        self._num_active = 0
        self._is_closed = False
        self._normal = os.getpriority(os.PRIO_PROCESS, 0)
        self._thread = threading.Thread(target=self._run, name="flashrec-seal", daemon=True)
        self._thread.start()

    @property
    def thread_cpu_s(self) -> float:
        """CPU time that its thread has taken so far."""
        thread = self._thread.ident
        assert thread is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread))

    def begin(
        self,
        version: int,
        generation: int,
        layout: RankLayout,
        readers: Sequence[PieceReader],
        blob: Callable[[], bytes],
        on_sealed: Callable[[], None] | None = None,
    ) -> None:
        """Start to seal `version`; returns at once. A version that is not finished yet is given up.

        `readers` are one for each of `layout.sets`; what they read must not change until `finish` or `stop`
        returns. `blob` is called once, by the sealing thread (by `finish` if the thread has not come to it). Nothing
        is done for a version that is sealed already, whichever generation did. `on_sealed` is called as soon as it is
        sealed, by whichever thread, and before `finish` returns."""
        assert len(readers) == len(layout.sets), "a reader for each replica set"
        with self._condition:
            assert not self._is_closed, "the sealer has been closed"
            if self._task is not None:
                self._task.is_given_up = True
            self._task = _Task(version, generation, layout, readers, blob, on_sealed)
            self._condition.notify_all()

    def finish(self) -> SealReport:
        """Help with what is left; when this returns the version is sealed.

        Raises what went wrong, on whichever thread: of a reader or of `blob`, EnvironmentFault when there is
        no room, UsageError when nothing was begun or this generation is over; SealStopped, SealStuck."""
        started = time.monotonic()
        with self._condition:
            task = self._task
        if task is None:
            raise UsageError("no version is being sealed: begin() comes first")
        while not task.is_over:
            if not self._do_one(task):
                self._set_niceness(0)  # the thread has what this one waits for
                with self._condition:
                    self._wait_for(lambda: task.is_over or self._has_work(task))
        with self._condition:
            self._wait_for(lambda: self._num_active == 0)
            if self._task is task:
                self._task = None
        if task.error is not None:
            raise task.error
        if task.is_given_up:
            raise SealStopped(f"the sealing of version {task.version} was given up")
        waited_s = time.monotonic() - started
        return SealReport(task.version, task.copied_bytes, task.unchanged_bytes, waited_s)

    def stop(self) -> None:
        """Give up what is under way; when this returns nobody reads the tensors. Raises SealStuck."""
        with self._condition:
            if self._task is not None:
                self._task.is_given_up = True
                self._task = None
            self._condition.notify_all()
            self._wait_for(lambda: self._num_active == 0)

    def discard_above(self, version: int) -> None:
        """Give up what is under way and let go of every version above `version`: it was lost."""
        self.stop()
        self._arena.discard_above(version)

    def newest(self) -> int | None:
        """The newest version that is sealed."""
        return self._writer.newest()

    def close(self) -> None:
        """Stop, and let go of thread and memory; the files stay."""
        self.stop()
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join()
        self._writer.close()

    # --- the work, by whichever thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._set_niceness(_NICENESS)
            with self._condition:
                self._condition.wait_for(lambda: self._is_closed or self._has_work(self._task))
                if self._is_closed:
                    return
                task = self._task
            assert task is not None
            while self._do_one(task):
                pass
            del task  # its readers hold tensors, its slot a file's memory

    def _set_niceness(self, niceness: int) -> None:
        """Of the thread, above the process's own. To take it back needs a privilege, and is done where it is had."""
        thread = self._thread.native_id
        if thread is not None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, self._normal + niceness)

    def _wait_for(self, done: Callable[[], bool]) -> None:
        """With the condition held, which is told of the end of each unit of work: there is an end to it as long as
        these have one."""
        while not done():
            if not self._condition.wait(STUCK_S) and not done():
                raise SealStuck(f"the sealing thread has not ended a unit of its work in {STUCK_S:.0f} s")

    def _has_work(self, task: _Task | None) -> bool:
        """Whether a unit of work of `task` may start now."""
        if task is None or task is not self._task or task.is_over:
            return False
        if task.slot is not None and task.next_chunk < task.slot.num_chunks:
            # Those of an earlier task may still be under way before the slot is there, never after.
            return True
        return self._num_active == 0

    def _do_one(self, task: _Task) -> bool:
        """Do a unit of work; False when there is none to start."""
        with self._condition:
            if not self._has_work(task):
                return False
            self._num_active += 1
            slot, chunk = task.slot, task.next_chunk
            if slot is not None:
                task.next_chunk += 1
        error: BaseException | None = None
        copied_bytes = unchanged_bytes = 0
        try:
            if slot is None:
                self._open(task)
            elif chunk < slot.num_chunks:
                copied_bytes, unchanged_bytes = slot.put(chunk, task.readers)
            else:
                slot.seal(task.blob)
                self._is_sealed(task)
        except GivenUp:
            pass
        except BaseException as caught:
            error = caught
        with self._condition:
            self._num_active -= 1
            task.copied_bytes += copied_bytes
            task.unchanged_bytes += unchanged_bytes
            task.error = task.error or error
            self._condition.notify_all()
        return True

    def _open(self, task: _Task) -> None:
        if self._writer.holds(task.version):
            self._is_sealed(task)
            return
        task.blob = task.make_blob()
        task.slot = self._writer.open_slot(
            task.version, task.generation, task.layout, len(task.blob), lambda: task.is_given_up
        )

    @staticmethod
    def _is_sealed(task: _Task) -> None:
        task.is_sealed = True
        if task.on_sealed is not None:
            task.on_sealed()
