"""The core of a job on several nodes: who takes part, whom it believes, who comes back."""

from __future__ import annotations

from typing import Any

import pytest

from flashrec.errors import UsageError
from flashrecd.core import events as ev
from flashrecd.core.detection import STILL_FACTOR
from flashrecd.core.state import JobConfig, Kept, NodeLife, NodeSpec, Status
from tests.unit.spread_core import SUSPECT, WHY, Spread

# --- the beginning ------------------------------------------------------------------------------------------


def test_each_node_begins_with_its_share_and_a_spare_with_standbys_for_it() -> None:
    job = Spread(2, 1, num_standbys=1)
    launched = job.found(ev.Launch)
    assert [(launch.rank, launch.node) for launch in launched if launch.rank is not None] == [
        (0, 0),
        (1, 0),
        (2, 1),
        (3, 1),
    ]
    assert [launch.node for launch in launched if launch.rank is None] == [0, 1, 2, 2]
    assert [node.spare for node in job.core.state.nodes] == [False, False, True]
    assert "its loss ends the job" in job.logged("leader")[0]


def test_every_rank_is_told_who_keeps_what_it_seals() -> None:
    job = Spread(2, 1).protected()
    keepers = job.only(ev.SetRegime).keepers
    assert keepers == tuple(job.keepers)
    for rank, nodes in enumerate(keepers):
        assert len(nodes) == 1
        assert nodes[0] != job.member(rank).node


def test_more_replicas_than_the_nodes_allow_are_refused_before_anything_starts() -> None:
    job = Spread(2, 0, replicas=2)
    end = job.only(ev.End)
    assert end.code == 1
    assert "2 replicas of every rank need 3 nodes, and there are 2" in end.reason
    assert not job.found(ev.Launch)


def test_a_job_that_does_not_fit_is_refused_before_anything_starts() -> None:
    job = Spread(2, 0, nodes=(NodeSpec("a", "", 2), NodeSpec("b", "", 1)))
    assert "no room for 4 ranks: node a for 2, b for 1" in job.only(ev.End).reason
    assert not job.found(ev.Launch)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"nodes": ()}, "at least one node"),
        ({"nodes": (NodeSpec("a"), NodeSpec("b"))}, "nproc_per_node"),
        ({"nodes": (NodeSpec("a"), NodeSpec("a")), "nproc_per_node": 1}, "two nodes have the name 'a'"),
        ({"nodes": (NodeSpec("a"), NodeSpec("b")), "nproc_per_node": 1, "external": True}, "launcher"),
        ({"nproc_per_node": 0}, "at least one rank, not 0"),
        ({"replicas": -1}, "cannot be -1"),
    ],
    ids=str,
)
def test_nodes_that_cannot_work_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        JobConfig(world_size=2, **wrong)


def test_what_is_held_on_one_node_only_is_sealed() -> None:
    """The live regime would not outlive that node."""
    job = Spread(2, 0)
    for rank, pair in enumerate(((0, 1), (0, 1), (2, 3), (2, 3))):
        job.tell(ev.Protected(job.proc(rank), ((pair, "digest"),)))
    assert job.only(ev.SetRegime).sealing
    assert job.core.state.why_sealed == "what rank 0 and its replicas hold is on a alone"


@pytest.mark.parametrize(("domains", "sealing"), [("xxyy", False), ("xyxy", True), ("xxxx", False)])
def test_the_live_regime_needs_two_failure_domains_where_there_are(domains: str, sealing: bool) -> None:
    job = Spread(4, 0, domains=domains)
    for rank in job.ranks():
        mine = (0, 1, 4, 5) if rank in (0, 1, 4, 5) else (2, 3, 6, 7)
        job.tell(ev.Protected(job.proc(rank), ((mine, "digest"),)))
    assert job.only(ev.SetRegime).sealing == sealing


# --- silence ------------------------------------------------------------------------------------------------


