"""The rank's machine, rule by rule. What the rules add up to is explored in tests/exploration."""

import itertools
from typing import Any

import pytest

from flashrec import phases as ph
from flashrec.phases import Phase, RankMachine, RankState, transition

PLAN_2 = ph.Plan(2, 3, (1,))
KEPT_3 = ph.AwaitKept(None, (3,))
ALIVE_IN_A_STEP = (Phase.IDLE, Phase.COMPUTING, Phase.GATED, Phase.APPLYING, Phase.TAIL, Phase.UNWINDING)


def rank(phase: Phase, version: int | None = 3, **more: Any) -> RankState:
    return RankState(0, phase, 1, version, **more)


# (before, event, what changed, actions)
RULES: list[tuple[RankState, Any, dict[str, object], tuple[Any, ...]]] = [
    (rank(Phase.STARTING, None), ph.Protected(), {"phase": Phase.IDLE, "version": 0}, (ph.Seal(0),)),
    (rank(Phase.IDLE), ph.Enter(), {"phase": Phase.COMPUTING}, (ph.NoteRedo(),)),
    (
        rank(Phase.COMPUTING),
        ph.GateReached(),
        {"phase": Phase.GATED},
        (ph.Seal(4), ph.AwaitKept(None, (3, 4)), ph.Vote()),
    ),
    (
        rank(Phase.COMPUTING, sealing=True),
        ph.GateReached(),
        {"phase": Phase.GATED},
        (ph.FinishSeal(3), ph.Seal(4), ph.AwaitKept(3, (3, 4)), ph.Vote()),
    ),
    (rank(Phase.GATED), ph.Verdict(True), {"phase": Phase.APPLYING}, (ph.Apply(),)),
    (rank(Phase.APPLYING), ph.Applied(), {"phase": Phase.TAIL}, ()),
    (rank(Phase.TAIL), ph.Exit(), {"phase": Phase.IDLE, "version": 4}, (ph.Commit(4),)),
    # a failure that is known before the vote
    (rank(Phase.COMPUTING, latched=True), ph.GateReached(), {"phase": Phase.UNWINDING}, (ph.Abandon(),)),
    (rank(Phase.UNWINDING, latched=True), ph.Exit(), {"phase": Phase.IDLE, "dirty": True}, ()),
    (rank(Phase.COMPUTING, latched=True), ph.Exit(), {"phase": Phase.IDLE, "dirty": True}, ()),
    (rank(Phase.IDLE, latched=True), ph.Settle(), {"phase": Phase.PARKED}, (ph.Report(1, 3, False),)),
    # known too late: the batch is taken, and is not that of the step a recovery leads to
    (rank(Phase.IDLE, latched=True), ph.Enter(), {"phase": Phase.COMPUTING}, (ph.NoteRedo(),)),
    # a vote with no result, with a no, and with a yes that came before the failure was known
    (
        rank(Phase.GATED),
        ph.Verdict(None),
        {"phase": Phase.HELD, "latched": True},
        (ph.Report(1, 3, True),),
    ),
    (rank(Phase.GATED), ph.Verdict(False), {"phase": Phase.UNWINDING, "latched": True}, (ph.Abandon(),)),
    (rank(Phase.GATED, latched=True), ph.Verdict(True), {"phase": Phase.APPLYING}, (ph.Apply(),)),
    # the plan, for one that is held
    (
        rank(Phase.HELD, latched=True),
        ph.Plan(2, 4, ()),
        {"phase": Phase.APPLYING, "generation": 2, "plan": ph.Plan(2, 4, ())},
        (ph.Apply(),),
    ),
    (
        rank(Phase.HELD, latched=True),
        PLAN_2,
        {"phase": Phase.UNWINDING, "generation": 2, "plan": PLAN_2},
        (ph.Abandon(),),
    ),
    # for one that is parked: what is served is the version itself, so a redo's memory goes back first
    (
        rank(Phase.PARKED, latched=True, dirty=True),
        PLAN_2,
        {"phase": Phase.REFORMING, "generation": 2, "plan": PLAN_2, "latched": False, "dirty": False},
        (ph.PutBack(), ph.DiscardAbove(3, -1), ph.Serve(PLAN_2), KEPT_3, ph.Form(2)),
    ),
    (
        rank(Phase.PARKED, latched=True),
        ph.Plan(2, 3, ()),
        {"phase": Phase.REFORMING, "generation": 2, "plan": ph.Plan(2, 3, ()), "latched": False},
        (ph.DiscardAbove(3, -1), KEPT_3, ph.Form(2)),
    ),
    # for one that is behind, since applying communicates: it cannot follow alone, and installs
    (
        rank(Phase.HELD, latched=True, communicates=True),
        ph.Plan(2, 4, (0,)),
        {"phase": Phase.UNWINDING, "generation": 2, "plan": ph.Plan(2, 4, (0,))},
        (ph.Abandon(),),
    ),
    (
        rank(Phase.IDLE, latched=True, dirty=True, communicates=True, plan=ph.Plan(2, 4, (0,))),
        ph.Settle(),
        {"phase": Phase.REFORMING, "version": None, "rehearsed": True, "latched": False, "dirty": False},
        (ph.DiscardAbove(4, -1), ph.Install(ph.Plan(2, 4, (0,))), ph.AwaitKept(None, (4,)), ph.Form(2)),
    ),
    (
        rank(Phase.PARKED, latched=True),
        ph.Plan(2, 4, (0,)),
        {
            "phase": Phase.REFORMING,
            "generation": 2,
            "plan": ph.Plan(2, 4, (0,)),
            "version": None,
            "rehearsed": True,
            "latched": False,
        },
        (ph.DiscardAbove(4, -1), ph.Install(ph.Plan(2, 4, (0,))), ph.AwaitKept(None, (4,)), ph.Form(2)),
    ),
    # for one that is past its last step, which is lost: what it votes in next is a step again
    (
        rank(Phase.PARKED, latched=True, sealing=True, closed=True),
        ph.Plan(2, 2, (0,), (), True),
        {
            "phase": Phase.REFORMING,
            "generation": 2,
            "plan": ph.Plan(2, 2, (0,), (), True),
            "version": None,
            "rehearsed": True,
            "latched": False,
            "closed": False,
        },
        (
            ph.DiscardAbove(2, 2),
            ph.Install(ph.Plan(2, 2, (0,), (), True)),
            ph.NoteRedo(),
            ph.BeginSeal(2),
            ph.FinishSeal(2),
            ph.AwaitKept(None, (2,)),
            ph.Form(2),
        ),
    ),
    # for one that got it while it unwound or rolled forward
    (
        rank(Phase.IDLE, latched=True, plan=PLAN_2, dirty=True),
        ph.Settle(),
        {"phase": Phase.REFORMING, "latched": False, "dirty": False},
        (ph.PutBack(), ph.DiscardAbove(3, -1), ph.Serve(PLAN_2), KEPT_3, ph.Form(2)),
    ),
    # for a replacement, which may get it before or after it has rehearsed
    (rank(Phase.BUILDING, None), PLAN_2, {"generation": 2, "plan": PLAN_2}, ()),
    (
        rank(Phase.BUILDING, None, plan=PLAN_2),
        ph.Rehearsed(),
        {"phase": Phase.REFORMING, "rehearsed": True},
        (ph.DiscardAbove(3, -1), ph.Install(PLAN_2), KEPT_3, ph.Form(2)),
    ),
    (rank(Phase.BUILDING, None), ph.Rehearsed(), {"rehearsed": True}, ()),
    (
        rank(Phase.BUILDING, None, rehearsed=True),
        PLAN_2,
        {"phase": Phase.REFORMING, "generation": 2, "plan": PLAN_2},
        (ph.DiscardAbove(3, -1), ph.Install(PLAN_2), KEPT_3, ph.Form(2)),
    ),
    (rank(Phase.REFORMING, None, plan=PLAN_2), ph.Installed(), {"version": 3}, ()),
    (rank(Phase.REFORMING, plan=ph.Plan(1, 3, ())), ph.Formed(1), {"phase": Phase.IDLE, "plan": None}, ()),
    # the end
    (rank(Phase.IDLE), ph.Leave(), {"phase": Phase.LEFT, "leaving": True}, (ph.Linger(1, 3),)),
    (
        rank(Phase.IDLE, latched=True),
        ph.Leave(),
        {"phase": Phase.PARKED, "leaving": True},
        (ph.Report(1, 3, False),),
    ),
    (
        rank(Phase.REFORMING, plan=ph.Plan(1, 3, ()), leaving=True),
        ph.Formed(1),
        {"phase": Phase.LEFT, "plan": None},
        (ph.Linger(1, 3),),
    ),
    # the last version is kept before any may forget the one before, again after a recovery at the end
    (
        rank(Phase.IDLE, sealing=True),
        ph.Close(),
        {"phase": Phase.CLOSING},
        (ph.NoteRedo(), ph.BeginSeal(3), ph.FinishSeal(3), ph.AwaitKept(3, (3,)), ph.Vote()),
    ),
    (
        rank(Phase.REFORMING, plan=ph.Plan(1, 3, ()), sealing=True, closed=True),
        ph.Formed(1),
        {"phase": Phase.CLOSING, "plan": None},
        (ph.AwaitKept(3, (3,)), ph.Vote()),
    ),
    # not kept, so no vote went out
    (
        rank(Phase.CLOSING, sealing=True),
        ph.Verdict(False),
        {"phase": Phase.PARKED, "latched": True},
        (ph.Report(1, 3, False),),
    ),
    (rank(Phase.LEFT, leaving=True), ph.Released(), {"phase": Phase.GONE}, ()),
    # an abort, for those that wait: they answer at once
    (
        rank(Phase.LEFT, leaving=True),
        ph.Latch(1),
        {"phase": Phase.PARKED, "latched": True},
        (ph.Report(1, 3, False),),
    ),
    (
        rank(Phase.REFORMING, plan=ph.Plan(1, 3, ())),
        ph.Latch(1),
        {"phase": Phase.PARKED, "latched": True, "plan": None},
        (ph.Report(1, 3, False),),
    ),
    (
        rank(Phase.REFORMING, None, plan=ph.Plan(1, 3, (0,))),
        ph.Latch(1),
        {"phase": Phase.BUILDING, "latched": True, "plan": None},
        (ph.Report(1, None, False),),
    ),
    (rank(Phase.BUILDING, None), ph.Latch(1), {"latched": True}, (ph.Report(1, None, False),)),
    (rank(Phase.HELD, latched=True), ph.Latch(2), {"generation": 2}, (ph.Report(2, 3, True),)),
]


