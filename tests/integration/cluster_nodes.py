"""Nodes of a cluster in the test's own process and loop, and what each has been told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from flashrec.protocol.keys import ClusterKey
from flashrecd.cluster import Cluster, NodeInfo
from flashrecd.cluster.info import new_incarnation

SUSPECT_AFTER_S = 1.5  # a busy machine holds a node up for less
PATIENCE_S = 20.0


def info(name: str, **changes: Any) -> NodeInfo:
    fields: dict[str, Any] = {
        "name": name,
        "domain": "rack-1",
        "data_address": "127.0.0.1",
        "incarnation": new_incarnation(),
        "memory_bytes": 1 << 30,
        **changes,
    }
    return NodeInfo(**fields)


class Node:
    """A daemon's end of the cluster. `told`: everything but heartbeats, in order; `heard`: how often, by node."""

    def __init__(
        self,
        me: NodeInfo,
        key: ClusterKey | None,
        *,
        listen: str | None = None,
        join: str | None = None,
        suspect_after_s: float = SUSPECT_AFTER_S,
    ) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.log: list[tuple[str, str]] = []
        self.heard: dict[str, int] = {}
        self.on_message: Callable[[str, Any], None] = lambda node, message: None
        self.cluster = Cluster(
            me,
            listen=listen,
            join=join,
            key=key,
            log=lambda event, reason: self.log.append((event, reason)),
            on_message=self._message,
            on_joined=lambda node: self.told.append(("joined", node.name, node.incarnation)),
            on_heard=lambda node: self.heard.update({node: self.heard.get(node, 0) + 1}),
            on_closed=lambda node, why: self.told.append(("closed", node, why)),
            suspect_after_s=suspect_after_s,
        )
        self._task: asyncio.Task[None] | None = None

    def _message(self, node: str, message: Any) -> None:
        self.told.append(("message", node, message))
        self.on_message(node, message)

    async def start(self) -> None:
        self._task = asyncio.create_task(self.cluster.serve())
        listening = asyncio.create_task(self.cluster.listening())
        await asyncio.wait([self._task, listening], return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def kinds(self) -> list[tuple[str, str]]:
        """What was told, without the particulars."""
        return [(what, node) for what, node, *_ in self.told]

    def reasons(self, event: str) -> list[str]:
        return [reason for kind, reason in self.log if kind == event]

    async def until(self, what: str, node: str, count: int = 1) -> None:
        await until(
            lambda: self.kinds().count((what, node)) >= count,
            lambda: f"{what} {node}: {self.told}, {self.log}",
        )


async def until(
    condition: Callable[[], object], say: Callable[[], str] = lambda: "it never came true"
) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(say()) from None


@contextlib.asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    """Start them, and stop whatever of them runs in the end."""
    try:
        for node in nodes:
            await node.start()
        yield
    finally:
        for node in nodes:
            await node.stop()


def leader(key: ClusterKey | None, name: str = "n0", listen: str = "127.0.0.1:0", **options: Any) -> Node:
    return Node(info(name), key, listen=listen, **options)


def member(key: ClusterKey | None, of: Node | str, name: str = "n1", **changes: Any) -> Node:
    """Of the cluster whose leader runs, or listens there."""
    address = of if isinstance(of, str) else of.cluster.address
    return Node(info(name, **changes), key, join=address)
