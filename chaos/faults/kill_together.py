"""Several ranks are killed in one step, before any recovery can begin: each holds until all are there."""

import signal

from chaos.cues import Cue
from chaos.faults.base import TAG_PLACES, Evidence, Fault
from chaos.job import Job


class KillTogether(Fault):
    def __init__(self, ranks: tuple[int, ...], place: str, step: int) -> None:
        self.ranks, self.place, self.step = ranks, place, step
        self.name = f"kill-{'-'.join(map(str, ranks))}-{place}-{step}"
        self._there: set[int] = set()

    def cues(self) -> list[Cue]:
        return [
            Cue(name=f"{self.name}-r{rank}", rank=rank, place=self.place, step=self.step)
            for rank in self.ranks
        ]

    def strike(self, job: Job, cue: Cue) -> None:
        self._there.add(cue.rank)
        if len(self._there) == len(self.ranks):
            for rank in self.ranks:
                job.strike(rank, signal.SIGKILL)

    def missing(self, evidence: Evidence) -> str | None:
        for rank in self.ranks:
            if not evidence.died(rank, "SIGKILL", TAG_PLACES.get(self.place, self.place), self.step):
                return (
                    f"no record of rank {rank} dying in {self.place} of step {self.step}: {evidence.deaths}"
                )
        return None

    @property
    def num_recoveries(self) -> int:
        return len(self.ranks)
