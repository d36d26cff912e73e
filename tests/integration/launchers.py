"""Ranks that no daemon starts: torchrun and a shell, as real processes beside a real `flashrecd`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import recipe
from flashrec.cli.client import Client, ask_status
from flashrec.protocol.tag import TagReader, tag_path
from tests.integration.commands import Daemon, daemon, environment
from tests.leaks import wait_until

DEMO = Path(recipe.__file__).parent
RANKS = 2
PATIENCE_S = 60.0
TINY = ["--width", "32", "--layers", "2", "--context", "16", "--workers", "0", "--quiet", "--steps", "100"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]


def by_hand(rank: int, name: str) -> dict[str, str]:
    """What one sets oneself."""
    return {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "FLASHREC_JOB": name, "OMP_NUM_THREADS": "1"}


class Node:
    """A daemon, and what launchers start beside it."""

    def __init__(self, made: Daemon, log: Path) -> None:
        self.daemon = made
        self.log = log
        self.processes: list[subprocess.Popen[bytes]] = []
        self._client = Client(made.run_dir)

    def start(self, argv: list[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        env = environment({"FLASHREC_DIR": str(self.daemon.run_dir), **variables})
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def replace_daemon(self) -> None:
        """It is killed, and another started in its place."""
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.daemon = Daemon(self.daemon.run_dir)

    def torchrun(self, script: list[str], *options: str) -> subprocess.Popen[bytes]:
        # Sooner than by default it hears of a death, and starts all ranks again.
        return self.start(
            [*TORCHRUN, "--max-restarts", "3", "--monitor-interval", "0.05", *options, *script],
            {"OMP_NUM_THREADS": "1"},
        )

    def job(self) -> dict[str, Any] | None:
        job: dict[str, Any] | None = ask_status(self._client)["job"]
        return job

    def trained(self, steps: int) -> list[int]:
        """Waits until every rank lives, and rank 0 has committed so many steps; their pids."""
        found: list[int] = []

        def there() -> bool:
            job = self.job()
            ranks = job["ranks"] if job is not None else []
            found[:] = [rank["pid"] for rank in ranks if rank["status"] == "live" and rank["pid"] is not None]
            if len(found) < RANKS:
                return False
            assert job is not None
            tag = TagReader(tag_path(Path(job["shm_dir"]), 0))
            with contextlib.closing(tag):
                seen = tag.read()
            return seen is not None and seen.committed >= steps

        assert wait_until(there, PATIENCE_S), self.log.read_text()[-3000:]
        return list(found)

    def ends(self, process: subprocess.Popen[bytes]) -> int:
        return process.wait(PATIENCE_S)

    def recoveries(self) -> list[int]:
        """The versions that were gone on from."""
        return [line["step"] for line in self.daemon.events("plan")]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()
                process.wait()
        self._client.__exit__(None, None, None)
        self.daemon.stop()


@contextlib.contextmanager
def node(run_dir: Path, log: Path) -> Iterator[Node]:
    with daemon(run_dir) as made:
        one = Node(made, log)
        try:
            yield one
        finally:
            one.close()


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def outcomes(out: Path) -> list[dict[str, Any]]:
    """Each rank's, without what depends on time."""
    found = [json.loads((out / f"outcome.r{rank}.json").read_text()) for rank in range(RANKS)]
    return [{**one, "step_ms": None} for one in found]


def times_committed(out: Path, rank: int) -> dict[int, int]:
    """How often the rank says that it has committed each step."""
    counts: dict[int, int] = {}
    for line in (out / f"log.r{rank}.jsonl").read_text().splitlines():
        step = json.loads(line)["step"]
        counts[step] = counts.get(step, 0) + 1
    return counts
