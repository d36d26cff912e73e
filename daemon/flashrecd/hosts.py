"""One node's part in a job, as the job sees it: processes, what they left behind, and what the node keeps for others.

`LocalHost` is this daemon's own; `flashrecd.remotehost` is another's, reached through its agent.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import NamedTuple, Protocol

from flashrec.errors import FlashrecError
from flashrec.protocol import messages as msg
from flashrec.protocol.tag import Tag, TagReader, tag_path
from flashrec.state.export import discard_exports
from flashrecd.core.state import Kept
from flashrecd.jobmemory import JobMemory
from flashrecd.launching import Process, ProcessSource, last_words
from flashrecd.shardserver import ShardServer
from flashrecd.supervise import Supervisor

Note = Callable[[str, str, int | None], None]
"""A line for the event log: event, reason, rank."""


class Versions(NamedTuple):
    """The versions in a rank's private slots, and in its arena."""

    private: tuple[int, ...] = ()
    sealed: tuple[int, ...] = ()


class Described(NamedTuple):
    """What there is to say of a rank that has protected its state, each "" if nothing. `difference`: between its layout
    and others' on its node; `shortage`: of its node's shared memory, should the regime be sealed; `unsealed`: why no
    full version can be sealed there, should it be live."""

    difference: str = ""
    shortage: str = ""
    unsealed: str = ""


class Host(Protocol):
    """All of it belongs to the daemon's loop, and nothing waits, save what is async."""

    name: str
    shard_address: str
    """Where this node's shards are to be had; "" where none asks for them through a socket."""

    async def start(self, process: Process) -> int:
        """Comes back with its pid when it runs. Raises FlashrecError."""

    def assigned(self, process: Process) -> None:
        """`process`, a standby, was given its rank."""

    async def ended(self, process: Process) -> None:
        """Comes back when all that the process printed has been passed on. OSError when it cannot be read."""

    def send(self, process: Process, message: msg.Message) -> None:
        """At once, or when it has said Hello."""

    def end(self, process: Process, *, hard: bool) -> None:
        """`hard`: kill it, with all that it has started; else ask it to end."""

    def signal(self, process: Process, number: int) -> bool:
        """Whether there was a process to send it to."""

    def kept(self, rank: int) -> Versions:
        """As of now; of another node, as of what was heard last."""

    def tag(self, rank: int) -> Tag | None:
        """As `kept`."""

    def last_words(self, process: Process) -> str:
        """The last line on its standard error, "" if there is none."""

    def describe(self, rank: int, arena_bytes: int) -> Described:
        """Of a rank that has just protected its state, and would need so much shared memory in the sealed regime."""

    def needs(self) -> str:
        """What the sealed regime takes here, in words."""

    def fence(self, generation: int) -> None:
        """Replicas of this generation and older ones are not taken any more; what is there is told in Holdings."""

    def settle(self, generation: int, version: int, sealed: int) -> None:
        """`generation` resumes at `version`: private state above it was lost, and replicas above `sealed`."""

    def runs(self, generation: int, forget: tuple[int, ...]) -> None:
        """All ranks have formed `generation`: what was exported for it is of no use any more, nor are, once others are
        known to keep them, the replicas of the ranks in `forget`."""

    def lost(self) -> None:
        """The core has given the node up: nobody shall wait for it."""

    async def close(self) -> None:
        """The job has ended: let go of everything."""


class LocalHost:
    """Of this daemon. `send(identity, message)` reaches a process that has said Hello."""

    def __init__(
        self,
        name: str,
        job: str,
        directory: Path,
        source: ProcessSource,
        *,
        supervisor: Supervisor,
        send: Callable[[bytes, msg.Message], None],
        note: Note,
        shards: ShardServer,
        holdings: Callable[[int, tuple[Kept, ...]], None],
    ) -> None:
        """`shards` keep what the ranks of other nodes seal; `holdings(generation, kept)` is told what that is."""
        self.name = name
        self.directory = directory
        self.source = source
        self.memory = JobMemory(directory, job, note)
        self.shard_address = ""
        self._shards = shards
        self._holdings = holdings
        self._tasks: set[asyncio.Task[None]] = set()
        self._supervisor = supervisor
        self._send = send
        self._note = note
        self._tags: dict[int, TagReader] = {}

    async def start(self, process: Process) -> int:
        return await self.source.start(process)

    def assigned(self, process: Process) -> None:
        self.source.assigned(process)

    async def ended(self, process: Process) -> None:
        await self.source.ended(process)

    def bind(self, process: Process, identity: bytes) -> None:
        """`process` has said Hello; what was meant for it before that comes after its Welcome."""
        process.identity = identity

    def send(self, process: Process, message: msg.Message) -> None:
        if process.identity is None:
            process.unsent.append(message)
            return
        self._send(process.identity, message)
        if isinstance(message, msg.Welcome):
            for kept in process.unsent:
                self._send(process.identity, kept)
            process.unsent.clear()

    def end(self, process: Process, *, hard: bool) -> None:
        if hard:
            self._supervisor.kill_group(process.name)
        else:
            self._supervisor.signal(process.name, signal.SIGTERM)
            self._supervisor.signal(process.name, signal.SIGCONT)

    def signal(self, process: Process, number: int) -> bool:
        return self._supervisor.signal(process.name, number)

    def kept(self, rank: int) -> Versions:
        return Versions(*self.memory.kept(rank))

    def tag(self, rank: int) -> Tag | None:
        reader = self._tags.setdefault(rank, TagReader(tag_path(self.directory, rank)))
        try:
            return reader.read()
        except FlashrecError as error:
            self._note("bad tag", str(error), rank)
            return None

    def last_words(self, process: Process) -> str:
        return last_words(process.stderr)

    def describe(self, rank: int, arena_bytes: int) -> Described:
        self.memory.arena_bytes[rank] = arena_bytes
        memory = self.memory
        return Described(memory.disagreement(rank), memory.shortage(), memory.shortage(served=True))

    def needs(self) -> str:
        return self.memory.needs()

    def fence(self, generation: int) -> None:
        self._task(self._fence(generation))

    async def _fence(self, generation: int) -> None:
        kept: tuple[Kept, ...] = ()
        try:
            kept = await self._shards.fence(generation)
        except FlashrecError as error:  # nothing can be had from it, then
            self._note("replicas out of reach", str(error), None)
        self._holdings(generation, kept)

    def settle(self, generation: int, version: int, sealed: int) -> None:
        self._task(self._tell_shards(self._shards.discard(generation, version, sealed)))

    def runs(self, generation: int, forget: tuple[int, ...]) -> None:
        discard_exports(self.directory, generation + 1)
        if forget:
            self._task(self._tell_shards(self._shards.forget(forget)))

    async def _tell_shards(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except FlashrecError as error:
            self._note("replicas out of reach", str(error), None)

    def _task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def lost(self) -> None:
        raise AssertionError("this daemon's own node cannot be lost")

    async def close(self) -> None:
        await self.source.close()
        for task in list(self._tasks):
            task.cancel()
        for reader in self._tags.values():
            reader.close()
