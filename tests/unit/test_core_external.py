"""Jobs whose ranks another launcher starts: the core waits for what it would start, and plans when all are there."""

from __future__ import annotations

from flashrecd.core import events as ev
from flashrecd.core.detection import BUILD_FACTOR
from flashrecd.core.state import RankStatus, Status
from tests.unit.daemon_core import Driven


def external(world_size: int = 2) -> Driven:
    return Driven(world_size, external=True)


def join(job: Driven, *ranks: int) -> list[ev.Action]:
    return job.tell(*[ev.Joined(job.proc(rank)) for rank in ranks or job.ranks()])


def running(world_size: int = 2) -> Driven:
    job = external(world_size)
    join(job)
    claims = (tuple(job.ranks()), "same")
    job.tell(*[ev.Protected(job.proc(rank), (claims,), "an external launcher") for rank in job.ranks()])
    assert job.status is Status.RUNNING
    return job


def lose(job: Driven, rank: int, *versions: int) -> list[ev.Action]:
    return job.tell(ev.Exited(job.proc(rank), None, None, versions, versions))


def test_a_world_is_awaited_for_as_long_as_it_takes() -> None:
    job = external()
    assert [launch.replacement for launch in job.found(ev.Launch)] == [False, False]
    assert job.core.state.awaited == (job.proc(0), job.proc(1))
    job.now += 1e6
    assert job.tell(ev.Tick()) == []
    join(job, 1)
    assert job.core.state.awaited == (job.proc(0),)


def test_when_one_rank_is_lost_no_plan_counts_on_the_others_before_all_are_there() -> None:
    job = running()
    lost = job.only(ev.Launch, lose(job, 0, 4, 5))
    assert (lost.rank, lost.replacement) == (0, True)
    assert not job.found(ev.SendPlan, job.park(1, 4, False, 4, 5)), (
        "its launcher is about to end this one too"
    )
    lose(job, 1, 4, 5)
    assert not job.found(ev.SendPlan, join(job, 1))
    plan = job.only(ev.SendPlan, join(job, 0)).plan
    assert (plan.version, plan.replaced, job.generation) == (5, (0, 1), 2)
    job.form()
    assert job.status is Status.RUNNING


def test_a_rank_that_is_started_again_alone_joins_those_that_wait() -> None:
    job = running()
    lose(job, 0, 4, 5)
    job.tell(ev.Parked(job.proc(1), 1, 5, False, (4, 5), (4, 5)))
    plan = job.only(ev.SendPlan, join(job, 0)).plan
    assert (plan.version, plan.replaced) == (5, (0,))


def test_ranks_that_wait_for_a_launcher_do_not_wait_for_ever() -> None:
    job = running()
    lose(job, 0, 4, 5)
    job.tell(ev.Parked(job.proc(1), 1, 5, False, (4, 5), (4, 5)))
    beat = [ev.Heartbeat(job.proc(1)), ev.Tick()]
    for _ in range(int(BUILD_FACTOR) - 1):
        job.now += job.core.config.suspect_after_s
        job.tell(*beat)
    assert job.status is Status.PARKING
    job.now += 2 * job.core.config.suspect_after_s
    waiting = job.proc(1)
    assert waiting in [kill.proc for kill in job.found(ev.Kill, job.tell(*beat))]
    assert "nobody has started ranks [0] again" in str(job.core.state.outcome)


def test_without_anybody_who_waits_the_memory_is_kept() -> None:
    job = running()
    lose(job, 0, 4, 5)
    lose(job, 1, 4, 5)
    job.now += 1e6
    job.tell(ev.Tick())
    job.tell(ev.Tick())
    assert job.status is Status.PARKING
    join(job, 0)
    assert job.only(ev.SendPlan, join(job, 1)).plan.version == 5


def test_losing_every_rank_one_after_another_is_one_try_of_the_step() -> None:
    job = running(8)
    for rank in job.ranks():
        lose(job, rank, 4, 5)
    join(job)
    assert job.core.state.tries == (5, 1)
    assert len(job.found(ev.SendPlan)) == 1


def test_what_is_awaited_is_neither_suspected_nor_slow() -> None:
    job = running()
    for rank in job.ranks():
        job.tell(ev.Heartbeat(job.proc(rank)))
    lose(job, 0, 4, 5)
    job.park(1, 4)
    silent = (BUILD_FACTOR - 10) * job.core.config.suspect_after_s
    for _ in range(3):
        job.now += 1
        # The tag is still its predecessor's.
        job.tell(ev.TagSeen(job.proc(0), 4, 1 << 40), ev.Heartbeat(job.proc(1)), ev.Tick())
    job.now += silent
    job.tell(ev.Tick())
    job.tell(ev.Heartbeat(job.proc(1)), ev.Tick())
    assert not job.found(ev.Kill)
    join(job, 0)
    job.now += 2 * silent
    assert job.only(ev.Kill, job.tell(ev.Tick())).proc == job.proc(0), "it came, and is not ready"


def test_what_dies_while_it_is_awaited_is_awaited_anew() -> None:
    job = running()
    lose(job, 0, 4, 5)
    job.park(1, 4)
    first = job.proc(0)
    lose(job, 0, 4, 5)
    assert job.core.state.awaited == (job.proc(0),)
    assert job.proc(0) != first
    assert join(job, 0)


def test_a_death_at_the_start_ends_all_and_awaits_all() -> None:
    job = external()
    join(job, 0)
    old = job.proc(0), job.proc(1)
    join(job, 1)
    lose(job, 1, 0)
    assert job.status is Status.RESTARTING
    job.tell(ev.Exited(old[0], None, None))
    assert job.status is Status.STARTING
    assert len(job.core.state.awaited) == 2
    assert not {launch.replacement for launch in job.found(ev.Launch)} - {False}
    assert job.generation == 2


def test_a_process_may_be_condemned_for_what_the_core_cannot_see() -> None:
    job = running()
    kill = job.only(ev.Kill, job.tell(ev.Condemned(job.proc(1), "its launcher has died")))
    assert (kill.proc, kill.hard, kill.reason) == (job.proc(1), True, "its launcher has died")
    assert job.tell(ev.Condemned(job.proc(1), "again"), ev.Condemned("p99", "a stranger")) == []
    assert job.member(1).status is RankStatus.LIVE, "it is lost when the kernel says so"


def test_a_stop_ends_what_is_awaited_too() -> None:
    job = running()
    lose(job, 0, 4, 5)
    kills = job.found(ev.Kill, job.tell(ev.Stop("superseded", True)))
    assert {kill.proc for kill in kills} == {job.proc(0), job.proc(1)}
    job.tell(*[ev.Exited(job.proc(rank), None, None) for rank in job.ranks()])
    assert job.only(ev.End) == ev.End(130, "superseded")
