"""How a training step is divided over devices, and whether that is possible."""

from dataclasses import dataclass

from flashrec.errors import UsageError
from flashrec.sim.architecture import Architecture, Division, require_recompute
from flashrec.sim.choices import (
    nearest_divisors,
    nearest_multiples,
    require_choice,
    require_count,
    require_division,
    require_number,
    words,
)
from flashrec.sim.cluster import Cluster
from flashrec.sim.events import DTYPES
from flashrec.sim.schedules import Schedule

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
SHARDING = ("none", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Gradients made smaller before they are exchanged."""

    ratio: float = 1.0
    """Bytes exchanged for each byte of the gradient."""
    passes: float = 2.0
    """How many times the gradient is read and written in the device's memory to compress and to restore it."""

    def __post_init__(self) -> None:
        require_number(self.ratio, "compression: ratio", above=0)
        if self.ratio > 1:
            raise UsageError(
                f"compression: ratio is {self.ratio}; nearest valid: 1.0 (nothing is made smaller)"
            )
        require_number(self.passes, "compression: passes", least=0)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What the optimizer keeps and moves, for each parameter. The defaults are Adam with fp32 master weights."""

    state_bytes: float = 12.0
    """Master weight and two moments, in fp32."""
    traffic_bytes: float = 28.0
    """Read: the gradient (2) and the three states (12); written: the states and the weight (14)."""
    gradient_passes: float = 2.0
    """Further reads of the gradient: its norm and its scale."""

    def __post_init__(self) -> None:
        for name in ("state_bytes", "traffic_bytes", "gradient_passes"):
            require_number(getattr(self, name), f"optimizer: {name}", least=0)


@dataclass(frozen=True, kw_only=True)
class Replication:
    """What surviving failures costs: sealing state in host memory and sending copies to peers on other nodes.

    In the live regime other ranks hold the tensor state already; a step costs the gate and a few KB of private state.
    In the sealed regime each sealed version is copied to the host, and from there to `copies` peers, while the next
    step's forward and backward run; what does not fit beside them is waited for at the gate.
    """

    regime: str = "live"
    copies: int = 1
    every_steps: int = 1
    """Versions sealed: every so many steps. Costs are of the mean step."""
    private_bytes: int = 4096
    gate_bytes: int = 64
    slowdown: float = 0.0
    """Part of the hidden time by which sealing and sending slow down what they run beside."""

    def __post_init__(self) -> None:
        require_choice(self.regime, ("live", "sealed"), "replication: regime")
        require_count(self.copies, "replication: copies", least=0)
        require_count(self.every_steps, "replication: every_steps")
        require_count(self.private_bytes, "replication: private_bytes", least=0)
        require_count(self.gate_bytes, "replication: gate_bytes")
        require_number(self.slowdown, "replication: slowdown", least=0)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Ranks are numbered tensor first, then data, then pipeline. Expert groups are runs of data-parallel ranks."""

    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False
    micro_batch: int = 1
    schedule: str | Schedule = "1f1b"
    chunks: int = 1
    """Parts of the model on each stage; more than one with the interleaved schedule (or the user's own)."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each virtual stage, in the model's order. None: equal."""
    recompute: str = "none"
    sharding: str = "none"
    """zero1: optimizer states; zero2: gradients too; zero3: parameters too (FSDP)."""
    shard_group: int | None = None
    """HSDP: sharded over so many neighbouring data-parallel ranks, replicated over the groups. None: over all."""
    overlap_gradients: bool = True
    overlap_tensor: bool = False
    """The exchanges of the input's gradients inside a layer run beside the products of the weights' gradients."""
    overlap_parameters: bool = True
    """ZeRO-3 gathers the next layer's parameters while it computes."""
    gradient_buckets: int = 4
    gradient_dtype: str = "bf16"
    dtype: str = "bf16"
    sends_block: bool = True
    scatter_sends: bool = False
    """Each tensor rank sends its part of the activations, and the next stage gathers them (arXiv 2104.04473, 4.1)."""
    optimizer: Optimizer = Optimizer()
    compression: Compression | None = None
    replication: Replication | None = None

    def __post_init__(self) -> None:
        for name in (
            *("data_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel"),
            *("micro_batch", "chunks", "gradient_buckets"),
        ):
            require_count(getattr(self, name), f"strategy: {name}")
        require_recompute(self.recompute)
        require_choice(self.sharding, SHARDING, "strategy: sharding")
        require_choice(self.dtype, DTYPES, "strategy: dtype")
        require_choice(self.gradient_dtype, DTYPES, "strategy: gradient_dtype")
        require_division(self.data_parallel, "data_parallel", self.expert_parallel, "expert_parallel")
        self._check_schedule()
        if self.shard_group is not None:
            require_count(self.shard_group, "strategy: shard_group")
            if self.sharding == "none":
                raise UsageError(
                    "strategy: shard_group is given, but sharding is 'none'; nearest valid: 'zero1'"
                )
            require_division(self.data_parallel, "data_parallel", self.shard_group, "shard_group")
        if self.stage_layers is not None:
            for layers in self.stage_layers:
                require_count(layers, "strategy: a number in stage_layers", least=0)
            if len(self.stage_layers) != self.num_virtual_stages:
                raise UsageError(
                    f"strategy: stage_layers has {len(self.stage_layers)} numbers; "
                    f"pipeline_parallel x chunks needs {self.num_virtual_stages}"
                )

    def _check_schedule(self) -> None:
        if isinstance(self.schedule, Schedule):
            given = (self.schedule.num_stages, self.schedule.num_chunks)
            if given != (self.pipeline_parallel, self.chunks):
                raise UsageError(
                    f"strategy: the schedule {self.schedule.name!r} has {given[0]} stages and {given[1]} chunks; "
                    f"pipeline_parallel is {self.pipeline_parallel}, chunks {self.chunks}"
                )
            return
        require_choice(self.schedule, SCHEDULES, "strategy: schedule")
        if self.chunks > 1 and self.schedule != "interleaved":
            raise UsageError(
                f"strategy: chunks is {self.chunks} with schedule {self.schedule!r}; "
                "nearest valid: chunks = 1, or schedule 'interleaved'"
            )
        if self.schedule == "interleaved" and self.pipeline_parallel == 1:
            raise UsageError(
                "strategy: the interleaved schedule needs pipeline_parallel of at least 2 (nearest: 2)"
            )

    @property
    def num_devices(self) -> int:
        """Devices it uses."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def num_virtual_stages(self) -> int:
        """Parts of the model, in order."""
        return self.pipeline_parallel * self.chunks

    @property
    def shards(self) -> int:
        """Over how many ranks what `sharding` names is divided; 1 without sharding."""
        if self.sharding == "none":
            return 1
        return self.data_parallel if self.shard_group is None else self.shard_group

    @property
    def expert_shards(self) -> int:
        """The same for experts, of which only data_parallel / expert_parallel ranks hold the same ones."""
        return max(1, self.shards // self.expert_parallel)

    @property
    def division(self) -> Division:
        """How one micro-batch is divided over a stage's devices."""
        return Division(
            micro_batch=self.micro_batch,
            tensor_parallel=self.tensor_parallel,
            sequence_parallel=self.sequence_parallel,
            expert_parallel=self.expert_parallel,
            gradient_bytes=DTYPES[self.gradient_dtype],
        )

    def num_micro_batches(self, global_batch: int) -> int:
        """Micro-batches each replica works through in a step. Raises UsageError where the batch cannot be divided."""
        require_count(global_batch, "global_batch")
        unit = self.data_parallel * self.micro_batch
        if global_batch % unit:
            share = global_batch // self.data_parallel
            hint = f"; nearest valid global_batch: {words(nearest_multiples(unit, global_batch))}"
            if share and global_batch % self.data_parallel == 0:
                hint = (
                    f"; nearest valid micro_batch: {words(nearest_divisors(share, self.micro_batch))}" + hint
                )
            raise UsageError(
                f"global_batch ({global_batch}) cannot be divided by data_parallel x micro_batch "
                f"({self.data_parallel} x {self.micro_batch} = {unit})" + hint
            )
        return global_batch // unit

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each virtual stage. Raises UsageError where they cannot be divided."""
        stages = self.num_virtual_stages
        if self.stage_layers is None:
            require_division(num_layers, "num_layers", stages, "pipeline_parallel x chunks")
            return (num_layers // stages,) * stages
        if sum(self.stage_layers) != num_layers:
            raise UsageError(
                f"strategy: stage_layers adds up to {sum(self.stage_layers)}; the model has {num_layers} layers"
            )
        return self.stage_layers

    def check(self, model: Architecture, cluster: Cluster, global_batch: int) -> None:
        """Raises UsageError, with the nearest valid values, where the strategy does not fit the rest."""
        unit = self.tensor_parallel * self.pipeline_parallel * self.expert_parallel
        devices = cluster.num_devices
        if devices % unit:
            raise UsageError(
                f"{devices} devices cannot be divided by tensor_parallel x pipeline_parallel x expert_parallel "
                f"({self.tensor_parallel} x {self.pipeline_parallel} x {self.expert_parallel} = {unit}); "
                f"nearest valid products: {words(nearest_divisors(devices, unit))}; "
                f"nearest valid numbers of devices: {words(nearest_multiples(unit, devices))}"
            )
        if self.num_devices != devices:
            data = devices // (self.tensor_parallel * self.pipeline_parallel)
            raise UsageError(
                f"data_parallel x tensor_parallel x pipeline_parallel ({self.data_parallel} x {self.tensor_parallel} "
                f"x {self.pipeline_parallel} = {self.num_devices}) is not the cluster's {devices} devices; "
                f"nearest valid data_parallel: {data}"
            )
        if not cluster.fits_nodes(self.tensor_parallel):
            per_node = cluster.devices_per_node
            below = nearest_divisors(per_node, self.tensor_parallel)
            sizes = {*below, *nearest_multiples(per_node, self.tensor_parallel)}
            raise UsageError(
                f"groups of tensor_parallel ({self.tensor_parallel}) would straddle nodes of {per_node} devices; "
                f"nearest valid tensor_parallel: {words(sorted(sizes))}"
            )
        cluster.device.flops(self.dtype)
        model.check_division(self.tensor_parallel, self.expert_parallel)
        self.layers(model.num_layers)
        micro_batches = self.num_micro_batches(global_batch)
        if self.schedule == "interleaved" and micro_batches % self.pipeline_parallel:
            near = [
                m * self.data_parallel * self.micro_batch
                for m in nearest_multiples(self.pipeline_parallel, micro_batches)
            ]
            raise UsageError(
                f"the interleaved schedule needs micro-batches ({micro_batches}) in multiples of pipeline_parallel "
                f"({self.pipeline_parallel}); nearest valid global_batch: {words(near)}"
            )
        if isinstance(self.schedule, Schedule) and self.schedule.num_micro_batches != micro_batches:
            raise UsageError(
                f"the schedule {self.schedule.name!r} is of {self.schedule.num_micro_batches} micro-batches; "
                f"the batch makes {micro_batches}; nearest valid global_batch: "
                f"{self.schedule.num_micro_batches * self.data_parallel * self.micro_batch}"
            )