@pytest.mark.parametrize(("before", "event", "changes", "actions"), RULES, ids=lambda value: str(value)[:60])
def test_a_rule(before: RankState, event: Any, changes: dict[str, object], actions: tuple[Any, ...]) -> None:
    after, answered = transition(before, event)
    assert [(type(a), a) for a in answered] == [(type(a), a) for a in actions]
    for name in RankState.__slots__:
        assert getattr(after, name) == changes.get(name, getattr(before, name)), name


@pytest.mark.parametrize("phase", ALIVE_IN_A_STEP)
def test_an_abort_in_a_step_only_raises_a_flag(phase: Phase) -> None:
    after, actions = transition(rank(phase), ph.Latch(1))
    assert (after.latched, after.phase, actions) == (True, phase, ())


@pytest.mark.parametrize("phase", [p for p in Phase if p is not Phase.STARTING])
def test_what_belongs_to_an_older_generation_changes_nothing(phase: Phase) -> None:
    version = None if phase is Phase.BUILDING else 3
    for latched, old in itertools.product((False, True), (1, 2)):
        state = RankState(0, phase, 3, version, latched=latched)
        for event in (ph.Latch(old), ph.Plan(old, 3, ()), ph.Plan(old, 7, (1,))):
            if (phase, type(event)) in ph.TABLE:
                assert transition(state, event) == (state, ())


