"""Strikes nodes from outside: a process of its own, which shares nothing with the job but its tags.

Given an order on its standard input it prints a NodeStrike a line, as JSON; and what is healed once more, with its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flashrec.cli.client import Client, ask_status
from flashrec.cli.demo.injector import (
    FAR_S,
    NEAR_S,
    STATUS_S,
    Distance,
    Strike,
    StrikingProcess,
    distance,
)
from flashrec.cli.demo.nodes.corrupt import Corrupted, corrupt
from flashrec.cli.demo.nodes.hosts import Links
from flashrec.cli.demo.nodes.node import Node, kill_all, lose, open_processes
from flashrec.cli.demo.nodes.schedule import SHORT_CUT, NodeFault, Target, is_ready, may_strike, target
from flashrec.cli.demo.nodes.strike import NodeStrike
from flashrec.cli.demo.nodes.tags import NodeTags
from flashrec.errors import EnvironmentFault
from flashrec.prctl import set_timer_slack
from flashrec.protocol.tag import Tag

SHORT_CUT_PART = 0.6  # of the silence after which a node is suspected
LONG_CUT_S = 60.0  # and no longer than so long
UNSEEN_STEPS = 4  # in which a place has passed too quickly to be seen: then it strikes wherever the rank is


class NodeInjector:
    """Carries out a schedule, one fault after another. `suspect_after_s` is the job's."""

    def __init__(
        self,
        client: Client,
        nodes: Sequence[Node],
        tags: NodeTags,
        job: str,
        hub: int,
        suspect_after_s: float,
    ) -> None:
        self._client = client
        self._nodes = {node.name: node for node in nodes}
        self._tags = tags
        self._job = job
        self._links = Links(hub)
        self._suspect_after_s = suspect_after_s
        self._owner = os.getppid()
        self._last: NodeStrike | None = None

    def strike_all(self, faults: Sequence[NodeFault]) -> Iterator[NodeStrike]:
        for fault in faults:
            chosen = self._await_moment(fault)
            for strike in self._strike(fault, chosen):
                self._last = strike
                yield strike

    # --- the moment ---------------------------------------------------------------------------------------

    def _await_moment(self, fault: NodeFault) -> Target:
        if fault.follows:
            return self._await_recovery(fault)
        while True:
            chosen = self._await_target(fault)
            if self._await_place(fault, chosen):
                return chosen

    def _await_target(self, fault: NodeFault) -> Target:
        """When `fault` is near: whom it strikes."""
        while True:
            step = max((tag.step for tag in self._tags.all() if tag is not None), default=-1)
            if step >= fault.step - 1 and (job := self._status()) is not None and may_strike(fault, job):
                chosen = target(fault, job)
                if chosen is not None and (step >= fault.patience or is_ready(fault, chosen, job)):
                    return chosen
            self._pause(STATUS_S)

    def _await_place(self, fault: NodeFault, chosen: Target) -> bool:
        """Whether the watched rank has come there; False if its job has taken a turn meanwhile."""
        begun = self._tags.read(chosen.watched)
        limit = max(fault.latest, (begun.step if begun is not None else 0) + UNSEEN_STEPS)
        while True:
            tag = self._tags.read(chosen.watched)
            if begun is None or tag is None or tag.generation != begun.generation:
                return False
            away = distance(fault.place, fault.step, tag)
            if away is Distance.HERE or tag.step >= limit:
                return True
            if away is not Distance.NEXT:
                self._pause(NEAR_S if away is Distance.NEAR else FAR_S)

    def _await_recovery(self, fault: NodeFault) -> Target:
        """Until a rank of the fault before takes part in its recovery, on another node than the one it was on."""
        assert self._last is not None
        moved = {one.rank for one in self._last.ranks}
        while True:
            job = self._status()
            for node in job["nodes"][1:] if job is not None else ():
                here = sorted(moved & set(node["ranks"]))
                if node["life"] != "live" or node["name"] == self._last.node or not here:
                    continue
                watched = here[fault.pick % len(here)]
                tag = self._tags.read(watched)
                if tag is not None and tag.place == "recovery" and tag.changed_ns > self._last.signal_ns:
                    return Target(node=node["name"], watched=watched, ranks=tuple(node["ranks"]), kept_on=())
            self._pause(NEAR_S)

    # --- the strike ---------------------------------------------------------------------------------------

    def _strike(self, fault: NodeFault, chosen: Target) -> Iterator[NodeStrike]:
        match fault.kind:
            case "rank":
                yield self._kill_rank(fault, chosen)
            case "daemon":
                yield self._kill_daemon(fault, chosen)
            case "link":
                yield from self._cut_link(fault, chosen)
            case _:
                yield self._lose(fault, chosen)

    def _lose(self, fault: NodeFault, chosen: Target) -> NodeStrike:
        node = self._nodes[chosen.node]
        damage: list[Corrupted] = []
        keeper = self._nodes[chosen.kept_on[0]] if chosen.kept_on else None
        directory = keeper.directory(self._job) if keeper is not None else None
        before: dict[int, Tag | None] = {}

        def last_moment() -> None:
            before.update({rank: self._tags.read(rank) for rank in chosen.ranks})
            if fault.kind == "replica-corrupt" and directory is not None:
                damage.extend(corrupt(directory, chosen.watched, self._job, all_private=True))

        loss = lose(node, self._job, subreaper=self._owner, before=last_moment)
        if fault.kind == "replica-corrupt" and directory is not None:
            # A newer version may have been kept between the one and the other, and would be used.
            damage += corrupt(directory, chosen.watched, self._job, all_private=True, but=damage)
        words = ""
        if damage:
            assert keeper is not None
            versions = ", ".join(sorted({f"{one.what} version {one.version}" for one in damage}))
            words = (
                f"{versions} of rank {chosen.watched} corrupted on {keeper.name}, one of {len(chosen.kept_on)} nodes "
                "that keep them"
            )
        return NodeStrike(
            index=fault.index,
            kind=fault.kind,
            node=node.name,
            signal_ns=loss.signal_ns,
            died_ns=loss.died_ns,
            ranks=self._struck(fault, chosen, loss.signal_ns, loss.died_ns, before),
            num_processes=len(loss.pids),
            num_files=loss.files,
            detail=words,
        )

    def _kill_rank(self, fault: NodeFault, chosen: Target) -> NodeStrike:
        job = self._status()
        assert job is not None
        pid = job["ranks"][chosen.watched]["pid"]
        with contextlib.ExitStack() as opened:
            before = {chosen.watched: self._tags.read(chosen.watched)}
            signal_ns = time.monotonic_ns()
            kill_all(open_processes([pid], opened))
            died_ns = time.monotonic_ns()
        return NodeStrike(
            index=fault.index,
            kind=fault.kind,
            node=chosen.node,
            signal_ns=signal_ns,
            died_ns=died_ns,
            ranks=self._struck(fault, chosen, signal_ns, died_ns, before, pid),
            num_processes=1,
        )

    def _kill_daemon(self, fault: NodeFault, chosen: Target) -> NodeStrike:
        pid = self._nodes[chosen.node].daemon_pid()
        if pid is None:
            raise EnvironmentFault(f"the daemon of {chosen.node} is gone")
        with contextlib.ExitStack() as opened:
            before = {rank: self._tags.read(rank) for rank in chosen.ranks}
            signal_ns = time.monotonic_ns()
            kill_all(open_processes([pid], opened))
            died_ns = time.monotonic_ns()
        return NodeStrike(
            index=fault.index,
            kind=fault.kind,
            node=chosen.node,
            signal_ns=signal_ns,
            died_ns=died_ns,
            ranks=self._struck(fault, chosen, signal_ns, died_ns, before),
            num_processes=1,
        )

    def _cut_link(self, fault: NodeFault, chosen: Target) -> Iterator[NodeStrike]:
        number = self._nodes[chosen.node].number
        before = {rank: self._tags.read(rank) for rank in chosen.ranks}
        signal_ns = time.monotonic_ns()
        self._links.cut(number)
        cut = NodeStrike(
            index=fault.index,
            kind=fault.kind,
            node=chosen.node,
            signal_ns=signal_ns,
            died_ns=time.monotonic_ns(),
            ranks=self._struck(fault, chosen, signal_ns, signal_ns, before),
        )
        yield cut
        try:
            self._await_heal(fault, chosen, signal_ns)
        finally:
            self._links.heal(number)
        yield cut.healed(time.monotonic_ns())

    def _await_heal(self, fault: NodeFault, chosen: Target, since_ns: int) -> None:
        if fault.cut == SHORT_CUT:
            self._pause(SHORT_CUT_PART * self._suspect_after_s)
            return
        while time.monotonic_ns() - since_ns < LONG_CUT_S * 1e9:
            job = self._status()
            if job is None or not any(
                node["name"] == chosen.node and node["life"] == "live" for node in job["nodes"]
            ):
                return
            self._pause(STATUS_S)

    def _struck(
        self,
        fault: NodeFault,
        chosen: Target,
        signal_ns: int,
        died_ns: int,
        before: Mapping[int, Tag | None],
        pid: int = 0,
    ) -> tuple[Strike, ...]:
        """Where each rank was. The tag of before counts where a later one is a replacement's already."""
        strikes = []
        for rank in (chosen.watched, *(rank for rank in chosen.ranks if rank != chosen.watched)):
            was, now = before[rank], self._tags.read(rank)
            tag = now if was is None or (now is not None and now.generation == was.generation) else was
            strikes.append(
                Strike(
                    index=fault.index,
                    rank=rank,
                    pid=pid,
                    signal_ns=signal_ns,
                    died_ns=died_ns,
                    place=tag.place if tag is not None else "start",
                    step=tag.step if tag is not None else -1,
                    committed=tag.committed if tag is not None else -1,
                )
            )
        return tuple(strikes)

    # --- what it looks at ---------------------------------------------------------------------------------

    def _status(self) -> dict[str, Any] | None:
        job: dict[str, Any] | None = ask_status(self._client)["job"]
        return job

    def _pause(self, seconds: float) -> None:
        if os.getppid() != self._owner:
            raise SystemExit("the demo is gone")
        time.sleep(seconds)


