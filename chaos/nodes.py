"""Losses of nodes under every parallelism: what `tests/chaos/test_nodes.py` takes a part of, and the matrix all.

Four ranks on two nodes, the leader's and another; ranks 2 and 3 are on the other, wherever that comes to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chaos.faults.base import Fault
from chaos.faults.corrupt_replica import CorruptReplica
from chaos.faults.cut_link import CutLink
from chaos.faults.kill_member_daemon import KillMemberDaemon
from chaos.faults.kill_with import KillWith
from chaos.faults.lose_node import LoseNode
from chaos.faults.lose_nodes_in_turn import LoseNodesInTurn
from chaos.parallel import KINDS, Kind
from chaos.recipe import Recipe
from chaos.scenario import Scenario
from flashrec.cli.demo.nodes.hosts import why_no_namespaces

WORLD_SIZE = 4
DEADLINE_S = 300.0
LIVE: Kind = {"parallel": "ddp"}
"""Plain DDP, whose state lives in the ranks; `KINDS` has it sealed."""
PLACES = ("forward", "backward", "finish", "sealed", "seal", "vote", "voted", "apply", "tail", "between")
LIVE_PLACES = tuple(place for place in PLACES if place not in ("finish", "sealed"))
STAGES = ("build", "install", "pull", "pulled", "form", "formed")
SHORT_CUT_S = 2.0
GAP = 3  # steps between two faults
HEALED_STEPS = (
    60  # after a cut, for the node to be heard again: one that is gone when ranks end fails the job
)


def scenario(
    kind: Kind,
    faults: Sequence[Fault],
    *,
    spare_nodes: int = 1,
    replicas: int = 1,
    namespaces: bool = False,
    steps_after: int = GAP,
) -> Scenario:
    steps = max(getattr(fault, "step", 0) for fault in faults) + steps_after
    return Scenario(
        recipe=Recipe(steps=steps, standby="forked", **kind),
        faults=faults,
        world_size=WORLD_SIZE,
        deadline_s=DEADLINE_S,
        nodes=2,
        spare_nodes=spare_nodes,
        replicas=replicas,
        namespaces=namespaces,
    )


def scenarios(kinds: Sequence[str]) -> Iterator[tuple[str, Scenario]]:
    """Every fault in every place, for each of `kinds`; none: all."""
    every = {"ddp": LIVE, "ddp, sealed": KINDS["ddp"]} | {k: v for k, v in KINDS.items() if k != "ddp"}
    for name, kind in every.items():
        if kinds and not any(name == one or name.startswith(f"{one},") for one in kinds):
            continue
        yield from _of_kind(name, kind, LIVE_PLACES if kind is LIVE else PLACES)


def _of_kind(name: str, kind: Kind, places: Sequence[str]) -> Iterator[tuple[str, Scenario]]:
    for place in places:
        yield f"{name}: node, {place}", scenario(kind, [LoseNode(2, place, 3)])
    ranks: list[Fault] = [
        KillWith((2, 0)[turn % 2], place, 2 + GAP * turn) for turn, place in enumerate(places)
    ]
    yield f"{name}: rank, every place", scenario(kind, ranks)
    for place in places:
        yield f"{name}: daemon, {place}", scenario(kind, [KillMemberDaemon(2, place, 3)])
    for stage in STAGES:
        faults = [LoseNodesInTurn(2, "vote", 3, stage)]
        yield f"{name}: node during recovery, {stage}", scenario(kind, faults, spare_nodes=2, replicas=2)
    for place in places:
        yield f"{name}: replica corrupt, {place}", scenario(kind, [CorruptReplica(2, place, 3)], replicas=2)
    if why := why_no_namespaces():
        print(f"{name}: no link is cut: {why}", flush=True)
        return
    for place in places:
        for cut_s, words in ((SHORT_CUT_S, "short"), (None, "until given up")):
            fault = CutLink(2, place, 3, cut_s)
            yield (
                f"{name}: link cut, {words}, {place}",
                scenario(kind, [fault], namespaces=True, steps_after=HEALED_STEPS),
            )
