"""Traces: their rates, their reproducibility, their files."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.failures import FailureRates, FailureScenario, Fault, Layout, RecoveryCosts, Scope
from flashrec.sim.failures.traces import DAY_S, draw, read_trace, write_trace

LLAMA = Layout(16_384)


def test_llama3_has_one_interruption_in_three_hours() -> None:
    hours = FailureRates().mtbf_s(LLAMA) / 3600
    assert hours == pytest.approx(54 * 24 / 419)
    faults = draw(FailureRates(), LLAMA, 540 * DAY_S, np.random.default_rng(1))
    assert len(faults) == pytest.approx(4190, abs=4 * math.sqrt(4190))


def test_a_seed_gives_one_trace() -> None:
    one, same, other = (draw(FailureRates(), LLAMA, 90 * DAY_S, np.random.default_rng(s)) for s in (3, 3, 4))
    assert one == same != other
    assert list(one) == sorted(one)


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.5])
def test_every_shape_keeps_the_rate_from_the_first_second_on(shape: float) -> None:
    """Stationary: as many in the first tenth of the time as in the last, though components fail several times."""
    layout = Layout(800, 8, 10)
    rates = FailureRates(device_mtbf_hours=20, node_share=0.3, shape=shape)
    duration_s = 100 * 3600.0
    faults = draw(rates, layout, duration_s, np.random.default_rng(7))
    expected = duration_s / rates.mtbf_s(layout)
    # The variance of a renewal count is at most about (cv squared) times that of a Poisson count.
    cv2 = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1
    assert len(faults) == pytest.approx(expected, abs=4 * math.sqrt(expected * max(cv2, 1)))
    tenths = Counter(int(10 * fault.at_s / duration_s) for fault in faults)
    for tenth in range(10):
        assert tenths[tenth] == pytest.approx(expected / 10, abs=5 * math.sqrt(expected / 10 * max(cv2, 1)))


def test_a_small_shape_bunches_and_a_large_one_spaces() -> None:
    def variation(shape: float) -> float:
        rates = FailureRates(device_mtbf_hours=10, node_share=0.0, shape=shape)
        faults = draw(rates, Layout(8), 20_000 * 3600.0, np.random.default_rng(5))
        gaps = np.concatenate([np.diff([f.at_s for f in faults if f.index == i]) for i in range(8)])
        return float(gaps.std() / gaps.mean())

    assert variation(1.0) == pytest.approx(1.0, abs=0.05)
    for shape in (0.7, 2.0):
        exact = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
        assert variation(shape) == pytest.approx(exact, abs=0.06)


def test_shares_are_kept_and_racks_come_on_top() -> None:
    rates = FailureRates(node_share=0.25, rack_mtbf_hours=1000.0, silent_share=0.5)
    faults = draw(rates, LLAMA, 1000 * DAY_S, np.random.default_rng(2))
    count = Counter(fault.scope for fault in faults)
    both = count[Scope.RANK] + count[Scope.NODE]
    assert count[Scope.NODE] / both == pytest.approx(0.25, abs=0.02)
    assert count[Scope.RACK] == pytest.approx(24_000 / 1000 * LLAMA.racks, rel=0.1)
    assert not any(fault.is_silent for fault in faults if fault.scope is Scope.RANK)
    silent = [fault.is_silent for fault in faults if fault.scope is not Scope.RANK]
    assert sum(silent) / len(silent) == pytest.approx(0.5, abs=0.03)


@given(
    st.lists(
        st.builds(Fault, st.floats(0, 1e7), st.sampled_from(Scope), st.integers(0, 1), st.booleans()),
        max_size=20,
    )
)
def test_a_file_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, faults: list[Fault]
) -> None:
    path, layout = tmp_path_factory.mktemp("trace") / "trace.jsonl", Layout(32, 8, 2)
    write_trace(path, faults, layout)
    assert read_trace(path, layout) == tuple(sorted(faults))


HEAD = '{"format": "flashrec failure trace 1", "devices": 32, "devices_per_node": 8, "nodes_per_rack": 2}\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1"),
        ('{"format": "other"}', "line 1: a failure trace begins with"),
        (HEAD.replace("32", "64"), "is for devices = 64, and the scenario has 32"),
        (HEAD + "nonsense", "line 2: not JSON"),
        (HEAD + "[1]", "line 2: an object is expected"),
        (HEAD + '{"at_s": 1, "scope": "moon", "index": 0}', "rank, node or rack, not 'moon'"),
        (HEAD + '{"at_s": -1, "scope": "rank", "index": 0}', "at_s must be seconds from 0 on, not -1"),
        (HEAD + '\n{"at_s": 1, "scope": "node", "index": 4}', "line 3: node must be from 0 to 3, not 4"),
        (HEAD + '{"at_s": 1, "scope": "node", "index": 1, "when": 2}', "unknown .'when'.; known are at_s"),
        (HEAD + '{"at_s": 1, "scope": "node", "index": 1, "silent": 1}', "silent must be true or false"),
    ],
)
def test_a_wrong_file_is_refused_by_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_trace(path, Layout(32, 8, 2))


def scenario(**facts: Any) -> FailureScenario:
    return FailureScenario(**{"layout": Layout(32), "step_s": 1.0, "state_bytes": 1e6, **facts})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Layout(33), "nearest are 32 or 40"),
        (lambda: Layout(0), "devices must be a whole number of at least 1, not 0"),
        (lambda: FailureRates(shape=0.0), "shape must be from 0.1 to 10"),
        (lambda: FailureRates(node_share=1.5), "node_share must be from 0 to 1, not 1.5"),
        (lambda: FailureRates(device_mtbf_hours=-1), "device_mtbf_hours must be positive"),
        (lambda: FailureRates(rack_mtbf_hours=0), "rack_mtbf_hours must be positive, or None"),
        (lambda: RecoveryCosts(pull_bytes_per_s=0), "pull_bytes_per_s must be finite and positive, not 0"),
        (lambda: RecoveryCosts(form_s=-1), "form_s must be finite and at least 0, not -1"),
        (lambda: RecoveryCosts(apply_share=1.0), "apply_share must be below 1"),
        (lambda: scenario(step_s=0), "step_s must be positive"),
        (lambda: scenario(replicas=4), "4 replicas need 5 nodes: at most 3 on 4"),
        (lambda: scenario(replicas=-1), "replicas must be at least 0"),
        (lambda: scenario(data_parallel=5), r"data_parallel 5 does not divide 32: nearest \[4, 8\]"),
        (lambda: scenario(is_sealed=False, data_parallel=1), r"one of \[2, 4\], not 1, on 4 nodes"),
        (lambda: scenario(costs=RecoveryCosts(rehearse_s=600)), "under 600 s: then the core gives up"),
        (lambda: scenario(trace=(Fault(1.0, Scope.NODE, 4),)), "a node is 0 to 3"),
        (lambda: scenario(disk_interval_s=0.0), "disk_interval_s must be positive"),
        (lambda: draw(FailureRates(), Layout(8), math.inf, np.random.default_rng(0)), "duration_s must be"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        wrong()
