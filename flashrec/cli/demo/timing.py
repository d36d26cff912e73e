"""How long a step takes when nothing disturbs it, from the logs the ranks leave (`log.r<rank>.jsonl`)."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """One committed step of one rank. Instants are `time.monotonic_ns()`."""

    step: int
    rank: int
    ms: float
    ended_ns: int
    attempt: int

    @property
    def began_ns(self) -> int:
        return self.ended_ns - int(self.ms * 1e6)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Medians. `overhead_percent`: of the ratios of the same step in both runs, less one; `overhead_quartiles`: a
    quarter of the ratios is below, a quarter above. The runs are minutes apart: a busy machine shows here."""

    step_ms: float | None
    reference_step_ms: float | None
    overhead_percent: float | None
    overhead_quartiles: tuple[float, float] | None
    num_paired: int


def read_logs(folder: Path, ranks: int) -> list[StepLine]:
    lines = []
    for rank in range(ranks):
        path = folder / f"log.r{rank}.jsonl"
        for text in path.read_text().splitlines() if path.exists() else ():
            line = json.loads(text)
            lines.append(
                StepLine(
                    step=line["step"],
                    rank=rank,
                    ms=line["ms"],
                    ended_ns=line["ended_ns"],
                    attempt=line["attempt"],
                )
            )
    return lines


def redone_steps(lines: Iterable[StepLine]) -> set[int]:
    """Steps whose body some rank ran more than once before they were committed."""
    return {line.step for line in lines if line.attempt > 0}


def committed_again(lines: Iterable[StepLine], signals_ns: Mapping[int, int]) -> dict[int, set[int]]:
    """By fault: steps that a rank committed before it and again after. `signals_ns`: when each fault struck.

    A rank's log is that of all its processes, so what was done twice is in it twice."""
    again: dict[int, set[int]] = {index: set() for index in signals_ns}
    done: set[tuple[int, int]] = set()
    for line in sorted(lines, key=lambda line: line.ended_ns):
        if (line.rank, line.step) in done:
            before = [index for index, signal_ns in signals_ns.items() if signal_ns < line.ended_ns]
            cause = max(before, key=signals_ns.__getitem__, default=-1)
            again.setdefault(cause, set()).add(line.step)
        done.add((line.rank, line.step))
    return again


def undisturbed(
    lines: Iterable[StepLine], spans: Sequence[tuple[int, int]], epoch_steps: int
) -> dict[int, float]:
    """Milliseconds by step, the mean over its ranks.

    Left out: steps that touch one of `spans` (from a kill until a standby stands ready again), and the first of
    each epoch, in which the loader's workers start.
    """
    by_step: dict[int, list[float]] = {}
    disturbed: set[int] = set()
    for line in lines:
        by_step.setdefault(line.step, []).append(line.ms)
        if line.step % epoch_steps == 0 or line.attempt > 0:
            disturbed.add(line.step)
        if any(line.began_ns <= end and begin <= line.ended_ns for begin, end in spans):
            disturbed.add(line.step)
    return {step: statistics.fmean(ms) for step, ms in by_step.items() if step not in disturbed}


def cost(ours: Mapping[int, float], reference: Mapping[int, float]) -> Cost:
    """Ours against the reference's, each step with the same step: they have the same data to work on."""
    paired = sorted(ours.keys() & reference.keys())
    percents = [100 * (ours[step] / reference[step] - 1) for step in paired]
    quartiles = statistics.quantiles(percents, n=4) if len(percents) > 1 else None
    return Cost(
        step_ms=_median(ours.values()),
        reference_step_ms=_median(reference.values()),
        overhead_percent=_median(percents),
        overhead_quartiles=(quartiles[0], quartiles[2]) if quartiles is not None else None,
        num_paired=len(paired),
    )


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None