def test_a_silent_node_whose_ranks_still_step_is_only_reported() -> None:
    job = Spread().trained()
    answer = job.wait(20, 0, 2, moving=True)
    assert job.life(1) is NodeLife.LIVE
    assert job.status is Status.RUNNING
    assert len(job.logged("node unheard", answer)) == 1
    assert not job.found(ev.Kill, answer), "a rank that cannot be heard is not a silent rank"
    job.tell(ev.NodeHeard(1))
    assert job.core.state.nodes[1].unheard == ""
    assert not job.found(ev.Kill, job.wait(2, 0, 1, 2, moving=True))


def test_but_is_lost_when_those_of_all_others_stand_still_too() -> None:
    job = Spread().trained()
    job.wait(2, 0, 2)
    assert job.life(1) is NodeLife.LIVE
    answer = job.wait(2, 0, 2)
    assert job.life(1) is NodeLife.LOST
    assert job.only(ev.Abort, answer).procs == (job.proc(0), job.proc(1))
    assert [job.member(rank).node for rank in (2, 3)] == [2, 2]


def test_not_while_others_are_within_a_step_as_long_as_their_longest() -> None:
    job = Spread().trained()
    for step in (6, 7, 8):
        job.wait(10, 0, 1, 2)
        for rank in job.ranks():
            job.tell(ev.TagSeen(job.proc(rank), step, 10 * step))
    job.wait(9, 0, 2)
    assert job.life(1) is NodeLife.LIVE
    job.wait(2, 0, 2)
    assert job.life(1) is NodeLife.LOST


def test_a_silent_node_is_lost_when_somebody_parks() -> None:
    job = Spread().trained()
    job.wait(4, 0, 2, moving=True)
    assert job.life(1) is NodeLife.LIVE
    job.stop_at(0)
    assert job.life(1) is NodeLife.LOST


def test_a_node_that_closed_is_lost_at_once_when_nothing_listens_there_either() -> None:
    job = Spread().trained()
    job.close(1)
    assert job.life(1) is NodeLife.LIVE, "its daemon may be down, and its ranks step"
    answer = job.tell(ev.NodeDeserted(1))
    assert job.life(1) is NodeLife.LOST
    assert job.only(ev.Abort, answer).procs == (job.proc(0), job.proc(1))
    assert "nothing listens there any more" in job.logged("node lost")[0]


def test_not_when_it_was_heard_again_meanwhile() -> None:
    job = Spread().trained()
    job.close(1)
    job.tell(ev.NodeHeard(1), ev.NodeDeserted(1))
    assert job.life(1) is NodeLife.LIVE
    job.close(1)
    assert job.life(1) is NodeLife.LIVE, "what was true of the last time says nothing of this"


def test_nor_while_it_has_nothing_that_anybody_needs() -> None:
    job = Spread(2, 1, replicas=0).trained()
    job.close(2)
    answer = job.tell(ev.NodeDeserted(2))
    assert job.life(2) is NodeLife.LIVE
    assert not job.found(ev.Abort, answer)


def test_a_node_that_is_heard_is_not_lost_when_somebody_parks() -> None:
    job = Spread().trained()
    job.wait(4, 0, 1, 2, moving=True)
    job.stop_at(0)
    assert job.life(1) is NodeLife.LIVE


def test_ranks_whose_node_was_not_heard_for_a_while_are_not_silent_themselves() -> None:
    """Its word comes first, and then theirs: in between nothing is held against them."""
    job = Spread().trained()
    job.wait(1, 0, 1, 2, moving=True)
    job.wait(2, 0, 2, moving=True)
    job.now += 0.9
    job.tell(ev.NodeHeard(1))
    job.now += 0.5
    assert not job.found(ev.Kill, job.tell(*map(ev.NodeHeard, range(3)), ev.Tick()))
    for _ in range(4):
        job.tell(ev.NodeHeard(1))
        job.wait(1, 0, 2, moving=True)
    assert {kill.proc for kill in job.found(ev.Kill)} == {job.proc(2), job.proc(3)}, "but for so long only"


