"""The daemon: sockets, clock and processes around the core.

One ROUTER socket serves ranks and command lines. Whatever arrives is decoded strictly; what is malformed, of
an unknown sender or of another release is refused, logged and counted, and changes nothing.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import zmq
import zmq.asyncio

from flashrec import __version__
from flashrec.errors import FlashrecError, ProtocolError, UsageError
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from flashrec.protocol.jobdir import JobDirectory, remove_stale
from flashrec.protocol.jobfiles import lives
from flashrecd import adoption, metrics
from flashrecd import status as status_document
from flashrecd.core import events as ev
from flashrecd.core.detection import PATIENCE_FACTOR
from flashrecd.core.state import JobConfig
from flashrecd.eventlog import EventLog
from flashrecd.external import ExternalProcesses, Joining, external_config
from flashrecd.jobrun import JobRun
from flashrecd.launching import OwnProcesses, Source
from flashrecd.rundir import RunDirectory
from flashrecd.shardserver import ShardServer
from flashrecd.store.base import Store
from flashrecd.store.embedded import EmbeddedStore
from flashrecd.supervise import Supervisor

TICK_S = 0.1
SCRAPE_S = 5.0
STOP_GRACE_S = 2.0
MAX_REFUSALS_LOGGED = 1000
MAX_REFUSALS_ANSWERED = 100
MAX_PROCESSES = 4096
FROM_PROCESS = get_args(msg.FROM_PROCESS)
ACCEPTED = msg.FROM_PROCESS | msg.FROM_COMMAND


class Daemon:
    """Serves one run directory until `stop()`."""

    def __init__(
        self, run_dir: Path, *, metrics_address: tuple[str, int] | None = None, has_owner: bool = False
    ) -> None:
        """`has_owner`: a command line brought this daemon, and both end together: none will take its place."""
        self._started_at = time.monotonic()
        self.run = RunDirectory(run_dir)
        self.log = EventLog(run_dir / "events.jsonl")
        self.job: JobRun | None = None
        self._own: OwnProcesses | None = None  # of that job
        self.store: Store = EmbeddedStore()
        self._last_job: dict[str, Any] | None = None
        self._client: bytes | None = None
        self._client_pidfd = -1
        self._refused = 0
        self._refusals: Counter[bytes] = Counter()
        self._identities: dict[bytes, str] = {}
        self._metrics_address = metrics_address
        self._has_owner = has_owner
        self._last_end: msg.JobEnded | None = None
        self._joining = Joining(
            self.run.path, lambda: self.job, self._begin_external, self._bind, self._refuse
        )
        self._outbox: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self._stopped = asyncio.Event()

    async def serve(self) -> None:
        """Until stopped, or SIGTERM / SIGINT."""
        os.umask(0o077)
        for path in remove_stale():
            self.log.write("cleaned", f"{path} was left behind by processes that are dead")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self.supervisor = Supervisor(self._exited)
        stop_metrics: Callable[[], None] | None = None
        self._shards = ShardServer(self.run.path, self.supervisor)
        try:
            if self._metrics_address is not None:
                collector = metrics.JobCollector(lambda: self.job, lambda: self._refused, _in_loop(loop))
                stop_metrics = metrics.serve(collector, *self._metrics_address)
            self._socket.bind(self.run.address)
            self.log.write("daemon started", f"pid {os.getpid()}, release {__version__}")
            if (orphaned := adoption.find(self.run.address, self.log.write)) is not None:
                self._take_over(orphaned)
            tasks = [loop.create_task(work()) for work in (self._receive, self._deliver, self._tick)]
            stopped = loop.create_task(self._stopped.wait())
            await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)
            failed = [t.exception() for t in tasks if t.done() and not t.cancelled() and t.exception()]
            await self._end_everything()
            if failed and failed[0] is not None:
                raise failed[0]
        finally:
            if stop_metrics is not None:
                stop_metrics()
            self._socket.close()
            context.term()
            self.log.write("daemon ended", f"pid {os.getpid()}")
            self.log.close()
            self.run.close()

    def stop(self) -> None:
        self._stopped.set()

    async def _end_everything(self) -> None:
        if self.job is not None:
            self.job.feed(ev.Stop("the daemon was stopped", hard=False))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_GRACE_S):
                    while self.job is not None:
                        await asyncio.sleep(0.01)
        left = await self.supervisor.shutdown(grace_s=1.0)
        for what in left:
            self.log.write("left behind", what)
        if self.job is not None:
            self._reply(self._client, msg.JobEnded(self.job.name, 130, "the daemon was stopped"))
            self.job.directory.remove()
        self._forget_client()
        while not self._outbox.empty():
            identity, data = self._outbox.get_nowait()
            await self._socket.send_multipart([identity, data])

    # --- the loop ---------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"{len(frames)} frames instead of two")
                self._take(frames[0], decode(frames[1], ACCEPTED))
            except ProtocolError as error:
                self._refuse(frames[0], "protocol", str(error))
            except FlashrecError as error:
                self._reply(frames[0], msg.Refused(type(error).__name__, str(error)))
            except Exception:  # a bug of ours that one message found: the others' job goes on
                self.log.write("internal error", traceback.format_exc())
                self._refuse(frames[0], "internal", "an error inside the daemon; its event log has it")

    async def _deliver(self) -> None:
        while True:
            identity, data = await self._outbox.get()
            with contextlib.suppress(zmq.ZMQError):  # the peer is gone: its exit says so elsewhere
                await self._socket.send_multipart([identity, data])

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.job is not None:
                self.job.tick()
            self._joining.tick()

    def _client_ended(self) -> None:
        """The process that submitted the job is gone."""
        self._forget_client()
        if self.job is not None:
            if self._own is not None:
                self._own.has_listener = False
            self.job.feed(ev.Stop("the command line that submitted the job is gone", hard=True))

    def _forget_client(self) -> None:
        self._client = None
        if self._client_pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._client_pidfd)
            os.close(self._client_pidfd)
            self._client_pidfd = -1

    def _exited(self, proc: str, code: int | None, number: int | None) -> None:
        if self._shards.exited(proc):
            return
        self._identities = {i: p for i, p in self._identities.items() if p != proc}
        if self.job is not None:
            self.job.exited(proc, code, number)

    def _reply(self, identity: bytes | None, message: msg.Message) -> None:
        if identity is not None:
            self._outbox.put_nowait((identity, encode(message)))

    def _refuse(self, identity: bytes, kind: str, reason: str) -> None:
        self._refused += 1
        if self._refused <= MAX_REFUSALS_LOGGED:
            self.log.write("refused", reason)
        if len(self._refusals) > MAX_REFUSALS_ANSWERED:
            self._refusals.clear()
        self._refusals[identity] += 1
        if self._refusals[identity] <= MAX_REFUSALS_ANSWERED:  # it may never read what we answer
            self._reply(identity, msg.Refused(kind, reason))

    # --- messages ---------------------------------------------------------------------------------------

    def _take(self, identity: bytes, message: msg.Message) -> None:
        if isinstance(message, FROM_PROCESS):
            self._take_from_process(identity, message)
            return
        match message:
            case msg.Submit():
                self._submit(identity, message)
            case msg.Attach():
                self._attach(identity, message)
            case msg.Present():
                if identity == self._client and self._own is not None:
                    self._own.output_seen_bytes = message.num_bytes
            case msg.StopJob():
                if self.job is None or self.job.name != message.job:
                    self._reply(identity, msg.Refused("job", f"no job {message.job} runs here"))
                else:
                    self.job.feed(ev.Stop("it was interrupted", message.hard))
                    self._reply(identity, msg.Done("stopping"))
            case msg.AskStatus():
                text = status_document.document(
                    self.job, self._last_job, self._started_at, os.getpid(), self._refused
                )
                self._reply(identity, msg.Status(text))
            case msg.SignalRank():
                self._signal_rank(identity, message)
            case msg.ShutDown():
                self._reply(identity, msg.Done("the daemon ends"))
                self.stop()
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a daemon")

    def _take_from_process(self, identity: bytes, message: Any) -> None:
        if isinstance(message, msg.Join):
            self._joining.take(identity, message)
            return
        if isinstance(message, msg.Hello | msg.Rejoin):
            if message.release != __version__:
                self._refuse(
                    identity,
                    "version",
                    f"the daemon is flashrec {__version__}, this process {message.release}",
                )
            elif self.job is None:
                self._refuse(identity, "stranger", f"no job runs here that {message.proc} could belong to")
            else:
                if isinstance(message, msg.Hello):
                    refused = self.job.hello(message, identity)
                else:
                    refused = self.job.rejoin(message, identity)
                if refused is not None:
                    self._refuse(identity, refused.kind, refused.reason)
                else:
                    self._bind(identity, message.proc)
            return
        if self._identities.get(identity) != message.proc or self.job is None:
            raise ProtocolError(f"{type(message).__name__} from a sender that is not {message.proc!r:.40}")
        self.job.received(message)

    def _bind(self, identity: bytes, proc: str) -> None:
        self._identities[identity] = proc

    def _begin_external(self, name: str, join: msg.Join) -> None:
        job, _ = self._run_external(name, join)
        if job.records is not None:
            job.records.describe(name, join, self.run.address, self.run.path)
        job.log("job", f"{join.job!r}: {join.target}, started by process {join.launcher_pid}")
        job.start()

    def _run_external(
        self, name: str, join: msg.Join, directory: JobDirectory | None = None
    ) -> tuple[JobRun, ExternalProcesses]:
        """The job, which has not begun, and what waits for its processes. `directory`: another daemon had begun it."""
        config = external_config(join)
        source = ExternalProcesses(join.job, self.run.path, self.supervisor, self._joining.admit)
        job = self._make_run(name, config, source, target=join.target, pull="shm", directory=directory)
        self.job = job
        self.store.put(f"job/{name}", os.fsencode(join.target), None)
        return job, source

    def _make_run(
        self,
        name: str,
        config: JobConfig,
        source: Source,
        *,
        target: str,
        pull: str,
        directory: JobDirectory | None,
    ) -> JobRun:
        return JobRun(
            name,
            config,
            source,
            target=target,
            pull=pull,
            supervisor=self.supervisor,
            log=self.log,
            shard_address=self._shards.address,
            send=self._reply,
            ended=self._job_ended,
            directory=directory,
            recorded=not self._has_owner,
            patience_s=0.0 if self._has_owner else PATIENCE_FACTOR * config.suspect_after_s,
        )

    def _submit(self, identity: bytes, message: msg.Submit) -> None:
        if message.release != __version__:
            reason = f"the daemon is flashrec {__version__}, the command line {message.release}"
            self._refuse(identity, "version", reason)
            return
        if self.job is not None:
            self._reply(identity, msg.Refused("busy", f"job {self.job.name} runs here already"))
            return
        if message.start_method not in msg.START_METHODS or message.pull not in msg.PULLS:
            raise ProtocolError(f"no start method {message.start_method!r:.40} or pull {message.pull!r:.40}")
        if message.world_size + message.num_standbys > MAX_PROCESSES:
            raise UsageError(f"a daemon takes at most {MAX_PROCESSES} ranks and standbys")
        try:
            client_pidfd = os.pidfd_open(message.pid)
        except (OSError, OverflowError):
            raise ProtocolError(f"process {message.pid}, which submits a job, does not exist") from None
        name = secrets.token_hex(3)
        log_dir = Path(message.log_dir) if message.log_dir else self.run.path / "jobs"
        try:
            job, own = self._run_own(name, message, log_dir)
        except BaseException:
            os.close(client_pidfd)
            raise
        self._client = identity
        self._watch_client(client_pidfd)
        if job.records is not None:
            job.records.describe(name, message, self.run.address, log_dir)
        self._reply(identity, self._submitted(own, job))
        job.start()

    def _run_own(
        self, name: str, submit: msg.Submit, log_dir: Path, directory: JobDirectory | None = None
    ) -> tuple[JobRun, OwnProcesses]:
        """The job, which has not begun, and what starts its processes. `directory`: another daemon had begun it."""
        config = JobConfig(
            world_size=submit.world_size,
            num_standbys=submit.num_standbys,
            max_restarts=submit.max_restarts,
            suspect_after_s=submit.suspect_after_s,
        )
        own = OwnProcesses(
            name,
            submit,
            supervisor=self.supervisor,
            log_dir=log_dir,
            address=self.run.address,
            tell=lambda note: self._reply(self._client, note),
        )
        own.is_expected = lambda: self._client is None and self._client_pidfd >= 0
        job = self._make_run(name, config, own, target=submit.target, pull=submit.pull, directory=directory)
        try:
            if submit.pull == "zmq":
                self._shards.start(job.shm_dir)
        except BaseException:  # else it would keep the daemon busy, and never start
            if directory is None:
                job.directory.remove()
            else:  # ranks train in it
                job.directory.leave()
            raise
        self.job, self._own = job, own
        self.store.put(f"job/{name}", os.fsencode(submit.target), None)
        self.log.listener = lambda line: self._reply(self._client, msg.Happened(line))
        return job, own

    def _submitted(self, own: OwnProcesses, job: JobRun) -> msg.Submitted:
        return msg.Submitted(job.name, str(own.logs.log_dir / job.name), str(job.shm_dir), os.getpid())

    def _watch_client(self, pidfd: int) -> None:
        self._client_pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._client_ended)

    def _take_over(self, orphaned: adoption.Orphaned) -> None:
        """Go on with the job of a daemon that has died in this run directory."""
        record, submit = orphaned.record, orphaned.submit
        if isinstance(submit, msg.Join):
            job, source = self._run_external(record.job, submit, orphaned.directory)
            job.begin(lambda: adoption.take_over(job, orphaned, self.supervisor))
            source.take_over(submit, job.processes.values())
            return
        job, own = self._run_own(record.job, submit, Path(record.log_dir), orphaned.directory)
        if lives(submit.pid, record.client_ticks):
            with contextlib.suppress(OSError):
                self._watch_client(os.pidfd_open(submit.pid))
        job.begin(lambda: adoption.take_over(job, orphaned, self.supervisor))
        own.take_over(job.processes.values())
        if self._client_pidfd < 0:
            self._client_ended()

    def _attach(self, identity: bytes, message: msg.Attach) -> None:
        """The command line that submitted a job to the daemon before this one."""
        if message.release != __version__:
            reason = f"the daemon is flashrec {__version__}, the command line {message.release}"
            self._refuse(identity, "version", reason)
        elif self.job is not None and self._own is not None and self.job.name == message.job:
            if message.pid != self._own.submit.pid or self._client is not None:
                self._reply(identity, msg.Refused("job", f"job {message.job} is another command line's"))
                return
            if any(end < 0 for _, _, end in message.shown):
                raise ProtocolError("no output is shown up to a byte before its beginning")
            self._client = identity
            self._reply(identity, self._submitted(self._own, self.job))
            self._own.listen({(proc, stream): end for proc, stream, end in message.shown})
        elif self._last_end is not None and self._last_end.job == message.job:
            self._reply(identity, self._last_end)
        else:
            self._reply(identity, msg.Refused("job", f"no job {message.job} runs here"))

    def _signal_rank(self, identity: bytes, message: msg.SignalRank) -> None:
        if message.signal not in set(signal.Signals):
            raise ProtocolError(f"there is no signal {message.signal}")
        members = self.job.core.state.members if self.job is not None else ()
        if self.job is None:
            self._reply(identity, msg.Refused("job", "no job runs here"))
            return
        if not 0 <= message.rank < len(members):
            ranks = f"the job has ranks 0 to {len(members) - 1}"
            self._reply(identity, msg.Refused("rank", f"{ranks}, not {message.rank}"))
            return
        name = signal.Signals(message.signal).name
        self.job.log("signal", f"{name}, by command", message.rank)
        if self.supervisor.signal(members[message.rank].proc, message.signal):
            self._reply(identity, msg.Done(f"sent {name} to rank {message.rank}"))
        else:
            self._reply(identity, msg.Refused("rank", f"rank {message.rank} has no process at the moment"))

    def _job_ended(self, code: int, reason: str) -> None:
        assert self.job is not None
        self._last_job = status_document.describe(self.job)
        self._joining.ended(self.job)
        self._shards.stop()
        self.store.delete(f"job/{self.job.name}")
        self.log.listener = None
        self._last_end = msg.JobEnded(self.job.name, code, reason)
        self._reply(self._client, self._last_end)
        self.job = self._own = None
        self._forget_client()


def _in_loop(loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], Any]], Any]:
    """What runs a function on `loop` for another thread, and waits for its result."""

    def run(work: Callable[[], Any]) -> Any:
        async def on_the_loop() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(on_the_loop(), loop).result(SCRAPE_S)

    return run
