"""The rank's side of the step protocol: a pure state machine.

No sockets, no clock, no torch: `transition(state, event) -> (state, actions)`. The engine (what a
training process runs) and the explorer (what the tests run) drive the very same function.

Version `s` is the state at the Enter of step `s`. The life of a step, and of a failure in it:

    IDLE --Enter--> COMPUTING --GateReached--> GATED --Verdict(passed)--> APPLYING --Applied--> TAIL --Exit--> IDLE
                        |                        |
                        | latched,               | Verdict(broken): my vote is out, I saw no result
                        | or refused             v
                        v                       HELD ---Plan(v = s+1)---> APPLYING   (roll forward)
                    UNWINDING <--Plan(v <= s)----+
                        |
                        Exit--> IDLE --Settle, latched--> PARKED --Plan--> REFORMING --Formed--> IDLE

A latch (the first failed collective, or the daemon's abort) only raises a flag: the main thread runs on
to the gate or to the end of the body and parks there, so that torch is never torn half-way. Parking is
a promise: a parked rank never votes again in that generation, which ends the generation for good.

    BUILDING   it holds no version (a replacement, or a rank that was torn) until a plan says where one is
    CLOSING    the last version is sealed, and every rank is to say so, before any may forget the one before
    LEFT       the script is at its end; the rank lingers, and can still serve, until all ranks are there

Two regimes. *Live*: other ranks hold my tensors, and only my private state is sealed, in the gate, for the next
version; but now and then a full version is sealed, in case every rank dies. When the next is due follows from what all
have agreed on, so all seal the same: the watermark (what every rank has sealed) has reached the last one, and the
agreed number of steps is over. A recovery begins with the watermark of its plan. *Sealed*: my tensors are copied to my
arena from Enter on, and I vote when that version is sealed; so where a gate was passed, every arena holds its version,
and a rank that is ahead can come back to it.

Where other nodes keep replicas, what a vote relies on must outlive this node: a rank votes when they have acknowledged
it (AwaitKept), and a recovery goes on only when the private state of its version is acknowledged by those who keep it
from now on. Whoever installs a version in the sealed regime seals it, too, before anything else: there may be no other
arena of this rank any more, and its replicas may be about to move.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flashrec.happenings import (
    NEVER,
    Abandon,
    Action,
    Applied,
    Apply,
    AwaitKept,
    BeginFull,
    BeginSeal,
    Close,
    Commit,
    DiscardAbove,
    Enter,
    Event,
    Exit,
    FinishFull,
    FinishSeal,
    Form,
    Formed,
    GateReached,
    Install,
    Installed,
    Latch,
    Leave,
    Linger,
    NoteRedo,
    Plan,
    Protected,
    PutBack,
    Regime,
    Rehearsed,
    Released,
    Report,
    Seal,
    Serve,
    Settle,
    Verdict,
    Vote,
)
from flashrec.protocol.phase import Phase

__all__ = [
    "NEVER", "TABLE", "Abandon", "Action", "Applied", "Apply", "AwaitKept", "BeginFull", "BeginSeal", "Close",
    "Commit", "DiscardAbove", "Enter", "Event", "Exit", "FinishFull", "FinishSeal", "Form", "Formed", "GateReached",
    "IllegalTransition", "Install", "Installed", "Latch", "Leave", "Linger", "NoteRedo", "Phase", "Plan", "Protected",
    "PutBack", "RankMachine", "RankState", "Regime", "Rehearsed", "Released", "Report", "Seal", "Serve", "Settle",
    "Verdict", "Vote", "is_due", "transition",
]  # fmt: skip


class IllegalTransition(AssertionError):
    """An event arrived in a phase that has no rule for it: a bug of ours."""


@dataclass(frozen=True, slots=True)
class RankState:
    """Everything the protocol knows about one rank's process. `version` None: a replacement with nothing yet, or a
    rank that was torn."""

    rank: int
    phase: Phase = Phase.STARTING
    generation: int = 1
    version: int | None = None
    latched: bool = False
    plan: Plan | None = None
    dirty: bool = False  # the body ran and was abandoned: NoteRedo's memory must be put back
    rehearsed: bool = False
    leaving: bool = False
    sealing: bool = False  # the job is in the sealed regime
    communicates: bool = False  # a collective was seen between gate and exit
    closed: bool = False  # every rank has said that the last version is sealed
    # Of the live regime, and equal on all ranks of a generation.
    full: int = -1  # the last full version that all set out to seal
    watermark: int = -1  # the newest that all have sealed
    every: int = NEVER  # steps from one to the next; NEVER, too, until a gate of this generation has told


Outcome = tuple[RankState, tuple[Action, ...]]


def _held(state: RankState) -> int:
    assert state.version is not None
    return state.version


def _protected(state: RankState, event: Protected) -> Outcome:
    return replace(state, phase=Phase.IDLE, version=0), (Seal(0),)


def _regime(state: RankState, event: Regime) -> Outcome:
    return replace(state, sealing=event.sealing), ()


def _settle(state: RankState, event: Settle | Leave | Close) -> Outcome:
    if state.plan is not None and state.version is not None:
        return _reform(state)
    if state.version is None:  # torn, perhaps after a plan had counted on me: that plan is over as well
        state = replace(state, phase=Phase.BUILDING, latched=True, plan=None)
        return state, (Report(state.generation, None, False),)
    if state.latched:
        return replace(state, phase=Phase.PARKED), (Report(state.generation, state.version, False),)
    return state, ()


def _seals(state: RankState) -> bool:
    """A step that communicates after the gate can tear ranks before the gate has told all of it."""
    return state.sealing or state.communicates


def is_due(state: RankState) -> bool:
    """Whether a full version is sealed in this step; the same on every rank that is in it."""
    reached = state.watermark >= state.full
    return not _seals(state) and reached and _held(state) >= max(0, state.full) + state.every


def _unsettled(state: RankState) -> bool:
    return state.latched or state.plan is not None or state.version is None


def _enter(state: RankState, event: Enter) -> Outcome:
    if state.plan is not None or state.version is None:
        raise IllegalTransition(f"rank {state.rank} entered a step without having settled ({state})")
    # A recovery may lead back to an earlier step, and the caller already has this one's batch. So with a failure
    # known the body runs, is abandoned, and the recovery comes after it.
    begin: tuple[Action, ...] = ()
    if not state.latched and _seals(state):
        begin = (BeginSeal(state.version),)
    elif not state.latched and is_due(state):
        begin = (BeginFull(state.version),)
    return replace(state, phase=Phase.COMPUTING), (NoteRedo(), *begin)


def _close(state: RankState, event: Close | Leave) -> Outcome:
    """The end of the loop, and of the script."""
    state = replace(state, leaving=isinstance(event, Leave))
    if _unsettled(state):
        return _settle(state, event)
    if state.sealing and not state.closed:
        version = _held(state)
        kept = AwaitKept(version, (version,))
        actions = (NoteRedo(), BeginSeal(version), FinishSeal(version), kept, Vote())
        return replace(state, phase=Phase.CLOSING), actions
    return _closed(state)


def _closed(state: RankState) -> Outcome:
    if state.leaving and state.latched:  # the vote passed, and then a rank was lost
        return _settle(state, Leave())
    if state.leaving:
        return replace(state, phase=Phase.LEFT), (Linger(state.generation, _held(state)),)
    return replace(state, phase=Phase.IDLE), ()


def _close_verdict(state: RankState, event: Verdict) -> Outcome:
    if event.passed:
        return _closed(replace(state, closed=True))
    state = replace(state, latched=True, phase=Phase.PARKED)
    return state, (Report(state.generation, state.version, False),)


def _gate(state: RankState, event: GateReached) -> Outcome:
    if state.latched:
        return replace(state, phase=Phase.UNWINDING), (Abandon(),)
    version = _held(state)
    finish: tuple[Action, ...] = ()
    sealed: int | None = None
    if _seals(state):
        finish, sealed = (FinishSeal(version),), version
    elif is_due(state):  # the optimizer is about to change the tensors
        finish = (FinishFull(version),)
    # That of this version was acknowledged in the last gate; but not what was sealed again since, for it had changed.
    kept = AwaitKept(sealed, (version, version + 1))
    return replace(state, phase=Phase.GATED), (*finish, Seal(version + 1), kept, Vote())


def _verdict(state: RankState, event: Verdict) -> Outcome:
    if event.passed:  # a result that arrived without error counts, whatever was latched meanwhile
        full = _held(state) if is_due(state) else state.full
        if state.every == NEVER:  # the first gate: a replacement may not have what the plan found in replicas
            full = event.watermark
        state = replace(state, full=full, watermark=event.watermark, every=event.every)
        return replace(state, phase=Phase.APPLYING, sealing=state.sealing or event.sealing), (Apply(),)
    state = replace(state, latched=True)
    if event.passed is None:
        return replace(state, phase=Phase.HELD), (
            Report(state.generation, state.version, _can_advance(state)),
        )
    return replace(state, phase=Phase.UNWINDING), (Abandon(),)


def _can_advance(state: RankState) -> bool:
    """Of a rank that is held: its gradients are complete. Where applying them needs the others, it cannot."""
    return not state.communicates


def _applied(state: RankState, event: Applied) -> Outcome:
    return replace(state, phase=Phase.TAIL), ()


def _exit_tail(state: RankState, event: Exit) -> Outcome:
    state = replace(state, phase=Phase.IDLE, communicates=state.communicates or event.communicated)
    if state.latched and event.communicated:
        return replace(state, version=None, rehearsed=True), ()
    version = _held(state) + 1
    return replace(state, version=version), (Commit(version),)


def _exit_unwound(state: RankState, event: Exit) -> Outcome:
    return replace(state, phase=Phase.IDLE, dirty=True), ()


def _exit_computing(state: RankState, event: Exit) -> Outcome:
    """An exception left the body: put down to the fault if there is one, else it is the script's own."""
    if not state.latched:
        raise IllegalTransition(f"rank {state.rank} left the body of step {state.version} without a gate")
    return replace(state, phase=Phase.IDLE, dirty=True), ()


