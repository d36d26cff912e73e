"""The fork server: torch imported, a single thread; its forks become ranks in milliseconds.

    python -m flashrec.forkserver --fd N --preload flashrec.warm     a fork server, on an inherited socket
    python -m flashrec.forkserver --spec-fd N                        a fresh interpreter that becomes one rank

A rank is made by forking twice, so that the daemon (a child subreaper) inherits it and can wait for it. The
order below makes two promises: the daemon has the rank's name and pid *before* the rank becomes the daemon's
child, and the rank runs nothing of the user's before it *is* the daemon's child.

    server                         middle                     rank
      fork ------------------------> fork --------------------> waits for `go`
      <------ pid of rank ----------- waits for `hold`
      tells the daemon {"forked"}
      closes `hold` ---------------> exits                      re-parented to the daemon
      reaps it; writes `go` ----------------------------------> becomes the rank

If the server dies in between, the pipes close and both others exit by themselves.

A rank leads its own session, and is itself a child subreaper: whatever its script leaves behind stays under
it, so that at its death every descendant, also one in a session of its own, is handed to the daemon and
ended. The price: a process that the script abandoned, and that ends, is a zombie until the rank ends.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgpack

from flashrec.errors import EnvironmentFault, FlashrecError, ProtocolError
from flashrec.prctl import die_with_parent, set_name, set_subreaper
from flashrec.protocol.spawn import (
    EXIT_NEVER_STARTED,
    MAX_PACKET_BYTES,
    SPAWN_PROTOCOL,
    ProcSpec,
    read_spec_file,
    unpack_map,
)

# OpenBLAS starts its threads when it is loaded. One thread is what the server must keep; ranks forked from it
# have the caller's value back in their environment, for the processes they start, and numpy with one thread.
_EAGER_THREADS = "OPENBLAS_NUM_THREADS"


def main(arguments: list[str] | None = None) -> int:
    """Serve until the socket closes, or become the rank that was asked for; returns its exit code."""
    parser = argparse.ArgumentParser(prog="flashrec.forkserver")
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--fd", type=int, help="inherited SOCK_SEQPACKET socket of the daemon")
    role.add_argument("--spec-fd", type=int, help="inherited file with the specification of one process")
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE")
    options = parser.parse_args(arguments)
    _forget_working_directory()
    if options.spec_fd is not None:
        spec = read_spec_file(options.spec_fd)
        os.close(options.spec_fd)
    else:
        # The fork returns here, in the child, rather than calling the entry from inside the server's loop:
        # a rank's stack then holds nothing of the server, and it ends as any Python program ends.
        forked = _Server(socket.socket(fileno=options.fd)).serve(options.preload)
        if forked is None:
            return 0
        spec = forked
    return run(spec)


def run(spec: ProcSpec) -> int:
    """Make this process the one `spec` describes, call its entry, return the exit code."""
    try:
        become(spec)
    except OSError as error:
        print(f"flashrec: process {spec.proc!r} cannot start: {error}", file=sys.stderr, flush=True)
        return 1
    try:
        code = _entry(spec.entry)(spec)
    except (SystemExit, KeyboardInterrupt):
        raise  # the interpreter gives these their exit code, or death by SIGINT
    except BaseException as error:
        # Without our own frame, as the traceback of a script started directly.
        traceback = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return 1
    return 0 if code is None else code


def become(spec: ProcSpec) -> None:
    """Output files, working directory, environment and signals of a rank. Raises OSError."""
    sys.stdout.flush()
    sys.stderr.flush()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    # Standard error first: what goes wrong from here on is told there.
    for path, target in ((spec.stderr_path, 2), (spec.stdout_path, 1)):
        fd = os.open(path, flags, 0o600)
        os.dup2(fd, target)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        # A line is in the file when print() returns: a rank that is killed loses at most a part of one.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper in any program
    os.chdir(spec.cwd)
    os.environ.update(spec.env)
    _default_signals()
    set_name(spec.proc)
    set_subreaper(True)
    _seed_generators()


def _seed_generators() -> None:
    """Global generators that an interpreter seeds from the system, and that forks would otherwise share.

    Python's own does it by itself at a fork; torch makes those of accelerators later, in the fork.
    """
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _entry(name: str) -> Callable[[ProcSpec], int | None]:
    module, _, function = name.partition(":")
    entry: Callable[[ProcSpec], int | None] = getattr(importlib.import_module(module), function)
    return entry


def _forget_working_directory() -> None:
    """`python -m` puts the working directory first on the path; a file torch.py there is not torch."""
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


def _default_signals() -> None:
    """Signals as in an interpreter started from a shell, whatever the daemon's parent ignored or blocked."""
    ignored_by_python = {signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is None:
            continue  # installed by C code, as faulthandler's are
        # The C library keeps a few real-time signals for itself.
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN if number in ignored_by_python else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _import_with_one_thread(modules: list[str]) -> None:
    asked_for = os.environ.get(_EAGER_THREADS)
    os.environ[_EAGER_THREADS] = "1"
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        if asked_for is None:
            del os.environ[_EAGER_THREADS]
        else:
            os.environ[_EAGER_THREADS] = asked_for


def _reason_against_fork() -> str | None:
    """A fork copies only the calling thread; locks held by others would stay locked for ever in the child."""
    threads = os.listdir("/proc/self/task")
    if len(threads) == 1:
        return None
    names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
    return (
        f"the fork server has {len(threads)} threads where only one is safe to fork"
        f" (known to Python: {', '.join(names) or 'none'}; started by an imported module)"
    )


class _Pipe:
    """The two ends of a pipe, each closed once, at the latest when the block ends."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def __enter__(self) -> _Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_reader()
        self.close_writer()

    def close_reader(self) -> None:
        if self.reader >= 0:
            os.close(self.reader)
        self.reader = -1

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
        self.writer = -1


class _Server:
    """Answers the daemon's requests, one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def serve(self, preload: list[str]) -> ProcSpec | None:
        """None when the daemon has closed the socket; in a forked child, what it is to become."""
        # A daemon killed in the middle of an import: nobody would see for seconds that the socket is closed.
        die_with_parent(signal.SIGKILL)
        if self._daemon_is_gone():
            return None  # killed before that: no signal will come
        started = time.monotonic()
        try:
            _import_with_one_thread(preload)
        except Exception as error:
            self._tell({"failed": f"{type(error).__name__}: {error}"[:2000]})
            return None
        # What exists now lives as long as any fork; a collection in a fork must not touch it, and so copy it.
        gc.collect()
        gc.freeze()
        self._tell({"ready": (time.monotonic() - started) * 1000, "protocol": SPAWN_PROTOCOL})
        while (request := self._next_request()) is not None:
            proc, spec_fd = request
            try:
                spec = self._fork(read_spec_file(spec_fd))
            except (OSError, FlashrecError) as error:
                self._tell({"refused": proc, "reason": str(error)[:2000]})
            else:
                if spec is not None:
                    return spec
            finally:
                os.close(spec_fd)
        return None

    def _daemon_is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def _next_request(self) -> tuple[str, int] | None:
        try:
            data, fds, flags, _ = socket.recv_fds(self._sock, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return None
        if not data:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) != 1:
            raise ProtocolError(f"a request of {len(data)} bytes with {len(fds)} descriptors (flags {flags})")
        proc = unpack_map(data, MAX_PACKET_BYTES).get("fork")
        if not isinstance(proc, str):
            raise ProtocolError(f"a request that does not name the process to fork: {data[:200]!r}")
        return proc, fds[0]

    def _tell(self, message: dict[str, object]) -> bool:
        try:
            self._sock.sendall(msgpack.packb(message))
        except ConnectionError:
            return False  # the next receive finds the socket closed and ends the server
        return True

    def _fork(self, spec: ProcSpec) -> ProcSpec | None:
        """None in the server, `spec` in the process that is to become it."""
        if (reason := _reason_against_fork()) is not None:
            raise EnvironmentFault(reason)
        sys.stdout.flush()
        sys.stderr.flush()
        with _Pipe() as pid, _Pipe() as hold, _Pipe() as go:
            middle = os.fork()
            if middle == 0:
                self._middle(pid, hold, go)
                return spec
            pid.close_writer()
            rank = int(os.read(pid.reader, 32) or -errno.ECHILD)
            known = rank > 0 and self._tell({"forked": spec.proc, "pid": rank})
            hold.close_writer()
            os.waitpid(middle, 0)
            if rank < 0:
                raise OSError(-rank, os.strerror(-rank))
            if known:
                # Broken when the rank was killed meanwhile: the daemon sees that by itself.
                with contextlib.suppress(BrokenPipeError):
                    os.write(go.writer, b"g")
            return None

    def _middle(self, pid: _Pipe, hold: _Pipe, go: _Pipe) -> None:
        """The first child. Returns in the second one alone, once that may run; nothing else leaves it."""
        try:
            pid.close_reader()
            hold.close_writer()
            go.close_writer()
            try:
                rank = os.fork()
            except OSError as error:
                os.write(pid.writer, str(-(error.errno or errno.EAGAIN)).encode())
                os._exit(EXIT_NEVER_STARTED)
            if rank > 0:
                os.write(pid.writer, str(rank).encode())
                os.read(hold.reader, 1)
                os._exit(0)
            pid.close_writer()
            self._sock.close()
            os.setsid()
            if os.read(go.reader, 1):
                return
        except BaseException as error:
            # Not one frame further: the loop above this one is the server's.
            print(f"flashrec: fork server: {error!r}", file=sys.stderr, flush=True)
        os._exit(EXIT_NEVER_STARTED)


if __name__ == "__main__":
    sys.exit(main())
