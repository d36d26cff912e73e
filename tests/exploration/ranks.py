"""The rank's side of the world: what a process can do next, by the real `phases.transition`.

As a session must: the main thread carries out a transition's actions in their order. Installing and
forming can be cut short by an abort, the others cannot; a message is taken up between two actions, never
inside one. Reports are sent at once. In the sealed regime a thread of the process copies tensors into its
arena meanwhile (see arenas.py).
"""

from dataclasses import replace

from flashrec import phases as ph
from tests.exploration import arenas, invariants, nodes
from tests.exploration.model import (
    DAMAGED,
    LOST,
    Await,
    Config,
    Content,
    Context,
    Life,
    Move,
    Proc,
    Say,
    Slot,
    Told,
    Violation,
)

Phase = ph.Phase
WAITING = (Phase.PARKED, Phase.HELD, Phase.LEFT)


def feed(slot: Slot, event: ph.Event) -> Slot:
    """Let the slot's machine handle `event`; its messages go out at once, other actions wait in `todo`."""
    proc = slot.proc
    assert proc is not None
    try:
        state, actions = ph.transition(proc.state, event)
    except ph.IllegalTransition as error:
        raise Violation(str(error)) from error
    outbox, todo, promised = list(slot.outbox), list(proc.todo), proc.promised
    for action in actions:
        if isinstance(action, ph.Report):
            outbox.append(("parked", *action))
            promised = action.generation
            if slot.asks:  # of a world of several nodes
                slot = slot._replace(promise=promised)
        elif isinstance(action, ph.Linger):
            outbox.append(("leaving", *action))
        elif not isinstance(action, ph.Commit):
            todo.append(action)
    changed = proc._replace(state=state, todo=tuple(todo), promised=promised)
    if state.version is None:  # whatever is in its memory now: nobody may rely on it
        changed = changed._replace(tensors=None, private=None, note=None)
    return slot._replace(proc=changed, outbox=tuple(outbox))


def die(slot: Slot, exit_code: int | None = None) -> Slot:
    """Memory, and what was still to be read, are gone. What is sealed, exports and what was sent stay."""
    return slot._replace(
        life=Life.ZOMBIE, exit_code=exit_code, proc=None, inbox=(), arena=arenas.given_up(slot.arena)
    )


def deaths(slot: Slot, config: Config) -> tuple[Slot, ...]:
    """A death now; and one just after what is being copied was sealed, where that is no event of its own."""
    return tuple(die(before) for before in arenas.resolved(slot, config))


def keep_private(slot: Slot, content: Content, config: Config) -> Slot:
    kept = [c for c in slot.private if c.version < content.version]
    return slot._replace(private=tuple(sorted([*kept, content]))[-config.private_slots :])


def keep_full(slot: Slot, version: int, config: Config) -> Slot:
    """Private state of a full version: what the last gate has sealed for it, in a slot of its own."""
    found = [c for c in slot.private if c.version == version]
    if not found:
        raise Violation(f"the private state of full version {version} is gone: {slot.private}")
    kept = [c for c in slot.full_private if c.version < version]
    return slot._replace(full_private=(*kept, *found)[-config.full_private_slots :])


def moves(slot: Slot, ctx: Context, config: Config) -> tuple[Move, ...]:
    """Everything the slot's process can do now, without its death."""
    if slot.life is not Life.ALIVE or slot.proc is None:
        return ()
    proc = slot.proc
    thread = arenas.thread_moves(slot, config)
    if proc.todo and isinstance(proc.todo[0], ph.AwaitKept) and config.several:
        waits = _await_kept(slot, proc, proc.todo[0], ctx, config)
        taken = _receive(slot, proc, ctx, config) if proc.state.phase is Phase.REFORMING else ()
        return (*waits, *taken, *thread)
    if proc.todo and not isinstance(proc.todo[0], ph.Install | ph.Form | Await):
        carried = _carry_out(slot, proc, ctx, config)
        if isinstance(proc.todo[0], ph.Apply) and not config.reduced:
            carried += _receive(slot, proc, ctx, config)
        return (*carried, *thread)
    mine = _wait(slot, proc, ctx, config) if proc.todo else _go_on(slot, proc, ctx, config)
    return (*mine, *_receive(slot, proc, ctx, config), *thread)


