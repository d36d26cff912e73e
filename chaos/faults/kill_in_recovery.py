"""A rank is killed, and while the job recovers from that, another: a survivor, or the replacement itself."""

import signal

from chaos.cues import Cue
from chaos.faults.base import Evidence, Fault
from chaos.job import Job


class KillInRecovery(Fault):
    """First `rank` in `place` of `step`; then `second`, when it comes to `then` (a place of `chaos.probes`).
    `second` equal to `rank`: its replacement, twice in a row."""

    def __init__(self, rank: int, place: str, step: int, second: int, then: str) -> None:
        self.rank, self.place, self.step, self.second, self.then = rank, place, step, second, then
        self.name = f"kill-r{rank}-{place}-{step}-then-r{second}-{then.replace(' ', '-')}"

    def cues(self) -> list[Cue]:
        first = Cue(name=f"{self.name}-a", rank=self.rank, place=self.place, step=self.step)
        return [first, Cue(name=f"{self.name}-b", rank=self.second, place=self.then, after=(first.name,))]

    def strike(self, job: Job, cue: Cue) -> None:
        job.strike(cue.rank, signal.SIGKILL)

    def missing(self, evidence: Evidence) -> str | None:
        for cue in self.cues():
            if cue.name not in evidence.fired:
                return f"rank {cue.rank} never came to {cue.place}"
        killed = [
            d for d in evidence.deaths if d["kind"] == "SIGKILL" and d["rank"] in (self.rank, self.second)
        ]
        if len(killed) < 2:
            return f"two ranks should have died by SIGKILL: {killed}"
        return None

    @property
    def num_recoveries(self) -> int:
        return 2
