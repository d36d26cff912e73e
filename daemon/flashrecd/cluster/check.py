"""Who reaches whom in a cluster, and how fast: the leader's part. Every node connects to every other one."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrec.protocol import nodes as nd
from flashrec.protocol.keys import TOKEN_BYTES
from flashrecd.cluster.reach import CONNECT_S, TRANSFER_S

TRANSFER_BYTES = 4 << 20
MAX_MEASURED = 64
"""Of so many others each node measures the bandwidth; that it reaches them is checked for all."""
SLOWER = 0.7
"""Data that comes at less than this part of the control address's rate is worth a warning."""
ANSWER_S = 3 * CONNECT_S + 2 * TRANSFER_S + 2.0


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """How node `by` reaches node `node`."""

    node: str
    by: str
    data_bytes_per_s: float | None
    """None: not measured."""
    control_bytes_per_s: float | None
    """Over the address that cluster messages use; None where that is the data address, too."""
    problem: str
    """What cannot be reached, with its port, and why; "" if all can."""

    @property
    def warning(self) -> str:
        """For a person, or ""."""
        if self.problem:
            return f"node {self.by} does not reach node {self.node}: {self.problem}"
        data, control = self.data_bytes_per_s, self.control_bytes_per_s
        if data is not None and control is not None and data < SLOWER * control:
            return (
                f"node {self.by} gets data from node {self.node} at {data / 1e6:.0f} MB/s, and at {control / 1e6:.0f} "
                f"MB/s where its cluster messages go: is the --data-address of node {self.node} the right one?"
            )
        return ""


class Check:
    """`ask(node, message)` sends it, or does it where `node` is the leader itself, and says whether it could."""

    def __init__(self, ask: Callable[[str, Any], bool]) -> None:
        self._ask = ask
        self._requests = itertools.count(1)
        self._waiting: dict[tuple[str, int], asyncio.Future[Any]] = {}

    def answered(self, node: str, answer: nd.ProbeOpened | nd.Probed) -> None:
        """What was not asked for, or comes too late, changes nothing."""
        waiting = self._waiting.get((node, answer.request))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def gone(self, node: str, why: str) -> None:
        for (name, _), waiting in self._waiting.items():
            if name == node and not waiting.done():
                waiting.set_exception(ConnectionError(why))

    async def run(self, nodes: Sequence[str], shard_endpoints: Mapping[str, str]) -> list[PairReport]:
        """A report for each ordered pair."""
        token = secrets.token_bytes(TOKEN_BYTES)
        opened = await asyncio.gather(*(self._open(node, token) for node in nodes))
        listeners = dict(zip(nodes, opened, strict=True))
        reports: list[PairReport] = []
        try:
            # In each round every node sends to one and gets from one: no two transfers share a node's link.
            for distance in range(1, len(nodes)):
                num_bytes = TRANSFER_BYTES if distance <= MAX_MEASURED else 0
                pairs = [(by, nodes[(i + distance) % len(nodes)]) for i, by in enumerate(nodes)]
                reports += await asyncio.gather(
                    *(
                        self._pair(by, node, listeners[node], shard_endpoints.get(node, ""), token, num_bytes)
                        for by, node in pairs
                    )
                )
        finally:
            for node in nodes:
                self._ask(node, nd.CloseProbe(next(self._requests)))
        return reports

    async def _open(self, node: str, token: bytes) -> nd.ProbeOpened | str:
        answer = await self._answer_to(node, nd.OpenProbe(next(self._requests), token))
        if isinstance(answer, nd.ProbeOpened) and not answer.problem:
            return answer
        return answer.problem if isinstance(answer, nd.ProbeOpened) else str(answer)

    async def _pair(
        self, by: str, node: str, there: nd.ProbeOpened | str, endpoint: str, token: bytes, num_bytes: int
    ) -> PairReport:
        if isinstance(there, str):
            return _report(by, node, {}, there)
        report = await self._measure(by, node, there, endpoint, token, num_bytes)
        if report.warning and not report.problem:  # one hiccup is no slow link
            again = await self._measure(by, node, there, endpoint, token, num_bytes)
            if not again.warning:
                return again
        return report

    async def _measure(
        self, by: str, node: str, there: nd.ProbeOpened, endpoint: str, token: bytes, num_bytes: int
    ) -> PairReport:
        probe = nd.Probe(next(self._requests), node, there.listeners, endpoint, token, num_bytes)
        answer = await self._answer_to(by, probe)
        if isinstance(answer, nd.Probed):
            return _report(by, node, dict(answer.rates), answer.problem)
        return _report(by, node, {}, f"node {by}: {answer}")

    async def _answer_to(self, node: str, message: nd.OpenProbe | nd.Probe) -> Any:
        """The answer, or in words why there is none."""
        key = (node, message.request)
        self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            if not self._ask(node, message):
                return "it is not in the cluster"
            async with asyncio.timeout(ANSWER_S):
                return await self._waiting[key]
        except TimeoutError:
            return f"it did not answer within {ANSWER_S:.0f} s"
        except ConnectionError as error:
            return f"it has gone: {error}"
        finally:
            del self._waiting[key]


def _report(by: str, node: str, rates: Mapping[str, float], problem: str) -> PairReport:
    return PairReport(
        node=node,
        by=by,
        data_bytes_per_s=rates.get("data") or None,
        control_bytes_per_s=rates.get("control") or None,
        problem=problem,
    )
