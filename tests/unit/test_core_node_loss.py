"""A node of a job is lost, or several: who is given up, where all goes, and when another generation may begin."""

from __future__ import annotations

import pytest

from flashrecd.core import events as ev
from flashrecd.core.job import CLOSING_S
from flashrecd.core.state import Kept, NodeLife, NodeSpec, RankStatus, Status
from tests.unit.spread_core import Spread

# --- a lost node --------------------------------------------------------------------------------------------


def test_the_ranks_of_a_lost_node_move_to_the_standbys_of_a_spare() -> None:
    job = Spread(num_standbys=1).trained().standbys_ready()
    spares = [standby.proc for standby in job.core.state.standbys if standby.node == 2]
    dead = [job.proc(2), job.proc(3)]
    job.close(1)
    answer = job.stop_at(0)
    assert job.life(1) is NodeLife.LOST
    assert [(one.rank, one.proc) for one in job.found(ev.Assign, answer)] == [(2, spares[0]), (3, spares[1])]
    assert [job.member(rank).node for rank in job.ranks()] == [0, 0, 2, 2]
    assert job.only(ev.Abort).procs == (job.proc(0), job.proc(1), *dead)
    assert job.only(ev.Fence).generation == 1
    assert not job.core.state.nodes[2].spare
    assert {standby.node for standby in job.core.state.standbys} == {0}, "its standbys are gone with it"
    assert job.core.state.restarts == 1


def test_the_plan_waits_for_what_every_live_node_keeps() -> None:
    job = Spread().trained()
    job.close(1)
    job.stop_at(0, 1)
    assert job.status is Status.PARKING
    job.keep(0)
    assert job.status is Status.PARKING
    sent = job.only(ev.SendPlan, job.keep(2))
    assert (sent.plan.version, sent.plan.replaced, sent.plan.served) == (6, (2, 3), ())


def test_the_plan_says_where_everything_is() -> None:
    job = Spread(3, 1).trained()
    keepers = job.keepers
    job.close(1)
    job.stop_at()
    answer = job.keep()
    sources = {one.rank: one for one in job.only(ev.SendPlan, answer).sources}
    assert set(sources) == {2, 3}, "nobody needs what the survivors sealed"
    for rank, one in sources.items():
        assert one.sealed == one.private == keepers[rank]
    settle = job.only(ev.Settle, answer)
    assert settle == ev.Settle(2, 6, (0, 2, 3), sealed=6)
    assert answer.index(settle) < answer.index(job.only(ev.SendPlan, answer))


def test_survivors_that_are_ahead_find_their_own_arena_first_and_then_its_replica() -> None:
    job = Spread(3, 1).trained()
    before = job.keepers
    job.close(1)
    job.stop_at(version=7)
    sources = {one.rank: one for one in job.only(ev.SendPlan, job.keep(version=6)).sources}
    assert job.core.state.version == 6
    for rank in (0, 1, 4, 5):
        still = tuple(node for node in before[rank] if node != 1)
        assert sources[rank].sealed == sources[rank].private == (job.member(rank).node, *still)
    assert {len(sources[rank].sealed) for rank in (0, 1, 4, 5)} == {1, 2}


def test_in_the_live_regime_tensors_come_from_memory_and_private_state_from_replicas() -> None:
    job = Spread(sealed=False).trained()
    keepers = job.keepers
    job.close(1)
    job.stop_at()
    sent = job.only(ev.SendPlan, job.keep())
    assert not sent.sealing
    assert sent.plan.served == (((0, 1, 2, 3), (0, 1)),)
    assert sent.sources == tuple(ev.RankSources(rank, (), keepers[rank]) for rank in (2, 3))


def test_in_the_live_regime_full_versions_above_the_watermark_are_given_up() -> None:
    """Here some ranks have sealed 5 and others have not; each has sealed 2."""
    job = Spread(sealed=False).trained()
    keepers = job.keepers
    job.close(1)
    for rank in (0, 1):
        job.tell(ev.Parked(job.proc(rank), 1, 6, False, (2, 5, 6), (2, 5)))
    for node in (0, 2):
        kept = [Kept(rank, (2, 6, 7), (2,)) for rank in job.ranks() if keepers[rank] == (node,)]
        job.tell(ev.Holdings(node, 1, tuple(kept)))
    assert job.only(ev.Settle) == ev.Settle(2, 6, (0, 2), sealed=2)


