"""Which version a job resumes at, and where all of its state comes from: a pure function.

State has two halves. Private state belongs to one rank: it has it in memory, or finds it in its private
slots. Tensors belong to a *replica set*, the ranks that hold the very same bytes (in plain DDP one set of
all ranks, in FSDP one set per rank): a member has them in memory, or takes them from another member's
memory, or from the members' arenas, each of which holds its member's part. A version is possible when every
rank has both halves of it; the job resumes at the greatest.

The plan also says what every rank has sealed whole by now, the *watermark*: what is sealed next is written beside it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

MAX_NAMED = 8  # ranks spelled out in a reason; the count says the rest


@dataclass(frozen=True, slots=True)
class Survivor:
    """A live, parked rank. It holds `version` (None: it was torn in the middle of a step and holds none); with
    `can_advance` it can also become version + 1."""

    version: int | None
    can_advance: bool


@dataclass(frozen=True, slots=True)
class Inventory:
    """What is left after a failure. `private` and `sealed`: rank -> versions in its private slots and in its
    arena, both of which outlive its process. `sets`: every replica set of the job, once."""

    world_size: int
    survivors: Mapping[int, Survivor]
    private: Mapping[int, tuple[int, ...]]
    sealed: Mapping[int, tuple[int, ...]]
    sets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Resume at `version` in `generation`. `replaced`: the ranks that are not at it, and install it. `served`:
    (replica set, its members that serve it from memory), for each set that arenas cannot give; a set that is
    not there is read from its members' arenas where a replaced rank needs it. `watermark`: the newest version up to
    this one that every rank has sealed whole; -1: none."""

    generation: int
    version: int
    replaced: tuple[int, ...]
    served: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    watermark: int = -1


class Sources(NamedTuple):
    """Where a version comes from, and which ranks would be without a half of it."""

    replaced: tuple[int, ...]
    served: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    without_tensors: tuple[int, ...]
    without_private: tuple[int, ...]


def reachable_versions(inventory: Inventory) -> dict[int, frozenset[int]]:
    """For each survivor, the versions it can be at.

    A rank that voted may become version + 1 only if a survivor *saw* that gate pass, which shows as a
    survivor that holds that version. That all survivors voted is not enough: the dead may have voted no.
    """
    held = {s.version for s in inventory.survivors.values()}
    return {
        rank: frozenset()
        if s.version is None
        else frozenset({s.version, s.version + 1})
        if s.can_advance and s.version + 1 in held
        else frozenset({s.version})
        for rank, s in inventory.survivors.items()
    }


def find_sources(inventory: Inventory, version: int, live: Iterable[int]) -> Sources:
    """The sources of `version`, which the ranks in `live` are or can be at."""
    live = frozenset(live)
    in_arena = {rank for rank, versions in inventory.sealed.items() if version in versions}
    replaced = tuple(rank for rank in range(inventory.world_size) if rank not in live)
    served, without_tensors = [], set[int]()
    for members in inventory.sets:
        if live.issuperset(members) or in_arena.issuperset(members):
            continue  # nobody needs it, or arenas give it, for which nobody has to make a copy
        servers = tuple(rank for rank in members if rank in live)
        if servers:
            served.append((members, servers))
        else:
            without_tensors.update(members)
    without_private = tuple(rank for rank in replaced if version not in inventory.private.get(rank, ()))
    return Sources(replaced, tuple(served), tuple(sorted(without_tensors)), without_private)


def plan_recovery(inventory: Inventory, generation: int) -> tuple[Plan | None, str]:
    """The greatest version of which every rank has both halves, and why that one; or None, and what each
    version lacked. Its cost grows with the ranks and the members of sets, not with their products."""
    live_at: dict[int, list[int]] = {}
    for rank, versions in sorted(reachable_versions(inventory).items()):
        for version in versions:
            live_at.setdefault(version, []).append(rank)
    lacking: list[str] = []
    for version in sorted(_candidates(inventory, live_at), reverse=True):
        live = live_at.get(version, [])
        sources = find_sources(inventory, version, live)
        lack = _lack(sources)
        if lack:
            lacking.append(f"version {version}: no source for {lack}")
            continue
        plan = Plan(generation, version, sources.replaced, sources.served, watermark(inventory, version))
        return plan, "; ".join([_why(inventory, plan, live), *lacking])
    return None, "; ".join(lacking) or "no rank is left that holds the tensor state, and no arena does"


def watermark(inventory: Inventory, version: int) -> int:
    """The newest version up to `version` of which every rank has sealed both halves; -1: none."""
    common: set[int] | None = None
    for rank in range(inventory.world_size):
        whole = set(inventory.sealed.get(rank, ())) & set(inventory.private.get(rank, ()))
        common = whole if common is None else common & whole
    return max((v for v in common or () if v <= version), default=-1)


def _candidates(inventory: Inventory, live: Iterable[int]) -> set[int]:
    """Versions that may be possible. Private state is sealed ahead of its version: where there are tensors, a
    version that only it is of is none."""
    kept = [inventory.sealed] if inventory.sets else [inventory.sealed, inventory.private]
    return {*live, *(v for part in kept for versions in part.values() for v in versions)}


def _why(inventory: Inventory, plan: Plan, live: list[int]) -> str:
    forward = [rank for rank in live if inventory.survivors[rank].version != plan.version]
    at = [rank for rank in live if inventory.survivors[rank].version == plan.version]
    clauses = [f"held by {_named(at)}"] if at else []
    if forward:
        clauses.append(f"{_named(forward)} voted and roll forward, since a survivor saw the gate pass")
    if plan.replaced:
        servers = sorted({rank for _, servers in plan.served for rank in servers})
        source = f"the memory of {_named(servers)}" if servers else "arenas"
        clauses.append(f"{_named(plan.replaced)} install it from {source}")
    return f"version {plan.version}: {', '.join(clauses)}"


def _lack(sources: Sources) -> str:
    halves = []
    if sources.without_tensors:
        halves.append(f"the tensors of ranks {_named(sources.without_tensors)}")
    if sources.without_private:
        halves.append(f"the private state of ranks {_named(sources.without_private)}")
    return " and ".join(halves)


def _named(ranks: Iterable[int]) -> str:
    """ "[0, 1]": all that a reader can take in, whatever the size of the job."""
    every = list(ranks)
    shown = ", ".join(map(str, every[:MAX_NAMED]))
    more = len(every) - MAX_NAMED
    return f"[{shown} and {more} more]" if more > 0 else f"[{shown}]"
