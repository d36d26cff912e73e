"""`flashrec demo --nodes`: daemons, training, faults, the undisturbed run, the verdict."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
from rich.console import Console

from flashrec.cli.client import Client
from flashrec.cli.demo import brief
from flashrec.cli.demo.nodes.cluster import cluster
from flashrec.cli.demo.nodes.findings import NodeFindings, steps_again
from flashrec.cli.demo.nodes.report import NodeView, node_table, summary
from flashrec.cli.demo.nodes.schedule import make_faults
from flashrec.cli.demo.nodes.training import NodeRecord, NodeTraining
from flashrec.cli.demo.reference_run import run_reference
from flashrec.cli.demo.settings import Settings
from flashrec.cli.demo.timing import read_logs
from flashrec.cli.demo.verdict import Verdict, compare_runs, unproven


def run_on_nodes(settings: Settings, folder: Path, console: Console, as_json: bool) -> int:
    """The whole demo; returns its exit code. `folder` is for what the runs leave."""
    began = time.monotonic()
    ours, reference = folder / "flashrec", folder / "reference"
    faults = make_faults(settings)
    view = NodeView(console, settings)
    with cluster(settings.nodes + settings.spare_nodes, namespaces=settings.namespaces) as nodes, view:
        with Client(nodes.leader.run_dir) as client:
            training = NodeTraining(client, settings, faults, ours, nodes)
            training.run(view)
        record = training.record
    if record.failure is None:
        run_reference(settings, reference, view.reference)
    lines = read_logs(ours, settings.ranks)
    reports = record.node_reports()
    found = NodeFindings(
        settings=settings,
        reports=reports,
        again=steps_again(lines, reports),
        regime=record.regime,
        why_sealed=record.why_sealed,
        verdict=_judge(settings, record, ours, reference),
        failure=record.failure,
        unplanned=record.unplanned(),
        orphans=record.orphans,
    )
    console.print()
    console.print(brief.regime(found.regime, found.why_sealed), "", sep="\n")
    if reports:
        console.print(node_table(reports, console.width, found.again))
    console.print(summary(found))
    if found.unplanned:
        console.print("", "Losses that were not planned:", *found.unplanned, sep="\n", markup=False)
    if record.failure is not None:
        console.print("", "What the ranks last wrote to stderr:", *record.stderr, sep="\n", markup=False)
    seconds = time.monotonic() - began
    console.print(f"\nThe whole demo took {seconds:.0f} s.")
    if as_json:
        click.echo(json.dumps({**found.to_json(), "seconds": round(seconds, 1)}))
    return int(not found.passed)


def _judge(settings: Settings, record: NodeRecord, ours: Path, reference: Path) -> Verdict:
    if record.failure is not None:
        return unproven(f"the job failed: {record.failure}")
    return compare_runs(
        ours, reference, ranks=settings.ranks, steps=settings.steps, with_loss=settings.ranks_with_loss
    )