def test_a_replica_of_another_version_is_no_source() -> None:
    job = Spread(replicas=2).trained()
    job.close(1)
    job.stop_at()
    job.keep(0)
    job.tell(ev.Holdings(2, 1, tuple(Kept(rank, (4, 5), (4, 5)) for rank in job.ranks())))
    sent = job.only(ev.SendPlan)
    assert sent.sources == tuple(ev.RankSources(rank, (0,), (0,)) for rank in (2, 3))


def test_a_replica_that_nobody_acknowledged_is_no_source() -> None:
    job = Spread().trained()
    job.close(1)
    job.stop_at()
    job.keep(but=(3,))
    assert not job.found(ev.SendPlan)
    assert job.core.state.outcome is not None
    assert "no source for the tensors of ranks [3]" in job.core.state.outcome[1]


def test_what_a_lost_node_kept_is_gone_with_it() -> None:
    """It had told; then it was lost as well."""
    job = Spread(3, 2).trained()
    assert job.keepers[2] == job.keepers[3] == (2,)
    job.stop_at(0, 1)
    job.keep(0, 2, 3, 4)
    job.close(2)
    assert job.core.state.outcome is None
    job.close(1)
    assert job.core.state.outcome is not None
    assert "no source for the tensors of ranks [2, 3]" in job.core.state.outcome[1]


def test_only_the_replicas_of_the_lost_node_and_of_its_ranks_find_new_keepers() -> None:
    job = Spread(4, 1).trained()
    before = job.keepers
    job.close(1)
    job.stop_at()
    after = job.only(ev.SendPlan, job.keep()).keepers
    for rank in job.ranks():
        if before[rank] != (1,) and job.member(rank).node not in before[rank]:
            assert after[rank] == before[rank]
        assert len(after[rank]) == 1
        assert after[rank][0] not in (1, job.member(rank).node)


# --- more than one loss -------------------------------------------------------------------------------------


def test_two_nodes_one_after_the_other() -> None:
    job = Spread(3, 2).trained()
    job.recovered(1)
    assert job.core.live_nodes() == (0, 2, 3, 4)
    job.recovered(2, version=8)
    assert [job.member(rank).node for rank in job.ranks()] == [0, 0, 3, 3, 4, 4]
    assert job.core.state.version == 8
    assert all(set(keepers) <= {0, 3, 4} for keepers in job.keepers)


def test_a_node_that_is_lost_while_the_ranks_form() -> None:
    job = Spread(3, 2).trained()
    job.close(1)
    job.stop_at()
    job.keep()
    assert job.status is Status.FORMING
    moved = job.on(3)
    answer = job.close(3)
    assert job.status is Status.PARKING
    assert job.only(ev.Abort, answer).generation == job.only(ev.Fence, answer).generation == 2
    assert all(job.member(rank).node == 4 for rank in moved)
    job.stop_at()
    sent = job.only(ev.SendPlan, job.keep())
    assert (sent.plan.generation, sent.plan.version) == (3, 6)
    assert set(moved) <= set(sent.plan.replaced)
    job.formed()
    assert job.core.state.restarts == 2


def test_a_spare_that_is_lost_after_it_was_given_ranks_and_before_the_plan() -> None:
    job = Spread(3, 2).trained()
    job.close(1)
    job.stop_at()
    moved = job.on(3)
    assert moved
    job.close(3)
    assert job.on(4) == moved
    assert len(job.found(ev.Fence)) == 1, "the generation was fenced before"
    assert job.only(ev.SendPlan, job.keep()).plan.generation == 2
    job.formed()
    assert job.core.state.restarts == 2


