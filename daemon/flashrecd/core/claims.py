"""Who holds what, by what the ranks said at protect(): pure functions of the members."""

from collections.abc import Sequence

from flashrecd.core.state import Member


def contradiction(members: Sequence[Member]) -> tuple[int, int] | None:
    """Two ranks of which one says that both hold the same bytes, and the other does not say so. Asked once all
    have protected: the work grows with the members of all sets."""
    said_by: dict[tuple[tuple[int, ...], str], set[int]] = {}
    for rank, member in enumerate(members):
        for claim in member.claims or ():
            said_by.setdefault(claim, set()).add(rank)
    for (ranks, _), saying in said_by.items():
        silent = next((rank for rank in ranks if rank not in saying), None)
        if silent is not None:
            return min(saying), silent
    return None


def replica_sets(members: Sequence[Member]) -> tuple[tuple[int, ...], ...]:
    """Every replica set of the job, once."""
    return tuple(sorted({ranks for member in members for ranks, _ in member.claims or ()}))


def unequal_buckets(members: Sequence[Member]) -> str | None:
    """The gradient buckets that ranks of one group would reduce with each other and that differ, in words.

    `Member.buckets` is "NAME=DIGEST" for each DistributedDataParallel, separated by "/"; whoever has the same name
    is in the same group."""
    first: dict[str, tuple[int, str]] = {}
    for rank, member in enumerate(members):
        for entry in filter(None, member.buckets.split("/")):
            name, _, digest = entry.rpartition("=")
            other, wanted = first.setdefault(name, (rank, digest))
            if digest != wanted:
                return f"rank {other}: {wanted or 'none'}, rank {rank}: {digest or 'none'}"
    return None
