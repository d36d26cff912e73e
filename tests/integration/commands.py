"""`flashrecd` and `flashrec` as real processes, for the tests of both."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashrecd.supervise.descendants import descendants_of
from tests.leaks import wait_until

ROOT = Path(__file__).parents[2]
FLASHREC = [sys.executable, "-c", "from flashrec.cli import main; main()"]
# Ranks that need no torch: the process they are forked from starts in a fraction of a second.
LIGHT = ("--preload", "flashrec.link")
DEADLINE_S = 60.0


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """No daemon of this user's is found, and nothing is buffered that a test waits for."""
    env = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    env["FLASHREC_DIR"] = os.path.join(env["TMPDIR"], "nobody")
    return {**env, **(extra or {})}


def flashrec(
    *args: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run(
        [*FLASHREC, *map(str, args)],
        cwd=cwd,
        env=environment(env),
        capture_output=True,
        text=True,
        errors="surrogateescape",
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE_S,
    )


def run(*args: str | Path, cwd: Path | None = None, standby: int = 0) -> subprocess.CompletedProcess[str]:
    """`flashrec run` of something that needs no torch."""
    return flashrec("run", *LIGHT, "--standby", str(standby), *args, cwd=cwd)


@contextlib.contextmanager
def started(*args: str | Path, stdout: Any = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """The command, under way; killed at the end if it still is."""
    process = subprocess.Popen(
        [*FLASHREC, *map(str, args)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# A rank of a job that lives until the test lets it go; says where it is in a file of its own.
WAITING = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
(here / f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
while not (here / "go").exists():
    time.sleep(0.01)
print("went", flush=True)
"""


def ranks_are_there(folder: Path, num_ranks: int) -> list[int]:
    """Waits until that many ranks of WAITING run; their pids."""
    paths = [folder / f"rank{rank}" for rank in range(num_ranks)]
    assert wait_until(lambda: all(path.exists() and path.read_text() for path in paths), 30)
    return [int(path.read_text()) for path in paths]


class Daemon:
    """`flashrecd --dir DIR`."""

    def __init__(self, run_dir: Path, *args: str) -> None:
        self.run_dir = run_dir
        self.args = args
        self.log = run_dir.with_name(run_dir.name + ".log")
        began = time.monotonic()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flashrecd", "--dir", str(run_dir), *args],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert wait_until(lambda: self._listens() or self.process.poll() is not None, 20)
        self.start_s = time.monotonic() - began
        assert self.process.poll() is None, self.log.read_text()

    def _listens(self) -> bool:
        """This one, not one that has died in the same directory."""
        with contextlib.suppress(OSError, ValueError):
            held_by = json.loads((self.run_dir / "daemon.json").read_text())["pid"]
            return bool(held_by == self.process.pid) and (self.run_dir / "control.sock").exists()
        return False

    @property
    def pid(self) -> int:
        return self.process.pid

    def run(self, *args: str | Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """`flashrec run`, under way, of something that needs no torch."""
        return started("run", "--dir", self.run_dir, *LIGHT, "--standby", "0", *args)

    def status(self) -> dict[str, Any]:
        answer = flashrec("status", "--json", "--dir", self.run_dir)
        assert answer.returncode == 0, answer.stderr
        document: dict[str, Any] = json.loads(answer.stdout)
        return document

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.run_dir / "events.jsonl").read_text().splitlines())
        return [line for line in lines if line["event"] == event]

    def rss_kib(self) -> int:
        return rss_kib(self.pid)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=15) == 0, self.log.read_text()
        said = [
            line
            for line in self.log.read_text().splitlines()
            if not line.startswith("flashrecd: no leader at ")
        ]
        assert said == []


@contextlib.contextmanager
def daemon(run_dir: Path, *args: str) -> Iterator[Daemon]:
    """Ends well, and without a word, unless the test has killed it."""
    made = Daemon(run_dir, *args)
    try:
        yield made
        if made.process.poll() is None:
            made.stop()
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()
        made.log.unlink(missing_ok=True)  # two daemons of a test may have followed each other


def rss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    raise AssertionError("no VmHWM")


def private_daemon_of(process: subprocess.Popen[str]) -> int:
    """The pid of the daemon that a `flashrec run` brought."""
    for pid in descendants_of(process.pid):
        with contextlib.suppress(OSError):
            if b"flashrecd\0--dir" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise AssertionError("no daemon")
