"""What the daemons of a cluster tell each other about being one: who joins, who is alive, who reaches whom.

What concerns a job is in `agents`; see `codec` for how both travel. The first message of a connection is JoinCluster,
answered with Welcomed or NodeRefused; a connection that has not been welcomed may say nothing else.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JoinCluster:
    """A node says who it is; the fields are those of flashrecd's NodeInfo."""

    name: str
    domain: str
    data_address: str
    shard_endpoint: str
    release: str
    incarnation: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The sender of JoinCluster is a member now; this is the leader."""

    name: str
    domain: str
    data_address: str
    shard_endpoint: str
    release: str
    incarnation: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """The receiver is no member (any more): it may join again, over a new connection."""

    reason: str


@dataclass(frozen=True, slots=True)
class NodeHeartbeat:
    """Both ways. `taken_bytes`: how much of what came over this connection since Welcomed has been dealt with."""

    taken_bytes: int


# --- who reaches whom ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenProbe:
    """Listen on your data address, and on the address you talk to the leader from, for who shows `token`, until
    CloseProbe. Answered with ProbeOpened."""

    request: int
    token: bytes


@dataclass(frozen=True, slots=True)
class ProbeOpened:
    """(which address, host, port) for each listener, "data" or "control"; `problem`: why there is none, or ""."""

    request: int
    listeners: tuple[tuple[str, str, int], ...]
    problem: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Get `num_bytes` from each listener of `node`, and connect to its shard endpoint if it has one. Answered with
    Probed."""

    request: int
    node: str
    listeners: tuple[tuple[str, str, int], ...]
    shard_endpoint: str
    token: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Probed:
    """(which address, bytes a second) for each that was reached; `problem`: what was not, with its port, or ""."""

    request: int
    node: str
    rates: tuple[tuple[str, float], ...]
    problem: str


@dataclass(frozen=True, slots=True)
class CloseProbe:
    request: int


FROM_NODE = JoinCluster | NodeHeartbeat | ProbeOpened | Probed
TO_NODE = Welcomed | NodeRefused | NodeHeartbeat | OpenProbe | Probe | CloseProbe
