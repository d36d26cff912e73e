"""What nodes are told to let go of, and when."""

from flashrecd.core.state import JobState, Kept
from flashrecd.jobnodes import JobNodes


def test_replicas_that_others_are_to_keep_are_named_once_and_only_those() -> None:
    nodes = JobNodes([])
    state = JobState(holdings=((0, (Kept(1, (4,), (4,)),)), (1, (Kept(0, (4,), ()), Kept(2, (4,), ())))))
    nodes.planned(state, ((2,), (0,), (1,)))
    assert nodes.take_forgotten() == [(1, (0,))]
    assert nodes.take_forgotten() == []
    nodes.planned(state, ((2,), (0,), (1,)))
    nodes.planned(state, ((1,), (0,), (1,)))  # before a gate has passed: the newest plan counts
    assert nodes.take_forgotten() == []
