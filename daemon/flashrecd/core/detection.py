"""Who is suspected, and why: silence, and standing still while others wait. Pure; time is an argument.

One knob, `suspect_after_s`, and what follows from it:

    silence      no heartbeat for suspect_after_s: the process is stopped, or its interpreter is stuck
    no progress  its tag has stood still for longer than max(10 x suspect_after_s, 5 x the longest step it has
                 taken), it is behind every other rank, and all of those stand still too (they wait for it)
    slow         a replacement that is not ready after max(200 x suspect_after_s, 5 x the longest any rank took
                 from its launch to protect() when the job started), while all others are parked

When all stand still alike nobody is suspected: that is reported instead. If the watcher itself was not
running (a tick came late), nobody is blamed for it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

STILL_FACTOR = 10.0
STEP_FACTOR = 5.0
BUILD_FACTOR = 200.0
ADOPT_FACTOR = 10.0
PATIENCE_FACTOR = 100.0
START_FACTOR = 5.0
KEPT_FACTOR = 20.0
HEARTBEATS = 12  # as many may be lost or late before their silence counts


class Timeout(NamedTuple):
    """A time-out and where it comes from, for a person."""

    name: str
    seconds: float
    why: str


def explain(suspect_after_s: float) -> list[Timeout]:
    """The knob, and what is derived from it."""
    return [
        Timeout("suspect after", suspect_after_s, "the one knob: flashrec run --suspect-after"),
        Timeout(
            "heartbeat",
            suspect_after_s / HEARTBEATS,
            f"a rank says that it lives: suspect after / {HEARTBEATS}",
        ),
        Timeout("silence", suspect_after_s, "no heartbeat for as long: the rank is killed and replaced"),
        Timeout(
            "no progress",
            STILL_FACTOR * suspect_after_s,
            f"{STILL_FACTOR:.0f} x suspect after, or {STEP_FACTOR:.0f} x the rank's longest step if that is more: "
            "a rank that others wait for is killed and replaced",
        ),
        Timeout(
            "replacement",
            BUILD_FACTOR * suspect_after_s,
            f"{BUILD_FACTOR:.0f} x suspect after, or {START_FACTOR:.0f} x the longest start if that is more: a "
            "replacement that is not ready is killed and replaced",
        ),
        Timeout(
            "launcher",
            BUILD_FACTOR * suspect_after_s,
            f"{BUILD_FACTOR:.0f} x suspect after: if another launcher started the ranks, it has as long to start again "
            "those it has lost, while others wait for them; then the job ends",
        ),
        Timeout(
            "adoption",
            ADOPT_FACTOR * suspect_after_s,
            f"{ADOPT_FACTOR:.0f} x suspect after: a daemon that takes over from one that died gives every rank as "
            "long to say where it stands; one that lives and does not is killed and replaced",
        ),
        Timeout(
            "patience",
            PATIENCE_FACTOR * suspect_after_s,
            f"{PATIENCE_FACTOR:.0f} x suspect after: without a daemon training goes on; where it cannot (another rank "
            "was lost), a rank waits as long for another daemon, and then fails",
        ),
        Timeout(
            "kept elsewhere",
            KEPT_FACTOR * suspect_after_s,
            f"{KEPT_FACTOR:.0f} x suspect after: a rank that has sealed a version waits in its gate for the other "
            "nodes that keep replicas of it; if one that is there does not acknowledge it for as long, all park, and "
            "the step is done again",
        ),
        Timeout(
            "node",
            suspect_after_s,
            "nothing was heard of a node for as long, or its connection is closed: that is reported; it is lost, and "
            "its ranks move, once nothing listens at its shard address either, a rank has parked, or those of all "
            "other nodes stand still for as long, and longer than any of their steps took",
        ),
        Timeout(
            "what is kept",
            suspect_after_s,
            "in a recovery a node that does not say for as long what replicas it keeps is lost; for the first node, "
            f"which cannot be, it is {STILL_FACTOR:.0f} x suspect after, and then it keeps nothing",
        ),
        Timeout(
            "late watcher",
            suspect_after_s / 2,
            "if the daemon itself did not run for as long, it blames nobody and counts anew",
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Watch:
    heard_at: float
    entered: int | None = None
    entered_at: float = 0.0
    progress: int = -1
    moved_at: float = 0.0
    longest_step_s: float = 0.0


class Detector:
    """Keeps what was last heard and seen of each process."""

    def __init__(self, suspect_after_s: float) -> None:
        self.suspect_after_s = suspect_after_s
        self._watches: dict[str, _Watch] = {}
        self._condemned: set[str] = set()
        self._ticked_at: float | None = None
        self._stall_reported = False
        self._undisturbed_since = 0.0
        self._building_since: dict[str, float] = {}
        self._longest_start_s = 0.0

    def disturbed(self, now: float) -> None:
        """A failure began, or is over: a step that had begun before says nothing about how long steps take."""
        self._undisturbed_since = now

    def heard(self, proc: str, now: float) -> None:
        watch = self._watches.get(proc)
        self._watches[proc] = replace(watch, heard_at=now) if watch else _Watch(now, moved_at=now)

    def progressed(self, proc: str, entered: int | None, progress: int, now: float) -> None:
        """`progress` orders the ranks: whoever has the smallest is behind."""
        watch = self._watches.get(proc) or _Watch(now, moved_at=now)
        if progress != watch.progress:
            watch = replace(watch, progress=progress, moved_at=now)
            self._stall_reported = False
        if entered != watch.entered:
            learns = watch.entered is not None and watch.entered_at > self._undisturbed_since
            took = now - watch.entered_at if learns else 0.0
            watch = replace(
                watch, entered=entered, entered_at=now, longest_step_s=max(watch.longest_step_s, took)
            )
        self._watches[proc] = watch

    def building(self, proc: str, now: float) -> None:
        """`proc` was launched for a rank, or given one."""
        self._building_since[proc] = now

    def protected(self, proc: str, now: float) -> None:
        """`proc`, launched when the job started, has come to protect()."""
        since = self._building_since.pop(proc, now)
        self._longest_start_s = max(self._longest_start_s, now - since)

    def formed(self) -> None:
        """Nobody is building any more."""
        self._building_since.clear()

    def slow(self, now: float) -> list[tuple[str, str]]:
        """The replacements that all others have waited for long enough."""
        bound = max(BUILD_FACTOR * self.suspect_after_s, START_FACTOR * self._longest_start_s)
        return [
            (proc, f"a replacement that is not ready after {now - since:.0f} s")
            for proc, since in self._building_since.items()
            if now - since > bound
        ]

    def forget(self, proc: str) -> None:
        self._building_since.pop(proc, None)
        self._watches.pop(proc, None)
        self._condemned.discard(proc)

    def step_of(self, proc: str) -> int | None:
        """The step whose body `proc` was last seen in; None between steps."""
        watch = self._watches.get(proc)
        return watch.entered if watch is not None else None

    def condemn(self, proc: str) -> bool:
        """True the first time: a suspect is killed once."""
        if proc in self._condemned:
            return False
        self._condemned.add(proc)
        return True

    def silence(self, proc: str, now: float) -> float:
        """For how long it has not been heard, in seconds; 0 if it never was."""
        watch = self._watches.get(proc)
        return now - watch.heard_at if watch is not None else 0.0

    def forgive(self, procs: Iterable[str], now: float) -> None:
        """Nothing could be heard of them until now."""
        for proc in procs:
            if proc in self._watches:
                self._watches[proc] = replace(self._watches[proc], heard_at=now, moved_at=now)

    def stands_still(self, procs: Iterable[str], now: float) -> bool:
        """Whether all of them have stood still for longer than the longest step that any has taken."""
        seen = [self._watches.get(proc) for proc in procs]
        watches = [watch for watch in seen if watch is not None]
        if not watches or len(watches) < len(seen):
            return False
        bound = max(self.suspect_after_s, *(watch.longest_step_s for watch in watches))
        return all(now - watch.moved_at > bound for watch in watches)

    def ticked(self, now: float) -> bool:
        """Time has passed. True if it was the watcher that stood still, and so blames nobody."""
        late = self._ticked_at is not None and now - self._ticked_at > self.suspect_after_s / 2
        self._ticked_at = now
        if late:
            self.forgive(list(self._watches), now)
        return late

    def suspects(self, waiting: Mapping[str, bool], now: float) -> list[tuple[str, str]]:
        """`waiting`: the processes to judge; True for one that waits for others by its own word."""
        if self.ticked(now):
            return []
        silent = [
            (proc, f"no heartbeat for {now - watch.heard_at:.1f} s")
            for proc, watch in self._watches.items()
            if proc in waiting and now - watch.heard_at > self.suspect_after_s
        ]
        return silent or self._laggard(waiting, now)

    def _bound(self, watch: _Watch) -> float:
        return max(STILL_FACTOR * self.suspect_after_s, STEP_FACTOR * watch.longest_step_s)

    def _laggard(self, waiting: Mapping[str, bool], now: float) -> list[tuple[str, str]]:
        seen = {proc: self._watches[proc] for proc in waiting if proc in self._watches}
        if len(seen) < len(waiting):
            return []
        busy = {proc: watch for proc, watch in seen.items() if not waiting[proc]}
        still = [proc for proc, watch in busy.items() if now - watch.moved_at > self._bound(watch)]
        if not busy or len(still) < len(busy):
            return []
        least = min(watch.progress for watch in busy.values())
        behind = [proc for proc in still if busy[proc].progress == least]
        if len(behind) == len(seen):
            return []
        # One at a time, and the others get a new chance: what held them up may have been this one.
        worst, since = behind[0], now - busy[behind[0]].moved_at
        for proc in behind[1:]:
            self._watches[proc] = replace(self._watches[proc], moved_at=now)
        return [(worst, f"no progress for {since:.1f} s while others wait for it")]

    def stalled(self, waiting: Mapping[str, bool], now: float) -> bool:
        """All stand still alike (true once per stall): nobody can be blamed, but somebody should know."""
        seen = [self._watches[proc] for proc in waiting if proc in self._watches]
        alike = len(seen) == len(waiting) > 0 and len({w.progress for w in seen}) == 1
        stall = alike and not any(waiting.values()) and all(now - w.moved_at > self._bound(w) for w in seen)
        report, self._stall_reported = stall and not self._stall_reported, stall
        return report
