"""`flashrecd`: the daemon of one node.

flashrecd                            in the default run directory
flashrecd --dir /run/flashrec --metrics 127.0.0.1:9475
flashrecd --listen 10.0.0.1:7400 --key cluster.key                  the leader of a cluster
flashrecd --join 10.0.0.1:7400 --key cluster.key --domain rack-7    a member of it
"""

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

import click

from flashrec import __version__
from flashrec.errors import EnvironmentFault, UsageError
from flashrec.prctl import die_with_parent
from flashrec.protocol.places import default_run_dir
from flashrecd.cluster.options import BULK, Bulk, cluster_options
from flashrecd.shell import Daemon


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashrecd")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=None,
    help="Run directory (socket, event log).",
)
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    default=None,
    help="Serve /metrics there, for Prometheus. Off by default.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=None,
    help="Lead a cluster, whose other nodes join there. Without --key: loopback addresses only.",
)
@click.option(
    "--join", metavar="HOST:PORT", default=None, help="Be a member of the cluster that is led there."
)
@click.option("--name", default=None, help="Of this node, unique in the cluster.  [default: the host's name]")
@click.option(
    "--domain", default=None, help="What fails together: a rack, say.  [default: this node by itself]"
)
@click.option(
    "--data-address",
    metavar="HOST",
    default=None,
    help="This node's address for the ranks' traffic and for replicas.  [default: the one that cluster messages use]",
)
@click.option(
    "--key",
    "key_file",
    type=click.Path(path_type=Path),
    default=None,
    help="The cluster's key, which `flashrec keygen` has made.",
)
@click.option(
    "--bulk",
    type=click.Choice(BULK),
    default=None,
    help="Whether shards are encrypted between nodes. plain is faster; then whoever can read the network can read "
    "them, and the token that lets one ask for them.  [default: encrypted]",
)
@click.option(
    "--replica-mbps",
    type=float,
    default=None,
    metavar="MB",
    help="Take replicas of other nodes at so many MB (10^6 bytes) per second at most. Steps wait for replicas, so a "
    "cap below what they change makes them longer.  [default: no cap]",
)
@click.option(
    "--compress-replicas",
    is_flag=True,
    help="Have replicas of other nodes sent compressed, without loss, where that makes them smaller. It takes CPU time "
    "from both nodes, and pays on slow links.",
)
@click.option("--owner-pid", type=int, default=None, hidden=True, help="End when this parent process does.")
def main(
    directory: Path | None,
    metrics: str | None,
    listen: str | None,
    join: str | None,
    name: str | None,
    domain: str | None,
    data_address: str | None,
    key_file: Path | None,
    bulk: Bulk | None,
    replica_mbps: float | None,
    compress_replicas: bool,
    owner_pid: int | None,
) -> None:
    """Keep the state of this node's ranks in memory, and replace those that die."""
    if owner_pid is not None:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != owner_pid:
            sys.exit(1)
    try:
        daemon = Daemon(
            directory or default_run_dir(),
            metrics_address=_address(metrics),
            has_owner=owner_pid is not None,
            cluster=cluster_options(
                listen=listen,
                join=join,
                name=name,
                domain=domain,
                data_address=data_address,
                key_file=key_file,
                bulk=bulk,
                replica_mbps=replica_mbps,
                compress_replicas=compress_replicas,
            ),
        )
        asyncio.run(daemon.serve())
    except (EnvironmentFault, UsageError) as error:
        print(f"flashrecd: {error}", file=sys.stderr)
        sys.exit(1)
    if owner_pid is not None and directory is not None and os.getppid() != owner_pid:
        shutil.rmtree(directory, ignore_errors=True)  # the owner was killed, and cannot do it any more


def _address(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise click.BadParameter(f"{text!r} is not HOST:PORT", param_hint="--metrics")
    return host.strip("[]"), int(port)


if __name__ == "__main__":
    main()
