"""What a training step is made of, as canonical keys, so that equal things are timed once.

After DistSim (arXiv 2306.08423): a strategy is broken into distinct events, each is measured or modelled once,
and the costs of layers, stages and replicas are sums over them.

A key has a canonical text, which profiles use:

    gemm[1,4096,3072,9216]/bf16@A100-80GB             batch, m, k, n
    traffic[201326592]/bf16@A100-80GB                 bytes read and written by a memory-bound kernel
    all_reduce[25165824]/8in1x1@A100-80GB             bytes; ranks in the group, nodes they are on, groups at once
"""

import re
from dataclasses import dataclass
from typing import Protocol

from flashrec.errors import UsageError
from flashrec.sim.choices import require_choice, require_count

OPERATORS = {"gemm": 4, "traffic": 1}  # operator: how many numbers its shape has
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send", "host_copy")
POINT_TO_POINT = ("send", "host_copy")
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}  # name: bytes of one element


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Compute:
    """A kernel on one device.

    `gemm`: shape (batch, m, k, n), a (m, k) by (k, n) product `batch` times in one launch.
    `traffic`: shape (bytes,), everything a memory-bound kernel reads and writes.
    """

    operator: str
    shape: tuple[int, ...]
    dtype: str
    device: str

    def __post_init__(self) -> None:
        require_choice(self.operator, OPERATORS, "operator")
        require_choice(self.dtype, DTYPES, "dtype")
        if len(self.shape) != OPERATORS[self.operator]:
            raise UsageError(
                f"{self.operator} takes {OPERATORS[self.operator]} numbers, not shape {self.shape}"
            )
        for size in self.shape:
            require_count(size, f"a dimension of {self.operator}")

    def __str__(self) -> str:
        return f"{self.operator}[{','.join(map(str, self.shape))}]/{self.dtype}@{self.device}"

    @property
    def flops(self) -> int:
        """Floating-point operations (a multiply-add is two); 0 for traffic."""
        if self.operator == "traffic":
            return 0
        batch, m, k, n = self.shape
        return 2 * batch * m * k * n

    @property
    def traffic_bytes(self) -> int:
        """Bytes that must move at least: every operand once."""
        if self.operator == "traffic":
            return self.shape[0]
        batch, m, k, n = self.shape
        return DTYPES[self.dtype] * batch * (m * k + k * n + m * n)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Communication:
    """A collective (or a point-to-point `send`, or a `host_copy` from device to host memory).

    `size_bytes` is the whole tensor's size: what every rank holds before an all-reduce or reduce-scatter, after an
    all-gather; what one rank sends to all the others together in an all-to-all; the message of a send.
    The group's `participants` are spread evenly over `nodes` nodes. `groups`: how many equal groups use each node's
    link at the same time (eight data-parallel groups where tensor parallelism fills a node of eight).
    """

    collective: str
    size_bytes: int
    participants: int
    nodes: int = 1
    groups: int = 1
    device: str

    def __post_init__(self) -> None:
        require_choice(self.collective, COLLECTIVES, "collective")
        require_count(self.size_bytes, "size_bytes", least=0)
        for name in ("participants", "nodes", "groups"):
            require_count(getattr(self, name), name)
        if self.nodes > self.participants:
            raise UsageError(f"{self.participants} participants cannot be on {self.nodes} nodes")

    def __str__(self) -> str:
        return f"{self.collective}[{self.size_bytes}]/{self.participants}in{self.nodes}x{self.groups}@{self.device}"


Event = Compute | Communication

_COMPUTE = re.compile(r"(\w+)\[([\d,]+)\]/(\w+)@(.+)")
_COMMUNICATION = re.compile(r"(\w+)\[(\d+)\]/(\d+)in(\d+)x(\d+)@(.+)")


def parse(text: str) -> Event:
    """The key whose text is `text`. Raises UsageError where it is none."""
    if found := _COMMUNICATION.fullmatch(text):
        collective, size, participants, nodes, groups, device = found.groups()
        return Communication(
            collective=collective,
            size_bytes=int(size),
            participants=int(participants),
            nodes=int(nodes),
            groups=int(groups),
            device=device,
        )
    if found := _COMPUTE.fullmatch(text):
        operator, shape, dtype, device = found.groups()
        sizes = shape.split(",")
        if all(sizes):
            return Compute(operator=operator, shape=tuple(map(int, sizes)), dtype=dtype, device=device)
    raise UsageError(
        f"{text!r} is not an event; expected e.g. 'gemm[1,4096,3072,9216]/bf16@A100-80GB' or "
        f"'all_reduce[25165824]/8in1x1@A100-80GB'"
    )


class Durations(Protocol):
    """Where the seconds of an event come from: a profile or the analytic model."""

    def seconds(self, key: Event) -> float:
        """How long `key` takes, at a device's normal speed. Raises MissingEvents where it is not known."""
        ...
