"""SIGKILL while the rank is at a certain place of a certain step."""

import signal

from chaos.cues import STANDBY, Cue
from chaos.faults.base import TAG_PLACES, Evidence, Fault
from chaos.job import Job


class KillAtPlace(Fault):
    """`place`: one of the tag's, or of `chaos.probes`. `after`: the cue of another fault that comes first."""

    def __init__(
        self, rank: int, place: str, step: int | None = None, *, name: str = "", after: tuple[str, ...] = ()
    ) -> None:
        self.rank, self.place, self.step, self.after = rank, place, step, after
        self.name = name or f"kill-r{rank}-{place}-{'any' if step is None else step}"

    def cues(self) -> list[Cue]:
        return [Cue(name=self.name, rank=self.rank, place=self.place, step=self.step, after=self.after)]

    def strike(self, job: Job, cue: Cue) -> None:
        if self.rank == STANDBY:
            raise ValueError("a standby is not a rank: see kill_standby")
        job.strike(self.rank, signal.SIGKILL)

    def missing(self, evidence: Evidence) -> str | None:
        if self.name not in evidence.fired:
            return f"rank {self.rank} never came to {self.place} of step {self.step}"
        place = TAG_PLACES.get(self.place, self.place)
        recovering = place == "recovery"
        if evidence.died(self.rank, "SIGKILL", place, None if recovering else self._tag_step()):
            return None
        return f"no record of rank {self.rank} dying by SIGKILL in {place} of step {self.step}: {evidence.deaths}"

    def _tag_step(self) -> int | None:
        # Between steps the tag shows the version that is held, which is the next step's number.
        if self.step is not None and self.place in ("between", "section"):
            return self.step + 1
        return self.step
