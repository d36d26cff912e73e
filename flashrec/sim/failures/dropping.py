"""Replica-dropping, as torchft does it: the data-parallel replica that a failure struck leaves, the others go on with a
smaller batch, and it comes back, with the state of a healthy one, when it has restarted.

Work is counted in samples: a step with n of D replicas is worth n / D of a whole one. (That the batch changes, and with
it the run, is another cost, which is not counted.) At each change of the members all pause: the step at hand is thrown
away, and the groups are made anew.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashrec.errors import UsageError


@dataclass(frozen=True, slots=True)
class Dropping:
    """`outages_s`: for each failure, how long the others stood still. `restarts`: how often no replica was left, and
    all state came from disk."""

    duration_s: float
    useful_s: float
    lost_s: float
    outages_s: tuple[float, ...]
    restarts: int

    @property
    def goodput(self) -> float:
        return self.useful_s / self.duration_s


def dropping_goodput(
    replicas: int, replica_mtbf_s: float, away_s: float, drop_s: float, join_s: float, lost_step_s: float
) -> float:
    """The expected share of samples: a replica is there for M / (M + away) of the time, and each time one leaves and
    comes back all others lose drop + lost step, then join. First order in pauses over the time between failures."""
    there = replica_mtbf_s / (replica_mtbf_s + away_s)
    cycles_per_s = replicas / (replica_mtbf_s + away_s)
    return max(there * (1 - cycles_per_s * (drop_s + lost_step_s + join_s)), 0.0)


def simulate_dropping(
    faults: Sequence[tuple[float, tuple[int, ...]]],
    *,
    duration_s: float,
    replicas: int,
    step_s: float,
    away_s: float,
    drop_s: float,
    join_s: float,
    interval_s: float = math.inf,
) -> Dropping:
    """`faults`: (seconds, the replicas it strikes), ascending. `away_s`: from its failure until a replica is ready to
    join; `drop_s`: detection and re-forming without it; `join_s`: the pause in which it joins; `interval_s`: between
    disk checkpoints, which is lost by half in expectation when no replica is left. A fault loses half a step."""
    if replicas < 1 or not step_s > 0 or not duration_s > 0:
        raise UsageError(f"replicas {replicas}, step_s {step_s} and duration_s {duration_s} must be positive")
    back: list[tuple[float, int]] = []  # when which replica joins
    due: dict[int, float] = {}
    now, useful, lost, restarts = 0.0, 0.0, 0.0, 0
    paused_until, last_all = 0.0, 0.0
    outages: list[float] = []

    def go_on(until: float) -> None:
        nonlocal now, useful
        until = min(until, duration_s)
        begin = max(now, paused_until)
        if until > begin:
            useful += (until - begin) * (replicas - len(due)) / replicas
        now = max(now, until)

    queue = [(at_s, struck) for at_s, struck in faults if at_s < duration_s]
    position = 0
    while now < duration_s:
        next_fault = queue[position][0] if position < len(queue) else math.inf
        next_join = back[0][0] if back else math.inf
        if min(next_fault, next_join) >= duration_s:
            go_on(duration_s)
            break
        if next_join <= next_fault:
            at_s, replica = heapq.heappop(back)
            if due.get(replica) != at_s:
                continue  # it was struck again while it restarted
            go_on(at_s)
            paused_until = max(paused_until, at_s + join_s) if len(due) < replicas else at_s
            del due[replica]
            continue
        at_s, struck = queue[position]
        position += 1
        go_on(at_s)
        fresh = [replica for replica in struck if replica not in due]
        share = (replicas - len(due)) / replicas
        for replica in struck:
            due[replica] = at_s + away_s
            heapq.heappush(back, (at_s + away_s, replica))
        if not fresh:
            continue
        if len(due) == replicas:
            restarts += 1
            thrown = min(interval_s / 2, at_s - last_all) * share
            last_all = at_s
            outages.append(away_s)
        else:
            thrown = min(step_s / 2, useful) * share
            outages.append(drop_s)
            paused_until = max(paused_until, at_s + drop_s)
        useful -= min(thrown, useful)
        lost += thrown
    return Dropping(duration_s, useful, lost, tuple(outages), restarts)
