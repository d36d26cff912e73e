"""The leader's end of the cluster: one ROUTER socket that members join."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import zmq
import zmq.asyncio

from flashrec.errors import EnvironmentFault, ProtocolError, UsageError
from flashrec.protocol import agents as ag
from flashrec.protocol import nodes as nd
from flashrec.protocol.codec import decode, encode
from flashrec.protocol.keys import Authenticator, ClusterKey, LogBudget
from flashrecd.cluster.connections import Connection, Connections
from flashrecd.cluster.info import NodeInfo, format_address, is_wildcard, parse_address, resolve
from flashrecd.cluster.links import (
    MAX_NODE_MESSAGE_BYTES,
    Hooks,
    Window,
    configure,
    receive_now,
    secure,
    send_now,
)

ACCEPTED = nd.FROM_NODE | ag.FROM_AGENT
MAX_MEMBERS = 4096
_BATCH = 256
_LINGER_MS = 500


@dataclass(eq=False)
class Peer:
    """A member, as long as one connection of it lasts."""

    identity: bytes
    info: NodeInfo
    connection: Connection
    last_heard: float
    window: Window = field(default_factory=Window)

    @property
    def address(self) -> str:
        """HOST:PORT its connection comes from."""
        assert self.connection.address is not None
        return format_address(*self.connection.address)


class LeaderSide:
    """See Cluster. `probed(name, answer)` gets the answers to the messages of a check of the connections."""

    def __init__(
        self,
        me: NodeInfo,
        listen: str,
        key: ClusterKey | None,
        hooks: Hooks,
        suspect_after_s: float,
        probed: Callable[[str, nd.ProbeOpened | nd.Probed], None],
    ) -> None:
        self._me, self._key, self._hooks = me, key, hooks
        self._probed = probed
        self._suspect_after_s = suspect_after_s
        self._heartbeat_s = suspect_after_s / 3
        self._host, self._wanted_port = parse_address(listen, option="--listen")
        self._peers: dict[bytes, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._refused = LogBudget(lambda reason: hooks.log("node refused", reason))
        self._strangers = LogBudget(lambda reason: hooks.log("stranger", reason))
        self.address = ""
        """HOST:PORT where it listens, once it does."""
        self.listening = asyncio.Event()

    @property
    def members(self) -> dict[str, NodeInfo]:
        return {name: peer.info for name, peer in self._by_name.items()}

    @property
    def num_refused(self) -> int:
        """Messages and connections that were turned away so far."""
        return self._refused.count + self._strangers.count

    def control_address(self) -> str:
        """The IP that cluster messages use, "" for whichever."""
        return "" if is_wildcard(self._host) else resolve(self._host)[0]

    async def serve(self) -> None:
        """Until cancelled. Raises EnvironmentFault if it cannot listen."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        context = zmq.asyncio.Context()
        with contextlib.ExitStack() as stack:
            stack.callback(context.term)
            if self._key is not None:

                def say(reason: str) -> None:  # on the authenticator's thread
                    loop.call_soon_threadsafe(self._hooks.log, "stranger", reason)

                authenticator = Authenticator(context, self._key, say)
                stack.callback(authenticator.close)
            self._socket = context.socket(zmq.ROUTER)
            stack.callback(self._socket.close, _LINGER_MS)
            self._connections = Connections(context, self._socket, loop.time, self._strangers.write)
            stack.callback(self._connections.close)
            self._bind()
            async with asyncio.TaskGroup() as tasks:
                for work in (self._receive, self._watch, self._beat):
                    tasks.create_task(work())

    def _bind(self) -> None:
        configure(self._socket, suspect_after_s=self._suspect_after_s, host=self._host)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        secure(self._socket, self._key, server=True)
        where = format_address(resolve(self._host)[0], self._wanted_port)
        try:
            self._socket.bind(f"tcp://{where}")
        except zmq.ZMQError as error:
            raise EnvironmentFault(f"cannot listen at {where}: {error.strerror}") from error
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        host, port = parse_address(bound.rstrip(b"\0").decode().removeprefix("tcp://"), option="--listen")
        self._connections.listens_at(port)
        self.address = format_address(host, port)
        self.listening.set()
        guarded = (
            "holders of its key may join"
            if self._key
            else "without a key: all users of this machine may join"
        )
        self._hooks.log("cluster", f"node {self._me.name} leads at {self.address}; {guarded}")

    def send(self, name: str, message: Any) -> bool:
        """Whether `name` is a member; whether it gets the message shows in nothing but its answer. Raises
        ProtocolError for a message that is too large."""
        peer = self._by_name.get(name)
        if peer is None:
            return False
        data = encode(message)
        if len(data) > MAX_NODE_MESSAGE_BYTES:
            raise ProtocolError(f"{type(message).__name__} has {len(data)} bytes: too many for node {name}")
        if peer.window.admit(len(data)):
            # Fails where the connection has closed: the monitor says so, once all that came through it is taken.
            send_now(self._socket, [peer.identity, data])
        else:
            why = f"more than {peer.window.limit_bytes >> 20} MiB wait for it, and it takes none"
            # Not from within: the caller is in the midst of something.
            asyncio.get_running_loop().call_soon(self._forget, peer, why)
        return True

    # --- the loop ---------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            await self._socket.poll(1000)
            await self._take_all()

    async def _take_all(self) -> None:
        """All that has come, looking up now and then."""
        while True:
            for _ in range(_BATCH):
                if (frames := receive_now(self._socket)) is None:
                    return
                try:
                    self._take(frames)
                except Exception:  # a bug of ours that one message found
                    self._hooks.log("internal error", traceback.format_exc())
            await asyncio.sleep(0)

    async def _watch(self) -> None:
        while True:
            await self._connections.wait()
            self._connections.drain()
            while closed := self._connections.take_closed():
                await self._take_all()  # what it said before
                for connection in closed:
                    for peer in [p for p in self._peers.values() if p.connection is connection]:
                        self._forget(peer, "its connection closed")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._connections.cut_late()
            for name in list(self._by_name):
                self._beat_to(name)

    def _beat_to(self, name: str) -> None:
        peer = self._by_name.get(name)
        if peer is not None:
            self.send(name, nd.NodeHeartbeat(peer.window.told()))

    def _forget(self, peer: Peer, why: str) -> None:
        if self._peers.pop(peer.identity, None) is None:
            return  # twice, for two reasons
        del self._by_name[peer.info.name]
        self._connections.cut(peer.connection)
        self._hooks.on_closed(peer.info.name, why)

    # --- messages ---------------------------------------------------------------------------------------

    def _take(self, frames: list[zmq.Frame]) -> None:
        identity, body = frames[0].bytes, frames[-1]
        peer = self._peers.get(identity)
        sender = body.get("Peer-Address") if peer is None else f"node {peer.info.name}"
        try:
            if len(frames) != 2:
                raise ProtocolError(f"{len(frames)} frames instead of two")
            message = decode(body.buffer, ACCEPTED)
            if peer is not None:
                self._take_from(peer, message)
            elif isinstance(message, nd.JoinCluster):
                self._join(identity, message, body)
            else:
                raise ProtocolError(f"{type(message).__name__} from who is no member")
        except (ProtocolError, UsageError) as error:
            self._refused.write(f"{sender}: {error}")
            if peer is None:
                send_now(self._socket, [identity, encode(nd.NodeRefused(str(error)))])
        finally:
            if peer is not None and peer.window.take(len(body)):
                self._beat_to(peer.info.name)

    def _take_from(self, peer: Peer, message: Any) -> None:
        if isinstance(message, nd.JoinCluster):
            raise ProtocolError("it is a member already, and joins again over the same connection")
        peer.last_heard = self._clock()
        self._hooks.on_heard(peer.info.name)
        match message:
            case nd.NodeHeartbeat():
                peer.window.acknowledge(message.taken_bytes)
            case nd.ProbeOpened() | nd.Probed():
                self._probed(peer.info.name, message)
            case _:
                self._hooks.on_message(peer.info.name, message)

    def _join(self, identity: bytes, message: nd.JoinCluster, body: zmq.Frame) -> None:
        """Raises UsageError for a node that must not join."""
        info = NodeInfo(**{f.name: getattr(message, f.name) for f in fields(NodeInfo)})
        if info.release != self._me.release:
            raise UsageError(
                f"node {info.name} runs flashrec {info.release}, the leader {self._me.release}: all nodes must run "
                "one release"
            )
        self._connections.drain()
        held = self._by_name.get(info.name)
        where = body.get("Peer-Address")
        if info.name == self._me.name:
            raise UsageError(
                f"the leader at {self.address} is called {info.name}, and so is the node at {where}: give one of "
                "them another --name"
            )
        if held is not None:
            silent_s = self._clock() - held.last_heard
            if held.info.incarnation == info.incarnation:
                self._forget(held, "it has joined again")
            elif silent_s < self._suspect_after_s:
                raise UsageError(
                    f"node {info.name} at {held.address} is a member and was heard {silent_s:.1f} s ago, and the node "
                    f"at {where} has the same name: give one of them another --name"
                )
            else:
                self._forget(held, f"it was silent for {silent_s:.1f} s, and has come back as another daemon")
        if len(self._peers) >= MAX_MEMBERS:
            raise UsageError(f"the cluster has {MAX_MEMBERS} members already")
        connection = self._connections.claim(body.get(zmq.SRCFD))
        if connection is None or connection.address is None:
            raise ProtocolError(f"node {info.name} has gone already")
        peer = Peer(identity, info, connection, self._clock())
        self._peers[identity] = self._by_name[info.name] = peer
        send_now(self._socket, [identity, encode(welcome(self._me))])
        self._hooks.on_joined(info)


def welcome(me: NodeInfo) -> nd.Welcomed:
    return nd.Welcomed(**{f.name: getattr(me, f.name) for f in fields(NodeInfo)})
