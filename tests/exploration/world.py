"""Everything that can happen next in a world: ranks, the daemon, standbys, and faults.

The channels between a rank's process and the daemon are FIFO in each direction, and may hold a message
for as long as they like. What a process had sent is lost only with it: the kernel may tell of a death
before the daemon has read the dead one's last messages.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flashrec import phases as ph
from flashrecd.core.state import Status
from tests.exploration import arenas, invariants, nodes, ranks
from tests.exploration.control import Control, put, standby_deaths, standby_moves
from tests.exploration.model import (
    DAMAGED,
    NO_CONTEXT,
    Config,
    Content,
    Context,
    Life,
    Link,
    Node,
    Slot,
    Violation,
    World,
)

USES_GROUPS = (ph.Phase.COMPUTING, ph.Phase.GATED, ph.Phase.CLOSING, ph.Phase.REFORMING)


class Public(NamedTuple):
    """What others can notice of a slot."""

    alive: bool
    joined: int
    entered: int
    voted: int
    refused: int
    generation: int  # its process's
    over: int  # newest generation it knows, or is about to be told, to be over
    is_source: int
    from_arenas: int
    served: tuple[int, Content] | None
    asked: int
    offered: int
    replica: int
    sealed: tuple[Content, ...]  # in its arena
    wants: int  # the version it is installing; -1: none
    group: int  # generation whose groups it uses now; 0: none
    node: int = 0


def public(slot: Slot, config: Config) -> Public:
    state = slot.proc.state if slot.proc else None
    over = [event.generation for event in slot.inbox if isinstance(event, ph.Latch)]
    if state is not None and state.latched:
        over.append(state.generation)
    group = 0
    in_tail = config.communicates and state is not None and state.phase is ph.Phase.TAIL
    if state is not None and (state.phase in USES_GROUPS or in_tail):
        group = state.generation if state.phase is ph.Phase.REFORMING else slot.joined
    action = slot.proc.todo[0] if slot.proc and slot.proc.todo else None
    return Public(
        slot.life is Life.ALIVE,
        slot.joined,
        slot.entered,
        slot.voted,
        slot.refused,
        state.generation if state else 0,
        max(over, default=0),
        slot.is_source,
        slot.from_arenas,
        slot.served,
        slot.asked,
        slot.offered,
        slot.replica,
        tuple([kept.content for kept in slot.arena if kept.sealed]),
        action.plan.version if isinstance(action, ph.Install) else -1,
        group,
        slot.node,
    )


def spread_context(
    rank: int, publics: Sequence[Public], slots: Sequence[Slot], world_nodes: Sequence[Node], cut: int
) -> Context:
    """The same in a world of several nodes."""
    me = publics[rank]
    ctx = context(me, publics, cut, from_sources=True)
    if world_nodes[me.node].link is not Link.UP:
        ctx = ctx._replace(cut_off=True)
    if me.wants < 0 or not me.group:
        return ctx
    source = ctx.source
    if me.from_arenas == me.group:
        mates = [r for r, o in enumerate(publics) if o.replica == me.replica] if me.replica else [rank]
        source = nodes.found(rank, slots, world_nodes, mates, me.wants)
    return ctx._replace(source=source, private=nodes.found_private(rank, slots, world_nodes, me.wants))


def context(
    me: Public, slots: Sequence[Public], cut: int, shared: bool = False, from_sources: bool = False
) -> Context:
    """What the rank that `me` describes, one of `slots`, can notice of the others. `shared`: see Config.
    `from_sources`: what arenas give is found elsewhere."""
    group, step = me.group, me.entered
    if not group:
        return NO_CONTEXT
    entered = passed = decided = joined = True
    broken = cut == group
    asked = False
    for other in slots:
        there = other.joined == group
        joined = joined and there
        entered = entered and there and other.entered >= step
        passed = passed and there and other.voted >= step
        decided = decided and there and max(other.voted, other.refused) >= step
        broken = broken or not other.alive or other.generation > group or other.over >= group
        asked = asked or (there and other.asked == step)
    source = None
    if me.wants >= 0 and not (from_sources and me.from_arenas == group):
        mates = [other for other in slots if other.replica == me.replica] if me.replica else [me]
        source = installable(me, mates, slots if shared else ())
    watermark = min(other.offered for other in slots) if passed else -1
    return Context(
        entered, passed, decided and not passed, joined, broken, passed and asked, watermark, source
    )


def installable(me: Public, mates: Sequence[Public], all_ranks: Sequence[Public]) -> Content | None:
    """What the rank that `me` describes can install: what the sources of its plan serve, once all of them do, and
    what arenas hold. None: not yet, or its plan is over. `mates` are its own replica set; `all_ranks` are in
    another one with it, or nobody."""
    if me.from_arenas == me.group:
        found = in_arenas(mates, me.wants)
        servers = [other for other in all_ranks if other.is_source == me.group]
        found |= served_by(servers, me.group) if servers else in_arenas(all_ranks, me.wants)
    else:
        servers = [other for other in mates if other.is_source == me.group]
        found = served_by(servers, me.group) if servers else {None}
    if None in found:
        return None
    damaged = Content(me.wants, DAMAGED)
    if damaged in found:
        return damaged
    if len(found) > 1:
        raise Violation(f"the sources of generation {me.group} are a mixture: {found}")
    return found.pop()


def served_by(servers: Sequence[Public], generation: int) -> set[Content | None]:
    parts = [other.served for other in servers]
    return {part[1] if part and part[0] == generation else None for part in parts}


def in_arenas(members: Sequence[Public], version: int) -> set[Content | None]:
    found = {next((c for c in other.sealed if c.version == version), None) for other in members}
    if None in found:
        raise Violation(f"an arena does not hold version {version}, which is to be taken from it")
    return found


def events(world: World, daemon: Control) -> Iterator[tuple[str, World]]:
    """Every single thing that can happen, nothing left out: label, world afterwards."""
    publics = [public(slot, daemon.config) for slot in world.slots]
    shared = daemon.config.shared
    for rank, slot in enumerate(world.slots):
        ctx = (
            spread_context(rank, publics, world.slots, world.nodes, world.cut)
            if world.nodes
            else context(publics[rank], publics, world.cut, shared)
        )
        for move in ranks.moves(slot, ctx, daemon.config):
            after = put(world, rank, move.slot)
            if move.label.startswith("Formed"):
                invariants.at_formed(after.slots, move.slot.joined)
            if world.nodes and move.label == "Exit":
                after = committed(after, move.slot)
            yield f"{rank} {move.label}", after
        if world.nodes:
            for move in nodes.transfers(slot, world.nodes, daemon.config):
                yield f"{rank}: {move.label}", put(world, rank, move.slot)
    yield from ghosts_move(world, daemon.config)
    for label, happen in daemon.messages(world):
        yield label, happen()
    yield from standby_moves(world)


def committed(world: World, slot: Slot) -> World:
    """The leader may hear of a rank's first commit at once."""
    first = world.hub.status is Status.RUNNING and slot.joined == world.hub.generation
    return nodes.first_committed(world) if first else world