def _await_kept(
    slot: Slot, proc: Proc, action: ph.AwaitKept, ctx: Context, config: Config
) -> tuple[Move, ...]:
    """Until those who keep its replicas have acknowledged them; an error or an abort may end it before."""
    rest = proc._replace(todo=proc.todo[1:])
    if nodes.is_kept(slot, action, config):
        return (Move("is kept", slot._replace(proc=rest), eager=True, lasting=True),)
    aborted = any(isinstance(event, ph.Latch) and event.generation >= slot.joined for event in slot.inbox)
    if proc.state.phase is Phase.REFORMING or not (ctx.broken or (aborted and not ctx.cut_off)):
        return ()
    slot = slot._replace(proc=proc._replace(todo=()))
    return (Move("is not kept, and does not vote", feed(slot, ph.Verdict(False)), lasting=True),)


def _holders(slot: Slot) -> tuple[int, ...]:
    """Where what it relies on must be: of a keeper that is gone by now only the word is left."""
    gone = {copy.node for copy in slot.copies if copy.acked and not (copy.private or copy.arena)}
    return tuple(sorted({slot.node, *slot.keepers} - gone))


# --- the main thread, with actions to carry out ---------------------------------------------------------


def _carry_out(slot: Slot, proc: Proc, ctx: Context, config: Config) -> tuple[Move, ...]:
    action = proc.todo[0]
    proc = proc._replace(todo=proc.todo[1:])
    slot = slot._replace(proc=proc)
    name = type(action).__name__
    match action:
        case ph.NoteRedo():
            if proc.state.phase is Phase.COMPUTING:  # at the end of the loop no body follows that changes it
                slot = slot._replace(proc=proc._replace(note=proc.private, private=None))
            return (Move(name, slot, eager=True),)
        case ph.PutBack():
            slot = slot._replace(proc=proc._replace(private=proc.note, note=None))
            return (Move(name, slot, eager=True),)
        case ph.Seal():
            slot = keep_private(slot, Content(action.version, slot.joined), config)
            return (Move(f"{name} {action.version}", slot, eager=True, lasting=True),)
        case ph.BeginSeal():
            assert proc.tensors is not None
            slot = arenas.begin(slot, proc.tensors, config)
            return (Move(f"{name} {action.version}", slot, eager=True, lasting=True),)
        case ph.FinishSeal():
            slot = arenas.finish(slot, action.version)
            return (Move(f"{name} {action.version}", slot, eager=True, lasting=True),)
        case ph.BeginFull():
            assert proc.tensors is not None
            slot = arenas.begin(keep_full(slot, action.version, config), proc.tensors, config)
            return (Move(f"{name} {action.version}", slot, eager=True, lasting=True),)
        case ph.FinishFull():
            sealed = arenas.finish(slot, action.version)
            outcomes = [Move(f"{name} {action.version}", sealed, eager=True, lasting=True)]
            if config.full_fails and not arenas.holds(slot.arena, action.version):
                failed = slot._replace(arena=arenas.given_up(slot.arena))
                outcomes.append(Move(f"{name} {action.version} fails", failed, eager=True, lasting=True))
            return tuple(outcomes)
        case ph.AwaitKept():  # on one node nobody keeps replicas
            assert not config.several
            return (Move(name, slot, eager=True),)
        case ph.Vote():
            return _vote(slot, proc, ctx, config)
        case ph.Apply():
            invariants.at_apply(slot, proc)
            assert proc.tensors is not None
            tensors = Content(proc.tensors.version + 1, proc.grads)
            slot = feed(slot._replace(proc=proc._replace(tensors=tensors)), ph.Applied())
            return (Move(f"{name} -> {tensors.version}", slot, eager=True),)
        case ph.Abandon():
            slot = slot._replace(proc=proc._replace(grads=0))
            return (Move(name, feed(slot, ph.Exit()), eager=True),)
        case ph.DiscardAbove():
            plan = proc.state.plan
            return tuple(
                Move(
                    f"{name} {action.version}{' (just sealed)' if before is not slot else ''}",
                    _told(_discard(before, action.version, config, action.full), plan, config),
                    eager=True,
                    lasting=True,
                )
                for before in arenas.resolved(slot, config)
            )
        case ph.Serve():
            if slot.is_source != action.plan.generation:
                return (Move("serves nothing", slot, eager=True),)
            invariants.at_serve(proc, action.plan)
            slot = slot._replace(served=(action.plan.generation, proc.tensors))
            return (Move(name, slot, eager=True, lasting=True),)
        case Say():
            slot = slot._replace(outbox=(*slot.outbox, action.message))
            return (Move(f"says {action.message}", slot, eager=True),)
        case _:
            raise Violation(f"nobody carries out {action}")


