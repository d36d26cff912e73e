"""One job's effects: carries out what the core decides, and tells it what happens.

Everything here runs in the daemon's event loop. What may take long (starting a process) is a task of the
job's task group; everything else is immediate.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable

from flashrec.errors import FlashrecError, ProtocolError
from flashrec.protocol import messages as msg
from flashrec.protocol.jobdir import JobDirectory
from flashrec.protocol.tag import Tag, TagReader, tag_path
from flashrec.state.export import discard_exports
from flashrecd.adoption import standing
from flashrecd.core import events as ev
from flashrecd.core.detection import HEARTBEATS
from flashrecd.core.job import Core
from flashrecd.core.state import JobConfig, RankStatus, Status
from flashrecd.eventlog import EventLog
from flashrecd.jobmemory import JobMemory
from flashrecd.launching import SUMMARY_CHARACTERS, Process, Source, last_words
from flashrecd.records import Records
from flashrecd.recoveries import Recoveries
from flashrecd.rendezvous import Rendezvous
from flashrecd.supervise import Supervisor

COULD_NOT_START = 71  # EX_OSERR
FAULT_MATTERS = (Status.ADOPTING, Status.RUNNING, Status.PARKING, Status.FORMING)
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class JobRun:
    """A job from its beginning to its end. `source` brings its processes about, `send(identity, message)` reaches one,
    `ended(code, reason)` is called once. `directory`: of a job that another daemon began. `recorded`: another daemon
    may take over, and the ranks wait for it for `patience_s`."""

    def __init__(
        self,
        name: str,
        config: JobConfig,
        source: Source,
        *,
        target: str,
        pull: str,
        supervisor: Supervisor,
        log: EventLog,
        shard_address: str,
        send: Callable[[bytes, msg.Message], None],
        ended: Callable[[int, str], None],
        directory: JobDirectory | None = None,
        recorded: bool = False,
        patience_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.target = target
        self.source = source
        self.core = Core(config)
        self.recoveries = Recoveries(config.world_size)
        self.directory = directory or JobDirectory.make(name)
        self.shm_dir = self.directory.path
        self.records = Records(self.shm_dir, self.log) if recorded else None
        self.memory = JobMemory(self.shm_dir, name, self.log)
        self.processes: dict[str, Process] = {}
        self._pull = pull
        self._patience_s = patience_s
        self._supervisor = supervisor
        self._log = log
        self._shard_address = shard_address
        self._send = send
        self._ended = ended
        self._clock = clock
        self._tags: dict[int, TagReader] = {}
        self._rendezvous = Rendezvous(self._answer_get)
        self._replaced: tuple[int, ...] = ()  # by the newest plan
        self._tasks: set[asyncio.Task[None]] = set()
        self._end: tuple[int, str] | None = None

    # --- in ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.begin(lambda: self.feed(ev.Begin()))

    def begin(self, how: Callable[[], None]) -> None:
        """`how` tells the core of the first event."""
        self.source.begin()
        how()

    def feed(self, event: ev.Event) -> None:
        """Tell the core, and do what it answers."""
        before = self.core.state.status
        actions = self.core.handle(event, self._clock())
        if self.records is not None:
            self.records.count(self.core.state)
        for action in actions:
            self._do(action)
        if before is not self.core.state.status and self.core.state.status is Status.RUNNING:
            # Every replacement has installed what was served: shared memory is the job's to use again.
            discard_exports(self.shm_dir, self.core.state.generation + 1)

    def exited(self, proc: str, code: int | None, number: int | None) -> None:
        """A process is gone; called by the supervisor within a millisecond or so."""
        now = time.monotonic_ns()
        process = self.processes.get(proc)
        if process is None or process.gone:
            return
        process.gone = True
        if number is None and code is None:
            code = process.said_code
        rank = self.core.rank_of(proc)
        tag = self.tag(rank) if rank is not None else None
        left = tag.step if tag is not None and tag.is_at_end else None
        over = self.core.state.status is Status.ADOPTING and left is not None
        if rank is not None and self.core.state.status in FAULT_MATTERS and not over:
            ended = "ended" if code is None else f"exit {code}"
            kind = signal.Signals(number).name if number is not None else ended
            self.recoveries.fault(now, rank, kind, tag)
        if not process.explained and (code or number in CRASHES) and (words := last_words(process.stderr)):
            self.feed(ev.Failed(proc, f"last on stderr: {words}"))
        kept = self.memory.kept(rank) if rank is not None else ((), ())
        self.feed(ev.Exited(proc, code, number, *kept, tag.step if tag is not None else None, left))
        if self.records is not None:
            self.records.ended(process)
        self._task(self._forget(proc))

    async def _forget(self, proc: str) -> None:
        process = self.processes[proc]
        try:
            await self.source.ended(process)
        except OSError as error:  # a file of its output cannot be read: the job ends nevertheless
            self.log("output not shown", f"of {proc}, the end: {error}", process.rank)
        self.processes.pop(proc, None)
        self._maybe_end()

    def received(self, message: msg.FROM_PROCESS) -> None:
        """A message of a process that has said Hello before."""
        now = time.monotonic_ns()
        match message:
            case msg.Heartbeat():
                self.feed(ev.Heartbeat(message.proc))
            case msg.BuiltOffered():
                self.feed(ev.BuiltOffered())
            case msg.StandbyReady():
                if message.depth not in ("forked", "built"):
                    raise ProtocolError(f"no standby is ever {message.depth!r:.20}")
                self.feed(ev.StandbyReady(message.proc, message.depth))
            case msg.Protected():
                self._protected(message)
            case msg.Switched():
                self.feed(ev.Switched(message.proc, message.why_sealed))
            case msg.Parked():
                if self.recoveries.open is None and self.core.state.status is Status.RUNNING:
                    self.recoveries.suspicion(now)
                self.recoveries.mark("parked", message.at_ns)
                rank = self.core.rank_of(message.proc)
                kept = self.memory.kept(rank) if rank is not None else ((), ())
                parked = ev.Parked(
                    message.proc, message.generation, message.version, message.can_advance, *kept
                )
                self.feed(parked)
            case msg.Exported():
                self._exported(message)
            case msg.Formed():
                self.recoveries.mark("rehearsed", message.rehearsed_ns)
                self.recoveries.mark("pulled", message.pulled_ns)
                self.recoveries.mark("formed", message.at_ns)
                self.feed(ev.Formed(message.proc, message.generation, message.buckets))
            case msg.Committed():
                self._committed(message)
            case msg.Failed():
                self._failed(message)
            case msg.Ending():
                if message.proc in self.processes:
                    self.processes[message.proc].said_code = message.code
                if self.core.config.external:
                    self._to(message.proc, msg.Released())  # it waits to be heard
            case msg.Leaving():
                self.feed(ev.Leaving(message.proc, message.generation, message.version))
            case msg.Noted():
                self.log(message.event, message.reason, self.core.rank_of(message.proc), message.step)
            case msg.Put():
                self._rendezvous.put(message.generation, message.key, message.value)
            case msg.Get():
                self._rendezvous.get(message.proc, message.generation, message.key)
            case msg.Hello():
                pass

    def hello(self, message: msg.Hello, identity: bytes) -> msg.Refused | None:
        """Bind a process's identity, and welcome it; or Refused, for a stranger."""
        process = self.processes.get(message.proc)
        if process is None or process.identity is not None:
            return msg.Refused("stranger", f"{message.proc} is not a process this daemon is waiting for")
        process.identity, process.pid = identity, message.pid
        self._welcome(process)
        self.feed(ev.Heartbeat(message.proc))
        return None

    def rejoin(self, message: msg.Rejoin, identity: bytes) -> msg.Refused | None:
        """A process of a daemon that has died is there. None: it is adopted."""
        process = self.processes.get(message.proc)
        if message.job != self.name or process is None or not process.adopted or process.gone:
            return msg.Refused(
                "stranger", f"{message.proc} of job {message.job} is not one that is awaited here"
            )
        if (message.pid, message.rank) != (process.pid, process.rank):
            return msg.Refused(
                "stranger", f"{message.proc} is not process {message.pid} with rank {message.rank}"
            )
        adopted = standing(message, *self.memory.kept(message.rank))
        process.identity = identity
        self._welcome(process)
        self.memory.arena_bytes[message.rank] = message.arena_bytes
        if message.built_offered:
            self.feed(ev.BuiltOffered())
        self.feed(adopted)
        return None

    def _welcome(self, process: Process) -> None:
        assert process.identity is not None
        if self.records is not None:
            self.records.took(process, self.core.state)
        welcome = msg.Welcome(
            proc=process.name,
            job=self.name,
            shm_dir=str(self.shm_dir),
            rank=process.rank,
            world_size=self.core.config.world_size,
            generation=process.generation,
            replacement=process.replacement,
            pull=self._pull,
            shard_address=self._shard_address,
            heartbeat_s=self.core.config.suspect_after_s / HEARTBEATS,
            daemon_pid=os.getpid(),
            external=self.core.config.external,
            patience_s=self._patience_s,
        )
        self._send(process.identity, welcome)
        for message_kept in process.unsent:
            self._send(process.identity, message_kept)
        process.unsent.clear()

    def joined(self, message: msg.Hello, identity: bytes) -> None:
        """Another launcher has started a process that was waited for."""
        self.hello(message, identity)
        self.feed(ev.Joined(message.proc))

    def condemn(self, proc: str, why: str) -> None:
        """End a process that must not go on."""
        self.feed(ev.Condemned(proc, why))

    def tick(self) -> None:
        """A few times a second: what the ranks' tags say, then the clock."""
        for rank, member in enumerate(self.core.state.members):
            process = self.processes.get(member.proc)
            if member.status in (RankStatus.DEAD, RankStatus.DONE) or process is None or not process.identity:
                continue  # who has not been heard shows no tag yet: what is there is its predecessor's
            tag = self.tag(rank)
            if tag is not None:
                self.feed(ev.TagSeen(member.proc, tag.entered, max(tag.step, 0) << 32 | tag.progress))
        self.feed(ev.Tick())

    def tag(self, rank: int) -> Tag | None:
        reader = self._tags.setdefault(rank, TagReader(tag_path(self.shm_dir, rank)))
        try:
            return reader.read()
        except FlashrecError as error:
            self.log("bad tag", str(error), rank)
            return None

    def log(self, event: str, reason: str, rank: int | None = None, step: int | None = None) -> None:
        generation = self.core.state.generation
        self._log.write(event, reason, job=self.name, generation=generation, step=step, rank=rank)

    def pids(self) -> dict[str, int]:
        """Process name -> pid, of those that live."""
        return self._supervisor.pids

    # --- particular messages ------------------------------------------------------------------------------

    def _exported(self, message: msg.Exported) -> None:
        self.recoveries.mark("exported", message.at_ns)
        if message.generation != self.core.state.generation:
            return
        part = msg.PartReady(message.generation, message.rank, message.manifest)
        for rank, member in enumerate(self.core.state.members):
            if member.status is RankStatus.FORMING and rank in self._replaced:
                self._to(member.proc, part)

    def _committed(self, message: msg.Committed) -> None:
        rank = self.core.rank_of(message.proc)
        if rank is None:
            return
        done = self.recoveries.committed(message.generation, rank, message.at_ns)
        if done is not None:
            took = (done.marks["redone"] - done.began_ns) / 1e6
            self.log(
                "recovered",
                f"the next step was committed on all ranks after {took:.0f} ms",
                step=done.version,
            )

    def _failed(self, message: msg.Failed) -> None:
        rank = self.core.rank_of(message.proc)
        if message.proc in self.processes:
            self.processes[message.proc].explained = True
        self.log("exception", message.traceback, rank, message.step)
        lines = message.traceback.strip().splitlines()
        self.feed(ev.Failed(message.proc, (lines[-1] if lines else "no traceback")[:SUMMARY_CHARACTERS]))

    def _protected(self, message: msg.Protected) -> None:
        rank = self.core.rank_of(message.proc)
        if rank is None:
            return
        self.memory.arena_bytes[rank] = message.arena_bytes
        words = self.memory.disagreement(rank), self.memory.shortage()
        self.feed(ev.Protected(message.proc, message.claims, message.why_sealed, *words))
        if self.records is not None and message.proc in self.processes:
            self.records.took(self.processes[message.proc], self.core.state)

    def _answer_get(self, requester: str, generation: int, key: str, value: bytes) -> None:
        self._to(requester, msg.Value(generation, key, value))

    # --- out --------------------------------------------------------------------------------------------

    def _to(self, proc: str, message: msg.Message) -> None:
        process = self.processes.get(proc)
        if process is None:
            return
        if process.identity is None:
            process.unsent.append(message)  # it has not said Hello yet
        else:
            self._send(process.identity, message)

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.Launch():
                self._launch_process(action)
            case ev.Prepare():
                self._to(action.proc, msg.Prepare())
            case ev.Assign():
                self._assign(action)
            case ev.Abort():
                for proc in action.procs:
                    self._to(proc, msg.Abort(action.generation, action.reason))
            case ev.SendPlan():
                plan = action.plan
                self._replaced = plan.replaced
                self.recoveries.planned(plan.generation, plan.version, time.monotonic_ns())
                resume = msg.ResumePlan(
                    plan.generation, plan.version, plan.replaced, plan.served, action.sealing
                )
                for proc in action.procs:
                    self._to(proc, resume)
            case ev.SetRegime():
                if action.sealing:
                    self.log("arena memory", self.memory.needs())
                for proc in action.procs:
                    self._to(proc, msg.Regime(action.sealing))
            case ev.Release():
                for proc in action.procs:
                    self._to(proc, msg.Released())
            case ev.Kill():
                self._kill(action)
            case ev.Inspect():
                for proc in action.procs:
                    self._to(proc, msg.Inspect())
            case ev.Log():
                self.log(action.event, action.reason, action.rank, action.step)
            case ev.End():
                self._end = (action.code, action.reason)
                self._maybe_end()

    def _launch_process(self, action: ev.Launch) -> None:
        number = int(action.proc.removeprefix("p"))
        process = Process(action.proc, number, action.rank, action.generation, action.replacement)
        self.processes[action.proc] = process
        process.starting = self._task(self._start_process(process))
        process.starting.add_done_callback(lambda task: self._started(process, task))

    def _started(self, process: Process, task: asyncio.Task[None]) -> None:
        """The start is over: it worked, or failed, or was called off, perhaps before it had begun."""
        process.starting = None
        if task.cancelled():
            self.exited(process.name, None, signal.SIGKILL)
        elif (error := task.exception()) is not None:
            self.log("process not started", f"{process.name}: {error}", process.rank)
            process.explained = True
            self.feed(ev.Failed(process.name, str(error)))
            self.exited(process.name, COULD_NOT_START, None)

    async def _start_process(self, process: Process) -> None:
        pid = await self.source.start(process)
        self.log("process started", f"{process.name}, pid {pid}", process.rank)

    def _assign(self, action: ev.Assign) -> None:
        process = self.processes[action.proc]
        process.rank, process.generation = action.rank, action.generation
        self.source.assigned(process)
        if self.records is not None:
            self.records.took(process, self.core.state)
        self._to(action.proc, msg.Assign(action.rank, action.generation))

    def _kill(self, action: ev.Kill) -> None:
        process = self.processes.get(action.proc)
        if process is None:
            return
        if process.starting is not None:
            process.starting.cancel()
        elif action.hard:
            self._supervisor.kill_group(action.proc)
        else:
            self._supervisor.signal(action.proc, signal.SIGTERM)
            self._supervisor.signal(action.proc, signal.SIGCONT)

    # --- the end ----------------------------------------------------------------------------------------

    def _task(self, work: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _maybe_end(self) -> None:
        if self._end is None or self.processes:
            return
        end, self._end = self._end, None
        self._task(self._close(*end))

    async def _close(self, code: int, reason: str) -> None:
        await self.source.close()
        for reader in self._tags.values():
            reader.close()
        self.directory.remove()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        self._ended(code, reason)
