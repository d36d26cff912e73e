"""Where a daemon and its command lines meet when they are told nothing else."""

import os
from pathlib import Path

ENV_DIR = "FLASHREC_DIR"


def default_run_dir() -> Path:
    """$FLASHREC_DIR, else $XDG_RUNTIME_DIR/flashrec, else a directory of this user's in /tmp."""
    if given := os.environ.get(ENV_DIR):
        return Path(given)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "flashrec"
    return Path(f"/tmp/flashrec-{os.getuid()}")
