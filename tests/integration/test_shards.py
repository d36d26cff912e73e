"""The shard server as a process: pulls over sockets, servers that die, stall or lie, and strangers at the
door."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgpack
import pytest
import torch
import zmq
from torch import nn

from flashrec.state.capture import Captured, capture
from flashrec.state.export import export
from flashrec.state.layout import Layout, RankLayout, ReplicaSet
from flashrec.state.manifest import ExportManifest, Source, export_path
from flashrec.state.pull import Puller, PullIncomplete, PullReport
from flashrec.state.remote import ShardConnection, SourceFailed
from flashrec.state.shardwire import Get, ReplyHeader, pack_header, pack_request, unpack_header
from tests.tmpfs import run_in_tmpfs

PYTHONPATH = os.pathsep.join(sys.path)
KEY = b"0123456789abcdef"


class Server:
    """One shard server over `root`, answering at `address`."""

    def __init__(self, root: Path, *options: str, bind: str | None = None) -> None:
        bind = bind or f"ipc://{root}/s.sock"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flashrecd.shards", "--root", root, "--bind", bind, *options],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.end())
        self.address = json.loads(line)["ready"][0]

    def stats(self, key: bytes = b"") -> dict[str, int]:
        with ShardConnection(self.address, key, lambda: False) as connection:
            counters: dict[str, int] = msgpack.unpackb(connection.stats(10))
            return counters

    def end(self) -> str:
        """Stop it; returns what it wrote to stderr."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return self.process.communicate(timeout=20)[1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start_one(root: Path = tmp_path, *options: str, bind: str | None = None) -> Server:
        servers.append(Server(root, *options, bind=bind))
        return servers[-1]

    yield start_one
    for server in servers:
        if server.process.poll() is None:
            server.end()
        for stream in (server.process.stdin, server.process.stdout, server.process.stderr):
            assert stream is not None
            stream.close()


