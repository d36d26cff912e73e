"""Descriptions of machines: what is refused, and what the figures mean."""

import pytest

from flashrec.errors import UsageError
from flashrec.sim.cluster import DEVICES, Cluster, Device, Link, a100_cluster, known_device


def test_unknown_device_names_the_nearest() -> None:
    assert known_device("A100-80GB") is DEVICES["A100-80GB"]
    with pytest.raises(UsageError, match=r"'A100-80'; nearest: 'A100-80GB'"):
        known_device("A100-80")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_nodes": 0}, "num_nodes is 0"),
        ({"devices_per_node": True}, "devices_per_node is True"),
        ({"oversubscription": 0.5}, "oversubscription is 0.5"),
        ({"speed_factors": {16: 0.5}}, r"device 16, but there are 16; nearest valid: 15"),
        ({"speed_factors": {3: 0.0}}, r"speed_factors\[3\] is 0.0"),
    ],
)
def test_impossible_clusters_are_refused(changes: dict[str, object], says: str) -> None:
    link = Link(bandwidth_bytes_s=1e9)
    given: dict[str, object] = {
        "device": DEVICES["A100-80GB"],
        "num_nodes": 2,
        "devices_per_node": 8,
        "intra_link": link,
        "inter_link": link,
    }
    with pytest.raises(UsageError, match=says):
        Cluster(**{**given, **changes})  # type: ignore[arg-type]


def test_links_and_devices_are_checked() -> None:
    with pytest.raises(UsageError, match=r"bandwidth_bytes_s is 0"):
        Link(bandwidth_bytes_s=0)
    with pytest.raises(UsageError, match=r"latency_s is nan"):
        Link(bandwidth_bytes_s=1, latency_s=float("nan"))
    with pytest.raises(UsageError, match=r"'fp17'.*nearest: 'fp16'"):
        Device(name="x", peak_flops={"fp17": 1e12}, memory_bytes=1, memory_bandwidth_bytes_s=1)
    with pytest.raises(UsageError, match=r"no peak_flops for fp8; known: bf16, fp16, fp32"):
        DEVICES["A100-80GB"].flops("fp8")


def test_speed_is_normal_unless_given() -> None:
    cluster = a100_cluster(2)
    assert cluster.num_devices == 16
    assert cluster.speed(3) == 1.0
