"""Capture under real parallelism: on four ranks, for each kind of it, state that was read is written back, into
the same objects and into new ones, and training goes on bit-identically; replica sets are what structure says."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from flashrec.errors import UsageError
from flashrec.state.capture import Captured, capture
from flashrec.state.layout import RankLayout
from flashrec.state.private import PrivateState, Redo
from flashrec.state.tensors import decode, encode
from tests.integration import parallel_cases
from tests.integration.rank_processes import Rank, Ranks

SIZE = 4


class Silence(TorchDispatchMode):
    """Any collective in here is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "c10d" not in func.namespace, f"a collective: {func}"
        return func(*args, **(kwargs or {}))


def captured_of(case: parallel_cases.Case, rank: int) -> Captured:
    with Silence():
        return capture(
            case.models,
            case.optimizers,
            include_grads=True,
            rank=rank,
            world_size=SIZE,
            replicated_over=case.replicated_over,
        )


def read(captured: Captured) -> list[bytes]:
    return [
        b"".join(
            bytes(captured.of_set(index).read_piece(piece)) for part in one.layout.split(3) for piece in part
        )
        for index, one in enumerate(captured.rank_layout().sets)
    ]


def install(captured: Captured, layout: RankLayout, contents: list[bytes], common: bytes) -> None:
    with Silence():
        captured.prepare(layout)
        assert captured.rank_layout() == layout
        for index, (one, content) in enumerate(zip(layout.sets, contents, strict=True)):
            writer, at = captured.of_set(index), 0
            for piece in (piece for part in one.layout.split(2) for piece in part):
                writer.write_piece(piece, content[at : at + piece.size_bytes])
                at += piece.size_bytes
        captured.load_common_state(decode(common, 1 << 20))
        captured.refresh()
    assert captured.rank_layout() == layout
    assert read(captured) == contents


def state_of(captured: Captured) -> tuple[bytes, list[bytes], bytes]:
    captured.refresh()
    return captured.rank_layout().to_bytes(), read(captured), encode(captured.common_state())


def check(name: str, rank: int) -> dict[str, Any]:
    """One kind of parallelism on one rank; what the ranks have to agree on is told to the test."""
    case = parallel_cases.build(name, rank, seed=0)
    captured = captured_of(case, rank)
    redo = Redo(PrivateState(case.models), captured)
    with Silence():
        estimate = captured.sealing_estimate()
    before = captured.rank_layout().total_bytes
    for step in range(3):
        case.train(step)
        if step == 0:
            with Silence():
                captured.refresh()
            specs = [spec for one in captured.rank_layout().sets for spec in one.layout]
            grads = sum(spec.size_bytes for spec in specs if spec.name.endswith(".grad"))
            assert captured.rank_layout().total_bytes - grads == before + (estimate or 0), "the estimate"
    with Silence():
        captured.refresh()
        assert not captured.refresh(), "nothing is new"
    layout = captured.rank_layout()
    assert RankLayout.from_bytes(layout.to_bytes()) == layout
    contents, common = read(captured), encode(captured.common_state())

    # A step that is thrown away leaves nothing behind.
    with Silence():
        redo.note()
    noted = [bytes(content) for content in contents]
    case.half_a_step(3)
    assert [
        b"".join(
            bytes(redo.reader(captured, index).read_piece(piece))
            for piece in itertools.chain(*one.layout.split(1))
        )
        for index, one in enumerate(layout.sets)
    ] == noted, "what was noted is what is sealed"
    assert encode(redo.common_state()) == common
    for inside in (False, True) if "fsdp" in name else ():
        with Silence():
            redo.put_back()
        case.broken_off(3, inside=inside)
    with Silence():
        redo.put_back()
    assert state_of(captured) == (layout.to_bytes(), contents, common), "put back"
    with Silence():
        redo.note()

    case.train(3)
    case.train(4)
    final = state_of(captured)
    if "fsdp" in name:
        case.broken_off(5, inside=False)  # unsharded parameters of what will have been
    install(captured, layout, contents, common)
    case.train(3)
    case.train(4)
    assert state_of(captured) == final, "written back into the same objects"

    for steps in (0, 1):
        other = parallel_cases.build(name, rank, seed=1)
        for step in range(steps):
            other.train(step + 7)
        if steps == 0:
            other.rehearse()
        fresh = captured_of(other, rank)
        install(fresh, layout, contents, common)
        other.train(3)
        other.train(4)
        assert state_of(fresh) == final, f"written into new objects after {steps} steps"
    return {
        "layout": layout.to_bytes(),
        "digests": [hashlib.sha256(content).hexdigest() for content in contents],
        "expected": {spec.name: case.holders(spec.name) for one in layout.sets for spec in one.layout},
        "estimated": estimate is not None,
    }


