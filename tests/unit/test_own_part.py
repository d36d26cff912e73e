"""A member's part in a job ends with its daemon, whatever is in the way; nothing of it stays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flashrec.cli.submit import submit_from_here
from flashrec.protocol import agents as ag
from flashrec.protocol.codec import encode
from flashrec.protocol.jobdir import JobDirectory
from flashrecd.ownpart import OwnPart


def own_part(tmp_path: Path, tcp_address: Callable[[], Awaitable[str]]) -> OwnPart:
    made = OwnPart(
        cast(Any, SimpleNamespace(send=lambda node, message: None)),
        cast(Any, SimpleNamespace(place=lambda *_: None)),
        address="ipc://x",
        run_dir=tmp_path,
        supervisor=cast(Any, SimpleNamespace()),
        shards=cast(
            Any,
            SimpleNamespace(
                address="ipc://s", start=lambda *_, **__: None, stop=lambda: None, tcp_address=tcp_address
            ),
        ),
        send=lambda identity, message: None,
        log=lambda event, reason: None,
    )
    made._converse(ag.Envelope("job.1", 0, 0, b""))
    return made


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory.make("job", tmp_path)


async def never() -> str:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_part_that_does_not_end_in_time_leaves_nothing(tmp_path: Path, directory: JobDirectory) -> None:
    async def live() -> None:
        part = own_part(tmp_path, never)
        part.agent = cast(Any, SimpleNamespace(end=lambda: None, directory=directory))
        await part.close(0.02)
        assert directory.path.exists(), "processes may be in it yet"
        part.remove()

    asyncio.run(live())
    assert not directory.path.exists()


def test_a_part_that_has_just_begun_leaves_nothing(
    tmp_path: Path, directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobDirectory, "make", lambda job: directory)

    async def live() -> None:
        part = own_part(tmp_path, never)
        submit = encode(submit_from_here("script.py", world_size=4, num_nodes=2))
        part._hear(ag.BeginPart("job", submit))
        await asyncio.sleep(0)
        assert directory.path.exists()
        await part.close(5.0)

    asyncio.run(live())
    assert not directory.path.exists()
