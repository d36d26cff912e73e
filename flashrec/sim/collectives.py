"""How long collectives take: an alpha-beta ring model, and tables of what was measured.

A ring all-reduce of S bytes over n ranks sends 2 (n - 1) / n S over every edge of the ring in 2 (n - 1) steps; a
reduce-scatter or an all-gather half of that (Patarasuk and Yuan, 2009). Every rank besides copies or adds each byte
once in its own memory, which does not depend on n. Between nodes the slowest edge decides, because chunks stream
through all edges at once: the network's, of which `groups` groups each get their share.
"""

import bisect
import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashrec.errors import UsageError
from flashrec.sim.choices import require_number
from flashrec.sim.cluster import Cluster
from flashrec.sim.events import Communication


def ring_volume(collective: str, participants: int) -> float:
    """Bytes over the busiest edge of a ring, for each byte of the tensor."""
    if participants == 1:
        return 0.0
    share = (participants - 1) / participants
    return {"all_reduce": 2 * share, "send": 1.0, "host_copy": 1.0}.get(collective, share)


def ring_steps(collective: str, participants: int) -> int:
    """Messages one after another."""
    if collective in ("send", "host_copy"):
        return 1
    return (2 if collective == "all_reduce" else 1) * (participants - 1)


@dataclass(frozen=True, kw_only=True)
class RingConstants:
    """What a ring costs, in parts of what the links promise."""

    intra_efficiency: float = 1.0
    """Part of the intra link's bandwidth that an edge inside a node sustains."""
    copy_share: float = 0.0
    """Time of the copies in a rank's own memory, for each byte, in parts of the intra link's time for it."""
    start_s: float = 0.0
    """Of any collective."""
    step_s: float = 0.0
    """Of each step inside a node, in addition to nothing else."""
    inter_efficiency: float = 1.0
    """Part of the inter link's bandwidth that collectives sustain."""

    def __post_init__(self) -> None:
        for name in ("intra_efficiency", "inter_efficiency"):
            require_number(getattr(self, name), f"ring constants: {name}", above=0)
        for name in ("copy_share", "start_s", "step_s"):
            require_number(getattr(self, name), f"ring constants: {name}", least=0)


def ring_seconds(event: Communication, cluster: Cluster, constants: RingConstants) -> float:
    """The ring model's time of one collective or transfer on `cluster`."""
    if event.collective == "host_copy":
        return cluster.host_link.latency_s + event.size_bytes / cluster.host_link.bandwidth_bytes_s
    if event.participants == 1 or event.size_bytes == 0:
        return 0.0
    intra_s_byte = 1 / cluster.intra_link.bandwidth_bytes_s
    edge_s_byte = intra_s_byte / constants.intra_efficiency
    steps = ring_steps(event.collective, event.participants)
    latency = constants.start_s + steps * constants.step_s
    if event.nodes > 1:
        edge_s_byte = max(edge_s_byte, 1 / node_share_bytes_s(event, cluster, constants))
        crossings = steps if event.participants == event.nodes else ring_steps(event.collective, event.nodes)
        latency += crossings * cluster.inter_link.latency_s
    copies = constants.copy_share * intra_s_byte
    if event.collective in ("reduce_scatter", "all_gather"):
        copies /= 2
    volume = ring_volume(event.collective, event.participants)
    return latency + event.size_bytes * (volume * edge_s_byte + copies)


def node_share_bytes_s(event: Communication, cluster: Cluster, constants: RingConstants) -> float:
    """What one group gets of a node's network: no more than its own devices' cards, nor its share among the groups."""
    network = cluster.inter_link.bandwidth_bytes_s * constants.inter_efficiency / cluster.oversubscription
    members = math.ceil(event.participants / event.nodes)
    own_cards = min(1.0, members / cluster.devices_per_node)
    return network * min(own_cards, 1 / event.groups)


