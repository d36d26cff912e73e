"""What the demo of one parallelism and one kind of fault found, judged and in words. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashrec.cli.demo.daemon import DaemonStrike
from flashrec.cli.demo.faults import FaultReport
from flashrec.cli.demo.report import verdict_table
from flashrec.cli.demo.settings import FAULTS, PARALLEL, Settings
from flashrec.cli.demo.timing import StepLine, committed_again
from flashrec.cli.demo.verdict import Verdict
from flashrec.cli.status import PLACE_STYLES

ALLOWED_AGAIN = {"live": 0, "sealed": 1}
"""Committed steps that a recovery may make the ranks do again."""
WIDE = 100
LEGEND = (
    "recovered: milliseconds from the signal until the next step was committed on all ranks (detected, planned, "
    "formed: until the daemon saw the last death, had a plan, and all ranks were connected again); resumed: the step "
    "that all went on with; again: a committed step that was done again, by the ranks' logs and the tags of the dead"
)
UNKNOWN_CAUSE = -1


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that the verdict rests on."""

    settings: Settings
    reports: Sequence[FaultReport]
    again: Mapping[int, set[int]]
    """By the fault's index: the committed steps that were done again after it."""
    daemon: DaemonStrike | None
    regime: str
    why_sealed: str
    verdict: Verdict
    failure: str | None

    @property
    def most_again(self) -> int:
        return max(map(len, self.again.values()), default=0)

    @property
    def passed(self) -> bool:
        return self.verdict.identical and not self.complaints()

    def complaints(self) -> list[str]:
        """What is not as it should be, the bits aside."""
        found = [] if self.failure is None else [f"the job failed: {self.failure}"]
        if self.settings.fault == "daemon":
            found += _daemon_complaints(self.daemon)
        allowed = ALLOWED_AGAIN.get(self.regime, 0)
        for report in self.reports:
            found += [f"fault {report.fault.index + 1} {words}" for words in _complaints(report)]
        for index, steps in self.again.items():
            if len(steps) > allowed or index == UNKNOWN_CAUSE:
                cause = "without a cause" if index == UNKNOWN_CAUSE else f"after fault {index + 1}"
                found.append(
                    f"committed steps {_numbers(sorted(steps))} were done again {cause}; the {self.regime} "
                    f"regime allows {allowed}"
                )
        return found

    def to_json(self) -> dict[str, Any]:
        """What --json has besides the facts of every demo."""
        return {
            "parallel": self.settings.parallel,
            "fault": self.settings.fault,
            "regime": self.regime,
            "why_sealed": self.why_sealed,
            "most_committed_steps_again": self.most_again,
            "daemon": None if self.daemon is None else self.daemon.to_json(),
            "passed": self.passed,
            "complaints": self.complaints(),
        }


def steps_again(lines: Sequence[StepLine], reports: Sequence[FaultReport]) -> dict[int, set[int]]:
    """By the fault's index: committed steps done again, by the ranks' logs or by the tags of the dead."""
    signals_ns = {report.fault.index: report.strike.signal_ns for report in reports if report.strike}
    again = committed_again(lines, signals_ns)
    for report in reports:
        if report.strike is not None:
            again[report.fault.index] |= report.taken_back
    return again


def _complaints(report: FaultReport) -> list[str]:
    struck, meant = len(report.strikes), len(report.fault.ranks)
    if not struck:
        return ["never fired"]
    if struck < meant:
        return [f"killed {struck} of {meant} ranks only"]
    if not report.seen:
        return [f"killed {struck}, of which the daemon has seen {report.num_seen}"]
    return [] if report.complete else ["was not recovered from"]


def _daemon_complaints(strike: DaemonStrike | None) -> list[str]:
    if strike is None:
        return ["the daemon was never killed"]
    if not strike.started_ns:
        return ["the daemon was killed, and the run was over before another was started"]
    return [] if strike.adopted_ns else ["the new daemon never had all the ranks"]


# --- in words ---------------------------------------------------------------------------------------------


def heading(settings: Settings) -> Text:
    """What is trained, and what for."""
    return Text.assemble(
        (f"{settings.parallel} on {settings.ranks} ranks", "bold"), f": {PARALLEL[settings.parallel]}\n",
        f"{settings.model[0].upper()}{settings.model[1:]}, {settings.steps} steps; SIGKILL to {FAULTS[settings.fault]}",
    )  # fmt: skip