class Rank:
    """A model with some megabytes of state, trained for two steps."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(900, 900), nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.captured: Captured = capture(self.model, self.optimizer)
        for _ in range(2):
            self.optimizer.zero_grad()
            (self.model[0](torch.ones(900)).sum() + self.model[1](torch.ones(1, 8, 4, 4)).sum()).backward()
            self.optimizer.step()
        self.captured.refresh()

    def layout(self) -> Layout:
        return self.captured.rank_layout().sets[0].layout

    def state(self) -> list[bytes]:
        pieces = [piece for part in self.layout().split(1) for piece in part]
        return [bytes(self.captured.of_set(0).read_piece(piece)) for piece in pieces]

    def exports(self, root: Path, num_parts: int, first_rank: int = 0) -> list[ExportManifest]:
        layout = self.layout()
        return [
            export(
                self.captured.of_set(0),
                pieces,
                export_path(root, 2, first_rank + part),
                rank=first_rank + part,
                version=2,
                generation=2,
                layout_digest=layout.digest,
                chunk_bytes=256 << 10,
            )
            for part, pieces in enumerate(layout.split(num_parts))
        ]


@pytest.fixture(scope="module")
def survivor() -> Rank:
    return Rank(1)


def pull(
    puller: Puller, target: Rank, layout: Layout, parts: Sequence[Sequence[Source]], deadline_s: float = 60
) -> PullReport:
    target.captured.prepare(RankLayout(0, (ReplicaSet((0,), layout),)))
    return puller.pull(
        target.captured.of_set(0), layout, parts, version=2, generation=2, deadline_s=deadline_s
    )


def remote(address: str, *of_part: Sequence[ExportManifest], key: bytes = b"") -> list[list[Source]]:
    return [
        [Source(manifest, address, key) for manifest in manifests] for manifests in zip(*of_part, strict=True)
    ]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_pull_over_a_socket_is_bit_identical(
    survivor: Rank, start: Callable[..., Server], tmp_path: Path, transport: str
) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY)
    key, bind = (b"", None) if transport == "ipc" else (KEY, "tcp://127.0.0.1:*")
    server = start(tmp_path, "--key-file", str(key_file), bind=bind)
    manifests = survivor.exports(tmp_path, 3)
    target = Rank(2)
    report = pull(Puller(), target, survivor.layout(), remote(server.address, manifests, key=key))
    assert target.state() == survivor.state()
    assert report.refused == ()
    assert server.stats(key)["sent_bytes"] == report.size_bytes == survivor.layout().total_bytes
    with pytest.raises(PullIncomplete, match="wrong key"):
        pull(Puller(), target, survivor.layout(), remote(server.address, manifests, key=b"guess"))


def test_it_is_small_and_free_of_torch(start: Callable[..., Server]) -> None:
    server = start()
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    resident_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert resident_kib < 60 << 10
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps


def test_a_server_that_dies_is_left_for_another_at_once(
    survivor: Rank, start: Callable[..., Server], tmp_path: Path
) -> None:
    first, second = start(), start(bind=f"ipc://{tmp_path}/second")
    manifests = survivor.exports(tmp_path, 1)
    target = Rank(2)
    done = 0

    def kill_in_the_middle() -> bool:
        nonlocal done
        done += 1
        if done == 8:
            first.process.kill()
        return False

    puller = Puller(kill_in_the_middle, max_threads=1, stall_s=30)
    started = time.monotonic()
    sources = [[Source(manifests[0], first.address), Source(manifests[0], second.address)]]
    report = pull(puller, target, survivor.layout(), sources)
    assert time.monotonic() - started < 15, "the socket says that the peer is gone; no time-out is needed"
    assert target.state() == survivor.state()
    assert any("connection ended" in reason for reason in report.refused)
    assert report.bytes_by_source[str(sources[0][0])] > 0, "the fault struck before anything was sent"
    assert sum(report.bytes_by_source.values()) == report.size_bytes, "no chunk was fetched twice"


@pytest.mark.parametrize("address", ["ipc://{}/nobody", "tcp://127.0.0.1:1"])
def test_nobody_at_the_address_is_noticed_at_once(survivor: Rank, tmp_path: Path, address: str) -> None:
    manifests = survivor.exports(tmp_path, 1)
    started = time.monotonic()
    with pytest.raises(PullIncomplete, match="connection ended"):
        pull(
            Puller(stall_s=30),
            Rank(2),
            survivor.layout(),
            remote(address.format(tmp_path), manifests),
        )
    assert time.monotonic() - started < 15


def test_a_server_that_stalls_is_left_for_another(
    survivor: Rank, start: Callable[..., Server], tmp_path: Path
) -> None:
    first, second = start(), start(bind=f"ipc://{tmp_path}/second")
    manifests = survivor.exports(tmp_path, 1)
    first.process.send_signal(signal.SIGSTOP)
    target = Rank(2)
    sources = [[Source(manifests[0], first.address), Source(manifests[0], second.address)]]
    report = pull(Puller(stall_s=0.5), target, survivor.layout(), sources)
    assert target.state() == survivor.state()
    assert any("sent nothing for 0.5 s" in reason for reason in report.refused)


def test_the_deadline_holds_against_a_stalled_server(
    survivor: Rank, start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start()
    server.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    parts = remote(server.address, survivor.exports(tmp_path, 2))
    with pytest.raises(PullIncomplete, match="time was over"):
        pull(Puller(stall_s=60), Rank(2), survivor.layout(), parts, deadline_s=0.5)
    assert time.monotonic() - started < 15


def test_a_corrupt_file_behind_a_server_goes_to_the_next_source(
    survivor: Rank, start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start()
    bad, good = survivor.exports(tmp_path, 2), survivor.exports(tmp_path, 2, first_rank=2)
    with open(bad[1].path, "r+b") as file:
        file.seek(1 << 20)
        byte = file.read(1)[0]
        file.seek(1 << 20)
        file.write(bytes([byte ^ 128]))
    target = Rank(2)
    report = pull(Puller(), target, survivor.layout(), remote(server.address, bad, good))
    assert target.state() == survivor.state()
    assert len(report.refused) == 1
    assert "rank 1" in report.refused[0]
    assert "checksum" in report.refused[0]


def test_a_missing_file_and_a_truncated_one(
    survivor: Rank, start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start()
    manifests = survivor.exports(tmp_path, 2)
    os.truncate(manifests[0].path, manifests[0].size_bytes - 1)
    os.unlink(manifests[1].path)
    with pytest.raises(PullIncomplete) as caught:
        pull(Puller(), Rank(2), survivor.layout(), remote(server.address, manifests))
    assert caught.value.parts == (0, 1)
    assert "No such file" in str(caught.value)
    assert server.stats()["missing_files"] >= 2


class Impostor:
    """A ROUTER that answers requests with whatever `answer` makes of them."""

    def __init__(self, address: str, answer: Callable[[bytes], list[bytes]]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)
        self._answer = answer
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._socket.poll(50):
                peer, request = self._socket.recv_multipart()
                self._socket.send_multipart([peer, *self._answer(request)])

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)


def ok(request: bytes, data: bytes) -> list[bytes]:
    return [pack_header(ReplyHeader(msgpack.unpackb(request)[3], "ok")), data]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda request: ok(request, b"\0" * (256 << 10)), "do not match"),
        (lambda request: ok(request, b"short"), "sent 5 bytes"),
        (lambda request: [pack_header(ReplyHeader(0, "packed")), b"\1junk"], "was to come as it is"),
        (lambda request: [b"junk"], "1 frames"),
        (lambda request: [b"junk", b""], "something else than a reply"),
        (lambda request: [pack_header(ReplyHeader(12345, "ok")), b""], "not under way"),
        (lambda request: [pack_header(ReplyHeader(0, "ok", "x" * 9000)), b""], "frames"),
        (lambda request: [b"\xc1" * 5, b"x", b"y"], "3 frames"),
    ],
)
def test_a_lying_server_is_found_out(
    survivor: Rank, tmp_path: Path, answer: Callable[[bytes], list[bytes]], reason: str
) -> None:
    manifests = survivor.exports(tmp_path, 1)
    impostor = Impostor(f"ipc://{tmp_path}/impostor", answer)
    try:
        target = Rank(2)
        sources = [[Source(manifests[0], f"ipc://{tmp_path}/impostor"), Source(manifests[0])]]
        report = pull(Puller(max_threads=1), target, survivor.layout(), sources)
    finally:
        impostor.close()
    assert reason in report.refused[0]
    assert target.state() == survivor.state()


def test_garbage_at_the_door_harms_nobody(
    survivor: Rank, start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start()
    path = server.address.removeprefix("ipc://")
    chance = random.Random(3)
    for _ in range(30):  # below ZeroMQ
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(path)
            raw.send(chance.randbytes(chance.randrange(1, 200)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:  # above it
        dealer.linger = 0
        dealer.connect(server.address)
        for number in range(200):
            dealer.send_multipart(
                [chance.randbytes(chance.randrange(0, 300)) for _ in range(chance.randrange(1, 4))]
            )
            header, data = dealer.recv_multipart()
            assert unpack_header(header).status == "refused", number
            assert data == b""
        too_large = context.socket(zmq.DEALER)
        too_large.linger = 0
        too_large.connect(server.address)
        too_large.send(b"x" * (8 << 20))
        assert not too_large.poll(300)
        too_large.close()
    target = Rank(2)
    pull(Puller(), target, survivor.layout(), remote(server.address, survivor.exports(tmp_path, 2)))
    assert target.state() == survivor.state()
    assert server.stats()["refused_requests"] >= 200
    lines = [json.loads(line) for line in server.end().splitlines()]
    assert lines[0]["event"] == "request refused"
    assert len(lines) < 40


def test_a_peer_that_never_reads_costs_nobody_else(
    survivor: Rank, start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start()
    manifests = survivor.exports(tmp_path, 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as greedy:
        greedy.linger = 0
        greedy.rcvhwm = 1
        greedy.connect(server.address)
        for number in range(500):
            greedy.send(pack_request(Get(number, manifests[0].name, 0, 1 << 20), b""))
        target = Rank(2)
        pull(Puller(), target, survivor.layout(), remote(server.address, manifests))
        assert target.state() == survivor.state()
        assert server.stats()["dropped_replies"] > 0
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        own_kib = int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])
        assert own_kib < 100 << 10


def test_pulls_leave_neither_threads_nor_descriptors(
    survivor: Rank, start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start()
    manifests = survivor.exports(tmp_path, 2)
    target = Rank(2)

    def counts() -> tuple[int, int, int]:
        tasks = len(os.listdir("/proc/self/task"))
        return tasks, len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{server.process.pid}/fd"))

    first: tuple[int, ...] = ()
    for number in range(12):
        pull(Puller(), target, survivor.layout(), remote(server.address, manifests))
        nobody = remote(f"ipc://{tmp_path}/nobody", manifests)
        with pytest.raises(PullIncomplete):
            pull(Puller(), target, survivor.layout(), nobody)
        if number == 2:  # by now whatever is made once has been made
            first = counts()
    # A thread that was joined, and the server's end of a connection, are gone a moment later.
    deadline = time.monotonic() + 20
    while any(now > then for now, then in zip(counts(), first, strict=True)):
        assert time.monotonic() < deadline, f"threads, descriptors here and there: {first}, then {counts()}"
        time.sleep(0.02)


def test_it_ends_with_sigterm_sigint_and_its_parent(start: Callable[..., Server], tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        server = start()
        server.process.send_signal(number)
        assert server.process.wait(timeout=20) == 0
        assert not (tmp_path / "s.sock").exists()
    server = start(tmp_path, "--exit-with-stdin")
    assert server.process.stdin is not None
    server.process.stdin.close()
    assert server.process.wait(timeout=20) == 0
    assert not (tmp_path / "s.sock").exists()


def test_the_socket_is_private_and_is_not_taken_from_a_live_server(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start()
    assert os.stat(tmp_path / "s.sock").st_mode & 0o077 == 0
    with pytest.raises(RuntimeError, match="another server answers"):
        start()
    server.process.kill()
    server.process.wait()
    start()  # a stale socket is in nobody's way


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--root", "/nonexistent", "--bind", "ipc:///tmp/x"], 2, "not a directory"),
        (["--root", "{}", "--bind", "tcp://0.0.0.0:5555"], 2, "only ipc:// and tcp://"),
        (["--root", "{}", "--bind", "tcp://127.0.0.1:5555"], 2, "key file"),
        (["--root", "{}", "--bind", "ipc://{}/no/such/folder/s"], 1, "cannot serve on"),
        (["--root", "{}", "--bind", "ipc://{}/s", "--key-file", "{}/none"], 2, "cannot read the key file"),
        (["--root", "{}", "--bind", "ipc://{}/s", "--frobnicate"], 2, "frobnicate"),
    ],
)
def test_wrong_arguments_are_explained(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashrecd.shards", *(argument.format(tmp_path) for argument in arguments)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_source_failed_is_not_raised_for_an_answer(start: Callable[..., Server]) -> None:
    server = start()
    with (
        ShardConnection(server.address, b"", lambda: False) as connection,
        pytest.raises(SourceFailed, match="gone"),
    ):
        list(connection.fetch("export/g1.r1.0", {0: (0, 10)}, 10, time.monotonic() + 10))


FILL = """
import os, pathlib, sys
from flashrec.errors import EnvironmentFault
from flashrec.state.private_slots import PrivateSlots
slots = PrivateSlots(pathlib.Path(sys.argv[1]), 0)
slots.seal(0, 1, b"0" * 300_000)
slots.seal(1, 1, b"1" * 300_000)
try:
    slots.seal(2, 1, b"2" * 600_000)
except EnvironmentFault as error:
    print(error)
else:
    sys.exit("the filesystem did not fill up")
assert slots.read(0) == b"0" * 300_000 and slots.read(1) == b"1" * 300_000
assert sorted(os.listdir(slots.directory)) == ["r0.v0.g1", "r0.v1.g1"], os.listdir(slots.directory)
slots.discard_above(0)
slots.seal(1, 2, b"3" * 600_000)
assert slots.read(1) == b"3" * 600_000
"""


def test_a_tmpfs_that_really_fills_up(tmp_path: Path) -> None:
    printed = run_in_tmpfs(FILL, "1m", tmp_path)
    assert "is full: 600056 bytes needed" in printed
