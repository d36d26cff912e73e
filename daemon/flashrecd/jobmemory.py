"""What a job keeps in this node's shared memory, as the daemon sees it: versions, layouts, and how much it takes."""

from collections.abc import Callable
from pathlib import Path

from flashrec.errors import FlashrecError
from flashrec.state.arena import Arena
from flashrec.state.files import free_bytes
from flashrec.state.layout import RankLayout
from flashrec.state.private_slots import FULL, PRIVATE, PrivateSlots


class JobMemory:
    """Read-only. `note(event, reason, rank)` is told what cannot be read."""

    def __init__(self, directory: Path, job: str, note: Callable[[str, str, int], None]) -> None:
        self._directory = directory
        self._job = job
        self._note = note
        self._first: dict[int, RankLayout] = {}  # what the first process of each rank has published
        self.arena_bytes: dict[int, int] = {}
        """By rank, what sealing takes of shared memory."""

    def kept(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The versions in the rank's private slots, and in its arena."""
        problems: list[str] = []
        try:
            private = tuple(
                sorted(
                    {
                        slot.version
                        for directory in (PRIVATE, FULL)
                        for slot in PrivateSlots(self._directory / directory, rank).sealed()
                    }
                )
            )
            arena = Arena(self._directory / "arena", rank, self._job)
            sealed = tuple(one.version for one in arena.sealed(problems))
        except FlashrecError as error:
            self._note("sealed state unreadable", str(error), rank)
            return (), ()
        for problem in problems:
            self._note("arena refused", problem, rank)
        return private, sealed

    def disagreement(self, rank: int) -> str:
        """Between what `rank` has published and what others have, or its own process before, in words; "" if there
        is none."""
        try:
            mine = self._published(rank)
            before = {one.ranks: one.layout for one in self._first.setdefault(rank, mine).sets}
            for one in mine.sets:
                then = before.get(one.ranks, one.layout)
                if words := one.layout.difference(then, ("this process", "the one before it")):
                    return words
            others = {
                next((r for r in one.ranks if r != rank and self._path(r).exists()), rank)
                for one in mine.sets
            }
            for other in sorted(others - {rank}):
                if words := mine.disagreement(self._published(other)):
                    return words
        except (OSError, FlashrecError) as error:
            return f"it cannot be read: {error}"
        return ""

    def needs(self) -> str:
        """What sealing takes, for a person."""
        needed, free = sum(self.arena_bytes.values()), free_bytes(self._directory)
        return (
            f"{needed / 2**20:.1f} MiB of shared memory for the sealed versions of {len(self.arena_bytes)} ranks "
            f"(twice what they seal); {self._directory.parent} has {free / 2**20:.0f} MiB free"
        )

    def shortage(self, *, served: bool = False) -> str:
        """Why there can be no arenas, in words; "" if there can. `served`: besides, there must be room for the state
        once more, which survivors serve in a recovery of the live regime."""
        needed = sum(self.arena_bytes.values())
        if needed + (needed // 2 if served else 0) <= free_bytes(self._directory):
            return ""
        also = ", and half as much must be left for what survivors serve" if served else ""
        return f"there is no room for the arenas: {self.needs()}{also}"

    def _published(self, rank: int) -> RankLayout:
        return RankLayout.from_bytes(self._path(rank).read_bytes())

    def _path(self, rank: int) -> Path:
        return self._directory / "layout" / f"r{rank}"