def _latch(state: RankState, event: Latch) -> Outcome:
    """Between two parkings: raise the flag; the main thread parks when it gets to a safe point."""
    if event.generation < state.generation:
        return state, ()
    return replace(state, generation=event.generation, latched=True, plan=None), ()


def _latch_waiting(state: RankState, event: Latch) -> Outcome:
    """The main thread waits for the daemon: answer at once, and again for each newer generation."""
    if event.generation < state.generation:
        return state, ()
    if event.generation == state.generation and state.latched and state.plan is None:
        return state, ()  # reported before
    state = replace(state, generation=event.generation, latched=True, plan=None)
    if state.version is None:
        return replace(state, phase=Phase.BUILDING), (Report(state.generation, None, False),)
    held = state.phase is Phase.HELD
    return replace(state, phase=state.phase if held else Phase.PARKED), (
        Report(state.generation, state.version, held and _can_advance(state)),
    )


def _plan_held(state: RankState, event: Plan) -> Outcome:
    if event.generation <= state.generation:
        return state, ()
    state = replace(state, generation=event.generation, plan=event)
    if event.version == _held(state) + 1 and _can_advance(state):
        return replace(state, phase=Phase.APPLYING), (Apply(),)
    _at_most_one_behind(state, event)
    # This version again; or, installed, an earlier one, or the next, where applying cannot be done alone.
    return replace(state, phase=Phase.UNWINDING), (Abandon(),)


