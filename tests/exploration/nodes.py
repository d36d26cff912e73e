"""Other nodes: what their shard servers keep of ranks, as flashrecd.shards does it, and the loss of a node.

A keeper is asked for a version and pulls it from the arena of the rank's node: it opens a slot (the source is read,
and what was in that slot is gone), and seals it, whatever has become of the source: the bytes may have been there. Its
acknowledgement travels apart. In the reduced search it comes with the seal: a rank that has it and makes no use of it
does what one does that has not, and one that is lost, with the keeper or the rank, is of no use to anybody. "Asked" is
no event of its own either: who was not is who was asked and has not begun. Private state is small: it is there or not.
What had been asked goes on when the process dies.

A node ends by death (ranks, arenas, replicas are gone at once; the core hears of it later, and what was sent may be
lost), or is cut off: nothing passes between it and the core, its ranks live, and those with whom they train may still
reach them, or not. Once the core has given it up its ranks are *ghosts*. They still replicate, as far as keepers let
them, and may vote; the plan for the next generation must not be made while a gate could pass by that.
"""

from collections.abc import Iterator, Sequence

from flashrec import phases as ph
from flashrecd.core import events as ev
from tests.exploration import arenas
from tests.exploration.model import (
    LOST,
    Config,
    Content,
    Copy,
    Ghost,
    Incoming,
    Kept,
    Life,
    Link,
    Move,
    Node,
    Slot,
    Violation,
    World,
)

# What `Config.mistakes` names.
HASTY = "does not wait for Settle"
KEPT_VERSIONS = 3  # of private state, by a keeper


def copy_at(slot: Slot, node: int) -> Copy:
    return next((copy for copy in slot.copies if copy.node == node), Copy(node))


def with_copy(slot: Slot, copy: Copy) -> Slot:
    others = [one for one in slot.copies if one.node != copy.node]
    copies = [*others, *([] if copy.is_empty else [copy])]
    return slot._replace(copies=tuple(sorted(copies, key=lambda one: one.node)))


def accepts(node: Node, generation: int, config: Config) -> bool:
    """Whether a keeper takes what is asked of it in that generation: it is not over."""
    return node.is_there and (generation > node.fenced or "accepts after the fence" in config.mistakes)


def may_pull(node: Node, generation: int, config: Config) -> bool:
    """Nor does a keeper begin to pull before what was lost with the generation before is gone: it would take the place
    of what is to be kept."""
    is_settled = node.settled > node.fenced or not node.fenced or HASTY in config.mistakes
    return accepts(node, generation, config) and (is_settled or "accepts after the fence" in config.mistakes)


# --- the rank's side -------------------------------------------------------------------------------------


def private_of(slot: Slot, version: int) -> tuple[str, Content]:
    """What is said of the private state of a version: that of the step, or, where it is no more, of a full version."""
    for kind, contents in (("private", slot.private), ("full", slot.full_private)):
        for content in contents:
            if content.version == version:
                return kind, content
    raise Violation(f"the private state of version {version} is to be kept elsewhere, and is not there")


def sealed_of(slot: Slot, version: int) -> tuple[str, Content]:
    for kept in slot.arena:
        if kept.sealed and kept.content.version == version:
            return "sealed", kept.content
    raise Violation(f"version {version} is to be kept elsewhere, and is not sealed")


def needs(slot: Slot, action: ph.AwaitKept, config: Config) -> list[tuple[str, Content]]:
    private = () if "votes without private" in config.mistakes else action.private
    wanted = [private_of(slot, version) for version in private]
    return wanted if action.sealed is None else [*wanted, sealed_of(slot, action.sealed)]


def is_kept(slot: Slot, action: ph.AwaitKept, config: Config) -> bool:
    """Whether every keeper has acknowledged what it waits for."""
    wanted = needs(slot, action, config)
    if "a dead node's acknowledgement counts" in config.mistakes and slot.keepers:
        acked = {one for copy in slot.copies for one in copy.acked}
        return acked.issuperset(wanted)
    return all(set(copy_at(slot, node).acked).issuperset(wanted) for node in slot.keepers)


