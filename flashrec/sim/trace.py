"""A step as a trace that Chrome (about:tracing) and Perfetto show: the trace-event format, complete ("X") events.

A process is a class of equal data-parallel replicas, its threads the stages' devices, their links and their gradient
communication. Times are microseconds with three decimals, so that a nanosecond is the finest that is told; slices of
one thread never overlap (transfers that run at the same time get a thread each).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashrec.sim.timeline import Activity, Timeline

COMPUTE = ("forward", "backward", "weight", "optimizer")
TRANSFERS = ("send_forward", "send_backward")
COLOURS = {  # names that about:tracing knows; Perfetto colours by name
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "weight": "rail_animation",
    "optimizer": "rail_idle",
}
LANES = 10_000  # numbers of threads set aside for one stage
MOST_CLASSES = 16


def chrome_trace(timeline: Timeline, title: str = "flashrec") -> dict[str, Any]:
    """The JSON object: `traceEvents`, and in `otherData` what it is. Of many classes, those that end last."""
    classes = len(timeline.costs.weights)
    order = timeline.free.max(axis=0).argsort(kind="stable")[::-1].tolist()
    return {
        "traceEvents": list(_events(timeline, set(order[:MOST_CLASSES]))),
        "displayTimeUnit": "ms",
        "otherData": {
            "title": title,
            "schedule": timeline.schedule.name,
            "batch_s": timeline.batch_s,
            "bubble": timeline.bubble(),
            "classes": classes,
            "classes_shown": min(classes, MOST_CLASSES),
        },
    }


def _events(timeline: Timeline, shown: set[int]) -> Iterator[dict[str, Any]]:
    for replica_class, weight in enumerate(timeline.costs.weights.tolist()):
        if replica_class not in shown:
            continue
        name = f"class {replica_class}: {weight} equal data-parallel replica" + ("s" if weight > 1 else "")
        yield _meta("process_name", replica_class, 0, name=name)
        yield _meta("process_sort_index", replica_class, 0, sort_index=replica_class)
    lanes: dict[tuple[int, int, str], list[int]] = {}  # ends, in ns, of each lane's last slice
    named: set[tuple[int, int]] = set()
    for activity in timeline.activity():
        start, end = _ns(activity.start), _ns(activity.end)
        if end == start or activity.replica_class not in shown:
            continue
        lane, label = _lane(activity, start, end, lanes)
        thread = activity.stage * LANES + lane
        if (activity.replica_class, thread) not in named:
            named.add((activity.replica_class, thread))
            yield _meta("thread_name", activity.replica_class, thread, name=label)
            yield _meta("thread_sort_index", activity.replica_class, thread, sort_index=thread)
        event: dict[str, Any] = {
            "name": activity.name,
            "cat": activity.kind,
            "ph": "X",
            "ts": start / 1000,
            "dur": (end - start) / 1000,
            "pid": activity.replica_class + 1,
            "tid": thread + 1,
            "args": {"stage": activity.stage, "kind": activity.kind},
        }
        if activity.kind in COLOURS:
            event["cname"] = COLOURS[activity.kind]
        yield event


def _lane(
    activity: Activity, start: int, end: int, lanes: dict[tuple[int, int, str], list[int]]
) -> tuple[int, str]:
    """The thread of its stage on which the activity is shown, and that thread's name."""
    if activity.kind in COMPUTE:
        return 0, f"stage {activity.stage}"
    group, first = ("transfers", 2) if activity.kind in TRANSFERS else ("collectives", 1)
    if first == 1:
        return 1, f"stage {activity.stage} collectives"
    ends = lanes.setdefault((activity.replica_class, activity.stage, group), [])
    lane = next((number for number, until in enumerate(ends) if until <= start), len(ends))
    if lane == len(ends):
        ends.append(end)
    ends[lane] = end
    return first + lane, f"stage {activity.stage} transfers" + (f" ({lane + 1})" if lane else "")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _meta(name: str, replica_class: int, thread: int, /, **args: Any) -> dict[str, Any]:
    """Numbers from 1: Perfetto takes process and thread 0 for the machine's idle ones."""
    return {"name": name, "ph": "M", "ts": 0, "pid": replica_class + 1, "tid": thread + 1, "args": args}
