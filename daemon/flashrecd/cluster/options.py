"""What a daemon is told about its cluster: flashrecd's options, checked."""

import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from flashrec.errors import UsageError
from flashrec.protocol.keys import ClusterKey
from flashrecd.cluster.info import (
    NodeInfo,
    address_towards,
    check_private,
    is_wildcard,
    new_incarnation,
    parse_address,
)
from flashrecd.place import Place

Bulk = Literal["encrypted", "plain"]
BULK: tuple[Bulk, ...] = get_args(Bulk)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Of a daemon that leads a cluster (`listen`) or is a member of one (`join`). Raises UsageError if they do not
    fit together, or if a stranger could come in: without a key all addresses must be of this machine's loopback."""

    listen: str | None = None
    """HOST:PORT where other nodes join: this daemon leads. Port 0: any that is free."""
    join: str | None = None
    """HOST:PORT of the leader."""
    name: str = ""
    """Of this node, unique in the cluster. Default: the host's name."""
    domain: str = ""
    """Its failure domain. Default: one of its own, called like the node."""
    data_address: str = ""
    """Host or IP of this node that the ranks' traffic and replicas use. Default: where it listens, or the address
    that its connection to the leader comes from."""
    key: ClusterKey | None = None
    key_file: Path | None = None
    """Where `key` was read: ranks read it there, too."""
    bulk: Bulk = "encrypted"
    """Of shards between nodes. "plain": everyone on the way can read them, and the token that lets one ask for them;
    their integrity is checked in either case."""
    replica_mbps: float | None = None
    """MB (10^6 bytes) per second that this node takes of others' replicas at most; None: what the link gives. Votes
    wait for replicas, so a cap below what steps change makes steps longer."""
    compress_replicas: bool = False
    """Have other nodes send the replicas that this one takes compressed, where that makes them smaller: it costs both
    CPU time, and pays where the link is slow."""

    def __post_init__(self) -> None:
        if (self.listen is None) == (self.join is None):
            raise UsageError("give --listen (to lead a cluster) or --join (to be a member), one of them")
        if self.bulk not in BULK:
            raise UsageError(f"--bulk is encrypted or plain, not {self.bulk!r:.40}")
        if self.bulk == "plain" and self.key is None:
            raise UsageError(
                "--bulk plain needs a --key, from which the token follows that lets one ask for shards"
            )
        if self.replica_mbps is not None and not self.replica_mbps > 0:
            raise UsageError(f"--replica-mbps must be more than 0, not {self.replica_mbps:g}")
        host, port = self._peer
        if self.join is not None and (port == 0 or is_wildcard(host)):
            raise UsageError(f"--join: nobody can be reached at {self.join}")
        object.__setattr__(self, "name", self.name or _host_name())
        object.__setattr__(self, "domain", self.domain or self.name)
        if not self.data_address:
            if is_wildcard(host):
                raise UsageError(f"--listen {self.listen} names no address for data: give --data-address")
            own = host if self.listen is not None else address_towards(host, port)
            object.__setattr__(self, "data_address", own)
        if is_wildcard(self.data_address):
            raise UsageError(f"--data-address: other nodes cannot reach {self.data_address}")
        check_private(host, self.key, option="--listen" if self.join is None else "--join")
        check_private(self.data_address, self.key, option="--data-address")
        self.node_info()  # which refuses names that cannot be

    def place(self, shard_address: str, replica_address: str) -> Place:
        """What this node's ranks must know of it; the addresses are those of its shard server, here and elsewhere."""
        return Place(
            data_address=self.data_address,
            shard_address=shard_address,
            replica_address=replica_address,
            key_file=str(self.key_file or ""),
            plain_bulk=self.bulk == "plain",
        )

    @property
    def _peer(self) -> tuple[str, int]:
        if self.listen is not None:
            return parse_address(self.listen, option="--listen")
        assert self.join is not None
        return parse_address(self.join, option="--join")

    def node_info(self, *, memory_bytes: int = 0) -> NodeInfo:
        """This node, in a new incarnation."""
        return NodeInfo(
            name=self.name,
            domain=self.domain,
            data_address=self.data_address,
            incarnation=new_incarnation(),
            memory_bytes=memory_bytes,
        )


def cluster_options(
    *,
    listen: str | None,
    join: str | None,
    key_file: Path | None,
    bulk: Bulk | None = None,
    replica_mbps: float | None = None,
    compress_replicas: bool = False,
    **others: str | None,
) -> ClusterOptions | None:
    """What a command line says; None: this daemon is alone. The others are as in ClusterOptions, None for what was not
    said. Raises UsageError."""
    said = {name: value for name, value in others.items() if value is not None}
    if listen is None and join is None:
        given = {
            "key": key_file,
            "bulk": bulk,
            "replica_mbps": replica_mbps,
            "compress_replicas": compress_replicas or None,
            **said,
        }
        option = next((name.replace("_", "-") for name, value in given.items() if value is not None), None)
        if option is not None:
            raise UsageError(f"--{option} is of a cluster: give --listen or --join as well")
        return None
    key = None if key_file is None else ClusterKey.load(key_file)
    path = None if key_file is None else key_file.absolute()
    return ClusterOptions(
        listen=listen,
        join=join,
        key=key,
        key_file=path,
        bulk=bulk or "encrypted",
        replica_mbps=replica_mbps,
        compress_replicas=compress_replicas,
        **said,
    )


def _host_name() -> str:
    """The host's, without what a node's name may not have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname()).strip("-._")[:63] or "node"
