"""SIGKILL of a standby that nobody needs yet: it must harm nobody."""

import os
import signal

from chaos.cues import STANDBY, Cue, let_go
from chaos.faults.base import Evidence, Fault
from chaos.job import Job


class KillStandby(Fault):
    """A standby in `place`. Rank 0 waits in `step` until that has happened, so that it happens during training."""

    def __init__(self, step: int, place: str = "rehearsal backward", *, name: str = "kill-standby") -> None:
        self.step, self.place, self.name = step, place, name
        self._killed = self._waiting = False

    def cues(self) -> list[Cue]:
        pause = Cue(name=f"{self.name}-pause", rank=0, place="forward", step=self.step)
        return [Cue(name=self.name, rank=STANDBY, place=self.place), pause]

    def strike(self, job: Job, cue: Cue) -> None:
        if cue.rank == STANDBY:
            for pid in job.standby_pids():
                os.kill(pid, signal.SIGKILL)
            job.until(lambda: job.happened("standby lost"), what="the loss of the standby")
            self._killed = True
        else:
            self._waiting = True
        if self._killed and self._waiting:
            let_go(job.folder, f"{self.name}-pause")

    def missing(self, evidence: Evidence) -> str | None:
        lost = [e for e in evidence.events if e["event"] == "standby lost" and "SIGKILL" in e["reason"]]
        return None if lost and self.name in evidence.fired else f"no standby was lost at {self.place}"

    @property
    def num_recoveries(self) -> int:
        return 0
