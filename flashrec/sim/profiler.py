"""Times a step's distinct events with two processes, on one node or on two.

Both processes do every event, so that a kernel is timed while its neighbour computes as well, as it does in training.
The rounds go through all events in turn rather than through one event's repeats: a slow spell of the machine then
spreads over all of them, and caches hold what they hold in training. On an accelerator kernels are timed back to back
between two of its events and divided by their number; on a CPU one by one with the clock. A transfer is half a there-
and-back; a collective lasts from the later rank's call to the end (the lesser of the two ranks' times: the other
waited). Of the rounds the half counts in which the kernel says that other processes took the least from the two
(schedstat): a choice that does not look at the times. A group of more ranks is measured with two, at its size and at
SHORTEST_BYTES; `Profile` goes on from there by ring volume and steps.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashrec.errors import EnvironmentFault, UsageError
from flashrec.prctl import die_with_parent
from flashrec.sim import costs
from flashrec.sim.architecture import Architecture
from flashrec.sim.choices import require_count
from flashrec.sim.cluster import Cluster
from flashrec.sim.events import Compute, Event, parse
from flashrec.sim.kernels import Kernels, TorchKernels
from flashrec.sim.profile import Profile, Sample
from flashrec.sim.strategy import Strategy
from flashrec.sim.timing import Seconds, perform

SHORTEST_BYTES = 64


def distinct_events(
    model: Architecture, cluster: Cluster, strategy: Strategy, global_batch: int
) -> tuple[Event, ...]:
    """Every distinct event of a step, gradients, optimizer and replication included, sorted by its text.

    Raises UsageError where the strategy is impossible.
    """
    asked = _Asked()
    costs.build(model, cluster, strategy, global_batch, asked)
    return tuple(sorted(asked.events, key=str))


class _Asked:
    """`Durations` that remembers what it was asked for."""

    def __init__(self) -> None:
        self.events: set[Event] = set()

    def seconds(self, key: Event) -> float:
        self.events.add(key)
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What two ranks measure for a set of events, and what they cannot."""

    events: tuple[Event, ...]
    impossible: Mapping[Event, str]
    """Event: why not."""


def plan(missing: Iterable[Event], *, nodes: int = 1, device: str = "cpu") -> Plan:
    """What must be measured, by two ranks on one node or on two, so that the missing events are known.

    Collectives are gloo's, between host memories: those of an accelerator are not measured.
    """
    events: set[Event] = set()
    impossible: dict[Event, str] = {}
    for event in missing:
        if isinstance(event, Compute) or event.collective == "host_copy":
            events.add(event)
        elif device != "cpu":
            impossible[event] = "only what is exchanged between host memories (gloo) can be timed"
        elif min(event.nodes, 2) != nodes:
            needed = "two nodes (--master)" if event.nodes > 1 else "one node (without --master)"
            impossible[event] = f"it takes {needed}"
        else:
            pair = replace(event, participants=2, nodes=nodes, groups=1)
            events.add(pair)
            if pair != event:
                events.add(replace(pair, size_bytes=SHORTEST_BYTES))
    return Plan(events=tuple(sorted(events, key=str)), impossible=impossible)


def measure(
    events: Sequence[Event],
    *,
    rounds: int = 20,
    kernels: Kernels | None = None,
    pause_s: float = 0.0,
    fork: bool = False,
    pinned: bool = False,
    threads: int | None = None,
    timeout_s: float = 600.0,
) -> Seconds:
    """Seconds of each round of each event, by two processes of this node, which are gone when it returns.

    `pause_s`: both ranks sleep so long before a transfer or a collective, as ranks do that wait for one another.
    `fork`: from this process, which kernels of the caller's own need; else fresh ones. `pinned`: each to a core of its
    own. `threads`: of torch, each; without, half the cores.
    Raises EnvironmentFault, with the process's own words, where one fails or is not done in time.
    """
    require_count(rounds, "rounds")
    if not events:
        return {}
    kernels = kernels or TorchKernels()
    with tempfile.TemporaryDirectory(prefix="flashrec-profile-") as folder:
        task = {
            "folder": folder,
            "parent": os.getpid(),
            "events": [str(event) for event in events],
            "rounds": rounds,
            "pause_s": pause_s,
            "pinned": pinned,
            "threads": threads,
        }
        ranks: list[Any] = []
        late = []
        try:
            for rank in range(
                2
            ):  # not in one expression: a second that fails to start must not hide the first
                _start_rank(rank, task, kernels, fork, ranks)
            deadline = time.monotonic() + timeout_s
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in ranks:
                if process.is_alive():
                    late.append(process)
                    process.kill()
                process.join()
        _raise_failures(Path(folder), late, timeout_s)
        return _read(json.loads((Path(folder) / "seconds.json").read_text()))


