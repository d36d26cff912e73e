"""`flashrec demo`: train, kill ranks meanwhile, and compare every bit with an undisturbed run."""

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from flashrec.cli.client import private_daemon
from flashrec.cli.demo import report
from flashrec.cli.demo.reference_run import run_reference
from flashrec.cli.demo.schedule import Fault, make_schedule
from flashrec.cli.demo.settings import EPOCH_STEPS, Settings
from flashrec.cli.demo.timing import cost, read_logs, redone_steps, undisturbed
from flashrec.cli.demo.training import Record, Training
from flashrec.cli.demo.verdict import Verdict, compare_runs, unproven
from flashrec.cli.demo.view import LiveView, PlainView, View

NARROWEST = 110  # columns; a fault's row takes as many


@click.command()
@click.option("--steps", type=click.IntRange(min=1), default=80, show_default=True, help="Optimizer steps.")
@click.option("--ranks", type=click.IntRange(min=1), default=4, show_default=True, help="Training processes.")
@click.option("--faults", type=click.IntRange(min=0), default=10, show_default=True, help="Ranks to kill.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the training and of the faults.")
@click.option(
    "--standby",
    type=click.Choice(["built", "forked", "none"]),
    default="built",
    show_default=True,
    help="The warm process that takes a lost rank: with the model built, with torch imported, or none.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def demo(steps: int, ranks: int, faults: int, seed: int, standby: str, as_json: bool) -> None:
    """Train a small GPT while its ranks are killed; compare with an undisturbed run, bit for bit.

    Exits with 1 if a bit differs or a planned fault did not fire.
    """
    settings = Settings(steps=steps, ranks=ranks, num_faults=faults, seed=seed, standby=standby)
    schedule = make_schedule(steps=steps, ranks=ranks, num_faults=faults, seed=seed)
    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal:
        width = max(NARROWEST, console.width)
        console = Console(stderr=as_json, highlight=False, width=width)
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="flashrec-demo-") as folder:
        sys.exit(_run(settings, schedule, Path(folder), console, as_json))


def _run(settings: Settings, schedule: list[Fault], folder: Path, console: Console, as_json: bool) -> int:
    began = time.monotonic()
    ours, reference = folder / "flashrec", folder / "reference"
    view: View = (LiveView if console.is_terminal else PlainView)(console, settings)
    with private_daemon() as client, view:
        record = Training(client, settings, schedule, ours).run(view)
        if record.failure is None:
            view.reference(0)
            run_reference(settings, reference, view.reference)
    verdict = _judge(settings, record, ours, reference)
    lines = read_logs(ours, settings.ranks)
    figures = cost(
        undisturbed(lines, record.disturbed, EPOCH_STEPS),
        undisturbed(read_logs(reference, settings.ranks), (), EPOCH_STEPS),
    )
    reports = record.reports()
    console.print()
    if reports:
        console.print(report.fault_table(reports, console.width))
    console.print(report.summary(settings, reports, verdict, figures, record.failure))
    unplanned = record.unplanned()
    if unplanned:
        console.print("", "Deaths that were not planned:", *unplanned, sep="\n", markup=False)
    if record.failure is not None:
        console.print("", "What the ranks last wrote to stderr:", *record.stderr, sep="\n", markup=False)
    seconds = time.monotonic() - began
    console.print(f"\nThe whole demo took {seconds:.0f} s.")
    if as_json:
        found = report.to_json(
            settings, reports, unplanned, redone_steps(lines), verdict, figures, seconds, record.failure
        )
        click.echo(json.dumps(found))
    return int(not verdict.identical or any(one.strike is None for one in reports))


def _judge(settings: Settings, record: Record, ours: Path, reference: Path) -> Verdict:
    if record.failure is not None:
        return unproven(f"the job failed: {record.failure}")
    return compare_runs(ours, reference, ranks=settings.ranks, steps=settings.steps)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does: whatever it started is taken away again."""

    def ended(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
