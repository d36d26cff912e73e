"""The core of a daemon that goes on with a job whose daemon has died."""

from __future__ import annotations

from typing import Any

import pytest

from flashrecd.core import events as ev
from flashrecd.core.detection import ADOPT_FACTOR
from flashrecd.core.job import Core
from flashrecd.core.state import JobConfig, RankStatus, Status
from tests.unit.daemon_core import Driven

LIVE, PARKED, LEFT, BUILDING = RankStatus.LIVE, RankStatus.PARKED, RankStatus.LEFT, RankStatus.BUILDING
WHY = "each rank alone holds a part"


class Adopting(Driven):
    """A core that has just been told that another ran this job; every rank is awaited."""

    def __init__(
        self, world_size: int = 3, *, generation: int = 4, claims: Any = None, **config: Any
    ) -> None:
        self.core = Core(JobConfig(world_size=world_size, **{"num_standbys": 0, **config}))
        self.now = 100.0
        self.actions = []
        self.holders = tuple(f"p{rank + 7}" for rank in range(world_size))
        self.tell(ev.Adopt(generation, 20, 2, (5, 1), self.holders, claims or (None,) * world_size, ""))

    def rejoins(
        self, rank: int, version: int | None, status: RankStatus = LIVE, **more: Any
    ) -> list[ev.Action]:
        claims = ((tuple(range(len(self.holders))), "same"),)
        facts = {"generation": 4, "claims": claims, "private": (5, 6), **more}
        return self.tell(ev.Adopted(self.holders[rank], status=status, version=version, **facts))

    def has_ended(self, rank: int, **more: Any) -> list[ev.Action]:
        facts = {"private": (5, 6), "step": 5, **more}
        return self.tell(ev.Exited(self.holders[rank], None, None, **facts))


def test_undisturbed_ranks_run_on_in_their_generation() -> None:
    job = Adopting()
    assert job.rejoins(2, 6)
    assert job.status is Status.ADOPTING
    job.rejoins(0, 5)
    job.rejoins(1, 5)
    assert job.status is Status.RUNNING
    assert job.generation == 4
    assert job.core.state.restarts == 2
    assert not job.found(ev.Abort)
    assert not job.found(ev.Kill)
    assert not job.found(ev.Launch)
    assert job.only(ev.SetRegime).procs == job.holders


def test_new_standbys_are_made_with_names_that_were_never_used() -> None:
    job = Adopting(1, num_standbys=2)
    job.rejoins(0, 5)
    assert [launch.proc for launch in job.found(ev.Launch)] == ["p21", "p22"]


def test_after_an_adoption_a_lost_rank_is_replaced_as_ever() -> None:
    job = Adopting()
    for rank in job.ranks():
        job.rejoins(rank, 5)
    job.die(1, 5, 6)
    launch = job.only(ev.Launch)
    assert (launch.proc, launch.rank, launch.generation, launch.replacement) == ("p21", 1, 5, True)
    job.park(0, 5)
    job.park(2, 5)
    plan = job.only(ev.SendPlan).plan
    assert (plan.generation, plan.version, plan.replaced) == (5, 5, (1,))


def test_a_rank_that_died_meanwhile_is_found_and_replaced() -> None:
    job = Adopting()
    job.rejoins(0, 5, PARKED)
    job.has_ended(1)
    assert job.status is Status.ADOPTING
    assert not job.found(ev.Launch)
    job.rejoins(2, 5, PARKED, can_advance=True)
    assert job.only(ev.Launch).rank == 1
    plan = job.only(ev.SendPlan).plan
    assert (plan.generation, plan.version, plan.replaced) == (5, 5, (1,))
    assert job.core.state.restarts == 3


def test_a_loss_that_nobody_has_heard_of_yet_makes_all_park() -> None:
    job = Adopting()
    job.rejoins(0, 5)
    job.has_ended(1)
    job.rejoins(2, 5)
    assert job.only(ev.Abort).procs == (job.holders[0], job.holders[2])
    assert not job.found(ev.SendPlan)


