"""The daemon: sockets, clock and processes around the core.

One ROUTER socket serves ranks and command lines. Whatever arrives is decoded strictly; what is malformed, of
an unknown sender or of another release is refused, logged and counted, and changes nothing.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import zmq
import zmq.asyncio

from flashrec import __version__
from flashrec.errors import FlashrecError, ProtocolError
from flashrec.protocol import agents as ag
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from flashrec.protocol.jobdir import PARENT, remove_stale
from flashrec.state.files import free_bytes
from flashrecd import adoption, metrics
from flashrecd import status as status_document
from flashrecd.agent import Agent
from flashrecd.cluster.cluster import Cluster
from flashrecd.cluster.info import NodeInfo
from flashrecd.cluster.options import ClusterOptions
from flashrecd.eventlog import EventLog
from flashrecd.jobrun import JobRun
from flashrecd.outbox import MAX_LINE, Outbox
from flashrecd.ownpart import OwnPart
from flashrecd.partrecords import find_part
from flashrecd.rundir import RunDirectory
from flashrecd.service import STOP_GRACE_S, JobService
from flashrecd.shardserver import ShardServer
from flashrecd.supervise import Supervisor

TICK_S = 0.1
SCRAPE_S = 5.0
MAX_REFUSALS_LOGGED = 1000
MAX_REFUSALS_ANSWERED = 100
FROM_PROCESS = get_args(msg.FROM_PROCESS)
ACCEPTED = msg.FROM_PROCESS | msg.FROM_COMMAND

SAID_ALOUD = ("not joined", "node refused", "stranger")
"""What whoever starts a daemon should see of its cluster, not only who reads the event log."""


class Daemon:
    """Serves one run directory until `stop()`."""

    def __init__(
        self,
        run_dir: Path,
        *,
        metrics_address: tuple[str, int] | None = None,
        has_owner: bool = False,
        cluster: ClusterOptions | None = None,
    ) -> None:
        """`has_owner`: a command line brought this daemon, and both end together: none will take its place. `cluster`:
        of several nodes; None: it is alone."""
        self._started_at = time.monotonic()
        self.run = RunDirectory(run_dir)
        self.log = EventLog(run_dir / "events.jsonl")
        self._refused = 0
        self._refusals: Counter[bytes] = Counter()
        self._identities: dict[bytes, str] = {}
        self._metrics_address = metrics_address
        self._has_owner = has_owner
        self._cluster_options = cluster
        self._cluster: Cluster | None = None
        self._own_part: OwnPart | None = None  # of a member
        self._outbox = Outbox(self._cut_off)
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
        self._socket.setsockopt(zmq.SNDHWM, MAX_LINE)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what does not go is dropped without a word
        self.supervisor = Supervisor(self._exited)
        stop_metrics: Callable[[], None] | None = None
        self._shards = ShardServer(self.run.path, self.supervisor, self.log.write)
        self._cluster = None if self._cluster_options is None else self._make_cluster(self._cluster_options)
        self._service = JobService(
            self.run,
            self.log,
            supervisor=self.supervisor,
            shards=self._shards,
            reply=self._reply,
            refuse=self._refuse,
            bind=self._bind,
            is_cut_off=self._outbox.is_cut_off,
            has_owner=self._has_owner,
            cluster=self._cluster,
            cluster_options=self._cluster_options,
        )
        if self._cluster is not None and not self._cluster.leads:
            assert self._cluster_options is not None
            self._own_part = OwnPart(
                self._cluster,
                self._cluster_options,
                address=self.run.address,
                run_dir=self.run.path,
                supervisor=self.supervisor,
                shards=self._shards,
                send=self._reply,
                log=self.log.write,
            )
        try:
            if self._metrics_address is not None:
                collector = metrics.JobCollector(lambda: self.job, lambda: self._refused, _in_loop(loop))
                shards = metrics.ShardCollector(lambda: self._shards.address if self._shards.serves else None)
                stop_metrics = metrics.serve((collector, shards), *self._metrics_address)
            self._socket.bind(self.run.address)
            self.log.write("daemon started", f"pid {os.getpid()}, release {__version__}")
            if (orphaned := adoption.find(self.run.address, self.log.write)) is not None:
                self._service.take_over(orphaned)
            if self._own_part is not None and (part := find_part(self.run.address, self.log.write)):
                self._own_part.take_over(part)
            tasks = [
                loop.create_task(work())
                for work in (self._receive, self._deliver, self._tick, self._shards.watch)
            ]
            if self._cluster is not None:
                tasks.append(loop.create_task(self._cluster.serve()))
            stopped = loop.create_task(self._stopped.wait())
            await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            # The job ends while its ranks, and those of other nodes, can still be heard.
            if self._own_part is not None:
                await self._own_part.close(STOP_GRACE_S)
            await self._service.stop_job()
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)
            failed = [t.exception() for t in tasks if t.done() and not t.cancelled() and t.exception()]
            await self._service.end()
            if self._own_part is not None:
                self._own_part.remove()
            await self._outbox.flush(self._send)
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

    @property
    def _part(self) -> JobRun | Agent | None:
        """What the processes here belong to: a job, or this node's part in one."""
        return self.job if self._own_part is None else self._own_part.agent

    @property
    def job(self) -> JobRun | None:
        return self._service.job

    def stop(self) -> None:
        self._stopped.set()

    # --- the cluster --------------------------------------------------------------------------------------

    def _make_cluster(self, options: ClusterOptions) -> Cluster:
        return Cluster(
            options.node_info(memory_bytes=free_bytes(PARENT)),
            listen=options.listen,
            join=options.join,
            key=options.key,
            log=self._say,
            on_message=self._heard_of_a_part,
            on_joined=self._node_joined,
            on_heard=lambda node: self._service.parts.heard(node) if self._service.parts else None,
            on_closed=self._node_closed,
        )

    def _say(self, event: str, reason: str) -> None:
        self.log.write(event, reason)
        if event in SAID_ALOUD:
            with contextlib.suppress(OSError):
                print(f"flashrecd: {reason}", file=sys.stderr, flush=True)

    def _heard_of_a_part(self, node: str, message: Any) -> None:
        if self._own_part is not None:
            self._own_part.message(message)
        elif self._service.parts is not None:
            self._service.parts.message(node, message)
        elif not isinstance(message, ag.Unknown):
            assert self._cluster is not None
            self._cluster.send(node, ag.Unknown(message.part))

    def _node_joined(self, info: NodeInfo) -> None:
        self.log.write("node joined", f"{info.name}, in failure domain {info.domain}")
        if self._own_part is not None:
            self._own_part.joined()
        elif self._service.parts is not None:
            self._service.parts.joined(info)

    def _node_closed(self, node: str, why: str) -> None:
        self.log.write("node closed", f"{node or 'the leader'}: {why}")
        if self._own_part is not None:
            self._own_part.closed(why)
        elif self._service.parts is not None:
            self._service.parts.closed(node, why)

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
        await self._outbox.deliver(self._send)

    async def _send(self, identity: bytes, data: bytes) -> bool:
        """Without waiting for the peer: False if its line is full."""
        try:
            await self._socket.send_multipart([identity, data], flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # the peer is gone: its exit says so elsewhere
            pass
        return True

    def _cut_off(self, identity: bytes, num_bytes: int) -> bool:
        """A peer does not read what it is sent; whether it must never hear of anything again."""
        unread = f"it has not read {num_bytes >> 20} MiB that it was sent"
        proc = self._identities.get(identity)
        if proc is not None:
            # In a turn of its own: what was being said may be what the core has just decided.
            asyncio.get_running_loop().call_soon(self._condemn, proc, unread)
        elif identity == self._service.client:
            rest = "what else happens is in this log alone, until it reads on"
            self.log.write("command line cut off", f"{unread}; {rest}")
        else:
            self.log.write("command line cut off", unread)
        return proc is not None

    def _condemn(self, proc: str, why: str) -> None:
        if self.job is None:
            self.supervisor.kill_group(proc)
        elif self.job.core.rank_of(proc) is not None:
            self.job.condemn(proc, why)
        else:
            self.job.log("standby killed", f"{proc}: {why}")
            self.supervisor.kill_group(proc)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.job is not None:
                self.job.tick()
            if self._own_part is not None:
                self._own_part.tick()
            self._service.joining.tick()

    def _exited(self, proc: str, code: int | None, number: int | None) -> None:
        if self._shards.exited(proc):
            return
        for identity in [identity for identity, p in self._identities.items() if p == proc]:
            del self._identities[identity]
            self._outbox.forget(identity)
        if self._part is not None:
            self._part.exited(proc, code, number)

    def _reply(self, identity: bytes | None, message: msg.Message) -> None:
        if identity is not None:
            self._outbox.put(identity, encode(message), is_last=isinstance(message, msg.JobEnded))

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
                self._service.submit(identity, message)
            case msg.Attach():
                self._service.attach(identity, message)
            case msg.Present():
                self._service.present(identity, message.num_bytes)
            case msg.StopJob():
                self._service.stop(identity, message)
            case msg.AskStatus():
                text = status_document.document(
                    self.job, self._service.last_job, self._started_at, os.getpid(), self._refused
                )
                self._reply(identity, msg.Status(text))
            case msg.SignalRank():
                self._service.signal_rank(identity, message)
            case msg.FenceNode():
                self._service.fence_node(identity, message.node)
            case msg.ShutDown():
                self._reply(identity, msg.Done("the daemon ends"))
                self.stop()
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a daemon")

    def _take_from_process(self, identity: bytes, message: Any) -> None:
        if isinstance(message, msg.Join):
            self._service.check_leads()
            self._service.joining.take(identity, message)
            return
        if isinstance(message, msg.Hello | msg.Rejoin):
            if message.release != __version__:
                self._refuse(
                    identity,
                    "version",
                    f"the daemon is flashrec {__version__}, this process {message.release}",
                )
            elif self._part is None:
                self._refuse(identity, "stranger", f"no job runs here that {message.proc} could belong to")
            else:
                if isinstance(message, msg.Hello):
                    refused = self._part.hello(message, identity)
                else:
                    refused = self._part.rejoin(message, identity)
                if refused is not None:
                    self._refuse(identity, refused.kind, refused.reason)
                else:
                    self._bind(identity, message.proc)
            return
        if self._identities.get(identity) != message.proc or self._part is None:
            raise ProtocolError(f"{type(message).__name__} from a sender that is not {message.proc!r:.40}")
        self._part.received(message)

    def _bind(self, identity: bytes, proc: str) -> None:
        self._identities[identity] = proc


def _in_loop(loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], Any]], Any]:
    """What runs a function on `loop` for another thread, and waits for its result."""

    def run(work: Callable[[], Any]) -> Any:
        async def on_the_loop() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(on_the_loop(), loop).result(SCRAPE_S)

    return run
