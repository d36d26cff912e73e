"""Who may join which job: ranks of another launcher, as the daemon and as the ranks themselves see it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from flashrec import __version__, external
from flashrec.errors import DaemonUnavailable, EnvironmentFault, UsageError
from flashrec.protocol import messages as msg
from flashrecd.core import events as ev
from flashrecd.core.job import Core
from flashrecd.core.state import Status
from flashrecd.external import (
    ABANDONED_S,
    JOIN_WAIT_S,
    MAX_WAITING,
    ExternalProcesses,
    Joining,
    external_config,
    job_name,
)
from flashrecd.jobrun import JobRun
from flashrecd.launching import Process
from flashrecd.supervise import Supervisor

LAUNCHER = os.getppid()
LIAR = 666
NOBODY = 2**22 + 1  # above any pid there can be
HERE = Path("/the/run/directory")


@pytest.fixture(autouse=True)
def everybody_is_who_he_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrecd.external.has_open", lambda pid, path: pid != LIAR and path == HERE)


def join(rank: int, pid: int = 0, **fields: Any) -> msg.Join:
    made = msg.Join("run-1", "/home/me/train.py", rank, 2, pid or 1000 + rank, LAUNCHER, False, __version__)
    return replace(made, **fields)


class Watched:
    """In place of a supervisor: whoever is adopted lives until the test ends it."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.killed: list[int] = []

    def adopt(self, proc: str, pid: int) -> None:
        if pid == NOBODY:
            raise EnvironmentFault(f"there is no process {pid} that could be adopted")
        self.pids[proc] = pid

    def kill_group(self, proc: str) -> bool:
        self.killed.append(self.pids[proc])
        return True

    async def settled(self, timeout_s: float) -> bool:
        return True


class Job:
    """In place of a JobRun: the core, its launches and kills, nothing else."""

    def __init__(self, name: str, first: msg.Join, source: ExternalProcesses, node: Node) -> None:
        self.name = name
        self.target = first.target
        self.source = source
        self.core = Core(external_config(first))
        self.welcomed: list[int] = []
        self._node = node
        self._starting: dict[str, asyncio.Task[int]] = {}

    def feed(self, event: ev.Event) -> None:
        for action in self.core.handle(event, self._node.now):
            if isinstance(action, ev.Launch):
                number = int(action.proc.removeprefix("p"))
                process = Process(action.proc, number, action.rank, action.generation, action.replacement)
                self._starting[action.proc] = asyncio.ensure_future(self.source.start(process))
            elif isinstance(action, ev.Kill):
                self._kill(action.proc)
            elif isinstance(action, ev.End):
                self._node.over(self)

    def _kill(self, proc: str) -> None:
        if proc in self._node.watched.pids:
            self._node.watched.kill_group(proc)
        else:
            self._starting[proc].cancel()
            asyncio.get_running_loop().call_soon(self.feed, ev.Exited(proc, None, 9))

    def joined(self, message: msg.Hello, identity: bytes) -> None:
        self.welcomed.append(message.pid)
        self.feed(ev.Joined(message.proc))

    def condemn(self, proc: str, why: str) -> None:
        self.feed(ev.Condemned(proc, why))

    def pids(self) -> dict[str, int]:
        return self._node.watched.pids


