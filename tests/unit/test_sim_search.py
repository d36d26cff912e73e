"""Searches against exhaustive ones, and bounds against simulated steps and counted memory."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.analytic import AnalyticDurations
from flashrec.sim.bounds import Blocks, Passes, memory_bound, pipeline_bound, step_bound
from flashrec.sim.candidates import Space, divisors, strategies
from flashrec.sim.costs import build, make_schedule
from flashrec.sim.engine import StepCosts, run
from flashrec.sim.explain import Remembered
from flashrec.sim.memory import estimate
from flashrec.sim.outcome import REASONS, Outcome
from flashrec.sim.schedules import Schedule, interleaved, one_f_one_b, zb_h1
from flashrec.sim.search import _Search, search
from flashrec.sim.strategy import Strategy
from tests.unit.sim_cases import cases, make_costs
from tests.unit.sim_strategies import MODEL, slow, small_cluster

BASE = Strategy(sequence_parallel=True)
EXPERTS = replace(MODEL, num_experts=4, experts_per_token=2, num_layers=4, tied_embeddings=False)
TINY = 3 << 30  # of memory, so that some do not fit

SHALLOW = replace(MODEL, num_layers=4)
WORLDS = {
    "plain": (SHALLOW, small_cluster(4), 8),
    "little memory": (MODEL, small_cluster(4, memory_bytes=TINY), 4),
    "experts": (replace(EXPERTS, num_layers=2), small_cluster(4), 4),
    "a slow device": (SHALLOW, slow(small_cluster(4), {3: 0.5}), 4),
    "fast devices": (SHALLOW, slow(small_cluster(4), {0: 1.5, 1: 1.5, 2: 1.4, 3: 1.5}), 4),
}


@lru_cache
def everything(world: str) -> dict[Strategy, float | None]:
    """Every strategy's step, simulated; None where it does not fit."""
    model, cluster, batch = WORLDS[world]
    found: dict[Strategy, float | None] = {}
    durations = Remembered(AnalyticDurations(cluster))
    for strategy in strategies(model, cluster, batch, Space(), BASE):
        schedule = make_schedule(strategy, batch)
        fits = all(stage.fits for stage in estimate(model, cluster, strategy, batch, schedule))
        line = run(schedule, build(model, cluster, strategy, batch, durations))
        found[strategy] = line.batch_s if fits else None
    return found


@lru_cache
def found_in(world: str, num_best: int = 5) -> Outcome:
    model, cluster, batch = WORLDS[world]
    return search(model, cluster, batch, num_best=num_best, base=BASE)


@given(cases())
@settings(max_examples=300, deadline=None)
def test_no_step_is_shorter_than_its_bound(case: tuple[Schedule, StepCosts]) -> None:
    schedule, costs = case
    assert step_bound(costs, schedule.num_micro_batches) <= run(schedule, costs).batch_s


@given(st.integers(1, 6), st.integers(1, 8), st.booleans())
def test_equal_stages_of_1f1b_meet_their_bound(stages: int, micro_batches: int, block: bool) -> None:
    schedule = one_f_one_b(stages, micro_batches)
    sends = {"send_forward": 2.0, "send_backward": 3.0} if stages > 1 and not block else {}
    costs = make_costs(
        schedule,
        forward=5.0,
        backward=9.0,
        grad_sync=4.0,
        optimizer=2.0,
        finish=1.0,
        sends_block=block,
        **sends,
    )
    step_s = run(schedule, costs).batch_s
    if not sends:
        assert step_bound(costs, micro_batches) == pytest.approx(step_s)
    assert step_bound(costs, micro_batches) <= step_s


