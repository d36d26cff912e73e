"""The core in the sealed regime: each rank holds tensors that no other holds."""

import pytest

from flashrecd.core import events as ev
from flashrecd.core.state import Status
from tests.unit.daemon_core import Driven

WHY = "rank 0 alone holds some tensors"
Versions = tuple[int, ...]


def sealed_job(world_size: int = 2) -> Driven:
    job = Driven(world_size)
    for rank in job.ranks():
        job.tell(ev.Protected(job.proc(rank), (((rank,), "digest"),), WHY))
    assert job.only(ev.SetRegime).sealing
    return job


def dies(job: Driven, rank: int, private: Versions, sealed: Versions) -> list[ev.Action]:
    return job.tell(ev.Exited(job.proc(rank), None, 9, private, sealed))


def parks(
    job: Driven, rank: int, version: int | None, private: Versions, sealed: Versions
) -> list[ev.Action]:
    return job.tell(ev.Parked(job.proc(rank), job.generation, version, False, private, sealed))


def test_a_survivor_that_is_ahead_goes_back_with_the_lost_one() -> None:
    job = sealed_job()
    dies(job, 0, (4, 5, 6), (4, 5))
    sent = job.only(ev.SendPlan, parks(job, 1, 6, (5, 6), (5,)))
    assert sent.sealing
    assert (sent.plan.version, sent.plan.replaced, sent.plan.served) == (5, (0, 1), ())


def test_a_torn_rank_is_replaced_in_place() -> None:
    job = sealed_job()
    parks(job, 0, None, (4, 5, 6), (4, 5))
    sent = job.only(ev.SendPlan, parks(job, 1, 6, (5, 6), (5,)))
    assert (sent.plan.version, sent.plan.replaced) == (5, (0, 1))
    assert not job.found(ev.Kill)


def test_when_all_are_dead_the_arenas_are_enough() -> None:
    job = sealed_job()
    dies(job, 0, (4, 5, 6), (4, 5))
    dies(job, 1, (5, 6), (5,))
    assert job.only(ev.SendPlan).plan.version == 5


@pytest.mark.parametrize(
    ("version", "private"),
    [(0, (0,)), (0, (0, 1)), (1, (0, 1)), (1, (0, 1, 2)), (None, (0, 1))],
    ids=str,
)
def test_version_0_is_made_again_and_never_installed(version: int | None, private: Versions) -> None:
    """Even by a rank that is past it: its first step's conversations are not repeated for the others."""
    job = sealed_job()
    dies(job, 0, (0, 1), (0,))
    parks(job, 1, version, private, (0,))
    assert job.status is Status.RESTARTING
    assert not job.found(ev.SendPlan)


def test_a_start_that_sealed_nothing_yet_is_made_again() -> None:
    job = sealed_job()
    dies(job, 0, (0,), ())
    parks(job, 1, 0, (0,), ())
    assert job.status is Status.RESTARTING


def test_a_later_version_that_is_lost_is_not_begun_from_the_start_unasked() -> None:
    job = sealed_job()
    dies(job, 0, (4, 5, 6), ())
    dies(job, 1, (4, 5, 6), (4, 5))
    assert not job.found(ev.SendPlan)
    assert job.core.state.outcome is not None
    assert "version 5: no source for the tensors of ranks [0]" in job.core.state.outcome[1]