def test_two_nodes_at_once_move_to_none_of_each_other() -> None:
    job = Spread(3, 2).trained()
    job.wait(4, 0, 2, 4, moving=True)  # 1 and the spare 3 fall silent
    answer = job.stop_at(0)
    assert job.life(1) is job.life(3) is NodeLife.LOST
    assert [job.member(rank).node for rank in (2, 3)] == [4, 4]
    assert job.core.state.restarts == 1
    assert not [launch for launch in job.found(ev.Launch, answer) if launch.node in (1, 3)]


def test_a_node_that_is_lost_while_another_rank_has_exited() -> None:
    job = Spread().trained()
    job.tell(ev.Exited(job.proc(1), None, 9, (5, 6, 7), (5, 6)))
    job.close(1)
    assert job.life(1) is NodeLife.LOST
    assert [job.member(rank).node for rank in job.ranks()] == [0, 0, 2, 2]
    job.stop_at(0)
    sent = job.only(ev.SendPlan, job.keep())
    assert (sent.plan.version, sent.plan.replaced) == (6, (1, 2, 3))
    sources = {one.rank: one for one in sent.sources}
    assert sources[1].sealed[0] == sources[1].private[0] == 0, "its arena has outlived it"
    assert job.core.state.restarts == 1


def test_a_keeper_without_ranks_that_is_lost_is_replaced_by_a_new_generation() -> None:
    """Its acknowledgements died with it: no vote would be given any more."""
    job = Spread(2, 2).trained()
    spare = next(keepers[0] for keepers in job.keepers if keepers[0] >= 2)
    procs = [job.proc(rank) for rank in job.ranks()]
    heard = [node for node in range(4) if node != spare]
    assert job.found(ev.Abort, job.wait(5, *heard))
    assert job.life(spare) is NodeLife.LOST
    job.stop_at()
    sent = job.only(ev.SendPlan, job.keep())
    assert sent.plan.replaced == ()
    assert all(spare not in keepers for keepers in sent.keepers)
    assert [job.proc(rank) for rank in job.ranks()] == procs


def test_a_spare_with_a_standby_is_better_than_one_without() -> None:
    for better in (2, 3):
        job = Spread(2, 2, replicas=0, sealed=False).trained()
        ready = [standby.proc for standby in job.core.state.standbys if standby.node == better]
        job.tell(*[ev.StandbyReady(proc, "forked") for proc in ready])
        job.close(1)
        answer = job.stop_at(0)
        assert [one.proc for one in job.found(ev.Assign, answer)] == ready
        assert [job.member(rank).node for rank in (2, 3)] == [better, better]


def test_a_spare_that_is_not_heard_is_given_nothing() -> None:
    job = Spread(2, 2)
    job.close(2)
    assert job.life(2) is NodeLife.LIVE, "nobody waits for it"
    job.protected()
    assert 2 not in {node for keepers in job.keepers for node in keepers}
    job = Spread(2, 2)
    job.close(2)
    job.close(1)
    doomed = job.core.state.stopping_procs
    job.tell(ev.NodeHeard(0))
    answer = job.end_of(*doomed)
    assert {launch.node for launch in job.found(ev.Launch, answer)} == {0, 3}


def test_a_spare_that_keeps_nothing_is_not_missed() -> None:
    job = Spread(2, 1, replicas=0).trained()
    job.close(2)
    job.wait(60, 0, 1)
    assert job.status is Status.RUNNING
    assert job.life(2) is NodeLife.LIVE


def test_a_rank_that_parks_on_a_node_that_is_lost_by_that_has_promised_and_is_replaced() -> None:
    job = Spread().trained()
    job.close(1)
    before = job.proc(2)
    job.stop_at(2)
    assert job.life(1) is NodeLife.LOST
    assert job.proc(2) != before
    assert (job.member(2).status, job.member(2).version) == (RankStatus.BUILDING, None)
    for rank in (0, 1):
        job.tell(ev.Exited(job.proc(rank), None, 9, (5, 6, 7), (5, 6)))
    assert job.found(ev.SendPlan, job.keep())


def test_what_a_rank_had_on_its_lost_node_does_not_move_with_it() -> None:
    job = Spread(3, 2).trained()
    job.stop_at(2, 3)
    job.close(1)
    job.stop_at()
    sources = job.only(ev.SendPlan, job.keep()).sources
    assert job.member(2).node in (3, 4)
    assert sources == tuple(ev.RankSources(rank, (2,), (2,)) for rank in (2, 3))


