"""A byte of the replica that one node keeps of a rank is changed; then the rank's own node is lost."""

from __future__ import annotations

import re

from chaos.cues import Cue
from chaos.faults.base import Evidence, Fault
from chaos.faults.lose_node import LoseNode
from chaos.job import Job
from chaos.nodes_job import NodesJob
from flashrec.cli.demo.nodes.corrupt import Corrupted, corrupt, damaged
from flashrec.cli.demo.nodes.node import Node
from flashrec.state.arena import Arena
from flashrec.state.manifest import ARENA, REPLICA

NOTICED = "(do|does) not match (its|their) checksum"
"""Of a version's tensors, or of its private state, whichever is read first."""


class CorruptReplica(Fault):
    """Of `rank`, which holds in `place` of `step`: so no newer version than the corrupt one can be kept meanwhile."""

    def __init__(self, rank: int, place: str, step: int) -> None:
        self.rank, self.place, self.step = rank, place, step
        self.name = f"corrupt-replica-of-r{rank}-{place}-{step}"
        self._loss = LoseNode(rank, place, step, name=self.name)
        self.corrupted: list[Corrupted] = []
        self.is_damaged = False

    def cues(self) -> list[Cue]:
        return self._loss.cues()

    def strike(self, job: Job, cue: Cue) -> None:
        assert isinstance(job, NodesJob)
        name = job.status()["job"]
        keepers = job.keepers_of(self.rank)
        if job.status()["regime"] == "sealed":
            self._await_replicas(job, name, [job.node_of(self.rank), *keepers])
        directory = job.directory(keepers[0])
        if directory is not None:
            self.corrupted = corrupt(directory, self.rank, name, all_private=len(keepers) > 1)
            self.is_damaged = bool(self.corrupted) and all(
                one.what == "private" or damaged(directory, self.rank, name, one.version)
                for one in self.corrupted
            )
        self._loss.strike(job, cue)

    def _await_replicas(self, job: NodesJob, name: str, nodes: list[Node]) -> None:
        """A rank in `place` may have it yet before it that its version is sealed, and kept: only a vote waits for that.
        What is corrupt must be the newest there is, and whole elsewhere."""
        homes = [job.directory(node) for node in nodes]
        arenas = [
            Arena(home / (REPLICA if home is not homes[0] else ARENA), self.rank, name)
            for home in homes
            if home
        ]

        def all_have() -> bool:
            return all(any(one.version == self.step for one in arena.sealed()) for arena in arenas)

        job.until(all_have, what=f"version {self.step} of rank {self.rank} kept by all")

    def missing(self, evidence: Evidence) -> str | None:
        if not self.corrupted or not self.is_damaged:
            return f"no replica of rank {self.rank} was corrupted: {self.corrupted}"
        # In the live regime tensors come from survivors, and who gets damaged private state just asks the next node.
        are_read = any(one["event"] == "sealed regime" for one in evidence.events)
        if are_read and not any(re.search(NOTICED, one["reason"]) for one in evidence.events):
            return f"nobody noticed that {self.corrupted[0]} was corrupt"
        return self._loss.missing(evidence)

    @property
    def num_recoveries(self) -> int:
        return self._loss.num_recoveries
