"""The other nodes' parts in the job that this daemon leads: begun, spoken with, and over.

A part is one stay of a node in a job. A node whose connection breaks and comes again goes on with its part, and so
does one whose daemon has died and was started again, if that has adopted the part. One that was given up, or whose new
daemon knows of no part, is taken in again as a spare.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashrec.errors import FlashrecError
from flashrec.protocol import agents as ag
from flashrec.protocol import messages as msg
from flashrecd.cluster.cluster import Cluster
from flashrecd.cluster.info import NodeInfo
from flashrecd.cluster.reach import is_refused
from flashrecd.conversation import Conversation
from flashrecd.core import events as ev
from flashrecd.core.state import ENDING
from flashrecd.jobrun import JobRun
from flashrecd.preludes import Preludes
from flashrecd.remotehost import RemoteHost

FIRST_VISIT_S = 0.05


@dataclass
class _Part:
    info: NodeInfo
    host: RemoteHost
    conversation: Conversation
    node: int | None = None
    """Its number in the job, once it takes part."""
    is_orphaned: bool = False
    """Its daemon was started anew, and has not said that it has adopted it."""


class LedParts:
    """Of one job. `job` gives it, or None when it has ended."""

    def __init__(self, cluster: Cluster, job: Callable[[], JobRun | None], submit: msg.Submit) -> None:
        self._cluster = cluster
        self._job = job
        self._submit = submit
        self._parts: dict[str, _Part] = {}  # by the part's name
        self._by_node: dict[str, _Part] = {}  # by the node's name; its newest
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, job: JobRun, infos: Sequence[NodeInfo]) -> None:
        """Bring about the parts of a job that starts, in this order. Raises EnvironmentFault for a node that cannot."""
        parts = [self._make(job, info) for info in infos]
        for node, part in enumerate(parts, 1):
            part.node = part.host.node = node
            job.hosts.append(part.host)
        await asyncio.gather(*(part.host.begin(self._submit) for part in parts))

    def _make(self, job: JobRun, info: NodeInfo) -> _Part:
        name = f"{job.name}.{secrets.token_hex(4)}"
        host = RemoteHost(
            info.name,
            job.name,
            tell=lambda order: conversation.say(order),
            listener=job,
            note=job.log,
            over=lambda: self._lost(part),
            adopted=lambda: self._adopted(part),
            preludes=Preludes(job.shm_dir),
        )
        conversation = Conversation(
            name,
            ag.REPORTS,
            send=lambda message: self._cluster.send(info.name, message),
            hear=host.take,
            given_up=lambda why: self._given_up(part, why),
        )
        part = _Part(info, host, conversation)
        self._parts[name] = self._by_node[info.name] = part
        return part

    # --- what the cluster tells ---------------------------------------------------------------------------

    def message(self, node: str, message: ag.FROM_AGENT) -> None:
        """Raises ProtocolError for what makes no sense."""
        part = self._parts.get(message.part)
        if part is None or part.info.name != node:
            if not isinstance(message, ag.Unknown):
                self._cluster.send(node, ag.Unknown(message.part))
        elif isinstance(message, ag.Unknown):
            orphaned, part.is_orphaned = part.is_orphaned, False
            self._given_up(part, "it has no part in the job any more")
            if orphaned:
                self._take_in_again(part)
        else:
            part.conversation.take(message)

    def heard(self, node: str) -> None:
        part, job = self._by_node.get(node), self._job()
        if part is not None and part.node is not None and job is not None and not part.is_orphaned:
            job.feed(ev.NodeHeard(part.node))

    def closed(self, node: str, why: str) -> None:
        part, job = self._by_node.get(node), self._job()
        if part is not None and part.node is not None and job is not None:
            job.feed(ev.NodeClosed(part.node, why))
            self._task(self._visit(job, part))

    async def _visit(self, job: JobRun, part: _Part) -> None:
        """Find out whether its shard server is gone as well. Where a whole node dies that may be a moment later."""
        node, pause_s = part.node, FIRST_VISIT_S
        assert node is not None
        while pause_s < job.core.config.suspect_after_s:
            if not (job.core.is_live(node) and job.core.state.nodes[node].unheard):
                return
            if await is_refused(part.host.shard_address):
                job.feed(ev.NodeDeserted(node))
                return
            await asyncio.sleep(pause_s)
            pause_s *= 2

    def joined(self, info: NodeInfo) -> None:
        job = self._job()
        if job is None or job.core.state.status in ENDING:
            return
        part = self._by_node.get(info.name)
        is_same = part is not None and part.info.incarnation == info.incarnation
        if part is not None and not part.host.is_lost and (is_same or part.node is not None):
            if not is_same:
                part.info, part.is_orphaned = info, True
                job.log("node back", f"the daemon of node {info.name} was started anew: is its part adopted?")
            part.conversation.connected()
            self.heard(info.name)
            return
        if part is not None:
            self._end(part)
        self._task(self._take_in(job, info))

    async def _take_in(self, job: JobRun, info: NodeInfo) -> None:
        """As a spare."""
        part = self._make(job, info)
        try:
            await part.host.begin(self._submit)
        except FlashrecError as error:
            job.log("node not taken in", str(error))
            self._end(part)
            return
        if self._job() is not job or job.core.state.status in ENDING:
            self._end(part)
            return
        part.node = part.host.node = len(job.hosts)
        job.hosts.append(part.host)
        job.feed(ev.NodeJoined(info.name, info.domain, job.core.config.ranks_per_node))

    def _given_up(self, part: _Part, why: str) -> None:
        part.conversation.end()
        job = self._job()
        if job is not None and part.node is not None and not part.host.is_lost:
            job.feed(ev.NodeClosed(part.node, why))
        else:
            part.host.lost()

    def _adopted(self, part: _Part) -> None:
        """What the node says from now on is said by a daemon that has its processes and its memory."""
        job = self._job()
        part.is_orphaned = False
        if job is not None and part.node is not None:
            job.log("node adopted", f"another daemon goes on with what node {part.info.name} has of the job")
            self.heard(part.info.name)

    def _lost(self, part: _Part) -> None:
        self._end(part)
        if part.is_orphaned:  # too late
            part.is_orphaned = False
            self._take_in_again(part)

    def _take_in_again(self, part: _Part) -> None:
        job = self._job()
        if job is not None and job.core.state.status not in ENDING:
            self._task(self._take_in(job, part.info))

    def _end(self, part: _Part) -> None:
        """Nothing of it counts any more; the node hears that when it can."""
        part.conversation.end()
        self._parts.pop(part.conversation.part, None)
        self._cluster.send(part.info.name, ag.Unknown(part.conversation.part))

    # --- what the job wants of them -----------------------------------------------------------------------

    def output_seen(self) -> None:
        """The command line keeps up."""
        job = self._job()
        for host in job.hosts[1:] if job is not None else ():
            if isinstance(host, RemoteHost) and not host.is_lost:
                host.output_seen()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for part in self._parts.values():
            part.conversation.end()

    def _task(self, work: asyncio._CoroutineLike[None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
