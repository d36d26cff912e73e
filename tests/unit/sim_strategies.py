"""Small models and clusters for the tests of the performance model's answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashrec.sim.cluster import Cluster, Device, Link, a100_cluster
from flashrec.sim.config import Config
from flashrec.sim.events import Communication, Event
from flashrec.sim.model import Transformer
from flashrec.sim.strategy import Strategy

MODEL = Transformer(name="small", num_layers=8, hidden=1024, num_heads=8, sequence=512, vocabulary=4352)


def small_cluster(devices: int = 8, *, memory_bytes: float = 80 << 30, **given: Any) -> Cluster:
    """Nodes of 4; of 2 where that makes two nodes."""
    per_node = 4 if devices > 4 else 2
    return Cluster(
        device=Device(
            name="A100-80GB",
            peak_flops={"bf16": 312e12},
            memory_bytes=memory_bytes,
            memory_bandwidth_bytes_s=2.039e12,
        ),
        num_nodes=devices // per_node,
        devices_per_node=per_node,
        intra_link=Link(bandwidth_bytes_s=300e9, latency_s=5e-6),
        inter_link=Link(bandwidth_bytes_s=50e9, latency_s=1e-5),
        **given,
    )


def config(strategy: Strategy | None = None, *, batch: int = 32, **given: Any) -> Config:
    """The small model on 8 devices."""
    strategy = strategy or Strategy(pipeline_parallel=4, data_parallel=2)
    return Config(model=MODEL, cluster=small_cluster(**given), strategy=strategy, global_batch=batch)


class Ones:
    """Durations: a second for every product inside a layer, `exchange_s` for every exchange, nothing else."""

    def __init__(self, exchange_s: float = 0.0):
        self.exchange_s = exchange_s

    def seconds(self, key: Event) -> float:
        """As said above; products with the vocabulary are free, so that stages are equal."""
        if isinstance(key, Communication):
            return self.exchange_s if key.participants > 1 else 0.0
        return 1.0 if key.operator == "gemm" and MODEL.vocabulary not in key.shape else 0.0


def slow(cluster: Cluster, factors: dict[int, float]) -> Cluster:
    """With devices of other speeds."""
    return replace(cluster, speed_factors=factors)


__all__ = ["MODEL", "Ones", "a100_cluster", "config", "slow", "small_cluster"]