def full_that_counts(slot: Slot) -> int:
    """The newest full version that is sealed, and acknowledged by every keeper; -1: none."""
    counting = [
        kept.content.version
        for kept in slot.arena
        if kept.sealed
        and all({("sealed", kept.content)} <= set(copy_at(slot, n).acked) for n in slot.keepers)
        and all(
            any(k != "sealed" and c.version == kept.content.version for k, c in copy_at(slot, n).acked)
            for n in slot.keepers
        )
    ]
    return max(counting, default=-1)


def tell_keepers(slot: Slot, plan: ph.Plan, config: Config) -> Slot:
    """What a rank does about its replicas at the start of the plan's generation: those who stay have what they have."""
    told = slot.told
    if told.generation != plan.generation:
        return slot
    copies = []
    for copy in slot.copies:
        acked = tuple([one for one in copy.acked if one[1].version <= plan.version])
        forgets = (
            copy.node not in told.keepers and "a dead node's acknowledgement counts" not in config.mistakes
        )
        copies.append(copy._replace(acked=() if forgets else acked))
    slot = slot._replace(keepers=told.keepers, asks=plan.generation, copies=())
    for copy in copies:
        slot = with_copy(slot, copy)
    return slot


def forget_acks(slot: Slot) -> Slot:
    """Another process has the rank, or it says everything anew."""
    copies, slot = slot.copies, slot._replace(copies=())
    for copy in copies:
        slot = with_copy(slot, copy._replace(acked=()))
    return slot


# --- the keepers' side -----------------------------------------------------------------------------------


def transfers(slot: Slot, nodes: Sequence[Node], config: Config) -> list[Move]:
    """What keepers can do next about a rank."""
    found: list[Move] = []
    action = slot.proc.todo[0] if slot.proc and slot.proc.todo and slot.life is Life.ALIVE else None
    waits = action if isinstance(action, ph.AwaitKept) else None
    home_is_there = nodes[slot.node].is_there
    for keeper in {*slot.keepers, *[copy.node for copy in slot.copies if copy.incoming]}:
        if not nodes[keeper].is_there:
            continue
        copy = copy_at(slot, keeper)
        at_once = (
            config.mistakes in ((), (HASTY,)) and nodes[keeper].link is Link.UP and not nodes[keeper].inbox
        )
        wanted = set(needs(slot, waits, config)) if waits is not None and at_once else set()
        awaited = any(kind == "sealed" for kind, _ in wanted)
        found += [move._replace(eager=awaited) for move in _seals(slot, copy, nodes[keeper], config)]
        if keeper not in slot.keepers or not accepts(nodes[keeper], slot.asks, config):
            continue
        if waits is not None:
            unacked = [s for s in (private_of(slot, v) for v in waits.private) if s not in copy.acked]
            for said in unacked[:1]:  # one after the other, on one connection
                found += [move._replace(eager=said in wanted) for move in _keeps(slot, copy, *said, config)]
        if slot.full_private and slot.life is Life.ALIVE:
            found += _keeps(slot, copy, "full", slot.full_private[-1], config)
        if home_is_there and may_pull(nodes[keeper], slot.asks, config):
            for sealed in arenas.resolved(slot, config):
                pulls = _pulls(sealed, copy, sealed.arena, slot.asks, config)
                found += [move._replace(eager=awaited) for move in pulls]
    return found


def ghost_transfers(ghost: Ghost, slot: Slot, nodes: Sequence[Node], config: Config) -> list[Move]:
    """The same of a process on a lost node; whatever it had begun goes on by itself (see transfers)."""
    found: list[Move] = []
    for keeper in ghost.keepers:
        if may_pull(nodes[keeper], ghost.generation, config):
            copy = copy_at(slot, keeper)._replace(acked=())
            found += _pulls(slot, copy, ghost.arena, ghost.generation, config)
    return found