def beginning(daemon: Control) -> World:
    """The world's first state: steps that are to be over by then (see Config.warm) have gone as they should. "joined":
    then a node has come, and a link has broken. "behind": then ranks have entered the next step, and have sealed, but
    for the last one, which has died. "voted": then the first has voted, and has died, while the others compute."""
    config = daemon.config
    world = daemon.initial()
    if not config.warm:
        return world
    world = _until(world, daemon, config.all_ranks, lambda state: state.phase is ph.Phase.IDLE)
    if config.begins == "joined":
        slots = tuple(ranks.feed(slot, ph.Latch(world.hub.generation)) for slot in world.slots)
        world = daemon.join(world._replace(slots=slots, returns=world.returns - 1), "new")
    if config.begins == "behind":
        last = config.all_ranks[-1:]
        world = _until(world, daemon, last, lambda state: state.phase is ph.Phase.COMPUTING)
        world = _until(world, daemon, config.all_ranks[:-1], lambda state: state.phase is ph.Phase.GATED)
        world = put(world, last[0], ranks.die(world.slots[last[0]]))
    if config.begins == "voted":
        world = _until(world, daemon, config.all_ranks[1:], lambda state: state.phase is ph.Phase.COMPUTING)
        world = _until(world, daemon, (0,), lambda state: state.phase is ph.Phase.GATED, waits=False)
        world = put(world, 0, ranks.die(world.slots[0]))
    return world


