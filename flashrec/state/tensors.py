"""Single tensors as bytes: their names for dtypes, reading and writing byte ranges, and the codec's torch
hook."""

from __future__ import annotations

import collections
import copy
import threading
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from flashrec import torch_private
from flashrec.device import device_of
from flashrec.errors import UsageError
from flashrec.state import codec
from flashrec.state.codec import Buffer, Foreign
from flashrec.state.layout import Piece, TensorSpec

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has this rank's bytes of `tensor` in its memory: a DTensor's shard (which may be empty),
    else `tensor` itself."""
    if not torch_private.is_dtensor(tensor):
        return tensor
    local = torch_private.local_shard(tensor)
    # What a collective is still writing says so by its class; waiting is all it takes.
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The tensor's line in a layout; of a DTensor, that of this rank's shard. Raises UsageError, naming it, when
    its bytes cannot be moved as they are."""
    tensor = local_of(tensor)
    reason = None
    if isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
        reason = "it is not initialized yet: run the model once before protect()"
    elif tensor.layout is not torch.strided:
        reason = f"its layout is {tensor.layout}, not strided"
    elif tensor.is_meta:
        reason = "it is on the meta device and holds no values"
    elif tensor.dtype in _QUANTIZED:
        reason = f"it is quantized ({tensor.dtype})"
    elif hasattr(tensor, "__tensor_flatten__"):
        reason = f"it is a {type(tensor).__name__}, made of other tensors; keep those as parameters instead"
    elif any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        reason = "its elements share memory (an expanded tensor): clone it first"
    if reason is not None:
        raise UsageError(f"cannot protect tensor {name!r}: {reason}")
    device_of(tensor)
    return TensorSpec(
        name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.numel() * tensor.element_size()
    )


def direct_bytes(tensor: torch.Tensor) -> memoryview | None:
    """This rank's memory of `tensor`, writable, where it is one run of bytes that the host can address."""
    local = local_of(tensor)
    return device_of(local).direct_bytes(local)


def read_bytes(tensor: torch.Tensor, offset: int, size_bytes: int) -> memoryview:
    """Bytes [offset, offset + size_bytes) of the tensor's elements in C order: its own memory where that is
    possible, else a copy of the rows concerned."""
    direct = device_of(tensor).direct_bytes(tensor)
    if direct is not None:
        return direct[offset : offset + size_bytes]
    block, _, start = _rows(tensor, offset, size_bytes)
    copied = device_of(tensor).direct_bytes(block)
    assert copied is not None
    return copied[start : start + size_bytes]


def write_bytes(tensor: torch.Tensor, offset: int, data: codec.Buffer) -> None:
    """Put `data` at byte `offset` of the tensor's elements in C order. Not atomic; where the memory is not
    direct, neighbouring rows are read and written back, so such writers must not run at the same time."""
    size_bytes = memoryview(data).nbytes
    direct = device_of(tensor).direct_bytes(tensor)
    if direct is not None:
        direct[offset : offset + size_bytes] = data
        return
    if size_bytes == 0:
        return
    block, rows, start = _rows(tensor, offset, size_bytes)
    copied = device_of(block).direct_bytes(block)
    assert copied is not None
    copied[start : start + size_bytes] = data
    with torch.no_grad():
        rows.copy_(block)


