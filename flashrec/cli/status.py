"""`flashrec status`: what the daemon knows, for a person or (--json) for a program."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashrec.cli.client import ask_status, connect

PLACE_STYLES = {
    "start": "dim",
    "forward": "green",
    "backward": "green",
    "gate": "cyan",
    "apply": "cyan",
    "tail": "cyan",
    "between": "green",
    "section": "blue",
    "recovery": "yellow",
    "end": "dim",
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The whole document.")
@click.option("--explain-timeouts", is_flag=True, help="Show each time-out, and what it is derived from.")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=None, help="Run directory of the daemon."
)
def status(as_json: bool, explain_timeouts: bool, directory: Path | None) -> None:
    """Show the job a daemon runs: ranks, phases, standbys, recoveries."""
    with connect(directory) as client:
        document = ask_status(client)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    elif explain_timeouts:
        Console().print(render_timeouts(document))
    else:
        Console().print(render(document))


def render(document: dict[str, Any]) -> RenderableType:
    """The document as a person wants to see it."""
    daemon = document["daemon"]
    head = Text(f"flashrecd {document['release']}, pid {daemon['pid']}, up {daemon['uptime_s']:.0f} s")
    job = document["job"]
    if job is None:
        last = document["last_job"]
        text = (
            "no job runs here"
            if last is None
            else f"no job runs here; job {last['job']}: {last['outcome']['reason']}"
        )
        return Group(head, Text(text))
    return Group(head, render_job(job))


def render_job(job: dict[str, Any]) -> RenderableType:
    """The job's line, and a row for each rank."""
    standbys = ", ".join(f"{s['process']} {s['depth']}" for s in job["standbys"]) or "none"
    line = Text(
        f"job {job['job']}: {job['status']}, generation {job['generation']}, {job['restarts']} recoveries; "
        f"{launcher(job) or f'standbys: {standbys}'}\n{regime(job)}"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("rank", "pid", "phase", "step", "committed", "loss"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for rank in job["ranks"]:
        phase = rank["place"] or rank["status"]
        if rank["status"] in ("dead", "awaited"):  # what its tag says is its predecessor's
            phase = rank["status"]
        loss = "" if rank["loss"] is None else f"{rank['loss']:.4f}"
        cells = [
            str(rank["rank"]),
            str(rank["pid"] or "-"),
            "",
            str(rank["step"] or 0),
            str(rank["committed"] or 0),
            loss,
        ]
        style = PLACE_STYLES.get(phase, "red")
        table.add_row(*cells[:2], Text(phase, style=style), *cells[3:])
    return Group(line, table)


def launcher(job: dict[str, Any]) -> str:
    """Who starts the job's ranks, if it is not the daemon."""
    if (other := job["launcher"]) is None:
        return ""
    alive = "" if other["alive"] else ", which is gone"
    return f"started as {other['job']!r} by {other['program']} (pid {other['pid']}){alive}"


def regime(job: dict[str, Any]) -> str:
    """What protects the state, why that, and what it takes."""
    if job["regime"] == "sealed":
        memory = f"up to {job['arena_bytes'] / 2**20:.0f} MiB of shared memory"
        return f"sealed regime: every version is sealed, {memory}; because {job['why_sealed']}"
    return "live regime: every rank holds the whole state, and serves those that lose it"


def render_timeouts(document: dict[str, Any]) -> RenderableType:
    """One knob, and what follows from it."""
    job = document["job"]
    head = Text("of a job that is run without --suspect-after" if job is None else f"of job {job['job']}")
    table = Table(box=None, pad_edge=False)
    for column in ("time-out", "value", ""):
        table.add_column(column, justify="right" if column == "value" else "left")
    for timeout in document["timeouts"]:
        seconds = timeout["seconds"]
        value = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
        table.add_row(timeout["name"], value, timeout["why"])
    return Group(head, table)