def _plan_parked(state: RankState, event: Plan) -> Outcome:
    if event.generation <= state.generation:
        return state, ()
    _at_most_one_behind(state, event)
    return _reform(replace(state, generation=event.generation, plan=event))


def _at_most_one_behind(state: RankState, event: Plan) -> None:
    """A gate needs every rank, so nobody can be further ahead of this one."""
    if event.version > _held(state) + 1:
        raise IllegalTransition(f"{event} for rank {state.rank}, which holds {state.version}")


def _plan_building(state: RankState, event: Plan) -> Outcome:
    if event.generation < state.generation or (state.latched and event.generation == state.generation):
        return state, ()
    state = replace(state, generation=event.generation, plan=event, latched=False)
    return _reform(state) if state.rehearsed else (state, ())


def _rehearsed(state: RankState, event: Rehearsed) -> Outcome:
    state = replace(state, rehearsed=True)
    return _reform(state) if state.plan is not None else (state, ())


def _reform(state: RankState) -> Outcome:
    plan = state.plan
    assert plan is not None
    first: tuple[Action, ...]
    discard = DiscardAbove(plan.version, plan.version if plan.sealing else plan.watermark)
    if state.version == plan.version:
        # What is served must be the version itself, so the redo's memory goes back first.
        put_back: tuple[Action, ...] = (PutBack(),) if state.dirty else ()
        serve: tuple[Action, ...] = (Serve(plan),) if plan.replaced else ()
        first = (*put_back, discard, *serve)
    else:
        # From the first byte on it is a mixture, until all is there. A rank at its end goes back only where the
        # last version is lost: its vote is then one for a step again.
        state = replace(state, version=None, rehearsed=True, closed=False)
        seal = (NoteRedo(), BeginSeal(plan.version), FinishSeal(plan.version)) if plan.sealing else ()
        first = (discard, Install(plan), *seal)
    # What this rank knew of full versions is not what its replacement knows, nor what arenas still hold.
    state = replace(state, full=plan.watermark, watermark=plan.watermark, every=NEVER)
    state = replace(state, phase=Phase.REFORMING, latched=False, dirty=False, sealing=plan.sealing)
    return state, (*first, AwaitKept(None, (plan.version,)), Form(plan.generation))


