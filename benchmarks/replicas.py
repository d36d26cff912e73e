"""Getting sealed state from other nodes' shard servers, beside what the link and the memory give in the same run.

    python -m benchmarks.replicas [--size-gb 1] [--rounds 5] [--sources 1 2 4] [--json]

All over TCP on the loopback interface, each source a process of its own. GB are 10^9 bytes. Each round measures
everything once, in turn; figures are medians of rounds, ratios medians of what rounds say.

memcpy      from one array to another, on one thread
raw TCP     each source writes its share of the state from memory, 1 MiB at a time; a thread each reads it into place
zmq         the same as ZeroMQ messages of 1 MiB, asked for eight ahead, and thrown away as they come
pull        what a replacement does: `Puller` from shard servers, each chunk put in its tensor and verified there
replicate   what a keeper does: from the source's arena into a sealed replica of its own, verified. "All": every byte
            has changed since the version before; "tenth": one chunk in ten has
CPU         seconds per GB, of all processes that take part, kernel included
small       microseconds from asking for 4 KiB, and for 1 MiB, to having them; medians
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from benchmarks import report
from benchmarks.jobs import ROOT, search_path
from flashrec.prctl import die_with_parent
from flashrec.state.arena_writer import ArenaWriter
from flashrec.state.export import export
from flashrec.state.layout import Layout, Piece, RankLayout, ReplicaSet, TensorSpec
from flashrec.state.manifest import ExportManifest, Source, export_path
from flashrec.state.pull import Puller
from flashrec.state.remote import ShardConnection
from flashrec.state.replicating import KeeperAddress, Replicator

Bytes = npt.NDArray[np.uint8]

MIB = 1 << 20
SMALL_BYTES = 4096
NUM_TENSORS = 16
CREDIT = 8
DEADLINE_S = 300.0
RANK, JOB = 0, "benchmark"
TICKS = os.sysconf("SC_CLK_TCK")


class Tensors:
    """A rank's tensors, plain memory."""

    def __init__(self, layout: Layout) -> None:
        self.data = [np.ones(spec.size_bytes, np.uint8) for spec in layout]

    def read_piece(self, piece: Piece) -> memoryview:
        return self.data[piece.tensor_index].data[piece.offset : piece.offset + piece.size_bytes]

    def piece_memory(self, piece: Piece) -> memoryview:
        return self.read_piece(piece)

    def write_piece(self, piece: Piece, data: Any) -> None:
        self.read_piece(piece)[:] = data


# --- processes --------------------------------------------------------------------------------------------------


