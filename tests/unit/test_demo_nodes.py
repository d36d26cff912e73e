"""The demo on several nodes: what is chosen, struck, judged and said."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from flashrec.cli.demo.injector import Strike
from flashrec.cli.demo.nodes import choice
from flashrec.cli.demo.nodes.choice import NodeOptions, choose_nodes
from flashrec.cli.demo.nodes.findings import NodeFindings, NodeReport, join, steps_again, unplanned
from flashrec.cli.demo.nodes.report import heading, node_table, struck, summary
from flashrec.cli.demo.nodes.schedule import (
    LONG_CUT,
    SHORT_CUT,
    SLOT_STEPS,
    NodeFault,
    Target,
    is_ready,
    make_faults,
    may_strike,
    target,
)
from flashrec.cli.demo.nodes.strike import NodeStrike
from flashrec.cli.demo.schedule import PLACES
from flashrec.cli.demo.settings import NODE_FAULTS, PARALLEL, Settings, choose
from flashrec.cli.demo.timing import StepLine
from flashrec.cli.demo.verdict import Verdict
from flashrec.errors import UsageError

MS = 1_000_000
NOT_GIVEN: dict[str, Any] = {
    "steps": None,
    "ranks": None,
    "num_faults": None,
    "seed": 0,
    "standby": None,
    "parallel": None,
    "fault": None,
}


@pytest.fixture(autouse=True)
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "why_no_namespaces", lambda: "")


TWO = NodeOptions(nodes=2)


def chosen(nodes: NodeOptions = TWO, **options: Any) -> Settings:
    return choose_nodes(nodes, **{**NOT_GIVEN, **options})


# --- what is meant ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("fault", NODE_FAULTS)
def test_every_combination_has_a_schedule_that_fits(parallel: str, fault: str) -> None:
    settings = chosen(parallel=parallel, fault=fault)
    faults = make_faults(settings)
    assert len(faults) == settings.num_faults * (1 + (fault == "node-during-recovery"))
    assert [one.index for one in faults] == list(range(len(faults)))
    assert max(one.latest for one in faults) + SLOT_STEPS - 8 <= settings.steps
    assert settings.spare_nodes >= 1
    assert 0 < settings.replicas < settings.nodes + settings.spare_nodes


def test_places_are_dealt_and_ranks_struck_on_both_kinds_of_node() -> None:
    faults = make_faults(chosen(fault="rank", num_faults=6, steps=200))
    assert {fault.place for fault in faults} == set(PLACES)
    assert [fault.on_leader for fault in faults] == [False, True] * 3
    steps = [fault.step for fault in faults]
    assert steps == sorted(steps)
    assert make_faults(chosen(seed=1)) == make_faults(chosen(seed=1)) != make_faults(chosen(seed=2))


def test_a_link_is_cut_for_a_short_time_and_until_the_node_is_given_up() -> None:
    settings = chosen(fault="link")
    assert settings.namespaces
    assert [fault.cut for fault in make_faults(settings)] == [SHORT_CUT, LONG_CUT]


def test_too_many_faults_are_refused_with_the_steps_they_need() -> None:
    with pytest.raises(UsageError, match="take --steps 38 or more"):
        make_faults(chosen(num_faults=2, steps=30))
    assert len(make_faults(chosen(num_faults=2, steps=38))) == 2


@pytest.mark.parametrize(
    ("nodes", "options", "words"),
    [
        (NodeOptions(nodes=1), {}, "the first is the leader's"),
        (NodeOptions(nodes=3), {}, "on 2 nodes or on 4"),
        (NodeOptions(nodes=2), {"fault": "all-ranks"}, "leave --nodes out"),
        (NodeOptions(nodes=2), {"ranks": 8}, "leave --ranks out"),
        (NodeOptions(nodes=2, spare_nodes=0), {"fault": "node"}, "take --spare-nodes 1"),
        (NodeOptions(nodes=2, spare_nodes=1), {"fault": "node-during-recovery"}, "take --spare-nodes 2"),
        (NodeOptions(nodes=2, replicas=1), {"fault": "node-during-recovery"}, "Take --replicas 2"),
        (NodeOptions(nodes=2, replicas=1), {"fault": "replica-corrupt"}, "Take --replicas 2"),
        (NodeOptions(nodes=2, replicas=0), {"fault": "node"}, "nowhere else"),
        (NodeOptions(nodes=2, replicas=3), {}, "3 replicas need 4 nodes, and there are 3"),
        (NodeOptions(nodes=2), {"parallel": "fsdp", "standby": "built"}, "take --standby forked"),
    ],
)
def test_what_does_not_go_together_is_refused(
    nodes: NodeOptions, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        chosen(nodes, **options)


def test_without_root_what_needs_namespaces_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "why_no_namespaces", lambda: "network namespaces need root")
    for nodes, fault in ((NodeOptions(nodes=2), "link"), (NodeOptions(nodes=2, namespaces=True), "node")):
        with pytest.raises(UsageError, match="need root"):
            chosen(nodes, fault=fault)
    assert not chosen(fault="node").namespaces


def test_faults_of_nodes_need_nodes() -> None:
    with pytest.raises(UsageError, match="say --nodes 2"):
        choose(**{**NOT_GIVEN, "fault": "link"})
    assert not NodeOptions().given
    assert NodeOptions(namespaces=True).given


# --- whom it strikes --------------------------------------------------------------------------------------


def job(**nodes: dict[str, Any]) -> dict[str, Any]:
    """A job's status: each node by name, with what differs from a live one without ranks."""
    all_nodes = [
        {"name": name, "life": "live", "ranks": [], "unheard": "", **fields} for name, fields in nodes.items()
    ]
    ranks = [
        {"rank": rank, "node": node["name"], "kept_on": ["spare"]}
        for node in all_nodes
        for rank in node["ranks"]
    ]
    return {
        "status": "running",
        "nodes": all_nodes,
        "ranks": sorted(ranks, key=lambda one: one["rank"]),
        "standbys": [],
    }


