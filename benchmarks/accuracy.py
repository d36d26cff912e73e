"""How near the performance model comes to published step times: the fit, and what it predicts of rows left out.

python -m benchmarks.accuracy             prints the tables
python -m benchmarks.accuracy --write     fits again and writes flashrec/sim/data/a100.json
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from flashrec.sim import calibration as cal
from flashrec.sim.analytic import FORMAT, Constants
from flashrec.sim.collectives import MeasuredTable

HERE = Path(__file__).parent
REFERENCE = HERE / "reference"
DATA = HERE.parent / "flashrec" / "sim" / "data" / "a100.json"
NUM_FOLDS = 5
FAR = 0.15  # rows further off than this have no explanation here


def show_constants(constants: Constants) -> None:
    ring = constants.ring
    print(f"  products reach            {constants.gemm_efficiency:8.1%} of the peak, when endlessly large")
    print(f"  kernels reach             {constants.memory_efficiency:8.1%} of the memory's bandwidth")
    print(f"  ranks meet in             {constants.meeting_s * 1e6:8.1f} us before a collective in a step")
    print(f"  network reaches           {ring.inter_efficiency:8.1%} of 200 GB/s a node")
    print(f"  kernel start (not fitted) {constants.kernel_start_s * 1e6:8.1f} us")
    print(
        f"  ring inside a node: edge {ring.intra_efficiency:.1%} of 300 GB/s, "
        f"copies {ring.copy_share:.2f} of an edge's time, "
        f"start {ring.start_s * 1e6:.1f} us, step {ring.step_s * 1e6:.1f} us"
    )


def show(name: str, cases: list[cal.Case], predicted: list[float]) -> None:
    a = cal.assess(cases, predicted)
    print(
        f"  {name:<34} {len(cases):>4} {a.mean_error:>7.1%} {a.median_error:>7.1%} {a.worst_error:>7.1%} "
        f"{a.within[0]:>5.0%} {a.within[1]:>5.0%} {a.rank_correlation:>6.3f} {a.regret:>7.1%}   {a.worst_case}"
    )


def show_header() -> None:
    columns = {"rows": 4, "mean": 7, "median": 7, "worst": 7, "<5%": 5, "<12%": 5, "rank": 6, "regret": 7}
    print(f"  {'':<34} " + " ".join(f"{name:>{width}}" for name, width in columns.items()) + "   worst row")


def show_rows(cases: list[cal.Case], predicted: list[float]) -> None:
    print(f"  {'':<34} {'measured':>9} {'predicted':>9} {'error':>7}")
    for case, seconds in zip(cases, predicted, strict=True):
        print(
            f"  {case.name:<34} {case.measured_s:>8.2f}s {seconds:>8.2f}s {seconds / case.measured_s - 1:>+7.1%}"
        )


def show_far(cases: list[cal.Case], predicted: list[float]) -> None:
    """Rows that nothing here explains, beside the nearest that differs in the micro-batch alone."""
    print(
        f"\nRows over {FAR:.0%} off, and the same with another micro-batch: milliseconds a sample and pipeline slot"
    )
    for case, seconds in zip(cases, predicted, strict=True):
        if abs(seconds / case.measured_s - 1) < FAR:
            continue
        others = [
            f"mb{other.strategy.micro_batch} {sample_ms(other):.1f}"
            for other in cases
            if dataclasses.replace(other.strategy, micro_batch=case.strategy.micro_batch) == case.strategy
            and other is not case
            and other.problem == case.problem
        ]
        print(
            f"  {case.name:<34} {sample_ms(case):.1f} ms a sample and slot; {', '.join(others) or 'no other'}"
        )


def sample_ms(case: cal.Case) -> float:
    """Measured time over the pipeline's slots (micro-batches + stages - 1), for each sample of a micro-batch."""
    slots = case.strategy.num_micro_batches(case.global_batch) + case.strategy.pipeline_parallel - 1
    return 1e3 * case.measured_s / slots / case.strategy.micro_batch