def all_cases(rank: Rank, names: list[str]) -> None:
    """Tells what each case's `check` says."""
    # Of outputs that are views of others; the models here change none in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    store = dist.FileStore(str(rank.meeting / "store"), rank.size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.size)
    with pytest.raises(AssertionError, match="a collective"), Silence():
        dist.all_reduce(torch.ones(1))
    for name in names:
        try:
            rank.tell(check(name, rank.rank))
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


FAMILIES = ["ddp", "fsdp", "hsdp", "tp", "zero", "stages", "hinted"]


@pytest.mark.parametrize("family", FAMILIES)
def test_state_moves_and_replica_sets_are_what_structure_says(family: str) -> None:
    names = [name for name in parallel_cases.CASES if name.partition("-")[0] == family]
    with Ranks() as ranks:
        numbers = ranks.start_all(all_cases, SIZE, names)
        for _ in names:
            check_together(ranks.results(numbers))


def unreduced(rank: Rank) -> str:
    """Accumulates without reducing, and begins a step so."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    store = dist.FileStore(str(rank.meeting / "store"), rank.size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.size)
    case = parallel_cases.build("fsdp", rank.rank, seed=0)
    redo = Redo(PrivateState(case.models), captured_of(case, rank.rank))
    redo.note()
    before = case.models[0].first.weight.to_local().clone()
    case.models[0].set_requires_gradient_sync(False)
    case.half_a_step(0)
    with pytest.raises(UsageError, match=r"set_requires_gradient_sync") as refused:
        redo.note()
    redo.put_back()  # throws the half-done sum away
    case.models[0].set_requires_gradient_sync(True)
    redo.note()
    assert torch.equal(before, case.models[0].first.weight.to_local())
    case.train(0)
    other = parallel_cases.build("fsdp", rank.rank, seed=0)
    other.train(0)
    for mine, theirs in zip(case.models[0].parameters(), other.models[0].parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
    return str(refused.value)


def test_a_step_cannot_begin_with_gradients_that_are_nowhere_to_be_noted() -> None:
    with Ranks() as ranks:
        assert "micro" in ranks.results(ranks.start_all(unreduced, SIZE))[0]


def test_every_case_is_in_a_family() -> None:
    assert {name.partition("-")[0] for name in parallel_cases.CASES} == set(FAMILIES)


def check_together(found: list[dict[str, Any]]) -> None:
    """What the ranks of one case say is true of all of them together."""
    layouts = [RankLayout.from_bytes(one["layout"]) for one in found]
    for one, other in itertools.combinations(layouts, 2):
        assert one.disagreement(other) is None
    digests: dict[tuple[int, ...], set[str]] = {}
    for rank, (layout, one) in enumerate(zip(layouts, found, strict=True)):
        assert layout.rank == rank
        for replica_set, digest in zip(layout.sets, one["digests"], strict=True):
            digests.setdefault(replica_set.ranks, set()).add(digest)
            for spec in replica_set.layout:
                assert replica_set.ranks == tuple(one["expected"][spec.name]), spec.name
        assert one["estimated"]
    assert all(len(one) == 1 for one in digests.values()), "members hold the same bytes"
