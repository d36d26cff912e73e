"""What became of each fault that struck a node, and whether that is as it should be. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashrec.cli.demo.brief import ALLOWED_AGAIN
from flashrec.cli.demo.faults import MARKS, in_words
from flashrec.cli.demo.nodes.schedule import NodeFault
from flashrec.cli.demo.nodes.strike import NodeStrike
from flashrec.cli.demo.settings import Settings
from flashrec.cli.demo.timing import StepLine, committed_again
from flashrec.cli.demo.verdict import Verdict

NOTICED_WITHIN_NS = 60_000_000_000
"""A link that was cut is noticed when training has stood still for long enough."""
UNKNOWN_CAUSE = -1
Recovery = Mapping[str, Any]
Homes = Mapping[int, str]
"""The node of each rank."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """`timeline`: milliseconds from the signal. `version`: the step at which the job went on; None: nothing had to be
    recovered. `num_seen`: ranks whose loss is in the leader's record."""

    fault: NodeFault
    strike: NodeStrike | None = None
    timeline: Mapping[str, float] = field(default_factory=dict)
    version: int | None = None
    complete: bool = False
    num_seen: int = 0
    moved: Mapping[int, str] = field(default_factory=dict)
    """The ranks that are on another node than before, and on which."""

    @property
    def step(self) -> int | None:
        """In which it struck; of a replacement that held nothing yet, the step it was to go on with."""
        if self.strike is None:
            return None
        step = self.strike.ranks[0].step
        return step if step >= 0 else self.version

    @property
    def recovered_ms(self) -> float | None:
        return self.timeline.get("redone") if self.complete else None

    @property
    def taken_back(self) -> set[int]:
        """Steps that a rank of it had committed, by its tag, and that the job went back behind."""
        ranks = self.strike.ranks if self.strike is not None else ()
        committed = max((one.committed for one in ranks), default=-1)
        return set() if self.version is None else set(range(self.version, committed))

    @property
    def outcome(self) -> str:
        """What became of the ranks, in words."""
        if self.strike is None:
            return ""
        if self.moved:
            where = sorted(set(self.moved.values()))
            ranks = " ".join(map(str, sorted(self.moved)))
            return f"{ranks} → {', '.join(where)}"
        if self.version is None:
            return "nobody lost; all waited" if self.strike.kind == "link" else "nobody lost"
        return "replaced there" if self.num_seen else "formed again"

    def complaints(self) -> list[str]:
        strike = self.strike
        if strike is None:
            return ["never fired"]
        found = []
        if strike.kills_ranks and self.num_seen < len(strike.ranks):
            found.append(f"took ranks {_ranks(strike)}, of whom the leader has seen {self.num_seen} go")
        if (strike.kills_ranks or self.version is not None) and not self.complete:
            found.append("was not recovered from")
        if strike.loses_node and strike.kind != "daemon" and not strike.num_files:
            found.append(f"found no memory on {strike.node} that could be lost")
        left = sorted({one.rank for one in strike.ranks} - self.moved.keys())
        if strike.loses_node and strike.kills_ranks and self.complete and left:
            found.append(f"left ranks {', '.join(map(str, left))} on {strike.node}, which was lost")
        if strike.kind == "replica-corrupt" and not strike.detail:
            found.append("found no replica to corrupt")
        if strike.kind == "link" and not strike.healed_ns:
            found.append("was never healed")
        return found

    def to_json(self, again: set[int]) -> dict[str, Any]:
        strike = self.strike
        return {
            "kind": self.fault.kind,
            "node": strike.node if strike is not None else None,
            "ranks": sorted(one.rank for one in strike.ranks) if strike is not None else [],
            "step": self.step,
            "phase": strike.ranks[0].place if strike is not None else None,
            "planned_phase": self.fault.place,
            "fired": strike is not None,
            "processes": strike.num_processes if strike is not None else 0,
            "files": strike.num_files if strike is not None else 0,
            "detail": strike.detail if strike is not None else "",
            "cut_ms": _cut_ms(strike),
            "losses_seen": self.num_seen,
            "moved": {str(rank): node for rank, node in self.moved.items()},
            "outcome": self.outcome,
            "resumed_step": self.version,
            "recovered_ms": self.recovered_ms,
            "timeline": dict(self.timeline),
            "committed_steps_again": len(again),
        }


