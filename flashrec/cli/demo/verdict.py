"""Are two runs the same, bit for bit? Compares what their ranks left behind (`outcome.r<rank>.json`)."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Outcome = Mapping[str, Any]
SAME_TRAINING = ("rank", "world_size", "corpus_sha256")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is identical, and where it first is not. Losses are exact (hex floats), tensors sha256 digests."""

    weights_identical: bool
    optimizer_identical: bool
    losses_identical: bool
    first_difference: str | None
    num_tensors: int
    """Compared, over all ranks; optimizer state included."""
    num_losses: int

    @property
    def identical(self) -> bool:
        return self.weights_identical and self.optimizer_identical and self.losses_identical


def unproven(reason: str) -> Verdict:
    """The verdict where there is nothing to compare."""
    return Verdict(
        weights_identical=False,
        optimizer_identical=False,
        losses_identical=False,
        first_difference=reason,
        num_tensors=0,
        num_losses=0,
    )


def compare_runs(
    ours: Path, reference: Path, *, ranks: int, steps: int, with_loss: Collection[int] | None = None
) -> Verdict:
    """Compare every rank's outcome in two directories. An outcome that is not there counts as different."""
    try:
        pairs = [(_read(ours, rank), _read(reference, rank)) for rank in range(ranks)]
    except (OSError, ValueError) as error:
        return unproven(f"an outcome cannot be read: {error}")
    return compare(pairs, steps=steps, with_loss=with_loss)


def _read(folder: Path, rank: int) -> Outcome:
    path = folder / f"outcome.r{rank}.json"
    try:
        outcome = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(outcome, dict):
        raise ValueError(f"{path} is not an object")
    missing = [key for key in (*SAME_TRAINING, "losses", "tensors") if key not in outcome]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}")
    return outcome


def compare(
    pairs: Sequence[tuple[Outcome, Outcome]], *, steps: int, with_loss: Collection[int] | None = None
) -> Verdict:
    """Compare (ours, the reference's) of each rank; a run of `steps` steps has as many losses.

    `with_loss`: the ranks that have it, of a pipeline those with the last stage; None: all."""
    weights: list[str] = []
    optimizer: list[str] = []
    losses: list[str] = []
    num_tensors = num_losses = 0
    for rank, (ours, reference) in enumerate(pairs):
        for key in SAME_TRAINING:
            if ours[key] != reference[key]:
                return unproven(
                    f"rank {rank}: not the same training: {key} {ours[key]!r} against {reference[key]!r}"
                )
        num_losses += len(ours["losses"])
        expected = steps if with_loss is None or rank in with_loss else 0
        losses += _loss_differences(rank, ours["losses"], reference["losses"], expected)
        num_tensors += len(ours["tensors"])
        weights += _tensor_differences(rank, "model.", ours["tensors"], reference["tensors"])
        optimizer += _tensor_differences(rank, "optimizer.", ours["tensors"], reference["tensors"])
    return Verdict(
        weights_identical=not weights,
        optimizer_identical=not optimizer,
        losses_identical=not losses,
        first_difference=next(iter((*losses, *weights, *optimizer)), None),
        num_tensors=num_tensors,
        num_losses=num_losses,
    )


def _loss_differences(rank: int, ours: Sequence[str], reference: Sequence[str], steps: int) -> list[str]:
    differences = [
        f"rank {rank}, step {step}: loss {_both(a)} against {_both(b)}"
        for step, (a, b) in enumerate(zip(ours, reference, strict=False))
        if a != b
    ]
    for name, run in (("this run", ours), ("the reference", reference)):
        if len(run) != steps:
            differences.append(f"rank {rank}: {name} has {len(run)} losses for {steps} steps")
    return differences


def _both(loss: str) -> str:
    return f"{float.fromhex(loss):.6f} ({loss})"


def _tensor_differences(
    rank: int, prefix: str, ours: Mapping[str, str], reference: Mapping[str, str]
) -> list[str]:
    names = sorted(name for name in {*ours, *reference} if name.startswith(prefix))
    if not names:
        return [f"rank {rank}: no tensor {prefix}*"]
    return [f"rank {rank}: {name} differs" for name in names if ours.get(name) != reference.get(name)]
