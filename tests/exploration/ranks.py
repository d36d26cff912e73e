"""The rank's side of the world: what a process can do next, by the real `phases.transition`.

As a session must: the main thread carries out a transition's actions in their order. Installing and
forming can be cut short by an abort, the others cannot; a message is taken up between two actions, never
inside one. Reports are sent at once. In the sealed regime a thread of the process copies tensors into its
arena meanwhile (see arenas.py).
"""

from dataclasses import replace

from flashrec import phases as ph
from tests.exploration import arenas, invariants
from tests.exploration.model import (
    DAMAGED,
    Await,
    Config,
    Content,
    Context,
    Life,
    Move,
    Proc,
    Say,
    Slot,
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


def moves(slot: Slot, ctx: Context, config: Config) -> tuple[Move, ...]:
    """Everything the slot's process can do now, without its death."""
    if slot.life is not Life.ALIVE or slot.proc is None:
        return ()
    proc = slot.proc
    thread = arenas.thread_moves(slot, config)
    if proc.todo and not isinstance(proc.todo[0], ph.Install | ph.Form | Await):
        carried = _carry_out(slot, proc, ctx, config)
        if isinstance(proc.todo[0], ph.Apply) and not config.reduced:
            carried += _receive(slot, proc, config)
        return (*carried, *thread)
    mine = _wait(slot, proc, ctx, config) if proc.todo else _go_on(slot, proc, ctx, config)
    return (*mine, *_receive(slot, proc, config), *thread)


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
        case ph.Vote():
            return _vote(slot, proc, ctx)
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
            return tuple(
                Move(
                    f"{name} {action.version}{' (just sealed)' if before is not slot else ''}",
                    _discard(before, action.version, config),
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


def _vote(slot: Slot, proc: Proc, ctx: Context) -> tuple[Move, ...]:
    invariants.at_vote(slot, proc)
    step = proc.state.version
    assert step is not None
    applies = proc.state.phase is Phase.GATED
    asks = proc.state.communicates and not proc.state.sealing
    yes = slot._replace(
        voted=step,
        asked=step if asks else slot.asked,
        proc=proc._replace(grads=slot.joined if applies else 0),
    )
    no = slot._replace(refused=step, proc=proc._replace(grads=0))
    votes = [Move(f"Vote yes {step}", yes, lasting=True)]
    return (*votes, Move(f"Vote no {step}", no, lasting=True)) if ctx.broken else tuple(votes)


def _discard(slot: Slot, version: int, config: Config) -> Slot:
    private = tuple(c for c in slot.private if c.version <= version or not config.discards)
    return slot._replace(private=private, arena=arenas.discarded(slot.arena, version, config))


def _wait(slot: Slot, proc: Proc, ctx: Context, config: Config) -> tuple[Move, ...]:
    """Inside an Install or a Form: it comes to its end, or an error or an abort (see _receive) ends it."""
    action = proc.todo[0]
    rest = proc._replace(todo=proc.todo[1:])
    if isinstance(action, Await):
        return ()
    if isinstance(action, ph.Install):
        if ctx.source is None:
            return ()
        if ctx.source.version != action.plan.version:
            raise Violation(f"{ctx.source} is served, the plan says {action.plan.version}")
        if ctx.source.lineage == DAMAGED:
            return (_find_damaged(slot, proc, action.plan, config),)
        mine = [c for c in slot.private if c.version == action.plan.version]
        private = mine[0] if mine else None
        proc = rest._replace(tensors=ctx.source, private=private, note=None)
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
            proc=proc._replace(promised=0),
        )
        if arenas.is_safe(slot, plan.version - 1, config):
            joining = joining._replace(floor=max(slot.floor, plan.version - 1))
        return (Move(f"Form {action.generation}", joining, eager=True, lasting=True),)
    outcomes = []
    if ctx.joined:
        said = (*slot.outbox, ("formed", action.generation))
        # What only this recovery needed is forgotten, so that ranks with different pasts become alike.
        rest = rest._replace(state=replace(rest.state, rehearsed=False))
        slot = slot._replace(proc=rest, outbox=said, served=None, is_source=0, from_arenas=0)
        formed = feed(slot, ph.Formed(action.generation))
        outcomes.append(Move(f"Formed {action.generation}", _mark(formed, Phase.CLOSING)))
    if ctx.broken:
        failed = feed(slot._replace(proc=proc._replace(todo=())), ph.Latch(action.generation))
        outcomes.append(Move("forming fails", failed))
    return tuple(outcomes)


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
                private=(), arena=(), proc=proc._replace(tensors=zero, private=zero)
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
    if state.sealing and unsettled and not proc.settled:
        return (Move("Settle", feed(slot, ph.Settle()), eager=known),)
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
            after = feed(slot, ph.Verdict(passed, bool(passed) and ctx.asked))
            assert after.proc is not None
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


def _receive(slot: Slot, proc: Proc, config: Config) -> tuple[Move, ...]:
    phase, plan = proc.state.phase, proc.state.plan
    if not slot.inbox or (config.reduced and phase in (Phase.GATED, Phase.TAIL, Phase.CLOSING)):
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
    settled = proc.state.sealing and not proc.todo and not proc.state.latched and plan is None
    if phase is Phase.IDLE and settled and after.proc.state.latched and proc.state.version != config.steps:
        late = after._replace(proc=after.proc._replace(settled=True))
        taken.append(Move(f"takes {event} before it enters", late))
    return tuple(taken)