class Node:
    """A `Joining`, the time, and what it answered."""

    def __init__(self) -> None:
        self.now = 50.0
        self.job: Job | None = None
        self.watched = Watched()
        self.refused: list[tuple[bytes, str, str]] = []
        self.ended: list[tuple[int, str]] = []
        self.began: list[str] = []
        self.joining = Joining(
            HERE,
            lambda: cast("JobRun | None", self.job),
            self._begin,
            lambda identity, proc: None,
            lambda *answer: self.refused.append(answer),
            clock=lambda: self.now,
        )

    def _begin(self, name: str, first: msg.Join) -> None:
        self.began.append(name)
        source = ExternalProcesses(first.job, HERE, cast(Supervisor, self.watched), self.joining.admit)
        self.job = Job(name, first, source, self)
        self.job.feed(ev.Begin())

    def over(self, job: Job) -> None:
        assert job.core.state.outcome is not None
        self.ended.append(job.core.state.outcome)
        self.joining.ended(cast(JobRun, job))
        self.job = None

    async def joins(self, *joins: msg.Join) -> None:
        for number, one in enumerate(joins):
            self.joining.take(b"%d" % number, one)
        await turn()

    async def dies(self, rank: int, *versions: int) -> None:
        """The kernel says so."""
        assert self.job is not None
        proc = self.job.core.state.members[rank].proc
        self.watched.pids.pop(proc)
        await self.job.source.ended(Process(proc, 0, rank, 1, False))
        self.job.feed(ev.Exited(proc, None, None, versions, versions))
        await turn()

    async def running(self) -> Job:
        await self.joins(join(0), join(1))
        assert self.job is not None
        for member in self.job.core.state.members:
            self.job.feed(ev.Protected(member.proc, (((0, 1), "same"),), "external"))
        assert self.job.core.state.status is Status.RUNNING
        return self.job


async def turn() -> None:
    """Everything that is due has happened."""
    for _ in range(5):
        await asyncio.sleep(0)


def node(test: Callable[[Node], Awaitable[None]]) -> None:
    async def main() -> None:
        made = Node()
        await test(made)
        if made.job is not None:
            await made.job.source.close()

    asyncio.run(main())


# --- the daemon ---------------------------------------------------------------------------------------------


def test_the_first_to_join_begins_the_job_and_the_last_completes_it() -> None:
    async def test(node: Node) -> None:
        await node.joins(join(1))
        assert node.job is not None
        assert node.job.welcomed == [1001]
        assert node.job.core.state.awaited == (node.job.core.state.members[0].proc,)
        await node.joins(join(0))
        assert node.job.welcomed == [1001, 1000]
        assert len(node.began) == 1
        assert node.refused == []

    node(test)


def test_a_job_is_known_by_its_name_and_its_script() -> None:
    names = {
        job_name(join(0)),
        job_name(join(1, pid=7, restarted=True)),
        job_name(join(0, job="run-2")),
        job_name(join(0, target="/home/me/other.py")),
    }
    assert len(names) == 3
    assert all(name.isalnum() for name in names)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rank": 2}, "rank 2 is not in a world of 2"),
        ({"rank": -1}, "rank -1 is not in a world of 2"),
        ({"world_size": 0}, "rank 0 is not in a world of 0"),
        ({"world_size": MAX_WAITING + 1}, "at most"),
        ({"job": ""}, "1 to 200 characters"),
        ({"job": "x" * 201}, "1 to 200 characters"),
    ],
)
def test_what_cannot_be_right_is_refused(wrong: dict[str, Any], words: str) -> None:
    async def test(node: Node) -> None:
        with pytest.raises(UsageError, match=words):
            await node.joins(join(0, **wrong) if "rank" not in wrong else replace(join(0), **wrong))
        assert node.job is None

    node(test)


def test_another_release_is_refused() -> None:
    async def test(node: Node) -> None:
        await node.joins(join(0, release="0.0.1"))
        assert node.refused == [
            (b"0", "version", f"the daemon is flashrec {__version__}, this process 0.0.1")
        ]

    node(test)


def test_a_process_that_is_not_there_is_refused_and_its_rank_awaited_further() -> None:
    async def test(node: Node) -> None:
        await node.joins(join(0, pid=NOBODY))
        assert [kind for _, kind, _ in node.refused] == ["EnvironmentFault"]
        await node.joins(join(0), join(1))
        assert node.job is not None
        assert node.job.welcomed == [1000, 1001]

    node(test)


