"""The best strategies for a model on a cluster: best-first search, pruned by bounds that are never above the truth.

Every valid strategy gets a bound from the time of its layers alone (`bounds.pipeline_bound`), or is out because its
states and activations cannot fit (`bounds.memory_bound`). The one with the lowest bound is priced, which raises its
bound to `bounds.step_bound`; when a priced one is the lowest again, it is checked for memory exactly and simulated. The
search ends when no bound is below the n-th best step simulated: what was never simulated cannot be better (A*, with a
bound as the admissible estimate).

Why a loser loses: its bound, or its step, is taken apart into operations (kernels, recomputation, exchanges inside
layers), waiting in the pipeline, and communication and optimizer around it; the part that exceeds the winner's by most
is the reason.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from flashrec.errors import UsageError
from flashrec.sim.analytic import AnalyticDurations
from flashrec.sim.architecture import Work
from flashrec.sim.bill import Bill, StepBill
from flashrec.sim.bounds import (
    Blocks,
    BlockSizes,
    ModelSizes,
    Passes,
    memory_bound,
    pipeline_bound,
    step_bound,
)
from flashrec.sim.candidates import Space, strategies
from flashrec.sim.choices import require_count
from flashrec.sim.cluster import GIB, Cluster
from flashrec.sim.costs import make_schedule, price
from flashrec.sim.engine import StepCosts, run
from flashrec.sim.events import Durations
from flashrec.sim.explain import Remembered, filters, narrowed
from flashrec.sim.memory import estimate
from flashrec.sim.model import Transformer
from flashrec.sim.outcome import PARTS, REASONS, Loser, Outcome, Parts, Ranked
from flashrec.sim.report import one_line
from flashrec.sim.strategy import Strategy

Progress = Callable[[int, int], None]
"""Called with how many strategies are settled, of how many."""
Goodput = Callable[[Strategy, float, float], float]
"""Share of time that is useful, by strategy, seconds of its step, and bytes of state of one device. Step / goodput must
not fall where the step or the state grows: bounds are taken through it."""


def search(
    model: Transformer,
    cluster: Cluster,
    global_batch: int,
    *,
    num_best: int = 10,
    space: Space | None = None,
    base: Strategy | None = None,
    durations: Durations | None = None,
    goodput: Goodput | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """The `num_best` fastest strategies of `space`, and why the others lose.

    `base`: what the space does not name (dtypes, overlap, optimizer, ...); None: the defaults, with sequence
    parallelism. `durations`: None for the analytic model. With `goodput` the rank is that of step / goodput. Raises
    UsageError where nothing divides, or nothing fits.
    """
    require_count(num_best, "search: num_best")
    require_count(global_batch, "global_batch")
    base = base or Strategy(sequence_parallel=True)
    cluster.device.flops(base.dtype)
    durations = durations or AnalyticDurations(cluster)
    looking = _Search(model, cluster, global_batch, Remembered(durations), num_best, goodput, progress)
    return looking.through(strategies(model, cluster, global_batch, space or Space(), base))


@dataclass(slots=True)
class _Candidate:
    """A strategy on its way: its bound, and the costs once it is priced."""

    strategy: Strategy
    micro_batches: int
    parts: Parts
    bound_s: float
    score_s: float
    """The bound on what it is ranked by."""
    state_bytes: float
    """Least bytes of parameters and optimizer on a device."""
    costs: StepCosts | None = None


class _Bill(StepBill):
    """A bill in which the work of equal layers, which is one object, is counted once."""

    def __init__(self, model: Transformer, cluster: Cluster, strategy: Strategy):
        self.counted: dict[int, tuple[Work, Bill]] = {}  # by identity, which lasts because the work is kept
        super().__init__(model, cluster, strategy)

    def bill(self, work: Work) -> Bill:
        """As StepBill's."""
        if work == Work():
            return Bill((), ())
        found = self.counted.get(id(work))
        if found is None:
            found = self.counted[id(work)] = (work, super().bill(work))
        return found[1]


