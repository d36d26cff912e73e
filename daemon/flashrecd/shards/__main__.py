"""`python -m flashrecd.shards`: the shard server's command line; the daemon starts it."""

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from flashrec.errors import FlashrecError, UsageError
from flashrec.state.shardwire import MAX_KEY_BYTES
from flashrecd.shards.server import serve

PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flashrecd.shards", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the job's directory in shared memory")
    parser.add_argument(
        "--bind",
        action="append",
        required=True,
        metavar="ENDPOINT",
        help="ipc://PATH or tcp://127.0.0.1:PORT",
    )
    parser.add_argument("--key-file", type=Path, help="file with the key that every request must carry")
    parser.add_argument("--owner-pid", type=int, help="end when this parent process does")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input closes")
    options = parser.parse_args(arguments)
    if options.owner_pid is not None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != options.owner_pid:
            return 1
    try:
        if not options.root.is_dir():
            raise UsageError(f"{options.root} is not a directory")
        serve(options.root, options.bind, _key(options.key_file), exit_with_stdin=options.exit_with_stdin)
    except FlashrecError as error:
        print(f"flashrecd.shards: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _key(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"cannot read the key file {path}: {error.strerror}") from error
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise UsageError(f"the key in {path} must have 1 to {MAX_KEY_BYTES} bytes")
    return key


if __name__ == "__main__":
    sys.exit(main())
