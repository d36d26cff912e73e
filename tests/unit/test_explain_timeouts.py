"""What `flashrec status --explain-timeouts` says is what the detector does."""

from __future__ import annotations

import pytest

from flashrecd.core.detection import HEARTBEATS, Detector, explain
from flashrecd.core.state import JobConfig


@pytest.mark.parametrize("suspect_after_s", [0.5, 3.0, 20.0])
def test_a_silent_rank_is_suspected_after_what_is_said(suspect_after_s: float) -> None:
    said = {timeout.name: timeout.seconds for timeout in explain(suspect_after_s)}
    assert said["suspect after"] == suspect_after_s
    assert said["heartbeat"] * HEARTBEATS == pytest.approx(said["silence"])
    detector, now = Detector(suspect_after_s), 0.0
    detector.heard("p1", now)
    step = said["late watcher"] / 10
    while now + step < said["silence"]:
        now += step
        assert detector.suspects({"p1": False}, now) == []
    suspects = detector.suspects({"p1": False}, said["silence"] * 1.01)
    assert [proc for proc, _ in suspects] == ["p1"]


def test_a_rank_that_stands_still_is_suspected_after_what_is_said() -> None:
    said = {timeout.name: timeout.seconds for timeout in explain(2.0)}
    detector, now = Detector(2.0), 0.0
    for proc, progress in (("p1", 5), ("p2", 6)):
        detector.heard(proc, now)
        detector.progressed(proc, 0, progress, now)
    found: list[tuple[str, str]] = []
    while not found and now < 60:
        now += 0.25
        for proc in ("p1", "p2"):
            detector.heard(proc, now)
        found = detector.suspects({"p1": False, "p2": False}, now)
    assert [proc for proc, _ in found] == ["p1"]
    assert now == pytest.approx(said["no progress"], abs=0.3)


def test_the_default_is_the_command_lines() -> None:
    from flashrec.cli.run import run

    (option,) = [option for option in run.params if option.name == "suspect_after"]
    assert option.default == JobConfig(world_size=1).suspect_after_s


def test_each_says_where_it_comes_from() -> None:
    assert all(timeout.why and timeout.seconds > 0 for timeout in explain(3.0))
    assert sum("the one knob" in timeout.why for timeout in explain(3.0)) == 1
