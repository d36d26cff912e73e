"""What the demo found, for a person (rich) and for a program (one JSON object)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashrec.cli.demo.faults import MARKS, FaultReport
from flashrec.cli.demo.schedule import PLACES
from flashrec.cli.demo.settings import Settings
from flashrec.cli.demo.timing import Cost
from flashrec.cli.demo.verdict import Verdict
from flashrec.cli.status import PLACE_STYLES

ALL_MARKS_WIDTH = 106
FEW_MARKS = ("detected", "parked", "formed", "redone")
COLUMNS = {
    "detected": "the daemon saw the process end",
    "parked": "every survivor had stopped at a safe point",
    "planned": "step and sources were decided",
    "pulled": "the replacement held the state, verified",
    "rehearsed": "its buckets were in order (0: before the fault)",
    "formed": "the process groups connected all ranks again",
    "redone": "the next step was committed on all ranks",
}


def to_json(
    settings: Settings,
    reports: Sequence[FaultReport],
    unplanned: Sequence[str],
    redone: set[int],
    again: Mapping[int, set[int]],
    verdict: Verdict,
    cost: Cost,
    seconds: float,
    failure: str | None,
) -> dict[str, Any]:
    """The object that --json prints."""
    return {
        "step_ms": _rounded(cost.step_ms),
        "reference_step_ms": _rounded(cost.reference_step_ms),
        "overhead_percent": _rounded(cost.overhead_percent),
        "overhead_quartiles": [_rounded(value) for value in cost.overhead_quartiles or ()],
        "overhead_steps": cost.num_paired,
        "ranks": settings.ranks,
        "steps": settings.steps,
        "seed": settings.seed,
        "standby": settings.standby,
        "weights_identical": verdict.weights_identical,
        "optimizer_identical": verdict.optimizer_identical,
        "losses_identical": verdict.losses_identical,
        "first_difference": verdict.first_difference,
        "faults": [report.to_json(redone, again.get(report.fault.index, set())) for report in reports],
        "unplanned": list(unplanned),
        "seconds": round(seconds, 1),
        "failure": failure,
    }


def fault_table(reports: Sequence[FaultReport], width: int, *, now_ns: int | None = None) -> Table:
    """A row for each fault, in `width` columns. `now_ns`: the run goes on, so what is missing may come yet."""
    marks = MARKS if width >= ALL_MARKS_WIDTH else FEW_MARKS
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for column in ("fault", "rank", "killed in", "step", *marks, "standby"):
        left = column in ("killed in", "standby")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for report in reports:
        number, rank = str(report.fault.index + 1), str(report.fault.rank)
        if report.strike is None:
            style = "dim" if now_ns is not None else "bold red"
            place = report.fault.place or "random"
            text = place if now_ns is not None else f"{place}: never fired"
            table.add_row(number, rank, Text(text, style=style), Text(f"{report.fault.step}+", style=style))
            continue
        struck = Text(report.strike.place, style=PLACE_STYLES.get(report.strike.place, "red"))
        if report.fault.place is None:
            struck.append(" (random)", style="dim")
        elif report.fault.place != report.strike.place:
            struck.append(f" (meant: {report.fault.place})", style="dim")
        step = "" if report.step is None else str(report.step)
        table.add_row(number, rank, struck, step, *_times(report, marks, now_ns))
    return table


def _times(report: FaultReport, marks: Sequence[str], now_ns: int | None) -> list[Text]:
    assert report.strike is not None
    cells = [Text(_ms(report.timeline[mark]) if mark in report.timeline else "") for mark in marks]
    if report.complete:
        cells[-1].stylize("bold green")
    elif now_ns is not None:
        cells[-1] = Text(f"{(now_ns - report.strike.signal_ns) / 1e6:.0f} …", style="yellow")
    else:
        cells[-1] = Text("never", style="bold red")
    return [*cells, Text(report.standby or "", style="dim")]


def summary(
    settings: Settings,
    reports: Sequence[FaultReport],
    verdict: Verdict,
    cost: Cost,
    failure: str | None,
) -> RenderableType:
    """The verdict, and the figures around it."""
    fired = [report for report in reports if report.strike is not None]
    lines: list[RenderableType] = []
    if reports:
        places = Counter(report.place for report in fired)
        order = (*PLACES, "recovery")
        counted = [f"{place} {places.pop(place)}" for place in order if place in places]
        counted += [f"{place} {number}" for place, number in places.items()]
        lines += [
            Text(
                "Milliseconds from the signal until "
                + "; ".join(f"{mark}: {meaning}" for mark, meaning in COLUMNS.items())
                + ".",
                style="dim",
            ),
            Text(""),
            Text(
                f"{len(fired)} of {len(reports)} faults fired: {', '.join(counted) or 'none'}",
                style="" if len(fired) == len(reports) else "bold red",
            ),
        ]
    times = sorted(report.recovered_ms for report in fired if report.recovered_ms is not None)
    if times:
        median = times[len(times) // 2]
        lines.append(
            Text(
                f"Signal to the next committed step on all ranks: median {median:.0f} ms, "
                f"longest {times[-1]:.0f} ms, one step's own time included"
            )
        )
    if cost.step_ms is not None and cost.overhead_percent is not None:
        lines.append(
            Text(
                f"Step time: {cost.step_ms:.1f} ms, {cost.overhead_percent:+.1f} % against plain torch{_spread(cost)}: "
                f"medians over {cost.num_paired} undisturbed steps, each paired with itself in the other run"
            )
        )
    if failure is not None:
        lines.append(Text(f"The job failed, so there is nothing to compare: {failure}", style="bold red"))
    else:
        lines += [Text(""), verdict_table(settings, verdict)]
    return Group(*lines)


def _spread(cost: Cost) -> str:
    if cost.overhead_quartiles is None:
        return ""
    low, high = cost.overhead_quartiles
    return f" (quartiles {low:+.1f} and {high:+.1f} %)"


def verdict_table(settings: Settings, verdict: Verdict) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    rows = (
        ("weights", verdict.weights_identical),
        ("optimizer state", verdict.optimizer_identical),
        ("losses", verdict.losses_identical),
    )
    for name, same in rows:
        table.add_row(
            name, Text("bit-identical", style="bold green") if same else Text("DIFFERENT", style="bold red")
        )
    head = (
        f"Against the undisturbed run in plain torch under torchrun ({settings.ranks} ranks, {settings.steps} steps; "
        f"{verdict.num_tensors} tensors and {verdict.num_losses} losses compared):"
    )
    parts: list[RenderableType] = [Text(head), table]
    if verdict.first_difference is not None:
        parts.append(Text(f"First difference: {verdict.first_difference}", style="red"))
    return Group(*parts)


def _ms(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
