"""What two ranks must time for a step, and what a profile makes of it for other groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrec.errors import UsageError
from flashrec.sim import costs
from flashrec.sim.cluster import Cluster, Device, Link
from flashrec.sim.events import Communication, Compute, Event
from flashrec.sim.model import Transformer
from flashrec.sim.profile import MissingEvents, Profile, Sample
from flashrec.sim.profiler import SHORTEST_BYTES, distinct_events, plan, summary
from flashrec.sim.strategy import Compression, Replication, Strategy

MODEL = Transformer(num_layers=4, hidden=64, num_heads=4, sequence=32, vocabulary=128)


def cluster(nodes: int, devices_per_node: int) -> Cluster:
    link = Link(bandwidth_bytes_s=1e9)
    device = Device(name="d", peak_flops={"bf16": 1e12}, memory_bytes=1e12, memory_bandwidth_bytes_s=1e10)
    return Cluster(
        device=device,
        num_nodes=nodes,
        devices_per_node=devices_per_node,
        intra_link=link,
        inter_link=link,
    )


def all_reduce(size: int, participants: int, nodes: int = 1, groups: int = 1) -> Communication:
    return Communication(
        collective="all_reduce",
        size_bytes=size,
        participants=participants,
        nodes=nodes,
        groups=groups,
        device="d",
    )


def ring(size: float, ranks: int) -> float:
    """A millisecond a step, and a microsecond a byte."""
    return 2 * (ranks - 1) * 1e-3 + 2 * (ranks - 1) / ranks * size * 1e-6


def profile_of(*events: Communication) -> Profile:
    return Profile(summary({e: [ring(e.size_bytes, e.participants)] for e in events}))


STRATEGIES = [
    Strategy(data_parallel=4, tensor_parallel=2, recompute="full"),
    Strategy(data_parallel=2, pipeline_parallel=2, tensor_parallel=2, sequence_parallel=True),
    Strategy(data_parallel=8, sharding="zero3"),
    Strategy(data_parallel=8, sharding="zero1", shard_group=4, replication=Replication(regime="sealed")),
    Strategy(pipeline_parallel=4, data_parallel=2, schedule="zb-h1", compression=Compression(ratio=0.5)),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_planned_is_all_that_pricing_asks_for(strategy: Strategy) -> None:
    """On one node: after the planned events were timed nothing is missing, and no single one of the step's own is
    dispensable (but those in between, which follow from two others)."""
    where = cluster(1, 8)
    events = distinct_events(MODEL, where, strategy, 16)
    planned = plan(Profile().missing(events))
    assert not planned.impossible
    timed: dict[Event, Sample] = {
        e: Sample(min_s=1e-3, median_s=1e-3 + i * 1e-6, count=3) for i, e in enumerate(planned.events)
    }
    costs.build(MODEL, where, strategy, 16, Profile(timed))
    for event in planned.events:
        if isinstance(event, Compute):
            rest = Profile({e: s for e, s in timed.items() if e != event})
            with pytest.raises(MissingEvents) as raised:
                costs.build(MODEL, where, strategy, 16, rest)
            assert raised.value.events == (str(event),)
    assert all(e.participants <= 2 for e in planned.events if isinstance(e, Communication))


def test_only_what_is_missing_is_planned() -> None:
    events = distinct_events(MODEL, cluster(1, 8), STRATEGIES[0], 16)
    known = Profile(dict.fromkeys(events[:5], Sample(min_s=1e-3, median_s=1e-3, count=1)))
    assert known.missing(events)
    assert not set(events[:5]) & set(plan(known.missing(events)).events)
    assert plan([]).events == ()


def test_a_pair_stands_for_a_group() -> None:
    asked = all_reduce(1_000_000, 8)
    pair = replace(asked, participants=2)
    assert set(plan([asked]).events) == {pair, replace(pair, size_bytes=SHORTEST_BYTES)}
    found = profile_of(*plan([asked]).events).seconds(asked)  # type: ignore[arg-type]  # both are all-reduces
    assert found == pytest.approx(ring(1_000_000, 8), rel=1e-3)


def test_what_another_number_of_nodes_must_time_is_said() -> None:
    inside, between = all_reduce(4096, 8), all_reduce(4096, 8, nodes=4)
    assert plan([inside, between]).impossible == {between: "it takes two nodes (--master)"}
    assert set(plan([inside], device="cuda").impossible) == {inside}
    assert plan([inside, between], nodes=2).impossible == {inside: "it takes one node (without --master)"}


def test_two_nodes_stand_for_more() -> None:
    """A ring between nodes has the same slowest edge on two nodes as on four."""
    asked = all_reduce(1_000_000, 4, nodes=4)
    profile = profile_of(*plan([asked], nodes=2).events)  # type: ignore[arg-type]  # both are all-reduces
    assert profile.seconds(asked) == pytest.approx(ring(1_000_000, 4), rel=1e-3)
    with pytest.raises(MissingEvents):
        profile.seconds(all_reduce(1_000_000, 4))


def test_groups_share_their_node_s_link() -> None:
    alone = profile_of(all_reduce(64, 2, 2), all_reduce(1_000_000, 2, 2))
    start = ring(64, 2)
    shared = start + 8 * (ring(1_000_000, 2) - start)
    assert alone.seconds(all_reduce(1_000_000, 2, 2, groups=8)) == pytest.approx(shared)
    measured = profile_of(all_reduce(64, 2, 2, 8), all_reduce(1_000_000, 2, 2, 8))
    both = alone.merged(measured)
    assert both.seconds(all_reduce(1_000_000, 2, 2, groups=8)) == pytest.approx(ring(1_000_000, 2))


def test_an_impossible_strategy_is_named() -> None:
    with pytest.raises(UsageError, match="nearest valid data_parallel: 8"):
        distinct_events(MODEL, cluster(1, 8), Strategy(data_parallel=3), 6)