def _acked(slot: Slot, copy: Copy, kind: str, content: Content) -> Slot:
    acked = {one for one in copy.acked if one[1].version > content.version - 3 and one != (kind, content)}
    return with_copy(slot, copy._replace(acked=tuple(sorted({*acked, (kind, content)}))))


def _answered(slot: Slot, copy: Copy, kind: str, content: Content, config: Config) -> Slot:
    """`copy` has it now; in the reduced search the rank knows that at once."""
    if config.reduced and slot.life is Life.ALIVE and copy.node in slot.keepers:
        return _acked(slot, copy, kind, content)
    return with_copy(slot, copy)


def _keeps(slot: Slot, copy: Copy, kind: str, content: Content, config: Config) -> Iterator[Move]:
    if (kind, content) in copy.acked:
        return
    slots = copy.private if kind == "private" else copy.full_private
    label = f"node {copy.node} keeps {kind} {content.version}"
    here = next((one for one in slots if one.content == content and one.generation <= slot.asks), None)
    if here is not None and here.generation == slot.asks:
        if not config.reduced or slot.life is Life.ALIVE:
            yield Move(f"{label}: acknowledged", _acked(slot, copy, kind, content), lasting=True)
        return
    if any(one.generation > slot.asks for one in slots):
        return
    if any(one.generation == slot.asks and one.content.version > content.version for one in slots):
        raise Violation(f"{label} is refused: generation {slot.asks} has sealed a later one")
    # As PrivateSlots.seal: of each version the latest generation, what is above was lost, the newest stay.
    others = [one for one in slots if one.content.version < content.version]
    kept = tuple([*others, Kept(content, True, slot.asks)][-KEPT_VERSIONS:])
    after = copy._replace(private=kept) if kind == "private" else copy._replace(full_private=kept)
    yield Move(label, _answered(slot, after, kind, content, config), lasting=True)


def _pulls(slot: Slot, copy: Copy, arena: tuple[Kept, ...], asked: int, config: Config) -> Iterator[Move]:
    said = max((one for one in arena if one.sealed), key=lambda one: one.content.version, default=None)
    if said is None or ("sealed", said.content) in copy.acked:
        return
    version = said.content.version
    label = f"node {copy.node} pulls {version}"
    same = [one for one in copy.arena if one.content.version == version]
    if any(one.content == said.content for one in same):
        if slot.life is Life.ALIVE and copy.node in slot.keepers and arena is slot.arena:
            yield Move(f"{label}: it has it", _acked(slot, copy, "sealed", said.content), lasting=True)
        return
    if copy.incoming is not None and copy.incoming.kept == said and copy.incoming.asked >= asked:
        return
    if copy.incoming is not None and copy.incoming.asked > asked:
        return  # a later generation has asked already
    if any(one.generation >= said.generation for one in same):
        return  # "is not the one that is kept here"
    # As ArenaWriter.open_slot: beside the newest below it, or beside this version of an older generation.
    below = [one for one in copy.arena if one.content.version < version + bool(same)]
    newest = max(below, key=lambda one: (one.content.version, one.generation), default=None)
    stays = (
        ()
        if newest is None or config.arena_slots == 1 or "one replica slot" in config.mistakes
        else (newest,)
    )
    for lost in copy.arena:
        is_safe = lost.content.version >= slot.floor >= 0 and lost.content.version < version
        if is_safe and lost not in stays:
            raise Violation(
                f"node {copy.node}: {lost.content} is overwritten, at or above {slot.floor}, which is to be kept"
            )
    after = copy._replace(arena=stays, incoming=Incoming(said, asked))
    yield Move(label, with_copy(slot, after), lasting=True)


def _seals(slot: Slot, copy: Copy, node: Node, config: Config) -> Iterator[Move]:
    incoming = copy.incoming
    if incoming is None:
        return
    if incoming.asked <= node.fenced and "accepts after the fence" not in config.mistakes:
        raise Violation(f"node {copy.node} still pulls what generation {incoming.asked} asked for")
    arena = tuple(sorted([*copy.arena, incoming.kept]))
    after = copy._replace(arena=arena, incoming=None)
    content = incoming.kept.content
    mine = incoming.asked == slot.asks and any(one.sealed and one.content == content for one in slot.arena)
    slot = _answered(slot, after, "sealed", content, config) if mine else with_copy(slot, after)
    yield Move(f"node {copy.node} seals {content.version}", slot, lasting=True)


