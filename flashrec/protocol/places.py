"""Where a daemon and its command lines meet when they are told nothing else."""

import fcntl
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


def daemon_runs_in(run_dir: Path) -> bool:
    """Whether a live daemon has this run directory. Its lock tells, not its socket, which may be stale."""
    try:
        fd = os.open(run_dir / "daemon.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def control_address(run_dir: Path) -> str:
    """Where that daemon listens."""
    return f"ipc://{run_dir / 'control.sock'}"