def show_megatron(constants: Constants) -> None:
    print("\nMegatron SC'21, weak scaling: predicted by the constants above, none fitted to it")
    print(
        "  Micro-batch and chunks are not reported. Assumed: the micro-batch below (4 without a pipeline), at most 2"
    )
    print("  chunks a stage where they divide the layers, input gradients' all-reduces not overlapped.")
    for micro_batch in (1, 2, 4):
        cases = cal.read_megatron(REFERENCE / "megatron_sc21_weak_scaling.csv", micro_batch)
        show_rows(cases, [case.predict(constants) for case in cases])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the fitted constants into the package")
    parser.add_argument(
        "--also",
        type=Path,
        action="append",
        default=[],
        help="a table of other rows, predicted and not fitted",
    )
    arguments = parser.parse_args()
    began = time.perf_counter()
    table = MeasuredTable.from_csv(REFERENCE / "allreduce_a100_node.csv")
    ring = cal.fit_ring(table)
    cases = cal.read_steps(REFERENCE / "step_times_a100_cluster.csv")
    constants = cal.fit_steps(cases, ring)
    took = time.perf_counter() - began
    print(
        f"Constants fitted to {len(cases)} steps and {sum(len(r[0]) for r in table.rows.values())} all-reduces"
    )
    show_constants(constants)
    print(f"  (fit: {took:.1f} s)\n")

    print("All-reduce inside a node, one number of ranks left out: relative error (mean, worst)")
    print(f"  {'ranks':>5}  {'table between others':>22}  {'ring':>18}")
    for ranks, (mean, worst, ring_mean, ring_worst) in cal.all_reduce_errors(table).items():
        print(f"  {ranks:>5}  {mean:>12.1%} {worst:>9.1%}  {ring_mean:>9.1%} {ring_worst:>8.1%}")

    predicted = [case.predict(constants) for case in cases]
    print("\nStep times, fitted rows")
    show_rows(cases, predicted)

    print("\nRelative error of step times, rank correlation, and regret of choosing by the prediction")
    show_header()
    show("fitted to all", cases, predicted)
    for size in sorted({case.parameters_billion for case in cases}):
        chosen = [i for i, case in enumerate(cases) if case.parameters_billion == size]
        show(f"  of these {size}B", [cases[i] for i in chosen], [predicted[i] for i in chosen])
    usual = [i for i, case in enumerate(cases) if abs(predicted[i] / case.measured_s - 1) < FAR]
    show(f"  of these under {FAR:.0%} wrong", [cases[i] for i in usual], [predicted[i] for i in usual])
    schemes = {
        "model size left out": lambda case, i: case.parameters_billion,
        f"{NUM_FOLDS} folds over rows": lambda case, i: i % NUM_FOLDS,
        "tensor-parallel size left out": lambda case, i: case.strategy.tensor_parallel,
        "pipeline size left out": lambda case, i: case.strategy.pipeline_parallel,
    }
    for name, fold_of in schemes.items():
        guesses, found = cal.cross_validate(cases, ring, fold_of)
        show(name, cases, guesses)
        ranges = ", ".join(
            f"{low:.2f}-{high:.2f}"
            for low, high in (
                (min(v), max(v))
                for v in (
                    [c.gemm_efficiency for c in found],
                    [c.memory_efficiency for c in found],
                    [c.meeting_s * 1e4 for c in found],
                    [c.ring.inter_efficiency for c in found],
                )
            )
        )
        print(f"    constants over the folds: products, memory, meeting (100 us), network: {ranges}")

    show_far(cases, predicted)
    show_megatron(constants)
    for path in arguments.also:
        others = cal.read_steps(path)
        guesses = [case.predict(constants) for case in others]
        print(f"\n{path}: predicted by the constants above, not fitted to")
        show_rows(others, guesses)
        show_header()
        show("not fitted", others, guesses)
    if arguments.write:
        write(constants, len(cases))


def write(constants: Constants, num_rows: int) -> None:
    provenance = (
        f"python -m benchmarks.accuracy --write; {num_rows} rows of step_times_a100_cluster.csv (vTrain, MICRO'24, "
        "published validation data) and allreduce_a100_node.csv (the same source); see benchmarks/reference/README.md"
    )
    found = {
        "format": FORMAT,
        "device": "A100-80GB",
        "provenance": provenance,
        "constants": constants.to_json(),
    }
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nwrote {DATA}")


if __name__ == "__main__":
    main()
