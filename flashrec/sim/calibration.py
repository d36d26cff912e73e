"""Fits the analytic model's constants to published step times, and says how well that predicts other rows.

Two fits, one after the other. The ring's constants inside a node come from all-reduces timed alone (a linear least
squares in relative terms). The rest come from whole steps: how near the peak products come, how near the
bandwidth kernels come, what a meeting of ranks costs before a collective, and how much of the network between nodes is
had. Steps are fitted by the logarithm of the time with Huber's loss, so that a row that no constant explains does not
bend them: Gauss-Newton with Levenberg's damping, over the logarithms of the constants, which keeps them positive.
"""

import csv
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashrec.sim.analytic import AnalyticDurations, Constants
from flashrec.sim.bill import StepBill
from flashrec.sim.cluster import Cluster, a100_cluster
from flashrec.sim.collectives import MeasuredTable, RingConstants, ring_seconds
from flashrec.sim.costs import make_schedule, price
from flashrec.sim.engine import run
from flashrec.sim.events import Communication
from flashrec.sim.model import Transformer
from flashrec.sim.strategy import Strategy

Array = NDArray[np.float64]

NVLINK_BYTES_S = 300e9  # one direction, A100
KERNEL_START_S = (
    1e-6  # not fitted: steps do not tell it from the memory's efficiency, and drive it to nothing
)
HUBER = 0.03  # relative error up to which it counts squared, beyond which in proportion
NOISE = 0.04  # relative error of a regular row: what the widths below are weighed against
# Constant: (typical, relative width, least, most). Products of large matrices and streaming kernels are known to come
# to 80-95 % and 70-90 % of an A100's figures; the other two are hardly known. The widths hold back what one kind of row
# cannot tell apart (one hidden size does not tell products from memory), and count as one row each.
FITTED = {
    "gemm_efficiency": (0.87, 0.07, 0.4, 1.0),
    "memory_efficiency": (0.8, 0.1, 0.3, 1.0),
    "meeting_s": (1e-4, 1.0, 1e-7, 1e-3),
    "inter_efficiency": (0.6, 0.3, 0.05, 1.0),
}


@dataclass(frozen=True)
class Case:
    """One measured step with its events counted."""

    name: str
    parameters_billion: float
    bill: StepBill
    global_batch: int
    measured_s: float

    @property
    def strategy(self) -> Strategy:
        """How it was run."""
        return self.bill.strategy

    @property
    def problem(self) -> tuple[float, int, int]:
        """Rows that differ in the strategy alone have the same."""
        return (self.parameters_billion, self.bill.cluster.num_devices, self.global_batch)

    def predict(self, constants: Constants) -> float:
        """Seconds of the step."""
        durations = AnalyticDurations(self.bill.cluster, constants)
        costs = price(self.bill, self.global_batch, durations)
        return float(run(make_schedule(self.strategy, self.global_batch), costs).batch_s)


def make_case(
    name: str,
    parameters_billion: float,
    model: Transformer,
    strategy: Strategy,
    global_batch: int,
    measured_s: float,
    cluster: Cluster | None = None,
) -> Case:
    """A case on A100 nodes. Raises UsageError where the row is impossible."""
    cluster = cluster or a100_cluster(-(-strategy.num_devices // 8))
    strategy.check(model, cluster, global_batch)
    return Case(name, parameters_billion, StepBill(model, cluster, strategy), global_batch, measured_s)


def read_steps(path: Path) -> list[Case]:
    """Rows of step_times_a100_cluster.csv.

    What the table does not say was found by arithmetic. All activations are recomputed: without, 30 layers of the 3.6
    billion model at micro-batch 8 on one device would keep 200 GB, and the 39.1 billion model at 14.6 s would run at
    103 TFLOP/s where Megatron reports 138 on the same devices, which is what recomputation makes of it. Gradients are
    exchanged in 16 bits after the last backward; activations are sent in parts between stages (a 39.1 billion model at
    tensor parallelism 8 would spend a sixth of its time on sending them whole, and does not). The all-reduces of the
    input's gradients run beside the products of the weights' gradients: tensor parallelism 8 is faster than six exposed
    all-reduces a layer, at the speed measured alone, would let it be.
    """
    cases = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            model = _gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]), int(row["sequence"]))
            strategy = Strategy(
                data_parallel=int(row["data_parallel"]),
                tensor_parallel=int(row["tensor_parallel"]),
                pipeline_parallel=int(row["pipeline_parallel"]),
                micro_batch=int(row["micro_batch"]),
                recompute="full",
                overlap_gradients=False,
                gradient_buckets=1,
                scatter_sends=True,
                overlap_tensor=True,
            )
            size = float(row["parameters_billion"])
            name = (
                f"{size}B t{strategy.tensor_parallel} d{strategy.data_parallel} p{strategy.pipeline_parallel} "
                f"mb{strategy.micro_batch}"
            )
            seconds = float(row["iteration_ms"]) / 1e3
            cases.append(make_case(name, size, model, strategy, int(row["global_batch"]), seconds))
    return cases


