"""The in-place groups: real processes, real gloo, real failures."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flashrec import torch_private
from flashrec.errors import EnvironmentFault, GroupsAborted, StepAbandoned, UsageError
from flashrec.groups import GateBroken, GroupSet
from tests.integration.rank_processes import DEADLINE_S, Rank, Ranks, descriptors, threads


def started(rank: Rank, **options: Any) -> GroupSet:
    groups = GroupSet(**options)
    groups.start(rank.rank, rank.size)
    return groups


def formed(rank: Rank, generation: int = 0, **options: Any) -> GroupSet:
    groups = started(rank, **options)
    groups.form(rank.store(), generation)
    return groups


# -- every collective gives what plain gloo gives ---------------------------------------------------


def every_collective(rank: int, size: int) -> dict[str, Any]:
    """Results of each collective gloo has, by torch's public functions; called with groups made."""
    mine = torch.arange(4, dtype=torch.float32) + rank
    found: dict[str, Any] = {}

    def out(numel: int = 4) -> torch.Tensor:
        return torch.full((numel,), -1.0)

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        tensor = mine.clone()
        dist.all_reduce(tensor, op)
        found[f"all_reduce {op}"] = tensor
    work = dist.all_reduce(found.setdefault("async", mine.clone()), async_op=True)
    assert work is not None
    work.get_future().wait()
    outputs = [out() for _ in range(size)]
    dist.all_gather(outputs, mine)
    found["all_gather"] = outputs
    whole = out(4 * size)
    dist.all_gather_single(whole, mine)
    found["all_gather_single"] = whole
    with warnings.catch_warnings():  # the old names, which libraries still use
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_into_tensor(found.setdefault("old all_gather", out(4 * size)), mine)
        dist.reduce_scatter_tensor(found.setdefault("old reduce_scatter", out()), torch.arange(4.0 * size))
    part = out()
    dist.reduce_scatter(part, [mine * k for k in range(size)])
    found["reduce_scatter"] = part
    part = out()
    dist.reduce_scatter_single(part, torch.arange(4.0 * size) * (rank + 1))
    found["reduce_scatter_single"] = part
    tensor = mine.clone()
    dist.broadcast(tensor, 1)
    found["broadcast"] = tensor
    tensor = mine.clone()
    dist.reduce(tensor, 0)
    found["reduce"] = tensor if rank == 0 else None
    outputs = [out() for _ in range(size)]
    dist.gather(mine, outputs if rank == 0 else None, dst=0)
    found["gather"] = outputs
    part = out()
    dist.scatter(part, [mine * k for k in range(size)] if rank == 0 else None, src=0)
    found["scatter"] = part
    whole = out(2 * size)
    dist.all_to_all_single(whole, torch.arange(2.0 * size) + 10 * rank)
    found["all_to_all_single"] = whole
    outputs = [out(1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.tensor([10.0 * rank + k]) for k in range(size)])
    found["all_to_all"] = outputs
    if rank == 0:
        dist.send(mine, 1)
        found["recv any"] = torch.tensor(dist.recv(found.setdefault("received", out())))
    elif rank == 1:
        dist.recv(found.setdefault("received", out()), 0)
        dist.send(mine, 0)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["all_gather_object"] = objects
    objects = [f"from {rank}", rank]
    dist.broadcast_object_list(objects, src=1)
    found["broadcast_object_list"] = objects
    summed = functional.all_reduce(mine, "sum", dist.group.WORLD)
    found["functional all_reduce"] = summed + 0
    gathered = functional.all_gather_single(mine, 0, dist.group.WORLD)
    found["functional all_gather"] = gathered + 0
    dist.barrier()
    pair = dist.new_group([0, 1])
    if rank < 2:
        tensor = mine.clone()
        dist.all_reduce(tensor, group=pair)
        found["subgroup"] = tensor
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def collectives_on_gloo(rank: Rank) -> Any:
    store = dist.FileStore(str(rank.meeting / "plain"), rank.size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.size)
    return every_collective(rank.rank, rank.size)


def collectives_in_place(rank: Rank) -> Any:
    counts: list[tuple[str, int]] = []
    groups = formed(rank, on_collective=lambda op, count: counts.append((op, count)))
    found = every_collective(rank.rank, rank.size)
    assert groups.latched is None
    assert counts[-1] == (groups.last_collective, groups.collectives)
    assert [count for _, count in counts] == list(range(1, len(counts) + 1))
    groups.close()
    return found