@pytest.mark.parametrize("phase", [Phase.HELD, Phase.PARKED, Phase.BUILDING])
def test_a_generation_is_reported_once(phase: Phase) -> None:
    state = rank(phase, None if phase is Phase.BUILDING else 3, latched=True)
    assert transition(state, ph.Latch(1)) == (state, ())


@pytest.mark.parametrize("phase", ALIVE_IN_A_STEP)
def test_a_plan_for_a_rank_that_has_not_parked_is_a_bug(phase: Phase) -> None:
    with pytest.raises(ph.IllegalTransition, match=phase.name):
        transition(rank(phase), ph.Plan(2, 3, ()))


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (rank(Phase.HELD), ph.Plan(2, 5, ())),
        (rank(Phase.PARKED), ph.Plan(2, 5, ())),
        (rank(Phase.REFORMING), ph.Formed(7)),
        (rank(Phase.COMPUTING), ph.Exit()),  # an exception of the script's own, or no gate
        (rank(Phase.GONE), ph.Enter()),
    ],
)
def test_what_must_not_happen_says_so(state: RankState, event: Any) -> None:
    with pytest.raises(ph.IllegalTransition, match="rank 0"):
        transition(state, event)


def test_an_illegal_transition_tells_what_came_before() -> None:
    machine = RankMachine(RankState(2))
    machine.handle(ph.Protected())
    machine.handle(ph.Enter())
    with pytest.raises(ph.IllegalTransition, match=r"Protected\(\) -> IDLE; Enter\(\) -> COMPUTING"):
        machine.handle(ph.Released())
    assert machine.state.phase is Phase.COMPUTING


def test_a_rank_votes_in_no_generation_it_has_parked_in() -> None:
    """Whatever comes after a report, no vote does before a new generation is formed."""
    events = [
        ph.Enter(),
        ph.GateReached(),
        ph.Verdict(True),
        ph.Applied(),
        ph.Exit(),
        ph.Latch(1),
        ph.Leave(),
    ]
    for start in (rank(Phase.PARKED, latched=True), rank(Phase.HELD, latched=True)):
        for sequence in itertools.product(events, repeat=3):
            state = start
            for event in sequence:
                try:
                    state, actions = transition(state, event)
                except ph.IllegalTransition:
                    break
                assert not any(isinstance(action, ph.Vote) for action in actions)


def test_nothing_is_voted_on_or_formed_that_is_not_kept_elsewhere() -> None:
    """Whatever came before, the last thing a rank does before it votes, or forms, is to wait for its keepers."""
    for before, event, _, actions in RULES:
        for first, second in itertools.pairwise([None, *actions]):
            if isinstance(second, ph.Vote | ph.Form):
                assert isinstance(first, ph.AwaitKept), (before, event)
