"""Full versions of the live regime: what a rank keeps of them, and what the daemon makes of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from flashrec import phases as ph
from flashrec.cli.status import regime
from flashrec.errors import EnvironmentFault, IntegrityError
from flashrec.keeping import Keeper
from flashrec.phases import Phase, RankState, transition
from flashrec.state import arena_writer
from flashrec.state.arena import Arena
from flashrec.state.private_slots import FULL, PrivateSlots
from flashrecd import jobmemory
from flashrecd.core import events as ev
from flashrecd.core.plan import Inventory, Survivor, plan_recovery
from flashrecd.jobmemory import JobMemory
from tests.arenas import JOB, RANK, SMALL, blob_of, tensors
from tests.unit.daemon_core import Driven

# --- when one is due: the same on every rank --------------------------------------------------------------


def rank(phase: Phase, version: int, **more: Any) -> RankState:
    return RankState(0, phase, 1, version, **more)


@pytest.mark.parametrize(
    ("version", "known", "due"),
    [
        (0, {"every": 1}, False),
        (1, {"every": 1}, True),
        (1, {"every": 2}, False),
        (2, {"every": 2}, True),
        (5, {"every": ph.NEVER}, False),
        (5, {"full": 3, "watermark": 3, "every": 2}, True),
        (4, {"full": 3, "watermark": 3, "every": 2}, False),
        (9, {"full": 3, "watermark": 1, "every": 2}, False),
        (9, {"full": 3, "watermark": 3, "every": 2, "sealing": True}, False),
        (9, {"full": 3, "watermark": 3, "every": 2, "communicates": True}, False),
    ],
)
def test_one_is_due_when_all_have_the_last_and_the_agreed_steps_are_over(
    version: int, known: dict[str, Any], due: bool
) -> None:
    entered, begun = transition(rank(Phase.IDLE, version, **known), ph.Enter())
    assert any(isinstance(action, ph.BeginFull) for action in begun) is due
    _, voting = transition(entered, ph.GateReached())
    assert any(isinstance(action, ph.FinishFull) for action in voting) is due


def test_what_was_agreed_on_is_gone_by_from_the_next_step_on() -> None:
    state = rank(Phase.GATED, 4, full=1, watermark=1, every=3)
    state, _ = transition(state, ph.Verdict(True, False, 4, 5))
    assert (state.full, state.watermark, state.every) == (4, 4, 5)
    short, _ = transition(rank(Phase.GATED, 4, full=1, watermark=1, every=3), ph.Verdict(True, False, 1, 3))
    assert (short.full, short.watermark) == (4, 1)


def test_a_full_version_that_a_replacement_has_not_does_not_hold_up_the_next() -> None:
    """The plan found it in replicas, say; the first gate tells that not every rank has it by itself."""
    parked = rank(Phase.PARKED, 6, latched=True, full=5, watermark=5, every=2)
    state, _ = transition(parked, ph.Plan(2, 6, (), (), False, 5))
    state = replace(state, phase=Phase.GATED, plan=None)
    state, _ = transition(state, ph.Verdict(True, False, -1, 2))
    assert (state.full, state.watermark) == (-1, -1)
    assert ph.is_due(state)
    # It has it by now, as those it was given to have said: no reason to wait for more.
    assert ph.is_due(replace(state, watermark=5, version=8))


def test_after_a_recovery_the_watermark_is_the_plan_s_and_no_number_of_steps_is_agreed_on() -> None:
    state = rank(Phase.PARKED, 6, latched=True, full=5, watermark=5, every=2)
    state, actions = transition(state, ph.Plan(2, 6, (), (), False, 3))
    assert (state.full, state.watermark, state.every) == (3, 3, ph.NEVER)
    assert ph.DiscardAbove(6, 3) in actions


def test_nobody_takes_part_in_a_version_that_is_given_up() -> None:
    state, actions = transition(rank(Phase.IDLE, 6, latched=True, full=3, watermark=3, every=2), ph.Enter())
    assert actions == (ph.NoteRedo(),)
    assert transition(state, ph.GateReached())[1] == (ph.Abandon(),)


# --- what a rank keeps ------------------------------------------------------------------------------------


class State:
    """In place of a ProtectedState: at `version`."""

    version = 0

    def sealed_parts(self) -> tuple[Any, Any]:
        return SMALL, tensors(SMALL, self.version)

    def sealed_common(self) -> bytes:
        return blob_of(self.version)

    def seal_private(self, feed: object, *, version: int, provisional: bool) -> bytes:
        return b"private %d" % version

    def forget_sealed(self, above: int) -> None:
        pass


def keeper_at(folder: Path) -> tuple[Keeper, State]:
    keeper, state = Keeper(folder, JOB, RANK, 4, fresh=True), State()
    keeper.state = cast(Any, state)
    return keeper, state


def step(keeper: Keeper, state: State, version: int, *, full: bool) -> None:
    """From Enter to Enter."""
    state.version = version
    if full:
        keeper.begin_full(version, 1)
        assert keeper.finish_full() is not None
    keeper.seal_private(version + 1, 1, provisional=False)


def kept(folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return JobMemory(folder, JOB, lambda *_: None).kept(RANK)


def test_private_state_of_full_versions_outlives_the_three_newest(tmp_path: Path) -> None:
    keeper, state = keeper_at(tmp_path)
    for version in range(12):
        step(keeper, state, version, full=version in (1, 4))
    assert kept(tmp_path) == ((1, 4, 10, 11, 12), (1, 4))
    assert keeper.newest_full == 4
    assert PrivateSlots(tmp_path / FULL, RANK).read(4) == b"private 4"
    step(keeper, state, 12, full=True)
    assert kept(tmp_path) == ((4, 11, 12, 13), (4, 12))
    keeper.close()


def test_full_versions_that_not_every_rank_has_are_let_go_of(tmp_path: Path) -> None:
    keeper, state = keeper_at(tmp_path)
    for version in range(6):
        step(keeper, state, version, full=version in (1, 4))
    keeper.discard_above(5, 1)
    assert kept(tmp_path) == ((1, 4, 5), (1,))
    assert keeper.newest_full == 1
    keeper.close()


def test_one_that_is_begun_anew_takes_the_place_of_what_was_given_up(tmp_path: Path) -> None:
    keeper, state = keeper_at(tmp_path)
    step(keeper, state, 0, full=False)
    state.version = 1
    keeper.begin_full(1, 1)
    keeper.discard_above(1, -1)
    assert keeper.finish_full() is None
    keeper.begin_full(1, 2)
    assert keeper.finish_full() is not None
    assert Arena(tmp_path / "arena", RANK, JOB).read(1).blob == blob_of(1)
    keeper.close()


def test_without_room_the_last_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, state = keeper_at(tmp_path)
    step(keeper, state, 0, full=False)
    state.version = 1
    monkeypatch.setattr(arena_writer, "free_bytes", lambda directory: 100)
    keeper.begin_full(1, 1)
    with pytest.raises(EnvironmentFault):
        keeper.finish_full()
    assert keeper.newest_full == -1
    assert kept(tmp_path)[1] == ()
    keeper.close()


def test_what_the_gate_has_sealed_must_be_whole(tmp_path: Path) -> None:
    keeper, _ = keeper_at(tmp_path)
    with pytest.raises(IntegrityError, match="no sealed version 1"):
        keeper.begin_full(1, 1)
    assert keeper.finish_full() is None
    keeper.close()


# --- what the daemon makes of it --------------------------------------------------------------------------


def test_the_watermark_is_what_every_rank_has_both_halves_of() -> None:
    survivors = {0: Survivor(9, False)}
    private = {0: (3, 6, 8, 9), 1: (3, 6, 8, 9)}
    sealed = {0: (3, 6), 1: (3,)}
    plan, _ = plan_recovery(Inventory(2, survivors, private, sealed, ((0, 1),)), 2)
    assert plan is not None
    assert (plan.version, plan.watermark) == (9, 3)
    lacking, _ = plan_recovery(Inventory(2, survivors, {**private, 0: (8, 9)}, sealed, ((0, 1),)), 2)
    assert lacking is not None
    assert (lacking.version, lacking.watermark) == (9, -1)


def test_when_every_rank_dies_all_meet_at_the_last_full_version() -> None:
    job = Driven(2).running()
    for number in range(2):
        job.tell(ev.Exited(job.proc(number), None, 9, (1, 6, 17, 18, 19), (1, 6)))
    sent = job.only(ev.SendPlan)
    assert (sent.plan.version, sent.plan.replaced, sent.plan.served, sent.plan.watermark) == (
        6,
        (0, 1),
        (),
        6,
    )
    assert not sent.sealing


def test_why_nothing_is_sealed_is_said_once_and_told_to_all() -> None:
    job = Driven(2)
    claims = (((0, 1), "same"),)
    for number in range(2):
        job.tell(ev.Protected(job.proc(number), claims, why_unsealed="no room"))
    assert job.only(ev.SetRegime).why_unsealed == "no room"
    assert [one.reason for one in job.found(ev.Log) if one.event == "nothing sealed"] == [
        "no room. If every rank dies, the job ends"
    ]


def test_a_rank_that_cannot_seal_any_more_is_on_record() -> None:
    job = Driven(2).running()
    job.tell(ev.Unsealed(job.proc(1), "no room"), ev.Unsealed(job.proc(0), "no room"))
    assert job.core.state.why_unsealed == "no room"
    assert len([one for one in job.found(ev.Log) if one.event == "nothing sealed any more"]) == 1


def test_there_must_be_room_for_what_survivors_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = JobMemory(tmp_path, JOB, lambda *_: None)
    memory.arena_bytes.update({0: 100, 1: 100})
    monkeypatch.setattr(jobmemory, "free_bytes", lambda directory: 250)
    assert memory.shortage() == ""
    assert "half as much must be left" in memory.shortage(served=True)
    monkeypatch.setattr(jobmemory, "free_bytes", lambda directory: 300)
    assert memory.shortage(served=True) == ""


def test_the_status_says_whether_full_versions_are_sealed_and_why_not() -> None:
    job = {"regime": "live", "arena_bytes": 3 << 20, "why_unsealed": ""}
    assert "in case all of them die, up to 3 MiB of shared memory" in regime(job)
    assert "nothing is sealed in case all of them die, because no room" in regime(
        {**job, "why_unsealed": "no room"}
    )