def test_collectives_give_what_plain_gloo_gives() -> None:
    with Ranks() as ranks:
        plain = ranks.start_all(collectives_on_gloo, 3)
        in_place = ranks.start_all(collectives_in_place, 3)
        assert ranks.results(in_place) == ranks.results(plain)


def wrong_argument(rank: Rank) -> str:
    groups = formed(rank)
    with pytest.raises(ValueError, match="type"):
        dist.all_gather([torch.zeros(2, dtype=torch.int64)] * rank.size, torch.zeros(2))
    with pytest.raises(RuntimeError, match="Tag"):
        dist.send(torch.zeros(2), (rank.rank + 1) % rank.size, tag=-1)
    assert groups.latched is None
    groups.close()
    return "raised"


def test_a_wrong_argument_raises_and_is_not_taken_for_a_fault() -> None:
    with Ranks() as ranks:
        assert ranks.results(ranks.start_all(wrong_argument, 2)) == ["raised"] * 2


# -- detached -------------------------------------------------------------------------------------


def detached_collectives(rank: Rank) -> dict[str, Any]:
    groups = started(rank)
    found: dict[str, Any] = {}
    mine = torch.tensor([1.0, 2.0])
    found["sum"] = mine.clone()
    dist.all_reduce(found["sum"])
    found["max"] = mine.clone()
    dist.all_reduce(found["max"], dist.ReduceOp.MAX)
    found["all_gather"] = [torch.full((2,), -1.0) for _ in range(3)]
    dist.all_gather(found["all_gather"], mine)
    found["into"] = torch.full((6,), -1.0)
    dist.all_gather_single(found["into"], mine)
    found["scattered"] = torch.full((1,), -1.0)
    dist.reduce_scatter_single(found["scattered"], torch.tensor([1.0, 2.0, 3.0]))
    found["broadcast"] = mine.clone()
    dist.broadcast(found["broadcast"], 0)
    found["received"] = torch.full((2,), 7.0)
    dist.recv(found["received"], 0)
    objects: list[Any] = [None] * 3
    dist.all_gather_object(objects, "mine")
    found["objects"] = objects
    dist.barrier()
    pair = dist.new_group([0, 1])
    found["pair"] = mine.clone()
    dist.all_reduce(found["pair"], group=pair)
    with pytest.raises(UsageError, match="broadcast_object_list"):
        dist.broadcast_object_list([None], src=0)
    assert not groups.formed
    with pytest.raises(GateBroken):
        groups.agree([1])
    groups.close()
    return {name: _plain(value) for name, value in found.items()}


def test_detached_every_peer_seems_to_hold_my_data() -> None:
    with Ranks() as ranks:
        assert ranks.hear(ranks.start(detached_collectives, 1, 3)) == {
            "sum": [3.0, 6.0],
            "max": [1.0, 2.0],
            "all_gather": [[1.0, 2.0]] * 3,
            "into": [1.0, 2.0] * 3,
            "scattered": [6.0],
            "broadcast": [1.0, 2.0],
            "received": [0.0, 0.0],
            "objects": ["mine"] * 3,
            "pair": [2.0, 4.0],
        }


# -- failures are latched -------------------------------------------------------------------------


def survivor_of_a_death(rank: Rank) -> dict[str, Any]:
    groups = formed(rank)
    told: list[str] = []
    groups.on_latch = told.append
    rank.tell("formed")
    if rank.rank == 2:
        time.sleep(DEADLINE_S)  # until it is killed
    counts = torch.tensor([5, 6])
    late = dist.all_reduce(torch.ones(100_000), async_op=True)
    dist.all_reduce(counts)
    assert late is not None
    late.wait()
    late.get_future().wait()
    found: dict[str, Any] = {
        "latched": groups.latched is not None,
        "told": len(told),
        "counts": counts.tolist(),
    }
    # Whatever comes now is finished at once, with harmless integers.
    sizes = [torch.tensor([9])] * rank.size
    dist.all_gather(sizes, torch.tensor([4]))
    found["sizes"] = [int(size) for size in sizes]
    assert dist.all_reduce(torch.ones(2), async_op=True).is_completed()
    dist.barrier()
    assert dist.recv(torch.zeros(1)) != rank.rank
    with pytest.raises(StepAbandoned):
        dist.all_gather_object([None] * rank.size, "mine")
    with pytest.raises(StepAbandoned):
        dist.broadcast_object_list([None], src=0)
    with pytest.raises(GateBroken):
        groups.agree([1])
    found["still told"] = len(told)
    groups.close()
    return found