def _rows(tensor: torch.Tensor, offset: int, size_bytes: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(a contiguous host copy of the rows that hold the bytes, those rows, where the bytes start in the
    copy)."""
    tensor = tensor.detach()
    while tensor.dim() > 1 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() == 0:
        return device_of(tensor).to_host(tensor), tensor, offset
    row_bytes = max(1, prod(tensor.shape[1:]) * tensor.element_size())
    first = offset // row_bytes
    last = -(-(offset + size_bytes) // row_bytes)
    rows = tensor[first:last]
    return device_of(tensor).to_host(rows), rows, offset - first * row_bytes


class _Memory:
    """A tensor's own memory as it was looked up once. Whoever has it keeps the memory alive, so that no other can get
    its address."""

    __slots__ = ("_address", "size_bytes", "whole")

    def __init__(self, tensor: torch.Tensor, whole: memoryview) -> None:
        self.whole = whole
        self.size_bytes = whole.nbytes
        self._address = tensor.data_ptr()

    @staticmethod
    def of(tensor: torch.Tensor) -> _Memory | None:
        """None where the memory has to be asked for each time: it is not one run of bytes, or would not be if the
        tensor were conjugated, which its form does not show."""
        if tensor.is_complex():
            return None
        whole = device_of(tensor).direct_bytes(tensor)
        return None if whole is None else _Memory(tensor, whole)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it still is the memory of `tensor`, whose storage and form the script may exchange."""
        return (
            tensor.data_ptr() == self._address and tensor.nbytes == self.size_bytes and tensor.is_contiguous()
        )


class LiveTensors:
    """The bytes of some live tensors, piece by piece: piece numbers refer to `specs`.

    Holds the tensors themselves: what replaces one of them later is not seen here. Any thread may read, and
    write different pieces."""

    def __init__(self, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
        self._specs = specs
        self._tensors = [local_of(tensor) for tensor in tensors]
        # What the host can address, by position. Asking torch for it takes several microseconds a tensor, under the
        # interpreter's lock, in every step.
        self._memories: list[_Memory | None] = [None] * len(self._tensors)
        # Where a tensor's memory is not one run of bytes, a piece is written by reading its surroundings and
        # writing them back, and two threads could undo each other's work.
        self._indirect_write = threading.Lock()

    def read_piece(self, piece: Piece) -> memoryview:
        """The piece's bytes: the tensor's own memory where it is contiguous on the host, else a copy."""
        end = piece.offset + piece.size_bytes
        memory = self._memories[piece.tensor_index]
        if (
            memory is not None
            and memory.is_of(self._tensors[piece.tensor_index])
            and end <= memory.size_bytes
        ):
            return memory.whole[piece.offset : end]
        tensor = self._tensor(piece)
        self._memories[piece.tensor_index] = memory = _Memory.of(tensor)
        return (
            read_bytes(tensor, piece.offset, piece.size_bytes)
            if memory is None
            else memory.whole[piece.offset : end]
        )

    def piece_memory(self, piece: Piece) -> memoryview | None:
        """The piece's memory itself, writable, or None where `write_piece` has to be used."""
        tensor = self._tensor(piece)
        direct = device_of(tensor).direct_bytes(tensor)
        return None if direct is None else direct[piece.offset : piece.offset + piece.size_bytes]

    def write_piece(self, piece: Piece, data: Buffer) -> None:
        """Put the piece's bytes in place."""
        if memoryview(data).nbytes != piece.size_bytes:
            raise ValueError(f"{memoryview(data).nbytes} bytes for {piece}")
        memory = self.piece_memory(piece)
        if memory is not None:
            memory[:] = data
        else:
            with self._indirect_write:
                write_bytes(self._tensor(piece), piece.offset, data)

    def _tensor(self, piece: Piece) -> torch.Tensor:
        spec, tensor = self._specs[piece.tensor_index], self._tensors[piece.tensor_index]
        if tensor.numel() * tensor.element_size() != spec.size_bytes:
            raise UsageError(
                f"{spec} has {tensor.numel() * tensor.element_size()} bytes now: it was resized in a step, which a "
                "recovery cannot follow; put a new tensor in its place instead"
            )
        if piece.offset + piece.size_bytes > spec.size_bytes:
            raise ValueError(f"{piece} reaches beyond {spec}")
        return tensor


class TorchHook:
    """Lets the codec carry tensors (as CPU tensors), parameters, dtypes, devices and sizes."""

    def to_foreign(self, obj: object) -> Foreign | None:
        if isinstance(obj, torch.Tensor):
            if torch_private.is_dtensor(obj):
                raise UsageError(
                    "a DTensor is no part of common or private state; if it belongs to a module (an average of the "
                    "weights), pass that as one more model"
                )
            spec = spec_of("a tensor", obj)
            data = bytes(read_bytes(obj, 0, spec.size_bytes))
            kind = "torch.Parameter" if isinstance(obj, torch.nn.Parameter) else "torch.Tensor"
            return Foreign(kind, [spec.dtype, list(spec.shape), obj.requires_grad and obj.is_leaf, data])
        if isinstance(obj, torch.Size):
            return Foreign("torch.Size", list(obj))
        if isinstance(obj, torch.dtype):
            return Foreign("torch.dtype", dtype_name(obj))
        if isinstance(obj, torch.device):
            return Foreign("torch.device", str(obj))
        return None

    def from_foreign(self, foreign: Foreign) -> object:
        kind, body = foreign.kind, foreign.body
        if kind in ("torch.Tensor", "torch.Parameter"):
            tensor, requires_grad = _tensor(body)
            if kind == "torch.Parameter":
                return torch.nn.Parameter(tensor, requires_grad)
            return tensor.requires_grad_() if requires_grad else tensor
        if kind == "torch.Size" and type(body) is list and all(type(dim) is int for dim in body):
            return torch.Size(body)
        if kind == "torch.dtype" and body in DTYPES:
            return DTYPES[body]
        if kind == "torch.device" and type(body) is str:
            try:
                return torch.device(body)
            except RuntimeError as error:
                raise ValueError(f"not a device: {body[:40]!r}") from error
        if not kind.startswith("torch."):
            return foreign
        raise ValueError(f"a foreign value of kind {kind[:40]!r} that torch does not know")


def _tensor(body: Any) -> tuple[torch.Tensor, bool]:
    dtype, shape, requires_grad, data = body
    if type(shape) is not list or type(data) is not bytes or type(requires_grad) is not bool:
        raise ValueError("a tensor that is not (dtype, shape, requires_grad, bytes)")
    if any(type(dim) is not int or not 0 <= dim < 1 << 62 for dim in shape) or dtype not in DTYPES:
        raise ValueError(f"a tensor of dtype {dtype!r} and shape {shape!r}")
    if DTYPES[dtype] in _QUANTIZED or len(data) != prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"a tensor of dtype {dtype} and shape {shape} in {len(data)} bytes")
    if requires_grad and not (DTYPES[dtype].is_floating_point or DTYPES[dtype].is_complex):
        raise ValueError(f"a tensor of dtype {dtype} that requires a gradient")
    try:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        write_bytes(tensor, 0, data)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return tensor, requires_grad


TORCH = TorchHook()


def encode(obj: object) -> bytes:
    """`codec.encode` with tensors allowed inside."""
    return codec.encode(obj, TORCH)


def decode(data: codec.Buffer, max_bytes: int) -> Any:
    """`codec.decode` with tensors allowed inside."""
    return codec.decode(data, max_bytes, TORCH)


def detached_copy(obj: Any) -> Any:
    """A copy of plain data that later changes to the original do not reach: containers are made anew, tensors
    and arrays cloned (without gradient history); what is immutable is shared."""
    if isinstance(obj, torch.Tensor):
        return obj.detach().clone()
    cls = type(obj)
    if cls is dict:
        return {key: detached_copy(value) for key, value in obj.items()}
    if cls is list:
        return [detached_copy(value) for value in obj]
    if cls is tuple:
        return tuple([detached_copy(value) for value in obj])
    if obj is None or cls in (int, float, str, bytes, bool, complex):
        return obj
    if cls is collections.OrderedDict:
        return collections.OrderedDict((key, detached_copy(value)) for key, value in obj.items())
    return copy.deepcopy(obj)