def serve_tcp(size_bytes: int) -> None:
    """Whoever connects says how many bytes it wants, as 8 bytes, again and again."""
    data = np.ones(size_bytes, np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
        while True:
            peer, _ = listener.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with peer:
                while wanted := peer.recv(8, socket.MSG_WAITALL):
                    offset, end = 0, int.from_bytes(wanted, "little")
                    while offset < end:
                        offset += peer.send(data[offset : min(end, offset + MIB)])


def serve_zmq(size_bytes: int) -> None:
    """A message of as many bytes as each request says, from memory, without a copy in Python."""
    data = memoryview(np.ones(size_bytes, np.uint8).data)
    with zmq.Context(io_threads=2) as context, context.socket(zmq.ROUTER) as router:
        router.sndbuf = router.rcvbuf = 4 * MIB
        port = router.bind_to_random_port("tcp://127.0.0.1")
        print(f"tcp://127.0.0.1:{port}", flush=True)
        while True:
            peer, offset, wanted = router.recv_multipart()
            first = int.from_bytes(offset, "little")
            router.send(peer, zmq.SNDMORE)
            router.send(data[first : first + int.from_bytes(wanted, "little")], copy=False)


class Processes:
    """Sources of one kind."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        environment = {**os.environ, "PYTHONPATH": search_path()}
        self._all = [
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            for command in commands
        ]
        self.said = [one.stdout.readline().strip() for one in self._all if one.stdout is not None]

    def cpu_s(self) -> float:
        total = 0
        for one in self._all:
            fields = Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / TICKS

    def close(self) -> None:
        for one in self._all:
            one.terminate()
        for one in self._all:
            one.wait()
            if one.stdout is not None:
                one.stdout.close()


def own(kind: str, size_bytes: int, count: int) -> Processes:
    command = [sys.executable, "-m", "benchmarks.replicas", "--serve", kind, "--bytes", str(size_bytes)]
    return Processes([command] * count)


def shard_servers(roots: Sequence[Path]) -> tuple[Processes, list[str]]:
    processes = Processes(
        [
            [
                *(sys.executable, "-m", "flashrecd.shards", "--root", str(root), "--job", JOB),
                *("--bind", "tcp://127.0.0.1:*", "--open-loopback", "--owner-pid", str(os.getpid())),
            ]
            for root in roots
        ]
    )
    return processes, [json.loads(said)["ready"][0] for said in processes.said]


# --- what is measured -------------------------------------------------------------------------------------------


def side_by_side(acts: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def shares(size_bytes: int, count: int) -> list[tuple[int, int]]:
    """(begin, end) of each source's."""
    return [(size_bytes * number // count, size_bytes * (number + 1) // count) for number in range(count)]


class RawTcp:
    def __init__(self, target: Bytes, count: int) -> None:
        self._target = target
        self.sources = own("tcp", -(-len(target) // count), count)
        self._sockets = []
        for said in self.sources.said:
            host, _, port = said.rpartition(":")
            self._sockets.append(socket.create_connection((host, int(port))))
            self._sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self) -> None:
        parts = shares(len(self._target), len(self._sockets))
        side_by_side([partial(self._get, one, *part) for one, part in zip(self._sockets, parts, strict=True)])

    def _get(self, one: socket.socket, begin: int, end: int) -> None:
        one.sendall((end - begin).to_bytes(8, "little"))
        place = self._target.data
        while begin < end:
            begin += one.recv_into(place[begin : min(end, begin + MIB)])

    def get_small(self, size_bytes: int) -> None:
        self._get(self._sockets[0], 0, size_bytes)

    def close(self) -> None:
        for one in self._sockets:
            one.close()
        self.sources.close()


class BareZmq:
    def __init__(self, size_bytes: int, count: int) -> None:
        self._size_bytes = size_bytes
        self.sources = own("zmq", -(-size_bytes // count), count)
        self._context = zmq.Context(io_threads=2)
        self._sockets = []
        for address in self.sources.said:
            one = self._context.socket(zmq.DEALER)
            one.linger = 0
            one.sndbuf = one.rcvbuf = 4 * MIB
            one.connect(address)
            self._sockets.append(one)

    def run(self) -> None:
        sizes = [end - begin for begin, end in shares(self._size_bytes, len(self._sockets))]
        side_by_side([partial(self._get, one, size) for one, size in zip(self._sockets, sizes, strict=True)])

    def _get(self, one: zmq.Socket[bytes], size_bytes: int) -> None:
        asked = [(offset, min(MIB, size_bytes - offset)) for offset in range(0, size_bytes, MIB)]
        waiting = iter(asked)

        def ask() -> None:
            if (wanted := next(waiting, None)) is not None:
                one.send_multipart([wanted[0].to_bytes(8, "little"), wanted[1].to_bytes(8, "little")])

        for _ in range(CREDIT):
            ask()
        for _ in asked:
            one.recv(copy=False)
            ask()

    def get_small(self, size_bytes: int) -> None:
        self._get(self._sockets[0], size_bytes)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.sources.close()


class Pulls:
    """From `count` shard servers that all have the state; each part from a source of its own, the others behind it."""

    def __init__(self, directory: Path, layout: Layout, target: Tensors, count: int) -> None:
        self._layout, self._target = layout, target
        manifests = manifests_of(directory, layout, target, count)
        self.sources, self.addresses = shard_servers([directory] * count)
        self._parts = [
            [Source(manifest, address) for address in self.addresses[number:] + self.addresses[:number]]
            for number, manifest in enumerate(manifests)
        ]
        self._manifest = manifests[0]
        self._connection = contextlib.ExitStack()
        self._small = self._connection.enter_context(ShardConnection(self.addresses[0], b"", lambda: False))

    def run(self) -> None:
        Puller().pull(self._target, self._layout, self._parts, version=1, generation=1, deadline_s=DEADLINE_S)

    def get_small(self, size_bytes: int) -> None:
        ranges = {0: (0, size_bytes)}
        for _ in self._small.fetch(self._manifest.name, ranges, DEADLINE_S, time.monotonic() + DEADLINE_S):
            pass

    def close(self) -> None:
        self._connection.close()
        self.sources.close()


def manifests_of(directory: Path, layout: Layout, reader: Tensors, count: int) -> list[ExportManifest]:
    return [
        export(
            reader,
            pieces,
            export_path(directory, 1, number, count),
            rank=number,
            version=1,
            generation=1,
            layout_digest=layout.digest,
        )
        for number, pieces in enumerate(layout.split(count))
    ]


class Replicas:
    """A rank whose state another node keeps."""

    def __init__(self, directory: Path, layout: Layout, tensors: Tensors) -> None:
        homes = [directory / "home", directory / "keeper"]
        for home in homes:
            home.mkdir()
        self._layout = RankLayout(RANK, (ReplicaSet((RANK,), layout),))
        self._tensors = tensors
        self._writer = ArenaWriter(homes[0] / "arena", RANK, JOB)
        self.sources, addresses = shard_servers(homes)
        self._replicator = Replicator(RANK, JOB, addresses[0], lambda _: None)
        self._replicator.set_keepers([KeeperAddress(1, addresses[1])], 1)
        self._version = -1
        for _ in range(2):  # both slots have their memory
            self.seal(1)
            self.run()

    def seal(self, every: int) -> None:
        """The next version, in which one chunk of `every` so many has changed."""
        self._version += 1
        for data in self._tensors.data:
            data[:: every * MIB] += 1
        slot = self._writer.open_slot(self._version, 1, self._layout, 100)
        for chunk in range(slot.num_chunks):
            slot.put(chunk, [self._tensors])
        slot.seal(bytes(100))

    def run(self) -> None:
        self._replicator.sealed(self._version, 1)
        self._replicator.wait(
            sealed=self._version, private=[], is_cancelled=lambda: False, timeout_s=DEADLINE_S
        )

    def keep_private(self) -> None:
        self._version += 1
        self._replicator.keep_private(self._version, 1, bytes(SMALL_BYTES))
        self._replicator.wait(
            sealed=None, private=[self._version], is_cancelled=lambda: False, timeout_s=DEADLINE_S
        )

    def close(self) -> None:
        self._replicator.close()
        self._writer.close()
        self.sources.close()


def timed(act: Callable[[], object], sources: Processes | None, size_bytes: int) -> report.Figures:
    cpu = time.process_time() + (sources.cpu_s() if sources is not None else 0)
    started = time.perf_counter()
    act()
    taken = time.perf_counter() - started
    cpu = time.process_time() + (sources.cpu_s() if sources is not None else 0) - cpu
    return {"gbps": size_bytes / taken / 1e9, "cpu_s_per_gb": cpu / size_bytes * 1e9}


def microseconds(act: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        act()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e6


@contextlib.contextmanager
def closing_all() -> Iterator[list[Any]]:
    made: list[Any] = []
    try:
        yield made
    finally:
        for one in reversed(made):
            one.close()


def measure(directory: Path, size_bytes: int, rounds: int, counts: Sequence[int]) -> report.Figures:
    size_bytes -= size_bytes % (NUM_TENSORS * MIB)
    layout = Layout(
        [
            TensorSpec(f"t{i}", "uint8", (size_bytes // NUM_TENSORS,), size_bytes // NUM_TENSORS)
            for i in range(NUM_TENSORS)
        ]
    )
    tensors = Tensors(layout)
    arrays = [np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)]
    found: dict[str, list[report.Figures]] = {}
    small: report.Figures = {}

    def note(name: str, act: Callable[[], object], sources: Processes | None = None) -> None:
        found.setdefault(name, []).append(timed(act, sources, size_bytes))

    with closing_all() as made:
        for count in counts:
            made += [
                RawTcp(arrays[1], count),
                BareZmq(size_bytes, count),
                Pulls(directory, layout, tensors, count),
            ]
        names = [f"{name} {count}" for count in counts for name in ("raw TCP", "zmq", "pull")]
        for number in range(rounds + 1):
            if number == 1:
                found.clear()  # the first is for memory that is yet to be had
            note("memcpy", lambda: np.copyto(arrays[1], arrays[0]))
            for name, one in zip(names, made, strict=True):
                note(name, one.run, one.sources)
        for name, one in zip(("raw TCP", "zmq", "shard server"), made, strict=False):
            small[name] = {
                "4 KiB µs": microseconds(partial(one.get_small, SMALL_BYTES), 300),
                "1 MiB µs": microseconds(partial(one.get_small, MIB), 100),
            }
    shutil.rmtree(directory / "export")
    arrays.clear()
    with closing_all() as made:
        kept = Replicas(directory, layout, tensors)
        made.append(kept)
        for _ in range(rounds):
            for name, every in (("replicate all", 1), ("replicate tenth", 10)):
                kept.seal(every)
                note(name, kept.run, kept.sources)
        small["keep private"] = {"4 KiB µs": microseconds(kept.keep_private, 100)}
    return {"size_mb": size_bytes / 1e6, "rounds": found, "small": small}


def median_of(found: Sequence[report.Figures], what: str) -> float:
    return float(statistics.median(one[what] for one in found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sources", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=("tcp", "zmq"), help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        die_with_parent(signal.SIGKILL)
        (serve_tcp if options.serve == "tcp" else serve_zmq)(options.bytes)
        return
    about = report.machine()
    with tempfile.TemporaryDirectory(prefix="flashrec-bench-", dir="/dev/shm") as name:
        figures = measure(Path(name), int(options.size_gb * 1e9), options.rounds, options.sources)
    found = figures["rounds"]
    rows = []
    for name, rounds in found.items():
        count = name.rpartition(" ")[2]
        reference = found.get(f"raw TCP {count if count.isdecimal() else options.sources[0]}", rounds)
        ratio = statistics.median(
            100 * one["gbps"] / other["gbps"] for one, other in zip(rounds, reference, strict=True)
        )
        row = (name, f"{median_of(rounds, 'gbps'):.2f}", f"{median_of(rounds, 'cpu_s_per_gb'):.2f}", ratio)
        rows.append(row)
    moved = report.table(
        f"Moving {figures['size_mb']:.0f} MB (and the number of sources)",
        ("", "GB/s", "CPU s/GB", "% of raw TCP"),
        rows,
    )
    small = report.table(
        "Small ones, µs",
        ("", "4 KiB", "1 MiB"),
        [(name, one["4 KiB µs"], one.get("1 MiB µs", "")) for name, one in figures["small"].items()],
    )
    report.show({"machine": about, **figures}, [moved, small], as_json=options.json)


if __name__ == "__main__":
    main()
