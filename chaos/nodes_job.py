"""A job over several nodes, each a daemon of its own on this machine: watched and struck from outside."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.cues import ENV_FOLDER
from chaos.job import ROOT, Job
from flashrec.cli.demo.nodes.cluster import Cluster, cluster
from flashrec.cli.demo.nodes.node import Loss, Node, children_of, lose
from flashrec.protocol.tag import TagReader, tag_path

ANEW_S = 6.0
"""A node that was lost comes back as a spare, so long after at the earliest."""


class NodesJob(Job):
    """`cluster` has the nodes, of which a fault loses some. A lost node's daemon is started anew when the job has
    recovered. Raises UsageError where `namespaces` cannot be made."""

    def __init__(
        self,
        folder: Path,
        script: Path,
        arguments: Sequence[str] = (),
        *,
        world_size: int,
        nodes: int,
        spare_nodes: int,
        replicas: int,
        namespaces: bool = False,
        **options: Any,
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._others = children_of(os.getpid())  # a reference's server, say
        path = f"{ROOT}:{ROOT / 'daemon'}"
        env = {"PYTHONPATH": path, ENV_FOLDER: str(folder)}
        self.cluster: Cluster = self._stack.enter_context(
            cluster(nodes + spare_nodes, namespaces=namespaces, env=env)
        )
        self._recovered = 0
        self._down_since: dict[str, float] = {}
        try:
            super().__init__(
                folder,
                script,
                arguments,
                world_size=world_size,
                submit={
                    "num_nodes": nodes,
                    "num_spare_nodes": spare_nodes,
                    "num_replicas": replicas,
                },
                **options,
            )
        except BaseException:
            self._stack.close()
            raise

    def _start_daemon(self) -> subprocess.Popen[bytes]:
        self._run_dir = self.cluster.leader.run_dir
        return self.cluster.process(self.cluster.leader)

    def poll(self, timeout_s: float = 0.01) -> bool:
        running = super().poll(timeout_s)
        self.cluster.reap(self._others)
        recovered = len(self.happened("recovered"))
        now = time.monotonic()
        for node in self.cluster.nodes[1:]:
            if self.cluster.is_up(node):
                self._down_since.pop(node.name, None)
            elif now - self._down_since.setdefault(node.name, now) > ANEW_S or recovered > self._recovered:
                self.cluster.start_daemon(node)
        self._recovered = recovered
        return running

    # --- nodes --------------------------------------------------------------------------------------------

    def node_of(self, rank: int) -> Node:
        """The node that `rank` is on now."""
        return self.cluster.named(self.status()["ranks"][rank]["node"])

    def keepers_of(self, rank: int) -> list[Node]:
        """The nodes that keep replicas of what it seals; those first that have no ranks, where its replacement goes."""
        status = self.status()
        busy = {one["node"] for one in status["ranks"]}
        return [
            self.cluster.named(name)
            for name in sorted(status["ranks"][rank]["kept_on"], key=busy.__contains__)
        ]

    def directory(self, node: Node) -> Path | None:
        """The job's, on that node."""
        return node.directory(self.status()["job"])

    def place_of(self, rank: int) -> tuple[str, int]:
        """Where it is, and in which step, by its tag: of other nodes the leader knows only what was a moment ago."""
        directory = self.directory(self.node_of(rank))
        if directory is None:
            return "nowhere", -1
        with contextlib.closing(TagReader(tag_path(directory, rank))) as reader:
            tag = reader.read()
        return ("start", -1) if tag is None else (tag.place, tag.step)

    def lose(self, node: Node) -> Loss:
        """All of it: its memory, and then its processes."""
        return lose(node, self.status()["job"], subreaper=os.getpid())

    # --- the end ------------------------------------------------------------------------------------------

    def _end_daemon(self) -> None:
        memories = {node.memory for node in self.cluster.nodes}
        name = self.final_status.get("job", "")
        self._stack.close()
        left = [str(path) for memory in memories if memory.exists() for path in memory.glob(f"*-{name}-*")]
        if name and left:
            raise AssertionError(f"left behind on the nodes: {', '.join(left)}")
