"""`flashrecd`: the daemon of one node.

flashrecd                            in the default run directory
flashrecd --dir /run/flashrec --metrics 127.0.0.1:9475
"""

import asyncio
import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path

import click

from flashrec import __version__
from flashrec.errors import EnvironmentFault
from flashrec.protocol.places import default_run_dir
from flashrecd.shell import Daemon

PR_SET_PDEATHSIG = 1


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
@click.option("--owner-pid", type=int, default=None, hidden=True, help="End when this parent process does.")
def main(directory: Path | None, metrics: str | None, owner_pid: int | None) -> None:
    """Keep the state of this node's ranks in memory, and replace those that die."""
    if owner_pid is not None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != owner_pid:
            sys.exit(1)
    try:
        daemon = Daemon(
            directory or default_run_dir(),
            metrics_address=_address(metrics),
            has_owner=owner_pid is not None,
        )
        asyncio.run(daemon.serve())
    except EnvironmentFault as error:
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
