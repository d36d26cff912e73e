"""The daemon's hold on its shard server, which is a process of its own."""

import os
import sys
from pathlib import Path

from flashrecd.supervise import Supervisor

NAME = "shard server"


class ShardServer:
    """Starts and ends `python -m flashrecd.shards` for one job at a time."""

    def __init__(self, run_dir: Path, supervisor: Supervisor) -> None:
        self._socket = run_dir / "shards.sock"
        self._supervisor = supervisor
        self._running = False

    @property
    def address(self) -> str:
        return f"ipc://{self._socket}"

    def start(self, shm_dir: Path) -> None:
        argv = [sys.executable, "-m", "flashrecd.shards", "--root", str(shm_dir), "--bind", self.address]
        self._supervisor.start_program(NAME, argv, env=dict(os.environ), cwd="/")
        self._running = True

    def stop(self) -> None:
        if self._running:
            self._supervisor.kill_group(NAME)

    def exited(self, proc: str) -> bool:
        """Whether `proc` was the shard server; it is started anew with the next job."""
        if proc == NAME:
            self._running = False
        return proc == NAME