def join(
    faults: Sequence[NodeFault],
    strikes: Sequence[NodeStrike],
    recoveries: Sequence[Recovery],
    homes: Sequence[tuple[int, Homes]],
) -> list[NodeReport]:
    """`strikes`: one for each fault, the last if it was healed. `homes`: instants, and where the ranks were then."""
    by_index = {strike.index: strike for strike in strikes}
    reports = []
    for fault in faults:
        strike = by_index.get(fault.index)
        if strike is None:
            reports.append(NodeReport(fault=fault))
            continue
        reports.append(_report(fault, strike, _following(strike, by_index.values()), recoveries, homes))
    return reports


def _following(strike: NodeStrike, strikes: Iterable[NodeStrike]) -> int | None:
    """When the next one came."""
    return min((one.signal_ns for one in strikes if one.signal_ns > strike.signal_ns), default=None)


def _report(
    fault: NodeFault,
    strike: NodeStrike,
    following_ns: int | None,
    recoveries: Sequence[Recovery],
    homes: Sequence[tuple[int, Homes]],
) -> NodeReport:
    seen = _seen(strike, recoveries, following_ns)
    recovery = max((one for one, _ in seen.values()), key=lambda one: one["began_ns"], default=None)
    if recovery is None and not strike.kills_ranks:
        # Everyone parked, and nobody was lost.
        recovery = next(
            (
                one
                for one in recoveries
                if one["began_ns"] >= strike.signal_ns
                and (following_ns is None or one["began_ns"] < following_ns)
            ),
            None,
        )
    if recovery is None:
        return NodeReport(fault=fault, strike=strike)
    instants = {**recovery["marks"]}
    if seen:
        instants["detected"] = max(at_ns for _, at_ns in seen.values())
    timeline = {
        mark: round(max(0, instants[mark] - strike.signal_ns) / 1e6, 3) for mark in MARKS if mark in instants
    }
    return NodeReport(
        fault=fault,
        strike=strike,
        timeline=timeline,
        version=recovery["version"],
        complete=recovery["complete"],
        num_seen=len(seen),
        moved=_moved(strike, recovery, homes),
    )


def _seen(
    strike: NodeStrike, recoveries: Sequence[Recovery], following_ns: int | None
) -> dict[int, tuple[Recovery, int]]:
    """By rank: the recovery its loss led to, and when the leader saw it. What comes after the following strike is of
    that one."""
    seen: dict[int, tuple[Recovery, int]] = {}
    for rank in (one.rank for one in strike.ranks):
        for recovery in recoveries:
            for death in recovery["faults"]:
                late_ns = death["at_ns"] - strike.signal_ns
                is_ours = 0 <= late_ns < NOTICED_WITHIN_NS and death["at_ns"] < (following_ns or sys.maxsize)
                if death["rank"] == rank and is_ours and rank not in seen:
                    seen[rank] = recovery, death["at_ns"]
    return seen


def unplanned(strikes: Sequence[NodeStrike], recoveries: Sequence[Recovery]) -> list[str]:
    """Losses of ranks that no fault of ours explains, in words."""
    explained = {
        at_ns
        for strike in strikes
        for _, at_ns in _seen(strike, recoveries, _following(strike, strikes)).values()
    }
    return [
        in_words(death, recovery["version"])
        for recovery in recoveries
        for death in recovery["faults"]
        if death["at_ns"] not in explained
    ]


def _moved(strike: NodeStrike, recovery: Recovery, homes: Sequence[tuple[int, Homes]]) -> dict[int, str]:
    """Where the ranks are when it is over, if elsewhere."""
    over_ns = recovery["marks"].get("formed", recovery["began_ns"])
    after = next((where for at_ns, where in homes if at_ns >= over_ns), None)
    if after is None:
        return {}
    ranks = (one.rank for one in strike.ranks)
    return {rank: after[rank] for rank in ranks if after.get(rank, strike.node) != strike.node}


