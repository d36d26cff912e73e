"""One job's effects: carries out what the core decides, and tells it what happens.

Everything here runs in the daemon's event loop. What may take long (starting a process) is a task of the
job's task group; everything else is immediate.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from flashrec.errors import ProtocolError
from flashrec.protocol import messages as msg
from flashrec.protocol.exitcode import exit_code
from flashrec.protocol.jobdir import JobDirectory
from flashrec.protocol.tag import Tag
from flashrecd import rejoining
from flashrecd.adoption import refusal, standing
from flashrecd.core import events as ev
from flashrecd.core.detection import HEARTBEATS, KEPT_FACTOR
from flashrecd.core.job import Core
from flashrecd.core.state import JobConfig, Kept, RankStatus, Status
from flashrecd.eventlog import EventLog
from flashrecd.hosts import Host, LocalHost, Versions
from flashrecd.jobnodes import JobNodes, newly_lost
from flashrecd.jobprocesses import JobProcesses
from flashrecd.launching import SUMMARY_CHARACTERS, OwnProcesses, Process, ProcessSource
from flashrecd.place import Place
from flashrecd.records import Records
from flashrecd.recoveries import Recoveries
from flashrecd.rendezvous import Rendezvous
from flashrecd.shardserver import ShardServer
from flashrecd.supervise import Supervisor

FAULT_MATTERS = (Status.ADOPTING, Status.RUNNING, Status.PARKING, Status.FORMING)
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class JobRun:
    """A job from its beginning to its end. `source` brings its processes about, `send(identity, message)` reaches one,
    `ended(code, reason)` is called once. `directory`: of a job that another daemon began. `recorded`: another daemon
    may take over, and the ranks wait for it for `patience_s`.

    `hosts` are the job's nodes, by number; the first is this daemon's own."""

    def __init__(
        self,
        name: str,
        config: JobConfig,
        source: ProcessSource,
        *,
        target: str,
        pull: str,
        supervisor: Supervisor,
        log: EventLog,
        shard_address: str,
        shards: ShardServer,
        send: Callable[[bytes, msg.Message], None],
        ended: Callable[[int, str], None],
        directory: JobDirectory | None = None,
        recorded: bool = False,
        patience_s: float = 0.0,
    ) -> None:
        self.name = name
        self.target = target
        self.core = Core(config)
        self.recoveries = Recoveries(config.world_size)
        self.directory = directory or JobDirectory.make(name)
        self.shm_dir = self.directory.path
        self.records = Records(self.shm_dir, self.log) if recorded else None
        self.local = LocalHost(
            name=config.nodes[0].name,
            job=name,
            directory=self.shm_dir,
            source=source,
            supervisor=supervisor,
            send=send,
            note=self.log,
            shards=shards,
            holdings=lambda generation, kept: self.holdings(0, generation, kept),
        )
        self.hosts: list[Host] = [self.local]
        self.nodes = JobNodes(self.hosts)
        self.procs = JobProcesses(
            self.hosts,
            config.ranks_per_node,
            note=self.log,
            failed=lambda process, reason: self.feed(ev.Failed(process.name, reason)),
            exited=self.exited,
            forgotten=self._maybe_end,
        )
        self.arena_bytes: dict[int, int] = {}
        """By rank, what the sealed regime takes of its node's shared memory."""
        self.place: Place | None = None
        """Of this node, where there are others."""
        self.links: list[dict[str, Any]] = []
        """How its nodes reach each other, as found when it began."""
        self._pull = pull
        self._patience_s = patience_s
        self._supervisor = supervisor
        self._log = log
        self._shard_address = shard_address
        self._ended = ended
        self._rendezvous = Rendezvous(self._answer_get)
        self._replaced: tuple[int, ...] = ()  # by the newest plan
        self._closing: asyncio.Task[None] | None = None
        self._end: tuple[int, str] | None = None

    @property
    def processes(self) -> dict[str, Process]:
        """By name, until nothing is left of it."""
        return self.procs.by_name

    @property
    def source(self) -> ProcessSource:
        """Of this node's processes."""
        return self.local.source

    # --- in ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.begin(lambda: self.feed(ev.Begin()))

    def begin(self, how: Callable[[], None]) -> None:
        """`how` tells the core of the first event."""
        self.local.source.begin()
        how()

    def feed(self, event: ev.Event) -> None:
        """Tell the core, and do what it answers."""
        before = self.core.state
        actions = self.core.handle(event, time.monotonic())
        if self.records is not None:
            self.records.count(self.core.state)
        for node in newly_lost(before, self.core.state):
            self._lose(node)
        for action in actions:
            self._do(action)
        if before.status is not self.core.state.status and self.core.state.status is Status.RUNNING:
            # Every replacement has installed what was served: shared memory is the job's to use again.
            for host in self.hosts:
                host.runs(self.core.state.generation, ())

    def exited(self, proc: str, code: int | None, number: int | None) -> None:
        """A process is gone; called by the supervisor within a millisecond or so."""
        now = time.monotonic_ns()
        process = self.processes.get(proc)
        if process is None or process.gone:
            return
        process.gone = True
        if number is None and code is None:
            code = exit_code(self.shm_dir, proc)
            if code is None:
                code = process.said_code
        rank = self.core.rank_of(proc)
        tag = self.tag(rank) if rank is not None else None
        left = tag.step if tag is not None and tag.is_at_end else None
        over = self.core.state.status is Status.ADOPTING and left is not None
        if rank is not None and self.core.state.status in FAULT_MATTERS and not over:
            ended = "ended" if code is None else f"exit {code}"
            kind = signal.Signals(number).name if number is not None else ended
            self.recoveries.fault(now, rank, kind, tag)
        if (
            not process.explained
            and (code or number in CRASHES)
            and (words := self.procs.host(process).last_words(process))
        ):
            self.feed(ev.Failed(proc, f"last on stderr: {words}"))
        kept = self.procs.host(process).kept(rank) if rank is not None else Versions()
        self.feed(ev.Exited(proc, code, number, *kept, tag.step if tag is not None else None, left))
        if self.records is not None:
            self.records.ended(process)
        self.procs.forget(process)

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
            case msg.Unsealed():
                self.feed(ev.Unsealed(message.proc, message.why_unsealed))
            case msg.Parked():
                if self.recoveries.open is None and self.core.state.status is Status.RUNNING:
                    self.recoveries.suspicion(now)
                self.recoveries.mark("parked", message.at_ns)
                rank = self.core.rank_of(message.proc)
                process = self.processes[message.proc]
                kept = self.procs.host(process).kept(rank) if rank is not None else Versions()
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
                    self.procs.send(message.proc, msg.Released())  # it waits to be heard
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

    def hello(self, message: msg.Hello, identity: bytes = b"") -> msg.Refused | None:
        """Bind a process's identity, if it is on this node, and welcome it; or Refused, for a stranger."""
        process = self.processes.get(message.proc)
        if process is None or process.heard or (process.node == 0) != bool(identity):
            return msg.Refused("stranger", f"{message.proc} is not a process this daemon is waiting for")
        process.pid, process.heard = message.pid, True
        if identity:
            self.local.bind(process, identity)
        self.welcome(process)
        self.feed(ev.Heartbeat(message.proc))
        return None

    def rejoin(self, message: msg.Rejoin, identity: bytes) -> msg.Refused | None:
        """A process of a daemon that has died is there, on this node. None: it is adopted."""
        process = self.processes.get(message.proc)
        is_awaited = process is not None and process.adopted
        if (refused := refusal(message, self.name, process, is_awaited=is_awaited)) is not None:
            return refused
        assert process is not None
        adopted = standing(message, *self.local.kept(message.rank))
        process.heard = True
        self.local.bind(process, identity)
        self.welcome(process)
        self.arena_bytes[message.rank] = message.arena_bytes
        self.local.memory.arena_bytes[message.rank] = message.arena_bytes
        if message.built_offered:
            self.feed(ev.BuiltOffered())
        self.feed(adopted._replace(shortage=self.local.memory.shortage()))
        if message.why_unsealed:
            self.feed(ev.Unsealed(message.proc, message.why_unsealed))
        return None

    def welcome(self, process: Process) -> None:
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
            local_rank=process.local_rank,
            local_world_size=self.core.config.ranks_per_node,
            node=process.node,
            num_nodes=len(self.hosts),
            kept_within_s=KEPT_FACTOR * self.core.config.suspect_after_s,
        )
        if self.place is not None and process.node == 0:
            welcome = self.place.filled_in(welcome)
        self.procs.host(process).send(process, welcome)

    def joined(self, message: msg.Hello, identity: bytes) -> None:
        """Another launcher has started a process that was waited for."""
        self.hello(message, identity)
        self.feed(ev.Joined(message.proc))

    # --- other nodes --------------------------------------------------------------------------------------

    def _lose(self, node: int) -> None:
        """The core has given it up: its processes count as dead, and nothing that it says is of this job any more."""
        now, host = time.monotonic_ns(), self.hosts[node]
        for process in self.procs.lose(node):
            if process.rank is not None:
                self.recoveries.fault(now, process.rank, "node lost", host.tag(process.rank))
            elif self.records is not None:
                self.records.ended(process)
        host.lost()

    def rejoined(self, message: msg.Rejoin) -> msg.Refused | None:
        """A rank of another node, whose daemon has died, is there. None: it is adopted."""
        return rejoining.rejoined(self, message)

    def processes_on(self, node: int) -> list[str]:
        """Those that have not ended, as far as is known."""
        return [
            process.name for process in self.processes.values() if process.node == node and not process.gone
        ]

    def output(self, output: msg.Output) -> None:
        assert isinstance(self.source, OwnProcesses)
        self.source.relay(output)

    def heartbeat(self, proc: str) -> None:
        self.feed(ev.Heartbeat(proc))

    def holdings(self, node: int, generation: int, kept: tuple[Kept, ...]) -> None:
        self.feed(ev.Holdings(node, generation, kept))

    def condemn(self, proc: str, why: str) -> None:
        """End a process that must not go on."""
        self.feed(ev.Condemned(proc, why))

    def tick(self) -> None:
        """A few times a second: what the ranks' tags say, then the clock."""
        for rank, member in enumerate(self.core.state.members):
            process = self.processes.get(member.proc)
            if member.status in (RankStatus.DEAD, RankStatus.DONE) or process is None or not process.heard:
                continue  # who has not been heard shows no tag yet: what is there is its predecessor's
            tag = self.tag(rank)
            if tag is not None:
                self.feed(ev.TagSeen(member.proc, tag.entered, max(tag.step, 0) << 32 | tag.progress))
        self.feed(ev.Tick())

    def tag(self, rank: int) -> Tag | None:
        return self.hosts[self.core.state.members[rank].node].tag(rank)

    def log(self, event: str, reason: str, rank: int | None = None, step: int | None = None) -> None:
        generation = self.core.state.generation
        self._log.write(event, reason, job=self.name, generation=generation, step=step, rank=rank)

    def pids(self) -> dict[str, int]:
        """Process name -> pid, of those that live (on their node)."""
        return self.procs.pids()

    # --- particular messages ------------------------------------------------------------------------------

    def _exported(self, message: msg.Exported) -> None:
        self.recoveries.mark("exported", message.at_ns)
        if message.generation != self.core.state.generation:
            return
        members = self.core.state.members
        home = members[message.rank].node if message.rank < len(members) else 0
        for rank, member in enumerate(members):
            if member.status is RankStatus.FORMING and rank in self._replaced:
                address = "" if member.node == home else self.hosts[home].shard_address
                self.procs.send(
                    member.proc, msg.PartReady(message.generation, message.rank, message.manifest, address)
                )

    def _committed(self, message: msg.Committed) -> None:
        rank = self.core.rank_of(message.proc)
        if rank is None:
            return
        if self.core.state.status is Status.RUNNING and message.generation == self.core.state.generation:
            # Not before: nobody votes until those who keep its replicas from now on have acknowledged them.
            for node, ranks in self.nodes.take_forgotten():
                self.hosts[node].runs(message.generation, ranks)
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
        self.arena_bytes[rank] = message.arena_bytes
        words = self.procs.host(self.processes[message.proc]).describe(rank, message.arena_bytes)
        words = words._replace(unsealed=message.why_unsealed or words.unsealed)
        self.feed(
            ev.Protected(
                message.proc, message.claims, message.why_sealed, *words, size_bytes=message.arena_bytes
            )
        )
        if self.records is not None and message.proc in self.processes:
            self.records.took(self.processes[message.proc], self.core.state)

    def _answer_get(self, requester: str, generation: int, key: str, value: bytes) -> None:
        self.procs.send(requester, msg.Value(generation, key, value))

    # --- out --------------------------------------------------------------------------------------------

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.Launch():
                self.procs.launch(action)
            case ev.Prepare():
                self.procs.send(action.proc, msg.Prepare())
            case ev.Assign():
                process = self.procs.assign(action)
                if self.records is not None:
                    self.records.took(process, self.core.state)
                assigned = msg.Assign(action.rank, action.generation, process.local_rank or 0)
                self.procs.send(action.proc, assigned)
            case ev.Abort():
                for proc in action.procs:
                    self.procs.send(proc, msg.Abort(action.generation, action.reason))
            case ev.SendPlan():
                plan = action.plan
                self._replaced = plan.replaced
                self.nodes.planned(self.core.state, action.keepers)
                self.recoveries.planned(plan.generation, plan.version, time.monotonic_ns())
                resume = msg.ResumePlan(
                    plan.generation,
                    plan.version,
                    plan.replaced,
                    plan.served,
                    action.sealing,
                    watermark=plan.watermark,
                )
                for proc in action.procs:
                    self.procs.send(proc, self.nodes.resume(resume, self.core.rank_of(proc), action))
            case ev.SetRegime():
                if action.sealing or not action.why_unsealed:
                    for host in self.hosts:
                        if words := host.needs():
                            self.log("arena memory" if action.sealing else "full versions", words)
                for proc in action.procs:
                    rank = self.core.rank_of(proc)
                    keepers = self.nodes.keepers(rank, action.keepers)
                    self.procs.send(proc, msg.Regime(action.sealing, keepers, action.why_unsealed))
            case ev.Release():
                for proc in action.procs:
                    self.procs.send(proc, msg.Released())
            case ev.Kill():
                self.procs.end(action)
            case ev.Inspect():
                for proc in action.procs:
                    self.procs.send(proc, msg.Inspect())
            case ev.Fence():
                for node in action.nodes:
                    self.hosts[node].fence(action.generation)
            case ev.Settle():
                for node in action.nodes:
                    self.hosts[node].settle(action.generation, action.version, action.sealed)
            case ev.Log():
                self.log(action.event, action.reason, action.rank, action.step)
            case ev.End():
                self._end = (action.code, action.reason)
                self._maybe_end()

    # --- the end ----------------------------------------------------------------------------------------

    def _maybe_end(self) -> None:
        if self._end is None or self.processes:
            return
        end, self._end = self._end, None
        self._closing = asyncio.get_running_loop().create_task(self._close(*end))

    async def _close(self, code: int, reason: str) -> None:
        await asyncio.gather(*(host.close() for host in self.hosts))
        self.directory.remove()
        self.procs.close()
        self._ended(code, reason)
