"""What the parts of a recovery cost, in seconds and bytes per second."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from flashrec.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryCosts:
    """Defaults are what docs/measurements.md found on one machine of two cores with gloo ("Recovery", the quiet
    table, and "The loss of a node"); they are to be replaced by what is measured on the cluster in question.

    `detect_rank_s`: from a rank's death to the core's knowing (19 ms; built standby). `detect_node_s`: from a node's
    death to a survivor's failed collective (0.1 to 0.2 s in eight of ten losses). `suspect_after_s`: the job's one
    knob. `report_s`: a message one way, with the parking that it reports (26 - 19 ms). `leader_message_s`: the
    leader's work for one rank's message (benchmarks.failures measures it). `export_s`: from the plan until survivors
    serve (33 ms, 32 MB). `spawn_s`: a process where no standby waited (292 - 224 ms). `rehearse_s`: building and
    rehearsing of a forked standby (224 - 49 ms); 0 for a built one. `form_s`, and `form_doubling_s` for each doubling
    of the ranks: making the groups anew (4 ms for two; how it grows with ranks is not measured, so the second is an
    assumption). `pull_bytes_per_s`: into a node (32 MB in 30 ms). `restore_bytes_per_s`: a rank's own sealed copy
    (1.34 GB/s). `seal_bytes_per_s`: 4.8 GB/s. `replicate_bytes_per_s`: out of a node to its keepers (an assumption:
    as a pull). `step_overhead`: share of a step (0.4 %). `apply_share`: of a step, after the gate (an assumption).
    `kill_s`: from a signal to the exit."""

    detect_rank_s: float = 0.019
    detect_node_s: float = 0.15
    suspect_after_s: float = 3.0
    report_s: float = 0.007
    leader_message_s: float = 50e-6
    export_s: float = 0.033
    spawn_s: float = 0.068
    rehearse_s: float = 0.175
    form_s: float = 0.004
    form_doubling_s: float = 0.001
    pull_bytes_per_s: float = 1.07e9
    restore_bytes_per_s: float = 1.34e9
    seal_bytes_per_s: float = 4.8e9
    replicate_bytes_per_s: float = 1.07e9
    step_overhead: float = 0.004
    apply_share: float = 0.05
    kill_s: float = 0.02

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_rate = field.name.endswith("_per_s") or field.name == "suspect_after_s"
            if not math.isfinite(value) or value < 0 or (is_rate and value == 0):
                raise UsageError(
                    f"{field.name} must be finite and {'positive' if is_rate else 'at least 0'}, not {value}"
                )
        if not self.apply_share < 1:
            raise UsageError(f"apply_share must be below 1, not {self.apply_share}")

    def replacement_s(self, *, has_standby: bool = True) -> float:
        """Until a replacement can pull."""
        return self.rehearse_s + (0.0 if has_standby else self.spawn_s)

    def forming_s(self, devices: int) -> float:
        return self.form_s + self.form_doubling_s * max(math.log2(devices), 0.0)
