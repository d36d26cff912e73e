"""What `flashrec simulate` and `flashrec plan` read: a configuration, or its tables from files of their own.

Beside the tables of `flashrec.sim.config` a file may have `[failures]`: the keys of `FailureScenario`, of which those
that follow from the step (step_s, state_bytes, data_parallel, layout) need not be given. Nor need the rates of state
that moves, which follow from the cluster's links.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrec.errors import UsageError
from flashrec.sim.cluster import Cluster
from flashrec.sim.config import FAILURES, Config, as_table, from_mapping, read_table
from flashrec.sim.failures import FailureScenario, estimate
from flashrec.sim.failures.documents import scenario_from
from flashrec.sim.strategy import Strategy

TABLES = ("model", "cluster", "strategy", "global_batch", FAILURES)


LINK_SHARE = 0.7
"""Of a link's bandwidth that state gets on its way: docs/measurements.md found 63 to 75 %."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """A configuration, and what its file says of failures."""

    config: Config
    failures: dict[str, Any]

    def scenario(self, strategy: Strategy, step_s: float, state_bytes: float) -> FailureScenario:
        """What befalls a job of that strategy. Raises UsageError for what is wrong in the file's table."""
        cluster = self.config.cluster
        layout = {"devices": cluster.num_devices, "devices_per_node": cluster.devices_per_node}
        network = LINK_SHARE * cluster.inter_link.bandwidth_bytes_s
        host = LINK_SHARE * cluster.host_link.bandwidth_bytes_s
        costs = {
            **dict.fromkeys(("pull_bytes_per_s", "replicate_bytes_per_s"), network),
            **dict.fromkeys(("restore_bytes_per_s", "seal_bytes_per_s"), host),
        }
        document = {
            "step_s": step_s,
            "state_bytes": state_bytes,
            "data_parallel": strategy.data_parallel,
            "replicas": min(1, cluster.num_nodes - 1),
            **self.failures,
            "layout": {**layout, **as_table(self.failures.get("layout", {}), "failures: layout")},
            "costs": {**costs, **as_table(self.failures.get("costs", {}), "failures: costs")},
        }
        return scenario_from(document)

    def goodput(self, strategy: Strategy, step_s: float, state_bytes: float) -> float:
        """flashrec's useful share of time, in closed form."""
        return estimate(self.scenario(strategy, step_s, state_bytes)).flashrec


def scenario_document(scenario: FailureScenario, failures: Mapping[str, Any]) -> dict[str, Any]:
    """As a document for `python -m flashrecd.simulate`; `failures` has the path of a trace, if there is one."""
    document = dataclasses.asdict(scenario)
    document["trace"] = failures.get("trace")
    return document


def config_document(config: Config, strategy: Strategy) -> dict[str, Any]:
    """A configuration with that strategy, as `load_input` reads it from JSON. A schedule must be one with a name."""

    def given(part: Any) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(part).items() if value is not None}

    if not isinstance(strategy.schedule, str):
        raise UsageError(
            f"the schedule {strategy.schedule.name!r} is one of its user's, and has no name to write"
        )
    return {
        "global_batch": config.global_batch,
        "model": given(config.model),
        "cluster": given(config.cluster),
        "strategy": given(strategy),
    }


def load_input(path: Path) -> Input:
    """A configuration's file. Raises UsageError for what is wrong in it."""
    table = read_table(path)
    failures = as_table(table.pop("failures", {}), f"{path}: failures")
    return Input(config=from_mapping(table, str(path)), failures=failures)


def assemble(
    config: Path | None, model: Path | None, cluster: Path | None, global_batch: int | None
) -> Input:
    """A search's input: one configuration, or its parts from files of their own, which come before it.

    A file of a model (or a cluster) holds that table alone, or is a configuration that has it. Raises UsageError for
    what lacks.
    """
    table = read_table(config) if config is not None else {}
    for name, path in (("model", model), ("cluster", cluster)):
        if path is not None:
            found = read_table(path)
            table[name] = found[name] if isinstance(found.get(name), dict) else found
            if name in found and "failures" in found:
                table.setdefault("failures", found["failures"])
    if global_batch is not None:
        table["global_batch"] = global_batch
    options = {"model": "--model", "cluster": "--cluster", "global_batch": "--global-batch"}
    lacking = [option for name, option in options.items() if name not in table]
    if lacking:
        raise UsageError(f"give {', '.join(lacking)}, or a configuration that has it with --config")
    failures = as_table(table.pop("failures", {}), "failures")
    return Input(config=from_mapping(table, str(config or "the search's input")), failures=failures)


def cluster_speeds(cluster: Cluster) -> str:
    """`3 of 64 devices are slower, the slowest at 0.8`; empty where all are equal."""
    factors = [factor for factor in cluster.speed_factors.values() if factor != 1]
    if not factors:
        return ""
    return (
        f"{len(factors)} of {cluster.num_devices:,} devices are not of normal speed: {min(factors):g} to "
        f"{max(factors):g} of it"
    )
