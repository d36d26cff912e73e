"""Another node's part in a job, run there by its daemon's agent (`flashrecd.agent`); what is said of it comes in order.

Instants in what its ranks say are of that machine's clock, and are moved to this one's on arrival: by the least
difference between sending and arrival that was seen, so they are late by the fastest message's way at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Protocol

from flashrec.errors import EnvironmentFault, FlashrecError, ProtocolError
from flashrec.protocol import agents as ag
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import decode, encode
from flashrec.protocol.tag import Tag
from flashrecd.core.state import Kept
from flashrecd.hosts import Described, Note, Versions
from flashrecd.launching import Process
from flashrecd.preludes import Preludes

READY_S = 30.0
START_S = 60.0


class Listener(Protocol):
    """What the job does with what it hears from another node."""

    def hello(self, message: msg.Hello) -> msg.Refused | None: ...

    def rejoined(self, message: msg.Rejoin) -> msg.Refused | None: ...

    def processes_on(self, node: int) -> list[str]: ...

    def received(self, message: msg.FROM_PROCESS) -> None: ...

    def exited(self, proc: str, code: int | None, number: int | None) -> None: ...

    def heartbeat(self, proc: str) -> None: ...

    def holdings(self, node: int, generation: int, kept: tuple[Kept, ...]) -> None: ...

    def output(self, output: msg.Output) -> None: ...


def _unsaid(order: ag.ORDERS) -> None:
    """To a node that was given up nothing is told."""


def _done() -> None:
    """For it nothing is left to do."""


class RemoteHost:
    """`tell(order)` reaches its agent, until `over()` was called; `adopted()`: another daemon has become it."""

    def __init__(
        self,
        name: str,
        job: str,
        *,
        tell: Callable[[ag.ORDERS], None],
        listener: Listener,
        note: Note,
        over: Callable[[], None],
        adopted: Callable[[], None],
        preludes: Preludes,
    ) -> None:
        """`preludes`: the job's, which the leader has of every rank."""
        self.name = name
        self.node = -1  # until it takes part
        self.shard_address = ""
        self.relayed_bytes = 0  # of output
        self._job = job
        self._tell = tell
        self._listener = listener
        self._note = note
        self._over = over
        self._adopted = adopted
        self._preludes = preludes
        self._kept: dict[int, Versions] = {}
        self._tags: dict[int, Tag | None] = {}
        self._described: dict[int, Described] = {}
        self._needs: dict[int, str] = {}
        self._last_words: dict[str, str] = {}
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._known_there: set[str] = set()  # processes of which its agent has heard
        self._output_ended: dict[str, asyncio.Event] = {}
        self._shown: dict[tuple[str, str], int] = {}  # by process and stream, where its output has come to
        self._begun: asyncio.Future[ag.PartBegun] | None = None
        self._ended: asyncio.Event = asyncio.Event()
        self._offset_ns: int | None = None
        self.is_lost = False

    # --- out ----------------------------------------------------------------------------------------------

    async def begin(self, submit: msg.Submit) -> ag.PartBegun:
        """Comes back when the node is ready to start processes. EnvironmentFault when it cannot, or does not say."""
        self._begun = asyncio.get_running_loop().create_future()
        self._tell(ag.BeginPart(self._job, encode(submit)))
        try:
            async with asyncio.timeout(READY_S):
                begun = await self._begun
        except TimeoutError:
            raise EnvironmentFault(f"node {self.name} was not ready after {READY_S:.0f} s") from None
        self.shard_address = begun.shard_address
        return begun

    async def start(self, process: Process) -> int:
        if self.is_lost:
            raise EnvironmentFault(f"node {self.name} is lost")
        future = self._starting[process.name] = asyncio.get_running_loop().create_future()
        self._output_ended[process.name] = asyncio.Event()
        if process.rank is not None and process.replacement:
            self._tell_prelude(process.rank)
        self._tell(ag.StartProcess(process.name, process.rank, process.generation, process.replacement))
        self._known_there.add(process.name)
        for message in process.unsent:
            self.send(process, message)
        process.unsent.clear()
        try:
            async with asyncio.timeout(START_S):
                pid: int = await future
                return pid
        except TimeoutError:
            raise EnvironmentFault(
                f"node {self.name} did not start {process.name} in {START_S:.0f} s"
            ) from None
        except asyncio.CancelledError:  # it was called off
            self._tell(ag.EndProcess(process.name, True))
            raise
        finally:
            self._starting.pop(process.name, None)

    def assigned(self, process: Process) -> None:
        assert process.rank is not None
        self._tell_prelude(process.rank)
        self._tell(ag.AssignProcess(process.name, process.rank, process.generation))

    def _tell_prelude(self, rank: int) -> None:
        """Its replacement may have none of it on that node."""
        for piece in self._preludes.all(rank):
            self._tell(piece)

    async def ended(self, process: Process) -> None:
        event = self._output_ended.pop(process.name, None)
        self._last_words.pop(process.name, None)
        self._known_there.discard(process.name)
        if event is not None and not self.is_lost:
            self._output_ended[process.name] = event
            await event.wait()
            self._output_ended.pop(process.name, None)

    def send(self, process: Process, message: msg.Message) -> None:
        if process.name not in self._known_there:  # a plan, say, that was made when the process was asked for
            process.unsent.append(message)
            return
        self._tell(ag.ToProcess(process.name, encode(message)))

    def end(self, process: Process, *, hard: bool) -> None:
        self._tell(ag.EndProcess(process.name, hard))

    def signal(self, process: Process, number: int) -> bool:
        if process.gone or self.is_lost:
            return False
        self._tell(ag.SignalProcess(process.name, number))
        return True

    def kept(self, rank: int) -> Versions:
        return self._kept.get(rank, Versions())

    def tag(self, rank: int) -> Tag | None:
        return self._tags.get(rank)

    def last_words(self, process: Process) -> str:
        return self._last_words.get(process.name, "")

    def describe(self, rank: int, arena_bytes: int) -> Described:
        return self._described.get(rank, Described())

    def needs(self) -> str:
        return next(reversed(self._needs.values()), "")

    def fence(self, generation: int) -> None:
        self._tell(ag.FenceReplicas(generation))

    def settle(self, generation: int, version: int, sealed: int) -> None:
        self._tell(ag.SettleReplicas(generation, version, sealed))

    def runs(self, generation: int, forget: tuple[int, ...]) -> None:
        self._tell(ag.GenerationRuns(generation, forget))

    def output_seen(self) -> None:
        """The command line keeps up with what it is sent."""
        self._tell(ag.OutputSeen(self.relayed_bytes))

    def forget(self, rank: int) -> None:
        """Another node has the rank from now on; what is known of it is of its past."""
        self._tags.pop(rank, None)
        self._kept.pop(rank, None)

    async def close(self) -> None:
        if not self.is_lost:
            self._tell(ag.EndPart())
            try:
                async with asyncio.timeout(READY_S):
                    await self._ended.wait()
            except TimeoutError:
                self._note("node silent", f"{self.name} does not say that its part has ended", None)

    def lost(self) -> None:
        """The core has given the node up: nobody shall wait for it."""
        self.is_lost = True
        for known in (self._kept, self._tags, self._described, self._needs, self._last_words):
            known.clear()
        fault = EnvironmentFault(f"node {self.name} is lost")
        for future in (self._begun, *self._starting.values()):
            if future is not None and not future.done():
                future.set_exception(fault)
        for event in self._output_ended.values():
            event.set()
        self._ended.set()
        over = self._over
        # Its number stays taken for as long as the job lasts, and this object with it, but nothing that it knew.
        self._tell, self._over, self._adopted, self._begun = _unsaid, _done, _done, None
        over()

    # --- in -----------------------------------------------------------------------------------------------

    def take(self, message: ag.REPORTS) -> None:
        """Raises ProtocolError for what makes no sense."""
        if self.is_lost:
            return
        match message:
            case ag.FromProcess():
                self._from_process(message)
            case ag.RankTags():
                self._take_tags(message)
            case ag.RankKept():
                self._kept[message.rank] = Versions(message.private, message.sealed)
            case ag.RankDescribed():
                words = Described(message.difference, message.shortage, message.unsealed)
                self._described[message.rank] = words
                self._needs.pop(message.rank, None)
                self._needs[message.rank] = message.needs
            case ag.ReplicasKept():
                kept = tuple(Kept(*one) for one in message.kept)
                self._listener.holdings(self.node, message.generation, kept)
            case ag.PartOutput():
                output = decode(message.data, msg.Output)
                self._shown[output.proc, output.stream] = output.end
                self.relayed_bytes += len(output.data) + msg.OUTPUT_OVERHEAD_BYTES
                self._listener.output(output)
            case ag.PartNote():
                self._note(message.event, f"on {self.name}: {message.reason}", message.rank)
            case ag.Prelude():
                self._take_prelude(message)
            case ag.ProcessStarted():
                if (future := self._starting.get(message.proc)) is not None and not future.done():
                    future.set_result(message.pid)
            case ag.ProcessNotStarted():
                if (future := self._starting.get(message.proc)) is not None and not future.done():
                    future.set_exception(EnvironmentFault(message.reason))
            case ag.ProcessEnded():
                self._last_words[message.proc] = message.last_words
                self._listener.exited(message.proc, message.code, message.signal)
            case ag.OutputEnded():
                self._all_shown(message.proc)
            case ag.PartAdopted():
                self._take_adopted(dict(message.processes))
            case ag.PartBegun():
                if self._begun is not None and not self._begun.done():
                    self._begun.set_result(message)
            case ag.PartRefused():
                if self._begun is not None and not self._begun.done():
                    self._begun.set_exception(EnvironmentFault(f"node {self.name}: {message.reason}"))
            case ag.PartEnded():
                self._ended.set()

    def _all_shown(self, proc: str) -> None:
        for key in [key for key in self._shown if key[0] == proc]:
            del self._shown[key]
        if (event := self._output_ended.get(proc)) is not None:
            event.set()

    def _take_adopted(self, pids: dict[str, int]) -> None:
        """What the daemon before has not told is lost: how its processes have ended, say."""
        self.relayed_bytes = 0  # it counts anew
        self._adopted()
        shown = tuple((*key, end) for key, end in self._shown.items())
        self._tell(ag.OutputShown(shown))
        for proc, future in self._starting.items():
            if proc in pids and not future.done():
                future.set_result(pids[proc])
            elif not future.done():
                future.set_exception(EnvironmentFault(f"the daemon of node {self.name} died meanwhile"))
        for proc in self._listener.processes_on(self.node):
            if proc not in pids:
                self._all_shown(proc)
                if proc not in self._starting:
                    self._listener.exited(proc, None, None)

    def _from_process(self, message: ag.FromProcess) -> None:
        inner = decode(message.data, msg.FROM_PROCESS)
        if inner.proc != message.proc:
            raise ProtocolError(f"{type(inner).__name__} of {inner.proc!r:.40} from {message.proc!r:.40}")
        difference = time.monotonic_ns() - message.at_ns
        if self._offset_ns is None or difference < self._offset_ns:
            self._offset_ns = difference
        refused: msg.Refused | None = None
        if isinstance(inner, msg.Hello):
            refused = self._listener.hello(inner)
        elif isinstance(inner, msg.Rejoin):
            refused = self._listener.rejoined(inner)
        else:
            self._listener.received(self._in_our_time(inner))
        if refused is not None:
            self._tell(ag.ToProcess(message.proc, encode(refused)))

    def _in_our_time(self, message: Any) -> Any:
        instants = [
            field.name
            for field in fields(message)
            if field.name.endswith("_ns") and getattr(message, field.name)
        ]
        assert self._offset_ns is not None
        return replace(message, **{name: getattr(message, name) + self._offset_ns for name in instants})

    def _take_prelude(self, piece: ag.Prelude) -> None:
        try:
            self._preludes.take(piece)
        except EnvironmentFault as error:
            self._note("prelude not kept", str(error), None)

    def _take_tags(self, message: ag.RankTags) -> None:
        for rank, data in message.tags:
            try:
                tag = Tag.from_bytes(data, f"the tag of rank {rank}")
            except FlashrecError as error:
                self._note("bad tag", str(error), rank)
                continue
            self._tags[rank] = None if tag is None or self._offset_ns is None else self._in_our_time(tag)
        for proc in message.heard:
            self._listener.heartbeat(proc)
