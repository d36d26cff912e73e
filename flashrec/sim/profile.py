"""Measured durations in a file that one can keep, merge with others and read.

JSON: {"format": 1, "note": "...", "events": {"gemm[1,4096,3072,9216]/bf16@A100-80GB": {"min_s": ..., "median_s": ...,
"count": ...}}}. What is at hand is asked with `seconds`; `require` names everything that lacks at once, with the
command that measures it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrec.errors import UsageError
from flashrec.sim.choices import require_count, require_known, require_number
from flashrec.sim.collectives import MeasuredTable
from flashrec.sim.events import POINT_TO_POINT, Communication, Durations, Event, parse

FORMAT = 1


class MissingEvents(UsageError):
    """A profile lacks events; `events` has their canonical texts, `command` measures them."""

    def __init__(self, events: Iterable[Event], command: str):
        self.events = tuple(sorted({str(event) for event in events}))
        self.command = command
        super().__init__(
            f"{len(self.events)} events are not in the profile:\n  "
            + "\n  ".join(self.events)
            + f"\nmeasure them with: {command}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What was measured of one event."""

    min_s: float
    median_s: float
    count: int

    def __post_init__(self) -> None:
        require_number(self.min_s, "profile: min_s", least=0)
        require_number(self.median_s, "profile: median_s", least=0)
        require_count(self.count, "profile: count")
        if self.min_s > self.median_s:
            raise UsageError(f"profile: min_s ({self.min_s}) is above median_s ({self.median_s})")

    def better(self, other: "Sample") -> "Sample":
        """The one of more repeats; of equally many, the faster (noise only ever adds)."""
        if self.count != other.count:
            return self if self.count > other.count else other
        return self if self.median_s <= other.median_s else other


@dataclass(frozen=True)
class Profile:
    """Samples by event. `Durations`: the minimum for transfers between two, the median for the rest."""

    samples: dict[Event, Sample] = field(default_factory=dict)
    note: str = ""
    command: str = (
        "flashrec profile --model MODEL --cluster CLUSTER --strategy STRATEGY --global-batch N --out PROFILE"
    )

    def seconds(self, key: Event) -> float:
        """Measured seconds; of all-reduces, also between and above the sizes measured on the same ranks.

        Raises MissingEvents where the event was not measured and does not follow from others.
        """
        sample = self.samples.get(key)
        if sample is not None:
            point = isinstance(key, Communication) and key.collective in POINT_TO_POINT
            return sample.min_s if point else sample.median_s
        if isinstance(key, Communication):
            if key.size_bytes == 0 or (key.participants == 1 and key.collective != "host_copy"):
                return 0.0
            estimate = self._from_others(key)
            if estimate is not None:
                return estimate
        raise MissingEvents([key], self.command)

    def _from_others(self, key: Communication) -> float | None:
        """Between other sizes of the same group; else, from another number of ranks, by ring volume and steps.

        Between nodes the ring's slowest edge decides, so what was measured on two nodes serves more. Where the groups
        that share each node's link were not measured together, from one group alone: all but the shortest message's
        time is transmission, which takes so many times longer.
        """
        for groups in dict.fromkeys((key.groups, 1)):
            table = self._table(key, groups)
            if table is None:
                continue
            seconds = table.seconds(key.size_bytes, key.participants)
            if groups == key.groups:
                return seconds
            start = min(seconds, table.seconds(0, key.participants))
            return start + (seconds - start) * key.groups
        return None

    def _table(self, key: Communication, groups: int) -> MeasuredTable | None:
        """What was measured of such a collective, on one node or between nodes as `key` is."""
        same = [
            (other, sample)
            for other, sample in self.samples.items()
            if isinstance(other, Communication)
            and (other.collective, other.device) == (key.collective, key.device)
            and other.groups == groups
            and (other.nodes == key.nodes or min(other.nodes, key.nodes) > 1)
        ]
        point = key.collective in POINT_TO_POINT
        sizes: dict[int, list[tuple[int, int, float]]] = {}
        for other, sample in same:
            seconds = sample.min_s if point else sample.median_s
            sizes.setdefault(other.participants, []).append((other.participants, other.size_bytes, seconds))
        usable = [row for rows in sizes.values() if len({r[1] for r in rows}) > 1 for row in rows]
        if not usable or (point and key.participants not in sizes):
            return None
        return MeasuredTable.from_samples(usable, key.collective)

    def missing(self, events: Iterable[Event]) -> tuple[Event, ...]:
        """Those of `events` whose seconds are not known."""
        lacking = []
        for event in events:
            try:
                self.seconds(event)
            except MissingEvents:
                lacking.append(event)
        return tuple(lacking)

    def require(self, events: Iterable[Event]) -> None:
        """Raises MissingEvents with all that lacks, and the command that would measure it."""
        lacking = self.missing(events)
        if lacking:
            raise MissingEvents(lacking, self.command)

    def merged(self, other: "Profile") -> "Profile":
        """Both; where both have an event, the better sample."""
        samples = dict(self.samples)
        for event, sample in other.samples.items():
            samples[event] = sample.better(samples[event]) if event in samples else sample
        notes = dict.fromkeys(note for note in (self.note, other.note) if note)
        return Profile(samples, "; ".join(notes), self.command)

    def inspect(self) -> str:
        """A table a person reads."""
        head = f"{'event':<64} {'min':>12} {'median':>12} {'count':>6}"
        lines = [
            f"{event!s:<64} {s.min_s * 1e6:>9.1f} us {s.median_s * 1e6:>9.1f} us {s.count:>6}"
            for event, s in sorted(self.samples.items(), key=lambda item: str(item[0]))
        ]
        return "\n".join([f"{len(self.samples)} events; {self.note}".rstrip("; "), head, *lines])

    def save(self, path: Path) -> None:
        """Writes the file."""
        events = {
            str(event): {"min_s": s.min_s, "median_s": s.median_s, "count": s.count}
            for event, s in sorted(self.samples.items(), key=lambda item: str(item[0]))
        }
        path.write_text(json.dumps({"format": FORMAT, "note": self.note, "events": events}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Reads the file. Raises UsageError where it is none, naming the place."""
        try:
            found: Any = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise UsageError(f"{path} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise UsageError(f"{path}: a profile is a JSON object")
        require_known(found, ("format", "note", "events"), str(path))
        if found.get("format") != FORMAT:
            raise UsageError(f"{path} is of format {found.get('format')!r}; this release reads {FORMAT}")
        samples: dict[Event, Sample] = {}
        for text, value in found.get("events", {}).items():
            require_known(value, ("min_s", "median_s", "count"), f"{path}: {text}")
            if len(value) != 3:
                raise UsageError(f"{path}: {text} needs min_s, median_s and count")
            samples[parse(text)] = Sample(**value)
        return cls(samples, str(found.get("note", "")))


@dataclass(frozen=True)
class ProfileOr:
    """`Durations` from a profile where it has the event, else from another source (the analytic model)."""

    profile: Profile
    other: Durations
    used: set[Event] = field(default_factory=set)
    """Events that came from the other source."""

    def seconds(self, key: Event) -> float:
        """Measured seconds, or the other source's."""
        try:
            return self.profile.seconds(key)
        except MissingEvents:
            self.used.add(key)
            return self.other.seconds(key)
