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
    several = len(job["nodes"]) > 1
    table = Table(box=None, pad_edge=False)
    columns = (
        "rank",
        "pid",
        "phase",
        "step",
        "committed",
        "loss",
        *(("node", "copies on") if several else ()),
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("phase", "node", "copies on") else "right")
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
        places = [rank["node"], ", ".join(rank["kept_on"]) or "none"] if several else []
        table.add_row(*cells[:2], Text(phase, style=style), *cells[3:], *places)
    return Group(line, *([render_nodes(job)] if several else []), table)


def render_nodes(job: dict[str, Any]) -> RenderableType:
    """A row for each node, and what is wrong with them, if anything."""
    table = Table(box=None, pad_edge=False)
    for column in ("node", "domain", "", "ranks", "keeps copies of"):
        table.add_column(column)
    for node in job["nodes"]:
        life = node["life"] if not node["unheard"] or node["life"] == "lost" else f"silent: {node['unheard']}"
        what = f"{life}, spare" if node["spare"] and node["life"] == "live" else life
        style = "red" if node["life"] == "lost" else "yellow" if node["unheard"] else "green"
        table.add_row(
            node["name"],
            node["domain"] or node["name"],
            Text(what, style=style),
            ranks(node["ranks"]) if node["life"] == "live" else "-",
            ranks(node["keeps"]) if node["life"] == "live" else "-",
        )
    notes = [copies(job)]
    if rates := [link["data_bytes_per_s"] for link in job["links"] if link["data_bytes_per_s"]]:
        slowest, fastest = min(rates) / 1e6, max(rates) / 1e6
        notes.append(f"between nodes: {slowest:.0f} to {fastest:.0f} MB/s when the job began")
    notes += [text for text in (job["replicas"]["too_few"], job["waits_for"]) if text]
    return Group(Text("\n".join(notes)), table, Text())


def copies(job: dict[str, Any]) -> str:
    """How many copies there are, and what may be lost."""
    replicas = job["replicas"]
    number, losses = replicas["wanted"], replicas["losses"]
    wanted = f"{number} {'copy' if number == 1 else 'copies'} on other nodes of what each rank seals"
    if replicas["being_made"]:
        return f"{wanted}; being made now for ranks {ranks(replicas['being_made'])}: no node may be lost"
    if not losses:
        return f"{wanted}; no node may be lost"
    which = "any one" if losses == 1 else f"any {losses}"
    return f"{wanted}; {which} of the nodes may be lost, save the first, which leads"


def ranks(numbers: list[int]) -> str:
    """ "0-3, 6": as people write it."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans) or "-"


def launcher(job: dict[str, Any]) -> str:
    """Who starts the job's ranks, if it is not the daemon."""
    if (other := job["launcher"]) is None:
        return ""
    alive = "" if other["alive"] else ", which is gone"
    return f"started as {other['job']!r} by {other['program']} (pid {other['pid']}){alive}"


def regime(job: dict[str, Any]) -> str:
    """What protects the state, why that, and what it takes."""
    memory = f"up to {job['arena_bytes'] / 2**20:.0f} MiB of shared memory"
    if job["regime"] == "sealed":
        return f"sealed regime: every version is sealed, {memory}; because {job['why_sealed']}"
    if job["why_unsealed"]:
        now_and_then = f"nothing is sealed in case all of them die, because {job['why_unsealed']}"
    else:
        now_and_then = f"now and then a version is sealed in case all of them die, {memory}"
    return f"live regime: every rank holds the whole state, and serves those that lose it; {now_and_then}"


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
