"""How long a job stands still when one of its ranks is SIGKILLed, by the depth of its standby.

    python -m benchmarks.recovery [--kills 10] [--depths built forked none fresh] [--restarts 3] [--json]

    built    a standby that has built and rehearsed everything, as nobody in particular
    forked   a standby with torch imported; it runs the script when it is needed
    none     no standby: the fork server makes a process after the death
    fresh    no standby and no fork server: a new interpreter, which imports torch

`total` is from SIGKILL to the commit of the next step on all ranks. `net` is total minus one step's own time
(median of the steps just before the kill) and minus what survivors still needed to reach their gate after the
loss was known; both are shown. Then the parts, from the daemon's record. Kills strike a random rank at a
random instant, once the standby is ready again.

In the same run: the same model in plain torch under torchrun, which saves to disk every few steps and starts
all ranks again from there. `total` is to the first step that had not been done before the kill.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.jobs import ROOT, Job, JobFailed, run_job, search_path
from benchmarks.model import SIZES
from flashrec.protocol.tag import TagReader, tag_path

DEPTHS = ("built", "forked", "none", "fresh")
MARKS = ("detected", "parked", "planned", "exported", "rehearsed", "pulled", "formed", "redone")
BUDGET_MS = 100.0
DEADLINE_S = 60.0
SAFETY_STEPS = 1_000_000
TORCHRUN_MONITOR_S = 0.1  # torchrun's own default: how often it looks at its ranks
CHECKPOINT_EVERY = 10


# --- flashrec ---------------------------------------------------------------------------------------------


class Watched:
    """A job, its tags and its record of recoveries."""

    def __init__(self, job: Job, ranks: int, depth: str) -> None:
        self._job = job
        self._depth = depth
        self._ranks = ranks
        self._tags: list[TagReader] = []

    def ready(self) -> dict[str, Any]:
        """The job's status once it runs undisturbed, with its standby at its depth. JobFailed if that takes long."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self._job.poll(0.02)
            self._job.check()
            status: dict[str, Any] | None = self._job.status()["job"]
            if status is None or any(rank["pid"] is None for rank in status["ranks"]):
                continue
            if self._depth in ("built", "forked"):
                depths = [standby["depth"] for standby in status["standbys"]]
                if depths != [self._depth]:
                    continue
            if all(record["complete"] for record in status["recoveries"]) and self._commits(status, 2):
                return status
        raise JobFailed(f"the job was not ready in {DEADLINE_S:.0f} s\n{self._job.output}")

    def _commits(self, status: dict[str, Any], number: int) -> bool:
        """Whether every rank commits that many steps in the next seconds."""
        self._tags = [TagReader(tag_path(status["shm_dir"], rank)) for rank in range(self._ranks)]
        first = self.committed()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            self._job.poll(0.02)
            if self.committed()[0] >= first[0] + number:
                return first[0] >= 3
        return False

    def committed(self) -> tuple[int, int]:
        """(newest version that all ranks hold, when the last of them got there in ns)."""
        tags = [tag.read() for tag in self._tags]
        if any(tag is None for tag in tags):
            return -1, 0
        return min((tag.committed, tag.committed_ns) for tag in tags if tag is not None)

    def step_ms(self, span_s: float) -> float:
        """The time of a step, over the next `span_s` at least."""
        version, at_ns = self.committed()
        until = time.monotonic() + span_s
        while True:
            self._job.poll(0.005)
            later, later_ns = self.committed()
            if later > version and time.monotonic() > until:
                return (later_ns - at_ns) / (later - version) / 1e6

    def recovered(self, number: int) -> dict[str, Any]:
        """The record of recovery `number`, once it is complete."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self._job.poll(0.02)
            self._job.check()
            status = self._job.status()["job"]
            records: list[dict[str, Any]] = status["recoveries"] if status else []
            if len(records) > number and records[number]["complete"]:
                return records[number]
        raise JobFailed(f"no recovery in {DEADLINE_S:.0f} s\n{self._job.output}")


def measure(depth: str, size: str, ranks: int, kills: int, draw: random.Random) -> report.Figures:
    """`kills` recoveries at one depth, each as {total, step, to_gate, net, marks...} in ms."""
    script = "built" if depth == "built" else "forked"
    args = ["--size", size, "--standby", script, "--steps", SAFETY_STEPS]
    standbys = 1 if depth in ("built", "forked") else 0
    method = "fresh" if depth == "fresh" else "fork"
    found = []
    with run_job(
        "benchmarks.recovery_rank", args, ranks=ranks, standbys=standbys, start_method=method
    ) as job:
        watched = Watched(job, ranks, depth)
        for _ in range(kills):
            status = watched.ready()
            number = len(status["recoveries"])
            step_ms = watched.step_ms(0.2 + 0.2 * draw.random())
            job.poll(draw.random() * step_ms / 1000)
            victim = draw.randrange(ranks)
            killed_ns = time.monotonic_ns()
            os.kill(status["ranks"][victim]["pid"], signal.SIGKILL)
            found.append(_times(watched.recovered(number), killed_ns, step_ms))
    parts = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return {
        "depth": depth,
        "kills": len(found),
        "net": report.spread([one["net"] for one in found]),
        "total": report.spread([one["total"] for one in found]),
        "medians": parts,
        "each": found,
    }


def _times(record: dict[str, Any], killed_ns: int, step_ms: float) -> dict[str, float]:
    """ms since the kill of each mark, and what follows from them."""
    marks = {name: (record["marks"].get(name, 0) - killed_ns) / 1e6 for name in MARKS}
    to_gate = max(0.0, marks["parked"] - marks["detected"])
    # A built standby has rehearsed long before.
    marks["rehearsed"] = max(0.0, marks["rehearsed"])
    total = marks["redone"]
    return {"total": total, "step": step_ms, "to_gate": to_gate, "net": total - step_ms - to_gate, **marks}


# --- torchrun, with a checkpoint on disk ----------------------------------------------------------------------


@contextlib.contextmanager
def torchrun(size: str, ranks: int, restarts: int, out: Path) -> Iterator[None]:
    """The comparison's job; it is ended at exit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", str(TORCHRUN_MONITOR_S)]
    command += ["-m", "benchmarks.restart_rank", "--size", size, "--every", str(CHECKPOINT_EVERY)]
    command += ["--steps", "100000", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
    # By default torchrun (2.13) gives all its attempts one store without telling them apart: a rank that starts
    # before its peer finds the address that the peer had in the last attempt, and the new one fails too.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with open(out / "output", "wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure_restarts(size: str, ranks: int, kills: int, draw: random.Random) -> report.Figures:
    """The same kills, answered by torchrun: ms to the first new step on all ranks, and steps done again."""
    found = []
    with tempfile.TemporaryDirectory(prefix="flashrec-bench-") as name:
        out = Path(name)
        with torchrun(size, ranks, kills, out):
            done = -1
            for _ in range(kills):
                _await_step(out, ranks, done + 1 + CHECKPOINT_EVERY + draw.randrange(CHECKPOINT_EVERY))
                time.sleep(0.2 * draw.random())
                victim = draw.randrange(ranks)
                pid = int((out / f"rank{victim}.pid").read_text())
                done = max(step for step, _ in _steps(out, 0))
                killed_ns = time.monotonic_ns()
                os.kill(pid, signal.SIGKILL)
                done = max(done, *(step for rank in range(ranks) for step, _ in _steps(out, rank)))
                _await_step(out, ranks, done + 1)
                new_ns = max(min(at for step, at in _steps(out, r) if step == done + 1) for r in range(ranks))
                again = [step for step, at in _steps(out, 0) if killed_ns < at < new_ns and step <= done]
                found.append({"total": (new_ns - killed_ns) / 1e6, "steps_again": len(again)})
    return {
        "kills": len(found),
        "checkpoint_every": CHECKPOINT_EVERY,
        "total": report.spread([one["total"] for one in found]),
        "steps_again": statistics.mean(one["steps_again"] for one in found),
        "each": found,
    }


def _steps(out: Path, rank: int) -> list[tuple[int, int]]:
    """(step, when it was done) of every line that is whole."""
    path = out / f"rank{rank}.log"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(step), int(at)) for step, at in (line.split() for line in lines)]