def read_megatron(path: Path, micro_batch: int = 1, most_chunks: int = 2) -> list[Case]:
    """Rows of megatron_sc21_weak_scaling.csv, with what it does not report assumed.

    Assumed: the given micro-batch (4 where there is no pipeline), and interleaving by the greatest number of chunks up
    to `most_chunks` that layers and batch allow. Its paper says that activations are recomputed and that parts of them
    are sent between stages.
    """
    cases = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            layers, tensor, stages = (int(row[k]) for k in ("layers", "tensor_parallel", "pipeline_parallel"))
            batch, data = int(row["global_batch"]), int(row["gpus"]) // (tensor * stages)
            size = micro_batch if stages > 1 else 4
            chunks = 1
            if stages > 1:
                fits = [c for c in range(1, most_chunks + 1) if layers % (stages * c) == 0]
                if batch // (data * size) % stages == 0:
                    chunks = max(fits, default=1)
            strategy = Strategy(
                data_parallel=data,
                tensor_parallel=tensor,
                pipeline_parallel=stages,
                micro_batch=size,
                chunks=chunks,
                schedule="interleaved" if chunks > 1 else "1f1b",
                recompute="full",
                overlap_gradients=False,
                gradient_buckets=1,
                scatter_sends=True,
            )
            billion = float(row["parameters_billion"])
            name = f"{billion}B t{tensor} d{data} p{stages} mb{size} chunks {chunks}"
            model = _gpt(layers, int(row["hidden"]), int(row["heads"]), 2048)
            cases.append(make_case(name, billion, model, strategy, batch, float(row["iteration_s"])))
    return cases


def _gpt(layers: int, hidden: int, heads: int, sequence: int) -> Transformer:
    return Transformer(
        name=f"gpt-{layers}x{hidden}",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        sequence=sequence,
        vocabulary=51200,
    )


def fit_ring(table: MeasuredTable) -> RingConstants:
    """Start, step, edge bandwidth and copies, by relative least squares; what would be negative is left out."""
    rows = [(p, s, t) for p, (sizes, times) in table.rows.items() for s, t in zip(sizes, times, strict=True)]
    ranks, sizes, times = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    steps = 2 * (ranks - 1)
    columns = np.stack([np.ones_like(times), steps, steps / ranks * sizes, sizes], axis=1) / times[:, None]
    solved = _nonnegative(columns, np.ones_like(times))
    start, step, edge, copies = (float(x) for x in solved)
    return RingConstants(
        intra_efficiency=min(1.0, 1 / (edge * NVLINK_BYTES_S)),
        copy_share=copies * NVLINK_BYTES_S,
        start_s=start,
        step_s=step,
    )


def _nonnegative(columns: Array, target: Array) -> Array:
    """Least squares with no negative answer: the worst column is left out until there is none."""
    used = list(range(columns.shape[1]))
    while True:
        found = np.linalg.lstsq(columns[:, used], target, rcond=None)[0]
        if found.min() >= 0 or len(used) == 1:
            answer = np.zeros(columns.shape[1])
            answer[used] = np.maximum(found, 0)
            return answer
        used.pop(int(found.argmin()))


def make_constants(values: Array, ring: RingConstants) -> Constants:
    """From the fitted values, in the order of FITTED."""
    found = dict(zip(FITTED, (float(v) for v in values), strict=True))
    return Constants(
        gemm_efficiency=found["gemm_efficiency"],
        memory_efficiency=found["memory_efficiency"],
        kernel_start_s=KERNEL_START_S,
        meeting_s=found["meeting_s"],
        ring=dataclasses.replace(ring, inter_efficiency=found["inter_efficiency"]),
    )


def fit_steps(cases: Sequence[Case], ring: RingConstants, rounds: int = 30) -> Constants:
    """The constants of FITTED that make the robust error of `cases` least, typical values counting as FITTED says."""
    table = np.array(list(FITTED.values()))
    typical, least, most = np.log(table[:, 0]), np.log(table[:, 2]), np.log(table[:, 3])
    measured = np.log([case.measured_s for case in cases])

    def errors(x: Array) -> Array:
        constants = make_constants(np.exp(x), ring)
        of_rows = np.log([case.predict(constants) for case in cases]) - measured
        return np.concatenate([of_rows, NOISE * (x - typical) / table[:, 1]])

    best = minimise(errors, typical, least, most, rounds)
    return make_constants(np.exp(best), ring)


