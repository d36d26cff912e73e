"""What the tests of replicas share: nodes, each a shard server of its own, and what comes between two of them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import zmq

from flashrec.state.arena import Arena
from flashrec.state.remote import ShardConnection
from flashrec.state.shardwire import Fence, Request, Stats
from tests.arenas import JOB, RANK

PYTHONPATH = os.pathsep.join(sys.path)


def unsecured(_: object) -> None:
    pass


class Node:
    """A node's shard server over its own job directory."""

    def __init__(self, root: Path, *options: str, port: str = "*") -> None:
        self.root = root
        root.mkdir(mode=0o700, exist_ok=True)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "flashrecd.shards", "--root", root, "--job", JOB),
                *("--bind", f"ipc://{root}/s", "--bind", f"tcp://127.0.0.1:{port}", *options),
            ],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.end())
        self.local, self.address = json.loads(line)["ready"]
        self.port = self.address.rpartition(":")[2]

    def ask(self, request: Request) -> Any:
        with ShardConnection(self.local, b"", lambda: False) as connection:
            data = connection.call(request, 20)
        return msgpack.unpackb(data) if data else None

    def stats(self) -> dict[str, int]:
        counters: dict[str, int] = self.ask(Stats(0))
        return counters

    def fence(self, generation: int) -> list[Any]:
        holdings: list[Any] = self.ask(Fence(0, generation))
        return holdings

    @property
    def replica(self) -> Arena:
        return Arena(self.root / "replica", RANK, JOB)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> str:
        """Stop it; returns what it wrote to stderr."""
        if self.process.poll() is None:
            self.process.terminate()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdout, self.process.stderr as errors:
            written = errors.read()
        self.process.wait(timeout=20)
        return written


class Cutter:
    """A TCP proxy to `address`. The first connection is cut once `cut_after` bytes have gone `towards` the "server" or
    the "client"; later ones are let through."""

    def __init__(self, address: str, cut_after: int, towards: str = "server") -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._cut_after = cut_after
        self._towards = towards
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.num_cut = 0
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=run, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        is_first = True
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for one, other, towards in ((client, server, "server"), (server, client, "client")):
                    limit = self._cut_after if is_first and towards == self._towards else None
                    self._start(self._pass_on, one, other, limit)
            is_first = False

    def _pass_on(self, one: socket.socket, other: socket.socket, limit: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536 if limit is None else min(65536, max(1, limit))):
                if limit is not None:
                    data = data[:limit]
                    limit -= len(data)
                other.sendall(data)
                if limit == 0:
                    self.num_cut += 1
                    break
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for one in self._sockets:
            one.close()


@contextlib.contextmanager
def impostor(answer: Callable[[list[Any]], list[bytes] | None]) -> Iterator[str]:
    """A ROUTER at the address given that answers requests' fields with the frames that `answer` makes of them."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            if router.poll(20):
                peer, request, *_ = router.recv_multipart()
                frames = answer(msgpack.unpackb(request))
                if frames is not None:
                    router.send_multipart([peer, *frames])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        ended.set()
        thread.join()
        context.destroy(linger=0)