class NodeInjectorProcess(StrikingProcess):
    """The demo's end. `hub`: the process that holds the links' namespace, 0 without."""

    def __init__(
        self,
        nodes: Sequence[Node],
        job: str,
        world_size: int,
        hub: int,
        suspect_after_s: float,
        faults: Sequence[NodeFault],
    ) -> None:
        order = {
            "nodes": [node.to_json() for node in nodes],
            "job": job,
            "world_size": world_size,
            "hub": hub,
            "suspect_after_s": suspect_after_s,
            "faults": [asdict(fault) for fault in faults],
        }
        super().__init__("flashrec.cli.demo.nodes.injector", order)

    def poll(self) -> list[NodeStrike]:
        """What was struck or healed since the last call."""
        return [NodeStrike.from_json(line) for line in self.lines()]


def main() -> None:
    """Reads an order, strikes, reports. Ended by SIGTERM it heals first."""
    order = json.load(sys.stdin)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    set_timer_slack(1000)  # sleep for what was asked
    nodes = [Node.from_json(fields) for fields in order["nodes"]]
    tags = NodeTags(nodes, order["job"], order["world_size"])
    with Client(nodes[0].run_dir) as client:
        injector = NodeInjector(client, nodes, tags, order["job"], order["hub"], order["suspect_after_s"])
        for strike in injector.strike_all([NodeFault(**fault) for fault in order["faults"]]):
            sys.stdout.write(json.dumps(strike.to_json()) + "\n")
            sys.stdout.flush()