FAULT = NodeFault(index=0, kind="node", step=6, place="forward", pick=0)


def test_the_leaders_node_is_never_lost() -> None:
    state = job(a={"ranks": [0, 1]}, b={"ranks": [2, 3]}, spare={})
    for pick in range(12):
        found = target(replace(FAULT, pick=pick), state)
        assert found is not None
        assert found.node == "b"
        assert found.watched in found.ranks == (2, 3)
        assert found.kept_on == ("spare",)
    assert target(replace(FAULT, kind="rank", on_leader=True, pick=1), state) == Target(
        node="a", watched=1, ranks=(1,), kept_on=("spare",)
    )


def test_a_replica_is_corrupted_where_the_replacement_looks_first() -> None:
    state = job(a={"ranks": [0, 1]}, b={"ranks": [2, 3]}, spare={})
    state["ranks"][2]["kept_on"] = ["a", "spare"]
    found = target(FAULT, state)
    assert found is not None
    assert found.kept_on == ("spare", "a")


def test_nobody_is_struck_while_only_the_leader_has_ranks() -> None:
    state = job(a={"ranks": [0, 1]}, b={"life": "lost", "ranks": [2, 3]})
    assert target(FAULT, state) is None


def test_a_node_is_lost_only_where_its_ranks_have_room() -> None:
    state = job(a={"ranks": [0, 1]}, b={"ranks": [2, 3]}, spare={})
    assert may_strike(FAULT, state)
    for why in ({"life": "lost"}, {"unheard": "it is silent"}, {"ranks": [4]}):
        assert not may_strike(FAULT, job(a={"ranks": [0, 1]}, b={"ranks": [2, 3]}, spare=why))
        assert may_strike(
            replace(FAULT, kind="rank"), job(a={"ranks": [0, 1]}, b={"ranks": [2, 3]}, spare=why)
        )
    assert not may_strike(FAULT, {**state, "status": "forming"})


def test_it_waits_for_standbys_where_the_ranks_will_go() -> None:
    state = job(a={"ranks": [0, 1]}, b={"ranks": [2, 3]}, spare={})
    found = target(FAULT, state)
    assert found is not None

    def standing(*where: str, depth: str = "forked") -> dict[str, Any]:
        return {**state, "standbys": [{"node": node, "depth": depth} for node in where]}

    assert not is_ready(FAULT, found, standing("spare"))
    assert not is_ready(FAULT, found, standing("a", "b"))
    assert not is_ready(FAULT, found, standing("spare", "spare", depth="starting"))
    assert is_ready(FAULT, found, standing("spare", "spare"))
    assert is_ready(replace(FAULT, kind="rank"), found, standing("b"))


# --- what became of it ------------------------------------------------------------------------------------


