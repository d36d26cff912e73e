"""The analytic device model: how long an event takes where nothing was measured.

A kernel takes the time of its arithmetic, plus that of moving its operands, plus a start:

    gemm      2 m k n / (peak e_gemm)  +  bytes of operands and result / (memory bandwidth e_memory)  +  start
    traffic   bytes / (memory bandwidth e_memory)  +  start

That is a roofline whose two sides are added rather than overlapped: it makes the efficiency of a product rise with
every one of its dimensions towards e_gemm, as measured ones do, without a constant for the curve's shape. Collectives
are rings (flashrec.sim.collectives).

The constants of A100-80GB are fitted (flashrec.sim.calibration); other devices take them with their own published
peaks, which nobody has checked: `calibrated` says which it is.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from flashrec.errors import UsageError
from flashrec.sim.choices import require_known, require_number
from flashrec.sim.cluster import Cluster
from flashrec.sim.collectives import RingConstants, ring_seconds
from flashrec.sim.events import POINT_TO_POINT, Communication, Compute, Event

FORMAT = 1
CALIBRATED_DEVICE = "A100-80GB"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """All that the analytic model takes from measurements."""

    gemm_efficiency: float
    """Part of the peak that an endlessly large product reaches."""
    memory_efficiency: float
    """Part of the memory's bandwidth that kernels reach."""
    kernel_start_s: float
    """Between one kernel and the next."""
    meeting_s: float = 0.0
    """Before a collective inside a step: its ranks wait for one another. Not seen where collectives are timed alone."""
    ring: RingConstants

    def __post_init__(self) -> None:
        for name in ("gemm_efficiency", "memory_efficiency"):
            value = getattr(self, name)
            require_number(value, f"constants: {name}", above=0)
            if value > 1:
                raise UsageError(f"constants: {name} is {value}; an efficiency is at most 1 (nearest: 1.0)")
        for name in ("kernel_start_s", "meeting_s"):
            require_number(getattr(self, name), f"constants: {name}", least=0)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Constants":
        """From `to_json`'s object. Raises UsageError for unknown or missing keys."""
        names = [f.name for f in dataclasses.fields(cls)]
        require_known(found, names, "constants")
        missing = [name for name in names if name not in found]
        if missing:
            raise UsageError(f"constants: missing {', '.join(missing)}")
        ring = found["ring"]
        require_known(ring, [f.name for f in dataclasses.fields(RingConstants)], "constants: ring")
        return cls(**{**found, "ring": RingConstants(**ring)})


def load_constants() -> Constants:
    """The fitted constants that the package carries. Raises UsageError where the file is of another format."""
    text = resources.files("flashrec.sim").joinpath("data/a100.json").read_text()
    found = json.loads(text)
    if found.get("format") != FORMAT:
        raise UsageError(f"data/a100.json is of format {found.get('format')!r}; this release reads {FORMAT}")
    return Constants.from_json(found["constants"])


@dataclass(frozen=True)
class AnalyticDurations:
    """`Durations` of a cluster from peaks and constants. Times are of a device at normal speed."""

    cluster: Cluster
    constants: Constants = field(default_factory=load_constants)

    @property
    def calibrated(self) -> bool:
        """Whether the constants were fitted on this kind of device."""
        return self.cluster.device.name == CALIBRATED_DEVICE

    def seconds(self, key: Event) -> float:
        """How long `key` takes."""
        if isinstance(key, Communication):
            seconds = ring_seconds(key, self.cluster, self.constants.ring)
            alone = seconds == 0.0 or key.collective in POINT_TO_POINT
            return seconds if alone else seconds + self.constants.meeting_s
        return self._kernel_seconds(key)

    def _kernel_seconds(self, key: Compute) -> float:
        device, constants = self.cluster.device, self.constants
        bandwidth = device.memory_bandwidth_bytes_s * constants.memory_efficiency
        seconds = constants.kernel_start_s + key.traffic_bytes / bandwidth
        if key.operator == "gemm":
            seconds += key.flops / (device.flops(key.dtype) * constants.gemm_efficiency)
        return seconds
