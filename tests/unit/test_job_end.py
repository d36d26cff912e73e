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
from flashrec.errors import EnvironmentFault, ProtocolError, UsageError
from flashrec.protocol import messages as msg
from flashrec.protocol.exitcode import say_exit_code
from flashrec.protocol.jobdir import JobDirectory
from flashrecd.core import events as ev
from flashrecd.core.state import JobConfig, NodeLife, NodeStatus
from flashrecd.eventlog import EventLog
from flashrecd.jobprocesses import COULD_NOT_START
from flashrecd.jobrun import JobRun
from flashrecd.launching import Process
from flashrecd.rundir import RunDirectory
from flashrecd.service import JobService


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
def service(tmp_path: Path, log: EventLog) -> Iterator[JobService]:
    run = RunDirectory(tmp_path / "run")
    yield JobService(
        run,
        log,
        supervisor=cast(Any, None),
        shards=cast(Any, None),
        reply=lambda identity, message: None,
        refuse=lambda identity, kind, reason: None,
        bind=lambda identity, proc: None,
        is_cut_off=lambda identity: False,
        has_owner=False,
    )
    run.close()


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


def test_only_a_lost_node_is_fenced(service: JobService) -> None:
    answers: list[msg.Message] = []
    fed: list[Any] = []
    service._reply = lambda identity, message: answers.append(message)
    nodes = (NodeStatus("a"), NodeStatus("b", life=NodeLife.LOST), NodeStatus("b"))
    core = SimpleNamespace(state=SimpleNamespace(nodes=nodes))
    service.job = cast(Any, SimpleNamespace(core=core, feed=fed.append, log=lambda event, reason: None))
    for name in ("a", "c"):
        service.fence_node(b"client", name)
    assert not fed
    assert all(isinstance(answer, msg.Refused) and "lost: b" in answer.reason for answer in answers)
    service.fence_node(b"client", "b")
    assert fed == [ev.NodeFenced(1)]
    assert isinstance(answers[-1], msg.Done)


class Ended:
    """A job of one rank, in the loop that runs; `outcome` is how it ends."""

    def __init__(self, folder: Path, log: EventLog) -> None:
        self.outcome: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self.run = JobRun(
            "job",
            JobConfig(world_size=1, num_standbys=0),
            cast(Any, Unreadable()),
            target="train.py",
            pull="shm",
            supervisor=cast(Any, None),
            log=log,
            shard_address="",
            shards=cast(Any, None),
            send=lambda identity, message: None,
            ended=lambda code, reason: self.outcome.set_result((code, reason)),
            directory=JobDirectory.make("job", folder),
        )
        self.run.start()


def test_a_job_ends_though_its_output_cannot_be_read(tmp_path: Path, log: EventLog) -> None:
    async def run() -> tuple[int, str]:
        return await asyncio.wait_for(Ended(tmp_path, log).outcome, 5)

    assert asyncio.run(run())[0] == COULD_NOT_START
    assert "Input/output error" in (tmp_path / "events.jsonl").read_text()


def test_a_daemon_that_cannot_adopt_leaves_the_ranks_their_memory(
    service: JobService, tmp_path: Path
) -> None:
    def fail(shm_dir: Path) -> None:
        raise EnvironmentFault("cannot start the shard server")

    service._shards = cast(Any, SimpleNamespace(start=fail, address=""))
    directory = JobDirectory.make("job", tmp_path)
    rank = JobDirectory.hold(directory.path)
    with pytest.raises(EnvironmentFault):
        service._run_own("job", submit(), tmp_path, directory)
    assert (directory.path / "arena").is_dir()
    assert rank.leave(), "the daemon holds on to it"


def test_output_before_the_beginning_of_a_file_is_refused(service: JobService) -> None:
    service.job = cast(Any, SimpleNamespace(name="job", shm_dir="/"))
    service._own = cast(Any, SimpleNamespace(submit=submit(), adopted=True))
    attach = msg.Attach(__version__, "job", os.getpid(), (("p1", "stdout", -1),))
    with pytest.raises(ProtocolError):
        service.attach(b"client", attach)
    assert service.client is None


def test_a_command_line_may_attach_once_more(service: JobService) -> None:
    """The answer to its first Attach was lost."""
    heard: list[dict[tuple[str, str], int]] = []
    logs = SimpleNamespace(log_dir=Path("/"))
    service.job = cast(Any, SimpleNamespace(name="job", shm_dir="/"))
    service._own = cast(Any, SimpleNamespace(submit=submit(), adopted=True, logs=logs, listen=heard.append))
    attach = msg.Attach(__version__, "job", os.getpid(), (("p1", "stdout", 7),))
    for identity in (b"first", b"second"):
        service.attach(identity, attach)
        assert service.client == identity
    assert heard == [{("p1", "stdout"): 7}] * 2
    service.attach(b"third", msg.Attach(__version__, "job", os.getpid() + 1, ()))
    assert service.client == b"second"


def test_how_an_adopted_process_ended_is_known_however_soon_the_kernel_says_that_it_did(
    tmp_path: Path, log: EventLog
) -> None:
    """Its last message may still be on its way; what it has left in its file is not."""

    async def run() -> tuple[int, str]:
        job = Ended(tmp_path, log)
        (process,) = job.run.processes.values()
        assert process.starting is not None
        process.starting.cancel()
        say_exit_code(job.run.shm_dir, process.name, 0)
        job.run.exited(process.name, None, None)
        return await asyncio.wait_for(job.outcome, 5)

    assert asyncio.run(run())[0] == 0


def test_a_member_runs_no_job_of_its_own(service: JobService) -> None:
    """What its processes said would go to the leader's job."""
    service._cluster = cast(Any, SimpleNamespace(leads=False, address="10.0.0.1:7400"))
    with pytest.raises(UsageError, match="a member of the cluster"):
        service.submit(b"client", submit())
    assert service.job is None