def strike(index: int = 0, kind: str = "node", at_ms: int = 1000, **changes: Any) -> NodeStrike:
    ranks = tuple(
        Strike(
            index=index,
            rank=rank,
            pid=rank,
            signal_ns=at_ms * MS,
            died_ns=at_ms * MS,
            place="apply",
            step=7,
            committed=7,
        )
        for rank in (3, 2)
    )
    fields: dict[str, Any] = {"num_files": 24, "num_processes": 6, **changes}
    return NodeStrike(
        index=index, kind=kind, node="b", signal_ns=at_ms * MS, died_ns=at_ms * MS, ranks=ranks, **fields
    )


def recovery(at_ms: int, *ranks: int, version: int = 7, kind: str = "node lost") -> dict[str, Any]:
    return {
        "began_ns": at_ms * MS,
        "faults": [{"rank": rank, "kind": kind, "at_ns": at_ms * MS, "place": "apply"} for rank in ranks],
        "version": version,
        "complete": True,
        "marks": {"planned": (at_ms + 10) * MS, "formed": (at_ms + 50) * MS, "redone": (at_ms + 90) * MS},
    }


MOVED = [(1000 * MS, {2: "b", 3: "b"}), (1200 * MS, {2: "c", 3: "c"})]


def test_a_loss_is_joined_with_its_recovery() -> None:
    (report,) = join([FAULT], [strike()], [recovery(500, 0), recovery(1020, 2, 3)], MOVED)
    assert report.num_seen == 2
    assert report.timeline == {"detected": 20.0, "planned": 30.0, "formed": 70.0, "redone": 110.0}
    assert report.recovered_ms == 110.0
    assert report.moved == {2: "c", 3: "c"}
    assert report.outcome == "2 3 → c"
    assert report.complaints() == []


def test_what_is_lacking_is_named() -> None:
    def words(*recoveries: dict[str, Any], homes: Any = MOVED, **changes: Any) -> str:
        struck_ = [strike(**changes)]
        (report,) = join([replace(FAULT, kind=struck_[0].kind)], struck_, recoveries, homes)
        return "; ".join(report.complaints())

    whole = recovery(1020, 2, 3)
    assert words(whole) == ""
    assert "of whom the leader has seen 1 go" in words(recovery(1020, 2))
    assert "was not recovered from" in words({**whole, "complete": False})
    assert "was not recovered from" in words()
    assert "no memory" in words(whole, num_files=0)
    assert "left ranks 3 on b" in words(whole, homes=[(1200 * MS, {2: "c", 3: "b"})])
    assert "no replica to corrupt" in words(whole, kind="replica-corrupt")
    assert words(whole, kind="replica-corrupt", detail="version 7 of rank 3") == ""
    assert "never healed" in words(kind="link")
    assert words(kind="link", healed_ns=1200 * MS) == ""
    assert NodeReport(fault=FAULT).complaints() == ["never fired"]


def test_a_recovery_of_before_is_not_taken_for_ours() -> None:
    (report,) = join([FAULT], [strike()], [recovery(900, 2, 3)], [])
    assert report.num_seen == 0
    assert report.version is None


def test_a_cut_link_may_cost_nothing_a_parking_or_the_node() -> None:
    fault, cut = replace(FAULT, kind="link"), strike(kind="link", healed_ns=3000 * MS, num_files=0)
    (nothing,) = join([fault], [cut], [], [])
    assert (nothing.outcome, nothing.version) == ("nobody lost; all waited", None)
    (parked,) = join([fault], [cut], [recovery(1500)], [(1600 * MS, {2: "b", 3: "b"})])
    assert (parked.outcome, parked.version, parked.complete) == ("formed again", 7, True)
    (moved,) = join([fault], [cut], [recovery(1500, 2, 3)], [(1600 * MS, {2: "c", 3: "c"})])
    assert moved.outcome == "2 3 → c"
    other = replace(fault, index=1)
    first, second = join(
        [fault, other], [cut, strike(index=1, kind="link", at_ms=4000)], [recovery(4100)], []
    )
    assert first.version is None
    assert second.version == 7
    given_up = join(
        [fault, other], [cut, strike(index=1, kind="link", at_ms=4000)], [recovery(4100, 2, 3)], []
    )
    assert [one.num_seen for one in given_up] == [0, 2]