def _await_step(out: Path, ranks: int, step: int) -> None:
    deadline = time.monotonic() + 2 * DEADLINE_S
    while not all(any(done >= step for done, _ in _steps(out, rank)) for rank in range(ranks)):
        if time.monotonic() > deadline:
            output = (out / "output").read_text(errors="replace")[-3000:]
            raise JobFailed(f"torchrun's job did not get to step {step}\n{output}")
        time.sleep(0.02)


# --- the report -------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=10, help="at each depth")
    parser.add_argument(
        "--fresh-kills", type=int, default=5, help="with fresh interpreters, which take seconds"
    )
    parser.add_argument("--depths", nargs="*", choices=DEPTHS, default=list(DEPTHS))
    parser.add_argument("--restarts", type=int, default=3, help="kills under torchrun")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    about, draw = report.machine(), random.Random(options.seed)
    kills = {**dict.fromkeys(DEPTHS, options.kills), "fresh": min(options.kills, options.fresh_kills)}
    depths = [measure(depth, options.size, options.ranks, kills[depth], draw) for depth in options.depths]
    figures: report.Figures = {
        "machine": about,
        "size": options.size,
        "ranks": options.ranks,
        "budget_ms": BUDGET_MS,
        "depths": depths,
        "torchrun": None,
    }
    if options.restarts:
        figures["torchrun"] = measure_restarts(options.size, options.ranks, options.restarts, draw)
    report.show(figures, _tables(figures), as_json=options.json)


def _tables(figures: report.Figures) -> list[Any]:
    rows: list[tuple[object, ...]] = []
    for one in figures["depths"]:
        middle, net = one["medians"], one["net"]
        rows.append(
            (one["depth"], one["kills"], net["median"], net["p90"], net["max"], middle["total"], middle["step"],
             middle["to_gate"], 0)
        )  # fmt: skip
    disk = figures["torchrun"]
    if disk is not None:
        rows.append(
            (
                "torchrun, disk",
                disk["kills"],
                "",
                "",
                "",
                disk["total"]["median"],
                "",
                "",
                disk["steps_again"],
            )
        )
    columns = ("standby", "kills", "net ms", "90 %", "max", "total", "step", "to gate", "steps again")
    title = f"SIGKILL to the next committed step, {figures['ranks']} ranks, model {figures['size']!r}"
    tables = [report.table(title, columns, rows)]
    if figures["depths"]:
        parts = [(one["depth"], *[one["medians"][mark] for mark in MARKS]) for one in figures["depths"]]
        tables.append(report.table("ms since the kill, medians", ("standby", *MARKS), parts))
    return tables


if __name__ == "__main__":
    main()
