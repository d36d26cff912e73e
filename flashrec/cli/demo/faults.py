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
    """A planned kill of one rank or of several; `strikes` has one for each rank that was killed.

    `timeline`: milliseconds from the signal to the end of each part of the recovery, on the slowest rank that took
    part in it; 0 for what was done before the signal (a built standby has rehearsed long ago). Two faults of one
    recovery share its instants.
    """

    fault: Fault
    strikes: tuple[Strike, ...]
    timeline: Mapping[str, float]
    version: int | None
    """The step at which the job went on."""
    complete: bool
    num_seen: int = 0
    """Of the deaths, those that are in the daemon's record."""
    standbys: tuple[str, ...] = ()
    """How far the processes were that took the ranks."""

    @property
    def strike(self) -> Strike | None:
        """That of the rank which was watched."""
        return self.strikes[0] if self.strikes else None

    @property
    def fired(self) -> bool:
        """Every rank of it was killed."""
        return len(self.strikes) == len(self.fault.ranks)

    @property
    def seen(self) -> bool:
        """Every rank of it was killed, and the daemon has each death in its record."""
        return self.fired and self.num_seen == len(self.strikes)

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
    def standby(self) -> str | None:
        return self.standbys[0] if self.standbys else None

    @property
    def recovered_ms(self) -> float | None:
        """From the signal to the commit of the next step on all ranks."""
        return self.timeline.get("redone") if self.complete else None

    @property
    def taken_back(self) -> set[int]:
        """Steps that a killed rank had committed, by its tag, and that the job went back behind."""
        committed = max((strike.committed for strike in self.strikes), default=-1)
        return set() if self.version is None else set(range(self.version, committed))

    def to_json(self, redone: set[int], again: set[int]) -> dict[str, Any]:
        """`redone`: steps that some rank began again; `again`: committed ones done again after this fault."""
        struck = self.strike is not None
        return {
            "kind": "SIGKILL",
            "rank": self.fault.rank,
            "ranks": list(self.fault.ranks),
            "step": self.step,
            "phase": self.place,
            "phases": {str(strike.rank): strike.place for strike in self.strikes},
            "planned_phase": self.fault.place or "random",
            "fired": self.fired,
            "pids": [strike.pid for strike in self.strikes],
            "deaths_seen": self.num_seen,
            "standby": self.standby,
            "standbys": list(self.standbys),
            "resumed_step": self.version,
            "detected_ms": self.timeline.get("detected"),
            "parked_ms": self.timeline.get("parked"),
            "recovered_ms": self.recovered_ms,
            "timeline": dict(self.timeline),
            "redone_steps": int(self.version in redone) if struck else 0,
            "committed_steps_again": len(again),
        }


def join(
    faults: Sequence[Fault],
    strikes: Iterable[Strike],
    recoveries: Sequence[Mapping[str, Any]],
    standbys: Mapping[tuple[int, int], str],
) -> list[FaultReport]:
    """`recoveries`: as in the daemon's status; `standbys`: by the fault's index and the rank, who took the rank."""
    by_index: dict[int, list[Strike]] = {}
    for strike in strikes:
        by_index.setdefault(strike.index, []).append(strike)
    return [_report(fault, by_index.get(fault.index, ()), recoveries, standbys) for fault in faults]


def unplanned(strikes: Sequence[Strike], recoveries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Deaths that no kill of ours explains, in words: a suspect the daemon ended, a crash."""
    explained = [found[1] for strike in strikes if (found := _noticed(strike, recoveries)) is not None]
    return [
        in_words(death, recovery["version"])
        for recovery in recoveries
        for death in recovery["faults"]
        if death["at_ns"] not in explained
    ]


def in_words(death: Mapping[str, Any], version: int | None) -> str:
    place = death.get("place", "an unknown place")
    return f"rank {death['rank']}, {death['kind']}, in {place} of step {version}"


def _report(
    fault: Fault,
    strikes: Sequence[Strike],
    recoveries: Sequence[Mapping[str, Any]],
    standbys: Mapping[tuple[int, int], str],
) -> FaultReport:
    taken = tuple(
        standbys[fault.index, strike.rank] for strike in strikes if (fault.index, strike.rank) in standbys
    )
    noticed = [found for strike in strikes if (found := _noticed(strike, recoveries)) is not None]
    if not strikes or len(noticed) < len(strikes):
        return FaultReport(
            fault=fault,
            strikes=tuple(strikes),
            timeline={},
            version=None,
            complete=False,
            num_seen=len(noticed),
            standbys=taken,
        )
    recovery, noticed_ns = max(noticed, key=lambda found: found[1])
    instants = {**recovery["marks"], "detected": noticed_ns}
    signal_ns = strikes[0].signal_ns
    timeline = {
        mark: round(max(0, instants[mark] - signal_ns) / 1e6, 3) for mark in MARKS if mark in instants
    }
    return FaultReport(
        fault=fault,
        strikes=tuple(strikes),
        timeline=timeline,
        version=recovery["version"],
        complete=recovery["complete"],
        num_seen=len(noticed),
        standbys=taken,
    )


def _noticed(strike: Strike, recoveries: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], int] | None:
    """The recovery a kill led to, and when the daemon saw the process end."""
    for recovery in recoveries:
        for noticed in recovery["faults"]:
            late_ns = noticed["at_ns"] - strike.signal_ns
            if noticed["rank"] == strike.rank and 0 <= late_ns < NOTICED_WITHIN_NS:
                return recovery, noticed["at_ns"]
    return None
