"""How a failure is answered: park, replace, plan, form again."""

from flashrecd.core import events as ev
from flashrecd.core.claims import replica_sets, unequal_buckets
from flashrecd.core.detection import BUILD_FACTOR
from flashrecd.core.plan import Inventory, Plan, Survivor, plan_recovery
from flashrecd.core.starting import Starting
from flashrecd.core.state import HOLDS_STATE, RankStatus, Status

PRIVATE_OF_THE_START = 2  # newest private state there can be while no gate after the first has passed


class Recovering(Starting):
    """The rules from the first sign of a failure to the forming of a new generation."""

    __slots__ = ()

    def _anything_to_lose(self) -> bool:
        """Without a rank that holds state there is nothing to recover; at version 0 nothing was lost either."""
        if any(m.status in HOLDS_STATE for m in self.state.members):
            return True
        return max(v for m in self.state.members for v in (0, m.version or 0, *m.private, *m.sealed)) > 0

    def _charged_before(self, was: RankStatus) -> bool:
        """One recovery, one charge: the collectives that a death broke are often heard of before the death. Only
        a replacement that dies while others still park costs one more, lest it do so for ever."""
        return self.state.status is Status.PARKING and was is not RankStatus.BUILDING

    def _park_all(self, reason: str) -> None:
        """Ends the newest generation, if ranks were told of one that was not ended before."""
        if self.state.status is Status.PARKING:
            return
        ended = self.state.generation
        self._update_all((RankStatus.FORMING, RankStatus.LEFT), status=RankStatus.LIVE)
        self._set(status=Status.PARKING)
        self._await_launcher()
        self.detector.disturbed(self._now)
        self._log("abort", f"generation {ended}: {reason}")
        self._do(ev.Abort(ended, self._live_procs(), reason))
        self._fence(ended)

    def _await_launcher(self) -> None:
        """From now on it has some time to start again what it has lost, while others wait for that."""
        if self.config.external:
            self._set(deadline=self._now + BUILD_FACTOR * self.config.suspect_after_s)

    def _launcher_late(self, now: float) -> bool:
        """Whether the time of `_await_launcher` is over, and the job ends for those who wait. (With nobody left to
        wait, its memory may still be of use.)"""
        if self.state.deadline is None or now <= self.state.deadline:
            return False
        self._set(deadline=None)
        lost = [rank for rank, m in enumerate(self.state.members) if m.proc in self.state.awaited]
        if len(lost) == len(self.state.members):
            return False
        waited = BUILD_FACTOR * self.config.suspect_after_s
        self._finish(1, f"nobody has started ranks {lost} again for {waited:.0f} s. {self._why_it_failed()}")
        return True

    def _replace(self, rank: int) -> None:
        """A process for `rank`: the best standby that is ready, or a new one."""
        order = ("built", "forked", "building")  # one that is being built may be the slowest of all
        node = self._home_for(rank)
        if node is None:
            self._finish(1, f"no node has room for rank {rank}. {self._why_it_failed()}")
            return
        moves = node != self.state.members[rank].node
        where = f" on node {self.node_name(node)}" if moves else ""
        here = (s for s in self.state.standbys if s.depth and s.node == node)
        ready = sorted(here, key=lambda s: order.index(s.depth))
        generation = self.state.generation + 1
        if ready:
            proc, depth, _ = ready[0]
            self._set(standbys=tuple(s for s in self.state.standbys if s.proc != proc))
            self._do(ev.Assign(proc, rank, generation))
            self.detector.building(proc, self._now)
            self._log("replacement", f"{proc}, a {depth} standby{where}, takes the rank", rank)
        else:
            proc = self._new_proc()
            self._launch(ev.Launch(proc, rank, generation, replacement=True, node=node))
            why = "the launcher is to start it" if self.config.external else "no standby was ready"
            how = "is awaited" if self.config.external else "is started"
            self._log("replacement", f"{why}: {proc} {how}{where}", rank)
        if moves:
            self._update(rank, node=node, private=(), sealed=())
            self._change_node(node, spare=False)
        self._update(rank, proc=proc, status=RankStatus.BUILDING, version=None, can_advance=False)

    def _standby_lost(self, proc: str, how: str) -> None:
        """A standby that fails never harms the world; it is made anew when a rank is next replaced."""
        self._set(standbys=tuple(s for s in self.state.standbys if s.proc != proc))
        if self.state.status is Status.CLOSING:
            self._end_if_closed()
            return
        self._log("standby lost", f"{proc}: {how}")

    def _parked(self, event: ev.Parked, now: float) -> None:
        rank = self.rank_of(event.proc)
        if rank is None or event.generation != self.state.generation:
            return  # a process of the past, or a promise about a generation that is over
        if self.are_several:
            self._set(promised=True)
        if self.state.status in (Status.RUNNING, Status.FORMING):
            self._park_for(rank)
            if self.rank_of(event.proc) is None:
                return  # it waited for this to be found that its node is lost
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
        if self.state.awaited or self._is_held_up():
            return
        self._set(deadline=None)
        if not self._charge(self.state.first_failure or "every rank parked and none had died", again=False):
            return
        generation = self.state.generation + 1
        plan, reason = plan_recovery(self._inventory(), generation)
        if self._from_the_start(plan):
            # What the ranks told each other in their first step would not be said again to a replacement.
            why = f"version 0 is made again from the start ({reason})"
            self._start_over(why, blame=self._why_it_failed() or why)
            return
        if plan is None:
            self._finish(1, f"cannot recover: {reason}. {self.state.first_failure}")
            return
        tries = 0 if self.state.is_regrouping else self._tries_at(plan.version)
        if tries > self.config.max_tries_per_step:
            self._finish(
                1,
                f"step {self.state.tries[0]} failed {tries} times; given up. {self._why_it_failed()}",
            )
            return
        self._update_all(tuple(RankStatus), status=RankStatus.FORMING, buckets="")
        self._set(status=Status.FORMING, generation=generation, version=plan.version)
        self._log("plan", f"generation {generation}: {reason}", step=plan.version)
        sources, keepers = self._sources(plan), self._choose_keepers()
        self._settle(generation, plan.version, plan.version if self.state.why_sealed else plan.watermark)
        self._do(ev.SendPlan(plan, bool(self.state.why_sealed), self._live_procs(), keepers, sources))

    def _inventory(self) -> Inventory:
        members = self.state.members
        private, sealed = self._kept()
        return Inventory(
            self.config.world_size,
            {
                r: Survivor(m.version, m.can_advance)
                for r, m in enumerate(members)
                if m.status is RankStatus.PARKED
            },
            private,
            sealed,
            replica_sets(members),
        )

    def _from_the_start(self, plan: Plan | None) -> bool:
        """In the sealed regime version 0 is not installed, but made again. Without a plan that is so in both, unless
        a later version was there and is lost: private state is sealed in the gate, for the version after it."""
        if plan is not None:
            return bool(self.state.why_sealed) and plan.version == 0
        private, _ = self._kept()
        return max((v for versions in private.values() for v in versions), default=0) <= PRIVATE_OF_THE_START

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
