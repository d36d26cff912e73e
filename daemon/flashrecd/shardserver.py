"""The daemon's hold on its shard server, which is a process of its own.

Where a job runs on several nodes it serves the others by TCP, and keeps replicas for them. If it dies it is started
again, at the same address: what it keeps lies in files. If the daemon dies it goes on, for a step cannot do without it,
and the next daemon finds it by its record.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from flashrec.errors import EnvironmentFault, FlashrecError
from flashrec.protocol import records as rec
from flashrec.protocol.jobfiles import JobFiles, lives
from flashrec.state.shardwire import Discard, Fence, Forget, Request, Stats, pack_request, unpack_header
from flashrecd.cluster.info import format_address, resolve
from flashrecd.cluster.options import ClusterOptions
from flashrecd.core.state import Kept
from flashrecd.supervise import Supervisor
from flashrecd.supervise.descendants import process_stat

NAME = "shard server"
READY_S = 20.0
ANSWER_S = 10.0
LOOK_S = 0.02
WATCH_S = 2.0
SILENT_S = 10.0
MAX_RESTARTS = 20
"""In a row: of servers that ended within LASTED_S."""
LASTED_S = 10.0


@dataclass(frozen=True)
class _Serving:
    """What the server is started for. `cluster` None: a job on this node alone."""

    shm_dir: Path
    job: str
    cluster: ClusterOptions | None
    linger_s: float


class ShardServer:
    """Starts and ends `python -m flashrecd.shards` for one job at a time. `log(event, reason)`: the event log."""

    def __init__(self, run_dir: Path, supervisor: Supervisor, log: Callable[[str, str], None]) -> None:
        self._socket_path = run_dir / "shards.sock"
        self._output = run_dir / "shards.out"
        self._supervisor = supervisor
        self._log = log
        self._serving: _Serving | None = None
        self._running = False
        self._is_next = False  # what it is to serve comes after what it serves now
        self._has_failed = False
        self._restarts = 0
        self._started_at = 0.0
        self._tcp = ""  # once it is known
        self._pid = 0
        self._context: zmq.asyncio.Context | None = None
        self._ids = itertools.count(1)
        self._asking = asyncio.Lock()

    @property
    def address(self) -> str:
        return f"ipc://{self._socket_path}"

    @property
    def serves(self) -> bool:
        """Whether there is a server, or one is to come."""
        return self._serving is not None

    def start(
        self, shm_dir: Path, *, job: str = "", cluster: ClusterOptions | None = None, linger_s: float = 0.0
    ) -> None:
        """Serve `shm_dir`; at once, or as soon as the server of the job before is gone. `cluster`: other nodes, too.
        `linger_s`: should this daemon die it goes on, and ends when nobody has used `shm_dir` for so long; 0: it ends
        with the daemon."""
        self._serving = _Serving(shm_dir, job, cluster, linger_s)
        self._restarts, self._tcp, self._has_failed = 0, "", False
        self._is_next = self._running
        if not self._running:
            self._run()

    def adopt(
        self, shm_dir: Path, record: rec.ShardRecord, *, job: str, cluster: ClusterOptions, linger_s: float
    ) -> None:
        """In place of `start`: another daemon has started it. If it has ended, it is started at its address."""
        self._serving = _Serving(shm_dir, job, cluster, linger_s)
        self._restarts, self._tcp, self._has_failed = 0, record.address, False
        try:
            if not lives(record.pid, record.start_ticks):
                raise EnvironmentFault("the shard server has ended")
            self._supervisor.adopt(NAME, record.pid, start_ticks=record.start_ticks, leads_session=True)
        except FlashrecError as error:
            self._log("shard server", f"{error}, and is started again")
            self._run()
        self._running = True

    def _run(self) -> None:
        assert self._serving is not None
        shm_dir, cluster = self._serving.shm_dir, self._serving.cluster
        argv = [sys.executable, "-m", "flashrecd.shards", "--root", str(shm_dir), "--bind", self.address]
        argv += ["--owner-pid", str(os.getpid())]
        if self._serving.linger_s:
            argv += ["--linger-s", str(self._serving.linger_s)]
        if cluster is not None:
            # ZeroMQ binds to addresses, not to hosts' names.
            host = format_address(resolve(cluster.data_address)[0], 0).rpartition(":")[0]
            argv += ["--job", self._serving.job, "--bind", self._tcp or f"tcp://{host}:*"]
            if cluster.replica_mbps is not None:
                argv += ["--replica-mbps", str(cluster.replica_mbps)]
            if cluster.compress_replicas:
                argv.append("--compress-replicas")
            if cluster.key_file is None:
                argv.append("--open-loopback")
            else:
                argv += ["--cluster-key", str(cluster.key_file), "--bulk", cluster.bulk]
        self._started_at = time.monotonic()
        self._output.unlink(missing_ok=True)
        files: dict[str, Any] = {"stdout_path": self._output, "stderr_path": self._output.with_suffix(".err")}
        self._pid = self._supervisor.start_program(NAME, argv, env=dict(os.environ), cwd="/", **files)
        self._running = True
        self._record()

    def _record(self) -> None:
        """For a daemon that takes over; without it there is none."""
        serving, stat = self._serving, process_stat(self._pid)
        if serving is not None and serving.linger_s and self._tcp and stat is not None:
            with contextlib.suppress(OSError):
                JobFiles(serving.shm_dir).serves(rec.ShardRecord(self._pid, stat.start_ticks, self._tcp))

    async def tcp_address(self) -> str:
        """Where other nodes reach it, once it answers. EnvironmentFault when it does not."""
        for _ in range(int(READY_S / LOOK_S)):
            if self._tcp:
                return self._tcp
            self._tcp = self._said_tcp()
            self._record()
            if self._has_failed:
                break
            if not self._tcp:
                await asyncio.sleep(LOOK_S)
        raise EnvironmentFault(f"the shard server does not answer: {self._last_words() or 'it says nothing'}")

    def _said_tcp(self) -> str:
        try:
            ready = json.loads(self._output.read_text().partition("\n")[0])["ready"]
            return next(str(endpoint) for endpoint in ready if str(endpoint).startswith("tcp://"))
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            return ""

    def _last_words(self) -> str:
        try:
            return self._output.with_suffix(".err").read_text(errors="replace").strip()[-300:]
        except OSError:
            return ""

    def stop(self) -> None:
        self._serving = None
        self.close()
        if self._running:
            self._supervisor.kill_group(NAME)

    def close(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def exited(self, proc: str) -> bool:
        """Whether `proc` was the shard server; one that is wanted by then is started."""
        if proc != NAME:
            return False
        self._running = False
        if self._serving is None:
            return True
        if self._is_next:
            self._is_next = False
            self._run()
            return True
        self._restarts = 1 if time.monotonic() - self._started_at > LASTED_S else self._restarts + 1
        again = bool(self._tcp) and self._restarts <= MAX_RESTARTS
        what = "is started again" if again else "there is none any more"
        self._log("shard server", f"it ended, and {what}: {self._last_words() or 'it said nothing'}")
        if again:
            self._run()
        self._has_failed = not again
        return True

    # --- what it keeps for others ---------------------------------------------------------------------------

    async def fence(self, generation: int) -> tuple[Kept, ...]:
        """Have it refuse replicas of `generation` and older ones; what it keeps. Raises FlashrecError."""
        data = await self._ask(Fence(next(self._ids), generation))
        return tuple(
            Kept(rank, tuple(private), tuple(sealed))
            for rank, private, sealed in msgpack.unpackb(data, use_list=False)
        )

    async def discard(self, generation: int, version: int, sealed: int) -> None:
        """`generation` resumes at `version`: private state above it was lost, and what is sealed above `sealed`. Raises
        FlashrecError."""
        await self._ask(Discard(next(self._ids), generation, version, sealed))

    async def forget(self, ranks: tuple[int, ...]) -> None:
        """These ranks' replicas are not kept here any more. Raises FlashrecError."""
        await self._ask(Forget(next(self._ids), ranks))

    # --- its health -----------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """For ever: a server that says nothing for SILENT_S is killed, and so started again. Votes wait for what it
        keeps; a process that is stopped, or stuck, keeps its connections open, and nobody else would notice."""
        heard_at, server = time.monotonic(), 0
        while True:
            await asyncio.sleep(WATCH_S)
            if (
                self._pid != server or not self._running or not self._said_tcp()
            ):  # none that has begun to answer
                heard_at, server = time.monotonic(), self._pid
                continue
            with contextlib.suppress(FlashrecError):
                await self._ask(Stats(next(self._ids)), WATCH_S)
                heard_at = time.monotonic()
            if time.monotonic() - heard_at > SILENT_S and self._running and self._pid == server:
                self._log("shard server", f"it has said nothing for {SILENT_S:g} s, and is killed")
                self._supervisor.kill_group(NAME)
                heard_at = time.monotonic()

    async def _ask(self, request: Request, timeout_s: float = ANSWER_S) -> bytes:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        context = self._context
        try:
            async with asyncio.timeout(timeout_s), self._asking:
                with context.socket(zmq.DEALER) as socket:
                    socket.linger = 0
                    socket.connect(self.address)
                    await socket.send(pack_request(request, b""))
                    header, data = await socket.recv_multipart()
        except (TimeoutError, zmq.ZMQError, ValueError) as error:
            raise EnvironmentFault(f"the shard server does not answer: {error!r}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The socket was closed meanwhile, which cancels its futures.
            raise EnvironmentFault("the shard server is asked no more") from None
        reply = unpack_header(header)
        if reply.status != "ok":
            raise FlashrecError(f"the shard server answers {reply.status}: {reply.detail}")
        return bytes(data)
