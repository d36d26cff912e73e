"""The folded world decides what the whole one does: the same, at the same instants, for the same versions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.sim.failures import FailureScenario, Fault, Layout, RecoveryCosts, Scope
from flashrecd.simulate.ranks import Decision, Recovery
from flashrecd.simulate.run import FoldedRun
from flashrecd.simulate.whole import play_whole

STEP_S = 2.0


def scenario(
    *faults: Fault, nodes: int = 6, per_node: int = 2, per_rack: int = 2, **facts: object
) -> FailureScenario:
    base = FailureScenario(
        layout=Layout(nodes * per_node, per_node, per_rack),
        step_s=STEP_S,
        state_bytes=2e7,
        duration_s=90.0,
        trace=faults,
        spare_nodes=4,
        repair_s=1e6,
        data_parallel=2,
        restart_s=20.0,
        save_s=1.0,
        disk_interval_s=20.0,
    )
    return replace(base, **facts)  # type: ignore[arg-type]


def told(decisions: list[Decision]) -> list[tuple[float, str, int | None]]:
    """Each thing that was decided at an instant, once: a folded world says once what a whole one says of every rank.
    The step that a lost rank's tag showed is its own."""
    seen = sorted({(round(d.at_s, 9), d.event, d.version) for d in decisions}, key=str)
    return sorted(seen, key=lambda one: (one[0], one[1]))


def rounded(recoveries: list[Recovery]) -> list[tuple[float, float, int, int, float]]:
    return [
        (round(r.began_s, 9), round(r.running_s, 9), r.held, r.resumed, round(r.keep_s, 9))
        for r in recoveries
    ]


def assert_equal(case: FailureScenario, *, is_exact: bool = True) -> FoldedRun:
    """`is_exact` False: where a replica is made anew may be another one of several nodes that are as good, and if a
    second loss strikes just then, what has to be pulled may lie elsewhere. What is decided is the same, and when,
    nearly."""
    whole = play_whole(case)
    folded = FoldedRun(case)
    folded.play(case.faults(), None)
    if whole.ended:
        assert folded.fatal >= 1
        upto = whole.now
        ours = [d for d in folded.decisions if d.at_s <= upto]
        assert told(ours) == told(whole.decisions)
        return folded
    assert folded.fatal == 0
    if not is_exact:
        assert [r[2:4] for r in rounded(folded.recoveries)] == [r[2:4] for r in rounded(whole.recoveries)]
        assert [d[1:] for d in told(folded.decisions)] == [d[1:] for d in told(whole.decisions)]
        for one, other in zip(folded.recoveries, whole.recoveries, strict=True):
            assert one.running_s == pytest.approx(other.running_s, abs=0.1)
        return folded
    assert told(folded.decisions) == told(whole.decisions)
    assert rounded(folded.recoveries) == rounded(whole.recoveries)
    assert folded.pulled_bytes == pytest.approx(whole.traffic.pulled_bytes)
    assert folded.again_bytes == pytest.approx(whole.traffic.replicated_bytes)
    return folded


CASES = {
    "a rank": [Fault(30.3, Scope.RANK, 5)],
    "a rank of the leader's node": [Fault(30.3, Scope.RANK, 0)],
    "a rank before its seal": [Fault(30.1205, Scope.RANK, 5)],
    "a rank after the gate": [Fault(32.08, Scope.RANK, 5)],
    "a node": [Fault(30.9, Scope.NODE, 3)],
    "a silent node": [Fault(31.0, Scope.NODE, 3, True)],
    "two ranks of a node, one after the other": [Fault(30.3, Scope.RANK, 4), Fault(30.5, Scope.RANK, 5)],
    "two ranks far apart": [Fault(30.3, Scope.RANK, 4), Fault(60.1, Scope.RANK, 9)],
    "a node during a rank's recovery": [Fault(30.3, Scope.RANK, 4), Fault(31.9, Scope.NODE, 5)],
    "a silent node during a rank's recovery": [Fault(30.3, Scope.RANK, 4), Fault(30.8, Scope.NODE, 5, True)],
    "a rack": [Fault(40.7, Scope.RACK, 1)],
    "a silent rack": [Fault(40.7, Scope.RACK, 2, True)],
    "the same seat again": [Fault(30.3, Scope.NODE, 2), Fault(70.0, Scope.NODE, 2)],
    "the leader": [Fault(50.0, Scope.NODE, 0)],
    "a rank before the news that a node and its keeper are lost": [
        Fault(38.178, Scope.NODE, 3),
        Fault(39.594, Scope.NODE, 1),
        Fault(39.594, Scope.RANK, 0),
    ],
    "a node and its keeper at once": [Fault(50.0, Scope.NODE, 1), Fault(50.05, Scope.NODE, 3)],
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_folded_as_whole(name: str, replicas: int) -> None:
    assert_equal(scenario(*CASES[name], replicas=replicas))


@pytest.mark.parametrize("name", [n for n in CASES if "keeper" not in n])
def test_folded_as_whole_where_every_byte_is_on_two_nodes(name: str) -> None:
    assert_equal(scenario(*CASES[name], is_sealed=False))


@pytest.mark.parametrize("name", list(CASES)[::2])
def test_folded_as_whole_where_every_third_version_is_sealed(name: str) -> None:
    assert_equal(scenario(*CASES[name], seal_every=3))


@settings(deadline=None, max_examples=10, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.floats(10, 80).map(lambda t: round(t, 3)),
            st.sampled_from([Scope.RANK, Scope.NODE]),
            st.integers(0, 5),
            st.booleans(),
        ),
        max_size=3,
    ),
    st.integers(1, 2),
)
def test_folded_as_whole_for_any_faults(faults: list[tuple[float, Scope, int, bool]], replicas: int) -> None:
    struck = [
        Fault(at_s, scope, 2 * index if scope is Scope.RANK else index, silent and scope is Scope.NODE)
        for at_s, scope, index, silent in faults
    ]
    assert_equal(scenario(*struck, replicas=replicas), is_exact=replicas == 1)


def test_a_slow_node_costs_bytes_by_all_of_its_ranks() -> None:
    run = assert_equal(scenario(Fault(30.9, Scope.NODE, 3), costs=RecoveryCosts(pull_bytes_per_s=1e6)))
    assert run.recoveries[0].running_s - run.recoveries[0].began_s > 2 * 2e7 / 1e6


def test_what_would_differ_is_seen() -> None:
    """The comparison is not blind: another cost in one of the two worlds makes it fail."""
    case = scenario(Fault(30.3, Scope.RANK, 5))
    whole = play_whole(replace(case, costs=RecoveryCosts(rehearse_s=3.0)))
    folded = FoldedRun(case)
    folded.play(case.faults(), None)
    assert told(folded.decisions) != told(whole.decisions)
