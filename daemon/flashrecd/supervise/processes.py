"""The processes a daemon watches: how they begin, how their end is noticed, and that nothing of them is left.

Most are started here. An adopted one was started by another program (by torchrun, or by a daemon that has died):
it is watched and signalled alike, but how it ended is that program's to know, and so is what it leaves behind.

Every process is watched through a pidfd, never through its number, which may be another's by the time a
signal is sent. The end of a process is told at once, in the event loop's next turn; the zombie is kept until
then, so its number, and that of its process group, cannot be taken in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashrec.errors import EnvironmentFault, ProtocolError, UsageError
from flashrec.prctl import is_subreaper, set_subreaper
from flashrec.protocol.spawn import ProcSpec, spec_file
from flashrecd.supervise.descendants import (
    children_of,
    process_stat,
)
from flashrecd.supervise.forkclient import ForkClient, ForkServerGone, Launch

log = logging.getLogger(__name__)

OnExit = Callable[[str, int | None, int | None], None]
"""`(proc, returncode, signal)`: one of the two last is None; both, when something else took the status."""

# The status of a forked process is ours only once its parent in the fork server is gone, which is a matter of
# a scheduling delay. After as many looks, a millisecond apart, it counts as lost.
_STATUS_TRIES = 1000
# The kernel's list of children may have missed one while another was exiting.
_LATE_SWEEP_S = 0.05
# For SIGKILL to do its work; what lives longer is stuck inside the kernel.
_KILL_TIMEOUT_S = 5.0


@dataclass(eq=False)
class _Child:
    proc: str
    pid: int
    pidfd: int
    popen: subprocess.Popen[bytes] | None = None
    """Kept so that the interpreter does not wait for the process behind our back."""
    server: ForkClient | None = None
    status_tries: int = 0
    adopted: bool = False
    leads_session: bool = True


class Supervisor:
    """Starts processes in one asyncio loop and calls `on_exit` for each that ends.

    `on_exit` runs in the loop, must not block, and may start and signal processes. Descendants of an ended
    process are killed right after it; `settled` waits for them. Children that this process had before the
    supervisor are left alone. Later ones must be started through `start_program`: a child nobody knows is
    taken for what a dead rank has left behind.
    """

    def __init__(self, on_exit: OnExit) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._children: dict[int, _Child] = {}
        self._by_name: dict[str, _Child] = {}
        self._starting: set[str] = set()
        self._servers: dict[str, ForkClient] = {}
        self._orphans: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._late_sweep: asyncio.TimerHandle | None = None
        self._closing = False
        self._foreign = {pid: process_stat(pid) for pid in children_of(os.getpid())}
        self._was_subreaper = is_subreaper()
        set_subreaper(True)

    @property
    def pids(self) -> dict[str, int]:
        """Of every process that lives, fork servers aside."""
        return {proc: child.pid for proc, child in self._by_name.items()}

    @property
    def fork_server_pids(self) -> dict[str, int]:
        """Of the servers in use, by the name of their launch."""
        used = {client: name for name, client in self._servers.items()}
        return {used[child.server]: pid for pid, child in self._children.items() if child.server in used}

    async def start_fork_server(self, launch: Launch) -> float:
        """Start it unless it runs; returns, once it is ready, how long its imports took, in ms.

        Raises EnvironmentFault (an import failed, no interpreter there), VersionMismatch, or UsageError when
        a server of that name was launched differently.
        """
        return await self._server(launch).ready()

    def stop_fork_server(self, name: str) -> None:
        """The processes it made live on."""
        if (client := self._servers.get(name)) is not None:
            client.close("it was stopped")

    async def spawn(self, spec: ProcSpec, launch: Launch, *, fresh: bool = False) -> int:
        """Start a process and return its pid: a fork of the launch's server, or a fresh interpreter.

        A fork server that has died is started again, once; processes it made are not affected. Cancelling
        the call kills a process that was already on its way.

        Raises UsageError (name in use), ForkRefused, ForkServerGone, or EnvironmentFault.
        """
        if spec.proc in self._by_name or spec.proc in self._starting:
            raise UsageError(f"there is a process {spec.proc!r} already")
        if self._closing:
            raise EnvironmentFault(f"process {spec.proc!r} was not started: the supervisor is shutting down")
        if fresh:
            return self._spawn_fresh(spec, launch)
        self._starting.add(spec.proc)
        try:
            try:
                return await self._server(launch).fork(spec)
            except ForkServerGone as error:
                log.warning("%s; starting another", error)
                return await self._server(launch).fork(spec)
        finally:
            self._starting.discard(spec.proc)

    def _spawn_fresh(self, spec: ProcSpec, launch: Launch) -> int:
        fd = spec_file(spec)
        try:
            return self.start_program(
                spec.proc,
                [launch.python, "-m", "flashrec.forkserver", "--spec-fd", str(fd)],
                env={**launch.env, **spec.env},
                cwd=launch.cwd,
                stdout_path=spec.stdout_path,
                stderr_path=spec.stderr_path,
                pass_fds=(fd,),
            )
        finally:
            os.close(fd)

    def start_program(
        self,
        proc: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        stdout_path: str | Path | None = None,
        stderr_path: str | Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> int:
        """Run any program, in a session of its own, watched as a rank is; returns its pid.

        Output is appended to the files (None: thrown away). Raises UsageError, EnvironmentFault.
        """
        if proc in self._by_name or proc in self._starting:
            raise UsageError(f"there is a process {proc!r} already")
        if self._closing:
            raise EnvironmentFault(f"process {proc!r} was not started: the supervisor is shutting down")
        child = self._popen(proc, argv, env, cwd, (stdout_path, stderr_path), pass_fds)
        self._by_name[proc] = child
        return child.pid

    def adopt(
        self, proc: str, pid: int, *, start_ticks: int | None = None, leads_session: bool = False
    ) -> None:
        """Watch the running process `pid`, which another program started. Its end is told as `(proc, None, None)`.

        The caller knows that `pid` is alive now and is the process meant: it has just sent a message, say, or it was
        started at `start_ticks`. `leads_session`: a supervisor started it, so that its session is its own, and is
        ended with it.

        Raises UsageError (name in use, or the process is watched already), EnvironmentFault (there is no such
        process, or it is another user's).
        """
        if proc in self._by_name or proc in self._starting:
            raise UsageError(f"there is a process {proc!r} already")
        if pid in self._children or pid == os.getpid():
            raise UsageError(f"process {pid} is watched already")
        if self._closing:
            raise EnvironmentFault(f"process {pid} was not adopted: the supervisor is shutting down")
        try:
            child = self._watch(proc, pid)
        except (OSError, OverflowError, ValueError):
            raise EnvironmentFault(f"there is no process {pid} that could be adopted") from None
        child.adopted, child.leads_session = True, leads_session
        stat = process_stat(pid)
        try:
            if start_ticks is not None and (stat is None or stat.start_ticks != start_ticks):
                raise ProcessLookupError
            signal.pidfd_send_signal(child.pidfd, 0)
        except OSError:  # it has ended, or a signal to it is not ours to send
            self._loop.remove_reader(child.pidfd)
            os.close(child.pidfd)
            del self._children[pid]
            raise EnvironmentFault(f"process {pid} has ended, or is another user's") from None
        self._by_name[proc] = child

    def signal(self, proc: str, number: int) -> bool:
        """Send a signal to the process itself; False when there is none of that name (any more)."""
        child = self._by_name.get(proc)
        return child is not None and _send(child, number)

    def kill_group(self, proc: str) -> bool:
        """SIGKILL to the process and its group, also when it is stopped; the rest follows when it is dead. To an
        adopted process alone, unless it leads its session: it may share its group with the program that started it."""
        child = self._by_name.get(proc)
        if child is None:
            return False
        if child.adopted and child.leads_session:
            self._end_session(child)
        elif not child.adopted:
            # The zombie is kept until we have seen it, so the number is still this group's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        return _send(child, signal.SIGKILL)

    async def settled(self, timeout_s: float) -> bool:
        """Wait until nothing is left of the processes that have ended; False when the time was not enough."""
        self._sweep()
        return await self._until(lambda: not self._orphans, timeout_s)

    async def shutdown(self, grace_s: float) -> list[str]:
        """End everything: SIGTERM, and after `grace_s` SIGKILL. Returns what SIGKILL could not end (stuck in
        the kernel, nearly always on a dead file system). The supervisor is of no use afterwards."""
        self._closing = True
        for child in list(self._by_name.values()):
            _send(child, signal.SIGTERM)
            _send(child, signal.SIGCONT)  # a stopped process cannot end by itself
        await self._until(lambda: not self._by_name, grace_s)
        for proc in list(self._by_name):
            self.kill_group(proc)
        for client in list(self._servers.values()):
            client.close("the supervisor is shutting down")
        await self._until(lambda: not self._children, _KILL_TIMEOUT_S)
        await self.settled(_KILL_TIMEOUT_S)
        left = [f"{child.proc} (pid {child.pid})" for child in self._children.values()]
        left += [f"a descendant (pid {pid})" for pid in self._orphans]
        if self._late_sweep is not None:
            self._late_sweep.cancel()
        for pidfd in [child.pidfd for child in self._children.values()] + list(self._orphans.values()):
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        set_subreaper(self._was_subreaper)
        return left

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()
        return done()

    def _server(self, launch: Launch) -> ForkClient:
        client = self._servers.get(launch.name)
        if client is not None:
            if client.launch != launch:
                raise UsageError(f"the fork server of job {launch.name!r} was launched differently")
            return client
        if self._closing:
            raise EnvironmentFault("no fork server was started: the supervisor is shutting down")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [launch.python, "-m", "flashrec.forkserver", "--fd", str(theirs.fileno())]
        for module in launch.preload:
            argv += ["--preload", module]
        with theirs:
            try:
                child = self._popen(
                    f"fork server of job {launch.name!r}",
                    argv,
                    launch.env,
                    launch.cwd,
                    (launch.log_path, launch.log_path),
                    (theirs.fileno(),),
                )
            except BaseException:
                ours.close()
                raise
        client = ForkClient(launch, ours, self._forked, self._server_gone)
        child.server = client
        self._servers[launch.name] = client
        return client

    def _server_gone(self, client: ForkClient) -> None:
        if self._servers.get(client.launch.name) is client:
            del self._servers[client.launch.name]
        for child in self._children.values():
            if child.server is client:
                _send(child, signal.SIGKILL)

    def _forked(self, client: ForkClient, proc: str, pid: int) -> None:
        if pid in self._children:
            raise ProtocolError(f"process {proc!r} with the pid of {self._children[pid].proc!r}")
        try:
            child = self._watch(proc, pid)
        except OSError:
            # Nobody has waited for it, so the number is still its own.
            os.kill(pid, signal.SIGKILL)
            raise
        self._by_name[proc] = child
        if self._closing or not client.wants(proc):
            self.kill_group(proc)

    def _popen(
        self,
        proc: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        output: tuple[str | Path | None, str | Path | None],
        pass_fds: Sequence[int],
    ) -> _Child:
        try:
            with contextlib.ExitStack() as files:
                out, err = (files.enter_context(open(path or os.devnull, "ab")) for path in output)
                popen = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=env,
                    cwd=cwd,
                    pass_fds=pass_fds,
                    start_new_session=True,
                )
        except OSError as error:
            raise EnvironmentFault(f"cannot start {proc}: {error}") from error
        try:
            child = self._watch(proc, popen.pid)
        except OSError as error:
            popen.kill()
            popen.wait()
            raise EnvironmentFault(f"cannot watch {proc}: {error}") from error
        child.popen = popen
        return child

    def _watch(self, proc: str, pid: int) -> _Child:
        child = _Child(proc, pid, os.pidfd_open(pid))
        self._children[pid] = child
        self._loop.add_reader(child.pidfd, self._ended, child)
        return child

    def _ended(self, child: _Child) -> None:
        """The pidfd is readable: tell, then clear up."""
        try:
            # Looked at, not yet taken: the zombie keeps the number from being used again.
            status = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is None:
                return
        except ChildProcessError:
            self._loop.remove_reader(child.pidfd)
            child.status_tries += 1
            if child.status_tries <= _STATUS_TRIES and not child.adopted:
                self._loop.call_later(0.001, self._ended, child)
                return
            status = None
        returncode = number = None
        if status is not None and status.si_code == os.CLD_EXITED:
            returncode = status.si_status
        elif status is not None:
            number = status.si_status
        self._loop.remove_reader(child.pidfd)
        try:
            if child.server is not None:
                child.server.drain()
                child.server.close(f"it ended with {_describe(returncode, number)}")
            else:
                if child.adopted and child.leads_session:
                    self._end_session(child)
                elif not child.adopted:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(child.pid, signal.SIGKILL)
                del self._by_name[child.proc]
                self._on_exit(child.proc, returncode, number)
        finally:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOHANG)
            os.close(child.pidfd)
            del self._children[child.pid]
            if child.popen is not None:
                child.popen.returncode = -number if number is not None else returncode or 0
            self._changed.set()
            self._sweep()
            if self._late_sweep is not None:
                self._late_sweep.cancel()
            self._late_sweep = self._loop.call_later(_LATE_SWEEP_S, self._sweep)

    def _end_session(self, leader: _Child) -> None:
        """What an adopted process has started, and not sent into a session of its own. Its zombie is not ours to keep,
        so its number may be another's: then nothing of the session is left, for a number in use as a session's is not
        given away."""
        for name in os.listdir("/proc"):
            stat = process_stat(int(name)) if name.isdecimal() else None
            if stat is None or stat.session != leader.pid or int(name) == leader.pid:
                continue
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(int(name))
                try:
                    again = process_stat(int(name))
                    if (
                        again is not None
                        and again.session == leader.pid
                        and again.start_ticks == stat.start_ticks
                    ):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                finally:
                    os.close(pidfd)

    def _sweep(self) -> None:
        """Kill the children nobody started: what dead processes have left behind."""
        children = children_of(os.getpid())
        # We are told of a fork before it can be our child. So whoever is in the list is known after this;
        # the other way round, a process forked in between would be taken for an orphan.
        for client in list(self._servers.values()):
            client.drain()
        for pid in children:
            if pid in self._children or pid in self._orphans:
                continue
            stat = process_stat(pid)
            foreign = self._foreign.get(pid)
            if stat is None or (foreign is not None and foreign.start_ticks == stat.start_ticks):
                continue
            log.info("killing %s (pid %d), left behind by a process that ended", stat.name, pid)
            with contextlib.suppress(ProcessLookupError):
                self._orphans[pid] = pidfd = os.pidfd_open(pid)
                self._loop.add_reader(pidfd, self._orphan_ended, pid)
                with contextlib.suppress(PermissionError):  # it has changed its user
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _orphan_ended(self, pid: int) -> None:
        pidfd = self._orphans.pop(pid)
        self._loop.remove_reader(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        os.close(pidfd)
        # Its own children are ours now.
        self._sweep()
        self._changed.set()


def _send(child: _Child, number: int) -> bool:
    try:
        signal.pidfd_send_signal(child.pidfd, number)
    except ProcessLookupError:
        return False
    return True


def _describe(returncode: int | None, number: int | None) -> str:
    if number is not None:
        return f"signal {signal.Signals(number).name}"
    return "an unknown status" if returncode is None else f"exit code {returncode}"
