"""What is on record of a fault that struck a node."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from flashrec.cli.demo.injector import Strike


@dataclass(frozen=True, kw_only=True)
class NodeStrike:
    """Instants are `time.monotonic_ns()`, 0 for what has not been. `ranks`: where each rank of it was; of a link or a
    daemon they live on."""

    index: int
    kind: str
    node: str
    signal_ns: int
    died_ns: int
    ranks: tuple[Strike, ...]
    num_processes: int = 0
    """That were killed."""
    num_files: int = 0
    """That the node's memory had."""
    detail: str = ""
    healed_ns: int = 0

    @property
    def kills_ranks(self) -> bool:
        return self.kind not in ("daemon", "link")

    @property
    def loses_node(self) -> bool:
        """Its daemon is gone, so another may be started there."""
        return self.kind not in ("rank", "link")

    def healed(self, at_ns: int) -> NodeStrike:
        return replace(self, healed_ns=at_ns)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> NodeStrike:
        ranks = tuple(Strike(**one) for one in fields["ranks"])
        return NodeStrike(**{**fields, "ranks": ranks})
