"""What a simulated step's report says, by formulas worked out here."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from flashrec.errors import UsageError
from flashrec.sim import report as module
from flashrec.sim.profile import MissingEvents, Profile, ProfileOr
from flashrec.sim.report import DoesNotFit, one_line, simulate, spans
from flashrec.sim.strategy import Strategy
from tests.unit.sim_strategies import MODEL, Ones, config


def test_rates_follow_from_the_batch_time() -> None:
    given = config(Strategy(pipeline_parallel=2, data_parallel=4), batch=32)
    report = simulate(given)
    assert report.tokens_per_s == pytest.approx(32 * 512 / report.batch_s)
    h, s, v, layers = 1024, 512, MODEL.vocabulary, 8
    # arXiv 2104.04473: a layer 24 B s h^2 + 4 B s^2 h forward, logits 2 B s h V; the backward twice that.
    flops = 3 * 32 * (layers * (24 * s * h * h + 4 * s * s * h) + 2 * s * h * v)
    assert report.mfu == pytest.approx(flops / (report.batch_s * 8 * 312e12))


def test_a_step_of_ones_takes_what_the_closed_form_says() -> None:
    report = simulate(config(Strategy(pipeline_parallel=4, data_parallel=2, micro_batch=2)), Ones())
    assert report.batch_s == 2 * 18 * (8 + 3)  # two layers a stage of 6 + 12 products; (m + P - 1) of them
    assert report.timeline.bubble() == pytest.approx(3 / 11)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_the_critical_path_adds_up(schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    strategy = Strategy(
        pipeline_parallel=4,
        data_parallel=2,
        micro_batch=2,
        schedule=schedule,
        chunks=chunks,
        sharding="zero1",
    )
    report = simulate(config(strategy))
    shares = report.critical_path
    assert math.fsum(share.seconds for share in shares) == pytest.approx(report.batch_s, rel=1e-12)
    assert [s.seconds for s in shares] == sorted((s.seconds for s in shares), reverse=True)
    for share in shares:
        assert share.count >= 1
        assert set(share.stages) <= set(range(4))


def test_what_does_not_fit_is_said_before_anything_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr(module, "run", never)
    monkeypatch.setattr(module, "build", never)
    with pytest.raises(DoesNotFit, match=r"(?s)TP1 PP4 DP2, 1f1b.*does not fit.*stage 0: .* GiB of 1\.9"):
        simulate(
            config(
                batch=4096,
                memory_bytes=2e9,
                strategy=Strategy(pipeline_parallel=4, data_parallel=2, micro_batch=8),
            )
        )


def test_what_lacks_is_said() -> None:
    with pytest.raises(UsageError, match=r"no \[strategy\]"):
        simulate(replace(config(), strategy=None))
    with pytest.raises(MissingEvents, match="flashrec profile"):
        simulate(config(), Profile())


def test_the_document_is_json_with_units() -> None:
    report = simulate(config(Strategy(pipeline_parallel=4, data_parallel=2)))
    document = json.loads(json.dumps(report.to_json()))
    assert document["batch_s"] == report.batch_s
    assert sum(document["breakdown_ns"].values()) == round(report.batch_s * 1e9)
    assert [stage["stage"] for stage in document["memory"]] == [0, 1, 2, 3]
    for stage in document["memory"]:
        parts = ("parameters", "gradients", "optimizer", "activations", "working", "buffers")
        assert sum(stage[part] for part in parts) == stage["total_bytes"]
    assert document["strategy"]["pipeline_parallel"] == 4
    assert document["calibrated"] is True


def test_other_devices_are_not_calibrated() -> None:
    given = config()
    device = replace(given.cluster.device, name="another")
    assert not simulate(replace(given, cluster=replace(given.cluster, device=device))).calibrated
    assert simulate(replace(given, cluster=replace(given.cluster, device=device)), Ones()).calibrated
    filled = ProfileOr(Profile({}), Ones())
    assert not simulate(replace(given, cluster=replace(given.cluster, device=device)), filled).calibrated


def test_strategies_in_one_line() -> None:
    assert one_line(Strategy(data_parallel=8)) == "TP1 PP1 DP8, micro-batch 1"
    long = Strategy(
        tensor_parallel=2,
        pipeline_parallel=4,
        data_parallel=4,
        expert_parallel=2,
        schedule="interleaved",
        chunks=3,
        recompute="full",
        sharding="zero1",
    )
    assert one_line(long) == "TP2 PP4 DP4 EP2, interleaved x3, micro-batch 1, recompute full, zero1"


def test_spans() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert spans([]) == ""
