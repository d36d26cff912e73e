"""SIGKILL to several ranks at once, when one of them is at a certain place; the others are wherever they are.

Unlike `kill_together` it waits for nobody else, who may never come: a pipeline's stages wait for each other.
"""

import os
import signal

from chaos.cues import Cue
from chaos.faults.base import TAG_PLACES, Evidence, Fault
from chaos.job import Job


class KillWith(Fault):
    def __init__(self, rank: int, place: str, step: int, others: tuple[int, ...] = ()) -> None:
        self.rank, self.place, self.step, self.others = rank, place, step, others
        self.name = "-".join(["kill", *(f"r{one}" for one in (rank, *others)), place, str(step)])

    def cues(self) -> list[Cue]:
        return [Cue(name=self.name, rank=self.rank, place=self.place, step=self.step)]

    def strike(self, job: Job, cue: Cue) -> None:
        pids = [job.pid(rank) for rank in (self.rank, *self.others)]
        for pid in pids:
            if pid is None:
                raise ProcessLookupError(f"one of the ranks has no process at the moment\n{job.story()}")
            os.kill(pid, signal.SIGKILL)

    def missing(self, evidence: Evidence) -> str | None:
        if self.name not in evidence.fired:
            return f"rank {self.rank} never came to {self.place} of step {self.step}"
        # Between steps the tag shows the version that is held, which is the next step's number.
        step = self.step + (self.place == "between")
        # Where a sharded model's backward begins its tag cannot tell: no gradient is complete before the end.
        place = TAG_PLACES.get(self.place, self.place)
        places = ("forward", "backward") if place in ("forward", "backward") else (place,)
        if not any(evidence.died(self.rank, "SIGKILL", one, step) for one in places):
            return (
                f"no record of rank {self.rank} dying in {self.place} of step {self.step}: {evidence.deaths}"
            )
        for other in self.others:
            # Ranks go on together, so another is in this step, or about to leave the one before, or in the next.
            if not any(evidence.died(other, "SIGKILL", None, step + offset) for offset in (-1, 0, 1)):
                return f"no record of rank {other} dying near step {self.step}: {evidence.deaths}"
        return None

    @property
    def num_recoveries(self) -> int:
        return 1 + len(self.others)
