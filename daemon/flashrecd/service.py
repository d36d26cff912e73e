"""The one job of this daemon: how it begins, by whom, and how it ends. And the command line that submitted it."""

import asyncio
import contextlib
import os
import secrets
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashrec import __version__
from flashrec.errors import EnvironmentFault, FlashrecError, ProtocolError, UsageError
from flashrec.protocol import messages as msg
from flashrec.protocol.jobdir import JobDirectory
from flashrec.protocol.jobfiles import lives
from flashrecd import adoption
from flashrecd import status as status_document
from flashrecd.cluster.cluster import Cluster
from flashrecd.cluster.info import NodeInfo
from flashrecd.cluster.options import ClusterOptions
from flashrecd.core import events as ev
from flashrecd.core.detection import PATIENCE_FACTOR
from flashrecd.core.state import JobConfig, NodeLife, NodeSpec, Status
from flashrecd.eventlog import EventLog
from flashrecd.external import ExternalProcesses, Joining, external_config
from flashrecd.jobrun import JobRun
from flashrecd.launching import OwnProcesses, ProcessSource
from flashrecd.ledparts import LedParts
from flashrecd.rundir import RunDirectory
from flashrecd.shardserver import ShardServer
from flashrecd.store.base import Store
from flashrecd.store.embedded import EmbeddedStore
from flashrecd.supervise import Supervisor

STOP_GRACE_S = 2.0
MAX_PROCESSES = 4096
MAX_NAMED = 4  # links spelled out in a reason


