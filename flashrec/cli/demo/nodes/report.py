"""What the demo on several nodes says: lines as it goes, a table, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from flashrec.cli.demo import brief
from flashrec.cli.demo.nodes.findings import NodeFindings, NodeReport
from flashrec.cli.demo.nodes.strike import NodeStrike
from flashrec.cli.demo.nodes.training import NodeRecord
from flashrec.cli.demo.report import verdict_table
from flashrec.cli.demo.settings import NODE_FAULTS, PARALLEL, Settings
from flashrec.cli.demo.training import Record
from flashrec.cli.demo.view import Lines
from flashrec.cli.status import PLACE_STYLES
from flashrec.protocol.tag import Tag

LEADER = "The leader's node is not struck: its loss would end the job, for now."
LEGEND = (
    "recovered: milliseconds from the signal until the next step was committed on all ranks (detected, planned, "
    "formed: until the leader took the ranks for lost, had a plan, and all ranks were connected again); then: where "
    "the ranks went on; resumed: the step that all went on with; again: a committed step that was done again, by the "
    "ranks' logs and the tags of the lost"
)


def heading(settings: Settings) -> Text:
    """What is trained, on what, and what for."""
    where = "each in a network namespace" if settings.namespaces else "each at an address of 127.0.0.0/8"
    kept = {0: "no replica", 1: "one replica"}.get(settings.replicas, f"{settings.replicas} replicas")
    return Text.assemble(
        (f"{settings.parallel} on {settings.ranks} ranks", "bold"), f": {PARALLEL[settings.parallel]}\n",
        f"{settings.model[0].upper()}{settings.model[1:]}, {settings.steps} steps\n",
        f"{settings.nodes} nodes and {settings.spare_nodes} to spare, {where}, with {kept} of what a rank seals\n",
        f"Struck: {NODE_FAULTS[settings.fault]}. {LEADER}",
    )  # fmt: skip


def struck(strike: NodeStrike) -> str:
    """What was done, for a line of its own."""
    first = strike.ranks[0]
    ranks = " ".join(str(rank) for rank in sorted(one.rank for one in strike.ranks))
    step = f" of step {first.step}" if first.step >= 0 else ""
    where = f"rank {first.rank} in {first.place}{step}"
    match strike.kind:
        case "rank":
            return f"{where} killed, on {strike.node}"
        case "daemon":
            return f"{strike.node}: its daemon killed, with {where}; ranks {ranks} live"
        case "link":
            return f"{strike.node} (ranks {ranks}): its link cut, with {where}"
    more = f"; {strike.detail}" if strike.detail else ""
    return (
        f"{strike.node} (ranks {ranks}) lost, with {where}: memory of {strike.num_files} files deleted, then "
        f"{strike.num_processes} processes killed{more}"
    )


class NodeView(Lines):
    """Of the demo over several nodes."""

    def __init__(self, console: Console, settings: Settings) -> None:
        super().__init__(console, settings)
        self._healed: set[int] = set()
        self._noticed = self._anew = 0

    def __enter__(self) -> NodeView:
        self._console.print(heading(self._settings))
        return self

    def training(self, tags: Sequence[Tag | None], record: Record) -> None:
        assert isinstance(record, NodeRecord)
        for strike in record.node_strikes:
            number = strike.index + 1
            if strike.index not in self._struck:
                self._struck.add(strike.index)
                self._line(f"fault {number}: {struck(strike)}")
            if strike.healed_ns and strike.index not in self._healed:
                self._healed.add(strike.index)
                cut_s = (strike.healed_ns - strike.signal_ns) / 1e9
                self._line(f"fault {number}: the link of {strike.node} is healed, after {cut_s:.1f} s")
        for words in record.noticed[self._noticed :]:
            self._line(f"  {words}")
        self._noticed = len(record.noticed)
        for report in record.node_reports():
            self._recovery(report.fault.index, report.recovered_ms)
        for _, name in record.started_anew[self._anew :]:
            self._line(f"{name}: a daemon is started there again")
        self._anew = len(record.started_anew)
        self._progress(tags)


def node_table(reports: Sequence[NodeReport], width: int, again: Mapping[int, set[int]]) -> Table:
    """A row for each fault."""
    marks = ("detected", "planned", "formed") if width >= brief.WIDE else ()
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    columns = (
        "fault",
        "what",
        "node",
        "ranks",
        "in",
        "step",
        *marks,
        "recovered",
        "then",
        "resumed",
        "again",
    )
    for column in columns:
        left = column in ("what", "node", "ranks", "in", "then")
        table.add_column(column, justify="left" if left else "right", no_wrap=column not in ("what", "then"))
    for report in reports:
        number, what = str(report.fault.index + 1), report.fault.kind
        strike = report.strike
        if strike is None:
            table.add_row(number, Text(f"{what}: never fired", style="bold red"))
            continue
        first = strike.ranks[0]
        ranks = " ".join(map(str, sorted(one.rank for one in strike.ranks)))
        place = Text(first.place, style=PLACE_STYLES.get(first.place, "red"))
        step = "" if report.step is None else str(report.step)
        times = [_ms(report.timeline.get(mark)) for mark in marks]
        resumed = "" if report.version is None else str(report.version)
        steps = ", ".join(map(str, sorted(again.get(report.fault.index, ()))))
        table.add_row(
            number, what, strike.node, ranks, place, step, *times, _recovered(report), report.outcome,
            resumed, f"step {steps}" if steps else "-",
        )  # fmt: skip
    return table


def summary(found: NodeFindings) -> RenderableType:
    """The verdict and what it rests on."""
    lines: list[RenderableType] = []
    if found.reports:
        lines += [Text(LEGEND, style="dim"), Text("")]
    if found.orphaned_ms is not None and found.settings.fault == "daemon":
        lines += [
            Text(f"The last of what it had started ended {found.orphaned_ms:.0f} ms after the daemon."),
            Text(""),
        ]
    if found.failure is None:
        lines += [verdict_table(found.settings, found.verdict), Text("")]
    lines += [Text(f"Not as it should be: {words}", style="bold red") for words in found.complaints()]
    if found.passed:
        lines.append(Text(_passed(found), style="bold green"))
    return Group(*lines)


def _passed(found: NodeFindings) -> str:
    again = "no committed step" if not found.most_again else "at most one committed step"
    number = len(found.reports)
    return (
        f"{found.settings.parallel} on {found.settings.nodes} nodes survived {number} "
        f"fault{'s' if number != 1 else ''} ({found.settings.fault}): same bits, and {again} was done again after any."
    )


def _recovered(report: NodeReport) -> Text:
    if report.recovered_ms is not None:
        return Text(_ms(report.recovered_ms), style="bold green")
    lived = report.strike is not None and not report.strike.kills_ranks and report.version is None
    return Text("-") if lived else Text("never", style="bold red")


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
