"""`flashrec ...`: what people type. Each command is a module; none of them imports torch."""

import sys

import click

from flashrec import __version__
from flashrec.cli.demo import demo
from flashrec.cli.fence import fence
from flashrec.cli.keygen import keygen
from flashrec.cli.kill import kill
from flashrec.cli.plan import plan
from flashrec.cli.profile import profile
from flashrec.cli.run import run
from flashrec.cli.simulate import simulate
from flashrec.cli.status import status
from flashrec.errors import FlashrecError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashrec")
def commands() -> None:
    """PyTorch training that survives failures without checkpoints."""


commands.add_command(run)
commands.add_command(status)
commands.add_command(kill)
commands.add_command(demo)
commands.add_command(keygen)
commands.add_command(fence)
commands.add_command(simulate)
commands.add_command(profile)
commands.add_command(plan)


def main() -> None:
    """The `flashrec` program: an error of ours is one line, and exit code 1."""
    try:
        commands()
    except FlashrecError as error:
        print(f"flashrec: {error}", file=sys.stderr)
        sys.exit(1)
