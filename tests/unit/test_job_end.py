"""What keeps a job's end, or a daemon's start, from doing harm where a file or a program fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flashrec import __version__
from flashrec.errors import EnvironmentFault, ProtocolError
from flashrec.protocol import messages as msg
from flashrec.protocol.jobdir import JobDirectory
from flashrecd.core.state import JobConfig
from flashrecd.eventlog import EventLog
from flashrecd.jobrun import COULD_NOT_START, JobRun
from flashrecd.launching import Process
from flashrecd.shell import Daemon


def submit() -> msg.Submit:
    return msg.Submit(
        release=__version__, pid=os.getpid(), target="train.py", module=False, args=(), cwd="/", umask=0o077,
        python="python", env=(), world_size=1, num_standbys=0, max_restarts=None, log_dir=None,
        start_method="fork", preload=(), pull="zmq", suspect_after_s=3.0,
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    made = EventLog(tmp_path / "events.jsonl")
    yield made
    made.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "run")
    made.supervisor = cast(Any, None)
    yield made
    made.log.close()
    made.run.close()


class Unreadable:
    """A source whose processes do not start, and whose files cannot be read."""

    def begin(self) -> None:
        pass

    async def start(self, process: Process) -> int:
        raise EnvironmentFault("no such program")

    async def ended(self, process: Process) -> None:
        raise OSError(5, "Input/output error")

    async def close(self) -> None:
        pass


def test_a_job_ends_though_its_output_cannot_be_read(tmp_path: Path, log: EventLog) -> None:
    async def run() -> tuple[int, str]:
        ended = asyncio.get_running_loop().create_future()
        job = JobRun(
            "job",
            JobConfig(world_size=1, num_standbys=0),
            cast(Any, Unreadable()),
            target="train.py",
            pull="shm",
            supervisor=cast(Any, None),
            log=log,
            shard_address="",
            send=lambda identity, message: None,
            ended=lambda code, reason: ended.set_result((code, reason)),
            directory=JobDirectory.make("job", tmp_path),
        )
        job.start()
        return await asyncio.wait_for(ended, 5)

    assert asyncio.run(run())[0] == COULD_NOT_START
    assert "Input/output error" in (tmp_path / "events.jsonl").read_text()


def test_a_daemon_that_cannot_adopt_leaves_the_ranks_their_memory(daemon: Daemon, tmp_path: Path) -> None:
    def fail(shm_dir: Path) -> None:
        raise EnvironmentFault("cannot start the shard server")

    daemon._shards = cast(Any, SimpleNamespace(start=fail, address=""))
    directory = JobDirectory.make("job", tmp_path)
    rank = JobDirectory.hold(directory.path)
    with pytest.raises(EnvironmentFault):
        daemon._run_own("job", submit(), tmp_path, directory)
    assert (directory.path / "arena").is_dir()
    assert rank.leave(), "the daemon holds on to it"


def test_output_before_the_beginning_of_a_file_is_refused(daemon: Daemon) -> None:
    daemon.job = cast(Any, SimpleNamespace(name="job", shm_dir="/"))
    daemon._own = cast(Any, SimpleNamespace(submit=submit()))
    attach = msg.Attach(__version__, "job", os.getpid(), (("p1", "stdout", -1),))
    with pytest.raises(ProtocolError):
        daemon._attach(b"client", attach)
    assert daemon._client is None
