"""The reference: the same training in plain torch, under torchrun, undisturbed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flashrec.cli.demo.settings import PROGRAMS, Settings
from flashrec.errors import EnvironmentFault

POLL_S = 0.1
START_S = 60.0
STEP_S = 30.0
END_S = 10.0
KEPT_CHARACTERS = 2000


def run_reference(settings: Settings, out: Path, on_step: Callable[[int], None]) -> float:
    """Run reference.py to its end and return the seconds it took; `on_step` is told how many steps are done.

    torchrun looks for a free port by itself. EnvironmentFault if the run fails or does not get on.
    """
    began = moved = time.monotonic()
    output = out.with_suffix(".output")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.ranks)]
    script = [str(PROGRAMS / "reference.py"), *settings.arguments(out)]
    with open(output, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, *launcher, *script],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the demo, which ends the run
        )
    done = 0
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            steps, done = done, _num_steps(out)
            now = time.monotonic()
            if steps != done:
                moved = now
                on_step(done)
            elif now - moved > (STEP_S if done else START_S) + START_S:
                raise EnvironmentFault(f"the reference run stands still at step {done}")
    finally:
        _end(process)
    if process.returncode:
        text = output.read_text(errors="replace")[-KEPT_CHARACTERS:]
        raise EnvironmentFault(f"the reference run failed with exit code {process.returncode}:\n{text}")
    return time.monotonic() - began


def _num_steps(out: Path) -> int:
    log = out / "log.r0.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its workers when it is asked to end."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
