"""Training on several nodes goes on, bit for bit, when a rank or a whole node is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.cues import Cue, let_go
from chaos.recipe import Recipe
from chaos.reference import Reference
from tests.integration.node_jobs import RANKS_PER_NODE, NodeJob, cluster, running

WORLD_SIZE = 2 * RANKS_PER_NODE
STRUCK = 2  # a rank of the second node
STEP = 4
KINDS = {
    "sealed": Recipe(steps=8, standby="forked", parallel="fsdp"),
    "live": Recipe(steps=8, standby="built", parallel="ddp"),
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with Reference(tmp_path_factory.mktemp("reference")) as made:
        yield made


def hold(place: str) -> Cue:
    return Cue(name="strike", rank=STRUCK, place=place, step=STEP)


def is_as_undisturbed(
    job: NodeJob, recipe: Recipe, reference: Reference, *, struck: tuple[int, ...] = (STEP,)
) -> None:
    """One plan for each of the steps in which it was struck."""
    # Who dies after the gate has not said what the others went on from: in that step, or in the tail of the one
    # before, while a rank that is faster holds in it.
    unsaid = {str(step - behind) for step in struck for behind in (0, 1)}
    undisturbed = reference.run(recipe, WORLD_SIZE)
    expected = {path.name: path.read_text() for path in sorted(undisturbed.glob("outcome.r*.json"))}
    assert len(expected) == WORLD_SIZE
    assert job.outcomes() == expected
    losses = job.losses()
    for path in undisturbed.glob("losses.r*"):
        expected_losses = set(path.read_text().splitlines())
        said = {f"{step} {loss}" for step, loss in losses[path.name].items()}
        assert said <= expected_losses
        assert {line.split()[0] for line in expected_losses - said} <= unsaid
    assert len(job.reasons("plan")) == len(struck), job.story()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_dies_is_replaced_on_its_node(tmp_path: Path, reference: Reference, kind: str) -> None:
    recipe = KINDS[kind]
    with cluster(tmp_path, 3) as nodes, running(tmp_path, nodes, recipe, [hold("backward")]) as job:
        job.until_fired("strike")
        os.kill(job.pid(STRUCK), signal.SIGKILL)
        job.wait()
        is_as_undisturbed(job, recipe, reference)
        assert [job.redone(rank) for rank in range(WORLD_SIZE)] == [[]] * WORLD_SIZE
        assert not job.reasons("node lost")


# Before the gate, where survivors have voted, and after the gate; one with the cluster's key, as between hosts.
@pytest.mark.parametrize(
    ("kind", "place", "bulk"),
    [
        ("sealed", "backward", "encrypted"),
        ("sealed", "vote", None),
        ("sealed", "apply", None),
        ("live", "vote", "plain"),
        ("live", "apply", None),
    ],
)
def test_a_node_that_is_lost_with_all_it_had_costs_one_step_at_most(
    tmp_path: Path, reference: Reference, kind: str, place: str, bulk: str | None
) -> None:
    recipe = KINDS[kind]
    with (
        cluster(tmp_path, 3, bulk=bulk) as nodes,
        running(tmp_path, nodes, recipe, [hold(place)]) as job,
    ):
        job.until_fired("strike")
        job.lose(nodes[1])
        job.wait()
        is_as_undisturbed(job, recipe, reference)
        for rank in range(WORLD_SIZE):
            redone = job.redone(rank)
            assert redone in ([], [STEP - 1], [STEP]) if kind == "sealed" else redone == []
        assert len(job.reasons("node lost")) == 1


def test_a_node_that_keeps_replicas_is_lost_and_others_keep_them(
    tmp_path: Path, reference: Reference
) -> None:
    """Nobody dies, and nothing is done again: ranks wait in their gates until there are other keepers."""
    recipe = KINDS["sealed"]
    with cluster(tmp_path, 3) as nodes, running(tmp_path, nodes, recipe, [hold("backward")]) as job:
        job.until_fired("strike")
        job.lose(nodes[2])
        let_go(tmp_path, "strike")
        job.wait()
        is_as_undisturbed(job, recipe, reference)
        assert [job.redone(rank) for rank in range(WORLD_SIZE)] == [[]] * WORLD_SIZE
        # No collective can fail of that; nor does anybody have to stand still first.
        (reason,) = job.reasons("node lost")
        assert "nothing listens there any more" in reason


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_are_lost_one_after_another(tmp_path: Path, reference: Reference, kind: str) -> None:
    """What was made again of replicas after the first loss is what the second is survived by."""
    recipe, again = KINDS[kind], Cue(name="again", rank=STRUCK, place="backward", step=STEP + 2)
    with cluster(tmp_path, 4) as nodes, running(tmp_path, nodes, recipe, [hold("backward"), again]) as job:
        job.until_fired("strike")
        job.lose(nodes[1])
        job.until_fired("again")
        job.lose(job.home(STRUCK))
        job.wait()
        is_as_undisturbed(job, recipe, reference, struck=(STEP, STEP + 2))
        assert all(len(job.redone(rank)) <= (2 if kind == "sealed" else 0) for rank in range(WORLD_SIZE))
        assert len(job.reasons("node lost")) == 2


@pytest.mark.parametrize("kind", ["sealed", "full"])
def test_every_rank_dies_and_the_nodes_have_what_they_sealed(
    tmp_path: Path, reference: Reference, kind: str
) -> None:
    recipe = KINDS["sealed"] if kind == "sealed" else replace(KINDS["live"], seal_every=1)
    with cluster(tmp_path, 2) as nodes, running(tmp_path, nodes, recipe, [hold("backward")]) as job:
        job.until_fired("strike")
        for pid in [job.pid(rank) for rank in range(WORLD_SIZE)]:
            os.kill(pid, signal.SIGKILL)
        job.wait()
        is_as_undisturbed(job, recipe, reference)
        assert all(len(job.redone(rank)) <= recipe.redone_at_most for rank in range(WORLD_SIZE))
