"""A whole node is lost: its memory, then its daemon and all of its processes, when a rank of it is at a place."""

from __future__ import annotations

from chaos.cues import Cue
from chaos.faults.base import TAG_PLACES, Evidence, Fault
from chaos.job import Job
from chaos.nodes_job import NodesJob
from flashrec.cli.demo.nodes.node import Loss


class LoseNode(Fault):
    """The node that `rank` is on then, which must not be the leader's."""

    def __init__(self, rank: int, place: str, step: int, *, name: str = "") -> None:
        self.rank, self.place, self.step = rank, place, step
        self.name = name or f"lose-node-of-r{rank}-{place}-{step}"
        self.loss: Loss | None = None
        self.was_at = ("", -1)
        self.ranks: list[int] = []

    def cues(self) -> list[Cue]:
        return [Cue(name=self.name, rank=self.rank, place=self.place, step=self.step)]

    def strike(self, job: Job, cue: Cue) -> None:
        assert isinstance(job, NodesJob)
        node = job.node_of(cue.rank)
        self.was_at = job.place_of(cue.rank)
        self.ranks = [one["rank"] for one in job.status()["ranks"] if one["node"] == node.name]
        self.loss = job.lose(node)

    def missing(self, evidence: Evidence) -> str | None:
        if self.name not in evidence.fired or self.loss is None:
            return f"rank {self.rank} never came to {self.place} of step {self.step}"
        if not self.loss.files:
            return "the node had no memory that could be lost"
        for rank in self.ranks:
            if not evidence.died(rank, "node lost"):
                return f"no record of rank {rank} being lost with its node: {evidence.deaths}"
        # Between steps the tag shows the version that is held, which is the next step's number.
        step = self.step + (self.place == "between")
        place = TAG_PLACES.get(self.place, self.place)
        places = ("forward", "backward") if place in ("forward", "backward") else (place,)
        if self.was_at not in [(one, step) for one in places]:
            return f"rank {self.rank} was in {self.was_at}, not in {self.place} of step {self.step}"
        return None

    @property
    def num_recoveries(self) -> int:
        return max(1, len(self.ranks))
