"""A node is lost, and while the job recovers from that, the node that one of its ranks has been moved to."""

from __future__ import annotations

from chaos.cues import Cue
from chaos.faults.base import Evidence, Fault
from chaos.job import Job
from chaos.nodes_job import NodesJob
from flashrec.cli.demo.nodes.node import Loss


class LoseNodesInTurn(Fault):
    """First the node of `rank`, in `place` of `step`; then the one where its replacement comes to `then` (a place of
    `chaos.probes`)."""

    def __init__(self, rank: int, place: str, step: int, then: str) -> None:
        self.rank, self.place, self.step, self.then = rank, place, step, then
        self.name = f"lose-node-of-r{rank}-{place}-{step}-then-at-{then.replace(' ', '-')}"
        self.lost: list[tuple[str, Loss]] = []

    def cues(self) -> list[Cue]:
        first = Cue(name=f"{self.name}-a", rank=self.rank, place=self.place, step=self.step)
        return [first, Cue(name=f"{self.name}-b", rank=self.rank, place=self.then, after=(first.name,))]

    def strike(self, job: Job, cue: Cue) -> None:
        assert isinstance(job, NodesJob)
        node = job.node_of(self.rank)
        self.lost.append((node.name, job.lose(node)))

    def missing(self, evidence: Evidence) -> str | None:
        for cue in self.cues():
            if cue.name not in evidence.fired:
                return f"rank {self.rank} never came to {cue.place}"
        names = [name for name, _ in self.lost]
        if len(set(names)) < 2 or not all(loss.files for _, loss in self.lost):
            return f"two nodes and their memory should have been lost: {self.lost}"
        times = sum(one["rank"] == self.rank and one["kind"] == "node lost" for one in evidence.deaths)
        return None if times >= 2 else f"rank {self.rank} was lost with {times} nodes: {evidence.deaths}"

    @property
    def num_recoveries(self) -> int:
        return 2
