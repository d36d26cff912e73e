"""Replica sets from structure, in a world of four that is only pretended: nothing here communicates."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from flashrec.errors import UsageError
from flashrec.state.capture import Captured, capture
from flashrec.state.private import PrivateState
from flashrec.state.replication import ranks_of
from flashrec.state.tensors import decode, encode

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its own torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer

RANK = 2


@pytest.fixture(autouse=True)
def pretended_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=4)
    yield
    dist.destroy_process_group()


def captured_of(model: Any, *, rank: int | None = RANK, **options: Any) -> Captured:
    parameters = [
        one for part in ([model] if isinstance(model, nn.Module) else model) for one in part.parameters()
    ]
    return capture(model, torch.optim.SGD(parameters, lr=1), rank=rank, world_size=4, **options)


def sets_of(captured: Captured) -> dict[str, tuple[int, ...]]:
    return {spec.name: one.ranks for one in captured.rank_layout().sets for spec in one.layout}


def test_what_structure_does_not_tell_is_unique() -> None:
    assert set(sets_of(captured_of(nn.Linear(2, 2))).values()) == {(RANK,)}


def test_the_ranks_of_a_group_are_global_and_ascend() -> None:
    assert ranks_of(dist.group.WORLD) == (0, 1, 2, 3)
    assert ranks_of(dist.new_group([3, 2])) == (2, 3)


def test_parameters_that_ddp_ignores_are_unique() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    sets = sets_of(captured_of(DistributedDataParallel(model)))
    assert sets.pop("model.1.weight") == (RANK,)
    assert set(sets.values()) == {(0, 1, 2, 3)}


def test_ddp_inside_a_model_covers_what_is_below_it() -> None:
    pair = dist.new_group([0, 2])
    model = nn.Sequential(nn.Linear(2, 2), DistributedDataParallel(nn.Linear(2, 2), process_group=pair))
    sets = sets_of(captured_of(model))
    assert sets["model.1.module.weight"] == (0, 2)
    assert sets["model.0.weight"] == (RANK,)


def test_local_sgd_lets_replicas_differ() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )

    ddp = DistributedDataParallel(nn.Linear(2, 2))
    ddp.register_comm_hook(PostLocalSGDState(dist.group.WORLD, dist.group.WORLD, 1), post_localSGD_hook)
    assert set(sets_of(captured_of(ddp)).values()) == {(RANK,)}


@pytest.mark.parametrize(
    ("placements", "ranks"),
    [
        ((Replicate(), Replicate()), (0, 1, 2, 3)),
        ((Replicate(), Shard(0)), (0, 2)),
        ((Shard(0), Replicate()), (2, 3)),
        ((Shard(0), Shard(0)), (2,)),
        ((Shard(1), Replicate()), (2, 3)),
    ],
)
def test_a_dtensor_is_held_along_what_it_is_replicated_on(placements: Any, ranks: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False))
    captured = captured_of(model)
    assert sets_of(captured) == {"model.weight": ranks}
    assert captured.rank_layout().sets[0].layout.specs[0].shape == (2, 2)


def test_a_submesh_says_nothing_of_the_ranks_outside() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh["tp"], [Replicate()], run_check=False))
    assert sets_of(captured_of(model)) == {"model.weight": (2, 3)}


def test_a_sum_that_was_not_taken_is_named() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False))
    with pytest.raises(UsageError, match=r"'model\.weight'.*redistribute"):
        captured_of(model)


def test_the_older_fsdp_is_refused_with_the_newer_one_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.append(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    with pytest.raises(UsageError, match=r"'1'.*fully_shard"):
        captured_of(model)


def test_state_on_another_mesh_than_its_parameter_is_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    captured = capture(model, optimizer, rank=RANK, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    optimizer.state[model.weight]["sum"] = DTensor.from_local(
        torch.ones(2), mesh, [Shard(0)], run_check=False
    )
    with pytest.raises(UsageError, match=r"'optimizer\.state\.0\.sum'.*another mesh"):
        captured.refresh()


# --- hints


def test_a_group_covers_all_that_structure_does_not_tell() -> None:
    pair = dist.new_group([2, 3])
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Sequential(nn.Linear(2, 2), DistributedDataParallel(nn.Linear(2, 2)))
    model.register_parameter(
        "shard", nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
    )
    sets = sets_of(captured_of(model, replicated_over=pair))
    assert sets["model.0.weight"] == (2, 3)
    assert sets["model.1.module.weight"] == (0, 1, 2, 3)
    assert sets["model.shard"] == (RANK,)


def test_modules_and_optimizers_can_be_named() -> None:
    pair = dist.new_group([0, 2])
    model = nn.ModuleDict({"norm": nn.LayerNorm(2), "rest": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.5)
    captured = capture(
        model, optimizer, rank=RANK, world_size=4, replicated_over={model["norm"]: pair, optimizer: None}
    )
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    captured.refresh()
    sets = sets_of(captured)
    assert sets["model.norm.weight"] == (0, 2)
    assert sets["model.rest.weight"] == (RANK,)
    assert sets["optimizer.state.0.momentum_buffer"] == (RANK,)


def test_hints_that_cannot_be_meant_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"\[0, 1\].*rank 2"):
        captured_of(model, replicated_over=FakeGroup([0, 1]))
    with pytest.raises(UsageError, match="not str"):
        captured_of(model, replicated_over={"norm": dist.group.WORLD})
    with pytest.raises(UsageError, match="int, which is no process group"):
        captured_of(model, replicated_over={model: 3})
    with pytest.raises(UsageError, match="not list"):
        captured_of(model, replicated_over=[0, 1])


class FakeGroup(dist.ProcessGroup):
    def __init__(self, ranks: list[int]) -> None:
        super().__init__(0, len(ranks))
        self.ranks = ranks


# --- optimizers, built standbys


def test_state_follows_its_parameter_and_zero_keeps_its_own() -> None:
    for zero in (False, True):
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        optimizer: torch.optim.Optimizer
        if zero:
            optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1, momentum=0.5)
        else:
            optimizer = torch.optim.SGD(ddp.parameters(), lr=1, momentum=0.5)
        captured = capture(ddp, optimizer, rank=RANK, world_size=4)
        keeper = optimizer.optim if zero else optimizer
        keeper.state[ddp.module.weight] = {"momentum_buffer": torch.ones(2, 2)}
        captured.refresh()
        sets = sets_of(captured)
        assert sets["model.weight"] == (0, 1, 2, 3)
        number = [one is ddp.module.weight for one in ddp.parameters()].index(True)
        assert sets[f"optimizer.state.{number}.momentum_buffer"] == ((RANK,) if zero else (0, 1, 2, 3))


def test_state_of_the_whole_optimizer_is_held_as_all_its_parameters_are() -> None:
    ddp, alone = DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
    one = torch.optim.SGD(ddp.parameters(), lr=1)
    both = torch.optim.SGD([*ddp.parameters(), *alone.parameters()], lr=1)
    for optimizer in (one, both):
        optimizer.state["total"] = {"norm": torch.ones(1)}
    sets = sets_of(capture([ddp, alone], [one, both], rank=RANK, world_size=4))
    assert sets["optimizer.0.state.total.norm"] == (0, 1, 2, 3)
    assert sets["optimizer.1.state.total.norm"] == (RANK,)


def test_zero_that_applies_in_backward_is_refused() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1)
    with pytest.raises(UsageError, match="overlap_with_ddp"):
        capture(ddp, optimizer, rank=RANK, world_size=4)


def test_who_has_no_rank_yet_takes_one() -> None:
    captured = captured_of(DistributedDataParallel(nn.Linear(2, 2)), rank=None)
    with pytest.raises(RuntimeError, match="take_rank"):
        captured.rank_layout()
    captured.take_rank(3)
    assert captured.rank_layout().rank == 3
    assert set(sets_of(captured).values()) == {(0, 1, 2, 3)}
    captured.take_rank(1)
    assert captured.rank_layout().rank == 1


def test_fsdp_parameters_are_found_whatever_the_modules_show() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    fully_shard(model)
    before = captured_of(model).rank_layout()
    with torch.no_grad():
        model(torch.ones(1, 3))
    assert not isinstance(model[0].weight, DTensor), "unsharded after a forward"
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(UsageError, match="optimizer was given parameters that fully_shard had gathered"):
        capture(model, optimizer, rank=RANK, world_size=4)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with torch.no_grad():
        model(torch.ones(1, 3))
    assert capture(model, optimizer, rank=RANK, world_size=4).rank_layout() == before


# --- what else meets a DTensor


def test_a_buffer_that_is_a_dtensor_is_private_state_by_its_shard() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Module()
    model.register_buffer("seen", DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False))
    state = PrivateState(model)
    snapshot = decode(encode(state.snapshot()), 1 << 20)
    model.seen.to_local().fill_(5.0)
    assert state.changed_since(snapshot) == ["buffer seen"]
    state.restore(snapshot)
    assert model.seen.to_local().tolist() == [1.0, 1.0]
    assert isinstance(model.seen, DTensor)


def test_a_dtensor_in_an_extra_is_refused_with_what_to_do() -> None:
    mesh = init_device_mesh("cpu", (4,))
    average = {"weight": DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)}
    with pytest.raises(UsageError, match="one more model"):
        encode(average)


def test_a_sum_of_another_kind_is_refused_even_as_a_gradient() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False))
    captured = captured_of(model, include_grads=True)
    model.weight.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    assert captured.refresh()
    assert sets_of(captured)["model.weight.grad"] == (RANK,)
    norm = _NormPartial(2)
    model.weight.grad = DTensor.from_local(torch.ones(2), mesh, [norm], run_check=False)
    with pytest.raises(UsageError, match=r"'model\.weight\.grad'"):
        captured.refresh()
