"""A member's end: the part that this node has in the job of the cluster's leader, if it has one."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from flashrec.errors import FlashrecError
from flashrec.protocol import agents as ag
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import decode
from flashrec.protocol.jobdir import JobDirectory
from flashrecd.agent import Agent
from flashrecd.cluster.cluster import Cluster
from flashrecd.cluster.options import ClusterOptions
from flashrecd.conversation import Conversation
from flashrecd.core.detection import PATIENCE_FACTOR
from flashrecd.partrecords import OrphanedPart, PartRecords
from flashrecd.place import Place
from flashrecd.shardserver import ShardServer
from flashrecd.supervise import Supervisor

LINGER_FACTOR = 5.0


class OwnPart:
    """`address` is where processes reach this daemon, `send(identity, message)` reaches one. `log(event, reason)`."""

    def __init__(
        self,
        cluster: Cluster,
        options: ClusterOptions,
        *,
        address: str,
        run_dir: Path,
        supervisor: Supervisor,
        shards: ShardServer,
        send: Callable[[bytes, msg.Message], None],
        log: Callable[[str, str], None],
    ) -> None:
        self.agent: Agent | None = None
        self._cluster = cluster
        self._options = options
        self._address = address
        self._run_dir = run_dir
        self._supervisor = supervisor
        self._shards = shards
        self._send = send
        self._log = log
        self._conversation: Conversation | None = None
        self._waiting: ag.Envelope | None = None  # the beginning of the next part, while this one ends
        self._beginning: asyncio.Task[None] | None = None
        self._unled_since: float | None = None
        self._patience_s = 0.0
        self._records: PartRecords | None = None

    # --- what the cluster tells ---------------------------------------------------------------------------

    def joined(self) -> None:
        """The leader is there, perhaps again."""
        self._unled_since = None
        if self._conversation is not None:
            self._conversation.connected()

    def closed(self, why: str) -> None:
        self._unled_since = time.monotonic()
        if self.agent is not None:
            self._log("leader lost", f"{why}; the ranks of job {self.agent.name} train on")

    def message(self, message: ag.FROM_LEADER) -> None:
        """Raises ProtocolError for what makes no sense."""
        conversation = self._conversation
        if conversation is not None and message.part == conversation.part:
            if isinstance(message, ag.Unknown):
                self._over("the leader has given this node up")
            else:
                conversation.take(message)
        elif isinstance(message, ag.Envelope) and message.number == 1:
            if conversation is None:
                self._converse(message)
            else:  # one at a time
                self._waiting = message
                self._over("the leader begins another part")
        elif not isinstance(message, ag.Unknown) and (
            self._waiting is None or message.part != self._waiting.part
        ):
            self._cluster.send("", ag.Unknown(message.part))

    def tick(self) -> None:
        if self.agent is not None:
            self.agent.tick()
        unled_s = 0.0 if self._unled_since is None else time.monotonic() - self._unled_since
        if self._conversation is not None and unled_s > self._patience_s > 0:
            self._over(f"there has been no leader for {self._patience_s:.0f} s")

    # --- one part -----------------------------------------------------------------------------------------

    def _converse(self, first: ag.Envelope) -> None:
        self._conversation = self._about(first.part)
        self._conversation.take(first)

    def _about(self, part: str) -> Conversation:
        return Conversation(
            part,
            ag.ORDERS,
            send=lambda message: self._cluster.send("", message),
            hear=self._hear,
            given_up=self._over,
            record=self._record,
        )

    def _record(self, number: int) -> None:
        if self._records is not None:
            self._records.heard(number)

    def _hear(self, order: ag.ORDERS) -> None:
        if isinstance(order, ag.BeginPart):
            if self.agent is None and self._beginning is None:
                self._beginning = asyncio.get_running_loop().create_task(self._begin(order))
        elif self.agent is not None:
            self.agent.take(order)

    async def _begin(self, order: ag.BeginPart) -> None:
        assert self._conversation is not None
        directory: JobDirectory | None = None
        try:
            submit = decode(order.submit, msg.Submit)
            self._patience_s = PATIENCE_FACTOR * submit.suspect_after_s
            directory = JobDirectory.make(order.job)
            self._shards.start(
                directory.path, job=order.job, cluster=self._options, linger_s=_linger_s(submit)
            )
            place = self._options.place(self._shards.address, await self._shards.tcp_address())
        except asyncio.CancelledError:
            if directory is not None:
                directory.remove()
            raise
        except Exception as error:
            if not isinstance(error, FlashrecError | OSError):  # a bug of ours, which the log shall know of
                self._log("internal error", traceback.format_exc())
            self._conversation.say(ag.PartRefused(str(error) or repr(error)))
            if directory is not None:
                directory.remove()
            self._ended()
            return
        finally:
            self._beginning = None
        log_dir = Path(submit.log_dir) if submit.log_dir else self._run_dir / "jobs"
        records = PartRecords(directory.path, self._log)
        records.describe(
            self._conversation.part,
            order.job,
            submit,
            heard=self._conversation.received,
            address=self._address,
            log_dir=log_dir,
        )
        self.agent = self._make(order.job, submit, directory, place, log_dir, records)
        self._log("part", f"of job {order.job}, which the cluster's leader runs")
        self.agent.start()

    def _make(
        self,
        job: str,
        submit: msg.Submit,
        directory: JobDirectory,
        place: Place,
        log_dir: Path,
        records: PartRecords,
    ) -> Agent:
        assert self._conversation is not None
        self._records = records
        return Agent(
            job,
            submit,
            directory,
            place,
            address=self._address,
            log_dir=log_dir,
            supervisor=self._supervisor,
            shards=self._shards,
            records=records,
            tell=self._conversation.say,
            send=self._send,
            ended=self._ended,
        )

    def take_over(self, orphaned: OrphanedPart) -> None:
        """Go on with the part of a daemon that has died in this run directory, if the leader lets us."""
        job, submit = orphaned.record.job, orphaned.submit
        self._patience_s = PATIENCE_FACTOR * submit.suspect_after_s
        self._unled_since = time.monotonic()
        self._conversation = self._about(orphaned.part)
        self._conversation.resume(orphaned.heard)
        directory = orphaned.directory
        self._shards.adopt(
            directory.path, orphaned.shards, job=job, cluster=self._options, linger_s=_linger_s(submit)
        )
        place = self._options.place(self._shards.address, orphaned.shards.address)
        records = PartRecords(directory.path, self._log)
        self.agent = self._make(job, submit, directory, place, Path(orphaned.record.log_dir), records)
        self._log("part adopted", f"of job {job}; its leader is to be heard")
        self.agent.take_over(orphaned.processes)

    def _over(self, why: str) -> None:
        self._log("part over", why)
        if self.agent is not None:
            self.agent.end()
        elif self._beginning is None:
            self._ended()

    def _ended(self) -> None:
        self._shards.stop()
        self.agent = self._conversation = self._records = None
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._converse(waiting)

    async def close(self, timeout_s: float) -> None:
        """The daemon ends: end the part first, if that is soon done."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.gather(self._beginning, return_exceptions=True)
        if self.agent is not None:
            self.agent.end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while self.agent is not None:
                        await asyncio.sleep(0.01)

    def remove(self) -> None:
        """What `close` had no time for; nothing runs any more."""
        if self.agent is not None:
            self.agent.directory.remove()


def _linger_s(submit: msg.Submit) -> float:
    """How long a node's shards wait for another daemon when no rank is there any more."""
    return LINGER_FACTOR * submit.suspect_after_s
