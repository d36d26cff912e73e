"""`flashrec plan`: the best strategies for a model on a cluster, and why the others are not."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from flashrec.cli.simulate import (
    FILE,
    GIB,
    console,
    durations_from,
    seconds,
    show_comparison,
    table_of,
    usage_errors,
    write,
)
from flashrec.errors import UsageError

if TYPE_CHECKING:
    from flashrec.sim.inputs import Input
    from flashrec.sim.outcome import Outcome, Ranked


@click.command()
@click.option("--model", type=FILE, help="A file with the model's table.")
@click.option("--cluster", type=FILE, help="A file with the cluster's table.")
@click.option("--global-batch", type=click.IntRange(min=1), help="Sequences in a step.")
@click.option(
    "--config", type=FILE, help="A configuration with all of it; its [strategy] is what is not searched."
)
@click.option(
    "--best", "num_best", type=click.IntRange(min=1), default=10, show_default=True, help="How many to show."
)
@click.option("--schedule", "schedules", multiple=True, help="Only this schedule (may be given again).")
@click.option("--recompute", multiple=True, help="Only this recomputation (may be given again).")
@click.option("--sharding", multiple=True, help="Only this sharding (may be given again).")
@click.option("--max-tensor", type=click.IntRange(min=1), help="Greatest tensor-parallel size.")
@click.option("--max-pipeline", type=click.IntRange(min=1), help="Greatest pipeline-parallel size.")
@click.option("--max-micro-batch", type=click.IntRange(min=1), help="Greatest micro-batch.")
@click.option("--max-chunks", type=click.IntRange(min=1), help="Most chunks of the interleaved schedule.")
@click.option("--profile", type=FILE, help="Measured durations; what it lacks comes from the analytic model.")
@click.option(
    "--goodput", is_flag=True, help="Rank by step / goodput among failures ([failures] in the files)."
)
@click.option("--explain", nargs=2, type=FILE, help="Compare two configurations' steps instead of searching.")
@click.option("--write", "written", type=FILE, help="Write the best here (.json), for `flashrec simulate`.")
@click.option(
    "--json", "as_json", is_flag=True, help="Everything, for a program; every loser with its reason."
)
def plan(
    model: Path | None,
    cluster: Path | None,
    global_batch: int | None,
    config: Path | None,
    num_best: int,
    schedules: tuple[str, ...],
    recompute: tuple[str, ...],
    sharding: tuple[str, ...],
    max_tensor: int | None,
    max_pipeline: int | None,
    max_micro_batch: int | None,
    max_chunks: int | None,
    profile: Path | None,
    goodput: bool,
    explain: tuple[Path, Path] | None,
    written: Path | None,
    as_json: bool,
) -> None:
    """Search all ways to divide a model over a cluster, and rank them by the predicted step.

    Every valid combination of data, tensor, pipeline (and expert) parallelism, schedule, micro-batch, recomputation
    and sharding is considered; what cannot be among the best is not simulated. With --explain A B: where the time of
    two configurations' steps goes, and where their difference comes from.
    """
    with usage_errors():
        if explain:
            compare_files(explain, profile, as_json)
            return
        from flashrec.sim.candidates import Space
        from flashrec.sim.inputs import assemble, config_document
        from flashrec.sim.search import search

        if written is not None and written.suffix != ".json":
            raise UsageError(f"--write {written}: the name must end in .json")
        given = assemble(config, model, cluster, global_batch)
        everything = Space()
        space = Space(
            schedules=schedules or everything.schedules,
            recompute=recompute or everything.recompute,
            sharding=sharding or everything.sharding,
            max_tensor_parallel=max_tensor,
            max_pipeline_parallel=max_pipeline,
            max_micro_batch=max_micro_batch,
            max_chunks=max_chunks,
        )
        with progress_bar() as progress:
            outcome = search(
                given.config.model,
                given.config.cluster,
                given.config.global_batch,
                num_best=num_best,
                space=space,
                base=given.config.strategy,
                durations=durations_from(given, profile, fill_missing=True),
                goodput=given.goodput if goodput else None,
                progress=progress,
            )
        if written is not None:
            document = config_document(given.config, outcome.best[0].strategy)
            write(written, json.dumps({**document, **failures_of(given)}, indent=1) + "\n")
        if as_json:
            click.echo(json.dumps(outcome.to_json(), indent=2))
        else:
            console().print(render(given, outcome))


def failures_of(given: Input) -> dict[str, object]:
    """The input's table of failures, if it has one."""
    return {"failures": given.failures} if given.failures else {}


