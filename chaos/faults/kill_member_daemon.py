"""SIGKILL to the daemon of a member's node, while its ranks live."""

from __future__ import annotations

import contextlib

from chaos.cues import Cue, let_go
from chaos.faults.base import Evidence, Fault
from chaos.job import Job
from chaos.nodes_job import NodesJob
from flashrec.cli.demo.nodes.node import kill_all, open_processes


class KillMemberDaemon(Fault):
    """That of the node of `rank`, when it is in `place` of `step`; it goes on then."""

    def __init__(self, rank: int, place: str, step: int) -> None:
        self.rank, self.place, self.step = rank, place, step
        self.name = f"kill-daemon-of-r{rank}-{place}-{step}"
        self.node = ""
        self.lived_on = False

    def cues(self) -> list[Cue]:
        return [Cue(name=self.name, rank=self.rank, place=self.place, step=self.step)]

    def strike(self, job: Job, cue: Cue) -> None:
        assert isinstance(job, NodesJob)
        node, rank_pid = job.node_of(self.rank), job.pid(self.rank)
        self.node, daemon_pid = node.name, node.daemon_pid()
        assert daemon_pid is not None
        assert rank_pid is not None
        with contextlib.ExitStack() as opened:
            daemon, rank = open_processes([daemon_pid, rank_pid], opened)
            kill_all([daemon])
            self.lived_on = not rank.ended()
        let_go(job.folder, cue.name)

    def missing(self, evidence: Evidence) -> str | None:
        if self.name not in evidence.fired or not self.lived_on:
            return f"the daemon of rank {self.rank}'s node was not killed while the rank lived"
        closed = [e for e in evidence.events if e["event"] == "node closed" and self.node in e["reason"]]
        return None if closed else f"nobody noticed that the daemon of {self.node} was gone"

    @property
    def num_recoveries(self) -> int:
        return 0