def test_a_death_is_latched_and_never_raised_into_the_model() -> None:
    with Ranks() as ranks:
        all_ranks = ranks.start_all(survivor_of_a_death, 3)
        assert ranks.results(all_ranks) == ["formed"] * 3
        ranks.signal(all_ranks[2], signal.SIGKILL)
        for found in ranks.results(all_ranks[:2]):
            assert found == {
                "latched": True,
                "told": 1,
                "counts": [0, 0],
                "sizes": [0] * 3,
                "still told": 1,
            }


def object_collective_in_flight(rank: Rank) -> str:
    groups = formed(rank)
    rank.tell("formed")
    if rank.rank == 1:
        time.sleep(DEADLINE_S)
    with pytest.raises(StepAbandoned, match="all_gather_object"):
        catching_everything(rank.size)
    groups.close()
    return "abandoned"


def catching_everything(size: int) -> None:
    try:
        dist.all_gather_object([None] * size, "mine")
    except Exception:  # a script's own: it does not catch the signal
        return


def test_an_object_collective_under_way_abandons_the_step() -> None:
    with Ranks() as ranks:
        both = ranks.start_all(object_collective_in_flight, 2)
        assert ranks.results(both) == ["formed"] * 2
        ranks.signal(both[1], signal.SIGKILL)
        assert ranks.hear(both[0]) == "abandoned"


def old_work(rank: Rank) -> str:
    groups = formed(rank)
    pending = dist.all_reduce(torch.ones(4), async_op=True) if rank.rank == 0 else None
    groups.abort("a test")
    assert groups.latched == "a test"
    groups.form(rank.store(), 1)
    if pending is not None:
        pending.wait()  # fails: its peer never took part, and its generation is over
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert groups.latched is None
    groups.close()
    return str(tensor.item())


def test_failed_work_of_an_older_generation_latches_nothing() -> None:
    with Ranks() as ranks:
        assert ranks.results(ranks.start_all(old_work, 2)) == ["2.0"] * 2


# -- abort releases every wait on a silent peer ----------------------------------------------------


def waits_in(rank: Rank, where: str) -> str:
    groups = started(rank) if where == "store" else formed(rank)
    rank.tell("ready")
    assert rank.hear() == "go"
    aborter = threading.Thread(target=_abort_when_told, args=(rank, groups))
    aborter.start()
    try:
        if where == "store":
            with pytest.raises(GroupsAborted, match="silent peer"):
                groups.form(rank.store(), 1)
        elif where == "gate":
            with pytest.raises(GateBroken):
                groups.agree([1, 2])
        else:
            dist.all_reduce(torch.ones(1_000_000))
    finally:
        aborter.join()
    assert groups.latched == "silent peer"
    groups.close()
    return "released"


def _abort_when_told(rank: Rank, groups: GroupSet) -> None:
    rank.tell("waiting soon")
    assert rank.hear() == "abort"
    groups.abort("silent peer")


