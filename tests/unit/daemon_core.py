"""A core in a test: told in short words what happens, asked what it answered."""

from typing import Any, TypeVar

from flashrecd.core import events as ev
from flashrecd.core.job import Core
from flashrecd.core.state import JobConfig, Member, RankStatus, Status

A = TypeVar("A", bound=tuple[Any, ...])


class Driven:
    """A `Core`, the time, and everything it has answered so far."""

    def __init__(self, world_size: int = 3, **config: Any) -> None:
        self.core = Core(JobConfig(world_size=world_size, **{"num_standbys": 0, **config}))
        self.now = 100.0
        self.actions: list[ev.Action] = []
        self.tell(ev.Begin())

    def tell(self, *events: ev.Event) -> list[ev.Action]:
        """The answers to the last of `events`."""
        answer: list[ev.Action] = []
        for event in events:
            answer = self.core.handle(event, self.now)
            self.actions += answer
        return answer

    @property
    def status(self) -> Status:
        return self.core.state.status

    @property
    def generation(self) -> int:
        return self.core.state.generation

    def member(self, rank: int) -> Member:
        return self.core.state.members[rank]

    def proc(self, rank: int) -> str:
        return self.member(rank).proc

    def ranks(self) -> range:
        return range(len(self.core.state.members))

    def found(self, kind: type[A], actions: list[ev.Action] | None = None) -> list[A]:
        return [a for a in (self.actions if actions is None else actions) if isinstance(a, kind)]

    def only(self, kind: type[A], actions: list[ev.Action] | None = None) -> A:
        (one,) = self.found(kind, actions)
        return one

    # --- what happens ---------------------------------------------------------------------------------------

    def protect(self, *ranks: int, layout: str = "same") -> list[ev.Action]:
        claims = ((tuple(self.ranks()), layout),)
        return self.tell(*[ev.Protected(self.proc(rank), claims) for rank in ranks or self.ranks()])

    def running(self) -> "Driven":
        self.protect()
        assert self.status is Status.RUNNING
        return self

    def die(self, rank: int, *sealed: int, code: int | None = None) -> list[ev.Action]:
        signal = 9 if code is None else None
        return self.tell(ev.Exited(self.proc(rank), code, signal, sealed))

    def park(
        self, rank: int, version: int | None, can_advance: bool = False, *sealed: int
    ) -> list[ev.Action]:
        return self.tell(ev.Parked(self.proc(rank), self.generation, version, can_advance, sealed))

    def form(self, *ranks: int, buckets: str = "") -> list[ev.Action]:
        return self.tell(
            *[ev.Formed(self.proc(rank), self.generation, buckets) for rank in ranks or self.ranks()]
        )

    def leave(self, *ranks: int, version: int = 9) -> list[ev.Action]:
        return self.tell(*[ev.Leaving(self.proc(r), self.generation, version) for r in ranks or self.ranks()])

    def recover(self, rank: int, version: int) -> None:
        """`rank` dies and is replaced; the others had all stopped at `version`."""
        self.die(rank, version, version + 1)
        for other in self.ranks():
            if self.member(other).status is RankStatus.LIVE:
                self.park(other, version)
        assert self.status is Status.FORMING, self.actions[-3:]
        self.form()
        assert self.status is Status.RUNNING

    def end_of(self, *procs: str) -> list[ev.Action]:
        return self.tell(*[ev.Exited(proc, None, 9) for proc in procs])
