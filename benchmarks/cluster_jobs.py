"""Jobs over several nodes for the benchmarks: each node a daemon of its own on this machine, at its own address."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.jobs import ROOT, Job, search_path
from flashrec.cli.client import Client
from flashrec.cli.demo.nodes.cluster import Cluster, cluster
from flashrec.cli.submit import submit_from_here


@contextlib.contextmanager
def run_on_nodes(
    module: str,
    args: Sequence[object],
    *,
    ranks: int,
    nodes: int = 2,
    spare_nodes: int = 0,
    replicas: int = 1,
    standbys: int = 1,
    suspect_after_s: float = 3.0,
    options: Sequence[str] = (),
) -> Iterator[tuple[Job, Cluster]]:
    """`flashrec run --nnodes ... -m module args...` on daemons that exist for this job alone, and get `options`."""
    submit = submit_from_here(
        module,
        world_size=ranks,
        module=True,
        args=[str(arg) for arg in args],
        cwd=str(ROOT),
        env={**os.environ, "PYTHONPATH": search_path()},
        num_standbys=standbys,
        suspect_after_s=suspect_after_s,
        num_nodes=nodes,
        num_spare_nodes=spare_nodes,
        num_replicas=replicas,
    )
    env = {"PYTHONPATH": search_path()}
    with (
        cluster(nodes + spare_nodes, env=env, options=options) as made,
        Client(made.leader.run_dir) as client,
        Client(made.leader.run_dir) as watcher,
    ):
        job = Job(client, watcher, submit)
        try:
            yield job, made
        finally:
            if job.ended is None:
                job.stop()


def shard_servers(job: str) -> list[int]:
    """The processes that hold `job`'s replicas and serve its shards, of all nodes."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                command = (path / "cmdline").read_bytes().split(b"\0")
                if b"flashrecd.shards" in command and job.encode() in command:
                    found.append(int(path.name))
    return found
