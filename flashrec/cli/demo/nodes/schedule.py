"""Which node is struck, where and when: a pure function of the options and a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrec.cli.demo.schedule import PLACES, QUIET_STEPS, dealt
from flashrec.cli.demo.settings import Settings
from flashrec.errors import UsageError

FIRST_STEP = 6  # the ranks are warm, and every version is kept elsewhere
SLOT_STEPS = 14  # of a fault and what it leads to: a node comes back, and its standbys get ready
PATIENCE_STEPS = 8  # of them it waits for standbys to be ready
SHORT_CUT, LONG_CUT = "short", "until given up"


@dataclass(frozen=True, kw_only=True)
class NodeFault:
    """One fault that is planned. Which nodes have ranks when it is due nobody knows, so it picks: of the nodes besides
    the leader's that have ranks (of `rank` with `on_leader`: the leader's) the `pick`-th, and of its ranks also;
    counted around. It strikes when that rank is in `place` of `step` or later; from step `latest` on, wherever it is.
    Until `patience`, a step, it waits for standbys.

    `follows`: strikes in the recovery from the fault before, the node that a rank of that one has been moved to."""

    index: int
    kind: str
    step: int
    place: str
    pick: int
    patience: int = 0
    latest: int = 0
    on_leader: bool = False
    follows: bool = False
    cut: str = ""
    """Of a link: for how long."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Whom a fault strikes. `watched` is among `ranks`, which are all of the node's."""

    node: str
    watched: int
    ranks: tuple[int, ...]
    kept_on: tuple[str, ...]
    """The nodes that keep replicas of what `watched` seals; those first that its replacement may come to."""


def make_faults(settings: Settings) -> list[NodeFault]:
    """What `settings` ask for. UsageError when so many faults do not fit into so many steps."""
    rng = random.Random(settings.seed)
    number = settings.num_faults
    first, end = FIRST_STEP, settings.steps - QUIET_STEPS
    if number and end - first < SLOT_STEPS * number:
        needed = first + SLOT_STEPS * number + QUIET_STEPS
        raise UsageError(
            f"{number} faults do not fit into {settings.steps} steps; take --steps {needed} or more"
        )
    faults: list[NodeFault] = []
    for index, place in enumerate(dealt(PLACES, number, rng)):
        begin, after = (first + (end - first) * n // number for n in (index, index + 1))
        patience = max(begin, after - SLOT_STEPS + PATIENCE_STEPS)
        fault = NodeFault(
            index=len(faults),
            kind="node" if settings.fault == "node-during-recovery" else str(settings.fault),
            step=begin + rng.randrange(3),
            place=place,
            pick=rng.randrange(12),
            patience=patience,
            latest=patience + 3,
            on_leader=settings.fault == "rank" and index % 2 == 1,
            cut=(SHORT_CUT, LONG_CUT)[index % 2] if settings.fault == "link" else "",
        )
        faults.append(fault)
        if settings.fault == "node-during-recovery":
            second = NodeFault(
                index=len(faults),
                kind="node",
                step=fault.step,
                place="recovery",
                pick=rng.randrange(12),
                follows=True,
            )
            faults.append(second)
    return faults


def target(fault: NodeFault, job: Mapping[str, Any]) -> Target | None:
    """Whom it strikes, by the job's status; None: there is nobody just now."""
    nodes: Sequence[Mapping[str, Any]] = [node for node in job["nodes"] if node["life"] == "live"]
    leader, others = job["nodes"][0], [node for node in nodes[1:] if node["ranks"]]
    chosen = [leader] if fault.on_leader else others
    if not chosen:
        return None
    node = chosen[fault.pick % len(chosen)]
    watched = node["ranks"][fault.pick % len(node["ranks"])]
    return Target(
        node=node["name"],
        watched=watched,
        ranks=tuple(node["ranks"]) if fault.kind != "rank" else (watched,),
        kept_on=tuple(sorted(job["ranks"][watched]["kept_on"], key=lambda name: name not in spares(job))),
    )


def spares(job: Mapping[str, Any]) -> list[str]:
    """Live nodes without a rank, whose daemon is heard."""
    return [
        node["name"]
        for node in job["nodes"]
        if node["life"] == "live" and not node["ranks"] and not node["unheard"]
    ]


def is_ready(fault: NodeFault, chosen: Target, job: Mapping[str, Any]) -> bool:
    """Whether standbys stand where the ranks will have to go, as they would where losses are hours apart."""
    standing = [one["node"] for one in job["standbys"] if one["depth"] != "starting"]
    if fault.kind == "rank":
        return chosen.node in standing
    return any(standing.count(name) >= len(chosen.ranks) for name in spares(job))


def may_strike(fault: NodeFault, job: Mapping[str, Any]) -> bool:
    """Whether the job can survive it at all: ranks of a lost node need room elsewhere."""
    return job["status"] == "running" and (
        fault.kind in ("rank", "link") or bool(spares(job)) or fault.follows
    )