# --- no room ------------------------------------------------------------------------------------------------


def test_when_the_last_spare_is_gone_the_job_ends_and_says_so() -> None:
    job = Spread(3, 1).trained()
    job.recovered(1)
    job.close(2)
    job.stop_at(0)
    assert job.core.state.outcome is not None
    code, reason = job.core.state.outcome
    assert code == 1
    assert "no node has room for rank 4" in reason
    assert "node c is lost (reset by peer)" in reason
    job.end_of(*job.core.state.stopping_procs)
    assert job.only(ev.End).code == 1


def test_or_goes_where_there_is_room() -> None:
    specs = (NodeSpec("a", "", 3), NodeSpec("b", "", 2), NodeSpec("c", "", 3))
    job = Spread(3, 0, nodes=specs).trained()
    job.recovered(1)
    # Half each, and the one of which it has a replica.
    assert [job.member(rank).node for rank in job.ranks()] == [0, 0, 2, 0, 2, 2]


def test_the_place_of_a_rank_that_has_just_died_is_its_own() -> None:
    job = Spread(2, 0, nodes=(NodeSpec("a", "", 3), NodeSpec("b", "", 2))).trained()
    job.close(1)
    answer = job.tell(ev.Exited(job.proc(0), None, 9, (5, 6, 7), (5, 6)))
    assert job.core.state.outcome is not None
    assert "no node has room for rank 3" in job.core.state.outcome[1]
    assert [launch.rank for launch in job.found(ev.Launch, answer)] == [2], "nothing is started after the end"


def test_fewer_replicas_than_asked_for_are_warned_of_later_on() -> None:
    job = Spread(2, 0, nodes=(NodeSpec("a", "", 4), NodeSpec("b", "", 2))).trained()
    job.recovered(1)
    assert job.keepers == [()] * 4
    assert "0 replicas of some ranks are kept, not 1" in job.core.state.too_few
    assert len(job.logged("too few replicas")) == 1


# --- when a generation is over ------------------------------------------------------------------------------


def left_alone() -> Spread:
    """Nobody is left who could promise: the first node's ranks have exited, and the other node is lost."""
    job = Spread().trained()
    for rank in (0, 1):
        job.tell(ev.Exited(job.proc(rank), None, 9, (5, 6, 7), (5, 6)))
    job.close(1)
    assert job.life(1) is NodeLife.LOST
    return job


def test_without_a_promise_it_waits_until_somebody_says_that_the_lost_node_is_gone() -> None:
    job = left_alone()
    job.keep()
    assert job.status is Status.PARKING
    assert not job.found(ev.SendPlan)
    (why,) = job.logged("waiting")
    assert "ranks [2, 3] may still train" in why
    assert "on b" in why
    assert job.core.state.waits_for == why
    job.wait(60, 0, 2)
    assert job.status is Status.PARKING
    assert job.only(ev.SendPlan, job.tell(ev.NodeFenced(1))).plan.version == 6
    assert job.core.state.waits_for == ""
    assert len(job.logged("waiting")) == 1


def test_fenced_before_all_have_said_what_they_keep() -> None:
    job = left_alone()
    job.tell(ev.NodeFenced(1))
    assert job.only(ev.SendPlan, job.keep()).plan.version == 6


def test_another_node_that_is_gone_is_no_proof() -> None:
    job = left_alone()
    job.keep()
    job.tell(ev.NodeFenced(2))
    assert not job.found(ev.SendPlan)


def test_one_promise_is_enough_even_of_a_rank_that_is_lost_later() -> None:
    job = Spread().trained()
    job.stop_at(2)
    for rank in (0, 1):
        job.tell(ev.Exited(job.proc(rank), None, 9, (5, 6, 7), (5, 6)))
    job.close(1)
    job.keep()
    assert job.only(ev.SendPlan).plan.version == 6


