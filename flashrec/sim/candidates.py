"""All strategies that divide a model, a cluster and a batch without a remainder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashrec.errors import UsageError
from flashrec.sim.architecture import RECOMPUTE
from flashrec.sim.choices import require_choice, require_count
from flashrec.sim.cluster import Cluster
from flashrec.sim.model import Transformer
from flashrec.sim.strategy import SCHEDULES, SHARDING, Strategy


@dataclass(frozen=True, kw_only=True)
class Space:
    """What a search may choose from."""

    schedules: tuple[str, ...] = SCHEDULES
    recompute: tuple[str, ...] = RECOMPUTE
    sharding: tuple[str, ...] = SHARDING
    max_tensor_parallel: int | None = None
    """None: as many as divide the model."""
    max_pipeline_parallel: int | None = None
    max_micro_batch: int | None = None
    max_chunks: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (("schedules", SCHEDULES), ("recompute", RECOMPUTE), ("sharding", SHARDING)):
            if not getattr(self, name):
                raise UsageError(f"search: {name} is empty; choose from {', '.join(choices)}")
            for value in getattr(self, name):
                require_choice(value, choices, f"search: {name}")
        for name in ("max_tensor_parallel", "max_pipeline_parallel", "max_micro_batch", "max_chunks"):
            if getattr(self, name) is not None:
                require_count(getattr(self, name), f"search: {name}")


def divisors(number: int, most: int | None = None) -> list[int]:
    """All, ascending, up to `most`."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    found = sorted({*small, *(number // d for d in small)})
    return found if most is None else [d for d in found if d <= most]


def strategies(
    model: Transformer, cluster: Cluster, global_batch: int, space: Space, base: Strategy
) -> Iterator[Strategy]:
    """Every valid strategy of `space`; all that it does not name is `base`'s.

    With tensor parallelism, sequence parallelism is on where `base` has it. One stage knows one schedule. Raises
    UsageError where there is none at all, and says why.
    """
    devices, found = cluster.num_devices, 0
    for tensor in _tensor_sizes(model, cluster, space):
        for stages in divisors(devices // tensor, space.max_pipeline_parallel):
            data = devices // tensor // stages
            if model.num_layers % stages or global_batch % data:
                continue
            for expert in _expert_sizes(model, data):
                for micro_batch in divisors(global_batch // data, space.max_micro_batch):
                    plain = replace(
                        base,
                        data_parallel=data,
                        tensor_parallel=tensor,
                        pipeline_parallel=stages,
                        expert_parallel=expert,
                        sequence_parallel=base.sequence_parallel and tensor > 1,
                        micro_batch=micro_batch,
                        schedule="1f1b",
                        chunks=1,
                        stage_layers=None,
                        shard_group=None,
                        sharding="none",
                    )
                    for strategy in _variants(plain, model.num_layers, global_batch, space):
                        found += 1
                        yield strategy
    if not found:
        raise UsageError(
            f"no strategy divides {model.num_layers} layers, {model.num_heads} heads and a global batch of "
            f"{global_batch} over {devices} devices without a remainder: data_parallel, which is {devices} / "
            f"(tensor_parallel x pipeline_parallel), must divide global_batch; nearest valid global_batch: "
            f"{max(1, round(global_batch / devices)) * devices}"
        )


def _tensor_sizes(model: Transformer, cluster: Cluster, space: Space) -> list[int]:
    parts = (model.num_heads, model.num_kv_heads, model.ffn)
    return [
        tensor
        for tensor in divisors(cluster.num_devices, space.max_tensor_parallel)
        if cluster.fits_nodes(tensor) and all(part % tensor == 0 for part in parts)
    ]


def _expert_sizes(model: Transformer, data: int) -> list[int]:
    return [e for e in divisors(model.num_experts) if data % e == 0] if model.moe else [1]


def _variants(plain: Strategy, num_layers: int, global_batch: int, space: Space) -> Iterator[Strategy]:
    """Schedules, recomputation and sharding of one division."""
    stages, micro_batches = plain.pipeline_parallel, plain.num_micro_batches(global_batch)
    shardings = space.sharding if plain.data_parallel > 1 else ("none",)
    for schedule, chunks in _schedules(stages, micro_batches, num_layers, space):
        for recompute in space.recompute:
            for sharding in shardings:
                yield replace(plain, schedule=schedule, chunks=chunks, recompute=recompute, sharding=sharding)


def _schedules(stages: int, micro_batches: int, num_layers: int, space: Space) -> Iterator[tuple[str, int]]:
    if stages == 1:
        yield "1f1b", 1
        return
    for schedule in space.schedules:
        if schedule != "interleaved":
            yield schedule, 1
        elif micro_batches % stages == 0:
            for chunks in divisors(num_layers // stages, space.max_chunks)[1:]:
                yield schedule, chunks
