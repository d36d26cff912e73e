"""The rank's side of the world: what a process can do next, by the real `phases.transition`.

As a session must: the main thread carries out a transition's actions in their order. Installing and
forming can be cut short by an abort, the others cannot; a message is taken up between two actions, never
inside one. Reports are sent at once.
"""

from dataclasses import replace

from flashrec import phases as ph
from tests.exploration import invariants
from tests.exploration.model import Config, Content, Context, Life, Move, Proc, Say, Slot, Violation

Phase = ph.Phase


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
    return slot._replace(proc=changed, outbox=tuple(outbox))


def die(slot: Slot, exit_code: int | None = None) -> Slot:
    """Memory, and what was still to be read, are gone. PrivateSlots, exports and what was sent stay."""
    return slot._replace(life=Life.ZOMBIE, exit_code=exit_code, proc=None, inbox=())


def sealed(slot: Slot, content: Content, config: Config) -> Slot:
    kept = [c for c in slot.arena if c.version < content.version]
    return slot._replace(arena=tuple(sorted([*kept, content]))[-config.arena_slots :])


def moves(slot: Slot, ctx: Context, config: Config) -> tuple[Move, ...]:
    """Everything the slot's process can do now, without its death."""
    if slot.life is not Life.ALIVE or slot.proc is None:
        return ()
    proc = slot.proc
    if proc.todo and not isinstance(proc.todo[0], ph.Install | ph.Form):
        carried = _carry_out(slot, proc, ctx, config)
        if isinstance(proc.todo[0], ph.Apply) and not config.reduced:
            carried += _receive(slot, proc, config)
        return carried
    mine = _wait(slot, proc, ctx) if proc.todo else _go_on(slot, proc, ctx, config)
    return (*mine, *_receive(slot, proc, config))


# --- the main thread, with actions to carry out ---------------------------------------------------------


def _carry_out(slot: Slot, proc: Proc, ctx: Context, config: Config) -> tuple[Move, ...]:
    action = proc.todo[0]
    proc = proc._replace(todo=proc.todo[1:])
    slot = slot._replace(proc=proc)
    name = type(action).__name__
    match action:
        case ph.NoteRedo():
            slot = slot._replace(proc=proc._replace(note=proc.private, private=None))
            return (Move(name, slot, eager=True),)
        case ph.PutBack():
            slot = slot._replace(proc=proc._replace(private=proc.note, note=None))
            return (Move(name, slot, eager=True),)
        case ph.Seal():
            content = Content(action.version, slot.joined if action.version else 0)
            return (
                Move(f"{name} {action.version}", sealed(slot, content, config), eager=True, lasting=True),
            )
        case ph.Vote():
            invariants.at_vote(slot, proc)
            step = proc.state.version
            assert step is not None
            yes = slot._replace(voted=step, proc=proc._replace(grads=slot.joined))
            no = slot._replace(refused=step, proc=proc._replace(grads=0))
            votes = [Move(f"Vote yes {step}", yes, lasting=True)]
            return (*votes, Move(f"Vote no {step}", no, lasting=True)) if ctx.broken else tuple(votes)
        case ph.Apply():
            invariants.at_apply(proc)
            assert proc.tensors is not None
            tensors = Content(proc.tensors.version + 1, proc.grads)
            slot = feed(slot._replace(proc=proc._replace(tensors=tensors)), ph.Applied())
            return (Move(f"{name} -> {tensors.version}", slot, eager=True),)
        case ph.Abandon():
            slot = slot._replace(proc=proc._replace(grads=0))
            return (Move(name, feed(slot, ph.Exit()), eager=True),)
        case ph.DiscardAbove():
            kept = tuple(c for c in slot.arena if c.version <= action.version or not config.discards)
            return (Move(f"{name} {action.version}", slot._replace(arena=kept), eager=True, lasting=True),)
        case ph.Serve():
            assert proc.tensors is not None
            slot = slot._replace(served=(action.plan.generation, proc.tensors))
            return (Move(name, slot, eager=True, lasting=True),)
        case Say():
            return (
                Move(
                    f"says {action.message}", slot._replace(outbox=(*slot.outbox, action.message)), eager=True
                ),
            )
        case _:
            raise Violation(f"nobody carries out {action}")


