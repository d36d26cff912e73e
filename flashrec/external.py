"""A rank under another launcher than `flashrec run`: torchrun, Slurm, a shell.

Nobody started this process for flashrec, so it introduces itself to the node's daemon, and tells it how the script
ended. What `runner.py` does around a script happens here inside it: at init(), and when the interpreter exits.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from flashrec import __version__
from flashrec.errors import DaemonUnavailable, ProtocolError, UsageError
from flashrec.link import Link, attach
from flashrec.protocol import messages as msg
from flashrec.protocol.exitcode import leave_exit_code
from flashrec.protocol.jobdir import JobDirectory
from flashrec.protocol.places import ENV_DIR, control_address, daemon_runs_in, default_run_dir
from flashrec.runner import report

if TYPE_CHECKING:
    from flashrec.engine import Engine

ENV_JOB = "FLASHREC_JOB"
HEARD_S = 2.0
NO_RUN_ID = "none"  # torchrun's, when it was given no --rdzv-id


def join_from_environment() -> Link | None:
    """The link to the node's daemon, for the rank that the environment names; None when it names none.

    Raises DaemonUnavailable, VersionMismatch, UsageError, RecoveryFailed."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if _number("LOCAL_WORLD_SIZE", world_size) != world_size:
        raise UsageError(
            f"{world_size} ranks, {os.environ['LOCAL_WORLD_SIZE']} of them on this node: all ranks of a job must be on "
            "one node"
        )
    run_dir = default_run_dir()
    if not daemon_runs_in(run_dir):
        raise DaemonUnavailable(
            f"no daemon runs in {run_dir}: start `flashrecd` on this node, before the launcher and outside of it; "
            f"where it has a directory of its own (`flashrecd --dir DIR`), set {ENV_DIR}=DIR for the ranks too"
        )
    join = msg.Join(
        job=_job_name(),
        target=os.path.abspath(sys.argv[0]),
        rank=rank,
        world_size=world_size,
        pid=os.getpid(),
        launcher_pid=os.getppid(),
        restarted=_number("TORCHELASTIC_RESTART_COUNT", 0) > 0,
        release=__version__,
    )
    # Held while the daemon decides: only a process that has it open can have sent this pid (a container has its own).
    proof = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        link = Link(control_address(run_dir), join)
    finally:
        os.close(proof)
    if link.welcome.replacement:
        _say(f"rank {rank} is back in job {join.job!r}; its state comes from shared memory")
    elif join.restarted and rank == 0:
        _say(
            f"nothing is kept of job {join.job!r} that its ranks could go on from: it starts from the beginning"
        )
    attach(link)
    return link


def _say(text: str) -> None:
    print(f"flashrec: {text}", file=sys.stderr, flush=True)


def _job_name() -> str:
    """The same for every rank of a job, and when it is started again."""
    if name := os.environ.get(ENV_JOB):
        return name
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", NO_RUN_ID)
    if run_id != NO_RUN_ID:
        return run_id
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and port:
        return f"{address}:{port}"
    raise UsageError(
        f"the job needs a name by which a rank that is started again finds it: set {ENV_JOB}, or MASTER_ADDR and "
        "MASTER_PORT, to the same for all ranks"
    )


def _number(variable: str, default: int | None = None) -> int:
    text = os.environ.get(variable)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(f"{variable} is not a number: {text!r}") from None


def report_the_end(link: Link, engine: "Callable[[], Engine | None]") -> None:
    """From now on the daemon hears how the script ends; a script that ends well lingers until every rank has. What
    registered an exit handler before is closed after that."""
    _Ending(link, engine)


class _Ending:
    """The hooks of one process."""

    def __init__(self, link: Link, engine: "Callable[[], Engine | None]") -> None:
        self._link = link
        self._engine = engine
        self._pid = os.getpid()
        self._directory = JobDirectory.hold(Path(link.welcome.shm_dir))
        leave_exit_code(self._directory.path, link.proc)
        self._failed = self._interrupted = False
        self._code = 0
        self._next_hook = sys.excepthook
        self._next_exit = sys.exit
        sys.excepthook = self._on_exception
        # Where the C library does not leave the code: it is read off where nearly all come from.
        sys.exit = self._on_sys_exit
        atexit.register(self._at_exit)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self._pid:
            self._failed = True
            self._interrupted = isinstance(error, KeyboardInterrupt)
            if not isinstance(error, KeyboardInterrupt):
                self._report(error)
        self._next_hook(kind, error, trace)

    def _report(self, error: BaseException) -> None:
        report(self._link, error)
        self._link.send(msg.Ending(self._link.proc, 1))

    def _on_sys_exit(self, status: Any = None, /) -> Any:
        if os.getpid() == self._pid and threading.current_thread() is threading.main_thread():
            self._code = status if isinstance(status, int) else int(status is not None)
        self._next_exit(status)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a fork of the script's
        engine = self._engine()
        try:
            if not self._failed:
                self._leave(engine)
        finally:
            self._be_heard()
            self._link.close()
            if engine is not None:
                engine.close()
            self._directory.leave()

    def _be_heard(self) -> None:
        """Until the daemon has heard the code: seeing the process end first, it could not tell it from a death."""
        deadline = time.monotonic() + HEARD_S
        while not self._interrupted and not self._link.daemon_lost and time.monotonic() < deadline:
            with contextlib.suppress(ProtocolError):  # what it said matters no more
                if isinstance(self._link.receive(HEARD_S / 10), msg.Released):
                    return

    def _leave(self, engine: "Engine | None") -> None:
        try:
            # Whatever the code: it may be that of an exit which the script caught. One that leaves its loop while
            # the others go on is found out by them.
            if engine is not None:
                engine.leave()
            self._link.send(msg.Ending(self._link.proc, self._code))
        except BaseException as error:
            traceback.print_exc()
            self._report(error)
            self._be_heard()
            self._link.close()
            self._directory.leave()
            # An exception in an exit handler would leave the exit code what it was: 0.
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)
