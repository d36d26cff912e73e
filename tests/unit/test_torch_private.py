"""The private names of torch we use: that they are there, and that they do what we rely on."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from flashrec import torch_private
from flashrec.errors import EnvironmentFault
from flashrec.torch_private import (
    backwards_to_rebuild,
    bucket_digest,
    comm_hook_state,
    ddp_modules,
    has_rebuilt,
    num_writes,
    rebuild_buckets,
    rehearsals,
    reset_buckets,
    settle_buckets,
)


@pytest.fixture(autouse=True)
def lone_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrap(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    return DistributedDataParallel(model, bucket_cap_mb=0.02, **options)


def one_pass(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(torch.ones(2, 64)).sum().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


def test_every_name_is_there() -> None:
    torch_private.check()


@pytest.mark.parametrize(
    "name", ["torch._C._distributed_c10d:Reducer._rebuild_bouquets", "torch.distributed.no_such_module:f"]
)
def test_a_name_that_moved_is_said_with_the_version_that_had_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(torch_private.NAMES, name, "2.13.0")
    with pytest.raises(EnvironmentFault) as raised:
        torch_private.check()
    assert name.replace(":", ".") in str(raised.value)
    assert "2.13.0" in str(raised.value)
    assert torch.__version__ in str(raised.value)


def test_an_attribute_of_ddp_that_moved_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "DDP_ATTRIBUTES", (*torch_private.DDP_ATTRIBUTES, "_no_such_thing"))
    with pytest.raises(EnvironmentFault, match=r"DistributedDataParallel\._no_such_thing"):
        torch_private.check()


def test_object_collectives_are_recognised_below_their_wrappers() -> None:
    names = {code.co_name for code in torch_private.object_collective_codes()}
    assert {"all_gather_object", "broadcast_object_list", "recv_object_list"} <= names


def test_writes_in_place_are_counted_and_nothing_else() -> None:
    tensor = torch.zeros(4)
    before = num_writes(tensor)
    tensor.sum()
    tensor[0].item()
    assert num_writes(tensor) == before
    tensor.add_(1)
    assert num_writes(tensor) > before
    before = num_writes(tensor)
    tensor[1:].zero_()
    assert num_writes(tensor) > before


def test_ddp_modules_are_found_at_any_depth() -> None:
    outer = nn.ModuleDict({"one": wrap(), "plain": nn.Linear(2, 2)})
    assert ddp_modules(outer) == [outer["one"]]
    assert ddp_modules(wrap().module) == []


def test_buckets_are_rebuilt_after_the_first_backward() -> None:
    ddp = wrap()
    fresh = bucket_digest(ddp)
    assert (rebuild_buckets(ddp), has_rebuilt(ddp)) == (False, False)
    one_pass(ddp)
    assert bucket_digest(ddp) == fresh
    assert (rebuild_buckets(ddp), has_rebuilt(ddp)) == (True, True)
    assert bucket_digest(ddp) not in ("", fresh)
    assert not rebuild_buckets(ddp)


def test_rebuilding_by_hand_gives_what_the_next_forward_would() -> None:
    by_hand, by_itself = wrap(), wrap()
    one_pass(by_hand)
    rebuild_buckets(by_hand)
    for _ in range(2):
        one_pass(by_itself)
    assert has_rebuilt(by_itself)
    assert bucket_digest(by_hand) == bucket_digest(by_itself)


def test_the_digest_follows_the_buckets() -> None:
    assert bucket_digest(wrap()) == bucket_digest(wrap())
    wide = DistributedDataParallel(nn.Sequential(nn.Linear(64, 65), nn.Linear(65, 64)), bucket_cap_mb=0.02)
    assert bucket_digest(wide) != bucket_digest(wrap())


def test_the_digest_is_current_long_after_the_logging_has_become_rare() -> None:
    ddp = wrap()
    with torch.no_grad():
        for _ in range(150):
            ddp(torch.ones(2, 64))
    one_pass(ddp)
    for _ in range(3):
        one_pass(ddp)
    other = wrap()
    one_pass(other)
    rebuild_buckets(other)
    assert bucket_digest(ddp) == bucket_digest(other)


KINDS: list[tuple[dict[str, bool], int]] = [
    ({}, 1),
    ({"static_graph": True}, 2),
    ({"find_unused_parameters": True}, 0),
    ({"gradient_as_bucket_view": True}, 1),
]


@pytest.mark.parametrize(("options", "due"), KINDS)
def test_rehearsing_brings_ddp_where_an_undisturbed_run_is(options: dict[str, bool], due: int) -> None:
    assert backwards_to_rebuild(wrap(**options)) == due
    for version in (0, 1, 2, 4):
        rehearsed = wrap(**options)
        assert rehearsals(rehearsed, version) == min(version, due)
        for _ in range(rehearsals(rehearsed, version)):
            one_pass(rehearsed)
        settle_buckets(rehearsed, version)
        # From here on, all of what DDP does must be the same: now, and in the steps to come.
        assert bucket_digest(rehearsed) == digest_before_step(version, **options)
        for later in (version + 1, version + 2):
            one_pass(rehearsed)
            rebuild_buckets(rehearsed)  # as the next forward does
            assert bucket_digest(rehearsed) == digest_before_step(later, **options)


@functools.cache
def digest_before_step(version: int, **options: bool) -> str:
    ddp = wrap(**options)
    for _ in range(version):
        one_pass(ddp)
        rebuild_buckets(ddp)
    return bucket_digest(ddp)


@pytest.mark.parametrize(("options", "due"), KINDS)
@pytest.mark.parametrize("passes", [0, 1, 3])
def test_a_survivor_goes_back_to_the_first_step(options: dict[str, bool], due: int, passes: int) -> None:
    ddp = wrap(**options)
    expected = one_pass(wrap(**options))
    for _ in range(passes):
        one_pass(ddp)
    settle_buckets(ddp, 0)
    assert bucket_digest(ddp) == bucket_digest(wrap(**options))
    assert not has_rebuilt(ddp)
    for version in range(1, 4):
        for ours, theirs in zip(one_pass(ddp), expected, strict=True):
            assert torch.equal(ours, theirs)
        rebuild_buckets(ddp)
        assert bucket_digest(ddp) == digest_before_step(version, **options)


def test_settling_a_survivor_in_the_midst_of_training_changes_nothing() -> None:
    ddp = wrap()
    for _ in range(3):
        one_pass(ddp)
    before = bucket_digest(ddp)
    settle_buckets(ddp, 3)
    assert bucket_digest(ddp) == before


def halve(state, bucket):  # type: ignore[no-untyped-def]  # DDP would compare annotations with types
    state.append("called")
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


def test_a_reset_keeps_communication_hooks() -> None:
    ddp = wrap()
    state: list[str] = []
    ddp.register_comm_hook(state, halve)
    assert comm_hook_state(ddp) == [state]
    halved = one_pass(ddp)
    state.clear()
    reset_buckets(ddp)
    assert all(torch.equal(a, b) for a, b in zip(one_pass(ddp), halved, strict=True))
    assert state
    assert comm_hook_state(ddp) == [state]


@pytest.mark.parametrize("register", [None, default_hooks.fp16_compress_hook])
def test_a_reset_keeps_compression(register: Callable[..., Any] | None) -> None:
    def compressed() -> DistributedDataParallel:
        ddp = wrap()
        if register is None:
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        else:
            ddp.register_comm_hook(None, register)
        return ddp

    ddp = compressed()
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.mul_(1.001)  # so that fp16 loses something
    rounded = one_pass(ddp)
    reset_buckets(ddp)
    assert all(torch.equal(a, b) for a, b in zip(one_pass(ddp), rounded, strict=True))
    plain = wrap()
    plain.load_state_dict(ddp.state_dict())
    assert not all(torch.equal(a, b) for a, b in zip(one_pass(plain), rounded, strict=True))


# --- sharding


def test_names_for_sharding_are_there_and_one_that_moved_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch.distributed.tensor")
    importlib.import_module("torch.distributed.fsdp")
    torch_private.check_sharding()
    monkeypatch.setitem(torch_private.SHARDING_NAMES, "torch.distributed.tensor:DTensor._nowhere", "2.13.0")
    monkeypatch.setitem(torch_private.FSDP_ATTRIBUTES, ("_fsdp_param", "FSDPParam"), ("_no_such_thing",))
    with pytest.raises(EnvironmentFault) as raised:
        torch_private.check_sharding()
    assert "torch.distributed.tensor.DTensor._nowhere (seen in 2.13.0)" in str(raised.value)
    assert "FSDPParam._no_such_thing" in str(raised.value)


def test_what_was_never_imported_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private.SHARDING_NAMES, "torch.distributed.nowhere:f", "2.13.0")
    torch_private.check_sharding()


def test_placements_survive_as_plain_data() -> None:
    tensor = importlib.import_module("torch.distributed.tensor")
    strided = importlib.import_module("torch.distributed.tensor.placement_types")._StridedShard
    placements = (
        tensor.Replicate(),
        tensor.Shard(1),
        tensor.Partial("avg"),
        tensor.Partial(),
        strided(0, split_factor=2),
    )
    wire = torch_private.placements_to_wire(placements)
    assert torch_private.placements_from_wire(wire) == placements
    assert torch_private.placements_from_wire(wire)[4].split_factor == 2


def test_a_shard_is_the_memory_that_fsdp_gathers_from() -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    model = nn.Linear(3, 5)
    fsdp.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with torch.no_grad():
        before = model(torch.ones(1, 3))
        shard = torch_private.local_shard(optimizer.param_groups[0]["params"][0])
        shard.fill_(2.0)
        assert torch.equal(model(torch.ones(1, 3)), before), "still unsharded: what was gathered before"
        torch_private.reset_fsdp(model)
        after = model(torch.ones(1, 3))
    assert not torch.equal(after, before)
    torch_private.reset_fsdp(model)
    torch.testing.assert_close(after[0], model.bias.to_local() + 6.0)


def test_fsdp_is_left_as_between_two_steps() -> None:
    fsdp = importlib.import_module("torch.distributed.fsdp")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fsdp.fully_shard(model[0])
    fsdp.fully_shard(model)
    sharded = list(model.parameters())
    torch_private.reset_fsdp(model)  # before the first forward, too
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 4))
    assert not all(mine is theirs for mine, theirs in zip(model.parameters(), sharded, strict=True))
    shown = torch_private.fsdp_sharded_parameters(model)
    assert [shown[id(one)] for one in model.parameters()] == [*map(_Same, sharded)]
    model.set_requires_gradient_sync(False)
    torch_private.reset_fsdp(model)
    model(torch.ones(1, 3)).sum().backward()
    assert torch_private.unreduced_gradient(torch_private.fsdp_parameters(model))
    torch_private.reset_fsdp(model)
    assert not torch_private.unreduced_gradient(torch_private.fsdp_parameters(model))
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), sharded, strict=True))
    assert all(one.grad is None for one in sharded)


class _Same:
    """Equal to one object only, without comparing the values of tensors."""

    def __init__(self, one: object) -> None:
        self._one = one

    def __eq__(self, other: object) -> bool:
        return self._one is other

    def __hash__(self) -> int:
        return id(self._one)
