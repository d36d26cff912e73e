"""`python -m flashrecd.shards`: the shard server's command line; the daemon starts it."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from flashrec.errors import EnvironmentFault, FlashrecError, UsageError
from flashrec.prctl import die_with_parent
from flashrec.protocol.keys import Authenticator, ClusterKey
from flashrec.state.shardwire import MAX_KEY_BYTES
from flashrecd.shards.counters import Counters
from flashrecd.shards.lingering import Lingering
from flashrecd.shards.server import Security, serve


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flashrecd.shards", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the job's directory in shared memory")
    parser.add_argument(
        "--bind",
        action="append",
        required=True,
        metavar="ENDPOINT",
        help="ipc://PATH or tcp://ADDRESS:PORT",
    )
    parser.add_argument("--job", help="the job's name: keep replicas for other nodes")
    parser.add_argument(
        "--key-file", type=Path, help="file with the key that every request by tcp must carry"
    )
    parser.add_argument("--cluster-key", type=Path, help="the cluster's key: serve other nodes by tcp")
    parser.add_argument(
        "--bulk",
        choices=("encrypted", "plain"),
        default="encrypted",
        help="plain: bytes are readable on the wire, and requests carry a token made from the cluster's key",
    )
    parser.add_argument(
        "--open-loopback", action="store_true", help="serve the loopback interface without any key"
    )
    parser.add_argument("--replica-mbps", type=float, help="pull replicas at this many MB/s at most")
    parser.add_argument(
        "--compress-replicas", action="store_true", help="have replicas sent compressed, where that pays"
    )
    parser.add_argument("--owner-pid", type=int, help="end when this parent process does")
    parser.add_argument(
        "--linger-s",
        type=float,
        help="when that parent ends go on, until nobody else has held --root for so long",
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when standard input closes")
    options = parser.parse_args(arguments)
    if options.owner_pid is not None:
        if options.linger_s is None:
            die_with_parent(signal.SIGKILL)
        if os.getppid() != options.owner_pid:
            return 1
    try:
        if not options.root.is_dir():
            raise UsageError(f"{options.root} is not a directory")
        if options.replica_mbps is not None and not options.replica_mbps > 0:
            raise UsageError("--replica-mbps must be more than 0")
        cluster_key = None if options.cluster_key is None else ClusterKey.load(options.cluster_key)
        security = _security(options, cluster_key)
        replicas = None if options.job is None else _replicas(options, cluster_key, security)
        lingering = _lingering(options)
        try:
            serve(
                options.root,
                options.bind,
                security,
                replicas,
                exit_with_stdin=options.exit_with_stdin,
                is_over=lingering.is_over if lingering is not None else lambda: False,
            )
        finally:
            if lingering is not None:
                lingering.leave()
    except FlashrecError as error:
        print(f"flashrecd.shards: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _lingering(options: argparse.Namespace) -> Lingering | None:
    if options.linger_s is None:
        return None
    if options.owner_pid is None or not options.linger_s > 0:
        raise UsageError("--linger-s must be more than 0, and needs an --owner-pid")
    try:
        return Lingering(options.root, options.owner_pid, options.linger_s)
    except OSError as error:
        raise EnvironmentFault(f"cannot hold {options.root}: {error}") from error


def _security(options: argparse.Namespace, cluster_key: ClusterKey | None) -> Security:
    if cluster_key is None:
        return Security(_key(options.key_file), is_open_on_loopback=options.open_loopback)
    if options.key_file is not None:
        raise UsageError("either --key-file or --cluster-key")
    if options.bulk == "plain":
        return Security(cluster_key.token(), is_cluster=True)

    @contextlib.contextmanager
    def authenticate(context: zmq.Context[Any]) -> Iterator[None]:
        def log(line: str) -> None:
            print(f"flashrecd.shards: {line}", file=sys.stderr, flush=True)

        authenticator = Authenticator(context, cluster_key, log)
        try:
            yield
        finally:
            authenticator.close()

    return Security(b"", is_cluster=True, as_server=cluster_key.as_server, authenticate=authenticate)


def _replicas(
    options: argparse.Namespace, cluster_key: ClusterKey | None, security: Security
) -> Callable[[Counters], contextlib.AbstractContextManager[Any]]:
    # Not before it is needed: numpy comes with it.
    from flashrecd.shards.replicas import Replicas
    from flashrecd.shards.replication import Connect, Pace

    secure = cluster_key.as_client if cluster_key is not None and options.bulk == "encrypted" else None
    connect = Connect(security.key, secure, options.compress_replicas)
    bytes_per_s = None if options.replica_mbps is None else options.replica_mbps * 1e6
    return lambda counters: Replicas(
        options.root, options.job, counters, connect, Pace(bytes_per_s, counters)
    )


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