def test_a_promise_about_an_older_generation_is_none_about_this_one() -> None:
    job = Spread(2, 2).trained().recovered(1)
    for rank in (0, 1):
        job.tell(ev.Exited(job.proc(rank), None, 9, (5, 6, 7), (5, 6)))
    job.close(job.member(2).node)
    job.keep()
    assert job.status is Status.PARKING
    assert "generation 2" in job.core.state.waits_for


def test_what_was_not_proven_of_an_older_generation_holds_up_no_later_one() -> None:
    job = Spread(2, 1).trained().recovered(1)
    for rank in job.ranks():
        job.tell(ev.Exited(job.proc(rank), None, 9, (6, 7, 8), (6, 7)))
    assert job.only(ev.SendPlan, job.keep(version=7)).plan.version == 7


def test_a_start_that_might_go_on_elsewhere_is_not_made_again_before_that_is_ruled_out() -> None:
    job = Spread().protected()
    for rank in (0, 1):
        job.tell(ev.Exited(job.proc(rank), None, 9))
    job.close(1)
    assert job.status is Status.RESTARTING
    job.end_of(*job.core.state.stopping_procs)
    assert job.status is Status.RESTARTING
    assert "no rank of generation 1 is left" in job.core.state.waits_for
    answer = job.tell(ev.NodeFenced(1))
    assert job.status is Status.STARTING
    assert [launch.node for launch in job.found(ev.Launch, answer) if launch.rank is not None] == [0, 0, 2, 2]


def test_a_replacement_that_was_told_of_no_generation_need_not_be_fenced() -> None:
    """The spare that was lost before there was a plan: nothing of the old generation ran there."""
    job = Spread(2, 2, replicas=2).trained()
    for rank in (0, 1):
        job.tell(ev.Exited(job.proc(rank), None, 9, (5, 6, 7), (5, 6)))
    job.close(1)
    spare = job.member(2).node
    job.close(spare)
    assert job.on(5 - spare) == [2, 3]
    job.keep()
    assert not job.found(ev.SendPlan)
    job.tell(ev.NodeFenced(1))
    assert job.found(ev.SendPlan)


def test_a_node_that_lives_can_be_said_to_be_gone() -> None:
    job = Spread().trained()
    job.tell(ev.NodeFenced(1))
    assert job.life(1) is NodeLife.LOST
    job.stop_at()
    job.keep()
    assert job.status is Status.FORMING


def test_the_leader_cannot() -> None:
    job = Spread().trained()
    before = job.core.state
    assert job.tell(ev.NodeFenced(0)) == []
    assert job.core.state == before


# --- after the last step --------------------------------------------------------------------------------------


def at_its_end() -> Spread:
    job = Spread().trained()
    job.tell(*[ev.Leaving(job.proc(rank), job.generation, 9) for rank in job.ranks()])
    assert job.status is Status.CLOSING
    return job


def end_all(job: Spread, *ranks: int) -> None:
    for rank in ranks:
        job.tell(ev.Exited(job.proc(rank), 0, None))
    for standby in job.core.state.standbys:
        job.tell(ev.Exited(standby.proc, None, 9))


def test_a_link_that_comes_back_after_the_last_step_brings_the_ranks_ends() -> None:
    job = at_its_end()
    end_all(job, *job.on(0))
    job.close(1)
    job.wait(20, 0, 2)
    assert job.life(1) is NodeLife.LIVE
    job.tell(ev.NodeHeard(1))
    end_all(job, *job.on(1))
    assert job.only(ev.End).code == 0


@pytest.mark.parametrize("deserted", [True, False])
def test_a_node_that_is_gone_after_the_last_step_fails_the_job(deserted: bool) -> None:
    """At once if it is known to be gone; else when its ranks have had the time that ranks have to end."""
    job = at_its_end()
    end_all(job, *job.on(0))
    job.close(1)
    if deserted:
        job.tell(ev.NodeDeserted(1))
    else:
        job.wait(CLOSING_S - 1, 0, 2)
        assert not job.found(ev.End)
        job.wait(3, 0, 2)
    end = job.only(ev.End)
    assert end.code == 1
    assert "had not ended after training when node b is lost" in end.reason