def minimise(errors: Callable[[Array], Array], start: Array, least: Array, most: Array, rounds: int) -> Array:
    """Huber's loss of `errors` made least inside the bounds (Gauss-Newton, reweighted, damped)."""

    def loss(r: Array) -> float:
        size = np.abs(r)
        return float(np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2)).sum())

    x, damping = start.copy(), 1e-2
    r = errors(x)
    for _ in range(rounds):
        nudge = np.where(x + 1e-3 > most, -1e-3, 1e-3)
        slopes = np.stack([(errors(x + d) - r) / d.sum() for d in np.diag(nudge)], axis=1)
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(r), 1e-12))
        gradient = slopes.T @ (weights * r)
        # Constants that a bound holds back take no part: the others' step is computed without them.
        held = ((x >= most - 1e-9) & (gradient < 0)) | ((x <= least + 1e-9) & (gradient > 0))
        free = np.flatnonzero(~held)
        normal = (slopes.T @ (weights[:, None] * slopes))[np.ix_(free, free)]
        gain = 0.0
        for _ in range(8):
            step = np.zeros_like(x)
            damped = normal + damping * np.diag(np.diag(normal) + 1e-9)
            step[free] = np.clip(-np.linalg.solve(damped, gradient[free]), -0.7, 0.7)
            tried = np.clip(x + step, least, most)
            tried_r = errors(tried)
            gain = loss(r) - loss(tried_r)
            if gain > 0:
                x, r, damping = tried, tried_r, max(damping / 5, 1e-6)
                break
            damping *= 5
        if gain <= 1e-6 * loss(r):
            break
    return x


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How near predictions come."""

    mean_error: float
    median_error: float
    worst_error: float
    worst_case: str
    rank_correlation: float
    """Spearman's, of rows that differ in strategy alone; the mean over such problems."""
    within: tuple[float, float]
    """Part of the rows whose error is under 5 % and under 12 %."""
    regret: float
    """Measured time of the row predicted fastest over that of the fastest, less 1; the worst problem."""


def assess(cases: Sequence[Case], predicted: Sequence[float]) -> Accuracy:
    """Compares predictions with measurements."""
    guess = np.array(predicted)
    truth = np.array([case.measured_s for case in cases])
    errors = np.abs(guess / truth - 1)
    correlations, regrets = [], []
    for problem in sorted({case.problem for case in cases}):
        rows = np.flatnonzero([case.problem == problem for case in cases])
        if len(rows) > 2:
            correlations.append(spearman(guess[rows], truth[rows]))
        regrets.append(float(truth[rows][guess[rows].argmin()] / truth[rows].min() - 1))
    worst = int(errors.argmax())
    return Accuracy(
        mean_error=float(errors.mean()),
        median_error=float(np.median(errors)),
        worst_error=float(errors[worst]),
        worst_case=cases[worst].name,
        within=(float((errors < 0.05).mean()), float((errors < 0.12).mean())),
        rank_correlation=float(np.mean(correlations)) if correlations else float("nan"),
        regret=max(regrets),
    )


def spearman(a: Array, b: Array) -> float:
    """Correlation of the ranks (no ties are expected of times)."""
    ranks = [np.argsort(np.argsort(v)).astype(float) for v in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def cross_validate(
    cases: Sequence[Case], ring: RingConstants, fold_of: Callable[[Case, int], object]
) -> tuple[list[float], list[Constants]]:
    """Predictions of every case by constants fitted to the other folds alone, and those constants, fold by fold.

    `fold_of(case, index)` names a case's fold.
    """
    folds = [fold_of(case, index) for index, case in enumerate(cases)]
    predicted = [0.0] * len(cases)
    found = []
    for fold in sorted(set(folds), key=str):
        constants = fit_steps([c for c, f in zip(cases, folds, strict=True) if f != fold], ring)
        found.append(constants)
        for index, (case, of) in enumerate(zip(cases, folds, strict=True)):
            if of == fold:
                predicted[index] = case.predict(constants)
    return predicted, found


def all_reduce_errors(table: MeasuredTable) -> dict[int, tuple[float, float, float, float]]:
    """Each number of ranks left out: mean and worst relative error of the interpolated table, then of the ring."""
    found = {}
    for left_out, (sizes, times) in table.rows.items():
        rest = table.without(left_out)
        ring = fit_ring(rest)
        by_table = _relative((rest.seconds(s, left_out) for s in sizes), times)
        by_ring = _relative((_ring_alone(s, left_out, ring) for s in sizes), times)
        found[left_out] = (*by_table, *by_ring)
    return found


def _ring_alone(size: int, ranks: int, ring: RingConstants) -> float:
    event = Communication(collective="all_reduce", size_bytes=size, participants=ranks, device="A100-80GB")
    return ring_seconds(event, a100_cluster(1), ring)


def _relative(guesses: Iterable[float], truth: Sequence[float]) -> tuple[float, float]:
    errors = [abs(g / t - 1) for g, t in zip(guesses, truth, strict=True)]
    return float(np.mean(errors)), max(errors)