def _wait(slot: Slot, proc: Proc, ctx: Context) -> tuple[Move, ...]:
    """Inside an Install or a Form: it comes to its end, or an error or an abort (see _receive) ends it."""
    action = proc.todo[0]
    rest = proc._replace(todo=proc.todo[1:])
    if isinstance(action, ph.Install):
        if ctx.parts is None:
            return ()
        if ctx.parts.version != action.plan.version:
            raise Violation(f"{ctx.parts} is served, the plan says {action.plan.version}")
        mine = [c for c in slot.arena if c.version == action.plan.version]
        private = mine[0] if mine else None
        proc = rest._replace(tensors=ctx.parts, private=private)
        return (Move("Install", feed(slot._replace(proc=proc), ph.Installed()), lasting=True),)
    assert isinstance(action, ph.Form)
    if slot.joined != action.generation:
        invariants.at_form(slot, proc)
        joining = slot._replace(
            joined=action.generation, entered=-1, voted=-1, refused=-1, proc=proc._replace(promised=0)
        )
        return (Move(f"Form {action.generation}", joining, eager=True, lasting=True),)
    outcomes = []
    if ctx.joined:
        said = (*slot.outbox, ("formed", action.generation))
        # What only this recovery needed is forgotten, so that ranks with different pasts become alike.
        rest = rest._replace(state=replace(rest.state, rehearsed=False))
        slot = slot._replace(proc=rest, outbox=said, served=None, is_source=0)
        formed = feed(slot, ph.Formed(action.generation))
        outcomes.append(Move(f"Formed {action.generation}", formed))
    if ctx.broken:
        failed = feed(slot._replace(proc=proc._replace(todo=())), ph.Latch(action.generation))
        outcomes.append(Move("forming fails", failed))
    return tuple(outcomes)


# --- the main thread, with nothing left to carry out ------------------------------------------------------


def _go_on(slot: Slot, proc: Proc, ctx: Context, config: Config) -> tuple[Move, ...]:
    state = proc.state
    match state.phase:
        case Phase.STARTING:
            start = proc._replace(tensors=Content(0, 0), private=Content(0, 0))
            ready = feed(slot._replace(proc=start), ph.Protected())
            assert ready.proc is not None
            todo = (*ready.proc.todo, Say(("protected",)))  # only when version 0 is sealed
            return (Move("Protected", ready._replace(proc=ready.proc._replace(todo=todo))),)
        case Phase.IDLE:
            settled = not state.latched and state.plan is None
            if state.version == config.steps:
                return (Move("Leave", feed(slot, ph.Leave()), eager=state.latched and state.plan is None),)
            inside = feed(slot, ph.Enter())
            if settled:
                inside = inside._replace(entered=state.version)
            return (Move("Enter", inside, eager=state.latched and state.plan is None, lasting=settled),)
        case Phase.COMPUTING:
            return _compute(slot, proc, ctx, config)
        case Phase.GATED:
            return _verdicts(slot, ctx)
        case Phase.TAIL:
            left = slot._replace(proc=proc._replace(private=proc.tensors, note=None, grads=0))
            return (Move("Exit", feed(left, ph.Exit()), eager=True),)
        case Phase.BUILDING if not state.rehearsed:
            return (Move("Rehearsed", feed(slot, ph.Rehearsed())),)
        case Phase.GONE:
            return (Move("exits", die(slot, exit_code=0), lasting=True),)
    return ()


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


def _verdicts(slot: Slot, ctx: Context) -> tuple[Move, ...]:
    outcomes = []
    for possible, passed in ((ctx.passed, True), (ctx.refused, False), (ctx.broken, None)):
        if possible:
            after = feed(slot, ph.Verdict(passed))
            assert after.proc is not None
            invariants.at_verdict(after.proc.state.phase, ctx.passed)
            outcomes.append(Move(f"Verdict {passed}", after))
    return tuple(outcomes)


# --- messages ---------------------------------------------------------------------------------------------


def _receive(slot: Slot, proc: Proc, config: Config) -> tuple[Move, ...]:
    phase, plan = proc.state.phase, proc.state.plan
    if not slot.inbox or (config.reduced and phase in (Phase.GATED, Phase.TAIL)):
        return ()
    event = slot.inbox[0]
    after = feed(slot._replace(inbox=slot.inbox[1:]), event)
    assert after.proc is not None
    if phase is Phase.REFORMING and after.proc.state.phase is not phase:  # an abort ends the waiting action
        new = after.proc.todo[len(proc.todo) :]
        after = after._replace(proc=after.proc._replace(todo=new))
        assert after.proc is not None
    waits = phase in (Phase.PARKED, Phase.HELD, Phase.LEFT)
    eager = (
        after.proc == proc
        or (waits and not isinstance(event, ph.Released))
        or (phase is Phase.BUILDING and (isinstance(event, ph.Plan) or plan is None))
    )
    return (Move(f"takes {event}", after, eager=eager),)
