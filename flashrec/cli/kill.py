"""`flashrec kill`: a fault on purpose, to see for oneself."""

import signal
from pathlib import Path

import click

from flashrec.cli.client import connect
from flashrec.protocol import messages as msg

SIGNALS = ("KILL", "STOP", "TERM")


@click.command()
@click.option("--rank", type=int, required=True, help="Which rank's process.")
@click.option(
    "--signal", "name", type=click.Choice(SIGNALS), default="KILL", show_default=True, help="What it gets."
)
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=None, help="Run directory of the daemon."
)
def kill(rank: int, name: str, directory: Path | None) -> None:
    """Send a signal to the process that holds a rank."""
    with connect(directory) as client:
        answer = client.ask(msg.SignalRank(rank, int(signal.Signals[f"SIG{name}"])))
        assert isinstance(answer, msg.Done)
        click.echo(answer.detail)
