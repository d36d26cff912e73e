"""What every rule of the core is written with: the state, the words to change it, and the decision to end."""

from dataclasses import dataclass, field, replace

from flashrecd.core import events as ev
from flashrecd.core.detection import Detector
from flashrecd.core.state import GONE, JobConfig, JobState, Member, RankStatus, Status


@dataclass(slots=True)
class Ledger:
    """One job's state, and the actions that the event at hand has led to so far."""

    config: JobConfig
    state: JobState = field(default_factory=JobState)
    detector: Detector = field(init=False)
    _out: list[ev.Action] = field(default_factory=list, init=False)
    _now: float = field(default=0.0, init=False)

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
        for rank, member in enumerate(self.state.members):
            if member.proc == proc and member.status not in GONE:
                return rank
        return None

    def _update(self, rank: int, **changes: object) -> Member:
        member = replace(self.state.members[rank], **changes)  # type: ignore[arg-type]
        self._set(members=(*self.state.members[:rank], member, *self.state.members[rank + 1 :]))
        return member

    def _new_proc(self) -> str:
        self._set(num_launched=self.state.num_launched + 1)
        return f"p{self.state.num_launched}"

    def _live_procs(self) -> tuple[str, ...]:
        return tuple(m.proc for m in self.state.members if m.status not in GONE)

    def _all(self, *statuses: RankStatus) -> bool:
        return all(m.status in statuses for m in self.state.members)

    def _charge(self, cause: str, *, again: bool = True) -> bool:
        """Takes one from the restart budget, unless this recovery has paid; False, and the job ends, when it is
        overdrawn."""
        self._set(restarts=self.state.restarts + again)
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
        standbys = tuple(proc for proc, _ in self.state.standbys)
        doomed = (*self.state.stopping_procs, *self._live_procs(), *standbys)
        # Ranks and standbys are forgotten now, so that whatever they still say changes nothing.
        members = tuple(replace(m, status=RankStatus.DEAD) for m in self.state.members)
        self._set(members=members, standbys=(), stopping_procs=doomed)
        for proc in doomed:
            self._do(ev.Kill(proc, hard or proc in standbys, reason))

    def _end_if_closed(self) -> None:
        if self._all(*GONE) and not self.state.standbys:
            self._end(*(self.state.outcome or (0, "every rank ended with exit code 0")))

    def _end(self, code: int, reason: str) -> None:
        self._set(status=Status.ENDED, outcome=(code, reason))
        self._log("ended", reason)
        self._do(ev.End(code, reason))
