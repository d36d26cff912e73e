"""Several daemons as one cluster: who is in it, and messages between the leader and each of them.

It tells what it sees, that a node has joined, was heard, has closed its connection; that a node is lost is for the
core to decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashrec.errors import ProtocolError, UsageError
from flashrec.protocol import nodes as nd
from flashrec.protocol.keys import ClusterKey
from flashrecd.cluster.check import Check, PairReport
from flashrecd.cluster.info import NodeInfo, check_private, parse_address
from flashrecd.cluster.leader import LeaderSide
from flashrecd.cluster.links import SUSPECT_AFTER_S, Hooks
from flashrecd.cluster.member import MemberSide
from flashrecd.cluster.reach import Listeners, reach

MAX_PROBES = 64


class Cluster:
    """The leader's end (`listen`), or a member's (`join`).

    For a member there is one other node, the leader, which it calls "". All functions given are called in the loop
    of `serve`:
    `on_joined(info)`: a node is a member from now on (for a member: the leader has welcomed it);
    `on_message(node, message)`: what a member says about a job (`agents`), in the order it was sent;
    `on_heard(node)`: with each message of it, heartbeats included: one each third of `suspect_after_s`;
    `on_closed(node, why)`: its connection has ended, and with it the membership: at once where the other end is
    closed or reset, after `suspect_after_s` where its host has fallen silent; then it may join again.
    """

    def __init__(
        self,
        me: NodeInfo,
        *,
        listen: str | None,
        join: str | None,
        key: ClusterKey | None,
        log: Callable[[str, str], None],
        on_message: Callable[[str, Any], None],
        on_joined: Callable[[NodeInfo], None],
        on_heard: Callable[[str], None],
        on_closed: Callable[[str, str], None],
        suspect_after_s: float = SUSPECT_AFTER_S,
    ) -> None:
        """`log(event, reason)` writes to the event log. Raises UsageError for an address that is none, and
        without a key for one that other machines can reach."""
        hooks = Hooks(
            log=log, on_message=on_message, on_joined=on_joined, on_heard=on_heard, on_closed=self._closed
        )
        self.me = me
        self._on_closed = on_closed
        self._check = Check(self._ask)
        self._listeners = Listeners()
        self._probing: set[asyncio.Task[None]] = set()
        self._side: LeaderSide | MemberSide
        for address, option in ((listen, "--listen"), (join, "--join")):
            if address is not None:
                check_private(parse_address(address, option=option)[0], key, option=option)
        if listen is not None and join is None:
            self._side = LeaderSide(me, listen, key, hooks, suspect_after_s, self._check.answered)
        elif join is not None and listen is None:
            self._side = MemberSide(me, join, key, hooks, suspect_after_s, self._probe)
        else:
            raise UsageError("a node of a cluster either listens or joins")

    @property
    def leads(self) -> bool:
        return isinstance(self._side, LeaderSide)

    @property
    def address(self) -> str:
        """HOST:PORT of the leader's socket; its own once it listens."""
        return self._side.address

    @property
    def members(self) -> dict[str, NodeInfo]:
        """The other nodes, by the name that `send` knows them by: of a leader all members, of a member the leader."""
        return self._side.members

    @property
    def num_refused(self) -> int:
        """Messages and connections that the leader has turned away."""
        return self._side.num_refused if isinstance(self._side, LeaderSide) else 0

    async def serve(self) -> None:
        """Until cancelled; a member whose leader is away tries on. Raises EnvironmentFault for a leader that cannot
        listen."""
        try:
            await self._side.serve()
        finally:
            self._listeners.close()
            for task in self._probing:
                task.cancel()

    async def listening(self) -> None:
        """Until a leader listens; a member does at once."""
        if isinstance(self._side, LeaderSide):
            await self._side.listening.wait()

    def send(self, node: str, message: Any) -> bool:
        """Send, in order and without waiting; whether `node` is there. One that does not take what is sent to it is
        closed: `on_closed` says so. Raises ProtocolError for a message that is larger than a node may send."""
        if isinstance(self._side, LeaderSide):
            return self._side.send(node, message)
        return self._side.send(message) if node == "" else False

    async def check(
        self, nodes: Sequence[str], *, shard_endpoints: Mapping[str, str] | None = None
    ) -> list[PairReport]:
        """A leader finds out which of `nodes` (itself among them, or not) reach which, and how fast: a report for each
        ordered pair. Takes up to a few seconds for each node. `shard_endpoints`: tcp://host:port of those that have
        one by now, by node; by default what they said when they joined."""
        known = {self.me.name: self.me, **self.members}
        endpoints = {name: info.shard_endpoint for name, info in known.items()}
        return await self._check.run(nodes, {**endpoints, **(shard_endpoints or {})})

    def _ask(self, node: str, message: nd.OpenProbe | nd.Probe | nd.CloseProbe) -> bool:
        if node != self.me.name:
            return self.send(node, message)
        self._probe(message)
        return True

    def _closed(self, node: str, why: str) -> None:
        self._check.gone(node, why)
        if not self.leads:
            self._listeners.close()
        self._on_closed(node, why)

    def _probe(self, message: nd.OpenProbe | nd.Probe | nd.CloseProbe) -> None:
        """This node's part in a check. Raises ProtocolError for too many at once."""
        if isinstance(message, nd.CloseProbe):
            self._listeners.close()
            return
        if len(self._probing) >= MAX_PROBES:
            raise ProtocolError(f"more than {MAX_PROBES} probes at once")
        task = asyncio.get_running_loop().create_task(self._do(message))
        self._probing.add(task)
        task.add_done_callback(self._probing.discard)

    async def _do(self, message: nd.OpenProbe | nd.Probe) -> None:
        answer: nd.ProbeOpened | nd.Probed
        if isinstance(message, nd.OpenProbe):
            data, control = self.me.data_address, self._side.control_address()
            addresses = [("data", data)]
            if control not in ("", data):
                addresses.append(("control", control))
            answer = nd.ProbeOpened(message.request, *await self._listeners.open(addresses, message.token))
        else:
            answer = await reach(message)
        if self.leads:
            self._check.answered(self.me.name, answer)
        else:
            self.send("", answer)
