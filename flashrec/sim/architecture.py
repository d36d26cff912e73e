"""What the cost model needs to know of a model: a row of blocks, each with its work, parameters and activations.

`Transformer` (flashrec.sim.model) makes such blocks from its shapes; anything that can say what one device
does for one micro-batch can make them as well, a traced `nn.Module` among them.
"""

from dataclasses import dataclass
from typing import Protocol

from flashrec.errors import UsageError
from flashrec.sim.choices import require_choice, require_count

RECOMPUTE = ("none", "selective", "full")
AXES = ("tensor", "expert")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """An (m, k) by (k, n) product, `batch` times in one launch."""

    m: int
    k: int
    n: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiply-add is two."""
        return 2 * self.batch * self.m * self.k * self.n


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A collective inside a block. `size_bytes` as in `flashrec.sim.events.Communication`."""

    collective: str
    size_bytes: int
    axis: str = "tensor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one device does for one micro-batch, kernel by kernel."""

    gemms: tuple[Gemm, ...] = ()
    traffic: tuple[int, ...] = ()
    """Bytes read and written, one number a memory-bound kernel."""
    exchanges: tuple[Exchange, ...] = ()

    def __add__(self, other: "Work") -> "Work":
        return Work(
            gemms=self.gemms + other.gemms,
            traffic=self.traffic + other.traffic,
            exchanges=self.exchanges + other.exchanges,
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of its matrix products."""
        return sum(g.flops for g in self.gemms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of the model that is never cut in two by the pipeline, as one device sees it."""

    name: str
    parameters: int
    """On one device, without experts: what data-parallel replicas share."""
    expert_parameters: int = 0
    """On one device: shared by the replicas that hold the same experts."""
    forward: Work
    backward_input: Work
    """Gradients of its input (and what else a backward pass does besides the weights' gradients)."""
    backward_weight: Work
    selective: Work = Work()
    """What selective recomputation does again in the backward pass."""
    saved_bytes: dict[str, int]
    """Activations kept from forward to backward, one micro-batch, by the kind of recomputation."""
    output_bytes: int
    """What the next block gets, one micro-batch, the whole of it (before any division by sequence parallelism)."""
    recomputable: bool = True
    """False for what full recomputation leaves alone (embedding and loss head)."""

    def __post_init__(self) -> None:
        missing = [kind for kind in RECOMPUTE if kind not in self.saved_bytes]
        if missing:
            raise UsageError(f"block {self.name}: saved_bytes lacks {', '.join(missing)}")


@dataclass(frozen=True, kw_only=True)
class Division:
    """How one micro-batch of the model is divided over the devices of one pipeline stage's tensor and expert groups."""

    micro_batch: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    expert_parallel: int = 1
    gradient_bytes: int = 2
    """Bytes of one gradient element, as it is accumulated."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "tensor_parallel", "expert_parallel", "gradient_bytes"):
            require_count(getattr(self, name), name)


class Architecture(Protocol):
    """A model as the cost model sees it."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    @property
    def num_layers(self) -> int:
        """How many of its blocks the pipeline distributes (the blocks between the first and the last)."""
        ...

    @property
    def sequence(self) -> int:
        """Tokens of one sample."""
        ...

    @property
    def tied_parameters(self) -> int:
        """Parameters that the first and the last block share (undivided); 0 where none."""
        ...

    def blocks(self, division: Division) -> tuple[Block, ...]:
        """The blocks in order: first, `num_layers` layers, last."""
        ...

    def check_division(self, tensor_parallel: int, expert_parallel: int) -> None:
        """Raises UsageError where the model cannot be divided so, naming the nearest valid values."""
        ...


def model_flops(model: Architecture, samples: int) -> int:
    """FLOPs of forward and backward (twice the forward) of `samples` sequences, nothing recomputed: MFU's numerator."""
    blocks = model.blocks(Division(micro_batch=1))
    return 3 * samples * sum(block.forward.flops for block in blocks)


def require_recompute(kind: str) -> None:
    """Raises UsageError unless `kind` is a kind of recomputation."""
    require_choice(kind, RECOMPUTE, "recompute")