def _installed(state: RankState, event: Installed) -> Outcome:
    assert state.plan is not None
    return replace(state, version=state.plan.version), ()


def _formed(state: RankState, event: Formed) -> Outcome:
    if event.generation != state.generation:
        raise IllegalTransition(f"rank {state.rank} formed {event.generation} in {state.generation}")
    state = replace(state, phase=Phase.IDLE, plan=None)
    if state.closed:  # a replacement closes too, and needs every rank for that
        version = _held(state)
        return replace(state, phase=Phase.CLOSING), (AwaitKept(version, (version,)), Vote())
    return _closed(state) if state.leaving and not state.sealing else (state, ())


def _released(state: RankState, event: Released) -> Outcome:
    return replace(state, phase=Phase.GONE), ()


def _stale(state: RankState, event: Plan | Latch) -> Outcome:
    """A message of a generation this rank has already left behind; anything newer would be our bug."""
    if event.generation > state.generation:
        raise IllegalTransition(f"{event} for rank {state.rank} in {state.phase.name} of {state.generation}")
    return state, ()


_P = Phase
# The one table. What is not in it raises. An install or a forming that an abort has overtaken either comes to
# its end before the Latch is handed in (a rank that has Installed then parks as one that holds the version), or
# is given up: no Installed and no Formed may follow the Latch.
TABLE: dict[tuple[Phase, type], Callable[[RankState, Any], Outcome]] = {
    (_P.STARTING, Protected): _protected,
    (_P.IDLE, Regime): _regime,
    (_P.IDLE, Settle): _settle,
    (_P.IDLE, Enter): _enter,
    (_P.IDLE, Close): _close,
    (_P.IDLE, Leave): _close,
    (_P.CLOSING, Verdict): _close_verdict,
    (_P.COMPUTING, GateReached): _gate,
    (_P.COMPUTING, Exit): _exit_computing,
    (_P.GATED, Verdict): _verdict,
    (_P.APPLYING, Applied): _applied,
    (_P.TAIL, Exit): _exit_tail,
    (_P.UNWINDING, Exit): _exit_unwound,
    (_P.HELD, Plan): _plan_held,
    (_P.PARKED, Plan): _plan_parked,
    (_P.BUILDING, Plan): _plan_building,
    (_P.BUILDING, Rehearsed): _rehearsed,
    (_P.REFORMING, Installed): _installed,
    (_P.REFORMING, Formed): _formed,
    (_P.LEFT, Released): _released,
    **{
        (p, Latch): _latch
        for p in (_P.IDLE, _P.COMPUTING, _P.GATED, _P.CLOSING, _P.APPLYING, _P.TAIL, _P.UNWINDING)
    },
    **{(p, Latch): _latch_waiting for p in (_P.HELD, _P.PARKED, _P.REFORMING, _P.BUILDING, _P.LEFT)},
    **{
        (p, Plan): _stale
        for p in (_P.IDLE, _P.COMPUTING, _P.GATED, _P.CLOSING, _P.APPLYING, _P.TAIL, _P.UNWINDING)
    },
    **{(p, Plan): _stale for p in (_P.REFORMING, _P.LEFT, _P.GONE)},
    (_P.GONE, Latch): _stale,
}


def transition(state: RankState, event: Event) -> Outcome:
    """The rule for `event` in `state.phase`; IllegalTransition where the table has none."""
    rule = TABLE.get((state.phase, type(event)))
    if rule is None:
        raise IllegalTransition(f"rank {state.rank}: no rule for {event} in {state.phase.name} ({state})")
    return rule(state, event)


class RankMachine:
    """A state, and its recent history for the error message of a transition that must not happen."""

    def __init__(self, state: RankState) -> None:
        self.state = state
        self._history: deque[tuple[Event, Phase]] = deque(maxlen=20)

    def handle(self, event: Event) -> tuple[Action, ...]:
        try:
            self.state, actions = transition(self.state, event)
        except IllegalTransition as error:
            before = "; ".join(f"{event} -> {phase.name}" for event, phase in self._history)
            raise IllegalTransition(f"{error}; before that: {before or 'nothing'}") from None
        self._history.append((event, self.state.phase))
        return actions
