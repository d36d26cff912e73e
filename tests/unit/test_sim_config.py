"""Files -> descriptions: what is read, and that every mistake is named."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from flashrec.errors import UsageError
from flashrec.sim.config import from_mapping, load

TOML = """
global_batch = 512
[model]
num_layers = 30
hidden = 3072
num_heads = 32
sequence = 2048
vocabulary = 51200
[cluster]
device = "A100-80GB"
num_nodes = 8
devices_per_node = 8
oversubscription = 2
intra_link = { bandwidth_bytes_s = 300e9, latency_s = 5e-6 }
inter_link = { bandwidth_bytes_s = 200e9 }
speed_factors = { 17 = 0.8 }
[strategy]
data_parallel = 16
tensor_parallel = 2
pipeline_parallel = 2
schedule = "interleaved"
chunks = 3
sharding = "zero1"
[strategy.compression]
ratio = 0.25
[strategy.replication]
regime = "sealed"
copies = 2
"""
GIVEN: dict[str, Any] = {
    "global_batch": 8,
    "model": {"num_layers": 4, "hidden": 64, "num_heads": 4, "sequence": 16, "vocabulary": 100},
    "cluster": {
        "device": {
            "name": "toy",
            "peak_flops": {"bf16": 1e12},
            "memory_bytes": 1e9,
            "memory_bandwidth_bytes_s": 1e11,
        },
        "num_nodes": 1,
        "devices_per_node": 2,
        "intra_link": {"bandwidth_bytes_s": 1e9},
        "inter_link": {"bandwidth_bytes_s": 1e9},
    },
    "strategy": {
        "pipeline_parallel": 2,
        "schedule": [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]],
        "micro_batch": 4,
        "stage_layers": [1, 3],
    },
}


def test_toml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(TOML)
    config = load(path)
    assert config.cluster.speed(17) == 0.8
    assert config.cluster.oversubscription == 2
    assert config.strategy is not None
    assert config.strategy.layers(30) == (5,) * 6
    assert config.strategy.replication is not None
    assert config.strategy.replication.copies == 2


def test_json_is_read_with_a_users_schedule_and_uneven_stages(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(GIVEN))
    config = load(path)
    assert config.strategy is not None
    assert config.strategy.layers(4) == (1, 3)
    assert config.cluster.device.flops("bf16") == 1e12


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (("modle",), {}, r"unknown key 'modle'; did you mean 'model'"),
        (("model", "num_layer"), 3, r"model: unknown key 'num_layer'; did you mean 'num_layers'"),
        (("cluster", "device", "peak_flop"), 3, r"cluster.device: .*'peak_flops'"),
        (("cluster", "intra_link", "bandwith_bytes_s"), 3, r"cluster.intra_link: .*'bandwidth_bytes_s'"),
        (("strategy", "tensor_paralel"), 3, r"strategy: .*'tensor_parallel'"),
        (("strategy", "optimizer"), {"state_byte": 1}, r"strategy.optimizer: .*'state_bytes'"),
        (
            ("strategy", "sequence_parallel"),
            "yes",
            r"strategy.sequence_parallel is 'yes'; it must be true or false",
        ),
        (("cluster", "device"), "H100", r"unknown device 'H100'; nearest: 'H100-80GB'"),
        (("cluster", "speed_factors"), {"a": 1}, "'a' is not a device's number"),
        (("model",), 3, "model is 3; it must be a table"),
        (("global_batch",), 0, "global_batch is 0"),
        (("strategy", "schedule"), [["F0", "B0"], ["F0"]], "B0"),
    ],
)
def test_mistakes_are_named(where: tuple[str, ...], value: object, says: str) -> None:
    given = copy.deepcopy(GIVEN)
    table = given
    for key in where[:-1]:
        table = table[key]
    table[where[-1]] = value
    with pytest.raises(UsageError, match=says):
        from_mapping(given)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    given = copy.deepcopy(GIVEN)
    del given["model"]["hidden"], given["model"]["sequence"]
    with pytest.raises(UsageError, match=r"model: missing hidden, sequence"):
        from_mapping(given)
    del given["model"]
    with pytest.raises(UsageError, match=r"missing 'model'"):
        from_mapping(given)
    (tmp_path / "x.toml").write_text("a = = 3")
    with pytest.raises(UsageError, match=r"x\.toml: "):
        load(tmp_path / "x.toml")
    with pytest.raises(UsageError, match=r"does not exist"):
        load(tmp_path / "y.toml")
    with pytest.raises(UsageError, match=r"must end in"):
        load(tmp_path / "y.yaml")
