"""A core of a job on several nodes in a test: told in short words what happens there."""

from __future__ import annotations

from typing import Any

from flashrecd.core import events as ev
from flashrecd.core.state import Kept, NodeLife, NodeSpec, RankStatus, Status
from tests.unit.daemon_core import Driven

WHY = "each rank alone holds a part"
SUSPECT = 3.0


class Spread(Driven):
    """Two ranks on each node but the spares; `sealed`: each rank alone holds its tensors."""

    def __init__(
        self, num_nodes: int = 2, spares: int = 1, *, sealed: bool = True, domains: str = "", **config: Any
    ) -> None:
        names = "abcdefg"[: num_nodes + spares]
        specs = [NodeSpec(name, domain, 2) for name, domain in zip(names, domains or [""] * 7, strict=False)]
        self.sealed = sealed
        facts = {"nodes": tuple(specs), "nproc_per_node": 2, "replicas": 1, "suspect_after_s": SUSPECT}
        super().__init__(2 * num_nodes, **{**facts, **config})

    def protected(self) -> Spread:
        everyone = tuple(self.ranks())
        for rank in self.ranks():
            claims = (((rank,) if self.sealed else everyone, "digest"),)
            self.tell(ev.Protected(self.proc(rank), claims, WHY if self.sealed else ""))
        assert self.status is Status.RUNNING
        return self

    def trained(self, step: int = 5) -> Spread:
        """Every rank was seen in `step`, which it entered now."""
        self.protected()
        for rank in self.ranks():
            self.tell(ev.Heartbeat(self.proc(rank)), ev.TagSeen(self.proc(rank), step, 10 * step))
        return self

    def standbys_ready(self) -> Spread:
        self.tell(*[ev.StandbyReady(standby.proc, "forked") for standby in self.core.state.standbys])
        return self

    def on(self, node: int) -> list[int]:
        return [rank for rank in self.ranks() if self.member(rank).node == node]

    def close(self, node: int) -> list[ev.Action]:
        return self.tell(ev.NodeClosed(node, "reset by peer"))

    def stop_at(self, *ranks: int, version: int = 6) -> list[ev.Action]:
        """They park at `version`, which they have sealed, as the one before."""
        private, sealed = (version - 1, version), (version - 1, version) if self.sealed else ()
        return self.tell(
            *[
                ev.Parked(self.proc(r), self.generation, version, False, private, sealed)
                for r in ranks or [r for r in self.ranks() if self.member(r).status is RankStatus.LIVE]
            ]
        )

    def keep(self, *nodes: int, version: int = 6, but: tuple[int, ...] = ()) -> list[ev.Action]:
        """These nodes (() for all that live) say that they keep what they should, at `version`."""
        answer: list[ev.Action] = []
        for node in nodes or self.core.live_nodes():
            kept = tuple(
                Kept(rank, (version, version + 1), (version - 1, version) if self.sealed else ())
                for rank in self.ranks()
                if node in self.keepers[rank] and rank not in but
            )
            answer += self.tell(ev.Holdings(node, self.generation, kept))
        return answer

    @property
    def keepers(self) -> list[tuple[int, ...]]:
        return [member.keepers for member in self.core.state.members]

    def wait(self, seconds: float, *heard: int, moving: bool = False) -> list[ev.Action]:
        """Time passes; these nodes and their ranks are heard meanwhile."""
        answer: list[ev.Action] = []
        for _ in range(round(seconds)):
            self.now += 1.0
            for node in heard:
                answer += self.tell(ev.NodeHeard(node))
                for rank in self.on(node):
                    self.tell(ev.Heartbeat(self.proc(rank)))
                    if moving:
                        self.tell(ev.TagSeen(self.proc(rank), int(self.now), int(10 * self.now)))
            answer += self.tell(ev.Tick())
        return answer

    def life(self, node: int) -> NodeLife:
        return self.core.state.nodes[node].life

    def logged(self, event: str, actions: list[ev.Action] | None = None) -> list[str]:
        return [log.reason for log in self.found(ev.Log, actions) if log.event == event]

    def formed(self) -> Spread:
        self.form(*self.ranks())
        assert self.status is Status.RUNNING
        return self

    def recovered(self, node: int, version: int = 6) -> Spread:
        """`node` is lost, and all goes as it should."""
        self.close(node)
        self.stop_at(version=version)
        self.keep(version=version)
        assert self.status is Status.FORMING, self.actions[-3:]
        return self.formed()
