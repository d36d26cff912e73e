"""What a rank leaves behind: a log line for each step, and at the end an outcome to compare.

    <out>/log.r<rank>.jsonl     one line per committed step: {"step", "loss", "ms", "ended_ns", "attempt"}
    <out>/outcome.r<rank>.json  losses and digests, written once, whole

Losses are written as hex floats and tensors as sha256 digests, so that "equal" means every bit. A rank that
has a part of a tensor gives the digest of that part; one that never has the loss (of a pipeline's stages only
the last does) leaves it out.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor


class LossHistory:
    """The loss of every step so far, by step.

    Part of a rank's private state: whoever takes over the rank goes on with the same history, and
    a step that is done again overwrites its own entry.
    """

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}

    def record(self, step: int, loss: float) -> None:
        self._losses[step] = loss

    def as_hex(self) -> list[str]:
        """Losses in the order of their steps, exactly."""
        return [self._losses[step].hex() for step in sorted(self._losses)]

    def state_dict(self) -> dict[str, Any]:
        return {"losses": dict(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses = dict(state["losses"])


class StepLog:
    """Appends a line per committed step; each line goes out in one write, so none is ever torn."""

    def __init__(self, out: Path, rank: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file = os.open(out / f"log.r{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.step_ms: dict[int, float] = {}

    def committed(
        self, step: int, loss: torch.Tensor | float | None, elapsed_ms: float, attempt: int = 0
    ) -> None:
        """`elapsed_ms` is the wall time from the end of the step before to the end of this one. The line's
        `ended_ns` is the end on the clock that all of a machine's processes share, `time.monotonic_ns()`."""
        self.step_ms[step] = elapsed_ms
        line = {
            "step": step,
            "loss": None if loss is None else float(loss).hex(),
            "ms": round(elapsed_ms, 3),
            "ended_ns": time.monotonic_ns(),
            "attempt": attempt,
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def named_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and all of the optimizer's tensors that are on this rank, each under its own name."""
    names: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        yield f"model.{name}", parameter
    for name, buffer in model.named_buffers():
        yield f"model.{name}", buffer
    # ZeRO keeps a rank's part of the state in an optimizer inside.
    inner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    for owner, state in inner.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer.{names[owner]}.{key}", value


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 of type, shape and bytes, as any program could compute it from the raw numbers.

    Of a DTensor those of its part on this rank."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    array = local.detach().cpu().contiguous().numpy()
    header = f"{array.dtype.str}{list(array.shape)}".encode()
    return hashlib.sha256(header + array.tobytes()).hexdigest()


def write_outcome(
    out: Path,
    *,
    rank: int,
    world_size: int,
    corpus_sha256: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    history: LossHistory,
    log: StepLog,
) -> Path:
    """Write `outcome.r<rank>.json` and return its path; it appears complete or not at all.

    `step_ms` holds the steps this process committed itself: a replacement has none from before.
    """
    outcome = {
        "rank": rank,
        "world_size": world_size,
        "corpus_sha256": corpus_sha256,
        "losses": history.as_hex(),
        "tensors": {name: tensor_digest(tensor) for name, tensor in named_tensors(model, optimizer)},
        "random": tensor_digest(torch.get_rng_state()),
        "step_ms": log.step_ms,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"outcome.r{rank}.json"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(outcome, indent=1) + "\n")
    unfinished.replace(path)
    return path