class _Search:
    def __init__(
        self,
        model: Transformer,
        cluster: Cluster,
        global_batch: int,
        durations: Durations,
        num_best: int,
        goodput: Goodput | None,
        progress: Progress | None,
    ):
        self.model, self.cluster, self.global_batch = model, cluster, global_batch
        self.durations, self.num_best, self.goodput = durations, num_best, goodput
        self.progress = progress or (lambda done, of: None)
        # Where some devices are faster than normal, so may be the bound's; slow ones make steps longer only.
        self.fastest = max([1.0, *cluster.speed_factors.values()])
        self.blocks: dict[tuple[Any, ...], tuple[Blocks, ...]] = {}
        self.sizes: dict[tuple[Any, ...], ModelSizes] = {}
        self.best: list[Ranked] = []
        self.losers: list[Loser] = []
        self.slower: list[tuple[Strategy, float, Parts, bool, float]] = []
        self.considered = self.priced = 0
        self.simulated = 0

    def through(self, found: Iterable[Strategy]) -> Outcome:
        """The search."""
        began = time.perf_counter()
        order = itertools.count()
        heap = [(c.score_s, next(order), c) for c in self.candidates(found)]
        heapq.heapify(heap)
        total = len(heap)
        while heap and (len(self.best) < self.num_best or heap[0][0] < self.best[-1].score_s):
            _, number, candidate = heapq.heappop(heap)
            if candidate.costs is None:
                self.price(candidate)
                heapq.heappush(heap, (candidate.score_s, number, candidate))
            else:
                self.simulate(candidate)
                self.progress(total - len(heap), total)
        if not self.best:
            raise UsageError(self.nothing_fits())
        self.slower += [(c.strategy, c.bound_s, c.parts, False, c.score_s) for _, _, c in heap]
        self.progress(total, total)
        self.losers += [self.why(*one) for one in self.slower]
        return Outcome(
            best=tuple(self.best),
            losers=tuple(self.losers),
            num_considered=self.considered,
            num_priced=self.priced,
            num_simulated=self.simulated,
            took_s=time.perf_counter() - began,
        )

    def candidates(self, found: Iterable[Strategy]) -> Iterable[_Candidate]:
        """Those that may fit, with their first bound; the others are losers at once."""
        capacity, layers = self.cluster.device.memory_bytes, self.model.num_layers
        for strategy in found:
            self.considered += 1
            if self.considered % 1000 == 0:
                self.progress(0, self.considered)
            micro_batches = strategy.num_micro_batches(self.global_batch)
            need = memory_bound(self.model_sizes(strategy), layers, strategy, micro_batches)
            if need.size_bytes > capacity:
                what = "states" if need.state_bytes > need.activation_bytes else "activations"
                self.too_large(strategy, what, need.stage, need.size_bytes, "at least ")
                continue
            times = [
                pipeline_bound(blocks, layers, strategy.pipeline_parallel, strategy.chunks, micro_batches)
                for blocks in self.model_blocks(strategy)
            ]
            kernels, again, whole = (t.operations_s for t in times)
            parts = Parts(
                kernels=kernels,
                recomputation=again - kernels,
                exchanges=whole - again,
                bubble=times[-1].bubble_s,
            )
            bound, state = times[-1].total_s, need.lasting_bytes
            score = self.score(strategy, bound, state)[1]
            yield _Candidate(strategy, micro_batches, parts, bound, score, state)

    def score(self, strategy: Strategy, step_s: float, state_bytes: float) -> tuple[float | None, float]:
        """Goodput, if it was asked, and what the strategy is ranked by."""
        if self.goodput is None:
            return None, step_s
        share = self.goodput(strategy, step_s, state_bytes)
        return share, step_s / share if share > 0 else float("inf")

    def too_large(self, strategy: Strategy, reason: str, stage: int, size: float, least: str = "") -> None:
        """Out, for want of memory, most of which is what `reason` says."""
        capacity = self.cluster.device.memory_bytes
        detail = (
            f"stage {stage} needs {least}{size / GIB:.1f} GiB of {capacity / GIB:.1f}, "
            f"{(size - capacity) / GIB:.3g} too much"
        )
        self.losers.append(Loser(strategy=strategy, reason=reason, detail=detail, over_bytes=size - capacity))

    def price(self, candidate: _Candidate) -> None:
        """The costs of the step, and the bound that follows from them."""
        self.priced += 1
        bill = _Bill(self.model, self.cluster, candidate.strategy)
        candidate.costs = price(bill, self.global_batch, self.durations)
        bound = step_bound(candidate.costs, candidate.micro_batches)
        candidate.bound_s = max(candidate.bound_s, bound)
        candidate.parts = _with_rest(candidate.parts, candidate.bound_s)
        score = self.score(candidate.strategy, candidate.bound_s, candidate.state_bytes)[1]
        candidate.score_s = max(candidate.score_s, score)

    def simulate(self, candidate: _Candidate) -> None:
        """Exactly: memory, then the time-line; among the best, or a loser."""
        strategy, costs = candidate.strategy, candidate.costs
        assert costs is not None
        schedule = make_schedule(strategy, self.global_batch)
        memory = estimate(self.model, self.cluster, strategy, self.global_batch, schedule)
        worst = max(memory, key=lambda stage: stage.total)
        if not worst.fits:
            sizes = {"activations": worst.activations, "buffers": worst.working + worst.buffers}
            sizes["states"] = worst.total - sum(sizes.values())
            self.too_large(strategy, max(sizes, key=lambda name: sizes[name]), worst.stage, worst.total)
            return
        self.simulated += 1
        line = run(schedule, costs)
        state = max(stage.parameters + stage.optimizer for stage in memory)
        share, score = self.score(strategy, line.batch_s, state)
        ranked = Ranked(
            strategy=strategy,
            batch_s=line.batch_s,
            score_s=score,
            goodput=share,
            bubble=line.bubble(),
            memory_bytes=worst.total,
            parts=_with_rest(candidate.parts, line.batch_s),
        )
        self.best.append(ranked)
        self.best.sort(key=lambda one: one.score_s)
        for one in self.best[self.num_best :]:
            self.slower.append((one.strategy, one.batch_s, one.parts, True, one.score_s))
        del self.best[self.num_best :]

    def why(self, strategy: Strategy, seconds: float, parts: Parts, exact: bool, score_s: float) -> Loser:
        """Of one that is slower than the best, or no faster than the n-th."""
        winner = self.best[0]
        excess = {name: getattr(parts, name) - getattr(winner.parts, name) for name in PARTS}
        reason = max(excess, key=lambda name: excess[name])
        least = "" if exact else "at least "
        detail = f"{least}{seconds:.4g} s a step, {_percent(seconds / winner.batch_s - 1)}"
        if excess[reason] > 0:
            detail += f"; {REASONS[reason]} {least}{excess[reason]:+.3g} s"
        if self.goodput and seconds <= winner.batch_s:
            reason = "failures"
            detail = f"{least}{seconds:.4g} s a step, {least}{score_s:.4g} s with failures"
        return Loser(strategy=strategy, reason=reason, detail=detail, seconds=seconds, was_simulated=exact)

    def nothing_fits(self) -> str:
        nearest = min(self.losers, key=lambda loser: loser.over_bytes)
        return (
            f"none of {self.considered:,} strategies fits {self.model.name} into the memory of "
            f"{self.cluster.num_devices} x {self.cluster.device.name}; nearest: {one_line(nearest.strategy)}: "
            f"{nearest.detail}"
        )

    def model_sizes(self, strategy: Strategy) -> ModelSizes:
        """Parameters and activations, by how a micro-batch is divided."""
        key = (strategy.division, strategy.recompute)
        if key not in self.sizes:
            blocks = self.model.blocks(strategy.division)
            found = [
                BlockSizes(
                    block.parameters + block.expert_parameters,
                    block.saved_bytes[strategy.recompute if block.recomputable else "none"],
                )
                for block in (blocks[0], blocks[1], blocks[-1])
            ]
            tied = -(-self.model.tied_parameters // strategy.tensor_parallel)
            self.sizes[key] = ModelSizes(found[0], found[1], found[2], tied)
        return self.sizes[key]

    def model_blocks(self, strategy: Strategy) -> tuple[Blocks, ...]:
        """Seconds of the blocks: kernels alone, with recomputation, with exchanges. By a model of three layers."""
        splits = strategy.schedule == "zb-h1"
        key = (strategy.division, strategy.recompute, splits)
        if key not in self.blocks:
            expert = strategy.expert_parallel
            short = replace(
                strategy,
                data_parallel=expert,
                pipeline_parallel=3,
                schedule="zb-h1" if splits else "1f1b",
                chunks=1,
                sharding="none",
                replication=None,
            )
            bill = _Bill(replace(self.model, num_layers=3), replace(self.cluster, speed_factors={}), short)
            chosen = [filters()[number] for number in (1, 2, 4)]
            batch = expert * strategy.micro_batch
            priced = [price(narrowed(bill, keep), batch, self.durations) for keep in chosen]
            self.blocks[key] = tuple(self._blocks(costs, priced[1]) for costs in priced)
        return self.blocks[key]

    def _blocks(self, costs: StepCosts, compute: StepCosts) -> Blocks:
        """The three stages less the layer that each has; what computes as on the fastest device."""

        def passes(stage: int) -> Passes:
            values = []
            for name in ("forward", "backward", "weight"):
                whole, kernels = (float(getattr(c, name)[stage, 0]) for c in (costs, compute))
                own = min(whole, kernels)
                values.append(own / self.fastest + (whole - own))
            return Passes(*values)

        first, layer, last = (passes(stage) for stage in range(3))
        return Blocks(first.plus(layer, -1), layer, last.plus(layer, -1))


def _with_rest(parts: Parts, seconds: float) -> Parts:
    """What the seconds have beyond layers and bubble counts as communication."""
    known = parts.kernels + parts.recomputation + parts.exchanges + parts.bubble
    return replace(parts, communication=max(0.0, seconds - known))


def _percent(share: float) -> str:
    return "as fast as the best" if abs(share) < 5e-4 else f"{share:+.1%} to the best"
