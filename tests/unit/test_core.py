"""The daemon's decisions, one situation each. What they add up to is explored in tests/exploration."""

import pytest

from flashrec.errors import UsageError
from flashrecd.core import events as ev
from flashrecd.core.job import CLOSING_S, GRACE_S
from flashrecd.core.state import JobConfig, RankStatus, Status
from tests.unit.daemon_core import Driven

# --- starting ---------------------------------------------------------------------------------------------


def test_a_world_starts_with_its_standbys() -> None:
    job = Driven(2, num_standbys=1)
    launched = job.found(ev.Launch)
    assert [(launch.rank, launch.replacement) for launch in launched] == [
        (0, False),
        (1, False),
        (None, True),
    ]
    assert len({launch.proc for launch in launched}) == 3
    assert job.status is Status.STARTING


def test_it_runs_when_every_rank_has_protected() -> None:
    job = Driven(2)
    job.protect(0)
    assert job.status is Status.STARTING
    job.protect(1)
    assert job.status is Status.RUNNING


@pytest.mark.parametrize(
    "wrong",
    [{"world_size": 0}, {"num_standbys": -1}, {"max_restarts": -1}, {"suspect_after_s": 0.0}],
    ids=str,
)
def test_a_config_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=str(next(iter(wrong.values())))):
        JobConfig(**{"world_size": 2, **wrong})  # type: ignore[arg-type]


def test_layouts_that_disagree_end_the_job_and_name_both_ranks() -> None:
    job = Driven(3)
    job.protect(0, 1)
    job.protect(2, layout="other")
    assert job.status is Status.STOPPING
    assert job.core.state.outcome is not None
    code, reason = job.core.state.outcome
    assert code == 1
    assert "rank 2" in reason
    assert "rank 0" in reason
    assert "layout" in reason
    job.end_of(*job.core.state.stopping_procs)
    assert job.only(ev.End) == ev.End(1, reason)


def test_a_death_before_all_have_protected_starts_the_world_anew() -> None:
    job = Driven(3)
    old = [job.proc(rank) for rank in job.ranks()]
    job.protect(0)
    answer = job.die(1)
    assert job.status is Status.RESTARTING
    assert {kill.proc for kill in job.found(ev.Kill, answer)} == {old[0], old[2]}
    assert not job.found(ev.Launch, job.end_of(old[0]))
    answer = job.end_of(old[2])
    assert [launch.rank for launch in job.found(ev.Launch, answer)] == [0, 1, 2]
    assert all(launch.generation == job.generation == 2 for launch in job.found(ev.Launch, answer))
    job.tell(ev.Protected(old[0], (((0, 1, 2), "late"),)))
    assert job.member(0).status is RankStatus.STARTING
    job.running()


def test_a_world_that_never_gets_past_its_start_is_given_up() -> None:
    job = Driven(1, max_tries_per_step=2)
    job.die(0)
    job.die(0)
    assert job.status is Status.STARTING
    job.die(0)
    end = job.only(ev.End)
    assert end.code == 1
    assert "never got past its start" in end.reason


def test_an_exception_before_the_first_step_is_not_tried_again() -> None:
    job = Driven(2)
    job.tell(ev.Failed(job.proc(1), "ValueError: no such file"))
    job.die(1, code=3)
    job.end_of(*job.core.state.stopping_procs)
    end = job.only(ev.End)
    assert end.code == 3
    assert "rank 1" in end.reason
    assert "ValueError: no such file" in end.reason


def test_a_script_may_do_without_protect() -> None:
    job = Driven(2)
    job.die(0, code=0)
    assert not job.found(ev.End)
    job.die(1, code=0)
    assert job.only(ev.End).code == 0


@pytest.mark.parametrize("first", ["ends", "protects"])
def test_but_not_one_rank_of_it_alone(first: str) -> None:
    job = Driven(2)
    for happens in ("ends", "protects") if first == "ends" else ("protects", "ends"):
        if happens == "ends":
            job.die(0, code=0)
        else:
            job.protect(1)
    assert job.core.state.outcome is not None
    assert (
        "rank 0 ended with exit code 0 before protect(), which rank 1 has called" in job.core.state.outcome[1]
    )


def test_a_rank_that_parks_before_all_are_known_to_have_protected_is_not_forgotten() -> None:
    """Its report comes once; here it is faster than another rank's news that it has protected."""
    job = Driven(3)
    job.protect(0, 1)
    job.park(0, 0)
    job.protect(2)
    assert job.status is Status.PARKING
    job.park(1, 0)
    answer = job.park(2, 0)
    assert job.only(ev.SendPlan, answer).plan.version == 0


