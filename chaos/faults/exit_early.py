"""The script of one rank ends too early, with exit code 0."""

from chaos.cues import Cue
from chaos.faults.base import Evidence, Fault


class ExitEarly(Fault):
    def __init__(self, rank: int, place: str, step: int) -> None:
        self.rank, self.place, self.step = rank, place, step
        self.name = f"exit-r{rank}-{place}-{step}"

    def cues(self) -> list[Cue]:
        return [Cue(name=self.name, rank=self.rank, place=self.place, step=self.step, act="exit")]

    def missing(self, evidence: Evidence) -> str | None:
        # In a body the process ends by itself; between steps it lingers, and is ended when another goes on.
        kind = "SIGKILL" if self.place == "between" else "exit 0"
        if self.name not in evidence.fired or not evidence.died(self.rank, kind):
            return f"no record of rank {self.rank} ending early ({kind}): {evidence.deaths}"
        return None
