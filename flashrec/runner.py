"""What a rank's process runs: connect to the daemon, wait for a rank if it has none, run the script, linger.

Called by the fork server in a fresh fork, or by a fresh interpreter; `spec.program` says what to run.
"""

import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flashrec import __version__
from flashrec.errors import ProtocolError, RecoveryFailed
from flashrec.link import DaemonLost, Link, attach
from flashrec.protocol import messages as msg
from flashrec.protocol.exitcode import say_exit_code
from flashrec.protocol.jobdir import JobDirectory
from flashrec.protocol.spawn import ProcSpec

if TYPE_CHECKING:
    from flashrec.engine import Engine

MAX_TRACEBACK = 20_000


def main(spec: ProcSpec) -> int:
    """The exit code of the script."""
    program = spec.program
    link = Link(_text(program, "address"), msg.Hello(spec.proc, os.getpid(), __version__))
    directory = JobDirectory.hold(Path(link.welcome.shm_dir))
    try:
        if link.welcome.rank is None and not _await_turn(link):
            return 0
        code = _run_script(program, link)
        _finish(code)
        say_exit_code(directory.path, link.proc, code)
        return code
    except BaseException as error:
        if not isinstance(error, SystemExit | KeyboardInterrupt):
            report(link, error)
            say_exit_code(directory.path, link.proc, 1)
        raise
    finally:
        _close(link)
        directory.leave()  # the daemon holds it too while it lives, and removes it in the end


def _await_turn(link: Link) -> bool:
    """A forked standby: until it is assigned a rank, or told to build. False: it is not needed any more."""
    link.send(msg.StandbyReady(link.proc, "forked"))
    while True:
        message = link.receive()
        if isinstance(message, msg.Assign):
            link.take_rank(message)
            return True
        if isinstance(message, msg.Prepare):
            return True
        if isinstance(message, DaemonLost):
            return False


def _run_script(program: Mapping[str, object], link: Link) -> int:
    attach(link)
    welcome = link.welcome
    os.environ.update(
        WORLD_SIZE=str(welcome.world_size),
        LOCAL_WORLD_SIZE=str(welcome.local_world_size),
        GROUP_RANK=str(welcome.node),
        GROUP_WORLD_SIZE=str(welcome.num_nodes),
    )
    if welcome.rank is not None:
        rank = str(welcome.rank)
        os.environ.update(RANK=rank, ROLE_RANK=rank, LOCAL_RANK=str(welcome.local_rank))
    if isinstance(umask := program.get("umask"), int):
        os.umask(umask & 0o777)  # the daemon's own is strict; what the script writes has the user's mode
    target, arguments = _text(program, "target"), program.get("args")
    if not isinstance(arguments, list | tuple):
        raise ProtocolError("the script's arguments are not a list")
    sys.argv = [target, *map(str, arguments)]
    try:
        if program.get("module"):
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _engine() -> "Engine | None":
    """The script's, if it has one. Asking must not import torch for a script that does without."""
    if "flashrec.session" not in sys.modules:
        return None
    from flashrec import session

    return session.current_engine()


def _finish(code: int) -> None:
    engine = _engine()
    if engine is not None and code == 0:
        engine.leave()


def report(link: Link, error: BaseException) -> None:
    """The daemon should know why before it sees the process end."""
    engine = _engine()
    _trim(error)
    text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    if not (isinstance(error, RecoveryFailed) and link.daemon_lost):
        link.send(msg.Failed(link.proc, engine.version if engine is not None else None, text))


def _trim(error: BaseException) -> None:
    """A traceback that starts in the user's script, as that of a script started directly."""
    frame = error.__traceback__
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while frame is not None and frame.tb_frame.f_code.co_filename in ours:
        frame = frame.tb_next
    if frame is not None:
        error.__traceback__ = frame


def _close(link: Link) -> None:
    engine = _engine()
    link.close()
    if engine is not None:
        engine.close()


def _text(program: Mapping[str, object], key: str) -> str:
    value = program.get(key)
    if not isinstance(value, str):
        raise ProtocolError(f"the program's {key!r} is not text")
    return value
