"""Training under other launchers than `flashrec run`: whatever they lose and start again, the bits are torch's."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from flashrec import __version__
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import decode, encode
from flashrec.protocol.places import control_address
from tests.integration.launchers import (
    DEMO,
    RANKS,
    TINY,
    Node,
    by_hand,
    kill,
    node,
    outcomes,
    times_committed,
)
from tests.leaks import wait_until

Reference = Callable[[str], list[dict[str, Any]]]
TRAIN = str(DEMO / "train.py")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The outcome in plain torch, of each parallelism once."""
    made: dict[str, list[dict[str, Any]]] = {}

    def outcome(parallel: str) -> list[dict[str, Any]]:
        if parallel not in made:
            out = tmp_path_factory.mktemp("reference")
            script = [
                sys.executable,
                str(DEMO / "reference.py"),
                *TINY,
                "--parallel",
                parallel,
                "--out",
                str(out),
            ]
            common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            ranks = [
                subprocess.Popen(script, env={**common, **by_hand(rank, "plain")}, stderr=subprocess.PIPE)
                for rank in range(RANKS)
            ]
            for process in ranks:
                _, errors = process.communicate(timeout=120)
                assert process.returncode == 0, errors.decode()
            made[parallel] = outcomes(out)
        return made[parallel]

    return outcome


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Node]:
    run_dir = Path(tempfile.gettempdir()) / "run"
    with node(run_dir, tmp_path / "log") as made:
        yield made
    shutil.rmtree(run_dir)


@pytest.fixture
def steps() -> list[int]:
    """When to strike: anywhere, and in order. Once two steps are committed all have sealed version 1, without which
    the second would not be; before that a loss makes the world start anew, and there is nothing to put back."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    return sorted(random.Random(seed).sample(range(2, 40), 2))


def is_as_in(reference: list[dict[str, Any]], out: Path, num_recoveries: int) -> None:
    """Every bit is, and no more than a step was done again for each recovery."""
    assert outcomes(out) == reference
    for rank in range(RANKS):
        times = times_committed(out, rank)
        assert sorted(times) == list(range(100))
        assert sum(times.values()) - len(times) <= num_recoveries


def test_torchrun_loses_one_rank_and_then_all(
    beside: Node, tmp_path: Path, reference: Reference, steps: list[int]
) -> None:
    script = [TRAIN, *TINY, "--parallel", "fsdp", "--out", str(tmp_path)]
    launcher = beside.torchrun(script, "--standalone")
    victims = beside.trained(steps[0])
    kill(random.choice(victims))
    again = beside.trained(steps[1])
    assert not set(again) & set(victims), "torchrun starts all of them again"
    kill(*again)
    assert beside.ends(launcher) == 0, beside.log.read_text()
    assert len(beside.recoveries()) == 2
    is_as_in(reference("fsdp"), tmp_path, 2)
    assert beside.job() is None


# train.py, which takes no step beyond one while there is a file: orphans would be at their end before torchrun is back.
HELD = """
import pathlib, runpy, sys, time
from flashrec import session
steps = session.steps
def held(*args, **options):
    for step in steps(*args, **options):
        while step.index >= {step} and pathlib.Path({hold!r}).exists():
            time.sleep(0.01)
        yield step
