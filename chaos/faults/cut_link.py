"""The link between a node and all others is cut, for a while, and nobody dies."""

from __future__ import annotations

import time

from chaos.cues import Cue, let_go
from chaos.faults.base import Evidence, Fault
from chaos.job import Job
from chaos.nodes_job import NodesJob


class CutLink(Fault):
    """That of the node of `rank`, when it is in `place` of `step`; it goes on then, and comes no further. For `cut_s`
    seconds, or, if None, until the node was given up. Nodes are in namespaces."""

    def __init__(self, rank: int, place: str, step: int, cut_s: float | None) -> None:
        self.rank, self.place, self.step, self.cut_s = rank, place, step, cut_s
        self.name = f"cut-link-of-r{rank}-{place}-{step}"
        self.node = ""
        self.seconds = 0.0
        self._cut_at: float | None = None
        self._number = 0

    def cues(self) -> list[Cue]:
        return [Cue(name=self.name, rank=self.rank, place=self.place, step=self.step)]

    def strike(self, job: Job, cue: Cue) -> None:
        assert isinstance(job, NodesJob)
        assert job.cluster.links is not None
        node = job.node_of(self.rank)
        self.node, self._number = node.name, node.number
        job.cluster.links.cut(node.number)
        self._cut_at = time.monotonic()
        let_go(job.folder, cue.name)

    def poll(self, job: Job) -> None:
        if self._cut_at is None:
            return
        assert isinstance(job, NodesJob)
        assert job.cluster.links is not None
        seconds = time.monotonic() - self._cut_at
        given_up = any(self.node in one["reason"] for one in job.happened("node lost"))
        if seconds >= self.cut_s if self.cut_s is not None else given_up:
            job.cluster.links.heal(self._number)
            self.seconds, self._cut_at = seconds, None

    def missing(self, evidence: Evidence) -> str | None:
        if self.name not in evidence.fired or not self.seconds:
            return f"the link of rank {self.rank}'s node was not cut and healed"
        lost = [e for e in evidence.events if e["event"] == "node lost" and self.node in e["reason"]]
        if self.cut_s is None and not lost:
            return f"{self.node} was not given up"
        return None

    @property
    def num_recoveries(self) -> int:
        return 0