def test_a_pid_that_is_another_process_here_is_refused_and_nothing_happens_to_that_one() -> None:
    async def test(node: Node) -> None:
        await node.joins(join(0, pid=LIAR))
        (answer,) = node.refused
        assert "rank 0 says that it is process 666, which is not so here" in answer[2]
        assert node.watched.pids == {}

    node(test)


def test_another_world_size_is_refused() -> None:
    async def test(node: Node) -> None:
        await node.running()
        await node.joins(join(0, world_size=3))
        assert [words for *_, words in node.refused] == [
            "job 'run-1' has 2 ranks, not 3; for a new job set FLASHREC_JOB to another name"
        ]

    node(test)


def test_a_rank_that_lives_is_not_taken_over_and_one_that_has_died_is() -> None:
    async def test(node: Node) -> None:
        job = await node.running()
        await node.joins(join(0, pid=7), join(1, pid=8))
        assert node.refused == []
        await node.dies(1, 4, 5)
        assert job.welcomed == [1000, 1001, 8]
        node.now += JOIN_WAIT_S + 1
        node.joining.tick()
        assert len(node.refused) == 1
        assert (
            "rank 0 of job 'run-1' is running as process 1000, and has not ended in 10 s"
            in node.refused[0][2]
        )
        assert node.watched.killed == []

    node(test)


def test_an_orphan_is_ended_for_a_rank_that_another_launcher_starts() -> None:
    async def test(node: Node) -> None:
        await node.joins(join(0, launcher_pid=NOBODY), join(1))
        await node.joins(join(0, pid=7), join(1, pid=8, launcher_pid=NOBODY))
        assert node.watched.killed == [1000], "rank 1's launcher lives"
        node.joining.tick()
        assert node.watched.killed == [1000], "once"

    node(test)


def test_one_job_at_a_time() -> None:
    async def test(node: Node) -> None:
        await node.running()
        await node.joins(join(0, job="run-2"))
        (answer,) = node.refused
        assert answer[1] == "UsageError"
        assert (
            "job 'run-1' (/home/me/train.py) runs here with 2 processes, and this is job 'run-2'" in answer[2]
        )

    node(test)


def test_a_job_without_a_process_is_superseded() -> None:
    async def test(node: Node) -> None:
        await node.running()
        await node.dies(0, 4, 5)
        await node.dies(1, 4, 5)
        await node.joins(join(1, job="run-2"))
        assert node.ended == [(130, "superseded by job 'run-2' (/home/me/train.py)")]
        node.joining.tick()
        await turn()
        assert node.job is not None
        assert node.job.welcomed == [1001]
        assert node.began == [job_name(join(0)), job_name(join(0, job="run-2"))]
        assert node.refused == []

    node(test)


def test_all_ranks_come_back_to_the_job_they_were_in() -> None:
    async def test(node: Node) -> None:
        job = await node.running()
        await node.dies(0, 4, 5)
        await node.dies(1, 4, 5)
        node.now += ABANDONED_S + 1
        node.joining.tick()
        assert node.ended == [], "its launcher lives"
        await node.joins(join(0, pid=7, restarted=True), join(1, pid=8, restarted=True))
        assert job.welcomed[2:] == [7, 8]
        assert (job.core.state.status, job.core.state.version) == (Status.FORMING, 5)

    node(test)


def test_a_job_that_everybody_has_left_is_forgotten_after_a_while() -> None:
    async def test(node: Node) -> None:
        await node.joins(join(0, launcher_pid=NOBODY))
        await node.dies(0)
        node.joining.tick()
        node.now += ABANDONED_S - 1
        node.joining.tick()
        assert node.ended == []
        await node.joins(join(1, launcher_pid=NOBODY))
        node.joining.tick()
        node.now += ABANDONED_S - 1
        node.joining.tick()
        await node.dies(1)
        for _ in range(2):
            node.joining.tick()
            node.now += ABANDONED_S + 1
        await turn()
        assert node.ended == [(130, "its launcher is gone, and no rank came back in 60 s")]
        assert node.job is None

    node(test)


