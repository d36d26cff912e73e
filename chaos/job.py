"""A job under a daemon of its own, watched and struck from outside."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from chaos.cues import ENV_FOLDER
from flashrec.cli.client import Client, ask_status
from flashrec.cli.submit import submit_from_here
from flashrec.errors import DaemonUnavailable
from flashrec.protocol import messages as msg

ROOT = Path(__file__).parent.parent
DAEMON_START_S = 20.0
PRESENT_S = 1.0
POLL_S = 0.01


class JobStuck(AssertionError):
    """The job did not end in time; the message shows what was last heard of it."""


class Job:
    """Starts a daemon in `folder`, submits a script to it, and follows it to its end.

    `folder` is also where cues and outcomes are. After `close()` nothing of the job or its daemon is left; what
    would be left is an error.
    """

    def __init__(
        self,
        folder: Path,
        script: Path,
        arguments: Sequence[str] = (),
        *,
        world_size: int,
        standbys: int = 1,
        pull: str = "shm",
        start_method: str = "fork",
        max_restarts: int | None = None,
        suspect_after_s: float = 3.0,
        env: Mapping[str, str] | None = None,
        submit: Mapping[str, Any] | None = None,
    ) -> None:
        """`submit`: what else the job asks for, as in `submit_from_here`."""
        self.folder = folder
        self.world_size = world_size
        self.output: list[tuple[int, str, str]] = []
        self.events: list[dict[str, Any]] = []
        self.ended: msg.JobEnded | None = None
        self.final_status: dict[str, Any] = {}
        path = f"{ROOT}:{ROOT / 'daemon'}"
        self._env = {**os.environ, "PYTHONPATH": path, ENV_FOLDER: str(folder), **(env or {})}
        self._run_dir = folder / "run"
        self._daemon_log = open(folder / "daemon.log", "wb")  # noqa: SIM115  # until close()
        self.daemon = self._start_daemon()
        self._client = Client(self._run_dir)
        self._control = Client(self._run_dir)
        self._present_at = 0.0
        request = submit_from_here(
            str(script),
            world_size=world_size,
            args=arguments,
            cwd=str(folder),
            env=self._env,
            num_standbys=standbys,
            max_restarts=max_restarts,
            start_method=start_method,
            pull=pull,
            suspect_after_s=suspect_after_s,
            **(submit or {}),
        )
        answer = self._client.ask(request)
        assert isinstance(answer, msg.Submitted)
        self.shm_dir = Path(answer.shm_dir)

    def _start_daemon(self) -> subprocess.Popen[bytes]:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "flashrecd", "--dir", str(self._run_dir), "--owner-pid", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=self._daemon_log,
            stderr=self._daemon_log,
            env=self._env,
            start_new_session=True,
        )
        deadline = time.monotonic() + DAEMON_START_S
        while not (self._run_dir / "control.sock").exists():
            if daemon.poll() is not None or time.monotonic() > deadline:
                daemon.kill()
                raise DaemonUnavailable((self.folder / "daemon.log").read_text())
            time.sleep(POLL_S)
        return daemon

    # --- watching -----------------------------------------------------------------------------------------

    def poll(self, timeout_s: float = POLL_S) -> bool:
        """Take in what there is, for at most `timeout_s`. False once the job has ended."""
        now = time.monotonic()
        if now > self._present_at:
            self._present_at = now + PRESENT_S
            self._client.send(msg.Present("", len(self.output)))
        message = self._client.receive(timeout_s)
        while message is not None and self.ended is None:
            match message:
                case msg.Output():
                    self.output.append((message.rank, message.stream, message.data.decode(errors="replace")))
                case msg.Happened():
                    self.events.append(json.loads(message.line))
                case msg.JobEnded():
                    self.ended = message
                    self.final_status = ask_status(self._control)["last_job"]
                    return False
                case _:
                    pass
            message = self._client.receive(0)
        if self.daemon.poll() is not None and self.ended is None:
            raise JobStuck(f"the daemon is gone\n{self.story()}")
        return self.ended is None

    def until(self, done: Callable[[], object], deadline_s: float = 30.0, what: str = "") -> None:
        """Poll until `done()`. JobStuck when it does not come true in time, or the job ends before."""
        deadline = time.monotonic() + deadline_s
        while not done():
            running = self.poll()
            if done():
                return
            if not running or time.monotonic() > deadline:
                raise JobStuck(f"{what or done} did not come true\n{self.story()}")

    def follow(self, deadline_s: float = 60.0) -> msg.JobEnded:
        """To the job's end."""
        deadline = time.monotonic() + deadline_s
        while self.poll(0.2):
            if time.monotonic() > deadline:
                raise JobStuck(f"no end in {deadline_s:.0f} s\n{self.story()}")
        assert self.ended is not None
        return self.ended

    def status(self) -> dict[str, Any]:
        """The job's part of the status document."""
        document = ask_status(self._control)
        job: dict[str, Any] = document["job"] or document["last_job"]
        return job

    def pid(self, rank: int) -> int | None:
        """Of the process that holds `rank` now."""
        found: int | None = self.status()["ranks"][rank]["pid"]
        return found

    def standby_pids(self) -> list[int]:
        return [standby["pid"] for standby in self.status()["standbys"] if standby["pid"]]

    def text(self, stream: str = "stderr") -> str:
        return "\n".join(line for _, where, line in self.output if where == stream)

    def happened(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]

    def story(self, last: int = 60) -> str:
        """For a person who must find out what went wrong."""
        events = [f"{e['event']} rank={e['rank']} step={e['step']} {e['reason']}" for e in self.events]
        lines = [f"[{rank} {stream}] {line}" for rank, stream, line in self.output]
        text = "\n".join([*events[-last:], "--- output", *lines[-last:]])
        return f"{self.ended}\n{text}\n--- daemon\n{(self.folder / 'daemon.log').read_text()[-2000:]}"

    # --- striking -----------------------------------------------------------------------------------------

    def strike(self, rank: int, number: signal.Signals) -> int:
        """Send a signal to the process that holds `rank`; returns its pid."""
        pid = self.pid(rank)
        if pid is None:
            raise ProcessLookupError(f"rank {rank} has no process at the moment\n{self.story()}")
        os.kill(pid, number)
        return pid

    def stop(self, *, hard: bool = False) -> None:
        self._client.send(msg.StopJob(self.final_status.get("job") or self.status()["job"], hard))

    # --- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._client.__exit__(None, None, None)
        self._control.__exit__(None, None, None)
        try:
            self._end_daemon()
        finally:
            self._daemon_log.close()
        left = [str(self.shm_dir)] if self.shm_dir.exists() else []
        left += [f"process {pid}" for pid in _processes_of(self.folder)]
        if left:
            raise AssertionError(f"left behind by the job: {', '.join(left)}")

    def _end_daemon(self) -> None:
        self.daemon.terminate()
        try:
            self.daemon.wait(15)
        except subprocess.TimeoutExpired:
            self.daemon.kill()
            self.daemon.wait()
            raise

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with contextlib.suppress(AssertionError):
                self.close()
        else:
            self.close()


def _processes_of(folder: Path) -> list[int]:
    """Processes whose environment says that they belong to the job in `folder`."""
    mark = f"{ENV_FOLDER}={folder}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes() + b"\0":
                    found.append(int(entry.name))
    return found
