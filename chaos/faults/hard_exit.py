"""os._exit: no exception, no clean-up, no word."""

from chaos.cues import Cue
from chaos.faults.base import Evidence, Fault


class HardExit(Fault):
    def __init__(self, rank: int, place: str, step: int, code: int = 0) -> None:
        self.rank, self.place, self.step, self.code = rank, place, step, code
        self.name = f"hard-exit-r{rank}-{place}-{step}"

    def cues(self) -> list[Cue]:
        return [
            Cue(
                name=self.name,
                rank=self.rank,
                place=self.place,
                step=self.step,
                act="hard_exit",
                code=self.code,
            )
        ]

    def missing(self, evidence: Evidence) -> str | None:
        if not evidence.died(self.rank, f"exit {self.code}", self.place, self.step):
            return (
                f"no record of rank {self.rank} exiting with {self.code} in {self.place} of step {self.step}"
            )
        return None
