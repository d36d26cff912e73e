"""Where a step's time goes: parts that add up, and that closed forms and the time-line confirm."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from flashrec.sim.analytic import AnalyticDurations
from flashrec.sim.config import Config
from flashrec.sim.explain import COMMUNICATION, LABELS, Breakdown, compare, in_words
from flashrec.sim.report import Report, simulate
from flashrec.sim.strategy import Strategy
from flashrec.sim.timeline import Timeline
from tests.unit.sim_strategies import MODEL, Ones, config, slow

STRATEGIES = (
    Strategy(pipeline_parallel=4, data_parallel=2, micro_batch=2),
    Strategy(pipeline_parallel=4, data_parallel=2, schedule="zb-h1", sharding="zero1"),
    Strategy(pipeline_parallel=2, data_parallel=2, tensor_parallel=2, recompute="full", sends_block=False),
    Strategy(data_parallel=8, sharding="zero3", recompute="selective", gradient_buckets=2),
    Strategy(pipeline_parallel=2, data_parallel=4, sharding="zero2", schedule="interleaved", chunks=2),
    Strategy(tensor_parallel=4, sequence_parallel=True, data_parallel=2, overlap_gradients=False),
)


def step(strategy: Strategy, durations: object = None, **given: object) -> Report:
    return simulate(config(strategy, **given), durations)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_slow", [False, True])
def test_parts_add_up_to_the_step(strategy: Strategy, is_slow: bool) -> None:
    given = config(strategy)
    if is_slow:
        given = replace(given, cluster=slow(given.cluster, {0: 0.7, 5: 1.2}))
    report = simulate(given)
    parts = report.breakdown.parts_ns
    assert set(parts) == set(LABELS)
    assert report.breakdown.total_ns == sum(parts.values()) == round(report.batch_s * 1e9)
    assert min(parts.values()) >= 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_idle_time_is_what_the_time_line_leaves(strategy: Strategy) -> None:
    """Counted otherwise: the time in which a device does nothing, from all that it does, interval by interval."""
    report = step(strategy)
    idle = nothing_done(report.timeline)
    assert report.breakdown.parts_ns["idle"] / 1e9 == pytest.approx(idle, abs=2e-8, rel=1e-6)


def nothing_done(line: Timeline) -> float:
    """Mean over stages of the step less computing and less waiting for what is on the wire to it or from it."""
    exposed = {kind: float(times.mean()) for kind, times in line.exposed().items()}
    ends = 0.0
    for stage in range(line.schedule.num_stages):
        spans = sorted(
            (a.start, a.end)
            for a in line.activity()
            if a.stage == stage and a.kind in ("forward", "backward", "weight", "optimizer")
        )
        gaps = [begin - end for (_, end), (begin, _) in pairwise(spans)]
        ends += spans[0][0] + sum(gaps) + line.batch_s - spans[-1][1]
    return ends / line.schedule.num_stages - sum(exposed.values())


def test_products_are_counted_and_the_bubble_is_the_closed_form() -> None:
    strategy = Strategy(pipeline_parallel=4, data_parallel=2, micro_batch=2)  # 8 micro-batches
    report = step(strategy, Ones())
    layers, micro_batches = MODEL.num_layers // 4, 8
    products = 6 + 12  # a layer's, forward and backward
    busy_s = layers * micro_batches * products
    parts = report.breakdown.parts_ns
    assert parts["products"] == busy_s * 10**9
    assert parts["idle"] == pytest.approx(busy_s * 3 / 8 * 1e9, abs=1)  # (P - 1) / m of it
    counted = report.breakdown.counts["products"]
    head = 3 / 4 * micro_batches  # products with the vocabulary, on one stage of four
    assert counted.events == busy_s + head
    assert counted.mean_s == pytest.approx(busy_s / (busy_s + head))


def test_an_exchange_is_what_it_adds() -> None:
    """Two all-reduces a layer forward and two backward, nothing beside which they could hide."""
    strategy = Strategy(tensor_parallel=8)
    quiet, loud = (step(strategy, Ones(seconds)).breakdown for seconds in (0.0, 0.25))
    exchanges = loud.counts["tensor"].events
    assert exchanges >= 4 * MODEL.num_layers * 32
    assert loud.parts_ns["tensor"] == exchanges * 250_000_000
    assert quiet.parts_ns["tensor"] == 0
    assert {p: loud.parts_ns[p] for p in ("products", "kernels", "idle")} == {
        p: quiet.parts_ns[p] for p in ("products", "kernels", "idle")
    }


def test_what_is_hidden_is_not_exposed() -> None:
    """ZeRO-3's gathers take part of the step only where computing does not hide them."""
    hidden = Strategy(data_parallel=8, sharding="zero3", gradient_buckets=1)
    bare = replace(hidden, overlap_parameters=False)
    durations = Ones(0.01)
    first, second = (step(s, durations).breakdown for s in (hidden, bare))
    layers, micro_batches = MODEL.num_layers, 4
    assert first.counts["gathers"] == second.counts["gathers"]
    assert second.parts_ns["gathers"] == second.counts["gathers"].events * 10_000_000
    ends = 2 * 2 * micro_batches * 10_000_000  # those of embedding and head, which nothing hides
    assert first.parts_ns["gathers"] <= ends
    assert second.parts_ns["gathers"] - first.parts_ns["gathers"] >= layers * 2 * micro_batches * 10_000_000


