"""The main thread sleeps for ever; its heartbeat, another thread's, goes on."""

from chaos.cues import Cue
from chaos.faults.base import Evidence, Fault


class Hang(Fault):
    def __init__(self, rank: int, place: str, step: int) -> None:
        self.rank, self.place, self.step = rank, place, step
        self.name = f"hang-r{rank}-{place}-{step}"

    def cues(self) -> list[Cue]:
        return [Cue(name=self.name, rank=self.rank, place=self.place, step=self.step, act="sleep")]

    def missing(self, evidence: Evidence) -> str | None:
        blamed = [
            e
            for e in evidence.events
            if e["event"] == "suspect" and "no progress" in e["reason"] and e["step"] == self._entered()
        ]
        if not any(e["rank"] == self.rank for e in blamed):
            return f"nobody noticed that rank {self.rank} stood still: {blamed}"
        if any(e["rank"] != self.rank for e in blamed):
            return f"others were blamed for rank {self.rank}'s standing still: {blamed}"
        if not evidence.died(self.rank, "SIGKILL", self.place, self._tag_step()):
            return f"rank {self.rank} was suspected, but not killed in {self.place} of step {self.step}"
        return None

    def _tag_step(self) -> int:
        return self.step + 1 if self.place == "between" else self.step

    def _entered(self) -> int | None:
        """The step whose body the daemon saw the rank in."""
        return None if self.place == "between" else self.step