class JobService:
    """`reply(identity, message)`, `refuse(identity, kind, reason)`, `bind(identity, process)` and
    `is_cut_off(identity)` are the daemon's line to its peers. `has_owner` as in Daemon."""

    def __init__(
        self,
        run: RunDirectory,
        log: EventLog,
        *,
        supervisor: Supervisor,
        shards: ShardServer,
        reply: Callable[[bytes | None, msg.Message], None],
        refuse: Callable[[bytes, str, str], None],
        bind: Callable[[bytes, str], None],
        is_cut_off: Callable[[bytes | None], bool],
        has_owner: bool,
        cluster: Cluster | None = None,
        cluster_options: ClusterOptions | None = None,
    ) -> None:
        self.job: JobRun | None = None
        self.store: Store = EmbeddedStore()
        self.last_job: dict[str, Any] | None = None
        """What status shows of the job before."""
        self.client: bytes | None = None
        """The identity of the command line that submitted the job."""
        self.joining = Joining(run.path, lambda: self.job, self._begin_external, bind, refuse)
        self._run = run
        self._log = log
        self._supervisor = supervisor
        self._shards = shards
        self._reply = reply
        self._refuse = refuse
        self._is_cut_off = is_cut_off
        self._has_owner = has_owner
        self._own: OwnProcesses | None = None  # of the job
        self._client_pidfd = -1
        self._last_end: msg.JobEnded | None = None
        self._cluster = cluster
        self._cluster_options = cluster_options
        self.parts: LedParts | None = None
        """The other nodes' parts in the job, if it has any."""
        self._beginning: asyncio.Task[None] | None = None

    def submit(self, identity: bytes, message: msg.Submit) -> None:
        if message.release != __version__:
            reason = f"the daemon is flashrec {__version__}, the command line {message.release}"
            self._refuse(identity, "version", reason)
            return
        if self.job is not None:
            self._reply(identity, msg.Refused("busy", f"job {self.job.name} runs here already"))
            return
        self.check_leads()
        if message.start_method not in msg.START_METHODS or message.pull not in msg.PULLS:
            raise ProtocolError(f"no start method {message.start_method!r:.40} or pull {message.pull!r:.40}")
        if message.world_size + message.num_standbys > MAX_PROCESSES:
            raise UsageError(f"a daemon takes at most {MAX_PROCESSES} ranks and standbys")
        others = self._other_nodes(message)
        try:
            client_pidfd = os.pidfd_open(message.pid)
        except (OSError, OverflowError):
            raise ProtocolError(f"process {message.pid}, which submits a job, does not exist") from None
        name = secrets.token_hex(3)
        log_dir = Path(message.log_dir) if message.log_dir else self._run.path / "jobs"
        try:
            job, own = self._run_own(name, message, log_dir, others=others)
        except BaseException:
            os.close(client_pidfd)
            raise
        self.client = identity
        self._watch_client(client_pidfd)
        if job.records is not None:
            job.records.describe(name, message, self._run.address, log_dir)
        self._reply(identity, self._submitted(own, job))
        if others:
            self._beginning = asyncio.get_running_loop().create_task(self._begin_parts(job, others))
        else:
            job.start()

    def check_leads(self) -> None:
        """Raises UsageError on a member of a cluster: what its processes say goes to the leader's job."""
        if self._cluster is not None and not self._cluster.leads:
            raise UsageError(
                f"this daemon is a member of the cluster that is led at {self._cluster.address}, whose jobs are run "
                "from there; for one of this node alone start another daemon, with a --dir of its own"
            )

    def _other_nodes(self, submit: msg.Submit) -> list[NodeInfo]:
        """Those that take part in the job, besides this one. Raises UsageError when there are too few."""
        wanted = submit.num_nodes + submit.num_spare_nodes
        if submit.num_nodes < 1 or submit.num_spare_nodes < 0 or submit.world_size % submit.num_nodes:
            raise ProtocolError(f"{submit.world_size} ranks cannot be on {submit.num_nodes} nodes alike")
        if wanted == 1:
            return []
        if self._cluster is None or not self._cluster.leads:
            raise UsageError(
                f"the job wants {wanted} nodes, and this daemon leads no cluster: start it with --listen, and the "
                "others' with --join"
            )
        members = sorted(self._cluster.members.values(), key=lambda info: info.name)
        if len(members) < wanted - 1:
            joined = ", ".join([self._cluster.me.name, *(info.name for info in members)])
            raise UsageError(f"the job wants {wanted} nodes; {1 + len(members)} are here: {joined}")
        return members[: wanted - 1]

    async def _begin_parts(self, job: JobRun, others: list[NodeInfo]) -> None:
        assert self.parts is not None
        assert self._cluster_options is not None
        try:
            job.local.shard_address = await self._shards.tcp_address()
            job.place = self._cluster_options.place(self._shards.address, job.local.shard_address)
            await self.parts.begin(job, others)
            await self._check_links(job)
        except (FlashrecError, OSError) as error:
            job.feed(ev.Stop(str(error), hard=True, code=1))
            return
        except Exception as error:  # a bug of ours: the job ends instead of starting for ever
            self._log.write("internal error", traceback.format_exc(), job=job.name)
            job.feed(ev.Stop(f"its nodes could not be begun: {error!r}", hard=True, code=1))
            return
        if job.core.state.status is Status.STARTING:
            job.start()

    async def _check_links(self, job: JobRun) -> None:
        """Whether every node of the job reaches every other, and how fast. EnvironmentFault names those that do not."""
        assert self._cluster is not None
        endpoints = {host.name: host.shard_address for host in job.hosts}
        reports = await self._cluster.check(list(endpoints), shard_endpoints=endpoints)
        job.links = [asdict(report) for report in reports]
        if broken := [report.warning for report in reports if report.problem]:
            raise EnvironmentFault("; ".join(broken[:MAX_NAMED]))
        for report in reports:
            if report.warning:
                job.log("slow link", report.warning)

    def _run_own(
        self,
        name: str,
        submit: msg.Submit,
        log_dir: Path,
        directory: JobDirectory | None = None,
        others: Sequence[NodeInfo] = (),
    ) -> tuple[JobRun, OwnProcesses]:
        """The job, which has not begun, and what starts its processes here. `directory`: another daemon had begun it.
        `others`: the other nodes that take part."""
        config = JobConfig(
            world_size=submit.world_size,
            **self._on_nodes(submit, others),
            num_standbys=submit.num_standbys,
            max_restarts=submit.max_restarts,
            suspect_after_s=submit.suspect_after_s,
        )
        own = OwnProcesses(
            name,
            submit,
            supervisor=self._supervisor,
            log_dir=log_dir,
            address=self._run.address,
            tell=lambda message: self._reply(self.client, message),
            note=lambda event, reason, rank: self._log.write(event, reason, job=name, rank=rank),
        )
        own.is_expected = lambda: self.client is None and self._client_pidfd >= 0
        own.is_cut_off = lambda: self._is_cut_off(self.client)
        job = self._make_run(name, config, own, target=submit.target, pull=submit.pull, directory=directory)
        try:
            if others:
                self._shards.start(job.shm_dir, job=name, cluster=self._cluster_options)
            elif submit.pull == "zmq":
                self._shards.start(job.shm_dir)
        except BaseException:  # else it would keep the daemon busy, and never start
            if directory is None:
                job.directory.remove()
            else:  # ranks train in it
                job.directory.leave()
            raise
        self.job, self._own = job, own
        if others:
            assert self._cluster is not None
            self.parts = LedParts(self._cluster, lambda: self.job, submit)
        self.store.put(f"job/{name}", os.fsencode(submit.target), None)
        self._log.listener = lambda line: self._reply(self.client, msg.Happened(line))
        return job, own

    def _on_nodes(self, submit: msg.Submit, others: Sequence[NodeInfo]) -> dict[str, Any]:
        """Of JobConfig."""
        if not others:
            return {}
        assert self._cluster is not None
        ranks = submit.world_size // submit.num_nodes
        nodes = (self._cluster.me, *others)
        return {
            "nodes": tuple(NodeSpec(info.name, info.domain, ranks) for info in nodes),
            "nproc_per_node": ranks,
            "replicas": submit.num_replicas,
        }

    def _submitted(self, own: OwnProcesses, job: JobRun) -> msg.Submitted:
        return msg.Submitted(job.name, str(own.logs.log_dir / job.name), str(job.shm_dir), os.getpid())

    def _watch_client(self, pidfd: int) -> None:
        self._client_pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._client_ended)

    def take_over(self, orphaned: adoption.Orphaned) -> None:
        """Go on with the job of a daemon that has died in this run directory."""
        record, submit = orphaned.record, orphaned.submit
        if isinstance(submit, msg.Join):
            job, source = self._run_external(record.job, submit, orphaned.directory)
            job.begin(lambda: adoption.take_over(job, orphaned, self._supervisor))
            source.take_over(submit, job.processes.values())
            return
        job, own = self._run_own(record.job, submit, Path(record.log_dir), orphaned.directory)
        if lives(submit.pid, record.client_ticks):
            with contextlib.suppress(OSError):
                self._watch_client(os.pidfd_open(submit.pid))
        job.begin(lambda: adoption.take_over(job, orphaned, self._supervisor))
        own.take_over(job.processes.values())
        if self._client_pidfd < 0:
            self._client_ended()

    def attach(self, identity: bytes, message: msg.Attach) -> None:
        """The command line that submitted a job to the daemon before this one; once more, if it got no answer."""
        if message.release != __version__:
            reason = f"the daemon is flashrec {__version__}, the command line {message.release}"
            self._refuse(identity, "version", reason)
        elif self.job is not None and self._own is not None and self.job.name == message.job:
            if message.pid != self._own.submit.pid or not self._own.adopted:
                self._reply(identity, msg.Refused("job", f"job {message.job} is another command line's"))
                return
            if any(end < 0 for _, _, end in message.shown):
                raise ProtocolError("no output is shown up to a byte before its beginning")
            self.client = identity
            self._reply(identity, self._submitted(self._own, self.job))
            self._own.listen({(proc, stream): end for proc, stream, end in message.shown})
        elif self._last_end is not None and self._last_end.job == message.job:
            self._reply(identity, self._last_end)
        else:
            self._reply(identity, msg.Refused("job", f"no job {message.job} runs here"))

    def _begin_external(self, name: str, join: msg.Join) -> None:
        job, _ = self._run_external(name, join)
        if job.records is not None:
            job.records.describe(name, join, self._run.address, self._run.path)
        job.log("job", f"{join.job!r}: {join.target}, started by process {join.launcher_pid}")
        job.start()

    def _run_external(
        self, name: str, join: msg.Join, directory: JobDirectory | None = None
    ) -> tuple[JobRun, ExternalProcesses]:
        """The job, which has not begun, and what waits for its processes. `directory`: another daemon had begun it."""
        config = external_config(join)
        source = ExternalProcesses(join.job, self._run.path, self._supervisor, self.joining.admit)
        job = self._make_run(name, config, source, target=join.target, pull="shm", directory=directory)
        self.job = job
        self.store.put(f"job/{name}", os.fsencode(join.target), None)
        return job, source

    def _make_run(
        self,
        name: str,
        config: JobConfig,
        source: ProcessSource,
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
            supervisor=self._supervisor,
            log=self._log,
            shard_address=self._shards.address,
            shards=self._shards,
            send=self._reply,
            ended=self._job_ended,
            directory=directory,
            recorded=not self._has_owner,
            patience_s=0.0 if self._has_owner else PATIENCE_FACTOR * config.suspect_after_s,
        )

    def _client_ended(self) -> None:
        """The process that submitted the job is gone."""
        self._forget_client()
        if self.job is not None:
            if self._own is not None:
                self._own.has_listener = False
            self.job.feed(ev.Stop("the command line that submitted the job is gone", hard=True))

    def _forget_client(self) -> None:
        self.client = None
        if self._client_pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._client_pidfd)
            os.close(self._client_pidfd)
            self._client_pidfd = -1

    def present(self, identity: bytes, num_bytes: int) -> None:
        """The command line has dealt with so much output."""
        if identity == self.client and self._own is not None:
            self._own.seen(num_bytes)
            if self.parts is not None and not self._own.output_blocked:
                self.parts.output_seen()

    def stop(self, identity: bytes, message: msg.StopJob) -> None:
        if self.job is None or self.job.name != message.job:
            self._reply(identity, msg.Refused("job", f"no job {message.job} runs here"))
        else:
            self.job.feed(ev.Stop("it was interrupted", message.hard))
            self._reply(identity, msg.Done("stopping"))

    def signal_rank(self, identity: bytes, message: msg.SignalRank) -> None:
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
        process = self.job.processes.get(members[message.rank].proc)
        if process is not None and self.job.procs.host(process).signal(process, message.signal):
            self._reply(identity, msg.Done(f"sent {name} to rank {message.rank}"))
        else:
            self._reply(identity, msg.Refused("rank", f"rank {message.rank} has no process at the moment"))

    def fence_node(self, identity: bytes, name: str) -> None:
        """Somebody knows that nothing runs on a lost node any more."""
        nodes = self.job.core.state.nodes if self.job is not None else ()
        lost = [number for number, node in enumerate(nodes) if node.life is NodeLife.LOST]
        named = [number for number in lost if nodes[number].name == name]
        if self.job is None or not named:
            others = ", ".join(nodes[number].name for number in lost) or "none"
            self._reply(identity, msg.Refused("node", f"no lost node is called {name!r:.80}; lost: {others}"))
            return
        for number in named:
            self.job.log("node fenced", f"{name}: somebody says that nothing runs on it any more")
            self.job.feed(ev.NodeFenced(number))
        self._reply(identity, msg.Done(f"node {name} is taken for dead"))

    def _job_ended(self, code: int, reason: str) -> None:
        assert self.job is not None
        self.last_job = status_document.describe(self.job)
        self.joining.ended(self.job)
        if self.parts is not None:
            self.parts.close()
            self.parts = None
        self._shards.stop()
        self.store.delete(f"job/{self.job.name}")
        self._log.listener = None
        self._last_end = msg.JobEnded(self.job.name, code, reason)
        self._reply(self.client, self._last_end)
        self.job = self._own = None
        self._forget_client()

    async def stop_job(self) -> None:
        """The daemon is to end: end the job first, if that is soon done."""
        if self.job is not None:
            self.job.feed(ev.Stop("the daemon was stopped", hard=False))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_GRACE_S):
                    while self.job is not None:
                        await asyncio.sleep(0.01)

    async def end(self) -> None:
        """Whatever is left, for the daemon ends."""
        left = await self._supervisor.shutdown(grace_s=1.0)
        for what in left:
            self._log.write("left behind", what)
        if self.job is not None:
            self._reply(self.client, msg.JobEnded(self.job.name, 130, "the daemon was stopped"))
            self.job.directory.remove()
        self._forget_client()
