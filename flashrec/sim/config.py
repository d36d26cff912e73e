"""TOML or JSON -> model, cluster and strategy. Unknown keys fail, with the nearest known one.

global_batch = 512
[model]
num_layers = 30
hidden = 3072
...
[cluster]
device = "A100-80GB"            # a known device, or a table of its figures
num_nodes = 8
devices_per_node = 8
intra_link = { bandwidth_bytes_s = 300e9, latency_s = 5e-6 }
inter_link = { bandwidth_bytes_s = 200e9, latency_s = 1e-5 }
speed_factors = { 17 = 0.8 }
[strategy]
tensor_parallel = 2
schedule = "1f1b"               # or a list of each stage's operations: [["F0", "B0"], ...]
"""

import dataclasses
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flashrec.errors import UsageError
from flashrec.sim.choices import nearest_key, require_count, require_known
from flashrec.sim.cluster import Cluster, Device, Link, known_device
from flashrec.sim.model import Transformer
from flashrec.sim.schedules import from_lists
from flashrec.sim.strategy import Compression, Optimizer, Replication, Strategy

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A simulation's input."""

    model: Transformer
    cluster: Cluster
    strategy: Strategy | None = None
    """None for a search over all strategies."""
    global_batch: int

    def __post_init__(self) -> None:
        require_count(self.global_batch, "global_batch")


FAILURES = "failures"
"""A table that a file may have beside these: see flashrec.sim.inputs."""


def read_table(path: Path) -> dict[str, Any]:
    """A file's tables, TOML or JSON by its name's end. Raises UsageError where it is none."""
    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}
    reader = readers.get(path.suffix)
    if reader is None:
        raise UsageError(f"{path}: the name must end in .toml or .json")
    try:
        found = reader(path.read_text())
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # both parsers' errors are ValueErrors
        raise UsageError(f"{path}: {error}") from error
    return as_table(found, str(path))


def load(path: Path) -> Config:
    """Reads a file, and checks that strategy, model, cluster and batch agree. What it says of failures is left out.

    Raises UsageError for what is wrong in it.
    """
    return from_mapping({key: value for key, value in read_table(path).items() if key != FAILURES}, str(path))


def from_mapping(found: Any, where: str = "config") -> Config:
    """From the parsed file."""
    table = as_table(found, where)
    require_known(table, ("model", "cluster", "strategy", "global_batch"), where)
    for name in ("model", "cluster", "global_batch"):
        if name not in table:
            raise UsageError(f"{where}: missing {name!r}")
    config = Config(
        model=read_model(table["model"]),
        cluster=read_cluster(table["cluster"]),
        strategy=read_strategy(table["strategy"]) if "strategy" in table else None,
        global_batch=table["global_batch"],
    )
    if config.strategy is not None:
        config.strategy.check(config.model, config.cluster, config.global_batch)
    return config


def read_model(found: Any) -> Transformer:
    """A Transformer from its table."""
    return _make(Transformer, found, "model", {})


def read_cluster(found: Any) -> Cluster:
    """A Cluster from its table; the device by name or by a table."""
    return _make(
        Cluster,
        found,
        "cluster",
        {
            "device": _device,
            "intra_link": lambda v: _make(Link, v, "cluster.intra_link", {}),
            "inter_link": lambda v: _make(Link, v, "cluster.inter_link", {}),
            "host_link": lambda v: _make(Link, v, "cluster.host_link", {}),
            "speed_factors": _speed_factors,
        },
    )


def read_strategy(found: Any) -> Strategy:
    """A Strategy from its table; the schedule by name or as lists of operations."""
    return _make(
        Strategy,
        found,
        "strategy",
        {
            "schedule": lambda v: from_lists(v) if isinstance(v, list) else v,
            "stage_layers": lambda v: tuple(v) if isinstance(v, list) else v,
            "optimizer": lambda v: _make(Optimizer, v, "strategy.optimizer", {}),
            "compression": lambda v: _make(Compression, v, "strategy.compression", {}),
            "replication": lambda v: _make(Replication, v, "strategy.replication", {}),
        },
    )


def _device(found: Any) -> Device:
    if isinstance(found, str):
        return known_device(found)
    return _make(Device, found, "cluster.device", {})


def _speed_factors(found: Any) -> dict[int, float]:
    factors = {}
    for key, value in as_table(found, "cluster.speed_factors").items():
        if not str(key).isdigit():
            raise UsageError(f"cluster.speed_factors: {key!r} is not a device's number")
        factors[int(key)] = value
    return factors


def as_table(found: Any, where: str) -> dict[str, Any]:
    """What was read at `where`. Raises UsageError where it is no table."""
    if not isinstance(found, dict):
        raise UsageError(f"{where} is {found!r}; it must be a table of keys and values")
    return found


def _make(kind: type[T], found: Any, where: str, readers: dict[str, Callable[[Any], Any]]) -> T:
    """A dataclass from a table: unknown and missing keys and wrong types fail by name."""
    table = as_table(found, where)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]  # every caller's is a dataclass
    require_known(table, fields, where)
    needed = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and name not in table
    ]
    if needed:
        raise UsageError(f"{where}: missing {', '.join(needed)}")
    values = {name: readers[name](value) if name in readers else value for name, value in table.items()}
    for name, value in values.items():
        _require_type(value, str(fields[name].type), f"{where}.{name}")
    return kind(**values)


def _require_type(value: Any, declared: str, where: str) -> None:
    """Bool and text fields; numbers are checked where the dataclass says their bounds."""
    plain = {"<class 'bool'>": bool, "bool": bool, "<class 'str'>": str, "str": str}.get(declared)
    if plain is not None and not isinstance(value, plain):
        expected = "true or false" if plain is bool else "a text"
        hint = f"; did you mean {nearest_key(value, ('true', 'false'))}?" if isinstance(value, str) else ""
        raise UsageError(f"{where} is {value!r}; it must be {expected}{hint}")
