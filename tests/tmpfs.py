"""A filesystem that really is full, for a script."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_in_tmpfs(script: str, size: str, folder: Path) -> str:
    """What `script` prints, with a tmpfs of `size` mounted on `folder`, its only argument.

    In a mount namespace of its own, so that it needs no privilege where user namespaces are allowed; skips the test
    where they are not."""
    unshare = shutil.which("unshare")
    probe = [unshare or "unshare", "--user", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*probe, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine does not let us make a mount namespace")
    shell = f'mount -t tmpfs -o size={size} tmpfs "$1" && exec "{sys.executable}" -c "$2" "$1"'
    done = subprocess.run(
        [*probe, "sh", "-c", shell, "sh", folder, script],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
