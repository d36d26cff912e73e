"""What is read off a time-line: activity, busy time, bubble, exposed communication, critical path."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from flashrec.sim.engine import StepCosts, run
from flashrec.sim.schedules import Schedule, gpipe, zb_h1
from flashrec.sim.timeline import Activity
from tests.unit.sim_cases import cases, make_costs

COMPUTES = {"forward", "backward", "weight"}
COLLECTIVES = {"grad_sync", "tied_sync", "finish"}


def small() -> tuple[Schedule, StepCosts]:
    """Two stages, one micro-batch, two classes of replicas (three replicas of the first)."""
    schedule = gpipe(2, 1)
    costs = make_costs(
        schedule,
        classes=2,
        forward=[[2, 4], [2, 2]],
        backward=[[3, 3], [3, 3]],
        send_forward=1,
        send_backward=1,
        grad_sync=[[5], [4]],
        optimizer=1,
        finish=[0, 6],
        tied_sync=2,
        weights=np.array([3, 1]),
    )
    return schedule, costs


def test_activity_of_every_device() -> None:
    line = run(*small())
    assert list(line.activity()) == [
        Activity(0, 0, "F0", "forward", 0, 2),
        Activity(0, 0, "send F0", "send_forward", 2, 3),
        Activity(0, 0, "B0", "backward", 9, 12),
        Activity(0, 0, "gradients 0.0", "grad_sync", 14, 19),
        Activity(0, 0, "tied embeddings", "tied_sync", 19, 21),
        Activity(0, 0, "optimizer", "optimizer", 21, 22),
        Activity(0, 1, "F0", "forward", 0, 4),
        Activity(0, 1, "send F0", "send_forward", 4, 5),
        Activity(0, 1, "B0", "backward", 11, 14),
        Activity(0, 1, "gradients 0.0", "grad_sync", 14, 19),
        Activity(0, 1, "tied embeddings", "tied_sync", 19, 21),
        Activity(0, 1, "optimizer", "optimizer", 21, 22),
        Activity(1, 0, "F0", "forward", 3, 5),
        Activity(1, 0, "B0", "backward", 5, 8),
        Activity(1, 0, "send B0", "send_backward", 8, 9),
        Activity(1, 0, "gradients 1.0", "grad_sync", 10, 14),
        Activity(1, 0, "tied embeddings", "tied_sync", 19, 21),
        Activity(1, 0, "optimizer", "optimizer", 21, 22),
        Activity(1, 0, "finish", "finish", 22, 28),
        Activity(1, 1, "F0", "forward", 5, 7),
        Activity(1, 1, "B0", "backward", 7, 10),
        Activity(1, 1, "send B0", "send_backward", 10, 11),
        Activity(1, 1, "gradients 1.0", "grad_sync", 10, 14),
        Activity(1, 1, "tied embeddings", "tied_sync", 19, 21),
        Activity(1, 1, "optimizer", "optimizer", 21, 22),
        Activity(1, 1, "finish", "finish", 22, 28),
    ]


def test_busy_bubble_and_critical_path_by_hand() -> None:
    line = run(*small())
    assert line.busy().tolist() == [[5, 7], [5, 5]]
    assert line.pipeline_s == 14
    assert line.bubble() == pytest.approx(1 - (3 * 10 + 12) / (2 * 4 * 14))
    path = line.critical_path()
    assert [segment.name for segment in path] == [
        "F0", "send F0", "F0", "B0", "send B0", "B0", "gradients 0.0", "tied embeddings", "optimizer", "finish",
    ]  # fmt: skip
    assert {segment.replica_class for segment in path[:6]} == {1}  # the slower replica
    assert [segment.stage for segment in path[:7]] == [0, 0, 1, 1, 1, 0, 0]


def test_exposed_communication_by_hand() -> None:
    line = run(*small())
    exposed = {kind: times.tolist() for kind, times in line.exposed().items()}
    assert exposed == {
        "send_forward": [[0, 0], [1, 1]],
        "send_backward": [[1, 1], [0, 0]],
        "grad_sync": [[5, 5], [4, 4]],  # the wait for the slower replica before it is not counted
        "tied_sync": [[2, 2], [2, 2]],
        "finish": [[0, 0], [6, 6]],
    }
    assert line.exposed_s()["grad_sync"] == 4.5
    schedule, costs = gpipe(2, 1), small()[1]
    blocking = make_costs(schedule, forward=2, backward=3, send_forward=1, send_backward=4, sends_block=True)
    exposed = {kind: times.tolist() for kind, times in run(schedule, blocking).exposed().items()}
    assert exposed["send_forward"] == [[1], [1]]  # the sender's time, and the receiver's wait
    assert exposed["send_backward"] == [[4], [4]]
    assert costs.sends_block is False


def test_overlapped_gradients_are_exposed_only_after_the_stage() -> None:
    schedule = gpipe(1, 1)
    line = run(
        schedule, make_costs(schedule, forward=10, backward=10, grad_sync=[[3, 6]], overlap_grad_sync=True)
    )
    assert line.sync_start.tolist() == [[15, 20]]
    assert line.exposed()["grad_sync"].tolist() == [[6]]
    path = line.critical_path()
    assert [tuple(s[2:]) for s in path] == [
        ("F0", "forward", 0, 10),
        ("B0", "backward", 10, 20),
        ("gradients 0.1", "grad_sync", 20, 26),
    ]
    line = run(
        schedule, make_costs(schedule, forward=10, backward=10, grad_sync=[[9, 6]], overlap_grad_sync=True)
    )
    assert [tuple(s[2:]) for s in line.critical_path()] == [
        ("F0", "forward", 0, 10),
        ("B0", "backward", 10, 15),  # left where the first bucket is complete
        ("gradients 0.0", "grad_sync", 15, 24),
        ("gradients 0.1", "grad_sync", 24, 30),
    ]


@given(cases())
def test_the_critical_path_adds_up_and_consists_of_what_happened(case: tuple[Schedule, StepCosts]) -> None:
    line = run(*case)
    path = line.critical_path()
    assert sum(segment.end - segment.start for segment in path) == line.batch_s
    if path:
        assert (path[0].start, path[-1].end) == (0, line.batch_s)
    assert all(here.end == then.start for here, then in pairwise(path))
    happened = {(a.stage, a.replica_class, a.name, a.kind, a.start): a.end for a in line.activity()}
    for segment, then in zip(path, [*path[1:], None], strict=True):
        end = happened[segment[:5]]
        # Only a backward may be left early, for a bucket of its gradients.
        early = segment.kind in COMPUTES and then is not None and then.kind == "grad_sync"
        assert segment.end <= end if early else segment.end == end


@given(cases())
def test_the_critical_path_follows_devices_and_transfers(case: tuple[Schedule, StepCosts]) -> None:
    schedule, costs = case
    names = ["forward", "backward", "grad_sync", "optimizer"]
    names += ["weight"] if schedule.splits_backward else []
    names += ["send_forward", "send_backward"] if schedule.num_stages > 1 else []
    line = run(
        schedule, replace(costs, **{name: getattr(costs, name) + 1 for name in names})
    )  # so that all is shown
    for here, then in pairwise(line.critical_path()):
        if {here.kind, then.kind} & COLLECTIVES:
            continue
        assert here.replica_class == then.replica_class
        if here.stage != then.stage or (here.kind.startswith("send_") and not costs.sends_block):
            assert here.kind == f"send_{then.kind}"
            assert here.name == f"send {then.name}" or schedule.num_chunks > 1
            step = 1 if then.kind == "forward" else -1
            assert then.stage == (here.stage + step) % schedule.num_stages


@given(cases())
def test_the_critical_path_of_floats_has_no_gap(case: tuple[Schedule, StepCosts]) -> None:
    schedule, costs = case
    names = (
        "forward",
        "backward",
        "weight",
        "send_forward",
        "send_backward",
        "grad_sync",
        "optimizer",
        "finish",
    )
    tenths = {name: getattr(costs, name) / 10 for name in names}
    line = run(schedule, StepCosts(**{**costs.__dict__, **tenths, "tied_sync": costs.tied_sync / 10}))
    path = line.critical_path()
    assert all(here.end == then.start for here, then in pairwise(path))
    assert not path or (path[0].start, path[-1].end) == (0, line.batch_s)


@given(cases())
def test_times_of_a_device_fit_into_the_step(case: tuple[Schedule, StepCosts]) -> None:
    schedule, costs = case
    line = run(schedule, costs)
    assert (line.busy() == (line.end - line.start).sum(axis=1)).all()
    assert 0 <= line.bubble() < 1
    exposed = line.exposed()
    assert all((times >= 0).all() for times in exposed.values())
    sends = exposed["send_forward"] + exposed["send_backward"]
    assert (line.busy() + sends <= line.free).all()
    assert (line.busy() + sum(exposed.values()) + costs.optimizer <= line.batch_s).all()
    # Of a device that computes, no two activities overlap.
    per_device: dict[tuple[int, int], list[Activity]] = {}
    for activity in line.activity():
        if activity.kind in COMPUTES:
            per_device.setdefault(activity[:2], []).append(activity)
    for activities in per_device.values():
        assert all(here.end <= then.start for here, then in pairwise(activities))


def test_a_step_that_takes_no_time() -> None:
    schedule = zb_h1(3, 2)
    line = run(schedule, make_costs(schedule))
    assert (line.batch_s, line.bubble(), line.critical_path(), list(line.activity())) == (0, 0.0, [], [])
