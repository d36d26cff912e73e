"""A node's daemon dies alone: what it has written down, what the next one says, and what the leader makes of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashrec import __version__
from flashrec.cli.submit import submit_from_here
from flashrec.errors import EnvironmentFault
from flashrec.protocol import agents as ag
from flashrec.protocol import messages as msg
from flashrec.protocol import records as rec
from flashrec.protocol.codec import decode, encode
from flashrec.protocol.jobdir import JobDirectory
from flashrec.protocol.jobfiles import JobFiles
from flashrec.protocol.phase import Phase
from flashrecd import adoption, rejoining
from flashrecd.agent import Agent
from flashrecd.core import events as ev
from flashrecd.core.state import Status
from flashrecd.hosts import Versions
from flashrecd.launching import Process
from flashrecd.partrecords import OrphanedPart, PartRecords, find_part
from flashrecd.place import Place
from flashrecd.preludes import Preludes
from flashrecd.remotehost import RemoteHost
from flashrecd.shards import lingering
from flashrecd.supervise.descendants import process_stat

SUBMIT = submit_from_here("script.py", world_size=4, num_nodes=2)
SHARDS = rec.ShardRecord(17, 18, "tcp://127.0.0.3:1")
MINE = os.getpid()
NOBODY = 1 << 22  # no process has this number
OFFER = msg.Rejoin(
    proc="p3",
    pid=MINE,
    release=__version__,
    job="job",
    rank=2,
    generation=1,
    phase=Phase.COMPUTING,
    version=7,
    can_advance=False,
    claims=None,
    why_sealed="",
    arena_bytes=100,
    built_offered=False,
)


def record(proc: str, pid: int, rank: int | None) -> rec.ProcessRecord:
    stat = process_stat(pid)
    ticks = stat.start_ticks if stat is not None else 0
    return rec.ProcessRecord(proc, pid, ticks, rank, 1, False, True, None, "")


# --- what is written down -----------------------------------------------------------------------------------


def written(parent: Path, notes: list[tuple[str, str]]) -> tuple[JobDirectory, PartRecords]:
    directory = JobDirectory.make("job", parent)
    records = PartRecords(directory.path, lambda event, reason: notes.append((event, reason)))
    records.describe("job.1", "job", SUBMIT, heard=1, address="ipc://x", log_dir=parent)
    return directory, records


def found(parent: Path, notes: list[tuple[str, str]], address: str = "ipc://x") -> OrphanedPart | None:
    return find_part(address, lambda event, reason: notes.append((event, reason)), parent)


def test_a_part_is_found_as_it_was_when_its_daemon_died(tmp_path: Path) -> None:
    notes: list[tuple[str, str]] = []
    directory, records = written(tmp_path, notes)
    JobFiles(directory.path).serves(SHARDS)
    process = Process("p3", 3, 2, 1, False, pid=MINE)
    records.took(process)
    records.took(Process("p5", 5, None, 1, False, pid=MINE))
    records.forgot("p5")
    for number in (2, 3):
        records.heard(number)
    part = found(tmp_path, notes)
    assert part is not None
    assert (part.part, part.heard, part.record.job, part.submit) == ("job.1", 3, "job", SUBMIT)
    assert part.shards == SHARDS
    assert part.processes == (record("p3", MINE, 2),)
    assert found(tmp_path, notes, "ipc://another") is None
    assert notes == []
    # It is no job for a daemon that leads.
    assert adoption.find("ipc://x", lambda event, reason: notes.append((event, reason)), tmp_path) is None
    assert notes == []
    part.directory.leave()
    records.close()
    directory.remove()


def test_what_cannot_be_kept_true_is_not_believed(tmp_path: Path) -> None:
    notes: list[tuple[str, str]] = []
    directory, records = written(tmp_path, notes)
    JobFiles(directory.path).serves(SHARDS)
    (directory.path / "process").rmdir()
    for _ in range(2):
        records.took(Process("p3", 3, 2, 1, False, pid=MINE))
    assert [event for event, _ in notes] == ["no adoption"]
    assert found(tmp_path, notes) is None
    records.close()
    directory.remove()


def test_a_part_without_shards_is_not_adopted(tmp_path: Path) -> None:
    notes: list[tuple[str, str]] = []
    directory, records = written(tmp_path, notes)
    assert found(tmp_path, notes) is None
    assert [event for event, _ in notes] == ["not adopted"]
    records.close()
    directory.remove()


def test_shards_are_served_while_anybody_uses_them_and_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(lingering, "time", SimpleNamespace(monotonic=lambda: now[0]))
    directory = JobDirectory.make("job", tmp_path)
    waits = lingering.Lingering(directory.path, NOBODY, 10.0)

    def after(seconds: float) -> bool:
        now[0] += seconds
        return waits.is_over()

    assert not after(1000)  # a rank, say, holds it
    assert not after(1000)
    assert not directory.leave()
    assert not after(1)
    assert not after(9)
    back = JobDirectory.hold(directory.path)
    assert not after(9)
    assert not back.leave()
    assert not after(1)
    assert after(11)
    waits.leave()
    assert not directory.path.exists()


def test_shards_are_served_while_their_daemon_lives(tmp_path: Path) -> None:
    directory = JobDirectory.make("job", tmp_path)
    waits = lingering.Lingering(directory.path, os.getppid(), 1e-9)
    directory.leave()
    assert not waits.is_over()
    assert not waits.is_over()
    waits.leave()


# --- the next daemon ----------------------------------------------------------------------------------------


class Taken:
    """An agent that has taken over a part with these processes."""

    def __init__(self, tmp_path: Path, processes: list[rec.ProcessRecord]) -> None:
        self.told: list[Any] = []
        self.sent: list[tuple[bytes, Any]] = []
        self.killed: list[str] = []
        self.pids: dict[str, int] = {}
        for folder in ("process", "prelude", "private", "arena"):
            (tmp_path / folder).mkdir()
        self.agent = Agent(
            "job",
            SUBMIT,
            SimpleNamespace(path=tmp_path),  # type: ignore[arg-type]
            Place(
                data_address="127.0.0.3",
                shard_address="ipc://x",
                replica_address="tcp://127.0.0.3:1",
                key_file="",
                plain_bulk=False,
            ),
            address="ipc://y",
            log_dir=tmp_path,
            supervisor=SimpleNamespace(  # type: ignore[arg-type]
                adopt=self._adopt, kill_group=self.killed.append, pids=self.pids
            ),
            shards=SimpleNamespace(),  # type: ignore[arg-type]
            records=PartRecords(tmp_path, lambda event, reason: None),
            tell=self.told.append,
            send=lambda identity, message: self.sent.append((identity, message)),
            ended=lambda: None,
        )
        self.agent.take_over(processes)

    def _adopt(self, proc: str, pid: int, *, start_ticks: int, leads_session: bool) -> None:
        self.pids[proc] = pid

    def close(self) -> None:
        following = self.agent._own._following
        assert following is not None
        following.cancel()


def test_the_leader_hears_what_may_live_and_then_how_the_dead_have_ended(tmp_path: Path) -> None:
    async def live() -> None:
        records = [record("p3", MINE, 2), record("p4", NOBODY, 3), record("p5", MINE, None)]
        taken = Taken(tmp_path, records)
        (tmp_path / "exit-p4").write_bytes(bytes([3]))
        assert taken.told == [ag.PartAdopted((("p3", MINE), ("p4", NOBODY), ("p5", MINE)))]
        assert taken.pids == {"p3": MINE, "p5": MINE}
        assert taken.killed == ["p5"]  # a standby has nobody to wait for
        taken.agent.exited("p5", None, 9)  # it is not known yet what of its output was shown
        assert len(taken.told) == 1
        taken.agent.take(ag.OutputShown(()))
        for _ in range(20):
            await asyncio.sleep(0)
        ends = [one for one in taken.told if isinstance(one, ag.ProcessEnded)]
        assert [(one.proc, one.code) for one in ends] == [("p4", 3), ("p5", None)]
        assert {one.proc for one in taken.told if isinstance(one, ag.OutputEnded)} == {"p4", "p5"}
        taken.close()

    asyncio.run(live())


def test_what_the_leader_had_to_tell_a_rank_follows_its_welcome(tmp_path: Path) -> None:
    async def live() -> None:
        taken = Taken(tmp_path, [record("p3", MINE, 2)])
        agent = taken.agent
        for wrong in (replace(OFFER, pid=NOBODY), replace(OFFER, rank=3), replace(OFFER, job="another")):
            assert agent.rejoin(wrong, b"x") is not None
        abort = msg.Abort(1, "another rank was lost")
        agent.take(ag.ToProcess("p3", encode(abort)))
        assert agent.rejoin(OFFER, b"x") is None
        offers = [one for one in taken.told if isinstance(one, ag.FromProcess)]
        assert [decode(one.data, msg.FROM_PROCESS) for one in offers] == [OFFER]
        assert isinstance(taken.told[taken.told.index(offers[0]) - 1], ag.RankKept)
        assert taken.sent == []  # who offers itself hears no other word
        agent.take(ag.ToProcess("p3", encode(welcome())))
        assert [(identity, type(message)) for identity, message in taken.sent] == [
            (b"x", msg.Welcome),
            (b"x", msg.Abort),
        ]
        assert taken.sent[0][1].daemon_pid == MINE
        taken.close()

    asyncio.run(live())


def welcome() -> msg.Welcome:
    return msg.Welcome(
        proc="p3",
        job="job",
        shm_dir="",
        rank=2,
        world_size=4,
        generation=1,
        replacement=False,
        pull="zmq",
        shard_address="",
        heartbeat_s=1.0,
        daemon_pid=0,
        external=False,
        patience_s=1.0,
    )


# --- the leader ---------------------------------------------------------------------------------------------


class Job:
    """What of a job hears of another node."""

    def __init__(self, processes: list[str]) -> None:
        self.processes = processes
        self.heard: list[tuple[str, int | None, int | None]] = []

    def processes_on(self, node: int) -> list[str]:
        return self.processes

    def exited(self, proc: str, code: int | None, number: int | None) -> None:
        self.heard.append((proc, code, number))

    def output(self, output: msg.Output) -> None:
        pass


def test_what_the_next_daemon_does_not_know_has_ended_or_was_never_started(tmp_path: Path) -> None:
    async def live() -> None:
        job, said, adopted = Job(["p3", "p4", "p6", "p7"]), [], []
        host = RemoteHost(
            "n1",
            "job",
            tell=said.append,
            listener=job,  # type: ignore[arg-type]
            note=lambda event, reason, rank: None,
            over=lambda: None,
            adopted=lambda: adopted.append(len(said)),
            preludes=Preludes(tmp_path),
        )
        processes = {name: Process(name, int(name[1:]), None, 1, False, node=1) for name in job.processes}
        starts = {
            name: asyncio.get_running_loop().create_task(host.start(processes[name])) for name in ("p6", "p7")
        }
        await asyncio.sleep(0)
        host.take(ag.PartOutput(encode(msg.Output(2, "stdout", b"line", "p3", 5))))
        assert host.relayed_bytes > 0
        said.clear()
        host.take(ag.PartAdopted((("p3", 33), ("p7", 77))))
        assert adopted == [0]
        assert said == [ag.OutputShown((("p3", "stdout", 5),))]
        assert host.relayed_bytes == 0
        assert job.heard == [("p4", None, None)]
        assert await starts["p7"] == 77
        with pytest.raises(EnvironmentFault, match="n1 died meanwhile"):
            await starts["p6"]
        async with asyncio.timeout(5):
            await host.ended(processes["p6"])  # nobody will say so

    asyncio.run(live())


def rejoins(
    offer: msg.Rejoin, change: Callable[[Process], None] = lambda process: None
) -> tuple[Any, list[Any], list[Any]]:
    """The answer, what the core hears, and what the rank is told."""
    process = Process("p3", 3, 2, 1, False, node=1, heard=True, pid=MINE)
    change(process)
    fed: list[Any] = []
    said: list[Any] = []
    state = SimpleNamespace(
        status=Status.RUNNING, members=[SimpleNamespace(keepers=())] * 4, why_sealed="fsdp", why_unsealed=""
    )
    job: Any = SimpleNamespace(
        name="job",
        processes={"p3": process},
        core=SimpleNamespace(state=state),
        nodes=SimpleNamespace(keepers=lambda rank, keepers: ((0, "tcp://a"),)),
        procs=SimpleNamespace(
            host=lambda process: SimpleNamespace(kept=lambda rank: Versions((7, 8), (7,))),
            send=lambda proc, message: said.append(message),
        ),
        arena_bytes={},
        welcome=lambda process: said.append("welcome"),
        log=lambda *args: None,
        feed=fed.append,
    )
    return rejoining.rejoined(job, offer), [one for one in fed if not isinstance(one, ev.Heartbeat)], said


def test_a_rank_that_was_undisturbed_is_welcome_and_told_the_regime() -> None:
    refused, fed, said = rejoins(OFFER)
    assert (refused, fed) == (None, [])
    assert said == ["welcome", msg.Regime(True, ((0, "tcp://a"),), "")]


def test_what_a_rank_had_said_to_the_dead_daemon_alone_is_heard() -> None:
    _, fed, _ = rejoins(replace(OFFER, phase=Phase.HELD, can_advance=True, why_unsealed="no room"))
    assert fed == [ev.Unsealed("p3", "no room"), ev.Parked("p3", 1, 7, True, (7, 8), (7,))]
    _, fed, _ = rejoins(replace(OFFER, phase=Phase.LEFT, why_sealed="it communicates"))
    assert fed == [ev.Switched("p3", "it communicates"), ev.Leaving("p3", 1, 7)]


@pytest.mark.parametrize(
    "offer",
    [replace(OFFER, pid=NOBODY), replace(OFFER, rank=1), replace(OFFER, job="x"), replace(OFFER, proc="p4")],
)
def test_a_stranger_is_refused(offer: msg.Rejoin) -> None:
    refused, fed, said = rejoins(offer)
    assert isinstance(refused, msg.Refused)
    assert fed == said == []


def test_who_counts_as_gone_or_is_of_this_node_is_refused() -> None:
    for field, value in (("gone", True), ("node", 0), ("heard", False)):
        refused, fed, said = rejoins(OFFER, lambda process: setattr(process, field, value))  # noqa: B023
        assert isinstance(refused, msg.Refused)
        assert fed == said == []
