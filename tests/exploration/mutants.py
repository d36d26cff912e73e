"""Mistakes planted on purpose, to see that the exploration sees them.

Each is a context in which the machines, or what the world does for them, are wrong in one way; `config`
changes the world, `patch` the code.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

from flashrec import phases as ph
from flashrecd.core import plan, recovering
from flashrecd.core.plan import Inventory, Plan
from tests.exploration.model import Config


@dataclass(frozen=True)
class Mutant:
    name: str
    seen_as: str  # a part of what the violation says
    patch: Callable[[], AbstractContextManager[object]] = nullcontext
    config: Callable[[Config], Config] = lambda config: config


def _rule(phase: ph.Phase, event: type, rule: Callable[..., ph.Outcome]) -> AbstractContextManager[object]:
    return mock.patch.dict(ph.TABLE, {(phase, event): rule})


def errored_result_counts() -> AbstractContextManager[object]:
    right = ph.TABLE[ph.Phase.GATED, ph.Verdict]
    return _rule(
        ph.Phase.GATED, ph.Verdict, lambda state, event: right(state, ph.Verdict(event.passed is not False))
    )


@contextmanager
def votes_after_parking() -> Iterator[None]:
    """It reports at once, and then runs on to the gate as if nothing were, whatever the daemon says."""

    def parks_and_goes_on(state: ph.RankState, event: ph.Latch) -> ph.Outcome:
        return state, (ph.Report(event.generation, state.version, False),)

    def goes_on(state: ph.RankState, _: ph.Plan) -> ph.Outcome:
        return state, ()

    with (
        _rule(ph.Phase.COMPUTING, ph.Latch, parks_and_goes_on),
        _rule(ph.Phase.COMPUTING, ph.Plan, goes_on),
    ):
        yield


def redo_from_where_it_stopped() -> AbstractContextManager[object]:
    def clean(state: ph.RankState, _: ph.Exit) -> ph.Outcome:
        return replace(state, phase=ph.Phase.IDLE), ()

    return _rule(ph.Phase.UNWINDING, ph.Exit, clean)


def deaf_at_its_end() -> AbstractContextManager[object]:
    return _rule(ph.Phase.LEFT, ph.Latch, lambda state, event: (state, ()))


def _all_who_voted(inventory: Inventory) -> dict[int, frozenset[int]]:
    everyone = all(s.can_advance for s in inventory.survivors.values())
    return {
        rank: frozenset({s.version, s.version + 1} if s.can_advance and everyone else {s.version})
        for rank, s in inventory.survivors.items()
        if s.version is not None
    }


def forward_because_survivors_voted() -> AbstractContextManager[object]:
    return mock.patch.object(plan, "reachable_versions", _all_who_voted)


@contextmanager
def _planner(change: Callable[[Inventory, Plan], Plan]) -> Iterator[None]:
    right = plan.plan_recovery

    def wrong(inventory: Inventory, generation: int) -> tuple[Plan | None, str]:
        found, reason = right(inventory, generation)
        return found and change(inventory, found), reason

    with mock.patch.object(recovering, "plan_recovery", wrong):
        yield


def back_to_the_oldest() -> AbstractContextManager[object]:
    """It never rolls forward: those that voted may be the only ones it asks."""

    def oldest(inventory: Inventory, found: Plan) -> Plan:
        held = [s.version for s in inventory.survivors.values() if s.version is not None]
        return replace(found, version=min(held, default=found.version))

    return _planner(oldest)


def replaces_too_few() -> AbstractContextManager[object]:
    return _planner(lambda _, found: replace(found, replaced=found.replaced[1:]))


# --- of the sealed regime ---------------------------------------------------------------------------------


def votes_before_it_is_sealed() -> AbstractContextManager[object]:
    right = ph.TABLE[ph.Phase.COMPUTING, ph.GateReached]

    def hasty(state: ph.RankState, event: ph.GateReached) -> ph.Outcome:
        state, actions = right(state, event)
        return state, tuple(action for action in actions if not isinstance(action, ph.FinishSeal))

    return _rule(ph.Phase.COMPUTING, ph.GateReached, hasty)


def torn_and_reported_as_whole() -> AbstractContextManager[object]:
    right = ph.TABLE[ph.Phase.TAIL, ph.Exit]
    return _rule(ph.Phase.TAIL, ph.Exit, lambda state, event: right(state, ph.Exit()))


def ahead_and_not_sent_back() -> AbstractContextManager[object]:
    """Only the dead are replaced, as the live regime had it."""
    return _planner(
        lambda inventory, found: replace(
            found, replaced=tuple(r for r in found.replaced if r not in inventory.survivors)
        )
    )


@contextmanager
def one_arena_is_asked_for_all() -> Iterator[None]:
    right = plan.plan_recovery

    def wrong(inventory: Inventory, generation: int) -> tuple[Plan | None, str]:
        somewhere = tuple({version for versions in inventory.sealed.values() for version in versions})
        sealed = dict.fromkeys(range(inventory.world_size), somewhere)
        return right(replace(inventory, sealed=sealed), generation)

    with mock.patch.object(recovering, "plan_recovery", wrong):
        yield


@contextmanager
def leaves_without_closing() -> Iterator[None]:
    def at_once(state: ph.RankState, event: ph.Leave | ph.Close) -> ph.Outcome:
        return right(replace(state, closed=True), event)

    right = ph.TABLE[ph.Phase.IDLE, ph.Leave]
    with _rule(ph.Phase.IDLE, ph.Leave, at_once), _rule(ph.Phase.IDLE, ph.Close, at_once):
        yield


# --- of full versions in the live regime ------------------------------------------------------------------


def next_before_the_last_is_sealed_everywhere() -> AbstractContextManager[object]:
    right = ph.is_due

    def hasty(state: ph.RankState) -> bool:
        return right(replace(state, watermark=state.full))

    return mock.patch.object(ph, "is_due", hasty)


def each_goes_by_what_it_knew_before() -> AbstractContextManager[object]:
    """A recovery leaves a survivor its own watermark, which its replacement never had."""
    right = ph._reform

    def keeps(state: ph.RankState) -> ph.Outcome:
        after, actions = right(state)
        if state.version is not None:
            after = replace(after, full=state.full, watermark=state.watermark, every=state.every)
        return after, actions

    return mock.patch.object(ph, "_reform", keeps)


def votes_before_the_full_version_is_sealed() -> AbstractContextManager[object]:
    right = ph.TABLE[ph.Phase.COMPUTING, ph.GateReached]

    def hasty(state: ph.RankState, event: ph.GateReached) -> ph.Outcome:
        state, actions = right(state, event)
        return state, tuple(action for action in actions if not isinstance(action, ph.FinishFull))

    return _rule(ph.Phase.COMPUTING, ph.GateReached, hasty)


MUTANTS = (
    Mutant(
        "a gate counts an errored result as passed",
        "though not every rank voted for it",
        errored_result_counts,
    ),
    Mutant(
        "a version is overwritten too early",
        "not sealed: private",
        config=lambda config: config._replace(private_slots=1),
    ),
    Mutant(
        "rolling forward because all survivors voted",
        "which not every rank voted for",
        forward_because_survivors_voted,
    ),
    Mutant(
        "what is sealed above the plan's version stays",
        "still sealed above it",
        config=lambda config: config._replace(discards=False),
    ),
    Mutant("a rank votes after it has parked", "promised not to vote", votes_after_parking),
    Mutant("a redo starts from where the attempt stopped", "private state None", redo_from_where_it_stopped),
    Mutant("a rank at its end does not hear that it is needed again", "stuck", deaf_at_its_end),
    Mutant("the plan goes back to the oldest version", "loses a step", back_to_the_oldest),
    Mutant("a lost rank is left out of the plan", "holds nothing and is not replaced", replaces_too_few),
)

SEALED_MUTANTS = (
    Mutant(
        "a rank votes before its version is sealed", "while it is being sealed", votes_before_it_is_sealed
    ),
    Mutant(
        "an arena has one slot",
        "which is to be kept",
        config=lambda config: config._replace(arena_slots=1),
    ),
    Mutant(
        "a torn rank is reported as whole",
        "holds nothing and is not replaced",
        torn_and_reported_as_whole,
        config=lambda config: config._replace(communicates=True),
    ),
    Mutant("a set is taken from an arena that lacks it", "does not hold version", one_arena_is_asked_for_all),
    Mutant(
        "tensors sealed above the plan's version stay",
        "still sealed above it",
        config=lambda config: config._replace(discards_tensors=False),
    ),
    Mutant("a rank that is ahead stays there", "is not replaced", ahead_and_not_sent_back),
    Mutant("a rank leaves before the last version is sealed", "past its last step", leaves_without_closing),
    Mutant(
        "two versions of private state are kept",
        "no version was found",
        config=lambda config: config._replace(private_slots=2, steps=3),
    ),
)

FULL_MUTANTS = (
    Mutant(
        "a full version is due before the last is sealed everywhere",
        "which is to be kept",
        next_before_the_last_is_sealed_everywhere,
        config=lambda config: config._replace(full_fails=True),
    ),
    Mutant("ranks seal different versions", "differ in when", each_goes_by_what_it_knew_before),
    Mutant(
        "private state of a full version is dropped too early",
        "no version was found",
        config=lambda config: config._replace(full_private_slots=1),
    ),
    Mutant(
        "a full version that not every rank has stays",
        "which is to be kept",
        config=lambda config: config._replace(discards_full=False),
    ),
    Mutant(
        "full versions have one slot",
        "which is to be kept",
        config=lambda config: config._replace(arena_slots=1),
    ),
    Mutant(
        "a rank votes before its full version is sealed",
        "while it is being sealed",
        votes_before_the_full_version_is_sealed,
    ),
)