def test_the_budget_of_restarts_outlives_the_daemon() -> None:
    job = Adopting(2, max_restarts=2)
    job.rejoins(0, 5)
    job.has_ended(1)
    assert job.status is Status.STOPPING
    assert "the restart budget of 2 is spent" in job.core.state.outcome[1]  # type: ignore[index]


def test_the_sealed_regime_is_taken_over_with_what_the_arenas_hold() -> None:
    job = Adopting(2)
    for rank, version, status in ((0, None, BUILDING), (1, 5, PARKED)):
        claims = (((rank,), "digest"),)
        facts: dict[str, Any] = {"claims": claims, "private": (5, 6), "sealed": (4, 5), "why_sealed": WHY}
        job.rejoins(rank, version, status, **facts)
    sent = job.only(ev.SendPlan)
    assert sent.sealing
    assert (sent.plan.version, sent.plan.replaced) == (5, (0,))


@pytest.mark.parametrize("status", [PARKED, RankStatus.FORMING, BUILDING])
def test_whoever_is_in_the_midst_of_a_recovery_makes_all_park(status: RankStatus) -> None:
    job = Adopting(2)
    job.rejoins(0, 5)
    job.rejoins(1, None if status is BUILDING else 5, status)
    abort = job.only(ev.Abort)
    assert abort.generation == 4
    assert set(abort.procs) == set(job.holders)
    assert job.core.state.restarts == 2  # that recovery was charged when it began
    for rank in (0, 1):
        if job.member(rank).status is LIVE:
            assert not job.found(ev.SendPlan)
            job.park(rank, 5)
    assert job.only(ev.SendPlan).plan.generation == 5


def test_a_plan_that_some_have_and_others_have_not_is_ended() -> None:
    """The newest generation that anybody was told of, by the ledger or by a rank, is never used again."""
    for ledger, told in ((4, 5), (5, 4)):
        job = Adopting(2, generation=ledger)
        job.rejoins(0, 5)
        job.rejoins(1, 5, generation=told)
        assert job.only(ev.Abort).generation == 5
        job.park(0, 5)
        job.park(1, 5)
        assert job.only(ev.SendPlan).plan.generation == 6


def test_parking_before_all_are_there_is_not_forgotten() -> None:
    job = Adopting(2)
    job.rejoins(0, 5)
    job.park(0, 5)
    assert job.status is Status.ADOPTING
    job.rejoins(1, 5)
    assert job.only(ev.Abort)
    assert not job.found(ev.SendPlan)
    job.park(1, 5)
    assert job.only(ev.SendPlan)


def test_who_lives_and_does_not_rejoin_is_killed_before_it_is_replaced() -> None:
    job = Adopting(2, suspect_after_s=3.0)
    job.rejoins(0, 5)
    job.now += 3.0 * ADOPT_FACTOR - 0.1
    assert not job.tell(ev.Tick())
    job.now += 0.2
    kill = job.only(ev.Kill, job.tell(ev.Tick()))
    assert kill.proc == job.holders[1]
    assert kill.hard
    assert not job.tell(ev.Tick())
    assert not job.found(ev.Launch)
    job.has_ended(1)
    assert job.only(ev.Launch).rank == 1


def test_a_rank_rejoins_once_and_a_stranger_never() -> None:
    job = Adopting(2)
    job.rejoins(0, 5)
    assert job.rejoins(0, 9) == []
    assert job.member(0).version == 5
    assert job.tell(ev.Adopted("p99", 4, LIVE, 5)) == []
    assert job.status is Status.ADOPTING


def test_the_end_of_all_scripts_ends_the_job_well() -> None:
    job = Adopting(2)
    job.has_ended(0, left=9)
    assert job.status is Status.ADOPTING
    job.rejoins(1, 9, LEFT)
    assert job.status is Status.CLOSING
    assert job.only(ev.Release).procs == (job.holders[1],)
    job.has_ended(1)
    assert job.only(ev.End).code == 0


def test_when_all_have_ended_at_their_end_so_has_the_job() -> None:
    job = Adopting(2)
    job.has_ended(0, left=9)
    job.has_ended(1, left=9)
    assert job.only(ev.End).code == 0