def _until(
    world: World,
    daemon: Control,
    those: Sequence[int],
    is_there: Callable[[ph.RankState], bool],
    waits: bool = True,
) -> World:
    """Let these ranks go on until they are there, with nothing to do; `waits`: or nothing but to wait for keepers."""

    def arrived(slot: Slot) -> bool:
        assert slot.proc is not None
        state, todo = slot.proc.state, slot.proc.todo
        at_rest = not todo or (waits and state.phase is ph.Phase.GATED and isinstance(todo[0], ph.AwaitKept))
        return state.version == daemon.config.warm and is_there(state) and at_rest

    while behind := [rank for rank in those if not arrived(world.slots[rank])]:
        labels = tuple(f"{rank}{end}" for rank in behind for end in (" ", ":"))
        options = ((label, after) for label, after in events(world, daemon) if after != world)
        world = next(after for label, after in options if label.startswith(labels))
    return world


def ghosts_move(world: World, config: Config) -> Iterator[tuple[str, World]]:
    for number, ghost in enumerate(world.ghosts):
        for move in nodes.ghost_transfers(ghost, world.slots[ghost.rank], world.nodes, config):
            yield f"ghost of {ghost.rank}: {move.label}", put(world, ghost.rank, move.slot)
        others = (*world.ghosts[:number], *world.ghosts[number + 1 :])
        yield f"ghost of {ghost.rank} ends", world._replace(ghosts=others)


def faults(world: World, config: Config) -> Iterator[tuple[str, World]]:
    if not world.faults or world.hub.status is Status.ENDED:
        return
    for rank, slot in enumerate(world.slots):
        if slot.life is Life.ALIVE and config.rank_faults:
            for after in ranks.deaths(slot, config):
                yield f"! rank {rank} dies", put(world, rank, after)._replace(faults=world.faults - 1)
        for after in arenas.damages(slot, config):
            yield (
                f"! the arena of rank {rank} is damaged",
                put(world, rank, after)._replace(faults=world.faults - 1),
            )
    for slots in deaths_of_all(world.slots, config):
        yield "! all die", world._replace(slots=slots, faults=world.faults - 1)
    if world.nodes:
        yield from nodes.losses(world, config)
    else:
        yield from standby_deaths(world)
    if config.link_faults:
        for generation in breakable(public(slot, config) for slot in world.slots):
            if generation != world.cut:
                after = world._replace(cut=generation, faults=world.faults - 1)
                yield f"! a link of generation {generation} breaks", after


def deaths_of_all(slots: Sequence[Slot], config: Config) -> Iterator[tuple[Slot, ...]]:
    """Every process at once, in each way in which they can have died."""
    if config.all_die and any(slot.life is Life.ALIVE for slot in slots):
        ways = [ranks.deaths(slot, config) if slot.life is Life.ALIVE else (slot,) for slot in slots]
        yield from itertools.product(*ways)


def breakable(publics: Iterator[Public] | Sequence[Public]) -> set[int]:
    """Generations in which somebody waits for others, or is about to."""
    return {p.group for p in publics if p.group and p.joined == p.group}
