"""What each recovery took, from the first sign of a failure to the next commit on all ranks.

Instants are `time.monotonic_ns()`, which all processes of the machine share.
"""

from collections import deque
from dataclasses import asdict, dataclass, field
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


class Recoveries:
    """The record of a job's recoveries, the last of which may be under way."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.records: deque[Recovery] = deque(maxlen=KEPT)
        self.num_complete = 0

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
        self.num_complete += 1
        return current

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(record) for record in self.records]
