"""The rank's side of the step protocol: a pure state machine.

No sockets, no clock, no torch: `transition(state, event) -> (state, actions)`. The engine (what a
training process runs) and the explorer (what the tests run) drive the very same function.

Version `s` is the state at the Enter of step `s`. The life of a step, and of a failure in it:

    IDLE --Enter--> COMPUTING --GateReached--> GATED --Verdict(passed)--> APPLYING --Applied--> TAIL --Exit--> IDLE
                        |                        |
                        | latched,               | Verdict(broken): my vote is out, I saw no result
                        | or refused             v
                        v                       HELD ---Plan(v = s+1)---> APPLYING   (roll forward)
                    UNWINDING <--Plan(v = s)-----+
                        |
                        Exit--> IDLE --Enter, latched--> PARKED --Plan--> REFORMING --Formed--> IDLE

A latch (the first failed collective, or the daemon's abort) only raises a flag: the main thread runs on
to the gate or to the end of the body and parks there, so that torch is never torn half-way. Parking is
a promise: a parked rank never votes again in that generation, which ends the generation for good.

    BUILDING   a replacement: it has no tensor state until a plan names its sources and it has installed them
    LEFT       the script is at its end; the rank lingers, and can still serve, until all ranks are there
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flashrec.protocol.phase import Phase

# --- what happens to a rank -----------------------------------------------------------------------


class Protected(NamedTuple):
    """protect() returned: version 0 exists."""


class Enter(NamedTuple):
    """The main thread wants to start a step, or to go on after parking."""


class GateReached(NamedTuple):
    """Gradients are complete; nothing was changed yet."""


class Verdict(NamedTuple):
    """The agreement ended. `passed` None: no result came (a peer is gone, or the groups were cut)."""

    passed: bool | None


class Applied(NamedTuple):
    """The optimizer has run."""


class Exit(NamedTuple):
    """The body was left, normally or by unwinding."""


class Latch(NamedTuple):
    """Generation `generation` is over: an error in a collective, or the daemon's abort."""

    generation: int


class Plan(NamedTuple):
    """Resume at `version` in `generation`; `replaced` ranks install what the others serve."""

    generation: int
    version: int
    replaced: tuple[int, ...]


class Rehearsed(NamedTuple):
    """A replacement is built and rehearsed: it can install as soon as a plan names its sources."""


class Installed(NamedTuple):
    """A replacement holds every byte of the plan's version, verified and sealed."""


class Formed(NamedTuple):
    """The groups of `generation` connect every rank."""

    generation: int


class Leave(NamedTuple):
    """The script is at its end."""


class Released(NamedTuple):
    """All ranks are at their end."""


Event = (
    Protected
    | Enter
    | GateReached
    | Verdict
    | Applied
    | Exit
    | Latch
    | Plan
    | Rehearsed
    | Installed
    | Formed
    | Leave
    | Released
)

# --- what the rank must do about it -----------------------------------------------------------------


class NoteRedo(NamedTuple):
    """Remember what a redo of this step must start from."""


class Seal(NamedTuple):
    """Seal private state as of now, as that of `version`."""

    version: int


class Vote(NamedTuple):
    """Take part in the agreement."""


class Apply(NamedTuple):
    """Let the optimizer run."""


class Abandon(NamedTuple):
    """Unwind the body."""


class Report(NamedTuple):
    """Tell the daemon: parked in `generation`, holding `version` (None: nothing yet). `can_advance`: my
    vote is out and my gradients are complete, so I can also become version + 1."""

    generation: int
    version: int | None
    can_advance: bool


class DiscardAbove(NamedTuple):
    """Delete everything sealed above `version`: a redone step must not mix with its first attempt."""

    version: int


class PutBack(NamedTuple):
    """Restore what NoteRedo remembered."""


class Serve(NamedTuple):
    """Give my part of the state to the plan's replaced ranks."""

    plan: Plan


class Install(NamedTuple):
    """Pull the plan's version from those who serve it, verify it, seal its private state."""

    plan: Plan


class Form(NamedTuple):
    """Connect the groups of `generation`."""

    generation: int


class Commit(NamedTuple):
    """`version` is now held by this rank."""

    version: int


class Linger(NamedTuple):
    """Tell the daemon that the script is at its end, and wait."""

    generation: int
    version: int


Action = (
    NoteRedo
    | Seal
    | Vote
    | Apply
    | Abandon
    | Report
    | DiscardAbove
    | PutBack
    | Serve
    | Install
    | Form
    | Commit
    | Linger
)


class IllegalTransition(AssertionError):
    """An event arrived in a phase that has no rule for it: a bug of ours."""


