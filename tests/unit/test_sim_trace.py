"""The trace is one that Chrome and Perfetto read, and tells what the time-line tells."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from flashrec.sim.engine import StepCosts, run
from flashrec.sim.schedules import Schedule, gpipe, one_f_one_b
from flashrec.sim.timeline import Timeline
from flashrec.sim.trace import MOST_CLASSES, chrome_trace
from tests.unit.sim_cases import cases, make_costs

COMPUTE = ("forward", "backward", "weight", "optimizer")


def line_of(schedule: Schedule, classes: int = 1, **given: Any) -> Timeline:
    costs = {
        "forward": 0.010,
        "backward": 0.021,
        "optimizer": 0.004,
        "grad_sync": 0.007,
        "finish": 0.001,
        **given,
    }
    sends = {"send_forward": 0.0013, "send_backward": 0.0013} if schedule.num_stages > 1 else {}
    return run(schedule, make_costs(schedule, classes, **{**sends, **costs}))


def check_schema(document: dict[str, Any]) -> None:
    """Of the trace-event format, what we use."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        for key in ("pid", "tid"):
            assert isinstance(event[key], int)
            assert event[key] > 0
        assert isinstance(event["ts"], (int, float))
        assert event["ts"] >= 0
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name",
                "thread_name",
                "process_sort_index",
                "thread_sort_index",
            )
            assert set(event["args"]) == ({"name"} if event["name"].endswith("_name") else {"sort_index"})
        else:
            assert event["dur"] > 0
            assert isinstance(event["cat"], str)


def check_names(events: list[dict[str, Any]]) -> None:
    """Every process and thread that has a slice has one name, given before it."""
    processes, threads = Counter[int](), Counter[tuple[int, int]]()
    for event in events:
        if event["name"] == "process_name":
            processes[event["pid"]] += 1
        elif event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] += 1
        elif event["ph"] == "X":
            assert processes[event["pid"]] == 1
            assert threads[event["pid"], event["tid"]] == 1
    assert set(processes.values()) | set(threads.values()) <= {1}


def check_no_overlap(events: list[dict[str, Any]]) -> None:
    """In whole nanoseconds."""
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            assert start / 1000 == event["ts"]
            threads.setdefault((event["pid"], event["tid"]), []).append(
                (start, start + round(event["dur"] * 1000))
            )
    for slices in threads.values():
        for (_, end), (start, _) in pairwise(sorted(slices)):
            assert start >= end


@given(cases())
@settings(max_examples=100, deadline=None)
def test_any_step_makes_a_valid_trace(case: tuple[Schedule, StepCosts]) -> None:
    schedule, costs = case
    document = json.loads(json.dumps(chrome_trace(run(schedule, costs))))
    check_schema(document)
    check_names(document["traceEvents"])
    check_no_overlap(document["traceEvents"])


def test_every_operation_is_there_once_with_its_times() -> None:
    line = line_of(one_f_one_b(3, 5), classes=2)
    slices = [e for e in chrome_trace(line)["traceEvents"] if e["ph"] == "X"]
    told = sorted((e["pid"] - 1, e["args"]["stage"], e["name"], e["ts"], e["dur"]) for e in slices)
    happened = sorted(
        (a.replica_class, a.stage, a.name, a.start * 1e6, (a.end - a.start) * 1e6) for a in line.activity()
    )
    assert len(told) == len(happened)
    for mine, theirs in zip(told, happened, strict=True):
        assert mine[:3] == theirs[:3]
        assert mine[3:] == pytest.approx(theirs[3:], abs=2e-3)  # to the nanosecond


def test_computing_slices_add_up_to_the_busy_time() -> None:
    line = line_of(one_f_one_b(4, 8))
    slices = [e for e in chrome_trace(line)["traceEvents"] if e["ph"] == "X"]
    for stage in range(4):
        busy = sum(e["dur"] for e in slices if e["cat"] in COMPUTE[:3] and e["args"]["stage"] == stage)
        assert busy == pytest.approx(line.busy()[stage, 0] * 1e6)


def test_transfers_at_the_same_time_get_threads_of_their_own() -> None:
    line = line_of(gpipe(2, 4), send_forward=0.035, send_backward=0.035)
    events = chrome_trace(line)["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"stage 0", "stage 0 transfers", "stage 0 transfers (2)", "stage 1 transfers"} <= names
    check_no_overlap(events)


def test_processes_say_whom_they_stand_for() -> None:
    schedule = one_f_one_b(2, 2)
    line = line_of(schedule, classes=2, weights=[1, 3])
    names = [e["args"]["name"] for e in chrome_trace(line)["traceEvents"] if e["name"] == "process_name"]
    assert names == [
        "class 0: 1 equal data-parallel replica",
        "class 1: 3 equal data-parallel replicas",
    ]


def test_of_many_classes_the_last_to_end_are_shown() -> None:
    times = [[float(1 + number) for number in range(40)]]
    line = line_of(one_f_one_b(1, 1), classes=40, forward=times, weights=[1] * 40)
    document = chrome_trace(line)
    assert document["otherData"]["classes"] == 40
    assert document["otherData"]["classes_shown"] == MOST_CLASSES
    shown = {e["pid"] - 1 for e in document["traceEvents"]}
    assert shown == set(range(40 - MOST_CLASSES, 40))
    check_names(document["traceEvents"])
