"""What an operator of torch costs, from the shapes of its arguments: products as `Gemm`, the rest as traffic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashrec.errors import UsageError
from flashrec.sim.architecture import Gemm, Work

if TYPE_CHECKING:
    import torch


@dataclass
class Noted:
    """What ran, in order."""

    gemms: list[Gemm] = field(default_factory=list)
    traffic: list[int] = field(default_factory=list)

    def work(self) -> Work:
        """As the cost model has it."""
        return Work(gemms=tuple(self.gemms), traffic=tuple(self.traffic))

    def less(self, other: Noted) -> Noted:
        """Without what `other` did as well."""
        return Noted(
            sorted((Counter(self.gemms) - Counter(other.gemms)).elements(), key=str),
            sorted((Counter(self.traffic) - Counter(other.traffic)).elements()),
        )


def note(noted: Noted, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Adds one operator. Raises UsageError for one that computes a great deal and is not known here."""
    name = func.overloadpacket.__name__
    if func.is_view or name in FREE:
        return
    gemms = GEMMS.get(name)
    if gemms is not None:
        noted.gemms.extend(g for g in gemms(args, result) if g.flops)
        return
    _refuse_unknown(func)
    size = sum(_tensors_bytes((args, kwargs))) + sum(_tensors_bytes(result))
    if size:
        noted.traffic.append(size)


def _refuse_unknown(func: Any) -> None:
    from torch.utils.flop_counter import flop_registry

    if func.overloadpacket in flop_registry:
        raise UsageError(
            f"operator {func} computes products that flashrec cannot count; known: {', '.join(sorted(GEMMS))}"
        )


def _tensors_bytes(value: Any) -> Iterator[int]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value.numel() * value.element_size()
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_bytes(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_bytes(item)


def _product(left: torch.Tensor, right: torch.Tensor) -> list[Gemm]:
    batch = left.shape[0] if left.dim() == 3 else 1
    m, k = left.shape[-2:]
    return [Gemm(m=m, k=k, n=right.shape[-1], batch=batch)]


def _convolution(args: tuple[Any, ...], result: Any) -> list[Gemm]:
    return [_as_product(args[0].shape, args[1].shape, result.shape, transposed=args[6], groups=args[8])]


def _as_product(inputs: Any, weight: Any, outputs: Any, *, transposed: bool, groups: int) -> Gemm:
    """Of each position with the weights: (positions, channels in x kernel) by (..., channels out)."""
    kernel = math.prod(weight[2:])
    if transposed:
        return Gemm(
            m=inputs[0] * math.prod(inputs[2:]), k=weight[0] // groups, n=weight[1] * kernel, batch=groups
        )
    return Gemm(
        m=outputs[0] * math.prod(outputs[2:]), k=weight[1] * kernel, n=weight[0] // groups, batch=groups
    )


def _convolution_backward(args: tuple[Any, ...], result: Any) -> list[Gemm]:
    gradient, inputs, weight, transposed, groups, wanted = (
        args[0],
        args[1],
        args[2],
        args[7],
        args[9],
        args[10],
    )
    g = _as_product(inputs.shape, weight.shape, gradient.shape, transposed=transposed, groups=groups)
    towards_input = Gemm(m=g.m, k=g.n, n=g.k, batch=g.batch)
    towards_weight = Gemm(m=g.k, k=g.m, n=g.n, batch=g.batch)
    return [gemm for gemm, asked in zip((towards_input, towards_weight), wanted, strict=False) if asked]


def _attention(args: tuple[Any, ...], first: int, causal: int) -> tuple[Gemm, Gemm]:
    """Scores, and their product with the values; the masked half of causal attention is not computed."""
    query, key, value = args[first : first + 3]
    seen = key.shape[-2]
    if len(args) > causal and args[causal]:
        seen = max(1, seen // 2)
    batch, length = query.shape[0] * query.shape[1], query.shape[-2]
    scores = Gemm(m=length, k=query.shape[-1], n=seen, batch=batch)
    return scores, Gemm(m=length, k=seen, n=value.shape[-1], batch=batch)


def _attention_forward(causal: int) -> Callable[[tuple[Any, ...], Any], list[Gemm]]:
    return lambda args, result: list(_attention(args, 0, causal))


def _attention_backward(causal: int) -> Callable[[tuple[Any, ...], Any], list[Gemm]]:
    """The kernel makes the scores again; gradients of values and scores, of queries and keys."""

    def gemms(args: tuple[Any, ...], result: Any) -> list[Gemm]:
        inwards, outwards = _attention(args, 1, causal)
        return [inwards, inwards, outwards, outwards, outwards]

    return gemms


FREE = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view"}
)
# By the operator's name; each from its arguments and its result. Where "is causal" stands differs by kernel.
GEMMS: dict[str, Callable[[tuple[Any, ...], Any], list[Gemm]]] = {
    "mm": lambda args, result: _product(args[0], args[1]),
    "bmm": lambda args, result: _product(args[0], args[1]),
    "addmm": lambda args, result: _product(args[1], args[2]),
    "baddbmm": lambda args, result: _product(args[1], args[2]),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention_forward(4),
    "_scaled_dot_product_flash_attention": _attention_forward(4),
    "_scaled_dot_product_efficient_attention": _attention_forward(6),
    "_scaled_dot_product_cudnn_attention": _attention_forward(6),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward(7),
    "_scaled_dot_product_flash_attention_backward": _attention_backward(11),
    "_scaled_dot_product_efficient_attention_backward": _attention_backward(11),
}
