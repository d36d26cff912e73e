"""Which version a job resumes at, and where every shard of it comes from: a pure function.

A version is possible when every shard has a source at it. A shard here is a name: the tensor state of a
replica set ("tensors"), or one rank's private state ("private/3"). Later regimes only add shards and
kinds of sources; the rule stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Survivor:
    """A live, parked rank: it holds `version`; with `can_advance` it can also become version + 1."""

    version: int
    can_advance: bool


@dataclass(frozen=True, slots=True)
class Inventory:
    """What is left after a failure. `sealed`: private-state versions in each rank's arena, which outlives it."""

    world_size: int
    survivors: Mapping[int, Survivor]
    sealed: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Plan:
    """Resume at `version` in `generation`. `sources`: shard -> the ranks it is taken from, in order."""

    generation: int
    version: int
    replaced: tuple[int, ...]
    sources: Mapping[str, tuple[int, ...]]


def required_shards(inventory: Inventory) -> tuple[str, ...]:
    """Every shard that somebody needs: the replicated tensors, and each rank's private state."""
    return ("tensors", *(f"private/{rank}" for rank in range(inventory.world_size)))


def reachable_versions(inventory: Inventory) -> dict[int, frozenset[int]]:
    """For each survivor, the versions it can be at.

    A rank that voted may become version + 1 only if a survivor *saw* that gate pass, which shows as a
    survivor that is past it. That all survivors voted is not enough: the dead may have voted no.
    """
    newest = max((s.version for s in inventory.survivors.values()), default=None)
    return {
        rank: frozenset(
            {s.version, s.version + 1} if s.can_advance and newest == s.version + 1 else {s.version}
        )
        for rank, s in inventory.survivors.items()
    }


def find_sources(inventory: Inventory, version: int) -> dict[str, tuple[int, ...]]:
    """The sources of each required shard at `version`; an empty tuple where there is none."""
    at = {rank for rank, versions in reachable_versions(inventory).items() if version in versions}
    sources: dict[str, tuple[int, ...]] = {}
    for shard in required_shards(inventory):
        if shard == "tensors":
            sources[shard] = tuple(sorted(at))
            continue
        rank = int(shard.removeprefix("private/"))
        holds = rank in at if rank in inventory.survivors else version in inventory.sealed.get(rank, ())
        sources[shard] = (rank,) if holds else ()
    return sources


def plan_recovery(inventory: Inventory, generation: int) -> tuple[Plan | None, str]:
    """The greatest version every shard of which has a source, and why; None, and what lacks a source."""
    if not inventory.survivors:
        return None, "no rank is left that holds the tensor state"
    candidates = sorted({v for vs in reachable_versions(inventory).values() for v in vs}, reverse=True)
    missing: list[str] = []
    for version in candidates:
        sources = find_sources(inventory, version)
        without = [shard for shard, ranks in sources.items() if not ranks]
        if without:
            missing.append(f"version {version}: no source for {', '.join(without)}")
            continue
        replaced = tuple(r for r in range(inventory.world_size) if r not in inventory.survivors)
        held = {rank: s.version for rank, s in sorted(inventory.survivors.items())}
        forward = [rank for rank, v in held.items() if v < version]
        reason = f"version {version}: held by {[r for r in held if r not in forward]}"
        if forward:
            reason += f", {forward} voted and roll forward, since a survivor saw the gate pass"
        return Plan(generation, version, replaced, sources), reason
    return None, "; ".join(missing)
