"""The ranks' tags, wherever the ranks are: each node has some in the job's directory of its own, and a rank that has
moved leaves an old one behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from flashrec.cli.demo.nodes.node import Node
from flashrec.errors import FlashrecError
from flashrec.protocol.jobdir import job_directories
from flashrec.protocol.tag import Tag, TagReader, tag_path

LOOK_S = 0.1


class NodeTags:
    """Of the job's ranks. A tag outlives the directory it was in, for whoever had found it before."""

    def __init__(self, nodes: Sequence[Node], job: str, world_size: int) -> None:
        self._memories = {node.memory for node in nodes}
        self._job = job
        self._world_size = world_size
        self._readers: dict[Path, list[TagReader]] = {}
        self._look_at = 0.0

    def read(self, rank: int) -> Tag | None:
        """The newest one; None if there is none yet."""
        self._look()
        found = []
        for readers in self._readers.values():
            with contextlib.suppress(FlashrecError):
                if (tag := readers[rank].read()) is not None:
                    found.append(tag)
        return max(found, key=lambda tag: tag.changed_ns, default=None)

    def all(self) -> list[Tag | None]:
        return [self.read(rank) for rank in range(self._world_size)]

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for memory in self._memories:
            for path in job_directories(memory):
                if path not in self._readers and f"-{self._job}-" in path.name:
                    self._readers[path] = [
                        TagReader(tag_path(path, rank)) for rank in range(self._world_size)
                    ]

    def close(self) -> None:
        for readers in self._readers.values():
            for reader in readers:
                reader.close()