# --- recovery -----------------------------------------------------------------------------------------------


def test_a_lost_rank_is_replaced_and_the_plan_names_the_sources() -> None:
    job = Driven(3).running()
    dead = job.proc(1)
    answer = job.die(1, 4, 5)
    assert job.only(ev.Abort, answer).procs == (job.proc(0), job.proc(2))
    launch = job.only(ev.Launch, answer)
    assert (launch.rank, launch.replacement, launch.generation) == (1, True, 2)
    assert launch.proc != dead
    job.park(0, 5)
    sent = job.only(ev.SendPlan, job.park(2, 4, True))
    assert (sent.plan.version, sent.plan.generation, sent.plan.replaced) == (5, 2, (1,))
    assert set(sent.procs) == {job.proc(rank) for rank in job.ranks()}
    job.form(0, 1)
    assert job.status is Status.FORMING
    job.form(2)
    assert job.status is Status.RUNNING


def test_a_standby_is_taken_before_a_process_is_started() -> None:
    job = Driven(2, num_standbys=2).running()
    standbys = [standby.proc for standby in job.core.state.standbys]
    job.tell(ev.StandbyReady(standbys[1], "forked"))
    answer = job.die(0, 0)
    assert job.only(ev.Assign, answer) == ev.Assign(standbys[1], 0, 2)
    assert not job.found(ev.Launch, answer)
    job.park(1, 0)
    answer = job.form()
    assert job.only(ev.Launch, answer).rank is None  # a new standby, once nobody waits any more


def test_the_deepest_standby_is_taken() -> None:
    job = Driven(2, num_standbys=2)
    first, second = [standby.proc for standby in job.core.state.standbys]
    job.tell(ev.BuiltOffered(), ev.StandbyReady(first, "forked"), ev.StandbyReady(second, "forked"))
    assert not job.found(ev.Prepare)
    job.running()
    assert {prepare.proc for prepare in job.found(ev.Prepare)} == {first, second}
    job.tell(ev.StandbyReady(second, "built"))
    assert job.only(ev.Assign, job.die(1, 0)).proc == second


def test_the_death_of_a_standby_harms_nobody() -> None:
    job = Driven(2, num_standbys=1).running()
    before = job.core.state
    (standby,) = [standby.proc for standby in before.standbys]
    answer = job.end_of(standby)
    assert job.status is Status.RUNNING
    assert not job.found(ev.Abort, answer) + job.found(ev.Kill, answer)
    assert job.core.state.members == before.members
    assert job.core.state.restarts == 0


def test_a_link_that_breaks_while_nobody_dies_forms_the_same_ranks_again() -> None:
    job = Driven(2).running()
    procs = [job.proc(0), job.proc(1)]
    assert job.only(ev.Abort, job.park(0, 3, True)).generation == 1
    sent = job.only(ev.SendPlan, job.park(1, 3, True))
    assert (sent.plan.version, sent.plan.replaced) == (3, ())
    job.form()
    assert [job.proc(0), job.proc(1)] == procs


def test_a_death_while_the_ranks_form_is_planned_again() -> None:
    job = Driven(3).running()
    job.die(0, 3)
    job.park(1, 3)
    job.park(2, 3)
    assert job.status is Status.FORMING
    answer = job.die(1, 3)
    assert job.only(ev.Abort, answer).generation == 2
    assert job.only(ev.Launch, answer).generation == 3
    job.park(0, None, False, 3)
    sent = job.only(ev.SendPlan, job.park(2, 3))
    assert (sent.plan.generation, sent.plan.replaced, sent.plan.served) == (3, (0, 1), (((0, 1, 2), (2,)),))


def test_a_replacement_that_installed_before_it_had_to_park_is_a_survivor() -> None:
    job = Driven(2).running()
    job.die(0, 3)
    job.park(1, 3)
    job.die(1, 3)
    sent = job.only(ev.SendPlan, job.park(0, 3))
    assert (sent.plan.version, sent.plan.replaced, sent.plan.served) == (3, (1,), (((0, 1), (0,)),))


def test_when_nobody_holds_state_any_more_the_job_says_so() -> None:
    job = Driven(2).running()
    job.die(0, 3)
    job.die(1, 3)
    assert job.core.state.outcome is not None
    assert "no rank is left that holds the tensor state" in job.core.state.outcome[1]
    assert "rank 0 failed first: killed by SIGKILL" in job.core.state.outcome[1]