def test_the_one_that_watches_blames_nobody_for_its_own_absence() -> None:
    job = Spread().trained()
    job.wait(2, 0, 1, 2, moving=True)
    job.now += 60
    job.tell(ev.Tick())
    job.stop_at(0)
    assert [job.life(node) for node in range(3)] == [NodeLife.LIVE] * 3
    job.now += 2
    job.tell(ev.Tick())
    assert job.life(1) is NodeLife.LIVE, "whoever was late asks for what is kept with a new time"


def test_the_connection_of_the_first_node_is_not_what_it_lives_by() -> None:
    job = Spread().trained()
    job.close(0)
    job.wait(10, 1, 2)
    job.stop_at(2)
    assert job.life(0) is NodeLife.LIVE


def test_whoever_does_not_say_what_it_keeps_is_lost() -> None:
    job = Spread(3, 1).trained()
    job.die(0, 6, 7)
    job.stop_at(version=6)
    job.keep(0, 1, 3)
    job.wait(3, 0, 1, 2, 3)
    assert job.life(2) is NodeLife.LIVE
    job.wait(1, 0, 1, 2, 3)
    assert job.life(2) is NodeLife.LOST
    assert "has not said what it keeps" in job.logged("node lost")[0]
    assert [job.member(rank).node for rank in (4, 5)] == [3, 3]


def test_the_leader_that_cannot_say_keeps_nothing() -> None:
    job = Spread().trained()
    job.tell(ev.Exited(job.proc(0), None, 9, (5, 6), (5, 6)))
    job.stop_at()
    job.keep(1, 2)
    job.wait(STILL_FACTOR * SUSPECT - 1, 0, 1, 2)
    assert job.status is Status.PARKING
    job.wait(3, 0, 1, 2)
    assert job.found(ev.SendPlan)
    assert job.life(0) is NodeLife.LIVE


def test_a_daemon_that_was_late_waits_once_more_for_what_is_kept() -> None:
    """The answers may be what it has not read yet."""
    job = Spread().trained()
    job.tell(ev.Tick())
    job.tell(ev.Exited(job.proc(0), None, 9, (5, 6), (5, 6)))
    job.stop_at()
    job.now += 60
    job.tell(ev.Tick())
    assert [job.life(node) for node in range(3)] == [NodeLife.LIVE] * 3
    assert job.found(ev.SendPlan, job.keep())


def test_a_spare_that_nobody_hears_hides_no_rank_that_stands_still() -> None:
    job = Spread(2, 1, replicas=0).trained()
    job.close(2)
    for rank in job.ranks():
        job.tell(ev.TagSeen(job.proc(rank), 6, 60 + (rank != 1)))
    answer = job.wait(STILL_FACTOR * SUSPECT + 2, 0, 1)
    assert job.only(ev.Kill, answer).proc == job.proc(1)


def test_a_rank_is_not_behind_while_another_cannot_be_seen() -> None:
    job = Spread().trained()
    for rank, progress in enumerate((61, 60, 59, 61)):
        job.tell(ev.TagSeen(job.proc(rank), 6, progress))
    job.wait(29, 0, 1, 2)
    assert not job.found(ev.Kill, job.wait(2, 0, 2)), "it may wait for rank 2"


# --- whom to believe ----------------------------------------------------------------------------------------


def test_whatever_a_lost_node_says_later_is_refused() -> None:
    job = Spread(num_standbys=1).trained().standbys_ready()
    dead = [job.proc(2), job.proc(3)]
    standby = next(standby.proc for standby in job.core.state.standbys if standby.node == 1)
    job.close(1)
    job.stop_at()
    before = job.core.state
    for late in (
        ev.NodeHeard(1),
        ev.NodeClosed(1, "again"),
        ev.Holdings(1, 1, (Kept(0, (6, 7), (5, 6)),)),
        ev.Parked(dead[0], 1, 7, True, (7,)),
        ev.Formed(dead[0], 1),
        ev.Leaving(dead[0], 1, 7),
        ev.Exited(dead[1], None, 9, (7,), (7,)),
        ev.Protected(dead[0], (((2,), "another"),)),
        ev.StandbyReady(standby, "built"),
        ev.Exited(standby, None, 9),
        ev.Heartbeat(dead[0]),
        ev.TagSeen(dead[0], 9, 9),
    ):
        assert job.tell(late) == [], late
        assert job.core.state == before, late