# --- what a node's daemon has its shard server do ----------------------------------------------------------


def obeys(world: World, number: int, config: Config) -> World:
    """The oldest of the core's orders is carried out."""
    node = world.nodes[number]
    (kind, *rest), inbox = node.inbox[0], node.inbox[1:]
    node = node._replace(inbox=inbox)
    slots = list(world.slots)
    if kind == "fence":
        (generation,) = rest
        assert isinstance(generation, int)
        early = _holdings(slots, number)
        node = node._replace(fenced=max(node.fenced, generation))
        if "accepts after the fence" not in config.mistakes:
            for rank, slot in enumerate(slots):
                copy = copy_at(slot, number)
                if copy.incoming is not None and copy.incoming.asked <= node.fenced:
                    slots[rank] = with_copy(slot, copy._replace(incoming=None))
        if "holdings before the fence" not in config.mistakes:
            node = node._replace(outbox=(*node.outbox, ("holdings", generation, early)))
    elif kind == "look":  # of a mutant
        (generation,) = rest
        node = node._replace(outbox=(*node.outbox, ("holdings", generation, _holdings(slots, number))))
    elif kind == "settle":
        generation, version, sealed = rest
        assert isinstance(generation, int)
        assert isinstance(version, int)
        assert isinstance(sealed, int)
        node = node._replace(settled=max(node.settled, generation))
        if "no Settle" not in config.mistakes:
            slots = [_settled(slot, number, generation, version, sealed) for slot in slots]
    elif kind == "forget":
        (ranks,) = rest
        assert isinstance(ranks, tuple)
        for rank in ranks:
            slots[rank] = with_copy(slots[rank], Copy(number))
    nodes = (*world.nodes[:number], node, *world.nodes[number + 1 :])
    return world._replace(slots=tuple(slots), nodes=nodes)


def _settled(slot: Slot, number: int, generation: int, version: int, sealed: int) -> Slot:
    copy = copy_at(slot, number)
    copy = copy._replace(
        private=_without(copy.private, version, generation),
        full_private=_without(copy.full_private, sealed, generation),
    )
    above = [one for one in copy.arena if one.content.version > sealed]
    if above and all(one.generation < generation for one in above):
        copy = copy._replace(arena=tuple([one for one in copy.arena if one not in above]))
    return with_copy(slot, copy)


def _without(slots: tuple[Kept, ...], version: int, generation: int) -> tuple[Kept, ...]:
    return tuple([one for one in slots if one.content.version <= version or one.generation >= generation])


def _holdings(slots: Sequence[Slot], number: int) -> tuple[ev.Kept, ...]:
    kept = []
    for rank, slot in enumerate(slots):
        copy = copy_at(slot, number)
        private = {one.content.version for one in (*copy.private, *copy.full_private)}
        sealed = {one.content.version for one in copy.arena}
        if private or sealed:
            kept.append(ev.Kept(rank, tuple(sorted(private)), tuple(sorted(sealed))))
    return tuple(kept)


def first_committed(world: World) -> World:
    """A gate has passed in the newest generation: who is no keeper of a rank any more lets go of it."""
    there = list(world.nodes)
    for number, node in enumerate(there):
        ranks = tuple(
            rank
            for rank, slot in enumerate(world.slots)
            if not copy_at(slot, number).is_empty and number not in slot.member.keepers
        )
        order = ("forget", ranks)
        if ranks and node.link in (Link.UP, Link.CUT) and order not in node.inbox:
            there[number] = node._replace(inbox=(*node.inbox, order))
    return world._replace(nodes=tuple(there))


