"""When what fails: drawn from a rate, or read from a file.

A *fault* strikes a rank (its process ends; the node lives and the rank is replaced there), a node, or a rack (all of
its nodes at once). Each kind is a superposition of independent renewal processes, one for each component, with
Weibull times between failures: shape 1 is the exponential distribution, a shape below 1 bunches failures. The
processes are stationary: the time to a component's first failure is the residual life of the equilibrium renewal
process (a uniform share of a length-biased interval), so that the rate is the same from the first second to the last.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flashrec.errors import UsageError

DAY_S = 86_400.0
# Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs, one in 3.1 hours.
LLAMA3_DEVICE_HOURS = 54 * 24 * 16_384 / 419
FORMAT = "flashrec failure trace 1"


class Scope(enum.StrEnum):
    RANK = "rank"
    NODE = "node"
    RACK = "rack"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where devices are: `devices_per_node` on each node, `nodes_per_rack` nodes in each rack, both filled in order;
    the last ones may be partly filled."""

    devices: int
    devices_per_node: int = 8
    nodes_per_rack: int = 16

    def __post_init__(self) -> None:
        for name in ("devices", "devices_per_node", "nodes_per_rack"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.devices % self.devices_per_node:
            low = self.devices - self.devices % self.devices_per_node
            near = f"{low} or {low + self.devices_per_node}" if low else f"{self.devices_per_node}"
            raise UsageError(
                f"{self.devices} devices do not fill nodes of {self.devices_per_node}: nearest are {near}"
            )

    @property
    def nodes(self) -> int:
        return self.devices // self.devices_per_node

    @property
    def racks(self) -> int:
        return -(-self.nodes // self.nodes_per_rack)

    def count(self, scope: Scope) -> int:
        return {Scope.RANK: self.devices, Scope.NODE: self.nodes, Scope.RACK: self.racks}[scope]


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """At `at_s` (seconds from the start) the rank, node or rack `index` fails. `is_silent`: of a node or rack, no
    connection is closed and no collective fails, so that only missing heartbeats tell."""

    at_s: float
    scope: Scope
    index: int
    is_silent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureRates:
    """How often what fails. The default of `device_mtbf_hours` is Llama 3's published rate (see LLAMA3_DEVICE_HOURS):
    one interruption in 3.1 hours on 16,384 devices. How these divide into lost ranks and lost nodes is our
    assumption, as is a rack's rate, which comes on top.

    `device_mtbf_hours`: mean device-hours between interruptions. `node_share`: of these, the part that takes the whole
    node. `rack_mtbf_hours`: mean hours of one rack between losses of all its nodes; None: never. `shape`: of the
    Weibull distribution. `silent_share`: of node and rack losses (docs/measurements.md, "The loss of a node": two in
    ten)."""

    device_mtbf_hours: float = LLAMA3_DEVICE_HOURS
    node_share: float = 0.6
    rack_mtbf_hours: float | None = None
    shape: float = 1.0
    silent_share: float = 0.2

    def __post_init__(self) -> None:
        if not (math.isfinite(self.device_mtbf_hours) and self.device_mtbf_hours > 0):
            raise UsageError(f"device_mtbf_hours must be positive and finite, not {self.device_mtbf_hours}")
        if self.rack_mtbf_hours is not None and not self.rack_mtbf_hours > 0:
            raise UsageError(
                f"rack_mtbf_hours must be positive, or None for never, not {self.rack_mtbf_hours}"
            )
        if not 0.1 <= self.shape <= 10:
            raise UsageError(f"shape must be from 0.1 to 10 (1 is exponential), not {self.shape}")
        for name in ("node_share", "silent_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} must be from 0 to 1, not {getattr(self, name)}")

    def mtbf_s(self, layout: Layout) -> float:
        """Mean seconds between faults of any kind in the whole cluster."""
        return 1.0 / sum(self.rate_per_s(layout, scope) for scope in Scope)

    def rate_per_s(self, layout: Layout, scope: Scope) -> float:
        """Faults of one kind a second, in the whole cluster."""
        if scope is Scope.RACK:
            return layout.racks / (self.rack_mtbf_hours * 3600) if self.rack_mtbf_hours else 0.0
        share = self.node_share if scope is Scope.NODE else 1 - self.node_share
        return share * layout.devices / (self.device_mtbf_hours * 3600)


def draw(
    rates: FailureRates, layout: Layout, duration_s: float, rng: np.random.Generator
) -> tuple[Fault, ...]:
    """All faults in [0, duration_s), in order of time. The same for the same state of `rng`."""
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise UsageError(f"duration_s must be positive and finite, not {duration_s}")
    faults: list[Fault] = []
    for scope in Scope:
        rate = rates.rate_per_s(layout, scope)
        if rate <= 0:
            continue
        count = layout.count(scope)
        at_s, index = _renewals(count, count / rate, rates.shape, duration_s, rng)
        silent = rng.random(len(at_s)) < (0.0 if scope is Scope.RANK else rates.silent_share)
        faults += [
            Fault(float(t), scope, int(i), bool(s)) for t, i, s in zip(at_s, index, silent, strict=True)
        ]
    return tuple(sorted(faults))


def _renewals(
    count: int, mean_s: float, shape: float, duration_s: float, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """`count` stationary renewal processes: times and whose they are.

    X = scale * G^(1/shape) with G exponential is Weibull; length-biased (density x f(x) / mean) it has
    G ~ Gamma(1 + 1/shape), and the residual life in equilibrium is a uniform share of that."""
    scale = mean_s / math.gamma(1 + 1 / shape)
    times, owners = [], []
    index = np.arange(count)
    at_s = rng.random(count) * scale * rng.gamma(1 + 1 / shape, size=count) ** (1 / shape)
    while True:
        there = at_s < duration_s
        at_s, index = at_s[there], index[there]
        if not len(index):
            break
        times.append(at_s)
        owners.append(index)
        at_s = at_s + scale * rng.weibull(shape, len(index))
    if not times:
        return np.empty(0), np.empty(0, dtype=np.int64)
    return np.concatenate(times), np.concatenate(owners)


def write_trace(path: str | Path, faults: Iterable[Fault], layout: Layout) -> None:
    """JSON lines: one that says what follows and for which layout, then a fault on each."""
    head = {
        "format": FORMAT,
        "devices": layout.devices,
        "devices_per_node": layout.devices_per_node,
        "nodes_per_rack": layout.nodes_per_rack,
    }
    lines = [json.dumps(head)]
    for fault in faults:
        line = {"at_s": fault.at_s, "scope": fault.scope.value, "index": fault.index}
        lines.append(json.dumps({**line, "silent": True} if fault.is_silent else line))
    Path(path).write_text("\n".join(lines) + "\n")


def read_trace(path: str | Path, layout: Layout) -> tuple[Fault, ...]:
    """What `write_trace` wrote, or a person, in any order of time. UsageError names the line that is wrong."""
    lines = Path(path).read_text().splitlines()
    head = _parse(path, 1, lines[0] if lines else "")
    if head.get("format") != FORMAT:
        raise UsageError(f'{path}, line 1: a failure trace begins with {{"format": "{FORMAT}", ...}}')
    for name in ("devices", "devices_per_node", "nodes_per_rack"):
        if head.get(name) != getattr(layout, name):
            raise UsageError(
                f"{path} is for {name} = {head.get(name)}, and the scenario has {getattr(layout, name)}"
            )
    faults = [_fault(path, number, line, layout) for number, line in enumerate(lines[1:], 2) if line.strip()]
    return tuple(sorted(faults))


def _parse(path: str | Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path}, line {number}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}, line {number}: an object is expected, not {line[:40]!r}")
    return value


def _fault(path: str | Path, number: int, line: str, layout: Layout) -> Fault:
    value = _parse(path, number, line)
    where = f"{path}, line {number}"
    unknown = sorted(set(value) - {"at_s", "scope", "index", "silent"})
    if unknown:
        raise UsageError(f"{where}: unknown {unknown}; known are at_s, scope, index, silent")
    at_s, index, silent = value.get("at_s"), value.get("index"), value.get("silent", False)
    try:
        scope = Scope(value.get("scope", ""))
    except ValueError:
        raise UsageError(f"{where}: scope must be rank, node or rack, not {value.get('scope')!r}") from None
    if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0 <= at_s < math.inf:
        raise UsageError(f"{where}: at_s must be seconds from 0 on, not {at_s!r}")
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < layout.count(scope):
        raise UsageError(f"{where}: {scope} must be from 0 to {layout.count(scope) - 1}, not {index!r}")
    if not isinstance(silent, bool):
        raise UsageError(f"{where}: silent must be true or false, not {silent!r}")
    return Fault(float(at_s), scope, index, silent)
