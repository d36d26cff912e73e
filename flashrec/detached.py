"""What a collective does while no peer is connected.

A *detached* group behaves as if every peer held this rank's data: an all-gather fills every
output with mine, a sum is mine times the world size, a broadcast leaves what is there. So a
replacement can build its model and rehearse a step alone. What only a peer could supply (a
receive, a scatter from another rank) reads as zeros, never as uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

Arguments = Sequence[Any]


def perform(op: str, rank: int, size: int, arguments: Arguments) -> None:
    """Do `op` alone, in place, on the tensors in `arguments` (positional, as c10d passes them)."""
    action = _ACTIONS.get(op)
    if action is not None:
        with torch.no_grad():
            action(rank, size, arguments)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a tensor or an arbitrarily nested list of tensors, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def zero_integers(value: Any) -> None:
    """Zero every tensor in `value` that is neither floating point nor complex.

    Sizes, counts and indices of a failed collective are garbage, and garbage used as a size
    allocates gigabytes or reads out of bounds; garbage in floats only makes garbage gradients.
    """
    for tensor in tensors_in(value):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor.zero_()


def _reduce_op(arguments: Arguments) -> Any:
    for argument in arguments[1:]:
        if isinstance(argument, ReduceOp | ReduceOp.RedOpType):
            return argument
        found = getattr(argument, "reduceOp", None)
        if found is not None:
            return found
    return ReduceOp.SUM


def _reduce_in_place(tensor: Tensor, op: Any, size: int) -> None:
    if op == ReduceOp.SUM:
        tensor.mul_(size)
    elif op == ReduceOp.PRODUCT:
        tensor.pow_(size)
    elif op == ReduceOp.BXOR and size % 2 == 0:
        tensor.zero_()


def _reduce(rank: int, size: int, arguments: Arguments) -> None:
    op = _reduce_op(arguments)
    for tensor in tensors_in(arguments[0]):
        _reduce_in_place(tensor, op, size)


def _all_gather(rank: int, size: int, arguments: Arguments) -> None:
    for outputs, mine in zip(_lists(arguments[0]), tensors_in(arguments[1]), strict=False):
        for output in outputs:
            output.copy_(mine)


def _all_gather_coalesced(rank: int, size: int, arguments: Arguments) -> None:
    for outputs in arguments[0]:
        for output, mine in zip(outputs, arguments[1], strict=True):
            output.copy_(mine)


def _all_gather_single(rank: int, size: int, arguments: Arguments) -> None:
    for output, mine in zip(tensors_in(arguments[0]), tensors_in(arguments[1]), strict=True):
        if mine.numel():
            output.view(size, -1).copy_(mine.reshape(1, -1).expand(size, -1))


def _reduce_scatter(rank: int, size: int, arguments: Arguments) -> None:
    op = _reduce_op(arguments)
    for output, inputs in zip(tensors_in(arguments[0]), _lists(arguments[1]), strict=False):
        output.copy_(inputs[rank])
        _reduce_in_place(output, op, size)


def _reduce_scatter_single(rank: int, size: int, arguments: Arguments) -> None:
    op = _reduce_op(arguments)
    for output, mine in zip(tensors_in(arguments[0]), tensors_in(arguments[1]), strict=True):
        if mine.numel():
            output.view(-1).copy_(mine.reshape(size, -1)[rank])
            _reduce_in_place(output, op, size)


def _scatter(rank: int, size: int, arguments: Arguments) -> None:
    outputs = list(tensors_in(arguments[0]))
    inputs = _lists(arguments[1]) if len(arguments) > 1 else []
    for index, output in enumerate(outputs):
        if index < len(inputs) and inputs[index]:
            output.copy_(inputs[index][rank])
        else:
            output.zero_()


def _all_to_all(rank: int, size: int, arguments: Arguments) -> None:
    for output in arguments[0]:
        _copy_or_zero(output, arguments[1][rank])


def _all_to_all_single(rank: int, size: int, arguments: Arguments) -> None:
    output, mine = arguments[0], arguments[1]
    output_splits = list(arguments[2]) if len(arguments) > 2 else []
    input_splits = list(arguments[3]) if len(arguments) > 3 else []
    for_me = mine.split(input_splits or [mine.shape[0] // size] * size)[rank]
    for piece in output.split(output_splits or [output.shape[0] // size] * size):
        _copy_or_zero(piece, for_me)


def _receive(rank: int, size: int, arguments: Arguments) -> None:
    for tensor in tensors_in(arguments[0]):
        tensor.zero_()


def _copy_or_zero(output: Tensor, source: Tensor) -> None:
    # With uneven splits a peer that held my data would send me a piece of another size.
    if output.shape == source.shape:
        output.copy_(source)
    else:
        output.zero_()


def _lists(value: Any) -> list[list[Tensor]]:
    """c10d's `[[tensor, ...]]`, or the one-input overload's plain `[tensor, ...]`, as the former."""
    items = list(value)
    if items and isinstance(items[0], Tensor):
        return [items]
    return [list(item) for item in items]


_ACTIONS: dict[str, Callable[[int, int, Arguments], None]] = {
    "allreduce": _reduce,
    "allreduce_coalesced": _reduce,
    "reduce": _reduce,
    "allgather": _all_gather,
    "gather": _all_gather,
    "allgather_coalesced": _all_gather_coalesced,
    "_allgather_base": _all_gather_single,
    "all_gather_single": _all_gather_single,
    "allgather_into_tensor_coalesced": _all_gather_single,
    "all_gather_single_coalesced": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": _reduce_scatter_single,
    "scatter": _scatter,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
    "recv": _receive,
    "recv_anysource": _receive,
}