def _told(slot: Slot, plan: ph.Plan | None, config: Config) -> Slot:
    return nodes.tell_keepers(slot, plan, config) if config.several and plan is not None else slot


def _vote(slot: Slot, proc: Proc, ctx: Context, config: Config) -> tuple[Move, ...]:
    invariants.at_vote(slot, proc)
    step = proc.state.version
    assert step is not None
    applies = proc.state.phase is Phase.GATED
    asks = proc.state.communicates and not proc.state.sealing
    newest = nodes.full_that_counts(slot) if config.several else arenas.newest(slot.arena)
    yes = slot._replace(
        holders=_holders(slot) if config.several else (),
        voted=step,
        asked=step if asks else slot.asked,
        offered=newest if not proc.state.sealing else -1,
        proc=proc._replace(grads=slot.joined if applies else 0),
    )
    no = slot._replace(refused=step, proc=proc._replace(grads=0))
    votes = [Move(f"Vote yes {step}", yes, lasting=True)]
    return (*votes, Move(f"Vote no {step}", no, lasting=True)) if ctx.broken else tuple(votes)


def _discard(slot: Slot, version: int, config: Config, full: int | None = None) -> Slot:
    full = version if full is None or not config.discards_full else full
    private = tuple(c for c in slot.private if c.version <= version or not config.discards)
    full_private = tuple(c for c in slot.full_private if c.version <= full)
    arena = arenas.discarded(slot.arena, full, config)
    return slot._replace(private=private, full_private=full_private, arena=arena)


def _wait(slot: Slot, proc: Proc, ctx: Context, config: Config) -> tuple[Move, ...]:
    """Inside an Install or a Form: it comes to its end, or an error or an abort (see _receive) ends it."""
    action = proc.todo[0]
    rest = proc._replace(todo=proc.todo[1:])
    if isinstance(action, Await):
        return ()
    if isinstance(action, ph.Install):
        if ctx.source is None:
            return ()
        if config.several and LOST in (ctx.source.lineage, ctx.private and ctx.private.lineage):
            failed = feed(slot._replace(proc=proc._replace(todo=())), ph.Latch(action.plan.generation))
            return (Move("its sources are gone", failed, lasting=True),)
        if ctx.source.version != action.plan.version:
            raise Violation(f"{ctx.source} is served, the plan says {action.plan.version}")
        if ctx.source.lineage == DAMAGED:
            return (_find_damaged(slot, proc, action.plan, config),)
        mine = [c for c in (*slot.private, *slot.full_private) if c.version == action.plan.version]
        private = mine[0] if mine else None
        if config.several:  # from now on it is this node that has it, and the keepers hear of it
            private = ctx.private
            assert private is not None
            slot = nodes.forget_acks(slot if private in mine else keep_private(slot, private, config))
            slot = slot._replace(holders=tuple(sorted({*slot.holders, slot.node})))
        proc = rest._replace(tensors=ctx.source, private=private, note=None)
        slot = _floored(slot, action.plan.version - 1, config)  # it seals at once
        return (Move("Install", feed(slot._replace(proc=proc), ph.Installed()), lasting=True),)
    assert isinstance(action, ph.Form)
    if slot.joined != action.generation:
        plan = invariants.at_form(slot, proc)
        joining = slot._replace(
            joined=action.generation,
            entered=-1,
            voted=-1,
            refused=-1,
            asked=-1,
            offered=-1,
            proc=proc._replace(promised=0),
        )
        joining = _floored(joining, plan.version - 1, config)
        if config.several and not proc.state.sealing:
            joining = joining._replace(holders=_holders(joining))
        return (Move(f"Form {action.generation}", joining, eager=True, lasting=True),)
    outcomes = []
    if ctx.joined:
        said = (*slot.outbox, ("formed", action.generation))
        # What only this recovery needed is forgotten, so that ranks with different pasts become alike.
        rest = rest._replace(state=replace(rest.state, rehearsed=False))
        slot = slot._replace(proc=rest, outbox=said, served=None, is_source=0, from_arenas=0, told=Told())
        formed = feed(slot, ph.Formed(action.generation))
        outcomes.append(Move(f"Formed {action.generation}", _mark(formed, Phase.CLOSING)))
    if ctx.broken:
        failed = feed(slot._replace(proc=proc._replace(todo=())), ph.Latch(action.generation))
        outcomes.append(Move("forming fails", failed))
    return tuple(outcomes)