def test_recomputation_is_told_apart() -> None:
    plain, full = (step(Strategy(data_parallel=8, recompute=kind)).breakdown for kind in ("none", "full"))
    differences = {row.part: row.difference_ns for row in compare(plain, full)}
    assert differences["products"] == differences["kernels"] == 0
    assert differences["recomputation"] > 0
    assert plain.parts_ns["recomputation"] == 0
    forward = (plain.parts_ns["products"] + plain.parts_ns["kernels"]) / 3
    assert differences["recomputation"] == pytest.approx(forward, rel=0.4)


@pytest.mark.parametrize("first", STRATEGIES)
@pytest.mark.parametrize("second", STRATEGIES)
def test_differences_add_up_exactly(first: Strategy, second: Strategy) -> None:
    a, b = known(first), known(second)
    rows = compare(a, b)
    assert {row.part for row in rows} == set(LABELS)
    assert sum(row.difference_ns for row in rows) == b.total_ns - a.total_ns
    sizes = [abs(row.difference_ns) for row in rows]
    assert sizes == sorted(sizes, reverse=True)


KNOWN: dict[Strategy, Breakdown] = {}


def known(strategy: Strategy) -> Breakdown:
    if strategy not in KNOWN:
        KNOWN[strategy] = step(strategy).breakdown
    return KNOWN[strategy]


def test_words_name_the_greatest_differences() -> None:
    rows = compare(known(STRATEGIES[0]), known(STRATEGIES[3]))
    assert in_words(rows).startswith(LABELS[rows[0].part])
    assert in_words(compare(known(STRATEGIES[0]), known(STRATEGIES[0]))) == "nothing"


def test_exposed_communication_is_of_the_parts() -> None:
    breakdown = known(STRATEGIES[3])
    assert breakdown.exposed_s() == {part: breakdown.parts_ns[part] / 1e9 for part in COMMUNICATION}


def test_an_unknown_class_of_time_would_be_seen() -> None:
    """The full price's operations are those of the time-line: no class of events is left out."""
    for strategy in STRATEGIES:
        given: Config = config(strategy)
        report = simulate(given, AnalyticDurations(given.cluster))
        operations = sum(report.breakdown.parts_ns[p] for p in list(LABELS)[:7])
        assert operations == pytest.approx(report.timeline.busy().mean() * 1e9, abs=10)
