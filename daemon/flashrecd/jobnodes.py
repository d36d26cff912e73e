"""The nodes of a job, for its effects: where shards are to be had, by the core's numbers; and a node that is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashrec.protocol import messages as msg
from flashrecd.core import events as ev
from flashrecd.core.state import JobState, NodeLife
from flashrecd.hosts import Host

Addresses = tuple[tuple[int, str], ...]


class JobNodes:
    """`hosts`: by number; the list grows when a node joins."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self.forgotten: dict[int, tuple[int, ...]] = {}
        """By node, the ranks of which it has replicas that others are to keep from the newest plan on."""

    def keepers(self, rank: int | None, keepers: Sequence[Sequence[int]]) -> Addresses:
        """(node, address) of those that keep what `rank` seals."""
        if rank is None or rank >= len(keepers):
            return ()
        return self._at(keepers[rank])

    def resume(self, plan: msg.ResumePlan, rank: int | None, action: ev.SendPlan) -> msg.ResumePlan:
        """`plan` as `rank` must know it."""
        if len(self._hosts) == 1 or rank is None:
            return plan
        sources: tuple[tuple[int, Addresses, Addresses], ...] = ()
        if rank in plan.replaced:
            sources = tuple(
                (owner, self._at(sealed), self._at(private)) for owner, sealed, private in action.sources
            )
        return replace(plan, keepers=self.keepers(rank, action.keepers), sources=sources)

    def planned(self, state: JobState, keepers: Sequence[Sequence[int]]) -> None:
        """A plan was made, from what `state` says that the nodes keep."""
        self.forgotten = {
            node: tuple(one.rank for one in kept if node not in keepers[one.rank])
            for node, kept in state.holdings
            if keepers
        }

    def take_forgotten(self) -> list[tuple[int, tuple[int, ...]]]:
        """(node, ranks), once: to be asked when those others have them, that is, when a gate has passed."""
        taken, self.forgotten = self.forgotten, {}
        return [(node, ranks) for node, ranks in taken.items() if ranks]

    def _at(self, nodes: Sequence[int]) -> Addresses:
        return tuple((node, self._hosts[node].shard_address) for node in nodes)


def newly_lost(before: JobState, after: JobState) -> list[int]:
    """The nodes that the core has given up between two of its states."""
    if before.nodes == after.nodes:
        return []
    lost = {n for n, node in enumerate(before.nodes) if node.life is NodeLife.LOST}
    return [n for n, node in enumerate(after.nodes) if node.life is NodeLife.LOST and n not in lost]
