"""A command line's connection to a daemon: synchronous, with a deadline on every answer."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from flashrec.cli.orphans import end_orphans, subreaper
from flashrec.errors import DaemonUnavailable, EnvironmentFault, UsageError, VersionMismatch
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from flashrec.protocol.jobdir import remove_stale
from flashrec.protocol.places import control_address, default_run_dir
from flashrec.protocol.places import daemon_runs_in as daemon_runs_in

ANSWER_S = 10.0
START_S = 20.0
LONGEST_PARENT = 70


class Client:
    """One DEALER socket. `receive()` gives None when nothing came in time, or a signal did."""

    def __init__(self, run_dir: Path, *, private: bool = False) -> None:
        self.run_dir = run_dir
        self.private = private  # the daemon is this command's own
        self._poller = zmq.Poller()
        self._signals = -1
        self._daemon = -1  # pidfd
        self.daemon_gone = False
        self._context = zmq.Context()
        self._socket = self._connect()

    def _connect(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.connect(control_address(self.run_dir))
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def watch_daemon(self, pid: int) -> None:
        """From now on `daemon_gone` says whether that process has ended, which ends a `receive()` at once."""
        try:
            self._daemon = os.pidfd_open(pid)
        except OSError:
            self.daemon_gone = True
            return
        self._poller.register(self._daemon, zmq.POLLIN)
        self.daemon_gone = False

    def reconnect(self) -> None:
        """To whichever daemon is there now: what was said to the last one, and not read, is void."""
        self._poller.unregister(self._socket)
        self._socket.close(linger=0)
        self._socket = self._connect()

    @contextlib.contextmanager
    def woken_by_signals(self) -> Iterator[None]:
        """Inside, a signal that Python handles ends a `receive()` at once. For the main thread."""
        self._signals, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller.register(self._signals, zmq.POLLIN)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            self._poller.unregister(self._signals)
            for fd in (self._signals, writer):
                os.close(fd)

    def send(self, message: msg.Message) -> None:
        self._socket.send(encode(message))

    def receive(self, timeout_s: float) -> msg.Message | None:
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._signals in ready:
            os.read(self._signals, 4096)
        if self._daemon in ready:
            self._forget_daemon()
            self.daemon_gone = True
        if self._socket not in ready:
            return None
        message: msg.TO_COMMAND = decode(self._socket.recv(), msg.TO_COMMAND)
        return message

    def ask(self, message: msg.Message, timeout_s: float = ANSWER_S) -> msg.Message:
        """Send, and wait for the answer. DaemonUnavailable, VersionMismatch, UsageError."""
        self.send(message)
        answer = self.receive(timeout_s)
        if answer is None:
            raise DaemonUnavailable(f"no daemon answers in {self.run_dir}; start one with `flashrecd`")
        if isinstance(answer, msg.Refused):
            raise (VersionMismatch if answer.kind == "version" else UsageError)(answer.reason)
        return answer

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget_daemon()
        self._socket.close(linger=0 if self.daemon_gone else None)
        self._context.term()

    def _forget_daemon(self) -> None:
        if self._daemon >= 0:
            self._poller.unregister(self._daemon)
            os.close(self._daemon)
        self._daemon = -1


def connect(run_dir: Path | None) -> Client:
    """To the daemon of `run_dir` (or the default one). DaemonUnavailable when none runs there."""
    directory = run_dir or default_run_dir()
    if not daemon_runs_in(directory):
        raise DaemonUnavailable(f"no daemon runs in {directory}; start one with `flashrecd`")
    return Client(directory)


@contextlib.contextmanager
def private_daemon() -> Iterator[Client]:
    """A daemon for this command alone, gone with it, whatever happens to either."""
    # The path of a socket is short, that of a temporary directory need not be.
    parent = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > LONGEST_PARENT else None
    with (
        tempfile.TemporaryDirectory(prefix="flashrec-", dir=parent, ignore_cleanup_errors=True) as folder,
        subreaper(),
    ):
        run_dir = Path(folder)
        log = run_dir / "daemon.log"
        with open(log, "wb") as output:
            daemon = subprocess.Popen(
                [sys.executable, "-m", "flashrecd", "--dir", str(run_dir), "--owner-pid", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the command, which passes it on
            )
        try:
            deadline = time.monotonic() + START_S
            while not (run_dir / "control.sock").exists():
                if daemon.poll() is not None or time.monotonic() > deadline:
                    text = log.read_text(errors="replace").strip()
                    raise EnvironmentFault(f"the daemon did not start: {text or 'no output'}")
                time.sleep(0.01)
            with Client(run_dir, private=True) as client:
                yield client
        except DaemonUnavailable as error:
            daemon.kill()
            number = -daemon.wait()
            how = f"{signal.Signals(number).name}" if number > 0 else f"exit code {-number}"
            text = log.read_text(errors="replace").strip()
            raise DaemonUnavailable(f"{error} ({how}){': ' + text if text else ''}") from None
        finally:
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            if daemon.returncode != 0:  # it was killed, and could not clear up
                end_orphans()
                remove_stale()


def ask_status(client: Client) -> dict[str, Any]:
    """The daemon's status document."""
    import json

    answer = client.ask(msg.AskStatus())
    assert isinstance(answer, msg.Status)
    document: dict[str, Any] = json.loads(answer.document)
    return document
