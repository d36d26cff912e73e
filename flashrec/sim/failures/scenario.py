"""What is to be simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from flashrec.errors import UsageError
from flashrec.sim.failures.costs import RecoveryCosts
from flashrec.sim.failures.restarts import daly_interval
from flashrec.sim.failures.traces import DAY_S, FailureRates, Fault, Layout, Scope, draw

SLOW_FACTOR = 200.0  # of suspect_after_s: then the core gives a replacement up (flashrecd.core.detection)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureScenario:
    """A job on a cluster, and what befalls it.

    `step_s`: an undisturbed step. `state_bytes`: unique state of a device (parameters and optimizer). `data_parallel`:
    complete copies of the model, for replica-dropping and the live regime. `is_sealed`: False where the replicate
    axis runs over nodes and nothing is unique (the live regime). `replicas`: K. `seal_every`: versions.
    `spare_nodes`: besides the layout's. `repair_s`: until a lost node is back, as a spare. `trace`: the faults, in
    place of `rates`. `disk_interval_s`: between disk checkpoints; None: the best one, for each policy. `save_s`: how
    long one stops training under checkpoint- restart (flashrec writes from sealed copies, in the background, and it
    takes as long to be complete). `restart_s`: from a failure to the first step of all ranks started anew from disk.
    `has_standbys`: processes that wait."""

    layout: Layout
    step_s: float
    state_bytes: float
    duration_s: float = 90 * DAY_S
    rates: FailureRates = field(default_factory=FailureRates)
    trace: tuple[Fault, ...] | None = None
    seed: int = 0
    costs: RecoveryCosts = field(default_factory=RecoveryCosts)
    is_sealed: bool = True
    data_parallel: int = 8
    replicas: int = 1
    seal_every: int = 1
    spare_nodes: int = 8
    repair_s: float = 4 * 3600.0
    disk_interval_s: float | None = None
    save_s: float = 30.0
    restart_s: float = 300.0
    has_standbys: bool = True

    def __post_init__(self) -> None:
        for name in ("step_s", "duration_s", "save_s", "restart_s", "repair_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise UsageError(f"{name} must be positive and finite, not {getattr(self, name)}")
        if not (math.isfinite(self.state_bytes) and self.state_bytes >= 0):
            raise UsageError(f"state_bytes must be at least 0, not {self.state_bytes}")
        if self.disk_interval_s is not None and not self.disk_interval_s > 0:
            raise UsageError(f"disk_interval_s must be positive, not {self.disk_interval_s}")
        for name, least in (("data_parallel", 1), ("replicas", 0), ("seal_every", 1), ("spare_nodes", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")
        self._check_copies()
        bound = SLOW_FACTOR * self.costs.suspect_after_s
        if self.costs.replacement_s(has_standby=False) >= bound:
            raise UsageError(f"spawn_s + rehearse_s must be under {bound:.0f} s: then the core gives up")
        for fault in self.trace or ():
            if fault.at_s < 0 or not 0 <= fault.index < self.layout.count(fault.scope):
                raise UsageError(f"{fault}: a {fault.scope} is 0 to {self.layout.count(fault.scope) - 1}")

    def _check_copies(self) -> None:
        devices, nodes = self.layout.devices, self.layout.nodes
        if self.replicas > nodes - 1:
            raise UsageError(
                f"{self.replicas} replicas need {self.replicas + 1} nodes: at most {nodes - 1} on {nodes}"
            )
        if devices % self.data_parallel:
            valid = [n for n in range(1, devices + 1) if devices % n == 0]
            below = [n for n in valid if n < self.data_parallel][-1:]
            near = below + [n for n in valid if n > self.data_parallel][:1]
            raise UsageError(f"data_parallel {self.data_parallel} does not divide {devices}: nearest {near}")
        if not self.is_sealed and (self.data_parallel < 2 or nodes % self.data_parallel):
            valid = [n for n in range(2, nodes + 1) if nodes % n == 0][:6]
            raise UsageError(
                f"the live regime needs whole nodes in each of at least two copies: data_parallel one of {valid}, "
                f"not {self.data_parallel}, on {nodes} nodes"
            )

    def faults(self) -> tuple[Fault, ...]:
        """The trace, or one drawn with the seed, up to the end."""
        if self.trace is not None:
            return tuple(sorted(f for f in self.trace if f.at_s < self.duration_s))
        return draw(self.rates, self.layout, self.duration_s, np.random.default_rng(self.seed))

    def mtbf_s(self) -> float:
        """Of the cluster: by its rates, or, if there is a trace, of that (the whole time if nothing fails)."""
        if self.trace is None:
            return self.rates.mtbf_s(self.layout)
        return self.duration_s / max(len(self.faults()), 1)

    def node_bytes(self) -> float:
        return self.state_bytes * self.layout.devices_per_node

    def seal_s(self) -> float:
        return self.state_bytes / self.costs.seal_bytes_per_s if self.is_sealed else 0.0

    def replicate_s(self) -> float:
        """From sealed to kept by all K keepers."""
        if not self.is_sealed:
            return self.costs.report_s if self.replicas else 0.0
        return self.replicas * self.node_bytes() / self.costs.replicate_bytes_per_s

    def effective_step_s(self) -> float:
        """A step under flashrec: its own cost, and the wait for keepers where they need longer than a step."""
        step_s = self.step_s * (1 + self.costs.step_overhead)
        gate_s = self.seal_s() + self.replicate_s()
        every = self.seal_every if self.is_sealed else 1
        return max(step_s, gate_s / (every - self.costs.apply_share))

    def restart_interval_s(self) -> float:
        return self.disk_interval_s or daly_interval(self.save_s, self.mtbf_s())

    def strikes(self, fault: Fault) -> tuple[int, ...]:
        """The nodes that a fault touches."""
        per_rack = self.layout.nodes_per_rack
        if fault.scope is Scope.RANK:
            return (fault.index // self.layout.devices_per_node,)
        if fault.scope is Scope.NODE:
            return (fault.index,)
        return tuple(range(fault.index * per_rack, min((fault.index + 1) * per_rack, self.layout.nodes)))

    def with_replicas(self, replicas: int) -> FailureScenario:
        return replace(self, replicas=replicas)
