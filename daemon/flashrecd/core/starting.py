"""How a world starts, and starts again; and its standbys."""

from collections import Counter

from flashrecd.core import events as ev
from flashrecd.core.nodes import LEADER, Nodes
from flashrecd.core.state import HOLDS_STATE, Member, RankStatus, Standby, Status

ALL = -1  # no version is as old


class Starting(Nodes):
    """The rules from a job's submission to the moment when every rank has protected its state."""

    __slots__ = ()

    def _begin(self, event: ev.Begin, now: float) -> None:
        self._begin_nodes(self.config.nodes)
        if why := self._cannot_keep(self._seats()):
            self._finish(1, why)
            return
        if self.are_several:
            self._log("leader", f"node {self.node_name(LEADER)} leads: its loss ends the job")
        self._start_world("the job was submitted")

    def _start_world(self, reason: str) -> None:
        seats = self._seats()
        if len(seats) < self.config.world_size:
            room = ", ".join(f"{self.node_name(n)} for {self._capacity(n)}" for n in self._reachable())
            self._finish(
                1, f"no room for {self.config.world_size} ranks: node {room}. {self.state.first_failure}"
            )
            return
        if self.state.generation > 1:
            self._settle(self.state.generation, ALL, ALL)
        members = []
        for rank, node in enumerate(seats):
            proc = self._new_proc()
            members.append(Member(proc, node=node))
            self._launch(ev.Launch(proc, rank, self.state.generation, replacement=False, node=node))
        for node in self.live_nodes():
            self._change_node(node, spare=node not in seats)
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

    def _refill_standbys(self, nodes: tuple[int, ...] = ()) -> None:
        """On these nodes; () for all that are heard."""
        num_at = Counter(standby.node for standby in self.state.standbys)
        for node in nodes or self._reachable():
            spare = self.state.nodes[node].spare
            wanted = (
                min(self.config.ranks_per_node, self._capacity(node)) if spare else self.config.num_standbys
            )
            for _ in range(wanted - num_at[node]):
                proc = self._new_proc()
                self._set(standbys=(*self.state.standbys, Standby(proc, node=node)))
                self._do(ev.Launch(proc, None, self.state.generation, replacement=True, node=node))

    def _built_offered(self, event: ev.BuiltOffered, now: float) -> None:
        self._set(built_offered=True)

    def _prepare_standbys(self) -> None:
        """Building one while the world starts would take the cores from it, and find no peer to learn from."""
        if self.state.built_offered and self.state.status is Status.RUNNING and not self.state.why_sealed:
            for standby in self.state.standbys:
                if standby.depth == "forked":
                    self._change_standby(standby.proc, "building")
                    self._do(ev.Prepare(standby.proc))

    def _standby_ready(self, event: ev.StandbyReady, now: float) -> None:
        if self.standby(event.proc) is None:
            return
        self._change_standby(event.proc, event.depth)
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
        self._fence(self.state.generation)
        self._set(status=Status.RESTARTING, generation=self.state.generation + 1)
        self._set(why_sealed="", why_unsealed="")
        self._kill_all(f"{why}: the world starts anew")
        self._start_if_all_gone()

    def _start_if_all_gone(self) -> None:
        if (
            self.state.status is Status.RESTARTING
            and not self.state.stopping_procs
            and not self._is_held_up()
        ):
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
        self._set(
            stopping_procs=tuple(p for p in self.state.stopping_procs if p != proc),
            doomed_at=tuple(place for place in self.state.doomed_at if place[0] != proc),
        )
        if self.state.stopping_procs:
            return
        if self.state.status is Status.RESTARTING:
            self._start_if_all_gone()
        else:
            assert self.state.outcome is not None
            self._end(*self.state.outcome)
