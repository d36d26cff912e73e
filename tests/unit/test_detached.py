"""What each collective does alone: as if each of SIZE peers held what this rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup, ReduceOp

from flashrec.collectives import InPlaceGroup
from flashrec.detached import perform, tensors_in, zero_integers

SIZE, RANK = 3, 1


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def blank(numel: int) -> torch.Tensor:
    return torch.full((numel,), -1.0)


MINE = tensor(1, 2)
EACH = tensor(1, 2, 3, 4, 5, 6)  # two for each rank; (3, 4) are rank 1's

CASES: list[tuple[str, list[Any], list[list[float]]]] = [
    ("allreduce", [[MINE.clone()]], [[3, 6]]),
    ("allreduce", [[MINE.clone()], ReduceOp.MAX], [[1, 2]]),
    ("allreduce", [[MINE.clone()], ReduceOp.PRODUCT], [[1, 8]]),
    ("allreduce_coalesced", [[MINE.clone(), tensor(5)]], [[3, 6], [15]]),
    ("reduce", [[MINE.clone()]], [[3, 6]]),
    ("broadcast", [[MINE.clone()]], [[1, 2]]),
    ("allgather", [[[blank(2) for _ in range(SIZE)]], [MINE]], [[1, 2]] * SIZE),
    ("allgather_coalesced", [[[blank(2)] for _ in range(SIZE)], [MINE]], [[1, 2]] * SIZE),
    ("_allgather_base", [blank(6), MINE], [[1, 2, 1, 2, 1, 2]]),
    ("all_gather_single", [blank(6), MINE], [[1, 2, 1, 2, 1, 2]]),
    ("allgather_into_tensor_coalesced", [[blank(6), blank(3)], [MINE, tensor(9)]], [[1, 2] * 3, [9] * 3]),
    ("reduce_scatter", [[blank(2)], [[MINE, MINE * 10, MINE * 100]]], [[30, 60]]),
    ("_reduce_scatter_base", [blank(2), EACH], [[9, 12]]),
    ("reduce_scatter_tensor_coalesced", [[blank(2)], [EACH]], [[9, 12]]),
    ("gather", [[[blank(2) for _ in range(SIZE)]], [MINE]], [[1, 2]] * SIZE),
    ("gather", [[], [MINE]], []),
    ("scatter", [[blank(2)], [[MINE, MINE * 10, MINE * 100]]], [[10, 20]]),
    ("scatter", [[blank(2)], []], [[0, 0]]),
    ("alltoall", [[blank(1) for _ in range(SIZE)], [tensor(7), tensor(8), tensor(9)]], [[8]] * SIZE),
    ("alltoall_base", [blank(6), EACH, [], []], [[3, 4] * 3]),
    ("all_to_all_single", [blank(5), EACH, [2, 2, 1], [1, 2, 3]], [[2, 3, 2, 3, 0]]),
    ("recv", [[blank(2)]], [[0, 0]]),
    ("send", [[MINE.clone()]], [[1, 2]]),
]


@pytest.mark.parametrize(("op", "arguments", "expected"), CASES, ids=[op for op, _, _ in CASES])
def test_alone(op: str, arguments: list[Any], expected: list[list[float]]) -> None:
    perform(op, RANK, SIZE, arguments)
    assert [found.tolist() for found in tensors_in(arguments[0])] == expected


@pytest.mark.parametrize(("size", "expected"), [(2, 0), (3, 5)])
def test_xor_with_oneself_depends_on_how_often(size: int, expected: int) -> None:
    value = torch.tensor([5])
    perform("allreduce", 0, size, [[value], ReduceOp.BXOR])
    assert value.item() == expected


def test_parameters_that_need_gradients_may_be_reduced() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    perform("allreduce", 0, 2, [[parameter]])
    assert parameter.tolist() == [2, 2]


def test_only_integers_are_zeroed() -> None:
    values = [torch.ones(1), torch.ones(1, dtype=torch.int32), [torch.tensor([True]), torch.ones(1) * 1j]]
    zero_integers(values)
    assert [value.item() for value in tensors_in(values)] == [1.0, 0, False, 1j]


def test_every_collective_of_torchs_process_group_goes_through_ours() -> None:
    # A collective that torch adds, or gives a new name, would bypass the latch.
    others = {"abort", "boxed", "get_group_store", "merge_remote_group", "monitored_barrier", "name", "rank"}
    others |= {"set_timeout", "shutdown", "size", "split_group", "unbox"}
    public = {
        name
        for name, value in vars(ProcessGroup).items()
        if callable(value) and not name.startswith("_") and not name[0].isupper()
    }
    assert public - others <= set(vars(InPlaceGroup))
    assert {"_allgather_base", "_reduce_scatter_base"} <= set(vars(InPlaceGroup))