def test_buckets_that_differ_after_a_recovery_end_the_job() -> None:
    job = Driven(2).running()
    job.die(0, 3)
    job.park(1, 3)
    job.form(0, buckets="0-0.1=a")
    job.form(1, buckets="0-0.1=b")
    assert job.core.state.outcome is not None
    assert "rank 0: a, rank 1: b" in job.core.state.outcome[1]


# --- messages that are too late --------------------------------------------------------------------------------


def test_what_is_older_or_comes_from_the_dead_changes_nothing() -> None:
    job = Driven(3).running()
    dead = job.proc(0)
    job.recover(0, 3)
    live = job.proc(1)
    before = job.core.state
    for late in (
        ev.Parked(dead, 2, 7, True, (7,)),
        ev.Parked(live, 1, 7, True, (7,)),
        ev.Formed(dead, 2, "x"),
        ev.Formed(live, 1, "x"),
        ev.Formed(live, 2, "x"),
        ev.Leaving(dead, 2, 3),
        ev.Leaving(live, 1, 3),
        ev.Protected(dead, (((0, 1, 2), "another"),)),
        ev.StandbyReady(dead, "built"),
        ev.Exited(dead, None, 9, (7,)),
        ev.Heartbeat(dead),
        ev.TagSeen(dead, 9, 9),
    ):
        assert job.tell(late) == [], late
        assert job.core.state == before, late


# --- budgets ----------------------------------------------------------------------------------------------------


def test_a_step_that_fails_over_and_over_ends_the_job_with_its_traceback() -> None:
    job = Driven(2, max_tries_per_step=2).running()
    for _ in range(2):
        job.recover(0, 5)
    job.tell(ev.Failed(job.proc(0), "ZeroDivisionError: a poison batch"))
    job.die(0, 5, code=1)
    job.park(1, 5)
    assert job.core.state.outcome is not None
    code, reason = job.core.state.outcome
    assert code == 1
    assert "step 5 failed 3 times" in reason
    assert "ZeroDivisionError: a poison batch" in reason


def test_the_tries_of_a_step_are_forgotten_when_another_fails() -> None:
    job = Driven(2, max_tries_per_step=1).running()
    for version in range(1, 6):
        job.recover(version % 2, version)
    assert job.status is Status.RUNNING


def test_the_restart_budget_is_a_number_of_recoveries() -> None:
    job = Driven(2, max_restarts=2).running()
    job.recover(0, 1)
    job.recover(1, 2)
    job.die(0, 3)
    assert job.core.state.outcome is not None
    assert "the restart budget of 2 is spent" in job.core.state.outcome[1]


@pytest.mark.parametrize("first", ["the death", "the broken collective"])
def test_one_death_is_charged_once(first: str) -> None:
    """Peers may see a collective break before the kernel has told of the death that broke it."""
    job = Driven(3, max_restarts=1).running()
    if first == "the death":
        job.die(0, 3)
        job.park(1, 3)
    else:
        job.park(1, 3)
        job.die(0, 3)
    job.park(2, 3)
    assert job.status is Status.FORMING
    assert job.core.state.restarts == 1


def test_a_replacement_that_keeps_dying_while_others_park_is_charged() -> None:
    job = Driven(2, max_restarts=3).running()
    job.die(0, 3)
    for _ in range(3):
        job.die(0, 3)
    assert job.core.state.outcome is not None
    assert "budget of 3 is spent" in job.core.state.outcome[1]


# --- the end ------------------------------------------------------------------------------------------------------


def test_the_job_ends_when_every_rank_is_at_its_end_and_has_exited() -> None:
    job = Driven(2, num_standbys=1).running()
    (standby,) = [standby.proc for standby in job.core.state.standbys]
    assert not job.found(ev.Release, job.leave(0))
    answer = job.leave(1)
    assert job.only(ev.Release, answer).procs == (job.proc(0), job.proc(1))
    assert job.only(ev.Kill, answer).proc == standby
    job.die(0, code=0)
    job.die(1, code=0)
    assert not job.found(ev.End), "the standby is not known to be gone"
    assert job.only(ev.End, job.end_of(standby)).code == 0
    assert job.status is Status.ENDED
    assert job.tell(ev.Stop("too late", True), ev.Tick()) == []


