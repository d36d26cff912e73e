"""The in-place groups under every parallelism of the demo: formed again, and joined by a replacement.

Without flashrec's session: what is tested is that models, meshes and schedules go on over the groups, and
that a replacement can build its own and rehearse a whole step with nobody connected.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor

import flashrec.warm  # noqa: F401  # here once, not in every rank
import outcome
import parallelism
import recipe
from flashrec import torch_private
from flashrec.errors import UsageError
from flashrec.groups import GroupSet
from tests.integration.rank_processes import Rank, Ranks

STEPS = 5
BROKEN_STEP = 2
SIZE = 4
BASE: dict[str, Any] = {
    "steps": STEPS, "seed": 3, "out": Path("unused"), "batch": 1, "context": 8, "width": 32, "layers": 4,
    "epoch_steps": 3, "workers": 0, "quiet": True, "standby": "forked",
}  # fmt: skip

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero": {"parallel": "zero"},
    "fsdp": {"parallel": "fsdp"},
    "fsdp, mixed": {"parallel": "fsdp", "mixed_precision": True, "frozen": True, "uneven": True, "moe": True},
    "hsdp": {"parallel": "hsdp", "uneven": True},
    "tp": {"parallel": "tp"},
    "tp, uneven": {"parallel": "tp", "uneven": True, "moe": True},
    "pp": {"parallel": "pp", "tied": False},
    "pp, gpipe": {"parallel": "pp", "schedule": "gpipe", "moe": True},
    "pp, interleaved": {"parallel": "pp", "schedule": "interleaved", "layers": 8},
    "tp+fsdp": {"parallel": "tp+fsdp"},
    "pp+fsdp": {"parallel": "pp+fsdp"},
    "pp+fsdp, interleaved": {
        "parallel": "pp+fsdp",
        "schedule": "interleaved",
        "uneven": True,
        "frozen": True,
    },
}


class Job:
    """One rank's training; the batches and the random numbers of a step follow from its number."""

    def __init__(self, rank: Rank, kind: str) -> None:
        self.options = recipe.Options(**{**BASE, **KINDS[kind]})
        self.training = parallelism.build(self.options)
        self.replica = rank.rank // recipe.ranks_per_batch(self.options.parallel, rank.size)
        self.rows = recipe.ranks_per_batch(self.options.parallel, rank.size)
        self.losses: dict[int, str] = {}

    def forward_backward(self, step: int) -> None:
        torch.manual_seed(100 * step + self.replica)
        codes = torch.randint(90, (self.rows, self.options.context + 1))
        loss = self.training.forward_backward(codes[:, :-1], codes[:, 1:])
        self.training.clip_gradients(1.0)
        if loss is not None:
            self.losses[step] = loss.item().hex()

    def apply(self) -> None:
        self.training.optimizer.step()
        self.training.optimizer.zero_grad()

    def held(self) -> dict[str, torch.Tensor]:
        """Every tensor on this rank, as memory."""
        named = outcome.named_tensors(self.training.plain, self.training.optimizer)
        return {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            for name, tensor in named
        }

    def result(self) -> tuple[str, dict[int, str]]:
        found = hashlib.sha256()
        for name, tensor in sorted(self.held().items()):
            found.update(name.encode() + outcome.tensor_digest(tensor).encode())
        return found.hexdigest(), self.losses


def undisturbed(rank: Rank, kind: str) -> Any:
    store = dist.FileStore(str(rank.meeting / "plain"), rank.size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.size)
    job = Job(rank, kind)
    for step in range(STEPS):
        job.forward_backward(step)
        job.apply()
    return job.result()


def record(rank: Rank, which: str) -> Path:
    return rank.meeting / f"{which}-r{rank.rank}"


def disturbed(rank: Rank, kind: str, lost: int | None) -> Any:
    """Cut in the middle of a step and formed again; from then on without the process of rank `lost`."""
    groups = GroupSet()
    groups.start(rank.rank, rank.size)
    groups.form(rank.store(), 0)
    groups.record_to(record(rank, "prelude"))
    job = Job(rank, kind)
    groups.record_to(record(rank, "first"), told_only=True)
    for step in range(STEPS):
        if step == 1:
            groups.record_to(None)
        if step == BROKEN_STEP:
            if lost == rank.rank:
                torch.save(job.held(), rank.meeting / "held")
                groups.close()
                return job.losses
            if rank.rank == (0 if lost is None else (lost + 1) % rank.size):
                groups.abort("a test")  # in the middle of somebody's step
            job.forward_backward(step)
            assert groups.latched is not None
            job.training.optimizer.zero_grad()
            groups.form(rank.store(), 1)
        job.forward_backward(step)
        assert groups.agree([1]) == [1]
        job.apply()
        assert groups.latched is None
    found = job.result()
    groups.close()
    return found


