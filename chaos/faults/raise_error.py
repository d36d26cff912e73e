"""A Python exception in one rank's step."""

from chaos.cues import Cue
from chaos.faults.base import Evidence, Fault


class RaiseError(Fault):
    """`times`: how many attempts at the step fail; each costs a process."""

    def __init__(self, rank: int, place: str, step: int, times: int = 1) -> None:
        self.rank, self.place, self.step, self.times = rank, place, step, times
        self.name = f"raise-r{rank}-{place}-{step}"

    def cues(self) -> list[Cue]:
        return [
            Cue(
                name=self.name,
                rank=self.rank,
                place=self.place,
                step=self.step,
                act="raise",
                times=self.times,
            )
        ]

    def missing(self, evidence: Evidence) -> str | None:
        raised = [e for e in evidence.events if e["event"] == "exception" and self.name in e["reason"]]
        if len(raised) < self.times:
            return f"{len(raised)} of {self.times} exceptions of rank {self.rank} were reported"
        if not evidence.died(self.rank, "exit 1", step=self.step):
            return f"rank {self.rank} raised, but no exit with code 1 in step {self.step} is on record"
        return None

    @property
    def num_recoveries(self) -> int:
        return self.times
