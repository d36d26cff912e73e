"""What each recovery took, from the first sign of a failure to the next commit on all ranks.

Instants are `time.monotonic_ns()`, which all processes of the machine share.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from flashrec.protocol.tag import Tag

KEPT = 1000


@dataclass
class Recovery:
    """One span in which the job was not running; several failures may fall into it."""

    began_ns: int
    faults: list[dict[str, Any]] = field(default_factory=list)
    generation: int = 0
    version: int | None = None
    marks: dict[str, int] = field(default_factory=dict)
    """First or last instant of each part: detected, parked, planned, exported, rehearsed, pulled, formed, redone."""
    committed: dict[int, int] = field(default_factory=dict)
    complete: bool = False

    def latest(self, mark: str, at_ns: int) -> None:
        if at_ns:
            self.marks[mark] = max(at_ns, self.marks.get(mark, 0))


class Durations:
    """A histogram that only grows, as Prometheus wants it."""

    bounds_s = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(self.bounds_s) + 1)

    def add(self, seconds: float) -> None:
        self.sum_s += seconds
        self._counts[bisect_left(self.bounds_s, seconds)] += 1

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many took at most as long), the last one for all."""
        labels = [*map(str, self.bounds_s), "+Inf"]
        return list(zip(labels, map(float, accumulate(self._counts)), strict=True))


class Recoveries:
    """The record of a job's recoveries, the last of which may be under way."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.records: deque[Recovery] = deque(maxlen=KEPT)
        self.taken = Durations()

    @property
    def open(self) -> Recovery | None:
        return self.records[-1] if self.records and not self.records[-1].complete else None

    def suspicion(self, at_ns: int) -> None:
        """Something went wrong, though nobody is known to have died."""
        if self.open is None:
            self.records.append(Recovery(at_ns, marks={"detected": at_ns}))
        assert self.open is not None
        self.open.committed.clear()

    def fault(self, at_ns: int, rank: int | None, kind: str, tag: Tag | None) -> None:
        """A rank's process ended; its tag tells where it was."""
        self.suspicion(at_ns)
        where = (
            {"place": tag.place, "step": tag.step, "changed_ns": tag.changed_ns} if tag is not None else {}
        )
        assert self.open is not None
        self.open.faults.append({"rank": rank, "kind": kind, "at_ns": at_ns, **where})

    def mark(self, mark: str, at_ns: int) -> None:
        if self.open is not None:
            self.open.latest(mark, at_ns)

    def planned(self, generation: int, version: int, at_ns: int) -> None:
        current = self.open
        if current is not None:
            current.generation, current.version = generation, version
            current.latest("planned", at_ns)

    def committed(self, generation: int, rank: int, at_ns: int) -> Recovery | None:
        """The recovery this commit completes, if it does."""
        current = self.open
        if current is None or generation != current.generation:
            return None
        current.committed[rank] = at_ns
        if len(current.committed) < self._world_size:
            return None
        current.latest("redone", max(current.committed.values()))
        current.complete = True
        self.taken.add((current.marks["redone"] - current.began_ns) / 1e9)
        return current

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(record) for record in self.records]
