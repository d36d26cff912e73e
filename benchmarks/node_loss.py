"""How long a job stands still when a whole node is lost, and until its state is protected again, by its size.

    python -m benchmarks.node_loss [--sizes 16MB 128MB 512MB] [--losses 5] [--json]

FSDP2 over two nodes with a rank each, one more keeps replicas (two of every rank's state) and is where the ranks of a
lost one go. All are on this machine, so pulls go through its loopback interface, encrypted; what the link between real
machines takes comes on top. A node is lost: its memory is deleted, its daemon and all its processes get SIGKILL, at a
random instant, with standbys ready. A daemon is then started in its place. Beside it, in the same run: SIGKILL to one
rank of the same model on one node, which sealed its state there.

total        from the first SIGKILL to the commit of the next step on all ranks: no vote passes before all keepers
             that live have acknowledged, so from here on the next loss may come
dead         all that was killed is dead; the marks that follow are from the leader's record of the recovery
detected, parked (the survivors), planned, rehearsed (the replacement), pulled, formed, redone
step         one undisturbed step's own time, just before
full         the keepers that were missing are back: from the moment that the new daemon of the lost node is a spare
             to the first commit for which it has acknowledged its replicas of all ranks. All park for that, once
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from benchmarks import report
from benchmarks.cluster_jobs import run_on_nodes
from benchmarks.jobs import Job, JobFailed, run_job
from benchmarks.model import SIZES
from flashrec.cli.demo.nodes.cluster import Cluster
from flashrec.cli.demo.nodes.node import Node, lose
from flashrec.cli.demo.nodes.tags import NodeTags

RANKS = 2
MARKS = ("detected", "parked", "planned", "rehearsed", "pulled", "formed", "redone")
DEADLINE_S = 120.0
SAFETY_STEPS = 1_000_000
STEPS_BETWEEN = 3
LOOK_S = 0.05
STARTED_AGAIN_S = 30.0


class Watched:
    """A job and its status, looked at often."""

    def __init__(self, job: Job, cluster: Cluster | None) -> None:
        self.job = job
        self._cluster = cluster

    def status(self) -> dict[str, Any]:
        self.job.poll(LOOK_S)
        self.job.check()
        if self._cluster is not None:
            self._cluster.reap()
        return self.job.status()["job"] or {"status": "", "recoveries": []}

    def until(self, done: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The first status of which `done` holds. JobFailed if that takes long."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            status = self.status()
            if status["status"] == "running" and done(status):
                return status
        raise JobFailed(f"{what}: not in {DEADLINE_S:.0f} s\n{self.job.output}")

    def ready(self) -> dict[str, Any]:
        """Trains undisturbed, with all keepers and standbys."""
        first = self.until(lambda status: committed(status)[0] >= 2, "training")
        version = committed(first)[0] + STEPS_BETWEEN
        return self.until(
            lambda status: committed(status)[0] >= version and _is_whole(status), "standbys and keepers"
        )

    def step_ms(self) -> float:
        """The time of a step."""
        version, at_ns = committed(self.status())
        later = self.until(lambda status: committed(status)[0] >= version + STEPS_BETWEEN, "steps")
        newer, newer_ns = committed(later)
        return (newer_ns - at_ns) / (newer - version) / 1e6


def committed(status: dict[str, Any]) -> tuple[int, int]:
    """(newest version that all ranks hold, when the last of them got there in ns), as far as the leader has heard."""
    ranks = status.get("ranks", [])
    if not ranks or any(rank["committed"] is None for rank in ranks):
        return -1, 0
    return min((rank["committed"], rank["committed_ns"]) for rank in ranks)


def _is_whole(status: dict[str, Any]) -> bool:
    live = [node["name"] for node in status["nodes"] if node["life"] == "live" and not node["unheard"]]
    standing = {one["node"] for one in status["standbys"] if one["depth"] != "starting"}
    wanted = status["replicas"]["wanted"]
    return (
        all(record["complete"] for record in status["recoveries"])
        and all(len(rank["kept_on"]) == wanted for rank in status["ranks"])
        and set(live) == standing
    )


def measure_nodes(size: str, losses: int, draw: random.Random) -> report.Figures:
    """As many losses of nodes, each as {total, dead, marks..., step, full} in ms."""
    args = ["--size", size, "--parallel", "fsdp", "--standby", "forked", "--steps", SAFETY_STEPS]
    found = []
    with run_on_nodes("benchmarks.recovery_rank", args, ranks=RANKS, spare_nodes=1, replicas=2) as (
        job,
        cluster,
    ):
        watched = Watched(job, cluster)
        for _ in range(losses):
            watched.ready()
            step_ms = watched.step_ms()
            status = watched.ready()
            number = len(status["recoveries"])
            job.poll(draw.random() * step_ms / 1000)
            node = cluster.named(status["ranks"][RANKS - 1]["node"])
            loss = lose(node, status["job"], subreaper=os.getpid())
            after = watched.until(
                lambda status, number=number: _is_complete(status, number), "the next commit"
            )
            one = _times(after["recoveries"][number], loss.signal_ns)
            one["dead"] = (loss.died_ns - loss.signal_ns) / 1e6
            one["step"] = step_ms
            one["full"] = _full_ms(watched, cluster, node)
            found.append(one)
    return _figures(f"node, {size}", found, status["arena_bytes"])


def _full_ms(watched: Watched, cluster: Cluster, node: Node) -> float:
    """Start a daemon on `node` again. From its being a spare to the first commit with it as a keeper."""
    status = watched.status()
    since = len(_events(cluster))
    cluster.start_daemon(node)
    watched.until(lambda status: any(_plans(cluster, since)), "a plan with the keeper that is back")
    plan = _plans(cluster, since)[-1]
    with contextlib.closing(NodeTags(cluster.nodes, status["job"], RANKS)) as tags:
        committed_ns = 0
        deadline = time.monotonic() + DEADLINE_S
        while not committed_ns:
            found = [tag for tag in tags.all() if tag is not None]
            is_on = [tag.generation == plan["generation"] and tag.committed > plan["step"] for tag in found]
            if len(found) == RANKS and all(is_on):
                committed_ns = max(tag.committed_ns for tag in found)
            if time.monotonic() > deadline:
                raise JobFailed(f"no step with the keeper that is back\n{watched.job.output}")
            time.sleep(0.002)
    joined = next(
        line
        for line in _events(cluster)[since:]
        if line["event"] == "node joined" and line["job"] is not None
    )
    age_s = time.time() - datetime.fromisoformat(joined["time"]).timestamp()
    return (committed_ns - time.monotonic_ns()) / 1e6 + 1000 * age_s


def _events(cluster: Cluster) -> list[dict[str, Any]]:
    lines = (cluster.leader.run_dir / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _plans(cluster: Cluster, since: int) -> list[dict[str, Any]]:
    return [line for line in _events(cluster)[since:] if line["event"] == "plan"]


def measure_ranks(size: str, losses: int, draw: random.Random) -> report.Figures:
    """As many losses of one rank on one node."""
    args = ["--size", size, "--parallel", "fsdp", "--standby", "forked", "--steps", SAFETY_STEPS]
    found = []
    with run_job("benchmarks.recovery_rank", args, ranks=RANKS, standbys=1) as job:
        watched = Watched(job, None)
        for _ in range(losses):
            watched.ready()
            step_ms = watched.step_ms()
            status = watched.ready()
            number = len(status["recoveries"])
            job.poll(draw.random() * step_ms / 1000)
            killed_ns = time.monotonic_ns()
            os.kill(status["ranks"][RANKS - 1]["pid"], signal.SIGKILL)
            after = watched.until(
                lambda status, number=number: _is_complete(status, number), "the next commit"
            )
            found.append({**_times(after["recoveries"][number], killed_ns), "step": step_ms})
    return _figures(f"rank, {size}", found, status["arena_bytes"])


def _is_complete(status: dict[str, Any], number: int) -> bool:
    records = status["recoveries"]
    return len(records) > number and records[number]["complete"]


def _times(record: dict[str, Any], killed_ns: int) -> dict[str, float]:
    marks = {name: (record["marks"].get(name, killed_ns) - killed_ns) / 1e6 for name in MARKS}
    return {"total": marks["redone"], **marks}


def _figures(what: str, found: list[dict[str, float]], arena_bytes: int) -> report.Figures:
    return {
        "what": what,
        "losses": len(found),
        "rank_mb": arena_bytes / 2 / RANKS / 1e6,
        "medians": {name: statistics.median(one[name] for one in found) for name in found[0]},
        "worst": max(one["total"] for one in found),
        "each": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["16MB", "128MB", "512MB"])
    parser.add_argument("--losses", type=int, default=5, help="of each kind, at each size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    about, draw = report.machine(), random.Random(options.seed)
    found = []
    for size in options.sizes:
        found.append(measure_nodes(size, options.losses, draw))
        found.append(measure_ranks(size, options.losses, draw))
    report.show({"machine": about, "losses": found}, _tables(found), as_json=options.json)


def _tables(found: list[report.Figures]) -> list[report.Table]:
    def row(one: report.Figures, names: tuple[str, ...]) -> list[str]:
        medians = one["medians"]
        return [f"{medians[name]:.0f}" if name in medians else "" for name in names]

    totals = [
        (
            one["what"],
            f"{one['rank_mb']:.0f}",
            one["losses"],
            *row(one, ("total",)),
            f"{one['worst']:.0f}",
            *row(one, ("step", "full")),
        )
        for one in found
    ]
    names = ("dead", *MARKS)
    title = f"To the next commit, ms, medians; {RANKS} ranks of FSDP2, on {RANKS} nodes of 3 and on one"
    columns = ("lost", "MB a rank", "losses", "total", "worst", "step", "full")
    return [
        report.table(title, columns, totals),
        report.table(
            "ms since the loss", ("lost", *names), [(one["what"], *row(one, names)) for one in found]
        ),
    ]


if __name__ == "__main__":
    main()