@pytest.mark.parametrize("generation", [0, 2])
def test_what_is_kept_of_another_generation_is_not_counted(generation: int) -> None:
    job = Spread().trained()
    job.close(1)
    job.stop_at()
    assert job.tell(ev.Holdings(0, generation, ())) == []
    assert job.core.state.holdings == ()


def test_a_second_answer_changes_nothing() -> None:
    job = Spread().trained()
    job.close(1)
    job.stop_at()
    job.keep(0)
    before = job.core.state
    assert job.tell(ev.Holdings(0, 1, ())) == []
    assert job.core.state == before


# --- return -------------------------------------------------------------------------------------------------


def test_a_node_that_returns_is_a_spare() -> None:
    job = Spread().trained().recovered(1)
    answer = job.tell(ev.NodeJoined("b", "", 2))
    assert job.life(1) is NodeLife.LOST
    assert job.core.state.nodes[3].spare
    assert [(launch.rank, launch.node) for launch in job.found(ev.Launch, answer)] == [(None, 3), (None, 3)]
    assert job.status is Status.RUNNING
    job.recovered(2, version=8)
    assert [job.member(rank).node for rank in job.ranks()] == [0, 0, 3, 3]


def test_one_that_returns_before_it_was_missed_has_lost_what_it_had() -> None:
    job = Spread(2, 0).trained()
    job.tell(ev.NodeJoined("b", "", 2))
    assert job.life(1) is NodeLife.LOST
    assert [job.member(rank).node for rank in job.ranks()] == [0, 0, 2, 2]
    job.stop_at()
    assert job.only(ev.SendPlan, job.keep()).plan.replaced == (2, 3)


def test_one_that_joins_while_others_park_is_not_waited_for() -> None:
    job = Spread().trained()
    job.close(1)
    job.stop_at()
    job.tell(ev.NodeJoined("d", "", 2))
    job.keep(0)
    assert job.found(ev.SendPlan, job.keep(2))


def test_nobody_takes_the_leaders_name() -> None:
    job = Spread().trained()
    before = job.core.state
    job.tell(ev.NodeJoined("a", "", 2))
    assert job.core.state == before


def test_replicas_that_were_missing_are_made_when_a_node_comes() -> None:
    job = Spread(2, 0, nodes=(NodeSpec("a", "", 4), NodeSpec("b", "", 2)), max_tries_per_step=1).trained()
    job.recovered(1)
    answer = job.tell(ev.NodeJoined("b", "", 2))
    assert job.status is Status.PARKING
    job.stop_at()
    sent = job.only(ev.SendPlan, job.keep())
    assert sent.plan.replaced == ()
    assert sent.keepers == ((2,),) * 4
    job.formed()
    assert job.core.state.too_few == ""
    assert job.core.state.restarts == 1, "nothing had failed"
    assert not job.found(ev.End, answer)
    assert job.tell(ev.NodeJoined("c", "", 2))
    assert job.status is Status.RUNNING, "nothing is missing any more"


def test_and_when_it_came_too_late_for_the_plan() -> None:
    job = Spread(2, 0, nodes=(NodeSpec("a", "", 4), NodeSpec("b", "", 2))).trained()
    job.close(1)
    job.stop_at()
    job.keep()
    assert job.status is Status.FORMING
    job.tell(ev.NodeJoined("b", "", 2))
    assert job.status is Status.FORMING
    job.form()
    assert job.status is Status.PARKING
    job.stop_at()
    assert job.found(ev.SendPlan, job.keep())[-1].keepers == ((2,),) * 4


