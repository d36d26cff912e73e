"""The machines: devices, the links inside a node and between nodes, and how fast each device really is."""

from dataclasses import dataclass, field

from flashrec.errors import UsageError
from flashrec.sim.choices import nearest_key, require_choice, require_count, require_number
from flashrec.sim.events import DTYPES

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, by its published peak figures."""

    name: str
    peak_flops: dict[str, float] = field(hash=False)
    """FLOP/s by dtype, dense."""
    memory_bytes: float
    memory_bandwidth_bytes_s: float

    def __post_init__(self) -> None:
        if not self.peak_flops:
            raise UsageError(f"device {self.name}: peak_flops is empty; give FLOP/s by dtype")
        for dtype, flops in self.peak_flops.items():
            require_choice(dtype, DTYPES, f"device {self.name}: dtype in peak_flops")
            require_number(flops, f"device {self.name}: peak_flops[{dtype}]", above=0)
        require_number(self.memory_bytes, f"device {self.name}: memory_bytes", above=0)
        require_number(
            self.memory_bandwidth_bytes_s, f"device {self.name}: memory_bandwidth_bytes_s", above=0
        )

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`. Raises UsageError where the device's figure is not given."""
        if dtype not in self.peak_flops:
            raise UsageError(
                f"device {self.name} has no peak_flops for {dtype}; known: {', '.join(self.peak_flops)}"
            )
        return self.peak_flops[dtype]


# Vendor data sheets, dense figures. Only the A100-80GB's efficiency curves are calibrated (flashrec.sim.analytic).
DEVICES = {
    d.name: d
    for d in (
        Device(
            name="A100-80GB",
            peak_flops={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
            memory_bytes=80 * GIB,
            memory_bandwidth_bytes_s=2.039e12,
        ),
        Device(
            name="A100-40GB",
            peak_flops={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
            memory_bytes=40 * GIB,
            memory_bandwidth_bytes_s=1.555e12,
        ),
        Device(
            name="H100-80GB",
            peak_flops={"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "fp32": 67e12},
            memory_bytes=80 * GIB,
            memory_bandwidth_bytes_s=3.35e12,
        ),
        Device(
            name="H200-141GB",
            peak_flops={"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "fp32": 67e12},
            memory_bytes=141e9,
            memory_bandwidth_bytes_s=4.8e12,
        ),
        Device(
            name="V100-32GB",
            peak_flops={"fp16": 125e12, "fp32": 15.7e12},
            memory_bytes=32 * GIB,
            memory_bandwidth_bytes_s=0.9e12,
        ),
    )
}


def known_device(name: str) -> Device:
    """The device of that name among DEVICES. Raises UsageError with the nearest name."""
    if name not in DEVICES:
        raise UsageError(f"unknown device {name!r}; nearest: {nearest_key(name, DEVICES)!r}; or describe it")
    return DEVICES[name]


@dataclass(frozen=True, kw_only=True)
class Link:
    """Bandwidth in one direction and the latency of one message."""

    bandwidth_bytes_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        require_number(self.bandwidth_bytes_s, "link: bandwidth_bytes_s", above=0)
        require_number(self.latency_s, "link: latency_s", least=0)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices. Ranks are numbered node by node."""

    name: str = "cluster"
    device: Device
    num_nodes: int
    devices_per_node: int
    intra_link: Link
    """Inside a node, of one device: what it can send while it receives as much."""
    inter_link: Link
    """Between nodes, of one *node*: all its network cards together."""
    host_link: Link = Link(bandwidth_bytes_s=25e9, latency_s=10e-6)
    """From a device to its host's memory (PCIe), of one device."""
    oversubscription: float = 1.0
    """How many times more the nodes can ask of the network than it carries; 1 where it never blocks."""
    speed_factors: dict[int, float] = field(default_factory=dict, hash=False)
    """Device (global number): its compute speed relative to a normal one. 0.5 takes twice as long."""

    def __post_init__(self) -> None:
        require_count(self.num_nodes, "cluster: num_nodes")
        require_count(self.devices_per_node, "cluster: devices_per_node")
        require_number(self.oversubscription, "cluster: oversubscription", least=1)
        num_devices = (
            self.num_devices
        )  # a hundred thousand factors are usual: only the wrong ones are looked at closely
        for device, factor in self.speed_factors.items():
            if (
                type(device) is int
                and type(factor) is float
                and 0 <= device < num_devices
                and 0 < factor < 1e9
            ):
                continue
            require_count(device, "cluster: a device in speed_factors", least=0)
            require_number(factor, f"cluster: speed_factors[{device}]", above=0)
            if device >= num_devices:
                raise UsageError(
                    f"cluster: speed_factors names device {device}, but there are {num_devices}; "
                    f"nearest valid: {num_devices - 1}"
                )

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.num_nodes * self.devices_per_node

    def fits_nodes(self, group: int) -> bool:
        """Whether groups of neighbouring devices lie alike: each in one node, or each in whole nodes. Others straddle
        nodes, some of them at least, and nobody would run them."""
        per_node = self.devices_per_node
        return self.num_nodes == 1 or per_node % group == 0 or group % per_node == 0

    def speed(self, device: int) -> float:
        """The device's speed factor, 1.0 unless given."""
        return self.speed_factors.get(device, 1.0)


def a100_cluster(num_nodes: int, *, inter_bandwidth_bytes_s: float = 200e9) -> Cluster:
    """Nodes of 8 A100-80GB with NVLink (300 GB/s a direction), and 8 x 200 Gb/s between nodes unless told otherwise.

    The fitted constants are parts of these figures.
    """
    return Cluster(
        name=f"{num_nodes} nodes of 8 A100-80GB",
        device=DEVICES["A100-80GB"],
        num_nodes=num_nodes,
        devices_per_node=8,
        intra_link=Link(bandwidth_bytes_s=300e9, latency_s=5e-6),
        inter_link=Link(bandwidth_bytes_s=inter_bandwidth_bytes_s, latency_s=10e-6),
    )
