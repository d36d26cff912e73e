"""One job's control: `Core.handle(event, now) -> list[Action]`, and nothing else.

    STARTING --all protected--> RUNNING --one dies or parks--> PARKING --all parked--> FORMING --all formed--> RUNNING
       |  ^                        |                              ^                      |
       |  | nobody to recover from |                              +---- somebody dies ---+
       v  | and nothing to lose    +--all at their end--> CLOSING --all exited--> ENDED
    RESTARTING                                            STOPPING --all exited--> ENDED
    kills what is left,                                   the end was asked for,
    then starts the world anew                            or is unavoidable

    ADOPTING --every rank is accounted for--> STARTING, RUNNING, PARKING or CLOSING: see flashrecd.core.adoption

Time is an argument, processes are names, and whatever was decided says why.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from flashrecd.core import adoption
from flashrecd.core import events as ev
from flashrecd.core.claims import contradiction, replica_sets, unequal_buckets
from flashrecd.core.detection import Detector
from flashrecd.core.plan import Inventory, Plan, Survivor, plan_recovery
from flashrecd.core.state import GONE, HOLDS_STATE, JobConfig, JobState, Member, RankStatus, Status

GRACE_S = 15.0  # from the polite signal to the hard one
PRIVATE_OF_THE_START = 2  # newest private state there can be while no gate after the first has passed
CLOSING_S = 60.0  # from the last rank's end of training to the exit of all


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _how_it_ended(event: ev.Exited) -> str:
    if event.signal is not None:
        return f"killed by {_signal_name(event.signal)}"
    if event.code is None:
        return "ended (how is not known: another program started it)"
    return f"exit code {event.code}"


@dataclass(slots=True)
class Core:
    """The decisions of one job. `state` may be read, kept, and put back (the explorer does)."""

    config: JobConfig
    state: JobState = field(default_factory=JobState)
    detector: Detector = field(init=False)
    _out: list[ev.Action] = field(default_factory=list, init=False)
    _now: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.detector = Detector(self.config.suspect_after_s)

    # --- the one entrance ---------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """The actions `event` leads to at monotonic time `now` (seconds)."""
        self._out, self._now = [], now
        rule = TABLE[type(event)]
        if self.state.status is not Status.ENDED:
            rule(self, event, now)
        return self._out

    # --- small words ----------------------------------------------------------------------------------

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

    # --- starting ---------------------------------------------------------------------------------------

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

    def _joined(self, event: ev.Joined, now: float) -> None:
        if event.proc in self.state.awaited:
            self._no_longer_awaited(event.proc)
            self.detector.building(
                event.proc, now
            )  # from now on: when it is started is its launcher's affair
            self._plan_if_parked()

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

    def _protected(self, event: ev.Protected, now: float) -> None:
        rank = self.rank_of(event.proc)
        if rank is None or self.state.status in (Status.STOPPING, Status.CLOSING, Status.RESTARTING):
            return
        why = f": {event.difference}" if event.difference else ""
        before = self.state.members[rank].claims
        if before is not None and before != event.claims:
            self._finish(
                1, f"rank {rank} and the process it replaces disagree about the layout of the state{why}"
            )
            return
        member = self._update(rank, claims=event.claims)
        if event.why_sealed and not self.state.why_sealed:
            self._set(why_sealed=event.why_sealed)
        if member.status is RankStatus.STARTING:
            self.detector.protected(event.proc, now)
            self._update(rank, status=RankStatus.LIVE, version=0)
        done = [r for r, m in enumerate(self.state.members) if m.status is RankStatus.DONE]
        if done:
            self._finish(
                1, f"rank {done[0]} ended with exit code 0 before protect(), which rank {rank} has called"
            )
        elif self.state.status is Status.STARTING and self._all(
            RankStatus.LIVE, RankStatus.LEFT, RankStatus.PARKED
        ):
            self._all_protected(why, event.shortage)

    def _all_protected(self, difference: str, shortage: str) -> None:
        odd = contradiction(self.state.members)
        if odd is not None:
            self._finish(
                1, f"rank {odd[0]} and rank {odd[1]} disagree about the layout of the state{difference}"
            )
            return
        why = self.state.why_sealed
        if why and shortage:
            self._finish(1, f"{shortage} (sealed: {why})")
            return
        self._set(status=Status.RUNNING)
        self._log("running", "every rank has protected its state", step=0)
        if why:
            self._log("sealed regime", why)
        else:
            self._log("live regime", "every rank holds the whole state")
        self._do(ev.SetRegime(bool(why), self._live_procs()))
        parked = [r for r, m in enumerate(self.state.members) if m.status is RankStatus.PARKED]
        if parked:  # it was faster than the news that all had protected, and says so only once
            self._park_for(parked[0])
            self._plan_if_parked()
        self._prepare_standbys()

    def _switched(self, event: ev.Switched, now: float) -> None:
        if self.rank_of(event.proc) is not None and not self.state.why_sealed:
            self._set(why_sealed=event.why_sealed)
            self._log("sealed regime", event.why_sealed)

    def _all(self, *statuses: RankStatus) -> bool:
        return all(m.status in statuses for m in self.state.members)

    # --- failure --------------------------------------------------------------------------------------------

    def _exited(self, event: ev.Exited, now: float) -> None:
        self.detector.forget(event.proc)
        self._no_longer_awaited(event.proc)
        how = _how_it_ended(event)
        error = dict(self.state.errors).get(event.proc)
        if error:
            how += f": {error}"
        if event.proc in dict(self.state.standbys):
            self._standby_lost(event.proc, how)
            return
        if event.proc in self.state.stopping_procs:
            self._gone(event.proc)
            return
        rank = self.rank_of(event.proc)
        if rank is None:
            return
        was = self.state.members[rank].status
        self._update(rank, status=RankStatus.DEAD, private=event.private, sealed=event.sealed)
        if self.state.status is Status.CLOSING:
            self._closed(rank, event, how)
            return
        if self.state.status is Status.ADOPTING:
            adoption.ended(self, rank, event, how, now)
            return
        self._log("rank lost", how, rank, event.step)
        if not self.state.first_failure:
            self._set(first_failure=f"rank {rank} failed first: {how}")
        if self.state.status is Status.STARTING or not self._anything_to_lose():
            self._restart_world(rank, event, how)
        elif self._charge(f"rank {rank}: {how}", again=not self._charged_before(was)):
            self._park_all(f"rank {rank} is lost ({how})")
            self._replace(rank)
            self._plan_if_parked()

    def _anything_to_lose(self) -> bool:
        """Without a rank that holds state there is nothing to recover; at version 0 nothing was lost either."""
        if any(m.status in HOLDS_STATE for m in self.state.members):
            return True
        return max(v for m in self.state.members for v in (0, m.version or 0, *m.private, *m.sealed)) > 0

    def _charged_before(self, was: RankStatus) -> bool:
        """One recovery, one charge: the collectives that a death broke are often heard of before the death. Only
        a replacement that dies while others still park costs one more, lest it do so for ever."""
        return self.state.status is Status.PARKING and was is not RankStatus.BUILDING

    def _charge(self, cause: str, *, again: bool = True) -> bool:
        """Takes one from the restart budget, unless this recovery has paid; False, and the job ends, when it is
        overdrawn."""
        self._set(restarts=self.state.restarts + again)
        if self.config.max_restarts is not None and self.state.restarts > self.config.max_restarts:
            self._finish(1, f"{cause}; the restart budget of {self.config.max_restarts} is spent")
            return False
        return True

    def _restart_world(self, rank: int, event: ev.Exited, how: str) -> None:
        if event.signal is None and event.code == 0 and self.state.status is Status.STARTING:
            self._ended_unprotected(rank)
            return
        if event.code:
            self._finish(event.code, f"rank {rank} failed before its first step: {how}")
            return
        if self._charge(f"rank {rank}: {how}"):
            self._start_over(f"rank {rank} died before every rank had protected its state: {how}")

    def _start_over(self, why: str) -> None:
        tries = self.state.tries[1] + 1 if self.state.tries[0] == 0 else 1
        self._set(tries=(0, tries))
        if tries > self.config.max_tries_per_step:
            self._finish(
                1,
                f"{why}; the world was started {tries} times and never got past its start. {self._why_it_failed()}",
            )
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

    def _park_all(self, reason: str) -> None:
        """Ends the newest generation, if ranks were told of one that was not ended before."""
        if self.state.status is Status.PARKING:
            return
        ended = self.state.generation
        for rank, member in enumerate(self.state.members):
            if member.status in (RankStatus.LIVE, RankStatus.FORMING, RankStatus.LEFT):
                self._update(rank, status=RankStatus.LIVE)
        self._set(status=Status.PARKING)
        self.detector.disturbed(self._now)
        self._log("abort", f"generation {ended}: {reason}")
        self._do(ev.Abort(ended, self._live_procs(), reason))

    def _replace(self, rank: int) -> None:
        """A process for `rank`: the best standby that is ready, or a new one."""
        order = ("built", "forked", "building")  # one that is being built may be the slowest of all
        ready = sorted((s for s in self.state.standbys if s[1]), key=lambda s: order.index(s[1]))
        generation = self.state.generation + 1
        if ready:
            proc, depth = ready[0]
            self._set(standbys=tuple(s for s in self.state.standbys if s[0] != proc))
            self._do(ev.Assign(proc, rank, generation))
            self.detector.building(proc, self._now)
            self._log("replacement", f"{proc}, a {depth} standby, takes the rank", rank)
        else:
            proc = self._new_proc()
            self._launch(ev.Launch(proc, rank, generation, replacement=True))
            why = "the launcher is to start it" if self.config.external else "no standby was ready"
            how = "is awaited" if self.config.external else "is started"
            self._log("replacement", f"{why}: {proc} {how}", rank)
        self._update(rank, proc=proc, status=RankStatus.BUILDING, version=None, can_advance=False)

    def _standby_lost(self, proc: str, how: str) -> None:
        """A standby that fails never harms the world; it is made anew when a rank is next replaced."""
        self._set(standbys=tuple(s for s in self.state.standbys if s[0] != proc))
        if self.state.status is Status.CLOSING:
            self._end_if_closed()
            return
        self._log("standby lost", f"{proc}: {how}")

    # --- recovery ---------------------------------------------------------------------------------------

    def _parked(self, event: ev.Parked, now: float) -> None:
        rank = self.rank_of(event.proc)
        if rank is None or event.generation != self.state.generation:
            return  # a process of the past, or a promise about a generation that is over
        if self.state.status in (Status.RUNNING, Status.FORMING):
            self._park_for(rank)
        if self.state.status not in (Status.PARKING, Status.STARTING, Status.ADOPTING):
            return
        if event.version is None:
            # A replacement, or a rank that was torn: its slots and its arena are what they were.
            if self.state.members[rank].status is not RankStatus.BUILDING:
                self._log("torn", "between the gate and the end of its step, or in a recovery", rank)
            self._update(
                rank,
                status=RankStatus.BUILDING,
                version=None,
                can_advance=False,
                private=event.private,
                sealed=event.sealed,
            )
        else:
            self._update(
                rank,
                status=RankStatus.PARKED,
                version=event.version,
                can_advance=event.can_advance,
                private=event.private,
                sealed=event.sealed,
            )
            self._log("parked", f"can advance: {event.can_advance}", rank, event.version)
        self._plan_if_parked()

    def _park_for(self, rank: int) -> None:
        # If the budget is overdrawn by this, the job ends when it is known who died, or that nobody did.
        self._set(restarts=self.state.restarts + 1)
        self._park_all(f"a collective failed at rank {rank}")

    def _plan_if_parked(self) -> None:
        if self.state.status is not Status.PARKING:
            return
        if not self._all(RankStatus.PARKED, RankStatus.BUILDING):
            return
        # A launcher that has lost one rank is about to end the others: a plan that counted on them would be void.
        if self.state.awaited:
            return
        if not self._charge(self.state.first_failure or "every rank parked and none had died", again=False):
            return
        generation = self.state.generation + 1
        plan, reason = plan_recovery(self._inventory(), generation)
        if self._from_the_start(plan):
            # What the ranks told each other in their first step would not be said again to a replacement.
            self._start_over(f"version 0 is made again from the start ({reason})")
            return
        if plan is None:
            self._finish(1, f"cannot recover: {reason}. {self.state.first_failure}")
            return
        tries = self._tries_at(plan.version)
        if tries > self.config.max_tries_per_step:
            self._finish(
                1,
                f"step {self.state.tries[0]} failed {tries} times; given up. {self._why_it_failed()}",
            )
            return
        for rank in range(self.config.world_size):
            self._update(rank, status=RankStatus.FORMING, buckets="")
        self._set(status=Status.FORMING, generation=generation, version=plan.version)
        self._log("plan", f"generation {generation}: {reason}", step=plan.version)
        self._do(ev.SendPlan(plan, bool(self.state.why_sealed), self._live_procs()))

    def _inventory(self) -> Inventory:
        members = self.state.members
        return Inventory(
            self.config.world_size,
            {
                r: Survivor(m.version, m.can_advance)
                for r, m in enumerate(members)
                if m.status is RankStatus.PARKED
            },
            {rank: m.private for rank, m in enumerate(members)},
            {rank: m.sealed for rank, m in enumerate(members)},
            replica_sets(members),
        )

    def _from_the_start(self, plan: Plan | None) -> bool:
        """In the sealed regime version 0 is not installed, but made again. Without a plan that is so in both, unless
        a later version was there and is lost: private state is sealed in the gate, for the version after it."""
        if plan is not None:
            return bool(self.state.why_sealed) and plan.version == 0
        return max((v for m in self.state.members for v in m.private), default=0) <= PRIVATE_OF_THE_START

    def _tries_at(self, version: int) -> int:
        """How often the present step has failed, this failure counted. The sealed regime may go back one version, or
        not, by how far the lost rank's seal had come: that does not make it another step."""
        failed = max([version, *(m.version for m in self.state.members if m.version is not None)])
        same = (
            self.state.tries[0] in (failed, failed + 1)
            if self.state.why_sealed
            else self.state.tries[0] == failed
        )
        tries = (max(failed, self.state.tries[0]), self.state.tries[1] + 1) if same else (failed, 1)
        self._set(tries=tries)
        return tries[1]

    def _why_it_failed(self) -> str:
        """What struck first, and, where that says less, the last traceback's last line (a replacement's, say)."""
        first, last = self.state.first_failure, self.state.errors[-1][1] if self.state.errors else ""
        return first if not last or last in first else f"{first}; the last error: {last}".removeprefix("; ")

    def _formed(self, event: ev.Formed, now: float) -> None:
        rank = self.rank_of(event.proc)
        if rank is None or event.generation != self.state.generation:
            return
        if (
            self.state.status is not Status.FORMING
            or self.state.members[rank].status is not RankStatus.FORMING
        ):
            return
        self._update(rank, status=RankStatus.LIVE, version=self.state.version, buckets=event.buckets)
        if not self._all(RankStatus.LIVE, RankStatus.LEFT):
            return
        odd = unequal_buckets(self.state.members)
        if odd is not None:
            self._finish(1, f"the ranks' gradient buckets differ after a recovery ({odd})")
            return
        self._set(status=Status.RUNNING)
        self.detector.formed()
        self.detector.disturbed(now)
        self._log("running", f"generation {self.state.generation} is formed", step=self.state.version)
        self._set(first_failure="")
        self._refill_standbys()
        self._prepare_standbys()

    # --- the end ----------------------------------------------------------------------------------------

    def _leaving(self, event: ev.Leaving, now: float) -> None:
        rank = self.rank_of(event.proc)
        if rank is None or event.generation != self.state.generation:
            return
        if self.state.status not in (Status.STARTING, Status.ADOPTING, Status.RUNNING, Status.FORMING):
            return
        if self.state.members[rank].status is not RankStatus.LIVE:
            return
        self._update(rank, status=RankStatus.LEFT, version=event.version)
        self._log("at its end", "the script is done; the rank lingers", rank, event.version)
        if self._all(RankStatus.LEFT) and len({m.version for m in self.state.members}) == 1:
            self._close(now)

    def _close(self, now: float) -> None:
        self._set(status=Status.CLOSING, deadline=now + CLOSING_S)
        self._log("closing", "every rank is at its end")
        self._do(ev.Release(self._live_procs()))
        for proc, _ in self.state.standbys:
            self._do(ev.Kill(proc, True, "the job is done"))
        self._end_if_closed()

    def _closed(self, rank: int, event: ev.Exited, how: str) -> None:
        if (event.code or event.signal is not None) and self.state.outcome is None:
            self._set(outcome=(event.code or 1, f"rank {rank} failed after training had ended: {how}"))
        self._end_if_closed()

    def _end_if_closed(self) -> None:
        if self._all(*GONE) and not self.state.standbys:
            self._end(*(self.state.outcome or (0, "every rank ended with exit code 0")))

    def _failed(self, event: ev.Failed, now: float) -> None:
        self._set(errors=(*self.state.errors[-7:], (event.proc, event.error)))

    def _stop(self, event: ev.Stop, now: float) -> None:
        if self.state.status is Status.STOPPING:
            if event.hard:
                for proc in self.state.stopping_procs:
                    self._do(ev.Kill(proc, True, event.reason))
            return
        self._set(deadline=now + GRACE_S)
        self._finish(130, event.reason, hard=event.hard)

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

    def _gone(self, proc: str) -> None:
        self._set(stopping_procs=tuple(p for p in self.state.stopping_procs if p != proc))
        if self.state.stopping_procs:
            return
        if self.state.status is Status.RESTARTING:
            self._start_world("the world starts anew")
        else:
            assert self.state.outcome is not None
            self._end(*self.state.outcome)

    def _end(self, code: int, reason: str) -> None:
        self._set(status=Status.ENDED, outcome=(code, reason))
        self._log("ended", reason)
        self._do(ev.End(code, reason))

    # --- detection ----------------------------------------------------------------------------------------

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> None:
        self.detector.heard(event.proc, now)

    def _tag_seen(self, event: ev.TagSeen, now: float) -> None:
        rank = self.rank_of(event.proc)
        if rank is None or event.proc in self.state.awaited or self.state.status is Status.ADOPTING:
            return
        self.detector.progressed(event.proc, event.entered, event.progress, now)
        if event.entered is None:
            return
        for early, member in enumerate(self.state.members):
            # A step needs every rank, so a rank at its end before another's step has ended too early.
            if member.status is RankStatus.LEFT and (member.version or 0) <= event.entered:
                self._kill_suspect(
                    early, f"its script ended at step {member.version}, while rank {rank} is in it"
                )

    def _tick(self, event: ev.Tick, now: float) -> None:
        if self.state.status is Status.ADOPTING:
            adoption.expire(self, now)
            return
        starting = self.state.status is Status.STARTING  # one rank may download for all: silence alone counts
        waits = (RankStatus.PARKED, RankStatus.LEFT, RankStatus.BUILDING, RankStatus.FORMING)
        watched = {m.proc: starting or m.status in waits for m in self.state.members if m.status not in GONE}
        if self.state.status in (Status.STOPPING, Status.CLOSING):
            if self.state.deadline is not None and now > self.state.deadline:
                self._set(deadline=None)
                for proc in self.state.stopping_procs or self._live_procs():
                    self._do(ev.Kill(proc, True, "it did not end when it was asked to"))
            return
        if self.detector.stalled(watched, now):
            self._log("stalled", "every rank stands still alike; nobody can be blamed")
            self._do(ev.Inspect(tuple(watched)))
        recovering = self.state.status in (Status.PARKING, Status.FORMING)
        slow = self.detector.slow(now) if recovering else []
        for proc, why in (*self.detector.suspects(watched, now), *slow):
            rank = self.rank_of(proc)
            if rank is not None:
                self._kill_suspect(rank, why)

    def _condemned(self, event: ev.Condemned, now: float) -> None:
        rank = self.rank_of(event.proc)
        if rank is not None:
            self._kill_suspect(rank, event.why)

    def _kill_suspect(self, rank: int, why: str) -> None:
        """Suspicion is not death: the process is killed, and replaced when the kernel says it is gone."""
        proc = self.state.members[rank].proc
        if self.detector.condemn(proc):
            self._log("suspect", why, rank, self.detector.step_of(proc))
            self._do(ev.Kill(proc, True, why))


# The one table: an event that is not in it raises.
TABLE: dict[type, Callable[[Core, Any, float], None]] = {
    ev.Begin: Core._begin,
    ev.Joined: Core._joined,
    ev.Adopt: adoption.adopt,
    ev.Adopted: adoption.adopted,
    ev.BuiltOffered: Core._built_offered,
    ev.StandbyReady: Core._standby_ready,
    ev.Protected: Core._protected,
    ev.Switched: Core._switched,
    ev.Parked: Core._parked,
    ev.Formed: Core._formed,
    ev.Leaving: Core._leaving,
    ev.Failed: Core._failed,
    ev.Exited: Core._exited,
    ev.Condemned: Core._condemned,
    ev.Heartbeat: Core._heartbeat,
    ev.TagSeen: Core._tag_seen,
    ev.Stop: Core._stop,
    ev.Tick: Core._tick,
}
