"""Nodes that fall silent, are lost, and return.

A node whose connection is closed, or that has not been heard for `suspect_after_s`, is *unheard*. That is reported, and
no more, while training goes on: its daemon may be down and its ranks step. It is *lost* once somebody waits for it: a
rank has parked, or a job starts or ends and needs its word, or the ranks of all other nodes stand still for longer than
any of their steps took. A node of which nothing listens any more is *deserted*, and lost as soon as it matters: its
daemon and its shard server outlive each other, and without both nobody may expect anything of it. Then its ranks are
replaced elsewhere, and whatever it kept is gone. To be lost is for ever: what comes back is another node, that happens
to have the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flashrecd.core import adoption
from flashrecd.core import events as ev
from flashrecd.core.detection import STILL_FACTOR
from flashrecd.core.nodes import LEADER, watch_of
from flashrecd.core.state import ENDING, GONE, NodeLife, NodeStatus, RankStatus, Status

if TYPE_CHECKING:
    from flashrecd.core.job import Core

MAY_STEP = (RankStatus.LIVE, RankStatus.FORMING, RankStatus.LEFT, RankStatus.AWAITED)


def heard(core: Core, event: ev.NodeHeard, now: float) -> None:
    if not core.is_live(event.node):
        return
    if _is_hushed(core, event.node, now):  # what its ranks have said meanwhile may not have come through
        core.detector.forgive([m.proc for m in core.state.members if m.node == event.node], now)
    core.detector.heard(watch_of(event.node), now)
    if core.state.nodes[event.node].unheard:
        core._change_node(event.node, unheard="", is_deserted=False)
        core._log("node heard", f"node {core.node_name(event.node)} is heard again")


def closed(core: Core, event: ev.NodeClosed, now: float) -> None:
    if core.is_live(event.node) and event.node != LEADER:
        _unheard(core, event.node, event.why)
        judge(core, now)


def deserted(core: Core, event: ev.NodeDeserted, now: float) -> None:
    if core.is_live(event.node) and core.state.nodes[event.node].unheard:
        why = f"{core.state.nodes[event.node].unheard}, and nothing listens there any more"
        core._change_node(event.node, unheard=why, is_deserted=True)
        judge(core, now)


def told(core: Core, event: ev.Holdings, now: float) -> None:
    """What it keeps of a generation that is over. Of another one, or from a lost node: too late."""
    if core.state.status is not Status.PARKING or event.generation != core.state.generation:
        return
    if core._tells(event):
        core._plan_if_parked()


def joined(core: Core, event: ev.NodeJoined, now: float) -> None:
    if core.state.status in ENDING:
        return
    same = next((n for n in core.live_nodes() if event.name and core.node_name(n) == event.name), None)
    if same == LEADER:
        core._log("node refused", f"node {event.name} leads this job; no other may have its name")
        return
    node = len(core.state.nodes)
    new = NodeStatus(event.name, event.domain, event.num_slots, spare=True)
    core._set(nodes=(*core.state.nodes, new))
    core.detector.heard(watch_of(node), now)
    if core.state.status is Status.PARKING:  # it was not asked, and has nothing
        core._set(holdings=(*core.state.holdings, (node, ())))
    core._log("node joined", f"node {core.node_name(node)} is a spare")
    if same is not None:
        lose(core, {same: "it has come back as another incarnation"}, now)
    if core.state.status in (Status.STARTING, Status.RUNNING, Status.PARKING, Status.FORMING):
        core._refill_standbys((node,))
    regroup(core)


def regroup(core: Core) -> None:
    """While fewer replicas are kept than were asked for a second loss may be the last: the next one that happens
    would be too late to make them."""
    if core.state.status is not Status.RUNNING or not core.state.too_few:
        return
    if sum(map(len, core._placed())) > sum(len(m.keepers) for m in core.state.members):
        core._set(is_regrouping=True)
        core._park_all("a node has come that can keep replicas that were missing")


def fenced(core: Core, event: ev.NodeFenced, now: float) -> None:
    if not 0 < event.node < len(core.state.nodes) or core.state.nodes[event.node].is_proven:
        return
    core._change_node(event.node, is_proven=True)
    core._log("node fenced", f"nothing runs any more on node {core.node_name(event.node)}, it is said")
    if core.is_live(event.node):
        lose(core, {event.node: "it is said to be gone"}, now)
    core._plan_if_parked()
    core._start_if_all_gone()


def tick(core: Core, now: float) -> None:
    late = core.detector.ticked(now)
    by = core.state.holdings_by
    if late and by is not None:
        core._set(holdings_by=now + core.config.suspect_after_s)
    elif by is not None and now > by and core.state.status is Status.PARKING:
        _demand(core, now - by, now)
    judge(core, now)


def _demand(core: Core, late_s: float, now: float) -> None:
    """The time to say what they keep is over. That of the first node is longer: it cannot be given up, and to go on
    without what it keeps may be to go on without anything."""
    suspect_after_s = core.config.suspect_after_s
    untold = core._untold()
    if LEADER in untold and late_s > (STILL_FACTOR - 1) * suspect_after_s:
        core._log(
            "replicas unknown", f"node {core.node_name(LEADER)} has not said what it keeps; nothing, then"
        )
        core._set(holdings=(*core.state.holdings, (LEADER, ())))
    why = f"it has not said what it keeps for {suspect_after_s + late_s:.1f} s"
    lose(core, {node: why for node in untold if node != LEADER}, now)
    core._plan_if_parked()


def judge(core: Core, now: float) -> None:
    """Who has fallen silent, and who of the silent is lost."""
    for node in core.live_nodes():
        silence = core.detector.silence(watch_of(node), now)
        if node != LEADER and silence > core.config.suspect_after_s:
            _unheard(core, node, f"it has not been heard for {silence:.1f} s")
    nodes = core.state.nodes
    lose(
        core,
        {n: nodes[n].unheard for n in core.live_nodes() if nodes[n].unheard and _matters(core, n, now)},
        now,
    )


def _unheard(core: Core, node: int, why: str) -> None:
    if not core.state.nodes[node].unheard:
        core._change_node(node, unheard=why)
        core._log("node unheard", f"node {core.node_name(node)}: {why}; its ranks may train on")


def _matters(core: Core, node: int, now: float) -> bool:
    state = core.state
    if state.status in (Status.ADOPTING, Status.ENDED):
        return False
    if state.status is Status.PARKING:
        return True  # some of what the plan needs to know is there
    has_ranks = any(m.node == node and m.status not in GONE for m in state.members)
    awaited = has_ranks or node in dict(state.doomed_at).values()
    if state.status is Status.CLOSING and has_ranks:
        # They need nobody any more; if the link comes back in time it brings their exit codes.
        return state.nodes[node].is_deserted or state.deadline is None
    if state.status is Status.CLOSING:
        return awaited or any(standby.node == node for standby in state.standbys)
    keeps = any(node in member.keepers for member in state.members)
    if state.status is Status.RUNNING:
        if not (awaited or keeps):
            return False
        return state.nodes[node].is_deserted or core.detector.stands_still(_elsewhere(core), now)
    return awaited or keeps


def hushed(core: Core, now: float) -> set[int]:
    """The nodes of whose ranks nothing may be known: heartbeats that do not come say nothing about the rank."""
    return {node for node in core.live_nodes() if core.are_several and _is_hushed(core, node, now)}


def _is_hushed(core: Core, node: int, now: float) -> bool:
    silence = core.detector.silence(watch_of(node), now)
    return bool(core.state.nodes[node].unheard) or (
        node != LEADER and silence > core.config.suspect_after_s / 2
    )


def _elsewhere(core: Core) -> list[str]:
    """The ranks of nodes that are heard."""
    nodes = core.state.nodes
    return [m.proc for m in core.state.members if m.status not in GONE and not nodes[m.node].unheard]


def lose(core: Core, lost: Mapping[int, str], now: float) -> None:
    """These nodes are lost, each for its reason; all at once, so that no rank of one is moved to another."""
    if not lost:
        return
    for node, why in lost.items():
        core._change_node(node, life=NodeLife.LOST, unheard=why, spare=False)
        core._log("node lost", f"node {core.node_name(node)}: {why}")
        core.detector.forget(watch_of(node))
    kept_replicas = any(node in member.keepers for member in core.state.members for node in lost)
    was = _bury(core, lost)
    names = ", ".join(core.node_name(node) for node in lost)
    why = f"node {names} is lost ({'; '.join(lost.values())})"
    status = core.state.status
    for proc, node in core.state.doomed_at:
        if node in lost:
            core._gone(proc)
    if status is Status.CLOSING:
        if was and core.state.outcome is None:
            core._set(outcome=(1, f"ranks {sorted(was)} had not ended after training when {why}"))
        core._end_if_closed()
    elif status is Status.ADOPTING:
        adoption.settle(core, now)
    elif status in (Status.STARTING, Status.RUNNING, Status.PARKING, Status.FORMING):
        if was:
            _replace(core, was, why)
        elif kept_replicas and status is not Status.PARKING:
            if core._charge(why):
                core._park_all(f"{why}: the replicas it kept are made again elsewhere")
        else:
            core._plan_if_parked()


def _bury(core: Core, lost: Mapping[int, str]) -> dict[int, RankStatus]:
    """Everything on these nodes is gone. The ranks that were alive, and what they did last."""
    was: dict[int, RankStatus] = {}
    # Before every rank has protected its state there is no step to be taken.
    stepped = core.state.status is not Status.STARTING
    unproven = list(core.state.unproven)
    members = list(core.state.members)
    for rank, member in enumerate(members):
        if member.node not in lost:
            continue
        status = member.status
        if status not in GONE:
            was[rank], status = status, RankStatus.DEAD
            core.detector.forget(member.proc)
            if stepped and member.status in MAY_STEP:
                unproven.append((rank, member.node))
        members[rank] = replace(member, status=status)
    for standby in core.state.standbys:
        if standby.node in lost:
            core.detector.forget(standby.proc)
    core._set(
        members=tuple(members),
        unproven=tuple(unproven),
        standbys=tuple(s for s in core.state.standbys if s.node not in lost),
        holdings=tuple(told for told in core.state.holdings if told[0] not in lost),
    )
    return was


def _replace(core: Core, was: Mapping[int, RankStatus], why: str) -> None:
    ranks = sorted(was)
    for rank in ranks:
        core._log("rank lost", why, rank)
    if not core.state.first_failure:
        core._set(first_failure=f"ranks {ranks} failed first: {why}")
    again = not all(core._charged_before(status) for status in was.values())
    if not core._charge(why, again=again):
        return
    if core.state.status is Status.STARTING or not core._anything_to_lose():
        core._start_over(f"{why} before every rank had protected its state", blame=why)
        return
    core._park_all(why)
    for rank in ranks:
        if core.state.status is Status.PARKING:  # there was room for those before
            core._replace(rank)
    core._plan_if_parked()
