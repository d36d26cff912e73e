"""The processes of one job, on whichever node: started, given ranks, spoken to and ended.

What may take long (a start, the end of what a process has printed) is a task; everything else is immediate.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence

from flashrec.protocol import messages as msg
from flashrecd.core import events as ev
from flashrecd.hosts import Host, Note
from flashrecd.launching import Process

COULD_NOT_START = 71  # EX_OSERR


class JobProcesses:
    """`hosts`: the job's nodes, by number. `failed(process, reason)`: it was not started, and that it `exited(process,
    code, signal)` follows; `forgotten()`: nothing of a process is left."""

    def __init__(
        self,
        hosts: Sequence[Host],
        ranks_per_node: int,
        *,
        note: Note,
        failed: Callable[[Process, str], None],
        exited: Callable[[str, int | None, int | None], None],
        forgotten: Callable[[], None],
    ) -> None:
        self.by_name: dict[str, Process] = {}
        self._hosts = hosts
        self._ranks_per_node = ranks_per_node
        self._note = note
        self._failed = failed
        self._exited = exited
        self._forgotten = forgotten
        self._tasks: set[asyncio.Task[None]] = set()

    def host(self, process: Process) -> Host:
        return self._hosts[process.node]

    def send(self, proc: str, message: msg.Message) -> None:
        """To a process that is gone: nothing."""
        process = self.by_name.get(proc)
        if process is not None:
            self.host(process).send(process, message)

    def launch(self, action: ev.Launch) -> None:
        number = int(action.proc.removeprefix("p"))
        process = Process(
            action.proc, number, action.rank, action.generation, action.replacement, node=action.node
        )
        self._seat(process)
        self.by_name[action.proc] = process
        process.starting = self._task(self._start(process))
        process.starting.add_done_callback(lambda task: self._started(process, task))

    async def _start(self, process: Process) -> None:
        process.pid = await self.host(process).start(process)
        where = f" on {self.host(process).name}" if len(self._hosts) > 1 else ""
        self._note("process started", f"{process.name}, pid {process.pid}{where}", process.rank)

    def _started(self, process: Process, task: asyncio.Task[None]) -> None:
        """The start is over: it worked, or failed, or was called off, perhaps before it had begun."""
        process.starting = None
        if task.cancelled():
            self._exited(process.name, None, signal.SIGKILL)
        elif (error := task.exception()) is not None:
            self._note("process not started", f"{process.name}: {error}", process.rank)
            process.explained = True
            self._failed(process, str(error))
            self._exited(process.name, COULD_NOT_START, None)

    def assign(self, action: ev.Assign) -> Process:
        """A standby takes a rank; it is yet to be told."""
        process = self.by_name[action.proc]
        process.rank, process.generation = action.rank, action.generation
        self._seat(process)
        self.host(process).assigned(process)
        return process

    def _seat(self, process: Process) -> None:
        """Its place among the ranks of its node: where the rank's number puts it, or else the first that is free."""
        if process.rank is None:
            return
        taken = {
            other.local_rank
            for other in self.by_name.values()
            if other is not process and other.node == process.node and not other.gone
        }
        usual = process.rank % self._ranks_per_node
        process.local_rank = next(seat for seat in (usual, *range(len(taken) + 1)) if seat not in taken)

    def end(self, action: ev.Kill) -> None:
        process = self.by_name.get(action.proc)
        if process is None:
            return
        if process.starting is not None:
            process.starting.cancel()
        else:
            self.host(process).end(process, hard=action.hard)

    def lose(self, node: int) -> list[Process]:
        """Those on a node that was given up: gone, whatever became of them."""
        lost = [process for process in self.by_name.values() if process.node == node and not process.gone]
        for process in lost:
            process.gone = True
            if process.starting is not None:
                process.starting.cancel()
            self.forget(process)
        return lost

    def forget(self, process: Process) -> None:
        """It is gone; once all that it has printed was passed on, nothing of it is left."""
        self._task(self._forget(process))

    async def _forget(self, process: Process) -> None:
        try:
            await self.host(process).ended(process)
        except OSError as error:  # a file of its output cannot be read: the job ends nevertheless
            self._note("output not shown", f"of {process.name}, the end: {error}", process.rank)
        self.by_name.pop(process.name, None)
        self._forgotten()

    def pids(self) -> dict[str, int]:
        """By name, of those that live; on their node."""
        return {name: process.pid for name, process in self.by_name.items() if not process.gone}

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _task(self, work: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