def _floored(slot: Slot, version: int, config: Config) -> Slot:
    """Once it is known that the gate of `version` has passed: what is sealed of it is to be kept."""
    safe = arenas.is_safe(slot, version, config)
    return slot._replace(floor=max(slot.floor, version)) if safe else slot


def _find_damaged(slot: Slot, proc: Proc, plan: ph.Plan, config: Config) -> Move:
    """The checksums do not match. What it has sealed of the version is discarded, so that no plan asks for it again."""
    if not arenas.holds(slot.arena, plan.version):
        return Move("finds its source damaged, and fails", die(slot, exit_code=1), lasting=True)
    slot = _discard(slot._replace(proc=proc._replace(todo=())), plan.version - 1, config)
    return Move("finds its source damaged", feed(slot, ph.Latch(plan.generation)), lasting=True)


# --- the main thread, with nothing left to carry out ------------------------------------------------------


def _mark(slot: Slot, *phases: Phase) -> Slot:
    """It takes part in the collectives of the step, or of the end, that it has come to."""
    assert slot.proc is not None
    state = slot.proc.state
    here = state.phase in phases and not state.latched
    return slot._replace(entered=state.version) if here and state.version is not None else slot


def _go_on(slot: Slot, proc: Proc, ctx: Context, config: Config) -> tuple[Move, ...]:
    state = proc.state
    match state.phase:
        case Phase.STARTING:
            zero = Content(0, slot.joined)
            fresh = slot._replace(  # what an earlier start has left is removed
                private=(), full_private=(), arena=(), proc=proc._replace(tensors=zero, private=zero)
            )
            ready = feed(fresh, ph.Protected())
            assert ready.proc is not None
            todo = (*ready.proc.todo, Say(("protected",)), Await())  # it says so when version 0 is sealed
            return (Move("Protected", ready._replace(proc=ready.proc._replace(todo=todo))),)
        case Phase.IDLE:
            return _between_steps(slot, proc, config)
        case Phase.COMPUTING:
            return _compute(slot, proc, ctx, config)
        case Phase.GATED | Phase.CLOSING:
            return _verdicts(slot, ctx, config)
        case Phase.TAIL:
            return _leave_step(slot, proc, ctx, config)
        case Phase.BUILDING if not state.rehearsed:
            return (Move("Rehearsed", feed(slot, ph.Rehearsed())),)
        case Phase.GONE:
            return (Move("exits", die(slot, exit_code=0), lasting=True),)
    return ()


def _between_steps(slot: Slot, proc: Proc, config: Config) -> tuple[Move, ...]:
    """A step is settled for, then entered. Where nothing is known of a failure the two are one event here; one that
    becomes known between the two is `settled` (see _receive)."""
    state = proc.state
    unsettled = state.latched or state.plan is not None or state.version is None
    known = unsettled and state.plan is None  # nothing that others can do takes it back
    ends_here = state.version == config.steps and not state.sealing and not config.open_ended
    if unsettled and not proc.settled and not ends_here:
        return (Move("Settle", feed(slot, ph.Settle()), eager=known),)
    if state.version == config.steps and config.open_ended:
        return ()
    slot = slot._replace(proc=proc._replace(settled=False))
    if state.version == config.steps:
        ends = [Move("Leave", _mark(feed(slot, ph.Leave()), Phase.CLOSING), eager=known)]
        if state.sealing and not state.closed and not known:
            ends.append(Move("Close", _mark(feed(slot, ph.Close()), Phase.CLOSING)))
        return tuple(ends)
    if state.leaving and not unsettled:  # its loop is over: a replacement runs the script anew
        return (Move("cannot make a step again", die(slot, exit_code=1), lasting=True),)
    inside = _mark(feed(slot, ph.Enter()), Phase.COMPUTING)
    return (Move("Enter", inside, eager=known, lasting=not unsettled),)


