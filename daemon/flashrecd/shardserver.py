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
        self._wanted: Path | None = None  # the next job's directory, while the last job's server still ends

    @property
    def address(self) -> str:
        return f"ipc://{self._socket}"

    def start(self, shm_dir: Path) -> None:
        """Serve `shm_dir`; at once, or as soon as the server of the job before is gone."""
        if self._running:
            self._wanted = shm_dir
            return
        argv = [sys.executable, "-m", "flashrecd.shards", "--root", str(shm_dir), "--bind", self.address]
        argv += ["--owner-pid", str(os.getpid())]
        self._supervisor.start_program(NAME, argv, env=dict(os.environ), cwd="/")
        self._running = True

    def stop(self) -> None:
        self._wanted = None
        if self._running:
            self._supervisor.kill_group(NAME)

    def exited(self, proc: str) -> bool:
        """Whether `proc` was the shard server; one that is wanted by then is started."""
        if proc != NAME:
            return False
        self._running = False
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self.start(wanted)
        return True
