"""The run as it goes: a live picture on a terminal, plain lines anywhere else."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flashrec.cli.demo import brief
from flashrec.cli.demo.faults import FaultReport
from flashrec.cli.demo.report import fault_table
from flashrec.cli.demo.schedule import PLACES
from flashrec.cli.demo.settings import PARALLEL, Settings
from flashrec.cli.demo.training import Record
from flashrec.cli.status import PLACE_STYLES
from flashrec.protocol.tag import Tag

REFRESH_S = 0.2
LINE_EVERY_STEPS = 10
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
LANE = (*PLACES, "recovery")


class LiveView:
    """Redraws a few times a second; drawing costs the training a few ms each time, so not more often."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._settings = settings
        self._curve = Curve()
        self._began = time.monotonic()
        self._drawn_at = 0.0
        self._done = 0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def training(self, tags: Sequence[Tag | None], record: Record) -> None:
        self._curve.see(tags)
        now = time.monotonic()
        if now - self._drawn_at < REFRESH_S:
            return
        self._drawn_at = now
        # A replacement has committed nothing yet, which takes nothing back.
        self._done = max(self._done, min((tag.committed if tag is not None else 0) for tag in tags))
        faults, width, now_ns = record.reports(), self._live.console.width, time.monotonic_ns()
        table = brief.strike_table if self._settings.brief else fault_table
        parts = [
            self._head("under flashrec, ranks killed from outside", self._done),
            Text(""),
            rank_grid(tags, faults),
            Text(""),
            self._curve.render(),
            Text(""),
            table(faults, width, now_ns=now_ns),
        ]
        if record.daemon is not None:
            parts += [Text(""), *map(Text, brief.daemon_words(record.daemon))]
        self._live.update(Group(*parts), refresh=True)

    def reference(self, done: int) -> None:
        head = self._head("the reference: plain torch under torchrun, undisturbed", done)
        self._live.update(head, refresh=True)

    def _head(self, what: str, done: int) -> RenderableType:
        steps = self._settings.steps
        trained = self._settings.parallel if self._settings.brief else self._settings.model
        title = Text.assemble(
            ("flashrec demo", "bold"), f"  {trained} on {self._settings.ranks} ranks, {what}"
        )
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            Text(f"step {done:>3} of {steps}"),
            ProgressBar(total=steps, completed=done, width=40),
            Text(f"{time.monotonic() - self._began:.0f} s", style="dim"),
        )
        return Group(title, progress)


class Lines:
    """Lines for a log: each thing once, when it happens."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console = console
        self._settings = settings
        self._struck: set[int] = set()
        self._recovered: set[int] = set()
        self._step = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def _recovery(self, index: int, recovered_ms: float | None) -> None:
        """The job has recovered from fault `index` by then; None: not yet."""
        if recovered_ms is not None and index not in self._recovered:
            self._recovered.add(index)
            self._line(f"fault {index + 1}: recovered, {recovered_ms:.0f} ms after the signal")

    def _progress(self, tags: Sequence[Tag | None]) -> None:
        known = [tag for tag in tags if tag is not None]
        done = min((tag.committed for tag in known), default=-1)
        if len(known) == len(tags) and done >= self._step + LINE_EVERY_STEPS:
            self._step = done - done % LINE_EVERY_STEPS
            losses = [tag.loss for tag in known if tag.loss == tag.loss]
            mean = f", loss {sum(losses) / len(losses):.3f}" if losses else ""
            self._line(f"step {self._step} of {self._settings.steps}{mean}")

    def reference(self, done: int) -> None:
        if done == 1:
            self._line("the reference begins: plain torch under torchrun")

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class PlainView(Lines):
    """Of the demo on one node."""

    def __init__(self, console: Console, settings: Settings) -> None:
        super().__init__(console, settings)
        self._told_of_daemon = 0

    def __enter__(self) -> "PlainView":
        depth = {"none": "no standby"}.get(self._settings.standby, f"a {self._settings.standby} standby")
        if self._settings.brief:
            self._line(f"{self._settings.parallel}: {PARALLEL[self._settings.parallel]}")
        self._line(
            f"{self._settings.model} on {self._settings.ranks} ranks with {depth}, {self._settings.steps} steps"
        )
        return self

    def training(self, tags: Sequence[Tag | None], record: Record) -> None:
        if record.daemon is not None:
            lines = brief.daemon_words(record.daemon)
            for line in lines[self._told_of_daemon :]:
                self._line(line)
            self._told_of_daemon = len(lines)
        for report in record.reports():
            index = report.fault.index
            if report.fired and index not in self._struck:
                self._struck.add(index)
                self._line(f"fault {index + 1}: {brief.killed(report)}")
            self._recovery(index, report.recovered_ms)
        self._progress(tags)


View = LiveView | PlainView


class Curve:
    """The mean loss of each step, as bars."""

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}

    def see(self, tags: Sequence[Tag | None]) -> None:
        losses = [tag.loss for tag in tags if tag is not None and tag.loss == tag.loss]
        if losses:
            self._losses[max(tag.step for tag in tags if tag is not None)] = sum(losses) / len(losses)

    def render(self) -> Text:
        values = [self._losses[step] for step in sorted(self._losses)]
        if not values:
            return Text("loss  the ranks are starting", style="dim")
        per_bar = -(-len(values) // CURVE_WIDTH)
        means = [
            sum(values[n : n + per_bar]) / len(values[n : n + per_bar])
            for n in range(0, len(values), per_bar)
        ]
        low, high = min(means), max(means)
        scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
        bars = "".join(BARS[round((mean - low) * scale)] for mean in means)
        return Text.assemble("loss  ", (bars, "cyan"), f"  {values[-1]:.3f}")


def rank_grid(tags: Sequence[Tag | None], faults: Sequence[FaultReport]) -> Table:
    """A row for each rank, a column for each place; the mark shows where the rank is."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("rank", justify="right")
    table.add_column("step", justify="right")
    table.add_column("loss", justify="right", min_width=6)
    for place in LANE:
        table.add_column(place, justify="center")
    table.add_column("lost", justify="left")
    for rank, tag in enumerate(tags):
        strikes = [strike for report in faults for strike in report.strikes if strike.rank == rank]
        marks = Text("✗" * len(strikes), style="red")
        if tag is None:
            table.add_row(str(rank), "", "", Text("starting", style="dim"), *[""] * (len(LANE) - 1), marks)
            continue
        mark, style = "●", PLACE_STYLES.get(tag.place, "red")
        if strikes and tag.changed_ns < strikes[-1].died_ns:  # the tag a dead process left
            mark, style = "✗", "bold red"
        lane = [Text(mark, style=style) if tag.place == place else Text("·", style="dim") for place in LANE]
        loss = f"{tag.loss:.4f}" if tag.loss == tag.loss else ""
        table.add_row(str(rank), str(max(0, tag.step)), loss, *lane, marks)
    return table
