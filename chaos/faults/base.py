"""What every fault is: cues that bring a rank to where it is to be struck, the strike, and the evidence."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from chaos.cues import Cue
from chaos.job import Job

TAG_PLACES = {
    "finish": "gate",
    "sealed": "gate",
    "seal": "gate",
    "vote": "gate",
    "voted": "gate",
    "serve": "recovery",
    "install": "recovery",
    "pull": "recovery",
    "pulled": "recovery",
    "form": "recovery",
    "formed": "recovery",
    "build": "start",
    "protected": "between",
    "end": "between",
}
"""What the tag says at places that only cues distinguish."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known after the job: `deaths` are the daemon's records of ranks that ended, each with the place
    and step in its tag, read after the process was gone; `fired` the names of the cues that were met."""

    deaths: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]
    fired: frozenset[str]

    def died(self, rank: int, kind: str, place: str | None = None, step: int | None = None) -> bool:
        """Whether such a death is on record; `place` None: anywhere."""
        return any(
            death["rank"] == rank
            and death["kind"] == kind
            and (place is None or death.get("place") == place)
            and (step is None or death.get("step") == step)
            for death in self.deaths
        )


class Fault(ABC):
    """One fault. `name` is unique within a scenario; cues are named after it."""

    name: str

    @abstractmethod
    def cues(self) -> list[Cue]:
        """Where ranks must come to, in order. Empty for a fault that strikes without being waited for."""

    def strike(self, job: Job, cue: Cue) -> None:  # noqa: B027  # a fault may come from inside alone
        """A rank has come to `cue` and holds there: do what this fault does from outside."""

    def poll(self, job: Job) -> None:  # noqa: B027  # most faults wait for their cues
        """Called all the time while the job runs."""

    @abstractmethod
    def missing(self, evidence: Evidence) -> str | None:
        """Why one cannot say that this fault has happened; None if one can."""

    @property
    def num_recoveries(self) -> int:
        """How many processes this fault costs."""
        return 1
