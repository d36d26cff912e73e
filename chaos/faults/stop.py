"""SIGSTOP: the process is there, its sockets are open, and it says nothing more."""

import signal

from chaos.cues import Cue
from chaos.faults.base import Evidence, Fault
from chaos.job import Job


class Stop(Fault):
    def __init__(self, rank: int, place: str, step: int) -> None:
        self.rank, self.place, self.step = rank, place, step
        self.name = f"stop-r{rank}-{place}-{step}"

    def cues(self) -> list[Cue]:
        return [Cue(name=self.name, rank=self.rank, place=self.place, step=self.step)]

    def strike(self, job: Job, cue: Cue) -> None:
        job.strike(self.rank, signal.SIGSTOP)

    def missing(self, evidence: Evidence) -> str | None:
        silent = [
            e
            for e in evidence.events
            if e["event"] == "suspect" and e["rank"] == self.rank and "no heartbeat" in e["reason"]
        ]
        if not silent:
            return f"nobody noticed that rank {self.rank} was silent"
        if not evidence.died(self.rank, "SIGKILL", step=self.step):
            return f"rank {self.rank} was suspected, but not killed in step {self.step}"
        return None
