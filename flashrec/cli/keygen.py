"""`flashrec keygen`: the key that the nodes of a cluster share."""

from pathlib import Path

import click

from flashrec.protocol.keys import ClusterKey


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def keygen(path: Path) -> None:
    """Write a new cluster key to PATH, for `flashrecd --key`. Nothing is ever overwritten.

    Whoever has the file can join the cluster: copy it to every node, readable by the daemon's user alone."""
    ClusterKey.generate().write(path)
    click.echo(f"{path}: copy it to every node of the cluster, and let nobody else read it")