def is_bystander(world: World, number: int, config: Config) -> bool:
    """Whether nothing that a node's next order is about is under way, so that it does not matter when it obeys."""
    node = world.nodes[number]
    kind = node.inbox[0][0]
    if kind == "settle" and not config.mistakes:
        return True  # nothing comes until it has, and the next fence comes after it
    for slot in world.slots:
        copy = copy_at(slot, number)
        if copy.incoming is not None:
            return False
        if kind == "forget" and not copy.is_empty:
            return False
        if number in slot.keepers and kind in ("fence", "look"):
            return False
        if kind == "settle" and (number in slot.keepers or number in slot.told.keepers or not copy.is_empty):
            return False
    return not any(number in ghost.keepers for ghost in world.ghosts)


# --- what a replacement finds ------------------------------------------------------------------------------


def found(
    rank: int, slots: Sequence[Slot], nodes: Sequence[Node], ranks: Sequence[int], version: int
) -> Content:
    """The tensors that `rank` installs from what is sealed of `ranks`; LOST: a source has gone."""
    me = slots[rank]
    listed = {one.rank: one.sealed for one in me.told.sources}
    contents = set()
    for owner in ranks:
        there = look(me, owner, slots, nodes, places=listed.get(owner, ()), version=version, sealed=True)
        if not there:
            return Content(version, LOST)
        contents |= there
    if len(contents) > 1:
        raise Violation(f"what rank {rank} installs is a mixture: {contents}")
    return contents.pop()


def found_private(rank: int, slots: Sequence[Slot], nodes: Sequence[Node], version: int) -> Content:
    me = slots[rank]
    listed = {one.rank: one.private for one in me.told.sources}
    there = look(me, rank, slots, nodes, places=listed.get(rank, ()), version=version, sealed=False)
    if len(there) > 1:
        raise Violation(f"the private state of rank {rank} that there is differs: {there}")
    return there.pop() if there else Content(version, LOST)


def look(
    me: Slot,
    owner: int,
    slots: Sequence[Slot],
    nodes: Sequence[Node],
    *,
    places: tuple[int, ...],
    version: int,
    sealed: bool,
) -> set[Content]:
    """What is sealed of `owner` in these places, which the plan has named, and on the node of `me`."""
    slot, contents = slots[owner], set()
    for place in {*places, me.node}:
        if nodes[place].link in (Link.LOST, Link.DEAD):
            continue
        copy = copy_at(slot, place)
        at_home = slot.node == place
        if sealed:
            here = [one.content for one in slot.arena if one.sealed] if at_home else []
            here += [one.content for one in copy.arena]
        else:
            here = [*slot.private, *slot.full_private] if at_home else []
            here += [one.content for one in (*copy.private, *copy.full_private)]
        fitting = {content for content in here if content.version == version}
        if place in places and not fitting:
            raise Violation(
                f"node {place} does not hold version {version} of rank {owner}, which is to be taken from it"
            )
        contents |= fitting
    return contents


# --- the loss of a node ------------------------------------------------------------------------------------


def dies(world: World, number: int) -> World:
    """It is gone at once; the core does not know yet."""
    slots = []
    for slot in world.slots:
        if slot.node == number:
            slot = slot._replace(
                life=Life.NONE,
                proc=None,
                inbox=(),
                outbox=(),
                arena=(),
                private=(),
                full_private=(),
                exit_code=None,
            )
        slots.append(without(slot, number))
    standbys = [
        one._replace(life=Life.NONE, outbox=()) if one.node == number else one for one in world.standbys
    ]
    nodes = list(world.nodes)
    nodes[number] = nodes[number]._replace(link=Link.DEAD, inbox=(), outbox=(), runs=False)
    world = world._replace(slots=tuple(slots), standbys=tuple(standbys), nodes=tuple(nodes))
    return judged(world)


def without(slot: Slot, number: int) -> Slot:
    """Node `number` is gone, with what it kept of a rank."""
    copies = []
    for copy in slot.copies:
        if copy.node == number:  # the rank knows what it knew, until it has other keepers
            copy = Copy(number, acked=copy.acked)
        copies.append(copy)
    holders = tuple([one for one in slot.holders if one != number])
    return slot._replace(copies=tuple([copy for copy in copies if not copy.is_empty]), holders=holders)