def _cut_ms(strike: NodeStrike | None) -> float | None:
    if strike is None or not strike.healed_ns:
        return None
    return round((strike.healed_ns - strike.signal_ns) / 1e6, 3)


def _ranks(strike: NodeStrike) -> str:
    return ", ".join(map(str, sorted(one.rank for one in strike.ranks)))


def steps_again(lines: Sequence[StepLine], reports: Sequence[NodeReport]) -> dict[int, set[int]]:
    """By the fault's index: committed steps done again, by the ranks' logs or by the tags of the lost."""
    signals_ns = {one.fault.index: one.strike.signal_ns for one in reports if one.strike is not None}
    again = committed_again(lines, signals_ns)
    for report in reports:
        if report.strike is not None:
            again[report.fault.index] |= report.taken_back
    return again


@dataclass(frozen=True, kw_only=True)
class NodeFindings:
    """Everything that the verdict rests on."""

    settings: Settings
    reports: Sequence[NodeReport]
    again: Mapping[int, set[int]]
    regime: str
    why_sealed: str
    verdict: Verdict
    failure: str | None
    unplanned: Sequence[str] = ()
    orphans: Sequence[tuple[int, Sequence[int]]] = ()
    """Instants, and the processes whose daemon was gone by then, and who lived."""

    @property
    def most_again(self) -> int:
        return max(map(len, self.again.values()), default=0)

    @property
    def passed(self) -> bool:
        return self.verdict.identical and not self.complaints()

    @property
    def allowed_again(self) -> int:
        """Committed steps that a recovery may make the ranks do again."""
        return ALLOWED_AGAIN.get(self.regime, 0)

    @property
    def orphaned_ms(self) -> float | None:
        """How long the processes of a daemon that had died lived on; None if there were none, or they still do."""
        if not self.orphans or self.orphans[-1][1]:
            return None
        return round((self.orphans[-1][0] - self.orphans[0][0]) / 1e6, 3)

    def complaints(self) -> list[str]:
        """What is not as it should be, the bits aside."""
        found = [] if self.failure is None else [f"the job failed: {self.failure}"]
        for report in self.reports:
            found += [f"fault {report.fault.index + 1} {words}" for words in report.complaints()]
        if self.orphans and self.orphans[-1][1]:
            found.append(f"{len(self.orphans[-1][1])} processes outlived the daemon that had started them")
        for index, steps in self.again.items():
            if len(steps) > self.allowed_again or index == UNKNOWN_CAUSE:
                cause = "without a cause" if index == UNKNOWN_CAUSE else f"after fault {index + 1}"
                numbers = ", ".join(map(str, sorted(steps)))
                found.append(
                    f"committed steps {numbers} were done again {cause}; the {self.regime} regime allows "
                    f"{self.allowed_again}"
                )
        return found

    def to_json(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "parallel": settings.parallel,
            "fault": settings.fault,
            "nodes": settings.nodes,
            "spare_nodes": settings.spare_nodes,
            "replicas": settings.replicas,
            "namespaces": settings.namespaces,
            "ranks": settings.ranks,
            "steps": settings.steps,
            "seed": settings.seed,
            "standby": settings.standby,
            "regime": self.regime,
            "why_sealed": self.why_sealed,
            "weights_identical": self.verdict.weights_identical,
            "optimizer_identical": self.verdict.optimizer_identical,
            "losses_identical": self.verdict.losses_identical,
            "first_difference": self.verdict.first_difference,
            "most_committed_steps_again": self.most_again,
            "faults": [report.to_json(self.again.get(report.fault.index, set())) for report in self.reports],
            "unplanned": list(self.unplanned),
            "orphans_for_ms": self.orphaned_ms,
            "failure": self.failure,
            "passed": self.passed,
            "complaints": self.complaints(),
        }
