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
from typing import Any

from flashrecd.core import adoption, nodeloss
from flashrecd.core import events as ev
from flashrecd.core.claims import contradiction
from flashrecd.core.recovering import Recovering
from flashrecd.core.state import GONE, RankStatus, Status

GRACE_S = 15.0  # from the polite signal to the hard one
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


class Core(Recovering):
    """The decisions of one job. `state` may be read, kept, and put back (the explorer does)."""

    __slots__ = ()

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """The actions `event` leads to at monotonic time `now` (seconds)."""
        self._out, self._now = [], now
        rule = TABLE[type(event)]
        before = self.state.status
        if before is not Status.ENDED:
            rule(self, event, now)
            if self.state.status is Status.RUNNING is not before:
                nodeloss.regroup(self)  # a node may have joined when it was too late for the plan
        return self._out

    def _park_all(self, reason: str) -> None:
        """Also gives up the nodes that are silent: from now on somebody waits for them."""
        super()._park_all(reason)
        if self.are_several:
            nodeloss.judge(self, self._now)

    def _joined(self, event: ev.Joined, now: float) -> None:
        if event.proc in self.state.awaited:
            self._no_longer_awaited(event.proc)
            # From now on: when it is started is its launcher's affair.
            self.detector.building(event.proc, now)
            if self.state.status is Status.PARKING:
                self._await_launcher()
            self._plan_if_parked()

    def _protected(self, event: ev.Protected, now: float) -> None:
        rank = self.rank_of(event.proc)
        if rank is None or self.state.status in (Status.STOPPING, Status.CLOSING, Status.RESTARTING):
            return
        why = f": {event.difference}" if event.difference else ""
        before = self.state.members[rank]
        if before.claims is not None and before.claims != event.claims:
            self._finish(
                1, f"rank {rank} and the process it replaces disagree about the layout of the state{why}"
            )
            return
        # The first process's word holds: keepers are not to move because another's differs a little.
        size_bytes = before.size_bytes or event.size_bytes
        member = self._update(rank, claims=event.claims, size_bytes=size_bytes)
        if event.why_sealed and not self.state.why_sealed:
            self._set(why_sealed=event.why_sealed)
        if member.status is RankStatus.STARTING and event.why_unsealed and not self.state.why_unsealed:
            self._set(why_unsealed=event.why_unsealed)
        if member.status is RankStatus.STARTING:
            self.detector.protected(event.proc, now)
            self._update(rank, status=RankStatus.LIVE, version=0)
        if self._any(RankStatus.DONE):
            done = [r for r, m in enumerate(self.state.members) if m.status is RankStatus.DONE]
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
        why = self.state.why_sealed or self._falls_together()
        self._set(why_sealed=why)
        if why and shortage:
            self._finish(1, f"{shortage} (sealed: {why})")
            return
        self._set(status=Status.RUNNING)
        self._log("running", "every rank has protected its state", step=0)
        if why:
            self._log("sealed regime", why)
        else:
            self._log("live regime", "every rank holds the whole state")
            if self.state.why_unsealed:
                self._log("nothing sealed", f"{self.state.why_unsealed}. If every rank dies, the job ends")
        keepers = self._choose_keepers()
        self._do(ev.SetRegime(bool(why), self._live_procs(), keepers, self.state.why_unsealed))
        parked = [r for r, m in enumerate(self.state.members) if m.status is RankStatus.PARKED]
        if parked:  # it was faster than the news that all had protected, and says so only once
            self._park_for(parked[0])
            self._plan_if_parked()
        self._prepare_standbys()

    def _switched(self, event: ev.Switched, now: float) -> None:
        if self.rank_of(event.proc) is not None and not self.state.why_sealed:
            self._set(why_sealed=event.why_sealed)
            self._log("sealed regime", event.why_sealed)

    def _unsealed(self, event: ev.Unsealed, now: float) -> None:
        rank = self.rank_of(event.proc)
        if rank is not None and not self.state.why_unsealed:
            self._set(why_unsealed=event.why_unsealed)
            self._log("nothing sealed any more", f"rank {rank}: {event.why_unsealed}", rank)

    def _exited(self, event: ev.Exited, now: float) -> None:
        self.detector.forget(event.proc)
        self._no_longer_awaited(event.proc)
        how = _how_it_ended(event)
        error = dict(self.state.errors).get(event.proc)
        if error:
            how += f": {error}"
        if self.standby(event.proc) is not None:
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
            if self.state.status is Status.PARKING:
                self._replace(rank)
            self._plan_if_parked()

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
        for standby in self.state.standbys:
            self._do(ev.Kill(standby.proc, True, "the job is done"))
        self._end_if_closed()

    def _closed(self, rank: int, event: ev.Exited, how: str) -> None:
        if (event.code or event.signal is not None) and self.state.outcome is None:
            self._set(outcome=(event.code or 1, f"rank {rank} failed after training had ended: {how}"))
        self._end_if_closed()

    def _failed(self, event: ev.Failed, now: float) -> None:
        self._set(errors=(*self.state.errors[-7:], (event.proc, event.error)))

    def _stop(self, event: ev.Stop, now: float) -> None:
        if self.state.status is Status.STOPPING:
            if event.hard:
                for proc in self.state.stopping_procs:
                    self._do(ev.Kill(proc, True, event.reason))
            return
        self._set(deadline=now + GRACE_S)
        self._finish(event.code, event.reason, hard=event.hard)

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> None:
        self.detector.heard(event.proc, now)

    def _tag_seen(self, event: ev.TagSeen, now: float) -> None:
        rank = self.rank_of(event.proc)
        if rank is None or event.proc in self.state.awaited or self.state.status is Status.ADOPTING:
            return
        self.detector.progressed(event.proc, event.entered, event.progress, now)
        if event.entered is None or not self._any(RankStatus.LEFT):
            return
        for early, member in enumerate(self.state.members):
            # A step needs every rank, so a rank at its end before another's step has ended too early.
            if member.status is RankStatus.LEFT and (member.version or 0) <= event.entered:
                self._kill_suspect(
                    early, f"its script ended at step {member.version}, while rank {rank} is in it"
                )

    def _tick(self, event: ev.Tick, now: float) -> None:
        if self.are_several:
            nodeloss.tick(self, now)
        if self.state.status is Status.ADOPTING:
            adoption.expire(self, now)
            return
        starting = self.state.status is Status.STARTING  # one rank may download for all: silence alone counts
        waits = (RankStatus.PARKED, RankStatus.LEFT, RankStatus.BUILDING, RankStatus.FORMING)
        hushed = nodeloss.hushed(self, now)
        # Of ranks there nothing is known, and whoever stands still may wait for one of them.
        blind = any(m.node in hushed for m in self.state.members)
        watched = {
            m.proc: starting or blind or m.status in waits
            for m in self.state.members
            if m.status not in GONE and m.node not in hushed
        }
        if self.state.status in (Status.STOPPING, Status.CLOSING):
            if self.state.deadline is not None and now > self.state.deadline:
                self._set(deadline=None)
                for proc in self.state.stopping_procs or self._live_procs():
                    self._do(ev.Kill(proc, True, "it did not end when it was asked to"))
            return
        if self.state.status is Status.PARKING and self.state.awaited and self._launcher_late(now):
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
    ev.Unsealed: Core._unsealed,
    ev.Parked: Core._parked,
    ev.Formed: Core._formed,
    ev.Leaving: Core._leaving,
    ev.Failed: Core._failed,
    ev.Exited: Core._exited,
    ev.Condemned: Core._condemned,
    ev.Heartbeat: Core._heartbeat,
    ev.TagSeen: Core._tag_seen,
    ev.NodeHeard: nodeloss.heard,
    ev.NodeClosed: nodeloss.closed,
    ev.NodeDeserted: nodeloss.deserted,
    ev.NodeJoined: nodeloss.joined,
    ev.NodeFenced: nodeloss.fenced,
    ev.Holdings: nodeloss.told,
    ev.Stop: Core._stop,
    ev.Tick: Core._tick,
}
