"""`flashrec fence`: what only a person, or a power switch, can know of a lost node."""

from pathlib import Path

import click

from flashrec.cli.client import connect
from flashrec.protocol import messages as msg


@click.command()
@click.argument("node")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=None, help="Run directory of the daemon."
)
def fence(node: str, directory: Path | None) -> None:
    """Say that nothing runs any more on NODE, which the job has lost.

    Needed only where every rank of the job was on lost nodes: then nobody else can know that none of them trains on,
    and the job waits. Make sure of it first: power the node off, or cut it from the network.
    """
    with connect(directory) as client:
        answer = client.ask(msg.FenceNode(node))
        assert isinstance(answer, msg.Done)
        click.echo(answer.detail)
