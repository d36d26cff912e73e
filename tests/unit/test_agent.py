"""A node's part in a job that another daemon leads: what it tells of processes that never come about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flashrec.cli.submit import submit_from_here
from flashrec.errors import EnvironmentFault
from flashrec.protocol import agents as ag
from flashrecd.agent import Agent
from flashrecd.partrecords import PartRecords
from flashrecd.place import Place

PLACE = Place(
    data_address="127.0.0.3",
    shard_address="ipc://x",
    replica_address="tcp://127.0.0.3:1",
    key_file="",
    plain_bulk=False,
)


class StubHost:
    """Starts a process as `how` says."""

    def __init__(self, how: Callable[[], Any]) -> None:
        self._how = how

    async def start(self, process: Any) -> int:
        pid: int = await self._how()
        return pid

    def end(self, process: Any, *, hard: bool) -> None:
        pass


def told_by(tmp_path: Path, how: Callable[[], Any], orders: Callable[[Agent], Any]) -> list[ag.REPORTS]:
    """What an agent tells whose processes start as `how` says, and which is given `orders`."""
    told: list[ag.REPORTS] = []

    async def live() -> None:
        agent = Agent(
            "job",
            submit_from_here("script.py", world_size=4, num_nodes=2),
            SimpleNamespace(path=tmp_path),  # type: ignore[arg-type]
            PLACE,
            address="ipc://y",
            log_dir=tmp_path,
            supervisor=SimpleNamespace(kill_group=lambda name: None),  # type: ignore[arg-type]
            shards=SimpleNamespace(),  # type: ignore[arg-type]
            records=PartRecords(tmp_path, lambda event, reason: None),
            tell=told.append,
            send=lambda identity, message: None,
            ended=lambda: None,
        )
        agent._host = StubHost(how)  # type: ignore[assignment]
        await orders(agent)

    asyncio.run(live())
    return told


async def _turns() -> None:
    """For what is about to happen in the loop."""
    for _ in range(5):
        await asyncio.sleep(0)


START = ag.StartProcess("p3", None, 1, False)
NEVER = [ag.ProcessNotStarted, ag.OutputEnded]


def test_a_process_that_cannot_be_started_prints_nothing_more(tmp_path: Path) -> None:
    async def fails() -> int:
        raise EnvironmentFault("no interpreter there")

    async def orders(agent: Agent) -> None:
        agent.take(START)
        await _turns()

    told = told_by(tmp_path, fails, orders)
    assert told == [ag.ProcessNotStarted("p3", "no interpreter there"), ag.OutputEnded("p3")]


def test_a_process_that_is_called_off_is_over_whether_its_start_had_begun_or_not(tmp_path: Path) -> None:
    """The leader waits until all that a process has printed was passed on, or its job never ends."""

    async def hangs() -> int:
        await asyncio.Event().wait()
        raise AssertionError

    for pause in (False, True):

        async def orders(agent: Agent, pause: bool = pause) -> None:
            agent.take(START)
            if pause:
                await _turns()
            agent.take(ag.EndProcess("p3", True))
            await _turns()

        assert [type(one) for one in told_by(tmp_path, hangs, orders)] == NEVER


def test_a_process_that_starts_is_told_once(tmp_path: Path) -> None:
    async def starts() -> int:
        return 77

    async def orders(agent: Agent) -> None:
        agent.take(START)
        agent.take(START)
        await _turns()

    assert told_by(tmp_path, starts, orders) == [ag.ProcessStarted("p3", 77)]
