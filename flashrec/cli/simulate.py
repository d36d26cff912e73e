"""`flashrec simulate`: what one training step of a configuration costs, before anybody trains it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashrec.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:  # numpy is for those who simulate, not for `flashrec --help`
    from flashrec.sim.events import Durations
    from flashrec.sim.explain import Breakdown, Difference
    from flashrec.sim.inputs import Input
    from flashrec.sim.memory import StageMemory
    from flashrec.sim.report import Report

GIB = 1 << 30
WIDTH = 128  # of tables that go to a file or a pipe
MOST_STAGES = 16

FILE = click.Path(path_type=Path, dir_okay=False)


class WrongInput(click.ClickException):
    """What the caller gave cannot be: one line, and the exit code of a wrong call."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """As `flashrec` shows all its errors."""
        click.echo(f"flashrec: {self.format_message()}", err=True)


class TooLarge(WrongInput):
    """The input is right, and the answer is that it does not fit."""

    exit_code = 1


@contextmanager
def usage_errors() -> Iterator[None]:
    """Makes exit codes of the performance model's errors."""
    from flashrec.sim.report import DoesNotFit

    try:
        yield
    except DoesNotFit as error:
        raise TooLarge(str(error)) from error
    except UsageError as error:
        raise WrongInput(str(error)) from error


@click.command()
@click.argument("config", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="All figures, for a program.")
@click.option("--trace", type=FILE, help="Write a trace for Perfetto or chrome://tracing here.")
@click.option("--svg", "svg_path", type=FILE, help="Write a picture of the time-line here.")
@click.option("--profile", type=FILE, help="Measured durations; without, the analytic device model.")
@click.option("--fill-missing", is_flag=True, help="What the profile lacks comes from the analytic model.")
@click.option("--explain", "other", type=FILE, help="Compare with another configuration's step.")
@click.option(
    "--failures", is_flag=True, help="Then train for 90 days among failures ([failures] in CONFIG)."
)
def simulate(
    config: Path,
    as_json: bool,
    trace: Path | None,
    svg_path: Path | None,
    profile: Path | None,
    fill_missing: bool,
    other: Path | None,
    failures: bool,
) -> None:
    """Predict a training step: its time, where it goes, memory, and the time-line.

    CONFIG is a TOML or JSON file with the tables model, cluster and strategy, and global_batch.
    Exit code 1: it does not fit in memory; 2: it is no valid configuration.
    """
    with usage_errors():
        from flashrec.sim.inputs import load_input
        from flashrec.sim.report import simulate as lay_out

        if fill_missing and profile is None:
            raise UsageError("--fill-missing is for a --profile")
        given = load_input(config)
        report = lay_out(given.config, durations_from(given, profile, fill_missing))
        if trace is not None:
            from flashrec.sim.trace import chrome_trace

            write(trace, json.dumps(chrome_trace(report.timeline, str(config))) + "\n")
        if svg_path is not None:
            from flashrec.sim.picture import svg
            from flashrec.sim.report import one_line

            title = f"{given.config.model.name}: {one_line(report.strategy)}"
            write(svg_path, svg(report.timeline, title))
        if other is not None:
            second_input = load_input(other)
            second = lay_out(second_input.config, durations_from(second_input, profile, fill_missing))
            show_comparison((config, report), (other, second), as_json)
            return
        survival = simulate_failures(given, report, as_json) if failures else None
        if as_json:
            document = report.to_json()
            if survival is not None:
                document["failures"] = json.loads(survival)
            click.echo(json.dumps(document, indent=2))
            return
        console().print(render(report))
        if survival is not None:
            click.echo(f"\n{survival}", nl=False)


def durations_from(given: Input, profile: Path | None, fill_missing: bool) -> Durations | None:
    """Those of a profile; None for the analytic model."""
    if profile is None:
        return None
    from flashrec.sim.analytic import AnalyticDurations
    from flashrec.sim.profile import Profile, ProfileOr

    if not profile.exists():
        raise UsageError(f"{profile} does not exist")
    measured = Profile.load(profile)
    return ProfileOr(measured, AnalyticDurations(given.config.cluster)) if fill_missing else measured