def test_a_rank_lost_when_others_are_at_their_end_is_replaced() -> None:
    job = Driven(2).running()
    job.leave(0)
    answer = job.die(1, 8, 9)
    assert job.only(ev.Abort, answer).procs == (job.proc(0),)
    assert job.only(ev.SendPlan, job.park(0, 9)).plan.version == 9
    job.form()
    job.leave(0, 1)
    assert job.status is Status.CLOSING


def test_an_end_of_which_nothing_is_known_counts_as_a_good_one_after_training_only() -> None:
    unknown = "ended (how is not known: another program started it)"
    job = Driven(2).running()
    job.tell(ev.Exited(job.proc(0), None, None, (3,)))
    assert [log.reason for log in job.found(ev.Log) if log.event == "rank lost"] == [unknown]
    assert job.member(0).status is RankStatus.BUILDING
    job.park(1, 3)
    job.form()
    job.leave()
    job.tell(*[ev.Exited(job.proc(rank), None, None) for rank in job.ranks()])
    assert job.only(ev.End).code == 0


def test_an_end_of_which_nothing_is_known_starts_the_world_anew_before_all_have_protected() -> None:
    job = Driven(2)
    job.tell(ev.Exited(job.proc(0), None, None))
    assert job.status is Status.RESTARTING


def test_a_rank_that_fails_after_training_gives_the_job_its_exit_code() -> None:
    job = Driven(2).running()
    job.leave()
    job.die(0, code=7)
    job.die(1, code=0)
    end = job.only(ev.End)
    assert end.code == 7
    assert "rank 0 failed after training had ended" in end.reason


def test_an_exit_with_code_0_in_the_middle_is_a_loss_like_any_other() -> None:
    job = Driven(2).running()
    answer = job.die(0, 3, code=0)
    assert job.only(ev.Launch, answer).rank == 0


def test_a_script_that_ends_before_the_others_is_taken_for_lost() -> None:
    job = Driven(3).running()
    job.leave(0, version=5)
    assert job.tell(ev.TagSeen(job.proc(1), 4, 1)) == []
    kill = job.only(ev.Kill, job.tell(ev.TagSeen(job.proc(1), 5, 2)))
    assert kill.proc == job.proc(0)
    assert "ended at step 5" in kill.reason
    assert job.found(ev.Kill, job.tell(ev.TagSeen(job.proc(2), 5, 2))) == []  # once


def test_ranks_that_do_not_exit_after_the_end_are_made_to() -> None:
    job = Driven(2).running()
    job.leave()
    job.now += CLOSING_S + 1
    assert {kill.proc for kill in job.found(ev.Kill, job.tell(ev.Tick()))} == {job.proc(0), job.proc(1)}


def test_a_stop_is_polite_first_then_hard() -> None:
    job = Driven(2, num_standbys=1).running()
    procs = {job.proc(0), job.proc(1)}
    answer = job.tell(ev.Stop("interrupted", False))
    assert {kill.proc for kill in job.found(ev.Kill, answer) if not kill.hard} == procs
    job.now += GRACE_S - 1
    assert job.tell(ev.Tick()) == []
    job.now += 2
    assert {kill.proc for kill in job.found(ev.Kill, job.tell(ev.Tick())) if kill.hard} >= procs
    job.end_of(*job.core.state.stopping_procs)
    assert job.only(ev.End) == ev.End(130, "interrupted")


def test_a_second_stop_is_hard_at_once() -> None:
    job = Driven(2).running()
    job.tell(ev.Stop("interrupted", False))
    answer = job.tell(ev.Stop("interrupted", True))
    assert [kill.hard for kill in job.found(ev.Kill, answer)] == [True, True]


@pytest.mark.parametrize("hard", [False, True])
def test_a_stop_waits_for_everything_that_lives(hard: bool) -> None:
    job = Driven(3)
    job.die(0)
    left = job.core.state.stopping_procs
    assert job.status is Status.RESTARTING
    job.tell(ev.Stop("interrupted", hard))
    assert not job.found(ev.End)
    job.end_of(*left)
    assert job.only(ev.End).code == 130
    assert len(job.found(ev.Launch)) == 3


def test_the_end_is_in_sight_whatever_dies_after_a_stop() -> None:
    job = Driven(3).running()
    job.die(1, 3)
    job.tell(ev.Stop("interrupted", True))
    left = set(job.core.state.stopping_procs)
    assert len(left) == 3  # the replacement is one of them
    job.end_of(*left)
    assert job.only(ev.End).code == 130
