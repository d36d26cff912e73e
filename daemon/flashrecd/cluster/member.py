"""A member's end of the cluster: one DEALER socket after the other, each for one connection to the leader."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import zmq
import zmq.asyncio

from flashrec.errors import ProtocolError, UsageError
from flashrec.protocol import agents as ag
from flashrec.protocol import nodes as nd
from flashrec.protocol.codec import decode, encode
from flashrec.protocol.keys import ClusterKey, LogBudget
from flashrecd.cluster.info import NodeInfo, address_towards, format_address, parse_address
from flashrecd.cluster.links import (
    MAX_NODE_MESSAGE_BYTES,
    Hooks,
    Monitor,
    Window,
    configure,
    receive_now,
    secure,
    send_now,
)

ACCEPTED = nd.TO_NODE | ag.FROM_LEADER
WELCOME_S = 10.0
"""How long to wait for Welcomed; then another connection is tried."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 3.0
_BATCH = 256
_LINGER_MS = 500
_ENDINGS = {
    zmq.EVENT_CLOSED: "nobody listens there",
    zmq.EVENT_DISCONNECTED: "the connection closed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the leader does not admit this node's key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it has another key, or none, or is no flashrecd",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it has another key, or none, or does not answer",
}


class MemberSide:
    """See Cluster. `probe(message)` gets the messages of a check of the connections."""

    def __init__(
        self,
        me: NodeInfo,
        join: str,
        key: ClusterKey | None,
        hooks: Hooks,
        suspect_after_s: float,
        probe: Callable[[nd.OpenProbe | nd.Probe | nd.CloseProbe], None],
    ) -> None:
        self._me, self._key, self._hooks, self._probe = me, key, hooks, probe
        self._suspect_after_s = suspect_after_s
        self._heartbeat_s = suspect_after_s / 3
        self.host, self._port = parse_address(join, option="--join")
        self.address = format_address(self.host, self._port)
        self._leader: NodeInfo | None = None
        self._refused = LogBudget(lambda reason: hooks.log("refused", reason))
        self._last_why = ""

    @property
    def members(self) -> dict[str, NodeInfo]:
        return {} if self._leader is None else {"": self._leader}

    def control_address(self) -> str:
        """The IP that cluster messages use, "" if none leads to the leader."""
        try:
            return address_towards(self.host, self._port)
        except UsageError:
            return ""

    async def serve(self) -> None:
        """Join, and join again, until cancelled."""
        context = zmq.asyncio.Context()
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                why, was_member = await self._join_once(context)
                if was_member:
                    pause_s = FIRST_PAUSE_S
                if why != self._last_why:
                    self._last_why = why
                    self._hooks.log("not joined", f"no leader at {self.address}: {why}; trying on")
                # Not all at once, where a leader has come back.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
        finally:
            context.term()

    def send(self, message: Any) -> bool:
        """Whether there is a leader. Raises ProtocolError for a message that is too large."""
        if self._leader is None:
            return False
        data = encode(message)
        if len(data) > MAX_NODE_MESSAGE_BYTES:
            raise ProtocolError(f"{type(message).__name__} has {len(data)} bytes: too many for the leader")
        if self._window.admit(len(data)):
            send_now(self._socket, [data])  # fails where the connection has closed: the monitor says so
        else:
            self._end(f"more than {self._window.limit_bytes >> 20} MiB wait for it, and it takes none")
        return True

    async def _join_once(self, context: zmq.asyncio.Context) -> tuple[str, bool]:
        """One connection, from its start to its end: (why it ended, whether this node was a member)."""
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = loop.create_future()
        self._window = Window()
        self._socket = context.socket(zmq.DEALER)
        configure(self._socket, suspect_after_s=self._suspect_after_s, host=self.host)
        self._socket.setsockopt(
            zmq.RECONNECT_IVL, -1
        )  # a new socket instead, which has nothing of before to send
        secure(self._socket, self._key, server=False)
        handshakes = (
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        monitor = Monitor(context, self._socket, zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | handshakes)
        tasks: list[asyncio.Task[None]] = []
        was_member = False
        try:
            self._socket.connect(f"tcp://{self.address}")
            send_now(self._socket, [encode(_join(self._me))])
            tasks = [loop.create_task(work) for work in (self._receive(), self._watch(monitor), self._beat())]
            late = loop.call_later(WELCOME_S, self._late)
            try:
                waited: list[asyncio.Future[Any]] = [self._ended, *tasks]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                late.cancel()
            for task in tasks:
                if task.done():
                    task.result()  # a bug of ours
            return self._ended.result(), self._leader is not None
        except zmq.ZMQError as error:
            return error.strerror or "the connection failed", False
        finally:
            was_member, self._leader = self._leader is not None, None
            try:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(
                    *tasks, return_exceptions=True
                )  # raises where this node is stopped meanwhile
            finally:
                monitor.close()
                self._socket.close(_LINGER_MS if not self._ended.done() else 0)
                if was_member and self._ended.done():
                    self._hooks.on_closed("", self._ended.result())

    def _end(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    def _late(self) -> None:
        if self._leader is None:
            self._end(f"no answer for {WELCOME_S:.0f} s")

    async def _watch(self, monitor: Monitor) -> None:
        while True:
            await monitor.wait()
            for event, _ in monitor.drain():
                await self._take_all()  # what it said before, a refusal say
                self._end(_ENDINGS.get(zmq.Event(event), "the connection failed"))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self.send(nd.NodeHeartbeat(self._window.told()))

    async def _receive(self) -> None:
        while True:
            await self._socket.poll(1000)
            await self._take_all()

    async def _take_all(self) -> None:
        while True:
            for _ in range(_BATCH):
                if self._ended.done() or (frames := receive_now(self._socket)) is None:
                    return
                try:
                    self._take(frames)
                except (ProtocolError, UsageError) as error:
                    self._refused.write(f"the leader at {self.address}: {error}")
                except Exception:  # a bug of ours that one message found
                    self._hooks.log("internal error", traceback.format_exc())
            await asyncio.sleep(0)

    def _take(self, frames: list[zmq.Frame]) -> None:
        if len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames instead of one")
        was_member = self._leader is not None
        try:
            message = decode(frames[0].buffer, ACCEPTED)
            match message:
                case nd.NodeRefused():
                    self._end(message.reason)
                case nd.Welcomed() if not was_member:
                    self._welcomed(message)
                case nd.Welcomed():
                    raise ProtocolError("it welcomes a member")
                case _ if not was_member:
                    raise ProtocolError(f"{type(message).__name__} to who is no member")
                case _:
                    self._take_from_leader(message)
        finally:
            if was_member and self._window.take(len(frames[0])):
                self.send(nd.NodeHeartbeat(self._window.told()))

    def _welcomed(self, message: nd.Welcomed) -> None:
        self._leader = NodeInfo(**{f.name: getattr(message, f.name) for f in fields(NodeInfo)})
        self._last_why = ""
        self._hooks.log("cluster", f"member of the cluster that node {message.name} at {self.address} leads")
        self._hooks.on_joined(self._leader)

    def _take_from_leader(self, message: Any) -> None:
        self._hooks.on_heard("")
        match message:
            case nd.NodeHeartbeat():
                self._window.acknowledge(message.taken_bytes)
            case nd.OpenProbe() | nd.Probe() | nd.CloseProbe():
                self._probe(message)
            case _:
                self._hooks.on_message("", message)


def _join(me: NodeInfo) -> nd.JoinCluster:
    return nd.JoinCluster(**{f.name: getattr(me, f.name) for f in fields(NodeInfo)})