def simulate_failures(given: Input, report: Report, as_json: bool) -> str:
    """The report of the daemon's core, which runs in a process of its own: nothing here imports flashrecd."""
    from flashrec.sim.inputs import scenario_document

    state = max(stage.parameters + stage.optimizer for stage in report.memory)
    scenario = given.scenario(report.strategy, report.batch_s, state)
    ran = subprocess.run(
        [sys.executable, "-m", "flashrecd.simulate", *([] if as_json else ["--table"])],
        input=json.dumps(scenario_document(scenario, given.failures)),
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode == 2:
        raise UsageError(f"failures: {ran.stderr.strip()}")
    if ran.returncode:
        raise EnvironmentFault(
            f"the simulation of failures ended with {ran.returncode}: {ran.stderr.strip()}"
        )
    return ran.stdout


def write(path: Path, text: str) -> None:
    """A file that the caller named. Raises UsageError where it cannot be written."""
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def console() -> Console:
    """A terminal's width, or a fixed one where nobody looks."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def table_of(title: str, *columns: str) -> Table:
    """The first column to the left, the others to the right; `<` before a name puts it to the left, and may wrap it."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        left = number == 0 or column.startswith("<")
        justify: Literal["left", "right"] = "left" if left else "right"
        table.add_column(column.removeprefix("<"), justify=justify, no_wrap=not left, overflow="fold")
    return table


def render(report: Report) -> RenderableType:
    """The report for a person."""
    from flashrec.sim.inputs import cluster_speeds
    from flashrec.sim.report import one_line

    config = report.config
    model, cluster = config.model, config.cluster
    head = (
        f"{model.name} ({model.parameters / 1e9:.3g} billion parameters) on {cluster.num_devices:,} x "
        f"{cluster.device.name}\n{one_line(report.strategy)}; global batch {config.global_batch:,}, "
        f"{report.timeline.schedule.num_micro_batches} micro-batches a replica"
    )
    notes = [] if not (speeds := cluster_speeds(cluster)) else [speeds]
    if not report.calibrated:
        notes.append(
            f"nothing was calibrated on {cluster.device.name}: its published peaks, at an A100's efficiency"
        )
    if used := getattr(report.durations, "used", None):
        notes.append(f"{len(used)} events were not in the profile: their times are the analytic model's")
    figures = Table(box=None, pad_edge=False, show_header=False)
    for name, value in (
        ("batch time", seconds(report.batch_s)),
        (
            "tokens/s",
            f"{report.tokens_per_s:,.0f}   {report.tokens_per_s / cluster.num_devices:,.0f} a device",
        ),
        ("MFU", f"{report.mfu:.1%}"),
        ("bubble", f"{report.timeline.bubble():.1%} of the pipeline's time"),
        ("exposed communication", f"{exposed_share(report):.1%} of the step"),
    ):
        figures.add_row(name, value)
    return Group(
        Text(head),
        *(Text(note, style="yellow") for note in notes),
        Text(),
        figures,
        Text(),
        where_time_goes(report.breakdown),
        Text(),
        memory_table(report.memory),
        Text(),
        path_table(report),
    )


def exposed_share(report: Report) -> float:
    """Communication that nothing hides, as a share of the mean device's step."""
    total = report.breakdown.total_ns
    return sum(report.breakdown.exposed_s().values()) * 1e9 / total if total else 0.0


def where_time_goes(breakdown: Breakdown) -> Table:
    """The classes of events that take time."""
    from flashrec.sim.explain import COMMUNICATION, LABELS

    table = table_of("Where the mean device's time goes", "", "time", "share", "events", "each", "<")
    for part, label in LABELS.items():
        if not (took := breakdown.parts_ns[part]):
            continue
        count = breakdown.counts.get(part)
        table.add_row(
            label,
            seconds(took / 1e9),
            f"{took / breakdown.total_ns:.1%}",
            f"{count.events:,.0f}" if count else "",
            seconds(count.mean_s) if count else "",
            "exposed communication" if part in COMMUNICATION else "",
        )
    table.add_row("step", seconds(breakdown.total_ns / 1e9), "100.0%", "", "", "")
    return table


def memory_table(memory: tuple[StageMemory, ...]) -> Table:
    """A row for each run of equal stages; of many, the fullest."""
    from flashrec.sim.report import MEMORY_PARTS, spans

    def sizes(stage: StageMemory) -> tuple[int, ...]:
        return (*(getattr(stage, part) for part in MEMORY_PARTS), stage.live_micro_batches)

    groups: list[list[StageMemory]] = []
    for stage in memory:
        if groups and sizes(groups[-1][0]) == sizes(stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    title = f"Memory of one device, GiB of {memory[0].capacity / GIB:.1f}"
    if len(groups) > MOST_STAGES:
        title += f" (the {MOST_STAGES} fullest of {len(groups)} kinds of stages)"
        groups = sorted(groups, key=lambda group: -group[0].total)[:MOST_STAGES]
    table = table_of(title, "stage", *MEMORY_PARTS, "total", "full", "micro-batches kept")
    for group in groups:
        one = group[0]
        parts = [f"{getattr(one, part) / GIB:.1f}" for part in MEMORY_PARTS]
        name = spans([stage.stage for stage in group])
        full = f"{one.total / one.capacity:.0%}"
        table.add_row(name, *parts, f"{one.total / GIB:.1f}", full, str(one.live_micro_batches))
    return table


def path_table(report: Report) -> Table:
    """What makes the step as long as it is."""
    from flashrec.sim.picture import NAMES
    from flashrec.sim.report import spans

    table = table_of("Critical path", "", "time", "share", "activities", "<on stages")
    for share in report.critical_path:
        stages = spans(share.stages)
        table.add_row(
            NAMES[share.kind],
            seconds(share.seconds),
            f"{share.seconds / report.batch_s:.1%}",
            str(share.count),
            stages if len(stages) < 40 else f"{share.stages[0]} to {share.stages[-1]}",
        )
    return table


def show_comparison(first: tuple[Path, Report], second: tuple[Path, Report], as_json: bool) -> None:
    """Two steps, class by class; the differences add up to that of the steps."""
    from flashrec.sim.explain import compare
    from flashrec.sim.report import one_line

    rows = compare(first[1].breakdown, second[1].breakdown)
    if as_json:
        document = {
            "first": {"config": str(first[0]), **first[1].to_json()},
            "second": {"config": str(second[0]), **second[1].to_json()},
            "difference_ns": sum(row.difference_ns for row in rows),
            "parts": [
                {
                    "part": row.part,
                    "first_ns": row.first_ns,
                    "second_ns": row.second_ns,
                    "difference_ns": row.difference_ns,
                }
                for row in rows
            ],
        }
        click.echo(json.dumps(document, indent=2))
        return
    lines = [
        f"A  {first[0]}: {one_line(first[1].strategy)}",
        f"B  {second[0]}: {one_line(second[1].strategy)}",
    ]
    console().print(Group(Text("\n".join(lines)), Text(), compare_table(rows, first[1], second[1])))


def compare_table(rows: tuple[Difference, ...], first: Report, second: Report) -> RenderableType:
    """The classes that either has, the greatest difference first."""
    from flashrec.sim.explain import LABELS, in_words

    table = table_of(
        "The mean device's time in a step", "", "A", "B", "B - A", "events A", "events B", "<each A, B"
    )
    counts = (first.breakdown.counts, second.breakdown.counts)
    for row in rows:
        if not row.first_ns and not row.second_ns:
            continue
        found = [count.get(row.part) for count in counts]
        table.add_row(
            LABELS[row.part],
            *(milliseconds(ns) for ns in (row.first_ns, row.second_ns)),
            milliseconds(row.difference_ns, sign=True),
            *(f"{count.events:,.0f}" if count else "" for count in found),
            ", ".join(seconds(count.mean_s) for count in found if count),
        )
    totals = [sum(pick(row) for row in rows) for pick in _PICKS]
    table.add_row(
        "step", *(milliseconds(ns) for ns in totals[:2]), milliseconds(totals[2], sign=True), "", "", ""
    )
    if not totals[2]:
        return Group(table, Text(), Text("Both take equally long."))
    faster, slower = ("B", "A") if totals[2] < 0 else ("A", "B")
    share = abs(totals[2]) / min(totals[:2])
    verdict = f"{faster} is faster: {slower} takes {abs(totals[2]) / 1e9:.4g} s ({share:.1%}) longer."
    return Group(table, Text(), Text(f"{verdict} From A to B: {in_words(rows)}."))


_PICKS: tuple[Callable[[Difference], int], ...] = (
    lambda row: row.first_ns,
    lambda row: row.second_ns,
    lambda row: row.difference_ns,
)


def milliseconds(ns: int, *, sign: bool = False) -> str:
    """`1,109.383 ms`."""
    return f"{ns / 1e6:+,.3f} ms" if sign else f"{ns / 1e6:,.3f} ms"


def seconds(value: float) -> str:
    """Three or four digits with a unit that suits them."""
    if value >= 1:
        return f"{value:,.3f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"
