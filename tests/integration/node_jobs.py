"""A job on several nodes: daemons of one cluster on the loopback interface, each with a directory and shared memory of
its own, and the loss of one of them with all that is on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from chaos.cues import ENV_FOLDER, Cue, fired_path, write_cues
from chaos.recipe import Recipe
from flashrec.protocol.keys import ClusterKey
from flashrecd.supervise.descendants import descendants_of, process_stat
from tests.integration.commands import DEADLINE_S, FLASHREC, Daemon, daemon, environment
from tests.leaks import wait_until

RANKS_PER_NODE = 2
JOB_DEADLINE_S = 150.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class NodeJob:
    """Of `nodes`, the first of which leads: two of them have ranks, the others are spare."""

    def __init__(self, folder: Path, nodes: Sequence[Daemon], recipe: Recipe, cues: Sequence[Cue]) -> None:
        self.nodes = list(nodes)
        self.folder = folder
        self.out = folder / "out"
        self.out.mkdir()
        recipe.write(folder / "recipe.json")
        write_cues(folder, list(cues))
        self._shown = folder / "run.log"
        with open(self._shown, "wb") as shown:
            self.process = subprocess.Popen(
                [
                    *FLASHREC, "run", "--dir", str(nodes[0].run_dir), "--events", "--nnodes", "2",
                    "--spare-nodes", str(len(nodes) - 2), "--nproc-per-node", str(RANKS_PER_NODE),
                    "--replicas", "1", str(recipe.script), str(folder / "recipe.json"), str(self.out),
                ],
                env=environment({ENV_FOLDER: str(folder), "OMP_NUM_THREADS": "1"}),
                stdin=subprocess.DEVNULL,
                stdout=shown,
                stderr=shown,
                start_new_session=True,
            )  # fmt: skip

    # --- watching -----------------------------------------------------------------------------------------

    @property
    def leader(self) -> Daemon:
        return self.nodes[0]

    def story(self) -> str:
        """For a person who must find out what went wrong."""
        logs = "".join(f"--- {node.run_dir.name}\n{node.log.read_text()[-3000:]}" for node in self.nodes)
        return f"{self._shown.read_text()[-12000:]}\n{logs}"

    def until_fired(self, cue: str) -> None:
        fired = wait_until(
            lambda: fired_path(self.folder, cue).exists() or self.process.poll() is not None, DEADLINE_S
        )
        assert fired, self.story()
        assert self.process.poll() is None, f"{cue} was never met\n{self.story()}"

    def wait(self) -> None:
        """To its end, which must be a good one."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(JOB_DEADLINE_S)
        assert self.process.poll() == 0, f"exit code {self.process.poll()}\n{self.story()}"

    def status(self) -> dict[str, Any]:
        document = self.leader.status()
        job: dict[str, Any] = document["job"] or document["last_job"]
        return job

    def pid(self, rank: int) -> int:
        """Of the process that has it; on whichever node, all of which are this machine."""
        found: int = self.status()["ranks"][rank]["pid"]
        return found

    def home(self, rank: int) -> Daemon:
        """The node that has its process."""
        pid = self.pid(rank)
        alive = [node for node in self.nodes if node.process.poll() is None]
        return next(node for node in alive if pid in descendants_of(node.pid))

    def reasons(self, event: str) -> list[str]:
        return [line["reason"] for line in self.leader.events(event)]

    def redone(self, rank: int) -> list[int]:
        """The steps that `rank` committed more than once."""
        steps = [int(line.split()[0]) for line in (self.out / f"commits.r{rank}").read_text().splitlines()]
        return sorted({step for step in steps if steps.count(step) > 1})

    def outcomes(self) -> dict[str, str]:
        """Of each rank, what it held in the end."""
        return {path.name: path.read_text() for path in sorted(self.out.glob("outcome.r*.json"))}

    def losses(self) -> dict[str, dict[str, str]]:
        """By rank and step; a step that was done again must have the same."""
        found: dict[str, dict[str, str]] = {}
        for path in sorted(self.out.glob("losses.r*")):
            losses = found.setdefault(path.name, {})
            for line in path.read_text().splitlines():
                step, _, loss = line.partition(" ")
                assert losses.setdefault(step, loss) == loss, (
                    f"{path.name}: step {step} was redone differently"
                )
        return found

    # --- striking -----------------------------------------------------------------------------------------

    def lose(self, node: Daemon) -> None:
        """The power fails: first its memory goes, then every process of it."""
        pids = [node.pid, *descendants_of(node.pid)]
        shutil.rmtree(self._directory(pids))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.process.wait(10)
        # What the daemon started is a child of nobody who waits for it now; it is gone when the kernel says so.
        assert wait_until(
            lambda: all((stat := process_stat(pid)) is None or stat.state == "Z" for pid in pids)
        )

    @contextlib.contextmanager
    def daemon_again(self, number: int) -> Iterator[Daemon]:
        """On the node with this number, in the place of one that has died alone."""
        before = self.nodes[number]
        with daemon(before.run_dir, *before.args) as made:
            self.nodes[number] = made
            yield made

    def kill_daemon(self, number: int) -> None:
        """Nothing but the daemon."""
        self.nodes[number].process.kill()
        self.nodes[number].process.wait(10)

    @staticmethod
    def _directory(pids: Sequence[int]) -> Path:
        """In shared memory, of the node whose processes these are."""
        for pid in pids:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            if found := re.search(r"--root\0([^\0]+)\0", command):
                return Path(found[1])
        raise AssertionError("the node has no shard server")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def cluster(folder: Path, num_nodes: int, *, bulk: str | None = None) -> Iterator[list[Daemon]]:
    """The leader first. `bulk`: they have a key, and shards travel like this."""
    port = free_port()
    options: list[str] = []
    if bulk is not None:
        ClusterKey.generate().write(folder / "key")
        options = ["--key", str(folder / "key"), "--bulk", bulk]
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(
            daemon(folder / "n0", "--listen", f"127.0.0.1:{port}", "--name", "n0", *options)
        )
        nodes = [leader]
        for number in range(1, num_nodes):
            name = f"n{number}"
            nodes.append(
                stack.enter_context(
                    daemon(folder / name, "--join", f"127.0.0.1:{port}", "--name", name, *options)
                )
            )
        assert wait_until(lambda: len(joined(leader)) == num_nodes - 1), leader.log.read_text()
        yield nodes


def joined(leader: Daemon) -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        lines = map(json.loads, (leader.run_dir / "events.jsonl").read_text().splitlines())
        return {line["reason"].partition(",")[0] for line in lines if line["event"] == "node joined"}
    return set()


@contextlib.contextmanager
def running(folder: Path, nodes: Sequence[Daemon], recipe: Recipe, cues: Sequence[Cue]) -> Iterator[NodeJob]:
    job = NodeJob(folder, nodes, recipe, cues)
    try:
        yield job
    finally:
        job.close()