def test_who_came_to_its_end_while_others_have_not_is_replaced() -> None:
    job = Adopting(2)
    job.has_ended(0, left=5)
    job.rejoins(1, 5, PARKED)
    assert job.only(ev.Launch).rank == 0
    assert job.only(ev.SendPlan).plan.version == 5


def test_the_end_of_a_script_is_heard_before_all_are_there() -> None:
    job = Adopting(2)
    job.rejoins(0, 9)
    job.leave(0)
    job.rejoins(1, 9, LEFT)
    assert job.status is Status.CLOSING


def test_a_world_that_had_not_protected_goes_on_starting() -> None:
    job = Adopting(2, generation=1)
    job.rejoins(0, None, RankStatus.STARTING, claims=None, generation=1)
    job.rejoins(1, 0, generation=1)
    assert job.status is Status.STARTING
    job.protect(0)
    assert job.status is Status.RUNNING
    assert job.only(ev.SetRegime)


@pytest.mark.parametrize(("sealed", "status"), [((), Status.STOPPING), ((0,), Status.RUNNING)])
def test_a_job_that_has_no_room_for_its_arenas_is_not_gone_on_with(
    sealed: tuple[int, ...], status: Status
) -> None:
    """Unless they are there already."""
    job = Adopting(2, generation=1)
    facts: dict[str, Any] = {"why_sealed": WHY, "generation": 1, "sealed": sealed}
    job.rejoins(0, 0, **facts)
    job.rejoins(1, 0, **facts, shortage="no room")
    assert job.status is status
    if status is Status.STOPPING:
        assert job.core.state.outcome == (1, f"no room (sealed: {WHY})")


def test_a_world_that_lost_a_rank_before_it_had_protected_starts_anew() -> None:
    job = Adopting(2, generation=1)
    job.rejoins(0, None, RankStatus.STARTING, claims=None, generation=1)
    job.has_ended(1, step=-1, private=())
    assert job.status is Status.RESTARTING
    assert job.generation == 2
    assert [kill.proc for kill in job.found(ev.Kill)] == [job.holders[0]]
    job.end_of(job.holders[0])
    assert [launch.proc for launch in job.found(ev.Launch)] == ["p21", "p22"]


def test_a_restart_of_the_world_that_was_under_way_is_made_anew() -> None:
    job = Adopting(2, generation=2)
    job.rejoins(0, None, RankStatus.STARTING, claims=None, generation=1)
    job.rejoins(1, None, RankStatus.STARTING, claims=None, generation=2)
    assert job.status is Status.RESTARTING
    assert job.generation == 3


def test_a_script_without_flashrec_is_not_run_twice() -> None:
    job = Adopting(2, generation=1)
    job.rejoins(0, None, RankStatus.STARTING, claims=None, generation=1)
    job.has_ended(1, step=None, private=())
    assert job.status is Status.STOPPING
    assert "whether its script was done is not known" in job.core.state.outcome[1]  # type: ignore[index]


def test_ranks_that_disagree_about_their_layout_are_not_adopted() -> None:
    job = Adopting(2)
    job.rejoins(0, 5)
    job.rejoins(1, 5, claims=(((0, 1), "another"),))
    assert job.status is Status.STOPPING
    assert "disagree about the layout" in job.core.state.outcome[1]  # type: ignore[index]


def test_it_can_be_stopped_while_ranks_are_awaited() -> None:
    job = Adopting(2)
    job.rejoins(0, 5)
    job.tell(ev.Stop("it was interrupted", hard=True))
    assert {kill.proc for kill in job.found(ev.Kill)} == set(job.holders)
    job.has_ended(0)
    job.has_ended(1)
    assert job.only(ev.End).code == 130


def test_what_a_dead_rank_alone_held_is_known_from_the_record() -> None:
    """Else its tensors would not be asked for, and a version be taken that nobody has of them."""
    own = tuple((((rank,), "digest"),) for rank in range(2))
    job = Adopting(2, claims=own)
    job.rejoins(0, 6, PARKED, claims=own[0], why_sealed=WHY, private=(5, 6, 7), sealed=(5, 6))
    job.has_ended(1, private=(5, 6, 7), sealed=(4, 5))
    plan = job.only(ev.SendPlan).plan
    assert (plan.version, plan.replaced) == (5, (0, 1))
