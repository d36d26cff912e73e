"""A process's exit code is known to who is not its parent, however it exits."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashrec.protocol.exitcode import exit_code

BEGIN = """
import os, signal, sys
from pathlib import Path
from flashrec.protocol.exitcode import leave_exit_code
assert leave_exit_code(Path(sys.argv[1]), "p1")
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit", 0),
        ("raise SystemExit('in words')", 1),
        ("raise ValueError", 1),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", 0),
        ("pid = os.fork()\nif pid == 0:\n    sys.exit(5)\nos.waitpid(pid, 0)\nsys.exit(4)", 4),
        ("pid = os.fork()\nif pid == 0:\n    sys.exit(5)\nos.waitpid(pid, 0)\nos.kill(os.getpid(), 9)", None),
        ("os.kill(os.getpid(), signal.SIGKILL)", None),
        ("os._exit(3)", None),
    ],
)
def test_what_a_process_leaves_is_its_exit_code(tmp_path: Path, end: str, code: int | None) -> None:
    assert exit_code(tmp_path, "p1") is None
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + end, str(tmp_path)], stderr=subprocess.DEVNULL, timeout=60
    )
    assert exit_code(tmp_path, "p1") == code
    known_to_the_parent = code if code is not None else 3 if "_exit" in end else -signal.SIGKILL
    assert done.returncode == known_to_the_parent