def regime(name: str, why: str) -> Text:
    if name == "sealed":
        return Text.assemble(
            ("Sealed regime", "bold"),
            f": {why}. So each version is sealed in shared memory, and one committed step may be done again.",
        )
    return Text.assemble(
        (f"{name.capitalize()} regime", "bold"),
        ": every rank holds the whole state. The living give it to replacements, and no committed step is done again.",
    )


def killed(report: FaultReport) -> str:
    """Who was killed and where, for a line of its own."""
    assert report.strike is not None
    step = f" of step {report.strike.step}" if report.strike.step >= 0 else ""
    if len(report.strikes) == 1:
        return f"rank {report.strike.rank} killed in {report.strike.place}{step}"
    ranks = _numbers(sorted(strike.rank for strike in report.strikes))
    return f"ranks {ranks} killed at once, in {_places(report)}{step}"


def daemon_words(strike: DaemonStrike) -> list[str]:
    """What became of the daemon so far, a line for each thing."""
    lines = [f"daemon: pid {strike.pid} killed when every rank had committed {strike.step} steps"]
    if strike.started_ns:
        lines.append(
            f"daemon: {strike.steps_without} steps were committed without one; then pid {strike.new_pid} was started"
        )
    if strike.adopted_ms is not None:
        lines.append(
            f"daemon: the new one had every rank, in the same process, after {strike.adopted_ms:.0f} ms"
        )
    return lines


def strike_table(
    reports: Sequence[FaultReport],
    width: int,
    *,
    again: Mapping[int, set[int]] | None = None,
    now_ns: int | None = None,
) -> Table:
    """A row for each fault. `now_ns`: the run goes on, so what is missing may come yet."""
    marks = ("detected", "planned", "formed") if width >= WIDE else ()
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for column in ("fault", "ranks", "killed in", "step", *marks, "recovered", "resumed", "again"):
        left = column in ("ranks", "killed in")
        # Four ranks may be in four places: where that is too long, it goes on in a second line.
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "killed in")
    for report in reports:
        number, ranks = str(report.fault.index + 1), " ".join(map(str, sorted(report.fault.ranks)))
        if report.strike is None:
            style = "dim" if now_ns is not None else "bold red"
            planned = report.fault.place or "random"
            text = planned if now_ns is not None else f"{planned}: never fired"
            table.add_row(number, ranks, Text(text, style=style), Text(f"{report.fault.step}+", style=style))
            continue
        place = Text(_places(report), style=PLACE_STYLES.get(report.strike.place, "red"))
        times = [_ms(report.timeline.get(mark)) for mark in marks]
        resumed = "" if report.version is None else str(report.version)
        steps = "" if again is None else _again(again.get(report.fault.index, set()))
        step = "" if report.step is None else str(report.step)
        table.add_row(number, ranks, place, step, *times, _recovered(report, now_ns), resumed, steps)
    return table


def summary(found: Findings) -> RenderableType:
    """The verdict and what it rests on."""
    lines: list[RenderableType] = []
    if found.reports:
        lines += [
            Text(LEGEND, style="dim"),
            Text(""),
        ]
    if found.daemon is not None:
        lines += [*map(Text, daemon_words(found.daemon)), Text("")]
    if found.failure is None:
        lines += [verdict_table(found.settings, found.verdict), Text("")]
    lines += [Text(f"Not as it should be: {words}", style="bold red") for words in found.complaints()]
    if found.passed:
        lines.append(Text(_passed(found), style="bold green"))
    return Group(*lines)


def _passed(found: Findings) -> str:
    deaths = sum(report.num_seen for report in found.reports)
    again = "no committed step" if not found.most_again else "at most one committed step"
    done = f"{again} was done again after any of them" if found.reports else "nothing was killed"
    daemon = " and that of the daemon" if found.daemon is not None else ""
    return (
        f"{found.settings.parallel} survived {deaths} deaths{daemon}, all on record: same bits, and {done}."
    )


def _places(report: FaultReport) -> str:
    if len(report.strikes) == 1:
        return report.strikes[0].place
    counted = Counter(strike.place for strike in report.strikes)
    return ", ".join(f"{place} ×{number}" if number > 1 else place for place, number in counted.items())


def _recovered(report: FaultReport, now_ns: int | None) -> Text:
    assert report.strike is not None
    if report.recovered_ms is not None:
        return Text(_ms(report.recovered_ms), style="bold green")
    if now_ns is not None:
        return Text(f"{(now_ns - report.strike.signal_ns) / 1e6:.0f} …", style="yellow")
    return Text("never", style="bold red")


def _again(steps: set[int]) -> str:
    return f"step {_numbers(sorted(steps))}" if steps else "-"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