@given(
    st.sampled_from([("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 3)]),
    st.integers(2, 5),
    st.integers(1, 3),
    st.lists(st.integers(0, 9), min_size=9, max_size=9),
)
@settings(max_examples=150, deadline=None)
def test_no_pipeline_is_faster_than_its_layers_allow(
    kind: tuple[str, int], stages: int, groups: int, times: list[int]
) -> None:
    name, chunks = kind
    micro_batches, layers = groups * stages, 2 * stages * chunks
    makers = {"zb-h1": zb_h1, "1f1b": one_f_one_b}
    schedule = (
        interleaved(stages, micro_batches, chunks)
        if name == "interleaved"
        else makers.get(name, one_f_one_b)(stages, micro_batches)
    )
    split = schedule.splits_backward
    first, layer, last = (
        Passes(f, b + w * (not split), w * split) for f, b, w in zip(*[iter(times)] * 3, strict=True)
    )
    tables: dict[str, list[list[float]]] = {"forward": [], "backward": [], "weight": []}
    for part in range(schedule.num_virtual_stages):
        own = Passes(0, 0, 0).plus(layer, 2)
        own = own.plus(first, int(part == 0)).plus(last, int(part == schedule.num_virtual_stages - 1))
        for key, table in tables.items():
            table.append([float(getattr(own, key))])
    costs = make_costs(schedule, **tables)
    bound = pipeline_bound(Blocks(first, layer, last), layers, stages, chunks, micro_batches)
    step_s = run(schedule, costs).batch_s
    assert bound.total_s <= step_s
    assert bound.total_s <= step_bound(costs, micro_batches) * (1 + 1e-9)
    assert bound.operations_s <= run(schedule, costs).busy().max()


@pytest.mark.parametrize("world", WORLDS)
def test_a_search_finds_what_trying_everything_finds(world: str) -> None:
    times = everything(world)
    outcome = found_in(world)
    best = sorted(step_s for step_s in times.values() if step_s is not None)[:5]
    assert [one.batch_s for one in outcome.best] == pytest.approx(best, rel=1e-12)
    for one in outcome.best:
        assert times[one.strategy] == pytest.approx(one.batch_s, rel=1e-12)
    assert outcome.num_simulated < len(times) / 4  # it did prune
    assert outcome.num_considered == len(times) == len(outcome.best) + len(outcome.losers)


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_said_of_losers_is_true(world: str) -> None:
    times = everything(world)
    outcome = found_in(world)
    worst = outcome.best[-1].batch_s
    for loser in outcome.losers:
        step_s = times[loser.strategy]
        if loser.seconds is None:
            assert loser.reason in ("states", "activations", "buffers")
            assert step_s is None, loser
            assert loser.over_bytes > 0
        elif loser.was_simulated:
            assert loser.seconds == pytest.approx(step_s)
        elif step_s is not None:
            assert loser.seconds <= step_s * (1 + 1e-12)
            assert step_s >= worst * (1 - 1e-12)
    assert {loser.reason for loser in outcome.losers} <= set(REASONS)


def test_memory_is_never_overrated() -> None:
    """The bound against the exact count, and exactly the activations where a stage has one chunk."""
    model, cluster, batch = WORLDS["plain"]
    looking = _Search(model, cluster, batch, Remembered(AnalyticDurations(cluster)), 1, None, None)
    for strategy in strategies(model, cluster, batch, Space(), BASE):
        micro_batches = strategy.num_micro_batches(batch)
        need = memory_bound(looking.model_sizes(strategy), model.num_layers, strategy, micro_batches)
        counted = estimate(model, cluster, strategy, batch)
        assert need.size_bytes <= counted[need.stage].total
        if strategy.chunks == 1:
            assert need.activation_bytes == counted[need.stage].activations, strategy


def test_each_reason_names_what_costs_most() -> None:
    """A slow network: strategies that differ from the best in one thing lose for that thing."""
    outcome = found_in("plain", num_best=1)
    best = outcome.best[0]
    for loser in outcome.losers:
        if loser.reason == "recomputation":
            assert loser.strategy.recompute != "none"
        if loser.reason == "bubble":
            assert loser.strategy.pipeline_parallel > 1
        if loser.reason == "exchanges":
            assert loser.strategy.tensor_parallel > 1
    twin = replace(best.strategy, recompute="full")
    assert next(loser.reason for loser in outcome.losers if loser.strategy == twin) == "recomputation"


def test_goodput_ranks_otherwise() -> None:
    model, cluster, batch = WORLDS["plain"]
    plain = found_in("plain").best[0].strategy

    def goodput(strategy: Strategy, step_s: float, state_bytes: float) -> float:
        assert step_s > 0
        assert state_bytes > 0
        return 0.1 if strategy.tensor_parallel == plain.tensor_parallel else 1.0

    outcome = search(model, cluster, batch, num_best=3, base=BASE, goodput=goodput)
    times = everything("plain")
    scores = sorted(s / goodput(strategy, s, 1.0) for strategy, s in times.items() if s is not None)
    assert [one.score_s for one in outcome.best] == pytest.approx(scores[:3])
    assert outcome.best[0].strategy != plain


def test_a_space_narrows_the_search() -> None:
    model, cluster, batch = WORLDS["plain"]
    space = Space(schedules=("1f1b",), recompute=("full",), sharding=("none",), max_micro_batch=2)
    for strategy in strategies(model, cluster, batch, space, BASE):
        assert (strategy.schedule, strategy.recompute, strategy.sharding) == ("1f1b", "full", "none")
        assert strategy.micro_batch <= 2
        strategy.check(model, cluster, batch)


def test_all_strategies_are_valid_and_distinct() -> None:
    for model, cluster, batch in WORLDS.values():
        found = list(strategies(model, cluster, batch, Space(), BASE))
        assert len(set(found)) == len(found)
        for strategy in found:
            strategy.check(model, cluster, batch)


def test_progress_is_told_to_the_end() -> None:
    model, cluster, batch = WORLDS["plain"]
    told: list[tuple[int, int]] = []
    search(model, cluster, batch, progress=lambda done, of: told.append((done, of)))
    assert told[-1][0] == told[-1][1] > 0
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_bad_searches_are_refused() -> None:
    model, cluster, _ = WORLDS["plain"]
    with pytest.raises(UsageError, match=r"no strategy divides .* nearest valid global_batch"):
        search(replace(model, num_layers=7, num_heads=1, hidden=1023, ffn_hidden=99), cluster, 7)
    with pytest.raises(UsageError, match=r"none of .* fits small .* nearest: .*too much"):
        search(model, small_cluster(8, memory_bytes=1.01 * (1 << 30)), 16)
    with pytest.raises(UsageError, match="nearest: '1f1b'"):
        Space(schedules=("1f1",))
    with pytest.raises(UsageError, match="num_best"):
        search(model, cluster, 16, num_best=0)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(12, 4) == [1, 2, 3, 4]
    assert divisors(1) == [1]
