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
from typing import Any

import click
from rich.console import Console

from flashrec.cli.client import Client, private_daemon
from flashrec.cli.demo import brief, report
from flashrec.cli.demo.daemon import DaemonFault, separate_daemon
from flashrec.cli.demo.nodes.choice import NodeOptions, choose_nodes
from flashrec.cli.demo.nodes.command import run_on_nodes
from flashrec.cli.demo.reference_run import run_reference
from flashrec.cli.demo.schedule import Schedule, schedule_for
from flashrec.cli.demo.settings import FAULTS, NODE_FAULTS, PARALLEL, Settings, choose
from flashrec.cli.demo.timing import cost, read_logs, redone_steps, undisturbed
from flashrec.cli.demo.training import Record, Training
from flashrec.cli.demo.verdict import Verdict, compare_runs, unproven
from flashrec.cli.demo.view import LiveView, PlainView, View

NARROWEST = 110  # columns; a fault's row takes as many


JSON_HELP = """
\b
--json prints one object:
  passed, complaints       the verdict, and what it lacks
  weights_identical, optimizer_identical, losses_identical, first_difference
  parallel, fault, regime, why_sealed, ranks, steps, seed, standby
  most_committed_steps_again
                           committed steps that one fault made the ranks do
                           again, the most of all faults
  faults                   of each: ranks, step, phase (where the rank was
                           that was watched), phases (by rank), planned_phase,
                           pids, fired, deaths_seen (by the daemon),
                           resumed_step, committed_steps_again, recovered_ms,
                           timeline (ms from the signal), standbys,
                           redone_steps (1: the step that was under way was
                           begun again)
  daemon                   step, pid, new_pid, steps_without_daemon,
                           adopted_ms (from the new one's start)
  step_ms, reference_step_ms, overhead_percent, overhead_quartiles,
  overhead_steps           what an undisturbed step takes
  unplanned, failure, seconds
With --nodes also nodes, spare_nodes, replicas, namespaces; and of each fault
  kind, node, ranks, processes and files (that were lost), detail, cut_ms,
  losses_seen (by the leader), moved (ranks, and where to), outcome
"""


@click.command(epilog=JSON_HELP)
@click.option(
    "--steps", type=click.IntRange(min=1), help="Optimizer steps.  [default: 80; with --parallel 40]"
)
@click.option("--ranks", type=click.IntRange(min=1), help="Training processes.  [default: 4]")
@click.option("--faults", type=click.IntRange(min=0), help="How many.  [default: 10; with --parallel 2 to 6]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the training and of the faults.")
@click.option(
    "--standby",
    type=click.Choice(["built", "forked", "none"]),
    help="The warm process that takes a lost rank: with the model built, with torch imported, or none.  "
    "[default: built, where it is possible]",
)
@click.option(
    "--parallel",
    type=click.Choice(list(PARALLEL)),
    help="Show that on a small model: how the ranks share the work.",
)
@click.option(
    "--fault",
    type=click.Choice([*FAULTS, *(name for name in NODE_FAULTS if name not in FAULTS)]),
    help="What is killed: single ranks in every phase of a step, two at once, all at once, or the daemon and "
    "then ranks. With --nodes: a node, rank, a member's daemon, a link (cut, and healed), replica-corrupt (and then "
    "its owner's node is lost), node-during-recovery.  [default: rank; with --nodes: node]",
)
@click.option(
    "--nodes",
    type=int,
    help="Show it over as many nodes (2 or 4), each a daemon of its own on this machine. The first leads the job, and "
    "is never lost: for now that would end the job.",
)
@click.option("--spare-nodes", type=int, help="Nodes that take over from a lost one.  [default: 1 or 2]")
@click.option("--replicas", type=int, help="Other nodes that keep what a rank seals.  [default: 1 or 2]")
@click.option(
    "--namespaces",
    is_flag=True,
    help="Give every node a network namespace, an address and a /dev/shm of its own. Needs root and iproute2; --fault "
    "link does it by itself.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def demo(
    steps: int | None, ranks: int | None, faults: int | None, seed: int, standby: str | None,
    parallel: str | None, fault: str | None, nodes: int | None, spare_nodes: int | None, replicas: int | None,
    namespaces: bool, as_json: bool,
) -> None:  # fmt: skip
    """Train a small GPT while its ranks are killed; compare with an undisturbed run, bit for bit.

    Without --parallel and --fault: data parallelism, with kills in every phase of a step and in recoveries.

    With --nodes: over several nodes, each with a daemon and memory of its own on this machine, that are lost.

    Exits with 1 if a bit differs, a planned fault did not fire, or more than one committed step was done again.
    """
    on_nodes = NodeOptions(nodes=nodes, spare_nodes=spare_nodes, replicas=replicas, namespaces=namespaces)
    chosen: dict[str, Any] = {
        "steps": steps,
        "ranks": ranks,
        "num_faults": faults,
        "seed": seed,
        "standby": standby,
        "parallel": parallel,
        "fault": fault,
    }
    settings = choose_nodes(on_nodes, **chosen) if on_nodes.given else choose(**chosen)
    schedule = Schedule(faults=[]) if on_nodes.given else schedule_for(settings)
    console = Console(stderr=as_json, highlight=False)
    if not console.is_terminal:
        width = max(NARROWEST, console.width)
        console = Console(stderr=as_json, highlight=False, width=width)
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="flashrec-demo-") as folder:
        if on_nodes.given:
            sys.exit(run_on_nodes(settings, Path(folder), console, as_json))
        sys.exit(_run(settings, schedule, Path(folder), console, as_json))


