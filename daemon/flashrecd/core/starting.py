"""How a world starts, and starts again; and its standbys."""

from flashrecd.core import events as ev
from flashrecd.core.ledger import Ledger
from flashrecd.core.state import HOLDS_STATE, Member, RankStatus, Status


class Starting(Ledger):
    """The rules from a job's submission to the moment when every rank has protected its state."""

    __slots__ = ()

    def _begin(self, event: ev.Begin, now: float) -> None:
        self._start_world("the job was submitted")

    def _start_world(self, reason: str) -> None:
        members = []
        for rank in range(self.config.world_size):
            proc = self._new_proc()
            members.append(Member(proc))
            self._launch(ev.Launch(proc, rank, self.state.generation, replacement=False))
        self._set(members=tuple(members), status=Status.STARTING)
        self._log("world starting", reason)
        self._refill_standbys()

    def _launch(self, launch: ev.Launch) -> None:
        if self.config.external:
            self._set(awaited=(*self.state.awaited, launch.proc))
        else:
            self.detector.building(launch.proc, self._now)
        self._do(launch)

    def _no_longer_awaited(self, proc: str) -> None:
        self._set(awaited=tuple(p for p in self.state.awaited if p != proc))

    def _refill_standbys(self) -> None:
        while len(self.state.standbys) < self.config.num_standbys:
            proc = self._new_proc()
            self._set(standbys=(*self.state.standbys, (proc, "")))
            self._do(ev.Launch(proc, None, self.state.generation, replacement=True))

    def _built_offered(self, event: ev.BuiltOffered, now: float) -> None:
        self._set(built_offered=True)

    def _prepare_standbys(self) -> None:
        """Building one while the world starts would take the cores from it, and find no peer to learn from."""
        if self.state.built_offered and self.state.status is Status.RUNNING and not self.state.why_sealed:
            for proc, depth in self.state.standbys:
                if depth == "forked":
                    self._set(
                        standbys=tuple((p, "building" if p == proc else d) for p, d in self.state.standbys)
                    )
                    self._do(ev.Prepare(proc))

    def _standby_ready(self, event: ev.StandbyReady, now: float) -> None:
        if event.proc not in dict(self.state.standbys):
            return
        self._set(standbys=tuple((p, event.depth if p == event.proc else d) for p, d in self.state.standbys))
        self._log("standby ready", f"{event.proc} is {event.depth}")
        self._prepare_standbys()

    def _restart_world(self, rank: int, event: ev.Exited, how: str) -> None:
        if event.signal is None and event.code == 0 and self.state.status is Status.STARTING:
            self._ended_unprotected(rank)
            return
        if event.code:
            self._finish(event.code, f"rank {rank} failed before its first step: {how}")
            return
        if self._charge(f"rank {rank}: {how}"):
            why = f"rank {rank} died before every rank had protected its state"
            self._start_over(why, blame=f"rank {rank}: {how}")

    def _start_over(self, why: str, *, blame: str) -> None:
        tries = self.state.tries[1] + 1 if self.state.tries[0] == 0 else 1
        self._set(tries=(0, tries))
        if tries > self.config.max_tries_per_step:
            self._finish(1, f"{blame}; the world was started {tries} times and never got past its start")
            return
        self._set(status=Status.RESTARTING, generation=self.state.generation + 1, why_sealed="")
        self._kill_all(f"{why}: the world starts anew")
        if not self.state.stopping_procs:
            self._start_world("nothing was left of the first start")

    def _ended_unprotected(self, rank: int) -> None:
        """A script that never protects anything is allowed; one rank of it that ends while another protects is not."""
        self._update(rank, status=RankStatus.DONE)
        held = [r for r, m in enumerate(self.state.members) if m.status in HOLDS_STATE]
        if held:
            self._finish(
                1, f"rank {rank} ended with exit code 0 before protect(), which rank {held[0]} has called"
            )
        elif self._all(RankStatus.DONE):
            self._finish(0, "every rank ended with exit code 0; none had called flashrec.protect()")

    def _gone(self, proc: str) -> None:
        self._set(stopping_procs=tuple(p for p in self.state.stopping_procs if p != proc))
        if self.state.stopping_procs:
            return
        if self.state.status is Status.RESTARTING:
            self._start_world("the world starts anew")
        else:
            assert self.state.outcome is not None
            self._end(*self.state.outcome)