def test_losses_that_nobody_planned_are_told() -> None:
    found = unplanned([strike()], [recovery(1020, 2, 3), recovery(2000, 0, kind="SIGSEGV")])
    assert found == ["rank 0, SIGSEGV, in apply of step 7"]


def line(rank: int, step: int, at_ms: int) -> StepLine:
    return StepLine(step=step, rank=rank, ms=1.0, ended_ns=at_ms * MS, attempt=0)


def test_steps_done_again_count_by_logs_and_by_the_tags_of_the_lost() -> None:
    reports = join([FAULT], [strike()], [recovery(1020, 2, 3, version=6)], [])
    assert steps_again([], reports) == {0: {6}}  # the lost had committed 7 steps, by their tags
    lines = [line(0, 7, 900), line(0, 7, 1100)]
    assert steps_again(lines, reports) == {0: {6, 7}}


def findings(**changes: Any) -> NodeFindings:
    fields: dict[str, Any] = {
        "settings": chosen(parallel="fsdp"),
        "reports": join([FAULT], [strike()], [recovery(1020, 2, 3)], MOVED),
        "again": {0: {7}},
        "regime": "sealed",
        "why_sealed": "'w' is held by rank 3 alone",
        "verdict": Verdict(
            weights_identical=True,
            optimizer_identical=True,
            losses_identical=True,
            first_difference=None,
            num_tensors=1,
            num_losses=1,
        ),
        "failure": None,
        **changes,
    }
    return NodeFindings(**fields)


def test_at_most_one_step_again_and_none_in_the_live_regime() -> None:
    assert findings().passed
    assert findings(regime="live", again={0: set()}).passed
    for changes in (
        {"again": {0: {6, 7}}},
        {"regime": "live"},
        {"again": {-1: {7}}},
        {"failure": "no source"},
        {"verdict": replace(findings().verdict, losses_identical=False)},
        {"reports": [NodeReport(fault=FAULT)]},
    ):
        assert not findings(**changes).passed


def test_processes_that_outlive_their_daemon_must_end() -> None:
    ended = findings(orphans=[(1000 * MS, [5, 6]), (1500 * MS, [6]), (3000 * MS, [])])
    assert ended.passed
    assert ended.orphaned_ms == 2000
    left = findings(orphans=[(1000 * MS, [5, 6])])
    assert left.orphaned_ms is None
    assert "2 processes outlived the daemon" in "; ".join(left.complaints())
    assert findings().orphaned_ms is None


# --- in words ---------------------------------------------------------------------------------------------


def shown(*parts: Any) -> str:
    console = Console(file=io.StringIO(), width=130, highlight=False)
    for part in parts:
        console.print(part)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return " ".join(text.split())


def test_the_table_and_the_verdict() -> None:
    found = findings()
    text = shown(node_table(found.reports, 130, found.again), summary(found))
    assert "1 node b 2 3 apply 7 20 30 70 110 2 3 → c 7 step 7" in text
    assert "fsdp on 2 nodes survived 1 fault (node): same bits" in text
    lost = findings(reports=[NodeReport(fault=FAULT)])
    text = shown(node_table(lost.reports, 130, {}), summary(lost))
    assert "never fired" in text
    assert "survived" not in text


def test_every_kind_of_strike_is_told_and_the_leader_exempt() -> None:
    words = struck(strike())
    assert "b (ranks 2 3) lost, with rank 3 in apply of step 7: memory of 24 files deleted" in words
    assert "6 processes killed" in words
    assert struck(strike(kind="rank")) == "rank 3 in apply of step 7 killed, on b"
    assert "ranks 2 3 live" in struck(strike(kind="daemon"))
    assert "its link cut" in struck(strike(kind="link"))
    assert "version 6 of rank 3" in struck(strike(kind="replica-corrupt", detail="version 6 of rank 3"))
    for fault in NODE_FAULTS:
        assert "The leader's node is not struck" in shown(heading(chosen(fault=fault)))


def test_a_strike_survives_the_way_from_the_process_that_struck() -> None:
    import json

    found = strike(detail="x", healed_ns=5)
    assert NodeStrike.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_what_a_program_gets() -> None:
    facts = findings().to_json()
    assert facts["passed"]
    assert facts["most_committed_steps_again"] == 1
    (fault,) = facts["faults"]
    assert fault["ranks"] == [2, 3]
    assert fault["moved"] == {"2": "c", "3": "c"}
    assert fault["committed_steps_again"] == 1
    assert fault["cut_ms"] is None