@dataclass(frozen=True)
class MeasuredTable:
    """Measured times of one collective inside one node: participants -> (bytes, seconds), both increasing in bytes."""

    rows: Mapping[int, tuple[tuple[int, ...], tuple[float, ...]]]
    collective: str = "all_reduce"

    @classmethod
    def from_samples(
        cls, samples: Iterable[tuple[int, int, float]], collective: str = "all_reduce"
    ) -> "MeasuredTable":
        """From (participants, bytes, seconds). Raises UsageError for a group of which only one size was measured."""
        found: dict[int, dict[int, float]] = {}
        for participants, size, seconds in samples:
            require_number(seconds, f"seconds of {collective} of {size} bytes", above=0)
            found.setdefault(participants, {})[size] = seconds
        for participants, times in found.items():
            if len(times) < 2:
                raise UsageError(
                    f"{collective} of {participants} ranks: one size measured; at least two are needed"
                )
        return cls(
            {
                p: (tuple(sorted(times)), tuple(times[s] for s in sorted(times)))
                for p, times in sorted(found.items())
            },
            collective,
        )

    @classmethod
    def from_csv(cls, path: Path) -> "MeasuredTable":
        """From a file with columns gpus, bytes, time_us."""
        with path.open(newline="") as file:
            return cls.from_samples(
                (int(row["gpus"]), int(row["bytes"]), float(row["time_us"]) * 1e-6)
                for row in csv.DictReader(file)
            )

    def without(self, participants: int) -> "MeasuredTable":
        """The table less one group size."""
        return MeasuredTable({p: r for p, r in self.rows.items() if p != participants}, self.collective)

    def seconds(self, size_bytes: int, participants: int) -> float:
        """Time for any size and any number of ranks.

        Inside the measured sizes: straight lines between the logarithms. Above: the last time, and for the rest the
        bandwidth between the two greatest sizes. Below: the least. Numbers of ranks that were not measured: from the
        nearest on both sides, or the nearest, in proportion to ring volume as far as the message is long, to the ring's
        steps as far as it is short.
        """
        if participants == 1:
            return 0.0
        if participants in self.rows:
            return self._of_measured(size_bytes, participants)
        known = sorted(self.rows)
        if not known:
            raise UsageError(f"no {self.collective} was measured")
        at = bisect.bisect(known, participants)
        if at in (0, len(known)):
            return self._scaled(size_bytes, participants, known[0] if at == 0 else known[-1])
        low, high = known[at - 1], known[at]
        low_s, high_s = (self._of_measured(size_bytes, p) for p in (low, high))
        # volume(n) = 2 (1 - 1/n): the wire's part of the time is a line in 1/n, that of the steps one in n. Where the
        # message is long the first is nearly all of it, where it is short the second.
        wire = self._wire_share(size_bytes, high)
        by_volume = low_s + (high_s - low_s) * (1 / low - 1 / participants) / (1 / low - 1 / high)
        by_steps = low_s + (high_s - low_s) * (participants - low) / (high - low)
        return wire * by_volume + (1 - wire) * by_steps

    def _scaled(self, size_bytes: int, participants: int, near: int) -> float:
        """From the times of `near` ranks: the shortest message's by the ring's steps, the rest by its volume."""
        start, known = self.rows[near][1][0], self._of_measured(size_bytes, near)
        steps = ring_steps(self.collective, participants) / ring_steps(self.collective, near)
        volume = ring_volume(self.collective, participants) / ring_volume(self.collective, near)
        return start * steps + max(0.0, known - start) * volume

    def _wire_share(self, size_bytes: int, participants: int) -> float:
        shortest = self.rows[participants][1][0]
        return max(0.0, 1 - shortest / self._of_measured(size_bytes, participants))

    def _of_measured(self, size_bytes: int, participants: int) -> float:
        sizes, times = self.rows[participants]
        if size_bytes <= sizes[0]:
            return times[0]
        if size_bytes > sizes[-1]:
            s_byte = max(0.0, (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))
            return times[-1] + (size_bytes - sizes[-1]) * s_byte
        return float(np.exp(np.interp(np.log(size_bytes), np.log(sizes), np.log(times))))