def compare_files(paths: tuple[Path, Path], profile: Path | None, as_json: bool) -> None:
    """Both steps laid out, class by class."""
    from flashrec.sim.inputs import load_input
    from flashrec.sim.report import simulate

    found = []
    for path in paths:
        given = load_input(path)
        if given.config.strategy is None:
            raise UsageError(f"{path} has no [strategy] to compare")
        found.append((path, simulate(given.config, durations_from(given, profile, fill_missing=True))))
    show_comparison(found[0], found[1], as_json)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """On a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("strategies", total=None)

        def show(done: int, of: int) -> None:
            bar.update(
                task,
                completed=done,
                total=of if done else None,
                description="strategies settled" if done else f"strategies found: {of:,}",
            )

        yield show


def render(given: Input, outcome: Outcome) -> RenderableType:
    """The ranking, and the losers by reason."""
    config = given.config
    head = (
        f"{config.model.name} on {config.cluster.num_devices:,} x {config.cluster.device.name}, global batch "
        f"{config.global_batch:,}: {outcome.num_considered:,} strategies, {outcome.num_simulated:,} simulated, "
        f"the others ruled out by bounds, in {outcome.took_s:.1f} s"
    )
    return Group(Text(head), Text(), best_table(given, outcome.best), Text(), losers_table(outcome))


def best_table(given: Input, best: tuple[Ranked, ...]) -> RenderableType:
    """The best, first to last, with the figures that tell them apart."""
    by_goodput = best[0].goodput is not None
    columns = ["", "TP", "PP", "DP", "micro", "<schedule", "<recompute", "<sharding", "step"]
    columns += ["goodput", "net step"] if by_goodput else []
    columns += ["tokens/s", "bubble", "exposed*", "GiB"]
    if experts := given.config.model.moe:
        columns.insert(4, "EP")
    table = table_of("The best", *columns)
    tokens = given.config.global_batch * given.config.model.sequence
    for number, one in enumerate(best, 1):
        s = one.strategy
        schedule = (
            "-" if s.pipeline_parallel == 1 else str(s.schedule) + (f" x{s.chunks}" if s.chunks > 1 else "")
        )
        exposed = (one.parts.exchanges + one.parts.communication) / one.batch_s
        table.add_row(
            str(number),
            *(str(size) for size in (s.tensor_parallel, s.pipeline_parallel, s.data_parallel)),
            *([str(s.expert_parallel)] if experts else []),
            str(s.micro_batch),
            schedule,
            s.recompute,
            s.sharding,
            seconds(one.batch_s),
            *([f"{one.goodput:.2%}", seconds(one.score_s)] if one.goodput is not None else []),
            f"{tokens / one.score_s:,.0f}",
            f"{one.bubble:.1%}",
            f"{exposed:.1%}",
            f"{one.memory_bytes / GIB:.1f}",
        )
    note = "* of the busiest stage's step: exchanges inside layers, transfers, gradients, optimizer"
    note += "; net step: step / goodput" if by_goodput else ""
    return Group(table, Text(note, style="dim"))


def losers_table(outcome: Outcome) -> RenderableType:
    """How many lose for which reason, and the one that came nearest."""
    from flashrec.sim.outcome import REASONS
    from flashrec.sim.report import one_line

    table = table_of("Why the others lose", "", "number", "median", "<the nearest of them")
    fastest = min(one.batch_s for one in outcome.best)
    for reason, losers in outcome.by_reason().items():
        nearest = losers[0]
        if nearest.seconds is None:
            by = f"{statistics.median(loser.over_bytes for loser in losers) / GIB:,.1f} GiB"
        else:
            by = f"{statistics.median(loser.seconds or 0.0 for loser in losers) / fastest - 1:+.0%}"
        detail = nearest.detail.split(";")[0]
        table.add_row(REASONS[reason], f"{len(losers):,}", by, f"{one_line(nearest.strategy)}: {detail}")
    note = "median: how much too large for a device, or how much slower than the fastest of the best"
    return Group(table, Text(note, style="dim"))