@dataclass(frozen=True, slots=True)
class RankState:
    """Everything the protocol knows about one rank's process. `version` None: a replacement with nothing yet."""

    rank: int
    phase: Phase = Phase.STARTING
    generation: int = 1
    version: int | None = None
    latched: bool = False
    plan: Plan | None = None
    dirty: bool = False  # the body ran and was abandoned: NoteRedo's memory must be put back
    rehearsed: bool = False
    leaving: bool = False


Outcome = tuple[RankState, tuple[Action, ...]]


def _held(state: RankState) -> int:
    assert state.version is not None
    return state.version


def _protected(state: RankState, event: Protected) -> Outcome:
    return replace(state, phase=Phase.IDLE, version=0), (Seal(0),)


def _enter(state: RankState, event: Enter | Leave) -> Outcome:
    """One way into a step and to the end of the script: both first settle what a failure left behind."""
    state = replace(state, leaving=isinstance(event, Leave))
    if state.plan is not None:
        return _reform(state)
    if state.latched:
        return replace(state, phase=Phase.PARKED), (Report(state.generation, state.version, False),)
    if state.leaving:
        return replace(state, phase=Phase.LEFT), (Linger(state.generation, _held(state)),)
    return replace(state, phase=Phase.COMPUTING), (NoteRedo(),)


def _gate(state: RankState, event: GateReached) -> Outcome:
    if state.latched:
        return replace(state, phase=Phase.UNWINDING), (Abandon(),)
    return replace(state, phase=Phase.GATED), (Seal(_held(state) + 1), Vote())


def _verdict(state: RankState, event: Verdict) -> Outcome:
    if event.passed:  # a result that arrived without error counts, whatever was latched meanwhile
        return replace(state, phase=Phase.APPLYING), (Apply(),)
    state = replace(state, latched=True)
    if event.passed is None:
        return replace(state, phase=Phase.HELD), (Report(state.generation, state.version, True),)
    return replace(state, phase=Phase.UNWINDING), (Abandon(),)


def _applied(state: RankState, event: Applied) -> Outcome:
    return replace(state, phase=Phase.TAIL), ()


def _exit_tail(state: RankState, event: Exit) -> Outcome:
    version = _held(state) + 1
    return replace(state, phase=Phase.IDLE, version=version), (Commit(version),)


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
        Report(state.generation, state.version, held),
    )


def _plan_held(state: RankState, event: Plan) -> Outcome:
    if event.generation <= state.generation:
        return state, ()
    state = replace(state, generation=event.generation, plan=event)
    if event.version == _held(state) + 1:
        return replace(state, phase=Phase.APPLYING), (Apply(),)
    if event.version == state.version:
        return replace(state, phase=Phase.UNWINDING), (Abandon(),)
    raise IllegalTransition(f"{event} for rank {state.rank}, which holds {state.version} or the next")


def _plan_parked(state: RankState, event: Plan) -> Outcome:
    if event.generation <= state.generation:
        return state, ()
    if event.version != state.version:
        raise IllegalTransition(f"{event} for rank {state.rank}, which holds {state.version}")
    return _reform(replace(state, generation=event.generation, plan=event))


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
    if state.version is None:
        first = (DiscardAbove(plan.version), Install(plan))
    else:
        if plan.version != state.version:
            raise IllegalTransition(f"{plan} for rank {state.rank}, which holds {state.version}")
        # What is served must be the version itself, so the redo's memory goes back first.
        put_back: tuple[Action, ...] = (PutBack(),) if state.dirty else ()
        serve: tuple[Action, ...] = (Serve(plan),) if plan.replaced else ()
        first = (*put_back, DiscardAbove(plan.version), *serve)
    return replace(state, phase=Phase.REFORMING, latched=False, dirty=False), (*first, Form(plan.generation))


def _installed(state: RankState, event: Installed) -> Outcome:
    assert state.plan is not None
    return replace(state, version=state.plan.version), ()


def _formed(state: RankState, event: Formed) -> Outcome:
    if event.generation != state.generation:
        raise IllegalTransition(f"rank {state.rank} formed {event.generation} in {state.generation}")
    state = replace(state, phase=Phase.IDLE, plan=None)
    if state.leaving:
        return replace(state, phase=Phase.LEFT), (Linger(state.generation, _held(state)),)
    return state, ()


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
    (_P.IDLE, Enter): _enter,
    (_P.IDLE, Leave): _enter,
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
    **{(p, Latch): _latch for p in (_P.IDLE, _P.COMPUTING, _P.GATED, _P.APPLYING, _P.TAIL, _P.UNWINDING)},
    **{(p, Latch): _latch_waiting for p in (_P.HELD, _P.PARKED, _P.REFORMING, _P.BUILDING, _P.LEFT)},
    **{(p, Plan): _stale for p in (_P.IDLE, _P.COMPUTING, _P.GATED, _P.APPLYING, _P.TAIL, _P.UNWINDING)},
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