@pytest.mark.parametrize("restarted", [True, False])
def test_a_job_that_has_ended_is_not_begun_anew_by_a_launcher_that_does_not_know(restarted: bool) -> None:
    async def test(node: Node) -> None:
        job = await node.running()
        await node.dies(0, 4, 5)
        job.feed(ev.Stop("a poison batch", hard=True))
        await node.dies(1, 4, 5)
        assert node.ended == [(130, "a poison batch")]
        await node.joins(join(0, pid=7, restarted=restarted))
        refusal = (b"0", "ended", "job 'run-1' has ended: a poison batch")
        assert node.refused == ([refusal] if restarted else [])
        assert len(node.began) == (1 if restarted else 2)

    node(test)


def test_a_job_that_ended_before_its_first_step_may_begin_anew() -> None:
    async def test(node: Node) -> None:
        await node.joins(join(0), join(1))
        assert node.job is not None
        node.job.feed(ev.Stop("no such file", hard=True))
        await node.dies(0)
        await node.dies(1)
        await node.joins(join(0, pid=7, restarted=True))
        assert node.refused == []
        assert len(node.began) == 2

    node(test)


def test_a_process_that_is_called_off_as_it_comes_lives_until_the_kernel_says_otherwise() -> None:
    async def test(node: Node) -> None:
        source = ExternalProcesses("run-1", HERE, cast(Supervisor, node.watched), lambda: None)
        starting = asyncio.ensure_future(source.start(Process("p0", 0, 0, 1, False)))
        await turn()
        assert source.admit(join(0)) == "p0"
        assert source.admit(join(0, pid=8)) is None
        starting.cancel()
        assert await starting == 1000
        assert node.watched.killed == [1000]
        await source.close()

    node(test)


# --- the rank -----------------------------------------------------------------------------------------------

RANK_0 = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "here",
    "MASTER_PORT": "29500",
}


def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **variables: str) -> None:
    for name in (*RANK_0, "FLASHREC_JOB", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHREC_DIR", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("there", [{}, {"RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_without_a_rank_there_is_nothing_to_join(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: dict[str, str]
) -> None:
    environment(monkeypatch, tmp_path, **there)
    assert external.join_from_environment() is None


@pytest.mark.parametrize(
    ("variables", "kind", "words"),
    [
        ({"RANK": "one"}, UsageError, "RANK is not a number: 'one'"),
        ({"LOCAL_WORLD_SIZE": "1"}, UsageError, "2 ranks, 1 of them on this node"),
        ({}, DaemonUnavailable, "no daemon runs in .*: start `flashrecd` on this node, before the launcher"),
    ],
)
def test_what_is_wrong_with_the_environment_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    kind: type[Exception],
    words: str,
) -> None:
    environment(monkeypatch, tmp_path, **{**RANK_0, **variables})
    with pytest.raises(kind, match=words):
        external.join_from_environment()


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"MASTER_ADDR": "here", "MASTER_PORT": "29500"}, "here:29500"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}, "here:29500"),
        ({"TORCHELASTIC_RUN_ID": "abc", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}, "abc"),
        ({"TORCHELASTIC_RUN_ID": "abc", "FLASHREC_JOB": "mine"}, "mine"),
    ],
)
def test_the_name_of_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], name: str
) -> None:
    environment(monkeypatch, tmp_path, **variables)
    assert external._job_name() == name


def test_a_job_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment(monkeypatch, tmp_path, RANK="0", WORLD_SIZE="1", MASTER_ADDR="here")
    with pytest.raises(UsageError, match="set FLASHREC_JOB, or MASTER_ADDR and MASTER_PORT"):
        external._job_name()


def test_a_strangers_word_makes_no_job() -> None:
    async def lies(node: Node) -> None:
        await node.joins(join(0, pid=LIAR))
        assert node.job is None
        assert not node.began
        assert "which is not so here" in node.refused[0][2]

    node(lies)
