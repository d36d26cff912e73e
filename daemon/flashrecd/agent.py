"""This node's part in a job that another daemon leads: does what the leader says, and tells what happens here.

It decides nothing. What the leader and a process say to each other passes through; what a process must know of its
node (its Welcome) is filled in here. Where the leader asks for what only this node can see, the versions that
a rank has kept, say, the answer goes ahead of the message that makes it ask.

Where its daemon dies another takes the part over, from records: it watches the processes that live, tells the leader
which those are, and ends the standbys, which have nobody to wait for any more. Ranks offer themselves, and how they are
welcomed is the leader's word; what it had to tell them meanwhile follows that word.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from flashrec.errors import EnvironmentFault, FlashrecError
from flashrec.protocol import agents as ag
from flashrec.protocol import messages as msg
from flashrec.protocol import records as rec
from flashrec.protocol.codec import decode, encode
from flashrec.protocol.exitcode import exit_code
from flashrec.protocol.jobdir import JobDirectory
from flashrec.protocol.jobfiles import lives
from flashrec.protocol.tag import TagReader, tag_path
from flashrec.state.files import free_bytes
from flashrecd.adoption import refusal
from flashrecd.core.state import Kept
from flashrecd.hosts import LocalHost
from flashrecd.launching import OwnProcesses, Process
from flashrecd.partrecords import PartRecords
from flashrecd.place import Place
from flashrecd.preludes import Preludes
from flashrecd.shardserver import ShardServer
from flashrecd.supervise import Supervisor

REPORT_S = 0.3
ENDING_S = 10.0


class Agent:
    """A part of `job`. `tell(message)` reaches the leader, `send(identity, message)` a
    process; `ended()` is called once, when nothing of the part is left."""

    def __init__(
        self,
        job: str,
        submit: msg.Submit,
        directory: JobDirectory,
        place: Place,
        *,
        address: str,
        log_dir: Path,
        supervisor: Supervisor,
        shards: ShardServer,
        records: PartRecords,
        tell: Callable[[ag.REPORTS], None],
        send: Callable[[bytes, msg.Message], None],
        ended: Callable[[], None],
    ) -> None:
        self.name = job
        self.directory = directory
        self._submit = submit
        self._place = place
        self._supervisor = supervisor
        self._records = records
        self._tell = tell
        self._ended = ended
        self._own = OwnProcesses(
            job,
            submit,
            supervisor=supervisor,
            log_dir=log_dir,
            address=address,
            tell=lambda output: tell(ag.PartOutput(encode(output))),
            note=self.note,
        )
        self._host = LocalHost(
            "",
            job,
            directory.path,
            self._own,
            supervisor=supervisor,
            send=send,
            note=self.note,
            shards=shards,
            holdings=self._kept_for_others,
        )
        self._processes: dict[str, Process] = {}
        self._preludes = Preludes(directory.path)
        self._tags: dict[int, TagReader] = {}
        self._heard: set[str] = set()
        self._report_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._offers: dict[str, bytes] = {}  # identities of ranks that have offered themselves, by process
        self._unshown: set[str] | None = None
        """Processes that have ended since the daemon before this one died, until it is known what they printed."""

    def start(self) -> None:
        self._own.begin()
        self._tell(
            ag.PartBegun(
                self._place.replica_address,
                str(self.directory.path),
                str(self._own.logs.log_dir / self.name),
                free_bytes(self.directory.path),
            )
        )

    def take_over(self, processes: Iterable[rec.ProcessRecord]) -> None:
        """In place of `start`: another daemon began this part, and had these processes."""
        self._own.begin()
        self._unshown = set()
        for record in processes:
            process = self._processes[record.proc] = Process.of(record)
            if not self._watch(process, record):
                self._unshown.add(process.name)
            elif process.rank is None:
                self._host.end(process, hard=True)
        self._own.take_over(self._processes.values())
        self._tell(ag.PartAdopted(tuple((one.name, one.pid) for one in self._processes.values())))

    def _watch(self, process: Process, record: rec.ProcessRecord) -> bool:
        """Whether it lives; then its end will be told."""
        if not lives(record.pid, record.start_ticks):
            return False
        with contextlib.suppress(FlashrecError):
            self._supervisor.adopt(
                process.name, process.pid, start_ticks=record.start_ticks, leads_session=True
            )
            return True
        return False

    def _output_shown(self, message: ag.OutputShown) -> None:
        self._own.listen({(proc, stream): end for proc, stream, end in message.shown})
        unshown, self._unshown = self._unshown or set(), None
        for name in sorted(unshown):
            self.exited(name, None, None)

    def note(self, event: str, reason: str, rank: int | None = None) -> None:
        self._tell(ag.PartNote(event, reason, rank))

    # --- from the leader ----------------------------------------------------------------------------------

    def take(self, message: ag.ORDERS) -> None:
        process = self._processes.get(getattr(message, "proc", ""))
        match message:
            case ag.StartProcess():
                if process is None and self._ending is None:
                    self._start(message)
            case ag.EndPart():
                self.end()
            case ag.FenceReplicas():
                self._host.fence(message.generation)
            case ag.SettleReplicas():
                self._host.settle(message.generation, message.version, message.sealed)
            case ag.GenerationRuns():
                self._host.runs(message.generation, message.forget)
            case ag.Prelude():
                self._take_prelude(message)
            case ag.OutputSeen():
                self._own.output_seen_bytes = message.num_bytes
            case ag.OutputShown():
                self._output_shown(message)
            case _ if process is None:
                pass  # it is gone, which the leader will hear, or has heard by now
            case ag.AssignProcess():
                process.rank, process.generation = message.rank, message.generation
                self._records.took(process)
                self._host.assigned(process)
            case ag.EndProcess():
                if process.starting is not None:
                    process.starting.cancel()
                else:
                    self._host.end(process, hard=message.hard)
            case ag.SignalProcess():
                self._host.signal(process, message.signal)
            case ag.ToProcess():
                self._pass_on(process, decode(message.data, msg.TO_PROCESS))
            case _:
                pass

    def _pass_on(self, process: Process, message: msg.Message) -> None:
        if isinstance(message, msg.Welcome):
            message = replace(
                self._place.filled_in(message), shm_dir=str(self.directory.path), daemon_pid=os.getpid()
            )
        if isinstance(message, msg.Welcome | msg.Refused) and process.name in self._offers:
            # Only now: who has offered itself waits for this word, and hears no other.
            self._host.bind(process, self._offers.pop(process.name))
        self._host.send(process, message)

    def _start(self, message: ag.StartProcess) -> None:
        number = int(message.proc.removeprefix("p"))
        process = Process(message.proc, number, message.rank, message.generation, message.replacement)
        self._processes[message.proc] = process
        if message.rank is not None and not message.replacement:
            self._preludes.begun_anew(message.rank)
        process.starting = self._task(self._start_process(process))
        process.starting.add_done_callback(lambda task: self._started(process, task))

    async def _start_process(self, process: Process) -> None:
        pid = process.pid = await self._host.start(process)
        self._records.took(process)
        self._tell(ag.ProcessStarted(process.name, pid))

    def _started(self, process: Process, task: asyncio.Task[None]) -> None:
        """It worked, or failed, or was called off, perhaps before it had begun."""
        process.starting = None
        if task.cancelled():
            self._supervisor.kill_group(process.name)
            self._not_started(process, "it was called off")
        elif (error := task.exception()) is not None:
            if not isinstance(error, FlashrecError | OSError):
                raise error
            self._not_started(process, str(error))

    def _not_started(self, process: Process, reason: str) -> None:
        """Nor will it ever print anything, which the leader waits for."""
        self._processes.pop(process.name, None)
        self._tell(ag.ProcessNotStarted(process.name, reason))
        self._tell(ag.OutputEnded(process.name))

    # --- from processes -----------------------------------------------------------------------------------

    def hello(self, message: msg.Hello, identity: bytes) -> msg.Refused | None:
        process = self._processes.get(message.proc)
        if process is None or process.identity is not None:
            return msg.Refused("stranger", f"{message.proc} is not a process this daemon is waiting for")
        process.pid = message.pid
        self._host.bind(process, identity)
        self._forward(message)
        return None

    def rejoin(self, message: msg.Rejoin, identity: bytes) -> msg.Refused | None:
        """A rank whose daemon has died is there. None: the leader is asked whether to welcome it."""
        process = self._processes.get(message.proc)
        is_awaited = process is not None and process.adopted
        if (refused := refusal(message, self.name, process, is_awaited=is_awaited)) is not None:
            return refused
        assert process is not None
        self._offers[process.name] = identity
        self._host.memory.arena_bytes[message.rank] = message.arena_bytes
        self._tell_prelude(process)
        self._tell_kept(process)
        self._forward(message)
        return None

    def received(self, message: msg.FROM_PROCESS) -> None:
        assert not isinstance(message, msg.Join)
        process = self._processes.get(message.proc)
        if process is None:
            return
        if isinstance(message, msg.Heartbeat):
            self._heard.add(message.proc)
            return
        self._tell_prelude(process)
        match message:
            case msg.Parked():
                self._tell_kept(process)
            case msg.Protected() if process.rank is not None:
                words = self._host.describe(process.rank, message.arena_bytes)
                self._tell(ag.RankDescribed(process.rank, *words, self._host.needs()))
            case _:
                pass
        self._forward(message)

    def _forward(self, message: msg.FROM_PROCESS) -> None:
        assert not isinstance(message, msg.Join)
        self._tell(ag.FromProcess(message.proc, encode(message), time.monotonic_ns()))

    def exited(self, proc: str, code: int | None, number: int | None) -> None:
        process = self._processes.get(proc)
        if process is None or process.gone:
            return
        if self._unshown is not None:
            self._unshown.add(proc)
            return
        process.gone = True
        if code is None and number is None:
            code = exit_code(self.directory.path, proc)
        if process.rank is not None:
            self._tell_tags([process.rank])
            self._tell_kept(process)
        words = self._host.last_words(process)
        self._tell(ag.ProcessEnded(proc, code, number, words))
        self._task(self._forget(process))

    async def _forget(self, process: Process) -> None:
        try:
            await self._host.ended(process)
        except OSError as error:
            self.note("output not shown", f"of {process.name}, the end: {error}", process.rank)
        self._processes.pop(process.name, None)
        self._tell(ag.OutputEnded(process.name))
        self._records.forgot(process.name)

    # --- what the leader sees of the ranks ------------------------------------------------------------------

    def tick(self) -> None:
        now = time.monotonic()
        if now < self._report_at or self._ending is not None:
            return
        self._report_at = now + REPORT_S
        self._tell_tags(
            sorted(
                {p.rank for p in self._processes.values() if p.rank is not None and (p.identity or p.adopted)}
            )
        )

    def _tell_tags(self, ranks: list[int]) -> None:
        tags = []
        for rank in ranks:
            for piece in self._preludes.news(rank):
                self._tell(piece)
            reader = self._tags.setdefault(rank, TagReader(tag_path(self.directory.path, rank)))
            with contextlib.suppress(FlashrecError):
                tags.append((rank, reader.raw()))
        heard, self._heard = tuple(sorted(self._heard)), set()
        self._tell(ag.RankTags(tuple(tags), heard))

    def _tell_prelude(self, process: Process) -> None:
        for piece in self._preludes.news(process.rank) if process.rank is not None else ():
            self._tell(piece)

    def _take_prelude(self, piece: ag.Prelude) -> None:
        try:
            self._preludes.take(piece)
        except EnvironmentFault as error:
            self.note("prelude not kept", str(error))

    def _tell_kept(self, process: Process) -> None:
        if process.rank is not None:
            self._tell(ag.RankKept(process.rank, *self._host.kept(process.rank)))

    def _kept_for_others(self, generation: int, kept: tuple[Kept, ...]) -> None:
        self._tell(ag.ReplicasKept(generation, tuple((one.rank, one.private, one.sealed) for one in kept)))

    # --- the end ------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Of the job, or of this node's part in it: whatever still runs is ended."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        for process in list(self._processes.values()):
            if process.starting is not None:
                process.starting.cancel()
            self._host.end(process, hard=True)
        self._unshown = None  # nobody will ask
        for process in list(self._processes.values()):
            if process.adopted and process.name not in self._supervisor.pids:
                self.exited(process.name, None, None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                while self._processes:
                    await asyncio.sleep(0.01)
        await self._host.close()
        for reader in self._tags.values():
            reader.close()
        for task in list(self._tasks):
            task.cancel()
        self._records.close()
        self.directory.remove()
        self._tell(ag.PartEnded())
        self._ended()

    def _task(self, work: asyncio._CoroutineLike[None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
