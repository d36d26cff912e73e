"""A node is lost, its ranks go on on a spare, its daemon is started again and taken in as a spare; and the next."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from chaos import pace
from chaos.cues import Cue
from chaos.faults.base import Evidence, Fault
from chaos.job import Job
from chaos.nodes_job import NodesJob

STEPS_EACH = 30
"""That training may do for a loss; if it needs longer, steps take longer (`chaos.pace`)."""
FREE_STEPS = 8
WARM_STEPS = 3
LOOK_S = 0.1
WITHIN_S = 0.15
"""The strike comes so long after the moment in which all was ready at most: at any place of a step."""


class LoseNodesInARow(Fault):
    """`losses` times the node that the last rank is on, which must never be the leader's. `ready(job, status)` is
    called before each strike, and once after the last: all have recovered, every node is back, and a spare has its
    standbys."""

    def __init__(
        self, losses: int, seed: int, ready: Callable[[NodesJob, dict[str, Any]], None], *, say: bool = False
    ) -> None:
        self.name = f"lose-{losses}-nodes"
        self.losses = losses
        self.cycles_s: list[float] = []
        self._ready = ready
        self._say = say
        self._draw = random.Random(seed)
        self._look_at = self._began = 0.0
        self._done = 0
        self._is_over = False

    @property
    def steps(self) -> int:
        """That the job must have."""
        return STEPS_EACH * (self.losses + 1)

    def cues(self) -> list[Cue]:
        return []

    def poll(self, job: Job) -> None:
        now = time.monotonic()
        if now < self._look_at or self._is_over:
            return
        self._look_at = now + LOOK_S
        assert isinstance(job, NodesJob)
        status = job.status()
        if not _is_whole(job, status) or len(status["recoveries"]) != self._done:
            return
        if self._began:
            self.cycles_s.append(now - self._began)
        self._began = now
        self._ready(job, status)
        if self._done == self.losses:
            self._is_over = True
            pace.allow(job.folder / "out", self.steps)
            return
        committed = max(rank["committed"] for rank in status["ranks"])
        pace.allow(job.folder / "out", committed + FREE_STEPS)
        time.sleep(WITHIN_S * self._draw.random())
        job.lose(job.node_of(job.world_size - 1))
        self._done += 1
        pace.allow(job.folder / "out", STEPS_EACH * self._done)
        if self._say:
            print(f"\r{self._done} of {self.losses} nodes lost, step {committed} ", end="", flush=True)

    def missing(self, evidence: Evidence) -> str | None:
        if not self._is_over:
            return f"the job ended after {self._done} of {self.losses} losses"
        lost = sum(death["kind"] == "node lost" for death in evidence.deaths)
        return None if lost == self.losses else f"{lost} ranks were lost with their nodes, not {self.losses}"

    @property
    def num_recoveries(self) -> int:
        return self.losses


def _is_whole(job: NodesJob, status: dict[str, Any]) -> bool:
    """Whether every node is there, one can take what the next loss leaves, and the ranks train."""
    live = [node["name"] for node in status["nodes"] if node["life"] == "live" and not node["unheard"]]
    standing = {one["node"] for one in status["standbys"] if one["depth"] != "starting"}
    return (
        status["status"] == "running"
        and len(live) == len(job.cluster.nodes)
        and all(record["complete"] for record in status["recoveries"])
        and any(node["name"] in standing for node in status["nodes"] if node["spare"])
        and status["replicas"]["losses"] >= 1
        and all((rank["committed"] or 0) >= WARM_STEPS for rank in status["ranks"])
    )
