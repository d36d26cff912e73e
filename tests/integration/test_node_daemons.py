"""A daemon that dies alone, on a node that another leads: its ranks train on, and the next daemon adopts them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos import pace
from chaos.recipe import Recipe
from chaos.reference import Reference
from flashrecd.supervise.descendants import descendants_of, process_stat
from tests.integration.commands import DEADLINE_S, daemon
from tests.integration.node_jobs import RANKS_PER_NODE, NodeJob, cluster, free_port, running
from tests.leaks import wait_until

WORLD_SIZE = 2 * RANKS_PER_NODE
STRUCK = 2  # a rank of the second node, whose daemon dies
NODE, SPARE = 1, 2
STEP = 4
# Nobody stands still for long, or the node is awaited, and given up.
KINDS = {
    "sealed": Recipe(steps=40, standby="forked", parallel="fsdp", paced=True),
    "live": Recipe(steps=40, standby="built", parallel="ddp", paced=True),
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with Reference(tmp_path_factory.mktemp("reference")) as made:
        yield made


def until_step(job: NodeJob, step: int) -> None:
    path = job.out / f"commits.r{STRUCK}"
    done = wait_until(lambda: path.exists() and len(path.read_text().splitlines()) >= step, DEADLINE_S)
    assert done, job.story()
    assert job.process.poll() is None, job.story()


def pids(job: NodeJob) -> list[int]:
    return [job.pid(rank) for rank in range(WORLD_SIZE)]


def lives(pid: int) -> bool:
    """Its daemon has died, so its zombie may be nobody's."""
    stat = process_stat(pid)
    return stat is not None and stat.state != "Z"


def is_as_undisturbed(job: NodeJob, recipe: Recipe, reference: Reference) -> None:
    undisturbed = reference.run(recipe, WORLD_SIZE)
    expected = {path.name: path.read_text() for path in sorted(undisturbed.glob("outcome.r*.json"))}
    assert len(expected) == WORLD_SIZE
    assert job.outcomes() == expected
    job.losses()  # a step that was done again was done alike


@pytest.mark.parametrize(("kind", "num_daemons"), [("sealed", 1), ("live", 2)])
def test_the_next_daemon_adopts_what_runs_and_replaces_what_dies_after_it(
    tmp_path: Path, reference: Reference, kind: str, num_daemons: int
) -> None:
    recipe = KINDS[kind]
    with cluster(tmp_path, 3) as nodes, running(tmp_path, nodes, recipe, []) as job:
        until_step(job, STEP)
        before = pids(job)
        with contextlib.ExitStack() as daemons:
            for number in range(1, num_daemons + 1):
                job.kill_daemon(NODE)
                daemons.enter_context(job.daemon_again(NODE))
                all_back = wait_until(lambda n=number: len(job.reasons("adopted")) == n * RANKS_PER_NODE)  # type: ignore[misc]
                assert all_back, job.story()
            assert pids(job) == before
            assert not job.reasons("plan"), job.story()
            assert [job.redone(rank) for rank in range(WORLD_SIZE)] == [[]] * WORLD_SIZE
            os.kill(before[STRUCK], signal.SIGKILL)
            pace.allow(job.out, recipe.steps)
            job.wait()
            assert job.status()["ranks"][STRUCK]["node"] == "n1"
            assert len(job.reasons("plan")) == 1, job.story()
            assert not job.reasons("node lost")
        is_as_undisturbed(job, recipe, reference)
        assert all(len(job.redone(rank)) <= 1 for rank in range(WORLD_SIZE))


def test_a_daemon_that_comes_too_late_ends_the_ranks_it_finds_and_is_a_spare(
    tmp_path: Path, reference: Reference
) -> None:
    """A rank died while it was down, which nobody there could replace."""
    recipe = KINDS["sealed"]
    with cluster(tmp_path, 3) as nodes, running(tmp_path, nodes, recipe, []) as job:
        until_step(job, STEP)
        before = pids(job)
        job.kill_daemon(NODE)
        os.kill(before[STRUCK], signal.SIGKILL)
        assert wait_until(lambda: job.reasons("running")[1:]), job.story()
        assert len(job.reasons("node lost")) == 1
        assert lives(before[STRUCK + 1])
        with job.daemon_again(NODE):
            assert wait_until(lambda: "node n1 is a spare" in job.reasons("node joined")), job.story()
            assert not lives(before[STRUCK + 1])
            pace.allow(job.out, recipe.steps)
            job.wait()
        is_as_undisturbed(job, recipe, reference)
        assert all(len(job.redone(rank)) <= 1 for rank in range(WORLD_SIZE))
        assert len(job.reasons("plan")) == 1, job.story()


