"""What every rule of the core is written with: the state, the words to change it, and the decision to end."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flashrecd.core import events as ev
from flashrecd.core.detection import Detector
from flashrecd.core.state import (
    CHUNK,
    GONE,
    JobConfig,
    JobState,
    Kept,
    Member,
    Members,
    NodeStatus,
    RankStatus,
    Standby,
    Status,
)

SMALL = 2 * CHUNK  # ranks of a job whose members are copied faster than shared


@dataclass(slots=True)
class Ledger:
    """One job's state, and the actions that the event at hand has led to so far."""

    config: JobConfig
    state: JobState = field(default_factory=JobState)
    detector: Detector = field(init=False)
    _out: list[ev.Action] = field(default_factory=list, init=False)
    _now: float = field(default=0.0, init=False)
    # Asked for in every event, of a list that grows with every node that comes back: its nodes, and who of them lives.
    _live: tuple[tuple[NodeStatus, ...], tuple[int, ...]] = field(
        default=((), ()), init=False, compare=False, repr=False
    )

    # Asked for with every node's answer: of these holdings, the nodes.
    _told: tuple[tuple[tuple[int, tuple[Kept, ...]], ...], set[int]] = field(
        default_factory=lambda: ((), set()), init=False, compare=False, repr=False
    )
    # Asked for with every message of every rank: of these members, the rank of each process and how many have each
    # status. Whoever puts other members in place of them (the explorer does) need not know.
    _counted: Sequence[Member] = field(default=(), init=False, compare=False, repr=False)
    _rank_by_proc: dict[str, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    _num_by_status: Counter[RankStatus] = field(
        default_factory=Counter, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        self.detector = Detector(self.config.suspect_after_s)

    def _set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def _do(self, action: ev.Action) -> None:
        self._out.append(action)

    def _log(self, event: str, reason: str, rank: int | None = None, step: int | None = None) -> None:
        self._do(ev.Log(event, rank, step, reason))

    def rank_of(self, proc: str) -> int | None:
        """The rank a process holds, or None: a standby, a process of the past, a stranger."""
        self._count()
        rank = self._rank_by_proc.get(proc)
        if rank is None or self.state.members[rank].status in GONE:
            return None
        return rank

    def _count(self) -> None:
        members = self.state.members
        if self._counted is not members:
            self._counted = members
            self._rank_by_proc = {member.proc: rank for rank, member in enumerate(members)}
            self._num_by_status = Counter(member.status for member in members)

    def standby(self, proc: str) -> Standby | None:
        """The standby of that name, or None."""
        return next((one for one in self.state.standbys if one.proc == proc), None)

    def _change_standby(self, proc: str, depth: str) -> None:
        self._set(
            standbys=tuple(s._replace(depth=depth) if s.proc == proc else s for s in self.state.standbys)
        )

    def _update(self, rank: int, **changes: object) -> Member:
        self._count()
        before = self.state.members[rank]
        member = replace(before, **changes)  # type: ignore[arg-type]
        members = self.state.members
        if len(members) > SMALL:
            many = members if isinstance(members, Members) else Members(members)
            self._set(members=many.changed(rank, member))
        else:
            self._set(members=(*members[:rank], member, *members[rank + 1 :]))
        self._counted = self.state.members
        if member.proc != before.proc:
            self._rank_by_proc.pop(before.proc, None)
            self._rank_by_proc[member.proc] = rank
        self._num_by_status[before.status] -= 1
        self._num_by_status[member.status] += 1
        return member

    def _update_all(self, of: tuple[RankStatus, ...], **changes: object) -> None:
        """The same change for every rank that has one of these statuses."""
        members = tuple(
            replace(member, **changes) if member.status in of else member  # type: ignore[arg-type]
            for member in self.state.members
        )
        self._set(members=members)

    def _new_proc(self) -> str:
        self._set(num_launched=self.state.num_launched + 1)
        return f"p{self.state.num_launched}"

    def _live_procs(self) -> tuple[str, ...]:
        return tuple(m.proc for m in self.state.members if m.status not in GONE)

    def _all(self, *statuses: RankStatus) -> bool:
        self._count()
        return sum(self._num_by_status[status] for status in statuses) == len(self.state.members)

    def _any(self, status: RankStatus) -> bool:
        self._count()
        return self._num_by_status[status] > 0

    def _charge(self, cause: str, *, again: bool = True) -> bool:
        """Takes one from the restart budget, unless this recovery has paid; False, and the job ends, when it is
        overdrawn."""
        self._set(restarts=self.state.restarts + again, is_regrouping=self.state.is_regrouping and not again)
        if self.config.max_restarts is not None and self.state.restarts > self.config.max_restarts:
            self._finish(1, f"{cause}; the restart budget of {self.config.max_restarts} is spent")
            return False
        return True

    def _why_it_failed(self) -> str:
        """What struck first, and, where that says less, the last traceback's last line (a replacement's, say)."""
        first, last = self.state.first_failure, self.state.errors[-1][1] if self.state.errors else ""
        return first if not last or last in first else f"{first}; the last error: {last}".removeprefix("; ")

    def _finish(self, code: int, reason: str, *, hard: bool = True) -> None:
        """The end is decided; it has come when the last process is gone."""
        self._set(outcome=(code, reason), status=Status.STOPPING)
        self._log("stopping", reason)
        self._kill_all(reason, hard=hard)
        if not self.state.stopping_procs:
            self._end(code, reason)

    def _kill_all(self, reason: str, *, hard: bool = True) -> None:
        standbys = tuple(standby.proc for standby in self.state.standbys)
        doomed = (*self.state.stopping_procs, *self._live_procs(), *standbys)
        there: list[Member | Standby] = [*self.state.members, *self.state.standbys]
        places = {**dict(self.state.doomed_at), **{one.proc: one.node for one in there if one.node}}
        # Ranks and standbys are forgotten now, so that whatever they still say changes nothing.
        members = tuple(replace(m, status=RankStatus.DEAD) for m in self.state.members)
        self._set(
            members=members,
            standbys=(),
            stopping_procs=doomed,
            doomed_at=tuple((proc, places[proc]) for proc in doomed if proc in places),
        )
        for proc in doomed:
            self._do(ev.Kill(proc, hard or proc in standbys, reason))

    def _end_if_closed(self) -> None:
        if self._all(*GONE) and not self.state.standbys:
            self._end(*(self.state.outcome or (0, "every rank ended with exit code 0")))

    def _end(self, code: int, reason: str) -> None:
        self._set(status=Status.ENDED, outcome=(code, reason))
        self._log("ended", reason)
        self._do(ev.End(code, reason))
