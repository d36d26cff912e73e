"""`flashrec profile`: time a step's distinct events, and keep them in a file for `simulate` and `plan`."""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flashrec.cli.simulate import usage_errors
from flashrec.errors import UsageError

if TYPE_CHECKING:
    from flashrec.sim.architecture import Architecture
    from flashrec.sim.events import Event
    from flashrec.sim.profile import Profile
    from flashrec.sim.timing import Seconds

FILE = click.Path(path_type=Path, dir_okay=False)
T = TypeVar("T")


@click.command()
@click.option("--model", help="A file with a [model] table, or MODULE:FUNCTION that returns a traced module.")
@click.option("--cluster", type=FILE, help="A file with a [cluster] table.")
@click.option("--strategy", type=FILE, help="A file with a [strategy] table.")
@click.option(
    "--global-batch", type=int, help="Samples of a step.  [default: global_batch of STRATEGY's file]"
)
@click.option(
    "-o", "--out", type=FILE, help="The profile; what it holds already is kept and not timed again."
)
@click.option("--merge", type=FILE, multiple=True, help="Take another profile's events in first.")
@click.option("--rounds", type=int, default=20, show_default=True, help="How often each event is timed.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--master", help="HOST:PORT of rank 0: time what happens between two nodes, with --rank on each."
)
@click.option("--rank", type=click.IntRange(0, 1), default=0, help="With --master: which of the two this is.")
@click.option("--dry-run", is_flag=True, help="Print what would be timed.")
@click.option("--show", type=FILE, help="Print what a profile holds.")
def profile(
    model: str | None,
    cluster: Path | None,
    strategy: Path | None,
    global_batch: int | None,
    out: Path | None,
    merge: tuple[Path, ...],
    rounds: int,
    device: str,
    master: str | None,
    rank: int,
    dry_run: bool,
    show: Path | None,
) -> None:
    """Time the distinct events of a training step with two processes, and write a profile.

    One file may hold all three tables and global_batch: name it three times. Only what the profile lacks is timed.
    A profile that has all, or could be completed, is exit code 0; events that two ranks here cannot time are listed.
    """
    with usage_errors():
        if show is not None:
            click.echo(_load(show).inspect())
            return
        known = _known(merge, out)
        if merge and model is None and out is not None:
            known.save(out)
            click.echo(f"{out}: {len(known.samples)} events")
            return
        target = _needed(out, "--out")
        from flashrec.sim.profiler import plan

        lacking = known.missing(_events(model, cluster, strategy, global_batch))
        planned = plan(lacking, nodes=1 if master is None else 2, device=device)
        wanted = [event for event in planned.events if event not in known.samples]
        if dry_run:
            for event in wanted:
                click.echo(str(event))
        else:
            found = _measured(wanted, rounds, device, master, rank)
            if rank == 0:
                _save(known, found, target, device)
        for event, reason in sorted(planned.impossible.items(), key=str):
            click.echo(f"not timed: {event}: {reason}", err=True)


def _known(merge: tuple[Path, ...], out: Path | None) -> Profile:
    """What the given profiles hold together."""
    from flashrec.sim.profile import Profile

    known = Profile()
    for path in (*merge, *([out] if out is not None and out.exists() else [])):
        known = known.merged(_load(path))
    return known


def _measured(wanted: list[Event], rounds: int, device: str, master: str | None, rank: int) -> Seconds:
    from flashrec.sim.kernels import TorchKernels
    from flashrec.sim.profiler import measure, measure_between_nodes

    if master is not None:
        return measure_between_nodes(wanted, master, rank, rounds=rounds, kernels=TorchKernels(device))
    return measure(wanted, rounds=rounds, kernels=TorchKernels(device))


def _save(known: Profile, found: Seconds, out: Path, device: str) -> None:
    from flashrec.sim.profiler import to_profile

    if found:
        command = shlex.join(["flashrec", *sys.argv[1:]])
        known = known.merged(to_profile(found, command, device=device))
    known.save(out)
    click.echo(f"{out}: {len(found)} events timed, {len(known.samples)} in all")


def _events(
    model: str | None, cluster: Path | None, strategy: Path | None, global_batch: int | None
) -> tuple[Event, ...]:
    from flashrec.sim.config import read_cluster, read_strategy, read_table
    from flashrec.sim.profiler import distinct_events

    strategy_file = _needed(strategy, "--strategy")
    tables = read_table(strategy_file)
    batch = global_batch if global_batch is not None else tables.get("global_batch")
    if batch is None:
        raise UsageError(f"give --global-batch: {strategy_file} has no global_batch")
    return distinct_events(
        _model(_needed(model, "--model")),
        read_cluster(_table(_needed(cluster, "--cluster"), "cluster")),
        read_strategy(_table(strategy_file, "strategy")),
        batch,
    )


def _model(text: str) -> Architecture:
    from flashrec.sim.config import read_model

    module, colon, function = text.partition(":")
    if not colon:
        return read_model(_table(Path(text), "model"))
    sys.path.insert(0, "")
    try:
        made: Architecture = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--model {text}: {error}") from error
    finally:
        sys.path.remove("")
    return made


def _table(path: Path, name: str) -> Any:
    """The table of that name in the file, or the whole file where it has none."""
    from flashrec.sim.config import read_table

    found = read_table(path)
    return found.get(name, found)


def _load(path: Path) -> Profile:
    from flashrec.sim.profile import Profile

    if not path.exists():
        raise UsageError(f"{path} does not exist")
    return Profile.load(path)


def _needed(value: T | None, option: str) -> T:
    if value is None:
        raise UsageError(f"give {option} (see flashrec profile --help)")
    return value
