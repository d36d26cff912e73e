"""The picture: well-formed, everything in it once and where it belongs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.sim.engine import StepCosts, run
from flashrec.sim.picture import EVERY, LEFT, NAMES, RIGHT, colour, nice_step, seconds_text, svg
from flashrec.sim.schedules import Schedule, interleaved, one_f_one_b, zb_h1
from flashrec.sim.timeline import Timeline
from tests.unit.sim_cases import cases, make_costs

SVG = "{http://www.w3.org/2000/svg}"


def line_of(schedule: Schedule, **given: Any) -> Timeline:
    costs = {"forward": 0.010, "backward": 0.020, "optimizer": 0.004, "grad_sync": 0.007, **given}
    if schedule.splits_backward:
        costs["weight"] = 0.010
    if schedule.num_stages > 1:
        costs = {"send_forward": 0.001, "send_backward": 0.001, **costs}
    return run(schedule, make_costs(schedule, **costs))


def parsed(line: Timeline, title: str = "") -> ElementTree.Element:
    root = ElementTree.fromstring(svg(line, title))
    assert root.tag == f"{SVG}svg"
    return root


def boxes(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "op"]


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


@given(cases())
@settings(max_examples=60, deadline=None)
def test_everything_is_drawn_once(case: tuple[Schedule, StepCosts]) -> None:
    line = run(*case)
    root = parsed(line)
    shown = int(line.free.max(axis=0).argmax())
    told = Counter(tuple((rect.findtext(f"{SVG}title") or "").split(", ")[:2]) for rect in boxes(root))
    happened = Counter(
        (f"stage {a.stage}: {NAMES[a.kind]}", a.name) for a in line.activity() if a.replica_class == shown
    )
    assert told == happened


@pytest.mark.parametrize(
    "schedule", [one_f_one_b(4, 8), zb_h1(4, 8), interleaved(4, 8, 2), one_f_one_b(80, 4)]
)
def test_boxes_are_where_and_as_long_as_they_should_be(schedule: Schedule) -> None:
    line = line_of(schedule)
    root = parsed(line)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    activities = list(line.activity())
    scale = (width - LEFT - RIGHT) / line.batch_s
    tops: dict[int, set[str]] = {}
    for rect, activity in zip(boxes(root), activities, strict=True):
        x, y, w, h = (float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
        assert x + 0.01 >= LEFT
        assert x + w <= width
        assert 0 < y < y + h < height
        assert x == pytest.approx(LEFT + activity.start * scale, abs=0.06)
        assert w == pytest.approx((activity.end - activity.start) * scale, abs=0.06)
        if activity.kind in ("forward", "backward", "weight"):
            tops.setdefault(activity.stage, set()).add(rect.get("y", ""))
    assert all(len(found) == 1 for found in tops.values())  # a stage is a row
    rows = [float(next(iter(tops[stage]))) for stage in sorted(tops)]
    assert rows == sorted(set(rows))


def test_no_two_computing_boxes_of_a_stage_overlap() -> None:
    root = parsed(line_of(zb_h1(4, 8)))
    rows: dict[str, list[tuple[float, float]]] = {}
    for rect in boxes(root):
        rows.setdefault(rect.get("y", ""), []).append(
            (float(rect.get("x", "0")), float(rect.get("width", "0")))
        )
    for spans in rows.values():
        spans.sort()
        for (x, w), (after, _) in pairwise(spans):
            assert x + w <= after + 0.02


def test_legend_stages_axis_and_title_are_written() -> None:
    line = line_of(zb_h1(4, 8), finish=0.003, tied_sync=0.002)
    found = texts(parsed(line, "A <title> & more"))
    assert "A <title> & more" in found
    assert {f"stage {stage}" for stage in range(4)} <= set(found)
    assert {"forward", "input gradient", "weight gradient", "optimizer", "gradient synchronisation"} <= set(
        found
    )
    assert "time (ms)" in found
    assert {"0", "100", "200", "300"} <= set(found)
    plain = texts(parsed(line_of(one_f_one_b(1, 2), grad_sync=0)))
    assert "weight gradient" not in plain
    assert "gradient synchronisation" not in plain
    assert "backward" in plain


def test_micro_batches_are_numbered_where_there_is_room() -> None:
    few = texts(parsed(line_of(one_f_one_b(4, 8))))
    assert all(few.count(str(number)) >= 8 for number in range(8))
    root = parsed(line_of(one_f_one_b(16, 64)))
    labels = [text for text in root.iter(f"{SVG}text") if text.get("fill") in ("#ffffff", "#1a1a1a")]
    many = [text.text or "" for text in labels]
    assert {int(text) for text in many} <= set(range(0, 64, EVERY))
    assert "56" in many


def test_the_class_that_ends_last_is_shown() -> None:
    schedule = one_f_one_b(2, 2)
    times = [[1.0, 2.0, 1.5]] * 2
    line = run(schedule, make_costs(schedule, 3, forward=times, backward=times, weights=[1, 2, 3]))
    found = texts(parsed(line))
    assert any("the last of 3 classes of replicas to end (2 alike)" in text for text in found)


def test_neighbours_differ_in_colour() -> None:
    assert len({colour(kind, 0, 0) for kind in NAMES}) == len(NAMES)
    assert len({colour("forward", number, 0) for number in range(4)}) == 4
    assert colour("forward", 0, 0) != colour("forward", 0, 1)


@given(st.floats(1e-6, 1e6), st.integers(2, 30))
def test_steps_are_round(length: float, count: int) -> None:
    step = nice_step(length, count)
    digits = f"{step:.6e}"
    assert digits[:8] in ("1.000000", "2.000000", "5.000000")
    assert count / 2.6 <= length / step <= count * 1.01
    assert nice_step(0, 4) == 0


def test_times_have_units() -> None:
    assert [seconds_text(s) for s in (12.3456, 0.0123456, 1.5e-5)] == ["12.35 s", "12.35 ms", "15 µs"]