class _FallsSilent:
    """A store through which a rank publishes its address, and then stops as if by SIGSTOP."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._store = rank.store()

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [self._store.get(key) for key in keys]
        if self._rank.rank == 1:
            self._rank.tell("published")
            os.kill(os.getpid(), signal.SIGSTOP)
        return found

    def abort(self) -> None:
        self._store.abort()


@pytest.mark.parametrize("where", ["collective", "gate", "store"])
def test_abort_releases_a_rank_that_waits_for_a_stopped_peer(where: str) -> None:
    with Ranks() as ranks:
        waiter, silent = ranks.start_all(waits_in, 2, where)
        assert ranks.results([waiter, silent]) == ["ready"] * 2
        ranks.signal(silent, signal.SIGSTOP)
        ranks.tell(waiter, "go")
        assert ranks.hear(waiter) == "waiting soon"
        time.sleep(0.3)  # well into the wait; were it earlier, abort would have to work all the same
        ranks.tell(waiter, "abort")
        assert ranks.hear(waiter) == "released"


@pytest.mark.parametrize("silent_address", ["127.0.0.1", "127.0.0.9"])
def test_abort_releases_a_rank_whose_peer_stopped_while_connecting(silent_address: str) -> None:
    # gloo lets the higher address connect to the lower, so one of the two waits passively.
    with Ranks() as ranks:
        waiter = ranks.start(connecting, 0, 2, "127.0.0.5")
        silent = ranks.start(connecting, 1, 2, silent_address)
        assert ranks.hear(waiter) == "waiting soon"
        assert ranks.hear(silent) == "published"
        time.sleep(0.3)
        ranks.tell(waiter, "abort")
        assert ranks.hear(waiter) == "released"


def connecting(rank: Rank, address: str) -> str:
    groups = started(rank)
    aborter = threading.Thread(target=_abort_when_told, args=(rank, groups), daemon=True)
    if rank.rank == 0:
        aborter.start()
    store: Any = _FallsSilent(rank)
    # Where this side only has to connect, the stopped peer's kernel accepts for it, and the wait is
    # in the first thing ranks say to each other.
    with pytest.raises(GroupsAborted, match="silent peer"):
        groups.form(store, 1, address=address)
    aborter.join()
    groups.close()
    return "released"


def inside_a_message(rank: Rank) -> str:
    groups = formed(rank)
    rank.tell("formed")
    assert rank.hear() == "go"
    large = torch.ones(16_000_000)
    _narrow_connections()  # so that it is still on its way when the peer stops
    work = dist.isend(large, 0) if rank.rank else dist.irecv(large, 1)
    assert work is not None
    aborter = threading.Thread(target=_abort_when_told, args=(rank, groups))
    aborter.start()
    work.wait()
    aborter.join()
    assert groups.latched == "silent peer"
    with pytest.raises(GateBroken):
        groups.agree([1])
    groups.detach()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return str(tensor.item())


def _narrow_connections() -> None:
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with sock:
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def test_abort_releases_a_rank_in_the_middle_of_a_message() -> None:
    # gloo itself would leave it waiting for the rest of the message until the time-out.
    with Ranks() as ranks:
        waiter, silent = ranks.start_all(inside_a_message, 2)
        assert ranks.results([waiter, silent]) == ["formed"] * 2
        ranks.tell(silent, "go")
        assert ranks.hear(silent) == "waiting soon"
        ranks.tell(waiter, "go")
        assert ranks.hear(waiter) == "waiting soon"
        time.sleep(0.1)
        ranks.signal(silent, signal.SIGSTOP)
        time.sleep(0.1)
        ranks.tell(waiter, "abort")
        assert ranks.hear(waiter) == "2.0"


def broken_at_any_moment(rank: Rank) -> float:
    groups = started(rank)
    moments = random.Random(0)
    for generation in range(40):
        groups.form(rank.store(), generation)
        # As the daemon would: both are told, but not in the same moment.
        delay_s = moments.uniform(0, 0.004) + 0.01 * (rank.rank == 0)
        teller = threading.Timer(delay_s, groups.abort, ["cut in the middle of things"])
        teller.start()
        works = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(6)]
        for work in works:
            assert work is not None
            if generation % 3 == 0:
                work.get_future().wait()
            elif generation % 3 == 1:
                work.wait()
        teller.join()
        if generation % 5 == 0:
            groups.detach()
    groups.form(rank.store(), 40)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    groups.close()
    return tensor.item()


def test_ranks_form_again_whatever_was_on_its_way() -> None:
    # gloo forgets whoever waits for a message of which a part has arrived when the connection breaks;
    # in forty tries that happens, to works and to futures.
    with Ranks() as ranks:
        assert ranks.results(ranks.start_all(broken_at_any_moment, 2)) == [2.0, 2.0]


def aborted_before(rank: Rank) -> str:
    groups = started(rank)
    groups.abort("it is over already", generation=3)
    with pytest.raises(GroupsAborted, match="over already"):
        groups.form(rank.store(), 3)
    groups.form(rank.store(), 4)
    groups.abort("late news of an old generation", generation=3)
    assert groups.latched is None
    with pytest.raises(UsageError, match="generation 4"):
        groups.form(rank.store(), 4)
    groups.close()
    return "ok"


def test_abort_names_a_generation_and_touches_no_other() -> None:
    with Ranks() as ranks:
        assert ranks.hear(ranks.start(aborted_before, 0, 1)) == "ok"


# -- models go on through a forming ---------------------------------------------------------------


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))


def wrapped(kind: str, rank: Rank) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tiny_model()
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (rank.size,), mesh_dim_names=("shard",))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        # Small buckets: several, and other ones after the first backward.
        model = DistributedDataParallel(model, bucket_cap_mb=0.001, static_graph=kind == "static ddp")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def one_step(model: nn.Module, step: int, rank: Rank) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank.rank))
    model.zero_grad()
    model(x).pow(2).mean().backward()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found.update(local.detach().numpy().tobytes())
    return found.hexdigest()


STEPS = 5


def undisturbed(rank: Rank, kind: str) -> str:
    store = dist.FileStore(str(rank.meeting / "plain"), rank.size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.size)
    model, optimizer = wrapped(kind, rank)
    for step in range(STEPS):
        one_step(model, step, rank)
        optimizer.step()
    return digest(model, optimizer)


def formed_again(rank: Rank, kind: str, broken_step: int) -> str:
    groups = formed(rank)
    model, optimizer = wrapped(kind, rank)
    for step in range(STEPS):
        if step == broken_step:
            if rank.rank == 0:  # cut in the middle of somebody's backward
                groups.abort("a test")
            one_step(model, step, rank)
            assert groups.latched is not None
            groups.form(rank.store(), 1)
        one_step(model, step, rank)
        assert groups.agree([1]) == [1]
        optimizer.step()
    found = digest(model, optimizer)
    groups.close()
    return found


@pytest.mark.parametrize(("kind", "broken_step"), [("ddp", 0), ("ddp", 3), ("static ddp", 2), ("fsdp", 3)])
def test_training_goes_on_bit_identical_after_forming_again(kind: str, broken_step: int) -> None:
    with Ranks() as ranks:
        plain = ranks.start_all(undisturbed, 2, kind)
        again = ranks.start_all(formed_again, 2, kind, broken_step)
        assert ranks.results(again) == ranks.results(plain)


# -- a replacement joins --------------------------------------------------------------------------


def rehearse(model: nn.Module, rank: Rank, version: int) -> None:
    """Bring a replacement's DDP, alone, to where an undisturbed run has it before step `version`."""
    for ddp in torch_private.ddp_modules(model):
        for _ in range(torch_private.rehearsals(ddp, version)):
            one_step(model, 0, rank)