session.steps = held
sys.path.insert(0, {train!r}.rpartition("/")[0])
runpy.run_path({train!r}, run_name="__main__")
"""


def held_at(step: int, folder: Path) -> tuple[list[str], Path]:
    """The script with its arguments, and the file."""
    hold, script = folder / "hold", folder / "held.py"
    hold.touch()
    script.write_text(HELD.format(train=TRAIN, hold=str(hold), step=step))
    return [str(script), *TINY, "--parallel", "ddp", "--out", str(folder)], hold


def test_torchrun_itself_is_killed_and_run_again(
    beside: Node, tmp_path: Path, reference: Reference, steps: list[int]
) -> None:
    script, hold = held_at(steps[0], tmp_path)
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "mine"]
    first = beside.torchrun(script, *meeting)
    orphans = beside.trained(steps[0])
    first.kill()
    first.wait()
    second = beside.torchrun(script, *meeting)
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans), 60)
    hold.unlink()
    assert beside.ends(second) == 0, beside.log.read_text()
    condemned = {line["reason"] for line in beside.daemon.events("suspect")}
    assert condemned == {"its launcher has died, and another has started the rank again"}
    assert len(beside.recoveries()) == 1
    is_as_in(reference("ddp"), tmp_path, 1)
    assert beside.job() is None


def test_one_rank_is_started_again_by_hand_while_strangers_knock(
    beside: Node, tmp_path: Path, reference: Reference, steps: list[int]
) -> None:
    script = [sys.executable, TRAIN, *TINY, "--parallel", "fsdp", "--out", str(tmp_path)]
    ranks = [beside.start(script, by_hand(rank, "mine")) for rank in range(RANKS)]
    pids = beside.trained(steps[0])
    assert pids == [rank.pid for rank in ranks]
    with Stranger(beside) as stranger:
        mine = msg.Join("mine", TRAIN, 1, RANKS, os.getpid(), os.getppid(), False, __version__)
        assert "rank 1 is not in a world of 1" in stranger.asks(replace(mine, world_size=1)).reason
        assert "job 'mine' has 2 ranks, not 3" in stranger.asks(replace(mine, world_size=3)).reason
        assert "a daemon runs one at a time" in stranger.asks(replace(mine, job="yours")).reason
        assert stranger.asks(replace(mine, release="0.0.0")).kind == "version"
        assert "not msgpack" in stranger.says(b"\xc1").reason
        kill(pids[1])
        stranger.send(encode(replace(mine, rank=0)))  # it lives: this is answered when it has for long enough
        ranks[1].wait()
        ranks.append(beside.start(script, by_hand(1, "mine")))
        for process in (ranks[0], ranks[2]):
            assert beside.ends(process) == 0, beside.log.read_text()
        assert stranger.answer().kind == "UsageError"
    assert len(beside.recoveries()) == 1
    is_as_in(reference("fsdp"), tmp_path, 1)
    assert beside.job() is None


def test_the_daemon_is_killed_and_a_rank_after_it(
    beside: Node, tmp_path: Path, reference: Reference, steps: list[int]
) -> None:
    arguments, hold = held_at(steps[0], tmp_path)
    script = [sys.executable, *arguments]
    ranks = [beside.start(script, by_hand(rank, "mine")) for rank in range(RANKS)]
    pids = beside.trained(steps[0])
    beside.replace_daemon()
    assert beside.trained(steps[0]) == pids, "the other has adopted them"
    kill(pids[0])
    ranks[0].wait()
    ranks.append(beside.start(script, by_hand(0, "mine")))
    hold.unlink()
    for process in ranks[1:]:
        assert beside.ends(process) == 0, beside.log.read_text()
    assert len(beside.recoveries()) == 1
    is_as_in(reference("ddp"), tmp_path, 1)
    assert beside.job() is None


class Stranger:
    """Somebody on the control socket."""

    def __init__(self, beside: Node) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(control_address(beside.daemon.run_dir))

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    def answer(self) -> msg.Refused:
        assert self._socket.poll(20_000)
        refused = decode(self._socket.recv())
        assert isinstance(refused, msg.Refused)
        return refused

    def says(self, data: bytes) -> msg.Refused:
        self.send(data)
        return self.answer()

    def asks(self, join: msg.Join) -> msg.Refused:
        return self.says(encode(join))

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
        self._context.term()


# What init() does, without torch: a rank that joins, and ends as the test wants.
LIGHT = """
import sys
from flashrec.external import join_from_environment, report_the_end
link = join_from_environment()
report_the_end(link, lambda: None)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("", 0, "every rank ended with exit code 0; none had called flashrec.protect()"),
        ("sys.exit()", 0, "every rank ended with exit code 0; none had called flashrec.protect()"),
        ("raise ValueError('boom')", 1, "rank 0 failed before its first step: exit code 1: ValueError: boom"),
        ("sys.exit(3)", 3, "rank 0 failed before its first step: exit code 3"),
        ("raise SystemExit(3)", 3, "rank 0 failed before its first step: exit code 3"),
        ("sys.exit('no data')", 1, "rank 0 failed before its first step: exit code 1"),
    ],
    ids=["the end", "exit", "an exception", "exit 3", "SystemExit 3", "exit with words"],
)
def test_how_a_script_ended_is_known(beside: Node, end: str, code: int, reason: str) -> None:
    argv = [sys.executable, "-c", LIGHT.format(end=end)]
    # Where rank 0 ends the job, rank 1 is there only to be waited for.
    ranks = [beside.start(argv, by_hand(rank, "mine")) for rank in range(RANKS if code == 0 else 1)]
    assert [beside.ends(rank) for rank in ranks] == [code] * len(ranks)
    assert wait_until(lambda: beside.daemon.status()["last_job"], 30)
    assert beside.daemon.status()["last_job"]["outcome"] == {"code": code, "reason": reason}


def test_a_job_whose_ranks_are_gone_waits_for_them_and_says_so(beside: Node) -> None:
    argv = [sys.executable, "-c", LIGHT.format(end="import time; time.sleep(600)")]
    rank = beside.start(argv, by_hand(0, "mine"))
    assert wait_until(lambda: (job := beside.job()) and job["ranks"][0]["pid"] == rank.pid)
    job = beside.job()
    assert job is not None
    assert [one["status"] for one in job["ranks"]] == ["starting", "awaited"]
    assert (job["launcher"]["job"], job["launcher"]["pid"], job["launcher"]["alive"]) == (
        "mine",
        os.getpid(),
        True,
    )
    kill(rank.pid)
    assert wait_until(lambda: [one["status"] for one in (beside.job() or {})["ranks"]] == ["awaited"] * 2)


def test_a_process_that_has_not_asked_is_left_alone(beside: Node) -> None:
    innocent = beside.start(["sleep", "600"], {})
    with Stranger(beside) as stranger:
        join = msg.Join("mine", TRAIN, 0, RANKS, innocent.pid, os.getppid(), False, __version__)
        assert (
            f"rank 0 says that it is process {innocent.pid}, which is not so here"
            in stranger.asks(join).reason
        )
    assert innocent.poll() is None
