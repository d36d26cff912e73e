"""Processes of a simulated world, what is noted of it, and when replacements have what they lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashrec.sim.failures.scenario import FailureScenario
from flashrecd.core import events as ev
from flashrecd.core.state import Member


@dataclass(slots=True)
class Process:
    node: int
    rank: int | None = None
    lives: bool = True
    ready_s: float = 0.0
    holds: int | None = None  # the version it has; None: a replacement that has not formed


@dataclass(frozen=True, slots=True)
class Decision:
    at_s: float
    event: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Recovery:
    """From the first death to the next generation. `held`: what survivors were at; `resumed`: what they go on from;
    `keep_s`: how much longer the first step waits for new replicas."""

    began_s: float
    running_s: float
    held: int
    resumed: int
    keep_s: float


@dataclass(slots=True)
class Traffic:
    pulled_bytes: float = 0.0
    replicated_bytes: float = 0.0


def pull(
    scenario: FailureScenario,
    members: Sequence[Member],
    procs: Mapping[str, Process],
    num_lost: Mapping[int, int],
    action: ev.SendPlan,
    begin_s: float,
) -> tuple[float, float]:
    """When every rank has the plan's version, and the bytes that went from node to node for that.

    A survivor that is at another version goes back to what it sealed. A replacement reads its rank's arena, where its
    node has that; the others of a node share what comes into it. `num_lost`: the ranks that a replaced member stands
    for."""
    costs = scenario.costs
    exported_s = begin_s + costs.export_s
    restore_s = scenario.state_bytes / costs.restore_bytes_per_s
    here = {source.rank for source in action.sources if members[source.rank].node in source.sealed}
    into: dict[int, float] = {}
    ready_s = begin_s
    for rank in action.plan.replaced:
        member = members[rank]
        proc = procs[member.proc]
        if proc.holds is not None:
            ready_s = max(ready_s, begin_s + restore_s)
        elif rank in here:
            ready_s = max(ready_s, max(exported_s, proc.ready_s) + restore_s)
        else:
            into[member.node] = into.get(member.node, 0.0) + num_lost[rank] * scenario.state_bytes
    for node, size in into.items():
        built_s = max(procs[member.proc].ready_s for member in members if member.node == node)
        ready_s = max(ready_s, max(exported_s, built_s) + size / costs.pull_bytes_per_s)
    return ready_s, sum(into.values())