def replacement(rank: Rank, kind: str) -> Any:
    groups = GroupSet()
    groups.start(rank.rank, rank.size)
    groups.play_back(record(rank, "prelude"))
    job = Job(rank, kind)
    groups.play_back(record(rank, "first"), told_only=True)
    job.forward_backward(0)  # what the optimizer would do is left undone
    job.losses.clear()
    for ddp in torch_private.ddp_modules(job.training.model):
        torch_private.settle_buckets(ddp, BROKEN_STEP)
    job.training.optimizer.zero_grad()
    install(job, torch.load(rank.meeting / "held"))
    groups.form(rank.store(), 1)
    for step in range(BROKEN_STEP, STEPS):
        job.forward_backward(step)
        assert groups.agree([1]) == [1]
        job.apply()
    found = job.result()
    groups.close()
    return found


def install(job: Job, held: dict[str, torch.Tensor]) -> None:
    """Stands in for the transfer of state: everything this rank has becomes what its predecessor had."""
    # A step makes the optimizer's state; an expert that nobody has chosen yet has none.
    for name, parameter in job.training.plain.named_parameters():
        if f"optimizer.{name}.step" in held:
            parameter.grad = torch.zeros_like(parameter)
    getattr(job.training.optimizer, "optim", job.training.optimizer).step()
    job.training.optimizer.zero_grad()
    mine = job.held()
    assert mine.keys() == held.keys()
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(held[name])


@pytest.fixture(scope="module")
def plain() -> Callable[[str], Any]:
    """Results of undisturbed runs, each done once."""

    @functools.cache
    def run(kind: str) -> Any:
        with Ranks() as ranks:
            return ranks.results(ranks.start_all(undisturbed, SIZE, kind))

    return run


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "," not in kind])
def test_a_parallelism_goes_on_bit_identical(kind: str, plain: Callable[[str], Any]) -> None:
    with Ranks() as ranks:
        assert ranks.results(ranks.start_all(disturbed, SIZE, kind, None)) == plain(kind)


EVERY_STAGE = ("pp", "pp, interleaved")


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        (kind, lost)
        for number, kind in enumerate(KINDS)
        for lost in (range(SIZE) if kind in EVERY_STAGE else [number % SIZE])
    ],
)
def test_a_replacement_builds_and_rehearses_alone_and_joins_bit_identical(
    kind: str, lost: int, plain: Callable[[str], Any]
) -> None:
    with Ranks() as ranks:
        live = ranks.start_all(disturbed, SIZE, kind, lost)
        before = ranks.hear(live[lost])
        live[lost] = ranks.start(replacement, lost, SIZE, kind)
        # The new process first: were it to fail, the others would wait for it.
        digest, losses = ranks.hear(live[lost])
        found = [
            ranks.hear(live[rank]) if rank != lost else (digest, before | losses) for rank in range(SIZE)
        ]
    assert found == plain(kind)


def without_a_record(rank: Rank) -> str:
    groups = GroupSet()
    groups.start(rank.rank, rank.size)
    job = Job(rank, "pp")
    with pytest.raises(UsageError, match="recv_object_list needs an object from another rank"):
        job.forward_backward(0)
    groups.close()
    return "refused"


def test_without_the_record_a_stage_would_not_know_its_shapes() -> None:
    """Were this not so, the tests above would say nothing about the record of the first step."""
    with Ranks() as ranks:
        assert ranks.hear(ranks.start(without_a_record, 1, SIZE)) == "refused"


# -- a pipeline that was told its shapes --------------------------------------------------------------


def told_shapes(rank: Rank, alone: bool) -> str:
    """Stages that know their shapes vote not to ask each other; integers carry the vote."""
    groups = GroupSet()
    groups.start(rank.rank, rank.size)
    if alone:
        groups.play_back(record(rank, "first"), told_only=True)
    else:
        groups.form(rank.store(), 0)
        groups.record_to(record(rank, "first"), told_only=True)
    metadata = {
        "input_args": torch.zeros(2, 4, requires_grad=rank.rank > 0),
        "output_args": torch.zeros(2, 4, requires_grad=True),
    }
    stage = PipelineStage(
        torch.nn.Linear(4, 4), rank.rank, rank.size, torch.device("cpu"), group=dist.group.WORLD, **metadata
    )
    schedule = Schedule1F1B(stage, rank.size, loss_fn=torch.nn.functional.mse_loss)
    batch = torch.ones(2 * rank.size, 4)
    arguments = [batch] if rank.rank == 0 else []
    schedule.step(*arguments, target=batch)
    assert groups.latched is None
    mode = stage._inference_mode
    groups.close()
    assert mode is not None
    return str(mode.value)


def test_a_pipeline_votes_in_a_rehearsal_as_it_did() -> None:
    with Ranks() as ranks:
        modes = ranks.results(ranks.start_all(told_shapes, 3, False))
        assert len(set(modes)) == 1
        assert modes[0] == InferenceMode.STATIC.value
        for rank in range(3):
            assert ranks.hear(ranks.start(told_shapes, rank, 3, True)) == modes[0]
