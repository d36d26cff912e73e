"""Everything that can happen next in a world: ranks, the daemon, standbys, and faults.

The channels between a rank's process and the daemon are FIFO in each direction, and may hold a message
for as long as they like. What a process had sent is lost only with it: the kernel may tell of a death
before the daemon has read the dead one's last messages.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flashrec import phases as ph
from flashrecd.core.state import Status
from tests.exploration import invariants, ranks
from tests.exploration.control import Control, put, standby_deaths, standby_moves
from tests.exploration.model import NO_CONTEXT, Config, Content, Context, Life, Slot, Violation, World

USES_GROUPS = (ph.Phase.COMPUTING, ph.Phase.GATED, ph.Phase.REFORMING)


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
    served: tuple[int, Content] | None
    group: int  # generation whose groups it uses now; 0: none


def public(slot: Slot) -> Public:
    state = slot.proc.state if slot.proc else None
    over = [event.generation for event in slot.inbox if isinstance(event, ph.Latch)]
    if state is not None and state.latched:
        over.append(state.generation)
    group = 0
    if state is not None and state.phase in USES_GROUPS:
        group = state.generation if state.phase is ph.Phase.REFORMING else slot.joined
    return Public(
        slot.life is Life.ALIVE,
        slot.joined,
        slot.entered,
        slot.voted,
        slot.refused,
        state.generation if state else 0,
        max(over, default=0),
        slot.is_source,
        slot.served,
        group,
    )


def context(me: Public, slots: Sequence[Public], cut: int) -> Context:
    """What the rank that `me` describes, one of `slots`, can notice of the others."""
    group, step = me.group, me.entered
    if not group:
        return NO_CONTEXT
    entered = passed = decided = joined = True
    broken = cut == group
    parts: Content | None = None
    served = True
    for other in slots:
        there = other.joined == group
        joined = joined and there
        entered = entered and there and other.entered >= step
        passed = passed and there and other.voted >= step
        decided = decided and there and max(other.voted, other.refused) >= step
        broken = broken or not other.alive or other.generation > group or other.over >= group
        if other.is_source == group:
            if other.served is None or other.served[0] != group:
                served = False
            elif parts not in (None, other.served[1]):
                raise Violation(f"the sources of generation {group} serve {parts} and {other.served[1]}")
            else:
                parts = other.served[1]
    return Context(entered, passed, decided and not passed, joined, broken, parts if served else None)


def events(world: World, daemon: Control) -> Iterator[tuple[str, World]]:
    """Every single thing that can happen, nothing left out: label, world afterwards."""
    publics = [public(slot) for slot in world.slots]
    for rank, slot in enumerate(world.slots):
        for move in ranks.moves(slot, context(publics[rank], publics, world.cut), daemon.config):
            after = put(world, rank, move.slot)
            if move.label.startswith("Formed"):
                invariants.at_formed(after.slots, move.slot.joined)
            yield f"{rank} {move.label}", after
    for label, happen in daemon.messages(world):
        yield label, happen()
    yield from standby_moves(world)


def faults(world: World, config: Config) -> Iterator[tuple[str, World]]:
    if not world.faults or world.hub.status is Status.ENDED:
        return
    for rank, slot in enumerate(world.slots):
        if slot.life is Life.ALIVE:
            yield f"! rank {rank} dies", put(world, rank, ranks.die(slot))._replace(faults=world.faults - 1)
    yield from standby_deaths(world)
    if config.link_faults:
        for generation in breakable(public(slot) for slot in world.slots):
            if generation != world.cut:
                after = world._replace(cut=generation, faults=world.faults - 1)
                yield f"! a link of generation {generation} breaks", after


def breakable(publics: Iterator[Public] | Sequence[Public]) -> set[int]:
    """Generations in which somebody waits for others, or is about to."""
    return {p.group for p in publics if p.group and p.joined == p.group}