def _run(settings: Settings, schedule: Schedule, folder: Path, console: Console, as_json: bool) -> int:
    began = time.monotonic()
    ours, reference = folder / "flashrec", folder / "reference"
    view: View = (LiveView if console.is_terminal else PlainView)(console, settings)
    with _daemon(schedule) as (client, daemon), view:
        record = Training(client, settings, schedule.faults, ours, daemon).run(view)
        if record.failure is None:
            view.reference(0)
            run_reference(settings, reference, view.reference)
    verdict = _judge(settings, record, ours, reference)
    lines = read_logs(ours, settings.ranks)
    epoch_steps = settings.sizes.epoch_steps
    figures = cost(
        undisturbed(lines, record.disturbed, epoch_steps),
        undisturbed(read_logs(reference, settings.ranks), (), epoch_steps),
    )
    reports = record.reports()
    again = brief.steps_again(lines, reports)
    found = brief.Findings(
        settings=settings,
        reports=reports,
        again=again,
        daemon=record.daemon,
        regime=record.regime,
        why_sealed=record.why_sealed,
        verdict=verdict,
        failure=record.failure,
    )
    console.print()
    if settings.brief:
        console.print(brief.heading(settings), brief.regime(found.regime, found.why_sealed), "", sep="\n")
        if reports:
            console.print(brief.strike_table(reports, console.width, again=again))
        console.print(brief.summary(found))
    else:
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
        facts = report.to_json(
            settings,
            reports,
            unplanned,
            redone_steps(lines),
            again,
            verdict,
            figures,
            seconds,
            record.failure,
        )
        click.echo(json.dumps({**facts, **found.to_json()}))
    if settings.brief:
        return int(not found.passed)
    return int(not verdict.identical or any(one.strike is None for one in reports))


@contextlib.contextmanager
def _daemon(schedule: Schedule) -> Iterator[tuple[Client, DaemonFault | None]]:
    """A daemon for this demo, and the fault that strikes it, if one does."""
    if schedule.daemon_step is None:
        with private_daemon() as client:
            yield client, None
    else:
        with separate_daemon() as daemon, Client(daemon.run_dir) as client:
            yield client, DaemonFault(daemon, schedule.daemon_step)


def _judge(settings: Settings, record: Record, ours: Path, reference: Path) -> Verdict:
    if record.failure is not None:
        return unproven(f"the job failed: {record.failure}")
    return compare_runs(
        ours,
        reference,
        ranks=settings.ranks,
        steps=settings.steps,
        with_loss=settings.ranks_with_loss,
    )


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
