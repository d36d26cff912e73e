"""What became of each kill: the injector's record joined with the daemon's. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrec.cli.demo.injector import Strike
from flashrec.cli.demo.schedule import Fault

MARKS = ("detected", "parked", "planned", "pulled", "rehearsed", "formed", "redone")
NOTICED_WITHIN_NS = 10_000_000_000


@dataclass(frozen=True, kw_only=True)
class FaultReport:
    """A planned kill; `strike` is None if it never came to pass.

    `timeline`: milliseconds from the signal to the end of each part of the recovery, on the slowest rank that took
    part in it; 0 for what was done before the signal (a built standby has rehearsed long ago). Two faults of one
    recovery share its instants.
    """

    fault: Fault
    strike: Strike | None
    timeline: Mapping[str, float]
    version: int | None
    """The step at which the job went on."""
    complete: bool
    standby: str | None = None
    """How far the process was that took the rank."""

    @property
    def place(self) -> str | None:
        return self.strike.place if self.strike is not None else None

    @property
    def step(self) -> int | None:
        """In which it struck; of a replacement that held nothing yet, the step it was to go on with."""
        if self.strike is None:
            return None
        return self.strike.step if self.strike.step >= 0 else self.version

    @property
    def recovered_ms(self) -> float | None:
        """From the signal to the commit of the next step on all ranks."""
        return self.timeline.get("redone") if self.complete else None

    def to_json(self, redone: set[int]) -> dict[str, Any]:
        """`redone`: steps that some rank began again, see `timing.redone_steps`."""
        struck = self.strike is not None
        return {
            "kind": "SIGKILL",
            "rank": self.fault.rank,
            "step": self.step,
            "phase": self.place,
            "planned_phase": self.fault.place or "random",
            "fired": struck,
            "standby": self.standby,
            "detected_ms": self.timeline.get("detected"),
            "parked_ms": self.timeline.get("parked"),
            "recovered_ms": self.recovered_ms,
            "timeline": dict(self.timeline),
            "redone_steps": int(self.version in redone) if struck else 0,
        }


def join(
    faults: Sequence[Fault],
    strikes: Iterable[Strike],
    recoveries: Sequence[Mapping[str, Any]],
    standbys: Mapping[int, str],
) -> list[FaultReport]:
    """`recoveries`: as in the daemon's status; `standbys`: by the fault's index, who took the rank."""
    by_index = {strike.index: strike for strike in strikes}
    return [
        _report(fault, by_index.get(fault.index), recoveries, standbys.get(fault.index)) for fault in faults
    ]


def unplanned(strikes: Sequence[Strike], recoveries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Deaths that no kill of ours explains, in words: a suspect the daemon ended, a crash."""
    explained = [found[1] for strike in strikes if (found := _noticed(strike, recoveries)) is not None]
    return [
        _in_words(death, recovery["version"])
        for recovery in recoveries
        for death in recovery["faults"]
        if death["at_ns"] not in explained
    ]


def _in_words(death: Mapping[str, Any], version: int | None) -> str:
    place = death.get("place", "an unknown place")
    return f"rank {death['rank']}, {death['kind']}, in {place} of step {version}"


def _report(
    fault: Fault, strike: Strike | None, recoveries: Sequence[Mapping[str, Any]], standby: str | None
) -> FaultReport:
    found = _noticed(strike, recoveries) if strike is not None else None
    if strike is None or found is None:
        return FaultReport(
            fault=fault, strike=strike, timeline={}, version=None, complete=False, standby=standby
        )
    recovery, noticed_ns = found
    instants = {**recovery["marks"], "detected": noticed_ns}
    timeline = {
        mark: round(max(0, instants[mark] - strike.signal_ns) / 1e6, 3) for mark in MARKS if mark in instants
    }
    return FaultReport(
        fault=fault,
        strike=strike,
        timeline=timeline,
        version=recovery["version"],
        complete=recovery["complete"],
        standby=standby,
    )


def _noticed(strike: Strike, recoveries: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], int] | None:
    """The recovery a kill led to, and when the daemon saw the process end."""
    for recovery in recoveries:
        for noticed in recovery["faults"]:
            late_ns = noticed["at_ns"] - strike.signal_ns
            if noticed["rank"] == strike.rank and 0 <= late_ns < NOTICED_WITHIN_NS:
                return recovery, noticed["at_ns"]
    return None