def _compute(slot: Slot, proc: Proc, ctx: Context, config: Config) -> tuple[Move, ...]:
    if proc.state.latched:
        unwound = [Move("GateReached", feed(slot, ph.GateReached()), eager=True)]
        if not config.reduced:
            unwound.append(Move("an exception leaves the body", feed(slot, ph.Exit())))
        return tuple(unwound)
    outcomes = []
    if ctx.entered:
        outcomes.append(Move("GateReached", feed(slot, ph.GateReached()), lasting=True))
    if ctx.broken:
        outcomes.append(Move("a collective fails", feed(slot, ph.Latch(slot.joined))))
    return tuple(outcomes)


def _verdicts(slot: Slot, ctx: Context, config: Config) -> tuple[Move, ...]:
    assert slot.proc is not None
    outcomes = []
    for possible, passed in ((ctx.passed, True), (ctx.refused, False), (ctx.broken, None)):
        if possible:
            every = config.full_every or ph.NEVER
            after = feed(slot, ph.Verdict(passed, bool(passed) and ctx.asked, ctx.watermark, every))
            assert after.proc is not None
            after = after._replace(floor=max(slot.floor, ctx.watermark))
            invariants.at_verdict(after.proc.state, ctx.passed)
            if after.proc.state.sealing and not slot.proc.state.sealing:
                after = after._replace(outbox=(*after.outbox, ("switched",)))
            outcomes.append(Move(f"Verdict {passed}", after))
    return tuple(outcomes)


def _leave_step(slot: Slot, proc: Proc, ctx: Context, config: Config) -> tuple[Move, ...]:
    """Where applying communicates, a collective of it may still work when somebody is gone (a root has sent before
    it died), and fails at others."""
    step = proc.state.version
    assert step is not None
    whole = slot._replace(proc=proc._replace(private=proc.tensors, note=None, grads=0))
    left = feed(whole, ph.Exit(config.communicates))
    assert left.proc is not None
    if proc.state.sealing and arenas.is_safe(slot, step, config) and left.proc.state.version is not None:
        left = left._replace(floor=max(slot.floor, step))
    outcomes = [Move("Exit", left, eager=not config.communicates)]
    if config.communicates and ctx.broken and not proc.state.latched:
        torn = slot._replace(proc=proc._replace(tensors=None, private=None, note=None, grads=0))
        torn = feed(feed(torn, ph.Latch(slot.joined)), ph.Exit(True))
        outcomes.append(Move("a collective fails after the gate", torn))
    return tuple(outcomes)


# --- messages ---------------------------------------------------------------------------------------------


def _receive(slot: Slot, proc: Proc, ctx: Context, config: Config) -> tuple[Move, ...]:
    phase, plan = proc.state.phase, proc.state.plan
    if (
        ctx.cut_off
        or not slot.inbox
        or (config.reduced and phase in (Phase.GATED, Phase.TAIL, Phase.CLOSING))
    ):
        return ()
    event = slot.inbox[0]
    after = feed(slot._replace(inbox=slot.inbox[1:]), event)
    assert after.proc is not None
    if isinstance(event, ph.Regime):  # protect() returns
        after = after._replace(proc=after.proc._replace(todo=after.proc.todo[1:]))
        return (Move(f"takes {event}", after, eager=True),)
    if phase is Phase.REFORMING and after.proc.state.phase is not phase:  # an abort ends the waiting action
        new = after.proc.todo[len(proc.todo) :]
        after = after._replace(proc=after.proc._replace(todo=new))
        assert after.proc is not None
    eager = (
        after.proc == proc
        or (phase in WAITING and not isinstance(event, ph.Released))
        or (phase is Phase.BUILDING and (isinstance(event, ph.Plan) or plan is None))
    )
    taken = [Move(f"takes {event}", after, eager=eager)]
    settled = not proc.todo and not proc.state.latched and plan is None
    if phase is Phase.IDLE and settled and after.proc.state.latched and proc.state.version != config.steps:
        late = after._replace(proc=after.proc._replace(settled=True))
        taken.append(Move(f"takes {event} before it enters", late))
    return tuple(taken)
