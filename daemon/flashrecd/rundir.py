"""The daemon's run directory: one daemon in it at a time, and nobody else's eyes on it.

control.sock    ZeroMQ ROUTER for ranks and command lines
daemon.lock     held (flock) while a daemon lives; a dead one's lock is free, so nothing stale can block
daemon.json     pid and release of the daemon that holds the lock
events.jsonl    the event log
jobs/           what the jobs' processes print, unless they were given a directory of their own
"""

import contextlib
import fcntl
import json
import os
import stat
from pathlib import Path

from flashrec import __version__
from flashrec.errors import EnvironmentFault

MAX_SOCKET_PATH = 100  # sockaddr_un has room for 107 bytes


class RunDirectory:
    """Claims `path`; EnvironmentFault when that cannot be, with the reason. Close it to let another daemon in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if len(os.fsencode(str(self.socket_path))) > MAX_SOCKET_PATH:
            raise EnvironmentFault(f"the path of the run directory is too long for a socket: {path}")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.lstat()
        except OSError as error:
            raise EnvironmentFault(f"cannot make the run directory {path}: {error.strerror}") from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise EnvironmentFault(f"the run directory {path} is not a directory of this user")
        if found.st_mode & 0o077:
            raise EnvironmentFault(f"the run directory {path} is open to others; `chmod 700` it")
        try:
            self._lock = os.open(
                path / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise EnvironmentFault(f"cannot write in the run directory {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise EnvironmentFault(f"a daemon (pid {self._other_pid()}) runs in {path} already") from None
        # The lock is ours, so a socket that lies here belongs to nobody any more.
        try:
            self.socket_path.unlink(missing_ok=True)
            (path / "daemon.json").write_text(json.dumps({"pid": os.getpid(), "release": __version__}))
            (path / "jobs").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self.close()
            raise EnvironmentFault(f"cannot write in the run directory {path}: {error.strerror}") from None

    @property
    def socket_path(self) -> Path:
        return self.path / "control.sock"

    @property
    def address(self) -> str:
        return f"ipc://{self.socket_path}"

    def _other_pid(self) -> object:
        try:
            return json.loads((self.path / "daemon.json").read_text())["pid"]
        except (OSError, ValueError, KeyError, TypeError):
            return "unknown"

    def close(self) -> None:
        for path in (self.socket_path, self.path / "daemon.json"):
            with contextlib.suppress(OSError):
                path.unlink()
        os.close(self._lock)