def settle(model: nn.Module, version: int) -> None:
    for ddp in torch_private.ddp_modules(model):
        torch_private.settle_buckets(ddp, version)


def pull_from(root: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Stands in for the transfer of state: everyone takes it from `root`."""
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for name in ("step", "exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros(()) if name == "step" else torch.zeros_like(parameter)
            dist.broadcast(state[name], root)
        dist.broadcast(parameter.detach(), root)


def train_with_a_loss(rank: Rank, kind: str, lost_step: int, fails_early: bool) -> str:
    """Ranks of which rank 1 is killed in `lost_step`."""
    groups = formed(rank)
    model, optimizer = wrapped(kind, rank)
    for step in range(STEPS):
        if step == lost_step:
            rank.tell("at the step")
            if rank.rank == 1:
                time.sleep(DEADLINE_S)
            if rank.rank == 2 and fails_early:
                groups.abort("told before it had begun")
            else:
                one_step(model, step, rank)
            assert groups.latched is not None
            with pytest.raises(GateBroken):
                groups.agree([1])
            settle(model, step)
            rank.tell(torch_private.bucket_digest(torch_private.ddp_modules(model)[0]))
            groups.form(rank.store(), 1)
            if lost_step:
                pull_from(0, model, optimizer)
        one_step(model, step, rank)
        assert groups.agree([1]) == [1]
        optimizer.step()
    found = digest(model, optimizer)
    groups.close()
    return found


def replacement(rank: Rank, kind: str, from_step: int, rehearses_more: bool) -> str:
    groups = started(rank)
    model, optimizer = wrapped(kind, rank)
    rehearse(model, rank, from_step + rehearses_more)
    settle(model, from_step)
    rank.tell(torch_private.bucket_digest(torch_private.ddp_modules(model)[0]))
    groups.form(rank.store(), 1)
    if from_step:
        pull_from(0, model, optimizer)
    for step in range(from_step, STEPS):
        one_step(model, step, rank)
        assert groups.agree([1]) == [1]
        optimizer.step()
    found = digest(model, optimizer)
    groups.close()
    return found


@pytest.mark.parametrize("fails_early", [False, True])
@pytest.mark.parametrize(
    ("kind", "lost_step"),
    [("ddp", 0), ("ddp", 1), ("ddp", 3), ("static ddp", 0), ("static ddp", 1), ("static ddp", 3)],
)
def test_a_replacement_rehearses_and_joins_bit_identical(
    kind: str, lost_step: int, fails_early: bool
) -> None:
    with Ranks() as ranks:
        plain = ranks.start_all(undisturbed, 3, kind)
        live = ranks.start_all(train_with_a_loss, 3, kind, lost_step, fails_early)
        assert ranks.results(live) == ["at the step"] * 3
        ranks.signal(live[1], signal.SIGKILL)
        # A standby may have rehearsed before it knew at which version it would join.
        more = kind == "ddp" and fails_early
        live[1] = ranks.start(replacement, 1, 3, kind, lost_step, more)
        layouts = ranks.results(live)
        assert layouts[0]
        assert layouts == [layouts[0]] * 3
        assert ranks.results(live) == ranks.results(plain)


def without_rehearsal(rank: Rank) -> tuple[str, str, bool]:
    groups = started(rank)
    model, _ = wrapped("ddp", rank)
    ddp = torch_private.ddp_modules(model)[0]
    before = torch_private.bucket_digest(ddp)
    rehearse(model, rank, 1)
    settle(model, 1)
    after = torch_private.bucket_digest(ddp)
    groups.close()
    return before, after, torch_private.rebuild_buckets(ddp)


def test_buckets_differ_before_and_after_the_rehearsal() -> None:
    # Were this not so, the test above would say nothing about rehearsals.
    with Ranks() as ranks:
        before, after, again = ranks.hear(ranks.start(without_rehearsal, 1, 2))
        assert before != after
        assert not again


# -- the gate -------------------------------------------------------------------------------------


def votes(rank: Rank) -> list[int]:
    groups = formed(rank)
    found = groups.agree([1, 2**62 + rank.rank, -rank.rank])
    groups.close()
    with pytest.raises(UsageError):
        groups.agree([1])
    return found


def test_agree_gives_everyone_the_minimum() -> None:
    with Ranks() as ranks:
        assert ranks.results(ranks.start_all(votes, 3)) == [[1, 2**62, -2]] * 3


# -- the prelude ----------------------------------------------------------------------------------


def exchange(rank: Rank, groups: GroupSet) -> dict[str, Any]:
    seed = torch.tensor([rank.rank * 1000 + 7])
    dist.broadcast(seed, 0)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(rank.size)]
    dist.all_gather(sizes, torch.tensor([rank.rank]))
    words: list[Any] = [f"vocabulary of {rank.rank}"]
    dist.broadcast_object_list(words, src=0)
    large = torch.full((20_000,), float(rank.rank))
    dist.broadcast(large, 0)
    late = torch.ones(1) * rank.rank
    dist.all_reduce(late)
    return {
        "seed": seed.item(),
        "sizes": [int(size) for size in sizes],
        "words": words,
        "large": large[0].item(),
        "late": late.item(),
    }


def recording(rank: Rank, directory: Path) -> dict[str, Any]:
    groups = formed(rank)
    groups.record_to(directory / f"r{rank.rank}")
    found = exchange(rank, groups)
    groups.record_to(None)
    dist.all_reduce(torch.ones(1))  # after the first gate: not in the record
    groups.close()
    return found


def playing(rank: Rank, directory: Path) -> tuple[dict[str, Any], float, float]:
    groups = started(rank)
    groups.play_back(directory / f"r{rank.rank}")
    found = exchange(rank, groups)
    after = torch.ones(1)
    dist.all_reduce(after)  # the record has ended
    groups.play_back(directory / f"r{rank.rank}")
    other = torch.ones(2) * 5
    dist.all_reduce(other)  # not what the record begins with
    seed = torch.tensor([1])
    dist.broadcast(seed, 0)
    groups.close()
    return found, after.item(), other[0].item() + seed.item()


def test_what_ranks_exchanged_is_played_back_to_a_replacement(tmp_path: Path) -> None:
    with Ranks() as ranks:
        originals = ranks.results(ranks.start_all(recording, 3, tmp_path))
        assert originals[2]["words"] == ["vocabulary of 0"]
        found, after, differing = ranks.hear(ranks.start(playing, 2, 3, tmp_path))
    expected = dict(originals[2], large=2.0)  # too large to be recorded: detached, so what it had
    assert found == expected
    assert after == 3.0
    assert differing == 15.0 + 1
    assert (tmp_path / "r2").stat().st_mode & 0o777 == 0o600


def first_step(rank: Rank, said: str) -> dict[str, Any]:
    """Data, among which there is what a library says only once. `said`: by each rank to all."""
    found: dict[str, Any] = {}
    data = torch.ones(2) * rank.rank
    dist.all_reduce(data)
    after, before = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    vote, activation = torch.tensor([rank.rank + 10]), torch.ones(3) * rank.rank
    words: list[Any] = [None]
    for one, source in ((vote, "vote"), (activation, "activation")):
        sending = dist.isend(one, after)
        received = torch.zeros_like(one)
        dist.recv(received, before)
        assert sending is not None
        sending.wait()
        found[source] = received.tolist()
    for turn in (0, 1):
        if rank.rank % 2 == turn:
            dist.send_object_list([{"shape": [rank.rank]}], after)
        else:
            dist.recv_object_list(words, before)
    for source in range(rank.size):
        told: list[Any] = [f"{rank.rank} {said}"]
        dist.broadcast_object_list(told, source)
        found[f"from {source}"] = told
    counts = torch.tensor([rank.rank])
    dist.broadcast(counts, 0)
    return found | {"data": data.tolist(), "words": words, "counts": counts.tolist()}


def recording_what_is_told(rank: Rank, directory: Path) -> dict[str, Any]:
    groups = formed(rank)
    groups.record_to(directory / f"r{rank.rank}", told_only=True)
    found = first_step(rank, "then")
    groups.record_to(None)
    groups.close()
    return found


def playing_what_was_told(rank: Rank, directory: Path) -> tuple[list[dict[str, Any]], str]:
    groups = started(rank)
    found = []
    for _ in range(2):  # a rehearsal may be done twice; each hears the same
        groups.play_back(directory / f"r{rank.rank}", told_only=True)
        found.append(first_step(rank, "now, at greater length"))
    with pytest.raises(UsageError, match="recv_object_list"):
        first_step(rank, "later")  # the record has ended
    groups.close()
    return found, "ended"


def test_a_rehearsal_is_told_what_the_first_step_was_told_and_no_data(tmp_path: Path) -> None:
    with Ranks() as ranks:
        originals = ranks.results(ranks.start_all(recording_what_is_told, 4, tmp_path))
        (first, second), _ = ranks.hear(ranks.start(playing_what_was_told, 2, 4, tmp_path))
    assert originals[2] == {
        "vote": [11],
        "activation": [1.0] * 3,
        "data": [6.0, 6.0],
        "words": [{"shape": [1]}],
        "counts": [0],
        **{f"from {source}": [f"{source} then"] for source in range(4)},
    }
    # A sum as if all held my data, a receive of nothing, and a broadcast that brought nothing.
    made_up = {"activation": [0.0] * 3, "data": [8.0, 8.0], "counts": [2]}
    made_up |= {"from 2": ["2 now, at greater length"]}
    assert first == second == originals[2] | made_up


# -- a standby that is nobody yet -----------------------------------------------------------------


def nobody(rank: Rank) -> float:
    groups = GroupSet()
    groups.start(None, rank.size)
    for ask in (dist.get_rank, lambda: dist.new_group([0]), lambda: init_device_mesh("cpu", (rank.size,))):
        with pytest.raises(UsageError, match="no rank"):
            ask()
    model, _ = wrapped("ddp", rank)  # building and rehearsing need no rank
    groups.act_as(0)
    assert dist.get_rank() == 0
    rehearse(model, rank, 1)
    settle(model, 1)
    groups.act_as(None)
    with pytest.raises(UsageError, match="no rank"):
        groups.form(rank.store(), 0)
    with pytest.raises(UsageError):
        groups.assign_rank(rank.size)
    groups.assign_rank(rank.rank)
    assert dist.get_rank() == rank.rank
    groups.form(rank.store(), 0)
    tensor = torch.tensor([float(rank.rank)])
    dist.all_reduce(tensor)
    pair = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=pair)
    groups.close()
    return tensor.item()


def test_a_standby_without_a_rank_builds_and_joins_when_it_has_one() -> None:
    with Ranks() as ranks:
        assert ranks.results(ranks.start_all(nobody, 2)) == [2.0, 2.0]


# -- many formings, strangers, addresses ----------------------------------------------------------


def formed_many_times(rank: Rank) -> dict[str, Any]:
    groups = started(rank)
    pair = dist.new_group([0, 1])
    before = threads()
    counts: list[tuple[int, int]] = []
    for generation in range(200):
        if generation:
            groups.abort("again")
        store = rank.store()
        groups.form(store, generation)
        work = dist.all_reduce(torch.ones(8), async_op=True)
        assert work is not None
        future = work.get_future()
        dist.all_reduce(torch.ones(1), group=pair)
        future.wait()
        assert groups.latched is None
        if generation in (20, 199):
            gc.collect()
            counts.append((descriptors(), len(threads())))
        dist.barrier()
    groups.close()
    del work, future  # they hold on to the last generation's threads
    assert counts[0] == counts[1]
    return {"sockets": len(list_tcp_sockets()), "threads": (before, threads())}


def list_tcp_sockets() -> list[tuple[str, str]]:
    """(local, remote) address of each; remote is "" for a listening one."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with sock:
            if sock.family == socket.AF_INET:
                listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                found.append((str(sock.getsockname()), "" if listens else str(sock.getpeername())))
    return found


def test_two_hundred_formings_leave_nothing_behind() -> None:
    with Ranks() as ranks:
        for left in ranks.results(ranks.start_all(formed_many_times, 2)):
            before, after = left["threads"]
            assert (left["sockets"], after) == (0, before)


class Strangers:
    """Other connections of the same process, opened before, during and after the groups'."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_opening, daemon=True)

    def open(self) -> None:
        near = socket.create_connection(self._listener.getsockname())
        far, _ = self._listener.accept()
        self._ends += [near, far]

    def open_meanwhile(self) -> None:
        self._thread.start()

    def _keep_opening(self) -> None:
        while not self._stop.is_set() and len(self._ends) < 200:
            self.open()

    def all_alive(self) -> bool:
        self._stop.set()
        self._thread.join()
        for end in self._ends:
            end.settimeout(DEADLINE_S)
        for end in self._ends:
            end.sendall(b"x")
        return len(self._ends) > 4 and all(end.recv(1) == b"x" for end in self._ends)


def among_strangers(rank: Rank) -> bool:
    groups = started(rank)
    strangers = Strangers()
    strangers.open()
    strangers.open_meanwhile()
    groups.form(rank.store(), 0)
    strangers.open()
    dist.all_reduce(torch.ones(1))
    groups.abort("cut")
    dist.all_reduce(torch.ones(1))
    alive = strangers.all_alive()
    assert groups.latched == "cut"
    groups.close()
    return alive


def test_a_strangers_socket_is_never_cut() -> None:
    with Ranks() as ranks:
        assert ranks.results(ranks.start_all(among_strangers, 2)) == [True, True]


def on_address(rank: Rank, address: str) -> tuple[int, list[str]]:
    groups = started(rank)
    store = rank.store()
    before = set(list_tcp_sockets())
    groups.form(store, 0, address=address)
    dist.all_reduce(torch.ones(1))
    ends = set(list_tcp_sockets()) - before
    groups.close()
    return len(ends), sorted(
        "listener" if not peer else "connection" for local, peer in ends if address in local + peer
    )


def test_connections_use_the_given_address() -> None:
    with Ranks() as ranks:
        assert (
            ranks.results(ranks.start_all(on_address, 2, "127.0.0.7"))
            == [(2, ["connection", "listener"])] * 2
        )


def unusable_address(rank: Rank) -> str:
    groups = started(rank)
    with pytest.raises(EnvironmentFault, match=r"192\.0\.2\.1"):
        groups.form(rank.store(), 0, address="192.0.2.1")
    groups.close()
    return "refused"


def test_an_address_that_is_not_ours_is_refused() -> None:
    with Ranks() as ranks:
        assert ranks.hear(ranks.start(unusable_address, 0, 1)) == "refused"


def group_of_ones_own(rank: Rank) -> str:
    groups = started(rank)
    if rank.rank == 0:
        dist.new_group([0, 1])
        with pytest.raises(UsageError, match="not on rank 1"):
            groups.form(rank.store(), 0)
        groups.close()
        return "named"
    groups.form(rank.store(), 0)
    groups.close()
    return "formed"


def test_a_group_that_a_member_lacks_is_named() -> None:
    with Ranks() as ranks:
        assert ranks.results(ranks.start_all(group_of_ones_own, 2)) == ["named", "formed"]


# -- the end --------------------------------------------------------------------------------------

# Forks once for each way to end, so that torch is imported once; a child leaves by the interpreter's
# own finalisation.
ENDINGS = """
import os, sys, torch, torch.distributed as dist
from flashrec.groups import GroupSet

def end(how):
    groups = GroupSet()
    groups.start(0, 1)
    groups.form(dist.HashStore(), 0)
    global works, futures
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
    futures = [work.get_future() for work in works]
    if how == "latched":
        groups.abort("a test")
        dist.all_reduce(torch.ones(1))
    elif how == "destroyed":
        dist.destroy_process_group()
    elif how == "closed":
        groups.close()
        groups.close()
        GroupSet().start(0, 1)
    elif how == "raised":
        sys.exit(7)

for how in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        end(how)
        break
    print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_the_interpreter_exits_cleanly() -> None:
    ways = ["forgotten", "latched", "destroyed", "closed", "raised"]
    command = [sys.executable, "-W", "error", "-c", ENDINGS, *ways]
    found = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_S)
    assert found.stderr == ""
    assert found.stdout.split("\n")[:-1] == [
        "forgotten 0",
        "latched 0",
        "destroyed 0",
        "closed 0",
        "raised 7",
    ]