def test_without_a_daemon_ranks_train_to_the_end_and_what_is_left_ends_with_the_next(
    tmp_path: Path, reference: Reference
) -> None:
    """The leader cannot know that they have come to their end, nor let them go."""
    recipe = KINDS["sealed"]
    with cluster(tmp_path, 3) as nodes, running(tmp_path, nodes, recipe, []) as job:
        until_step(job, STEP)
        before = pids(job)
        job.kill_daemon(NODE)
        pace.allow(job.out, recipe.steps)
        job.wait()
        is_as_undisturbed(job, recipe, reference)
        with job.daemon_again(NODE):
            left = before[STRUCK : STRUCK + RANKS_PER_NODE]
            assert wait_until(lambda: not any(map(lives, left))), job.story()


@pytest.mark.parametrize("where", [NODE, 0])
def test_a_shard_server_that_is_frozen_is_replaced_and_training_goes_on(
    where: int, tmp_path: Path, reference: Reference
) -> None:
    """Votes wait for what it keeps; its connections stay open, and nobody else would know."""
    recipe = KINDS["sealed"]
    with cluster(tmp_path, 3) as nodes, running(tmp_path, nodes, recipe, []) as job:
        until_step(job, STEP)
        (frozen,) = (pid for pid in descendants_of(nodes[where].pid) if is_shard_server(pid))
        os.kill(frozen, signal.SIGSTOP)
        pace.allow(job.out, recipe.steps)
        job.wait()
        reasons = [line["reason"] for line in nodes[where].events("shard server")]
        assert len([reason for reason in reasons if "is killed" in reason]) == 1, reasons
        is_as_undisturbed(job, recipe, reference)
        assert not job.reasons("plan")
        assert not job.reasons("node lost")
        assert not lives(frozen)


def is_shard_server(pid: int) -> bool:
    return b"flashrecd.shards" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_spares_daemon_is_adopted_with_the_replicas_it_keeps(tmp_path: Path, reference: Reference) -> None:
    """Its standbys end with its daemon, and there are others before they are needed."""
    recipe = KINDS["sealed"]
    with cluster(tmp_path, 3) as nodes, running(tmp_path, nodes, recipe, []) as job:
        until_step(job, STEP)
        job.kill_daemon(SPARE)
        with job.daemon_again(SPARE):
            assert wait_until(lambda: job.reasons("node adopted")), job.story()
            assert not job.reasons("plan"), job.story()
            job.lose(nodes[NODE])
            pace.allow(job.out, recipe.steps)
            job.wait()
            assert job.status()["ranks"][STRUCK]["node"] == "n2"
        is_as_undisturbed(job, recipe, reference)
        assert all(len(job.redone(rank)) <= 1 for rank in range(WORLD_SIZE))
        assert len(job.reasons("plan")) == len(job.reasons("node lost")) == 1, job.story()


def test_without_a_daemon_and_a_spare_the_job_ends(tmp_path: Path) -> None:
    recipe = KINDS["sealed"]
    with cluster(tmp_path, 2) as nodes, running(tmp_path, nodes, recipe, []) as job:
        until_step(job, STEP)
        left = pids(job)[STRUCK : STRUCK + RANKS_PER_NODE]
        job.kill_daemon(NODE)
        pace.allow(job.out, recipe.steps)
        assert wait_until(lambda: job.process.poll() is not None, DEADLINE_S), job.story()
        assert job.process.poll() == 1, job.story()
        assert "no node has room for rank 2" in job.story()
        with job.daemon_again(NODE):
            assert wait_until(lambda: not any(map(lives, left))), job.story()


def test_a_member_that_cannot_join_says_so_to_who_started_it(tmp_path: Path) -> None:
    with daemon(tmp_path / "n1", "--join", f"127.0.0.1:{free_port()}", "--name", "n1") as alone:
        assert wait_until(lambda: "nobody listens there; trying on" in alone.log.read_text()), (
            alone.log.read_text()
        )