def judged(world: World) -> World:
    """Whether what was promised of two losses is over: a rank's home and all its keepers are gone."""
    return world._replace(waived=world.waived or any(not slot.holders for slot in world.slots))


def given_up(world: World, number: int) -> World:
    """The core has given it up; what lives there goes on."""
    node = world.nodes[number]
    if node.link is Link.DEAD:
        return world
    ghosts, slots = list(world.ghosts), []
    for rank, slot in enumerate(world.slots):
        if slot.node == number and slot.life is not Life.NONE:
            if slot.life is Life.ALIVE and slot.proc is not None:
                ghosts.append(_ghost(rank, slot))
            slot = slot._replace(
                life=Life.NONE,
                proc=None,
                inbox=(),
                outbox=(),
                arena=(),
                private=(),
                full_private=(),
                exit_code=None,
            )
        elif slot.node == number:
            slot = slot._replace(arena=(), private=(), full_private=())
        slots.append(without(slot, number))
    standbys = [
        one._replace(life=Life.NONE, outbox=()) if one.node == number else one for one in world.standbys
    ]
    nodes = list(world.nodes)
    nodes[number] = node._replace(link=Link.LOST, inbox=(), outbox=(), runs=True)
    world = world._replace(
        slots=tuple(slots), standbys=tuple(standbys), nodes=tuple(nodes), ghosts=tuple(ghosts)
    )
    return judged(world)


def _ghost(rank: int, slot: Slot) -> Ghost:
    proc = slot.proc
    assert proc is not None
    state = proc.state
    before = (ph.Phase.IDLE, ph.Phase.COMPUTING, ph.Phase.GATED)
    may_vote = (
        not state.latched
        and slot.promise < slot.joined
        and state.phase in before
        and state.version is not None
        and max(slot.voted, slot.refused) < state.version
        and state.generation == slot.joined
    )
    votes = state.version if may_vote and state.version is not None else -1
    return Ghost(rank, slot.asks, tuple([one for one in slot.arena if one.sealed]), slot.keepers, votes)


def could_pass(world: World, generation: int) -> bool:
    """Whether a gate of `generation` can still pass by votes of ghosts, nobody else having promised not to vote."""
    ghosts = {ghost.rank: ghost for ghost in world.ghosts}
    if not ghosts or any(slot.promise >= generation for slot in world.slots):
        return False
    voting = [ghost.votes for ghost in ghosts.values()]
    step = max(voting)
    if step < 0:
        return False
    return all(
        slot.joined == generation and (slot.voted >= step or (rank in ghosts and ghosts[rank].votes == step))
        for rank, slot in enumerate(world.slots)
    )


def changed(world: World, number: int, **changes: object) -> World:
    node = world.nodes[number]._replace(**changes)  # type: ignore[arg-type]
    return world._replace(nodes=(*world.nodes[:number], node, *world.nodes[number + 1 :]))


def losses(world: World, config: Config) -> Iterator[tuple[str, World]]:
    """What can happen to nodes, each a fault. The first one leads, and is exempt."""
    world = world._replace(faults=world.faults - 1)
    for number, node in enumerate(world.nodes):
        matters = any(slot.node == number or number in slot.keepers for slot in world.slots) or any(
            one.node == number for one in world.standbys
        )
        if number == 0 or not matters:
            continue
        if config.node_faults and node.link in (Link.UP, Link.CUT):
            yield f"! node {number} dies", dies(world, number)
        if config.cuts and node.link is Link.UP:
            off = changed(world, number, link=Link.CUT)
            yield f"! node {number} and the leader do not hear each other", off
            groups = {slot.joined for slot in world.slots if slot.life is Life.ALIVE and slot.node == number}
            group = max(groups, default=0)
            if group and group != world.cut:
                yield f"! node {number} is cut off from all", off._replace(cut=group)