def _start_rank(rank: int, task: dict[str, Any], kernels: Kernels, fork: bool, started: list[Any]) -> None:
    if fork:
        process = multiprocessing.get_context("fork").Process(target=_rank, args=(rank, task, kernels))
        process.start()
        started.append(process)
        return
    if not isinstance(kernels, TorchKernels):
        raise UsageError("a fresh process has TorchKernels only; give fork=True for others")
    started.append(_Fresh(rank, task, kernels))


class _Fresh:
    """A new interpreter for a rank, with the face of a multiprocessing.Process."""

    def __init__(self, rank: int, task: dict[str, Any], kernels: TorchKernels) -> None:
        program = "from flashrec.sim.profiler import fresh_rank; fresh_rank()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps({**task, "rank": rank, "device": kernels.device})],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        )

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()


def fresh_rank() -> None:
    """The program of a process that `measure` started."""
    task = json.loads(sys.argv[1])
    _rank(task["rank"], task, TorchKernels(task["device"]))


def measure_between_nodes(
    events: Sequence[Event], master: str, rank: int, *, rounds: int = 20, kernels: Kernels | None = None
) -> Seconds:
    """As `measure`, by this process as rank 0 or 1 and another on the other node; rank 0's events count.

    `master`: HOST:PORT of rank 0. Rank 1 gets nothing back.
    """
    import torch.distributed as dist

    _start_group(f"tcp://{master}", rank)
    try:
        return perform(events, rounds, 0.0, kernels or TorchKernels()) or {}
    finally:
        dist.destroy_process_group()


def _start_group(where: str, rank: int) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=where, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
    )


def _raise_failures(folder: Path, late: Sequence[object], timeout_s: float) -> None:
    failures = [path.read_text() for path in sorted(folder.glob("failed*"))]
    if failures:
        raise EnvironmentFault(f"profiling failed:\n{failures[0]}")
    if late or not (folder / "seconds.json").exists():
        raise EnvironmentFault(f"profiling was not done within {timeout_s:.0f} s, or a process was killed")


def _read(found: dict[str, list[float]]) -> Seconds:
    return {parse(text): seconds for text, seconds in found.items()}


def _rank(rank: int, task: dict[str, Any], kernels: Kernels) -> None:
    """One of the two processes."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != task["parent"]:
        return
    folder = Path(task["folder"])
    try:
        import torch
        import torch.distributed as dist

        cores = sorted(os.sched_getaffinity(0))
        torch.set_num_threads(task["threads"] or max(1, len(cores) // 2))
        if task["pinned"]:
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        _start_group(f"file://{folder}/rendezvous", rank)
        events = [parse(text) for text in task["events"]]
        found = perform(events, task["rounds"], task["pause_s"], kernels)
        if found is not None:
            seconds = {str(event): values for event, values in found.items()}
            (folder / "seconds.json").write_text(json.dumps(seconds))
        dist.destroy_process_group()
    except Exception:
        (folder / f"failed{rank}").write_text(traceback.format_exc())
        sys.exit(1)


def summary(seconds: Seconds) -> dict[Event, Sample]:
    """Minimum, median and number of each event's rounds."""
    return {
        event: Sample(min_s=min(values), median_s=statistics.median(values), count=len(values))
        for event, values in seconds.items()
    }


def to_profile(seconds: Seconds, command: str, *, device: str = "cpu") -> Profile:
    """A profile that says where, when and how it was measured."""
    import torch

    where = torch.cuda.get_device_name() if device == "cuda" else f"{_cpu()}, {os.cpu_count()} cores"
    note = (
        f"{platform.node()}: {where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, "
        f"load {os.getloadavg()[0]:.1f}, {command}"
    )
    return Profile(summary(seconds), note)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