# --- the start and the end ----------------------------------------------------------------------------------


def test_a_node_that_is_lost_before_all_have_protected_starts_the_world_anew_without_it() -> None:
    job = Spread()
    first = [job.proc(rank) for rank in job.ranks()]
    job.tell(ev.Protected(first[2], (((2,), "digest"),), WHY))  # it has no step to take before all have
    answer = job.close(1)
    assert job.status is Status.RESTARTING
    assert job.only(ev.Fence, answer).generation == 1
    assert {kill.proc for kill in job.found(ev.Kill, answer)} == {*first[:2], "p5", "p6"}
    answer = job.end_of(first[0], first[1], "p5", "p6")
    assert job.status is Status.STARTING
    assert [launch.node for launch in job.found(ev.Launch, answer) if launch.rank is not None] == [0, 0, 2, 2]
    settle = job.only(ev.Settle, answer)
    assert (settle.version, settle.sealed, settle.nodes) == (-1, -1, (0, 2))
    job.protected()


def test_without_room_for_a_world_that_starts_anew_the_job_ends() -> None:
    job = Spread(2, 0)
    job.close(1)
    job.end_of(*job.core.state.stopping_procs)
    assert "no room for 4 ranks: node a for 2" in job.only(ev.End).reason


def test_a_stop_does_not_wait_for_a_lost_node() -> None:
    job = Spread().trained()
    job.tell(ev.Stop("interrupted", True))
    job.end_of(job.proc(0), job.proc(1), *[p for p in job.core.state.stopping_procs if p in ("p5", "p6")])
    assert not job.found(ev.End)
    job.close(1)
    assert job.only(ev.End).code == 130


def test_nor_does_a_stop_whose_nodes_fall_silent() -> None:
    job = Spread().trained()
    job.tell(ev.Stop("interrupted", True))
    job.end_of("p1", "p2")
    job.wait(4, 0)
    assert job.only(ev.End).code == 130


def test_a_node_that_is_lost_after_training_is_a_failure_of_its_ranks() -> None:
    job = Spread().trained()
    job.leave()
    job.die(0, code=0)
    job.die(1, code=0)
    job.end_of(*[standby.proc for standby in job.core.state.standbys])
    assert not job.found(ev.End)
    job.close(1)
    assert not job.found(ev.End)
    job.tell(ev.NodeDeserted(1))
    end = job.only(ev.End)
    assert end.code == 1
    assert "ranks [2, 3] had not ended after training when node b is lost" in end.reason


def test_but_not_if_they_had_ended() -> None:
    job = Spread().trained()
    job.leave()
    for rank in job.ranks():
        job.die(rank, code=0)
    job.close(2)
    assert job.only(ev.End).code == 0


def test_a_node_that_fails_over_and_over_spends_the_budget() -> None:
    job = Spread(3, 2, max_restarts=1).trained().recovered(1)
    job.close(2)
    job.stop_at(0)
    assert job.core.state.outcome is not None
    assert "the restart budget of 1 is spent" in job.core.state.outcome[1]


def test_keepers_share_bytes_and_not_ranks() -> None:
    """The first stage has the embeddings; and what a later process of a rank says moves no keeper."""
    job = Spread(4, 0)
    sizes = [100, 100, 1, 1, 1, 1, 1, 1]
    for rank, size_bytes in enumerate(sizes):
        job.tell(ev.Protected(job.proc(rank), (((rank,), "digest"),), WHY, size_bytes=size_bytes))
    keepers = [job.member(rank).keepers for rank in job.ranks()]
    assert keepers[0] != keepers[1], keepers
    loads = [
        sum(size for size, kept in zip(sizes, keepers, strict=True) if kept == (node,)) for node in range(4)
    ]
    assert max(loads) == 100
    job.tell(ev.Protected(job.proc(1), (((1,), "digest"),), WHY, size_bytes=7))
    assert job.member(1).size_bytes == 100
