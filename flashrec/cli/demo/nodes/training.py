"""The run under flashrec over several nodes: an injector that strikes them, and somebody who starts lost ones anew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrec.cli.client import Client
from flashrec.cli.demo.nodes.cluster import Cluster
from flashrec.cli.demo.nodes.findings import NodeReport, join, unplanned
from flashrec.cli.demo.nodes.injector import NodeInjectorProcess
from flashrec.cli.demo.nodes.schedule import NodeFault
from flashrec.cli.demo.nodes.strike import NodeStrike
from flashrec.cli.demo.nodes.tags import NodeTags
from flashrec.cli.demo.settings import PROGRAMS, Settings
from flashrec.cli.demo.training import Record, Tags, Training
from flashrec.cli.run import Submission
from flashrec.cli.submit import submit_from_here
from flashrec.protocol import messages as msg
from flashrec.protocol.tag import Tag

ANEW_S = 8.0
"""After a daemon's death another is started on its node, once the node was given up and its ranks have recovered; or
after so long, if it was not. Where only the daemon died, also after so many steps of every rank without it."""
WITHOUT_STEPS = 5
ORPHANS_S = 5.0  # after the job, for what was adopted, and ends with it


@dataclass
class NodeRecord(Record):
    """`homes`: instants, and where the ranks were then."""

    node_faults: Sequence[NodeFault] = ()
    node_strikes: list[NodeStrike] = field(default_factory=list)
    homes: list[tuple[int, dict[int, str]]] = field(default_factory=list)
    started_anew: list[tuple[int, str]] = field(default_factory=list)
    """Instants, and the node whose daemon was started again."""
    orphans: list[tuple[int, list[int]]] = field(default_factory=list)
    """Instants, and the processes whose daemon was gone by then, and who lived."""
    noticed: list[str] = field(default_factory=list)
    """What the event log says about nodes and replicas."""

    def node_reports(self) -> list[NodeReport]:
        return join(self.node_faults, self.node_strikes, self.recoveries, self.homes)

    def unplanned(self) -> list[str]:
        return unplanned(self.node_strikes, self.recoveries)


NOTICED = (
    "node lost",
    "node heard",
    "node adopted",
    "node joined",
    "node not taken in",
    "too few replicas",
    "cannot recover",
    "waiting",
)


class NodeTraining(Training):
    """As Training, of a job whose leader is the first of `cluster`'s nodes."""

    record: NodeRecord

    def __init__(
        self,
        client: Client,
        settings: Settings,
        faults: Sequence[NodeFault],
        out: Path,
        cluster: Cluster,
    ) -> None:
        super().__init__(client, settings, [], out)
        self.record = NodeRecord([], node_faults=faults)
        self._cluster = cluster
        self._striker: NodeInjectorProcess | None = None
        self._down_since: dict[str, tuple[float, int]] = {}  # instants, and steps that all had committed

    def _tags(self, submission: Submission) -> Tags:
        return NodeTags(self._cluster.nodes, submission.job, self._settings.ranks)

    def _strike(self, submission: Submission, tags: Sequence[Tag | None]) -> None:
        cluster = self._cluster
        if self._striker is None:
            self._striker = NodeInjectorProcess(
                cluster.nodes,
                submission.job,
                self._settings.ranks,
                cluster.links.hub if cluster.links is not None else 0,
                self._settings.suspect_after_s,
                self.record.node_faults,
            )
        self._note()
        self._note_orphans(self._striker)
        committed = min((-1 if tag is None else tag.committed for tag in tags), default=-1)
        live_on = {strike.node for strike in self.record.node_strikes if strike.kind == "daemon"}
        for node in cluster.nodes[1:]:
            if cluster.is_up(node):
                self._down_since.pop(node.name, None)
                continue
            since, begun = self._down_since.setdefault(node.name, (time.monotonic(), committed))
            without = committed - begun if node.name in live_on else 0
            if time.monotonic() - since > ANEW_S or without >= WITHOUT_STEPS:
                self._start_anew()

    def _note_orphans(self, striker: NodeInjectorProcess) -> None:
        orphans = self._cluster.orphans([striker.pid])
        if orphans != (self.record.orphans[-1][1] if self.record.orphans else []):
            self.record.orphans.append((time.monotonic_ns(), orphans))

    def _start_anew(self) -> None:
        """Every daemon that is gone: it comes back as a spare."""
        for node in self._cluster.nodes[1:]:
            if not self._cluster.is_up(node):
                self._cluster.start_daemon(node)
                self.record.started_anew.append((time.monotonic_ns(), node.name))

    def _note(self) -> None:
        for strike in self._striker.poll() if self._striker is not None else ():
            self.record.node_strikes.append(strike)
            if self._disturbed_since is None:
                self._disturbed_since = strike.signal_ns

    def _close(self) -> None:
        if self._striker is not None:
            until = time.monotonic() + ORPHANS_S
            self._note_orphans(self._striker)
            while self.record.orphans and self.record.orphans[-1][1] and time.monotonic() < until:
                time.sleep(0.01)
                self._note_orphans(self._striker)
            self._striker.close()

    def _job(self) -> msg.Submit:
        settings = self._settings
        return submit_from_here(
            str(PROGRAMS / "train.py"),
            world_size=settings.ranks,
            args=settings.training_arguments(self._out),
            num_standbys=int(settings.standby != "none"),
            num_nodes=settings.nodes,
            num_spare_nodes=settings.spare_nodes,
            num_replicas=settings.replicas,
            suspect_after_s=settings.suspect_after_s,
        )

    def _happened(self, event: dict[str, Any], observer: Client) -> None:
        super()._happened(event, observer)
        if event["event"] in NOTICED:
            self.record.noticed.append(f"{event['event']}: {event['reason']}")
        if event["event"] == "recovered":
            self._start_anew()

    def _remember(self, job: dict[str, Any] | None) -> None:
        super()._remember(job)
        if job is not None:
            where = {rank["rank"]: rank["node"] for rank in job["ranks"]}
            self.record.homes.append((time.monotonic_ns(), where))
