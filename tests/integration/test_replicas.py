"""Replicas between real shard servers: versions follow one another, and whatever breaks on the way, a replica is whole
or not there, and the rank hears of it."""

import contextlib
import dataclasses
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from flashrec.errors import IntegrityError
from flashrec.protocol.keys import ClusterKey
from flashrec.state.arena import Arena, SealedState, SealedVersion
from flashrec.state.arena_writer import ArenaWriter
from flashrec.state.describing import describe
from flashrec.state.layout import Layout, RankLayout
from flashrec.state.manifest import Source
from flashrec.state.pull import Puller
from flashrec.state.remote import ShardConnection, SourceFailed
from flashrec.state.replicating import KeeperAddress, NotKept, RemoteStore, Replicator
from flashrec.state.shardwire import (
    Describe,
    Discard,
    Doubt,
    Fence,
    Forget,
    Keep,
    Replicate,
    ReplyHeader,
    Stats,
    pack_header,
    pack_request,
    unpack_header,
)
from flashrecd.metrics import ShardCollector
from tests.arenas import GROWN, JOB, RANK, SMALL, Tensors, check, rank_layout, seal, stream, versions
from tests.leaks import wait_until
from tests.shardnodes import Cutter, Node, impostor, unsecured

MIB = 1 << 20
# Twelve chunks that change with each version, and as many that do not.
LARGE = rank_layout([12 * MIB, 12 * MIB])
OPEN = "--open-loopback"
PATIENCE_S = 30.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start_one(name: str, *options: str, port: str = "*") -> Node:
        nodes.append(Node(tmp_path / name, *(options or (OPEN,)), port=port))
        return nodes[-1]

    yield start_one
    for node in nodes:
        node.process.send_signal(signal.SIGCONT)
        node.end()


class Rank:
    """A rank on `node` that seals in its arena and has its state kept at `keepers`."""

    def __init__(
        self,
        node: Node,
        *keepers: str,
        source: str | None = None,
        secure: Any = unsecured,
        token: bytes = b"",
    ) -> None:
        self.writer = ArenaWriter(node.root / "arena", RANK, JOB)
        self.replicator = Replicator(RANK, JOB, source or node.address, secure, token)
        self.keepers = [KeeperAddress(number, address) for number, address in enumerate(keepers, 1)]
        self.replicator.set_keepers(self.keepers, 1)
        self.generation = 1

    def seal(self, version: int, layout: RankLayout = SMALL) -> None:
        seal(self.writer, version, self.generation, layout)
        self.replicator.sealed(version, self.generation)

    def wait(self, sealed: int | None = None, *private: int, timeout_s: float = PATIENCE_S) -> None:
        self.replicator.wait(sealed=sealed, private=private, is_cancelled=lambda: False, timeout_s=timeout_s)


@pytest.fixture
def rank_on() -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def make(*args: Any, **options: Any) -> Rank:
        ranks.append(Rank(*args, **options))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.replicator.close()
        rank.writer.close()


def private_of(version: int) -> bytes:
    return random.Random(version).randbytes(3000)


def test_versions_follow_one_another_in_two_slots(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, *keepers = start("home"), start("a"), start("b")
    rank = rank_on(home, *(keeper.address for keeper in keepers))
    for version in range(5):
        # The optimizer's first step makes new tensors: another layout, another file.
        rank.seal(version, SMALL if version == 0 else GROWN)
        rank.replicator.keep_private(version + 1, 1, private_of(version + 1))
        rank.wait(version, version + 1)
        for keeper in keepers:
            assert versions(keeper.replica) == [version - 1, version][version == 0 :]
            check(keeper.replica)
    for keeper in keepers:
        assert keeper.fence(0) == [[RANK, [3, 4, 5], [3, 4]]]
        store = RemoteStore(keeper.address, unsecured, b"", lambda: False)
        assert store.private("replica", RANK, 5) == private_of(5)
        with pytest.raises(IntegrityError, match="no sealed version 9"):
            store.sealed_state("replica", RANK, 9)


class Floats(Tensors):
    """As weights are: what is in them shrinks by a fifth."""

    def __init__(self, layout: Layout, version: int) -> None:
        super().__init__(layout, None)
        for data in self.data:
            values = np.random.default_rng([version, len(data)]).normal(0, 0.02, len(data) // 4)
            data[:] = values.astype(np.float32).tobytes()


@pytest.mark.parametrize("packs", [False, True])
def test_replicas_are_compressed_where_that_was_asked_for(
    packs: bool, start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    """Floats and noise; the bytes kept are the same, those on the wire are fewer."""
    home = start("home")
    keeper = start("keeper", OPEN, *(["--compress-replicas"] if packs else []))
    rank = rank_on(home, keeper.address)
    layout = rank_layout([4 * MIB, 2 * MIB])
    floats = Floats(layout.sets[0].layout, 1)
    floats.data[1] = bytearray(random.Random(1).randbytes(2 * MIB))
    slot = rank.writer.open_slot(1, 1, layout, 3)
    for chunk in range(slot.num_chunks):
        slot.put(chunk, [floats])
    slot.seal(b"abc")
    rank.replicator.sealed(1, 1)
    rank.wait(1)
    (manifest,) = keeper.replica.read(1).manifests
    assert stream(manifest) == bytes(floats.data[0] + floats.data[1])
    sent, received = home.stats()["packed_bytes"], keeper.stats()["unpacked_bytes"]
    assert sent == received
    assert keeper.stats()["received_bytes"] >= 6 * MIB
    assert (0.1 * 4 * MIB < sent < 0.3 * 4 * MIB) if packs else sent == 0


def test_what_it_counts_is_told_to_who_scrapes(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper")
    rank = rank_on(home, keeper.address)
    rank.seal(0, LARGE)
    rank.wait(0)

    def scrape(address: str | None) -> dict[str, float]:
        found = ShardCollector(lambda: address, timeout_s=0.5).collect()
        return {sample.name: sample.value for metric in found for sample in metric.samples}

    counted = keeper.stats()
    told = scrape(keeper.local)
    assert told["flashrec_shards_up"] == 1
    assert told["flashrec_shards_received_bytes_total"] == counted["received_bytes"] >= 24 * MIB
    assert told["flashrec_shards_replicated_versions_total"] == 1
    assert told["flashrec_shards_waiting_versions"] == 0
    assert scrape(home.local)["flashrec_shards_sent_bytes_total"] == home.stats()["sent_bytes"] >= 24 * MIB
    keeper.process.send_signal(signal.SIGSTOP)
    assert scrape(keeper.local) == {"flashrec_shards_up": 0}
    assert scrape(None) == {}


def test_a_replacement_pulls_from_what_is_kept(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper")
    rank = rank_on(home, keeper.address)
    rank.seal(4, GROWN)
    rank.wait(4)
    home.kill()
    state = RemoteStore(keeper.address, unsecured, b"", lambda: False).sealed_state("replica", RANK, 4)
    assert state.layout == GROWN
    for one, manifest in zip(state.layout.sets, state.manifests, strict=True):
        if len(one.ranks) > 1:
            continue  # the other half is elsewhere
        target, expected = Tensors(one.layout, None), Tensors(one.layout, 4)
        parts = [[Source(manifest, home.address), Source(manifest, keeper.address)]]
        Puller().pull(target, one.layout, parts, version=4, generation=2, deadline_s=PATIENCE_S)
        assert target.data == expected.data


@pytest.mark.parametrize("is_local", [False, True])
def test_a_damaged_replica_that_somebody_pulled_is_counted_on_no_more(
    is_local: bool, start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    """Whoever reads it finds out, wherever it lies; its keeper looks for itself, and another may be kept there."""
    home, bad, good = start("home"), start("bad"), start("good")
    rank = rank_on(home, bad.address, good.address)
    for version in (3, 4):
        rank.seal(version, LARGE)
        rank.wait(version)
    states = [keeper.replica.read(4) for keeper in (bad, good)]
    flip(states[0], 5)
    sources = [
        Source(state.manifests[0], None if is_local and keeper is bad else keeper.address)
        for state, keeper in zip(states, (bad, good), strict=True)
    ]
    target = Tensors(LARGE.sets[0].layout, None)
    puller = Puller(max_threads=1, own_server=bad.local)
    report = puller.pull(
        target, LARGE.sets[0].layout, [sources], version=4, generation=2, deadline_s=PATIENCE_S
    )
    assert target.data == Tensors(LARGE.sets[0].layout, 4).data
    assert [reason for reason in report.refused if "do not match their checksum" in reason]
    assert [keeper.fence(0) for keeper in (bad, good)] == [[[RANK, [], [3]]], [[RANK, [], [3, 4]]]]
    # Asked for once more, it is pulled once more.
    for keeper in (bad, good):
        keeper.ask(Discard(0, 1, 4, 4))
    rank.replicator.close()
    rank.replicator = Replicator(RANK, JOB, home.address, unsecured)
    rank.replicator.set_keepers(rank.keepers, 1)
    rank.replicator.sealed(4, 1)
    rank.wait(4)
    check(bad.replica, [3, 4])
    assert bad.fence(0) == [[RANK, [], [3, 4]]]


def test_nobody_is_believed_that_a_replica_is_damaged(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper")
    rank = rank_on(home, keeper.address)
    rank.seal(4, LARGE)
    rank.wait(4)
    for version in (4, 5):
        keeper.ask(Doubt(0, RANK, version))
    assert keeper.fence(0) == [[RANK, [], [4]]]
    check(keeper.replica, [4])


def flip(state: SealedState, chunk: int) -> None:
    """One byte of it."""
    offset, _ = state.manifests[0].chunk_range(chunk)
    with open(state.path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_what_has_not_changed_is_not_sent(start: Callable[..., Node], rank_on: Callable[..., Rank]) -> None:
    home, keeper = start("home"), start("keeper")
    rank = rank_on(home, keeper.address)
    sent = []
    for version in range(4):
        rank.seal(version, LARGE)
        rank.wait(version)
        check(keeper.replica)
        sent.append(home.stats()["sent_bytes"] - sum(sent))
    assert LARGE.owned_bytes <= sent[0] < LARGE.owned_bytes + MIB
    for later in sent[1:]:
        assert LARGE.owned_bytes // 2 <= later < LARGE.owned_bytes // 2 + MIB
    stats = keeper.stats()
    assert stats["copied_bytes"] == LARGE.owned_bytes // 2  # version 1, whose slot was new
    assert stats["unchanged_bytes"] == LARGE.owned_bytes  # versions 2 and 3, in place since
    assert stats["replicated_versions"] == 4


def test_a_damaged_chunk_kept_here_is_not_copied(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper")
    rank = rank_on(home, keeper.address)
    rank.seal(0, LARGE)
    rank.wait(0)
    manifest = keeper.replica.read(0).manifests[0]
    with open(manifest.path, "r+b") as file:
        file.seek(manifest.chunk_range(0)[0])
        file.write(b"damage")
    rank.seal(1, LARGE)
    rank.wait(1)
    check(keeper.replica, [1])
    assert keeper.stats()["copied_bytes"] == LARGE.owned_bytes // 2 - MIB


@pytest.mark.parametrize("who", ["the same", "another"])
def test_a_transfer_goes_on_where_its_source_was_killed(
    start: Callable[..., Node], rank_on: Callable[..., Rank], who: str
) -> None:
    home, keeper = start("home"), start("keeper", OPEN, "--replica-mbps", "20")
    rank = rank_on(home, keeper.address)
    rank.seal(0, LARGE)
    assert wait_until(lambda: received(keeper) >= 4 * MIB)
    home.kill()
    assert wait_until(lambda: keeper.stats()["failed_replications"] > 0)
    assert received(keeper) < LARGE.owned_bytes, "it was all there before the source was killed"
    before = received(keeper)
    if who == "the same":
        again = start("home", port=home.port)
    else:
        again = start("home")
        rank.replicator.close()
        rank.replicator = Replicator(RANK, JOB, again.address, unsecured)
        rank.replicator.set_keepers(rank.keepers, 1)
        rank.replicator.sealed(0, 1)
    rank.wait(0)
    check(keeper.replica)
    assert LARGE.owned_bytes <= received(keeper) < LARGE.owned_bytes + MIB, "a chunk has come twice"
    assert again.stats()["sent_bytes"] < LARGE.owned_bytes - before + MIB


def received(node: Node) -> int:
    return node.stats()["received_bytes"]


def test_a_keeper_that_is_killed_goes_on_where_it_stopped(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper", OPEN, "--replica-mbps", "20")
    rank = rank_on(home, keeper.address)
    rank.seal(0, LARGE)
    assert wait_until(lambda: received(keeper) >= 4 * MIB)
    before = received(keeper)
    keeper.kill()
    assert versions(keeper.replica) == []
    again = start("keeper", port=keeper.port)
    rank.wait(0)
    check(again.replica)
    assert received(again) < LARGE.owned_bytes - before + MIB


@pytest.mark.parametrize("towards", ["server", "client"])
@pytest.mark.parametrize("between", ["rank and keeper", "keeper and source"])
def test_a_connection_cut_inside_each_message(
    start: Callable[..., Node], rank_on: Callable[..., Rank], between: str, towards: str
) -> None:
    home, keeper = start("home"), start("keeper")
    writer = ArenaWriter(home.root / "arena", RANK, JOB)
    num_cut = 0
    # Inside the greeting, the handshake, the first message and later ones; each way has another number of bytes.
    cuts = [1, 11, 64, 70, 85, 100, 107, 111, 115, 119, 123, 127, 131, 150, 200, 300, 600, 2000, 20_000]
    for number, cut_after in enumerate(cuts):
        version = number + 1
        seal(writer, version)
        to_keeper = between == "rank and keeper"
        cutter = Cutter(keeper.address if to_keeper else home.address, cut_after, towards)
        replicator = Replicator(RANK, JOB, home.address if to_keeper else cutter.address, unsecured)
        try:
            replicator.set_keepers([KeeperAddress(1, cutter.address if to_keeper else keeper.address)], 1)
            replicator.sealed(version, 1)
            replicator.keep_private(version, 1, private_of(version))
            replicator.wait(
                sealed=version, private=[version], is_cancelled=lambda: False, timeout_s=PATIENCE_S
            )
            check(keeper.replica, [version])
            num_cut += cutter.num_cut
        finally:
            replicator.close()
            cutter.close()
    writer.close()
    assert num_cut >= 9, "the dialogues were shorter than where they were to be cut"
    store = RemoteStore(keeper.address, unsecured, b"", lambda: False)
    assert store.private("replica", RANK, len(cuts)) == private_of(len(cuts))


def test_large_private_state_comes_in_pieces(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper")
    payloads = {version: random.Random(version).randbytes(5 * MIB + version) for version in (1, 2, 3)}
    rank = rank_on(home, keeper.address)
    for version, payload in payloads.items():
        rank.replicator.keep_private(version, 1, payload)
    rank.wait(None, 1, 2, 3)
    store = RemoteStore(keeper.address, unsecured, b"", lambda: False)
    assert {version: store.private("replica", RANK, version) for version in payloads} == payloads
    cutter = Cutter(keeper.address, 2 * MIB + 17)
    cut_off = Replicator(RANK, JOB, home.address, unsecured)
    try:
        cut_off.set_keepers([KeeperAddress(1, cutter.address)], 1)
        cut_off.keep_private(4, 1, payloads[3])
        cut_off.wait(sealed=None, private=[4], is_cancelled=lambda: False, timeout_s=PATIENCE_S)
    finally:
        cut_off.close()
        cutter.close()
    assert cutter.num_cut == 1
    assert store.private("replica", RANK, 4) == payloads[3]


# --- peers that are silent, gone, or lie -------------------------------------------------------------------------


def test_who_accepts_and_never_answers_is_named(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        rank = rank_on(home, keeper.address, address)
        rank.seal(0)
        with pytest.raises(
            NotKept, match=rf"node 2 \({address}\) .*version 0 within 0.5 s: it has not answered"
        ):
            rank.wait(0, timeout_s=0.5)
    check(keeper.replica, [0])
    keeper.process.send_signal(signal.SIGSTOP)
    rank.replicator.set_keepers(rank.keepers[:1], 1)
    rank.seal(1)
    with pytest.raises(NotKept, match=r"node 1 .*version 1 within 0.5 s"):
        rank.wait(1, timeout_s=0.5)
    keeper.process.send_signal(signal.SIGCONT)
    rank.wait(1)


def test_a_source_that_never_answers_is_left(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rank = rank_on(home, keeper.address, source=f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        rank.seal(0)
        with pytest.raises(NotKept, match=r"node 1 .*failed: .*it sent nothing for 5 s"):
            rank.wait(0, timeout_s=8)


def test_a_keeper_killed_while_the_rank_waits(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper", OPEN, "--replica-mbps", "1")
    rank = rank_on(home, keeper.address)
    rank.seal(0, LARGE)
    assert wait_until(lambda: received(keeper) > 0)
    raised: list[NotKept] = []
    is_cancelled = threading.Event()

    def wait() -> None:
        try:
            rank.replicator.wait(sealed=0, private=[], is_cancelled=is_cancelled.is_set, timeout_s=60)
        except NotKept as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    keeper.kill()
    with pytest.raises(NotKept, match=r"node 1 .*connection ended"):
        rank.wait(0, timeout_s=0.5)
    assert waiting.is_alive()
    is_cancelled.set()
    waiting.join(20)
    assert raised[0].is_cancelled


def test_a_keeper_that_is_lost_is_replaced(start: Callable[..., Node], rank_on: Callable[..., Rank]) -> None:
    home, lost, stays, new = start("home"), start("lost"), start("stays"), start("new")
    rank = rank_on(home, lost.address, stays.address)
    rank.seal(3)
    rank.replicator.keep_private(3, 1, private_of(3))
    rank.replicator.keep_private(4, 1, private_of(4))
    rank.wait(3, 3, 4)
    lost.kill()
    requests = stays.stats()["requests"]
    rank.replicator.set_keepers([rank.keepers[1], KeeperAddress(3, new.address)], 2)
    rank.wait(3, 3)
    assert stays.stats()["requests"] == requests + 1, "what is acknowledged counts still"
    check(new.replica, [3])
    # What was said of version 4 in the generation before is not repeated: it may have been lost with its step.
    assert new.fence(0) == [[RANK, [3], [3]]]


Lie = Callable[[SealedState], SealedState]


def with_manifests(state: SealedState, **changes: Any) -> SealedState:
    return dataclasses.replace(
        state, manifests=tuple(dataclasses.replace(one, **changes) for one in state.manifests)
    )


def of_another_layout(state: SealedState) -> SealedState:
    other = RankLayout(1, tuple(one for one in SMALL.sets if 1 in one.ranks))
    return dataclasses.replace(state, layout=other)


def with_shorter_table(state: SealedState) -> SealedState:
    one, *others = state.manifests
    return dataclasses.replace(state, manifests=(dataclasses.replace(one, checksums=()), *others))


LIES: list[tuple[str, Lie, str]] = [
    (
        "version",
        lambda state: dataclasses.replace(state, sealed=SealedVersion(9, 1)),
        "a description of version 9",
    ),
    (
        "generation",
        lambda state: dataclasses.replace(state, sealed=SealedVersion(1, 7)),
        "sealed in generation 7",
    ),
    ("layout", of_another_layout, "a description of version 1 of rank 1"),
    ("number of chunks", with_shorter_table, "with a table of"),
    ("size of chunks", lambda state: with_manifests(state, chunk_bytes=512), "with a table of"),
    ("checksum", lambda state: with_manifests(state, checksums=(77,)), "do not match their checksum"),
    (
        "size of tensors",
        lambda state: dataclasses.replace(
            with_manifests(state, checksums=(1,) * (1 << 12)), layout=rank_layout([1 << 32])
        ),
        "with a table of|is full|cannot be",
    ),
]


@pytest.mark.parametrize(("lie", "reason"), [one[1:] for one in LIES], ids=[one[0] for one in LIES])
def test_a_source_that_lies_is_refused_and_harms_nothing(
    start: Callable[..., Node], rank_on: Callable[..., Rank], lie: Lie, reason: str
) -> None:
    home, keeper = start("home"), start("keeper")
    rank = rank_on(home, keeper.address)
    rank.seal(0)
    rank.wait(0)
    rank.replicator.set_keepers([], 1)
    rank.seal(1)
    document = describe(lie(Arena(home.root / "arena", RANK, JOB).read(1)))

    def answer(request: list[Any]) -> list[bytes]:
        if request[2] == "describe":
            return [pack_header(ReplyHeader(request[3], "ok", "", len(document))), document]
        data = Path(home.root / request[4]).read_bytes()[request[5] : request[5] + request[6]]
        return [pack_header(ReplyHeader(request[3], "ok")), data]

    with impostor(answer) as address:
        liar = rank_on(home, keeper.address, source=address)
        liar.replicator.sealed(1, 1)
        with pytest.raises(NotKept, match=reason):
            liar.wait(1, timeout_s=1)
        liar.replicator.close()
    assert versions(keeper.replica) == [0]
    check(keeper.replica)
    stats = keeper.stats()
    assert stats["failed_replications"] > 0
    assert stats["refused_sources"] > 0 or "size of tensors" in reason or "is full" in reason
    honest = rank_on(home, keeper.address)
    honest.wait(1)
    check(keeper.replica, [0, 1])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda data: data[:-1], "where 24015 were asked for|bytes where"),
        (lambda data: data + b"x", "bytes where"),
        (lambda data: data[::-1], "do not match their checksum"),
        (lambda data: b"", "bytes where"),
    ],
)
def test_a_source_that_sends_other_bytes_is_refused(
    start: Callable[..., Node], rank_on: Callable[..., Rank], data: Callable[[bytes], bytes], reason: str
) -> None:
    home, keeper = start("home"), start("keeper")
    rank = rank_on(home)
    rank.seal(1)
    document = describe(Arena(home.root / "arena", RANK, JOB).read(1))

    def answer(request: list[Any]) -> list[bytes]:
        if request[2] == "describe":
            return [pack_header(ReplyHeader(request[3], "ok", "", len(document))), document]
        found = Path(home.root / request[4]).read_bytes()[request[5] : request[5] + request[6]]
        return [pack_header(ReplyHeader(request[3], "ok")), data(found)]

    with impostor(answer) as address:
        liar = rank_on(home, keeper.address, source=address)
        with pytest.raises(NotKept, match=reason):
            liar.wait(1, timeout_s=1)
        liar.replicator.close()
    assert versions(keeper.replica) == []
    assert keeper.replica.problems() == []


def test_another_state_of_the_same_version_and_generation_is_refused(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, other, keeper = start("home"), start("other"), start("keeper")
    rank_on(home, keeper.address).seal(1)
    first = rank_on(home, keeper.address)
    first.wait(1)
    second = rank_on(other, keeper.address)
    seal(second.writer, 1, blob=b"something else")
    with pytest.raises(NotKept, match="is not the one that is kept here"):
        second.wait(1, timeout_s=1)
    check(keeper.replica, [1])
    # A later generation's takes its place; the same bytes are not sent again.
    third = start("third")
    later = rank_on(third, keeper.address)
    seal(later.writer, 1, 2, blob=b"something else")
    later.replicator.set_keepers(later.keepers, 2)
    sent = third.stats()["sent_bytes"]
    later.wait(1)
    assert keeper.replica.sealed() == [SealedVersion(1, 2)]
    check(keeper.replica, blob=b"something else")
    assert third.stats()["sent_bytes"] - sent < SMALL.owned_bytes


# --- generations ----------------------------------------------------------------------------------------------------


def test_what_was_on_its_way_when_its_generation_ended_is_not_sealed(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper", OPEN, "--replica-mbps", "10")
    rank = rank_on(home, keeper.address)
    rank.seal(0, LARGE)
    assert wait_until(lambda: received(keeper) >= 2 * MIB)
    assert keeper.fence(1) == [[RANK, [], []]]
    with pytest.raises(NotKept, match=r"node 1 .*generation 1 is over"):
        rank.wait(0)
    assert wait_until(lambda: keeper.stats()["replicas_under_way"] == 0)
    assert keeper.fence(1) == [[RANK, [], []]]
    rank.replicator.keep_private(1, 1, b"late")
    with pytest.raises(NotKept, match="generation 1 is over"):
        rank.wait(None, 1)
    assert keeper.stats()["fenced"] >= 2
    # It stays so when the server is started anew; the next generation goes on with what had arrived.
    before = received(keeper)
    keeper.kill()
    again = start("keeper", port=keeper.port)
    with pytest.raises(SourceFailed, match="generation 1 is over"):
        again.ask(Replicate(0, RANK, 0, 1, home.address))
    rank.generation = 2
    rank.replicator.set_keepers(rank.keepers, 2)
    rank.wait(0)
    check(again.replica, [0])
    assert received(again) < LARGE.owned_bytes - before + MIB


def test_what_was_lost_is_discarded_and_done_again(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper")
    rank = rank_on(home, keeper.address)
    for version in (4, 5):
        rank.seal(version)
        rank.replicator.keep_private(version, 1, private_of(version))
        rank.wait(version, version)
    assert keeper.fence(1) == [[RANK, [4, 5], [4, 5]]]
    keeper.ask(Discard(0, 2, 4, 4))
    assert keeper.fence(1) == [[RANK, [4], [4]]]
    Arena(home.root / "arena", RANK, JOB).discard_above(4)
    rank.generation = 2
    rank.replicator.set_keepers(rank.keepers, 2)
    rank.wait(4, 4)
    rank.seal(5)
    rank.replicator.keep_private(5, 2, b"again")
    rank.wait(5, 5)
    keeper.ask(Discard(0, 2, 4, 4))  # late: harmless
    assert keeper.fence(1) == [[RANK, [4, 5], [4, 5]]]
    assert keeper.replica.sealed() == [SealedVersion(4, 1), SealedVersion(5, 2)]
    check(keeper.replica)
    store = RemoteStore(keeper.address, unsecured, b"", lambda: False)
    assert store.private("replica", RANK, 5) == b"again"


def test_a_full_version_above_the_watermark_is_lost_though_private_state_of_its_version_is_not(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper")
    rank = rank_on(home, keeper.address)
    for version in (4, 5):
        rank.seal(version)
        rank.replicator.keep_private(version, 1, private_of(version))
        rank.wait(version, version)
    keeper.ask(Discard(0, 2, 5, 4))
    assert keeper.fence(1) == [[RANK, [4, 5], [4]]]
    keeper.ask(Discard(0, 2, -1, -1))
    assert keeper.fence(1) == [[RANK, [], []]]


def test_ranks_that_are_kept_elsewhere_are_forgotten(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper", OPEN, "--replica-mbps", "10")
    rank = rank_on(home, keeper.address)
    rank.replicator.keep_private(0, 1, b"private")
    rank.wait(None, 0)
    rank.seal(0, LARGE)
    assert wait_until(lambda: received(keeper) >= 2 * MIB)
    keeper.ask(Forget(0, (RANK, 77)))
    rank.replicator.set_keepers([], 1)
    assert wait_until(lambda: not list((keeper.root / "replica").iterdir()))
    assert keeper.fence(0) == []


# --- strangers ------------------------------------------------------------------------------------------------------


def test_what_only_the_daemon_may_ask_is_refused_from_elsewhere(start: Callable[..., Node]) -> None:
    node = start("node")
    for request in (Fence(5, 3), Discard(5, 3, 1, 1), Forget(5, (RANK,))):
        with (
            ShardConnection(node.address, b"", lambda: False) as connection,
            pytest.raises(SourceFailed, match=r"refused: .*from elsewhere"),
        ):
            connection.call(request, 10)
    assert node.stats()["refused_requests"] == 3


def test_garbage_and_half_truths_at_the_door(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper")
    chance = random.Random(5)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(keeper.address)
        requests = [
            pack_request(Replicate(7, RANK, 1, 1, "tcp://127.0.0.1:1"), b""),
            pack_request(Keep(7, RANK, 1, 1, False, 100, 5), b""),
            pack_request(Keep(7, RANK, 1, 1, False, 1 << 28, 5, 1 << 20), b""),
            pack_request(Describe(7, "replica", RANK, 1, 1 << 20), b""),
            pack_request(Stats(7), b""),
        ]
        for number in range(300):
            frame = bytearray(chance.choice(requests))
            for _ in range(chance.randrange(3)):
                frame[chance.randrange(len(frame))] = chance.randrange(256)
            frames = [bytes(frame), chance.randbytes(chance.randrange(200))][: chance.randrange(1, 3)]
            dealer.send_multipart(frames)
            # Replications of one rank take one another's place, so that each is answered, the last one soon.
            if number % 20 == 19:
                for _ in range(20):
                    assert dealer.poll(20_000)
                    header, _ = dealer.recv_multipart()
                    unpack_header(header)
    rank = rank_on(home, keeper.address)
    rank.seal(0)
    rank.wait(0)
    check(keeper.replica, [0])


def test_a_reader_that_does_not_read_costs_bounded_memory(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, keeper = start("home"), start("keeper")
    rank = rank_on(home, keeper.address)
    payload = bytes(40 * MIB)
    rank.replicator.keep_private(0, 1, payload)
    rank.wait(None, 0)
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        for _ in range(3):
            greedy = stack.enter_context(context.socket(zmq.DEALER))
            greedy.linger = 0
            greedy.rcvhwm = 1
            greedy.connect(keeper.address)
            for number in range(400):
                greedy.send(pack_request(Describe(number, "replica", RANK, number), b""))
        rank.seal(0)
        rank.wait(0)
        peak_kib = int(
            next(
                line
                for line in Path(f"/proc/{keeper.process.pid}/status").read_text().splitlines()
                if line.startswith("RssAnon")
            ).split()[1]
        )
    assert peak_kib < 250 << 10


@pytest.mark.parametrize("bulk", ["encrypted", "plain"])
def test_only_who_has_the_clusters_key_is_let_in(
    start: Callable[..., Node], rank_on: Callable[..., Rank], tmp_path: Path, bulk: str
) -> None:
    key = ClusterKey.generate()
    key.write(tmp_path / "key")
    options = ("--cluster-key", str(tmp_path / "key"), "--bulk", bulk)
    home, keeper = start("home", *options), start("keeper", *options)
    secure, token = (key.as_client, b"") if bulk == "encrypted" else (unsecured, key.token())
    rank = rank_on(home, keeper.address, secure=secure, token=token)
    rank.seal(0)
    rank.replicator.keep_private(0, 1, private_of(0))
    rank.wait(0, 0)
    check(keeper.replica, [0])
    store = RemoteStore(keeper.address, secure, token, lambda: False)
    assert store.private("replica", RANK, 0) == private_of(0)
    stranger_key = ClusterKey.generate()
    strangers = [(unsecured, b""), (unsecured, b"x" * 32)]
    strangers += [(stranger_key.as_client, b""), (stranger_key.as_client, key.token())]
    for no_key, no_token in strangers:
        with pytest.raises(IntegrityError):
            RemoteStore(keeper.address, no_key, no_token, lambda: False, timeout_s=1).private(
                "replica", RANK, 0
            )
    stranger = rank_on(home, keeper.address, secure=stranger_key.as_client)
    stranger.replicator.keep_private(1, 1, b"mine")
    with pytest.raises(NotKept):
        stranger.wait(None, 1, timeout_s=0.5)
    assert keeper.fence(0) == [[RANK, [0], [0]]]


def test_nothing_is_left_of_a_replicator(start: Callable[..., Node], rank_on: Callable[..., Rank]) -> None:
    home, keeper = start("home"), start("keeper")
    for version in range(10):
        rank = rank_on(home, keeper.address, "tcp://127.0.0.1:1")
        rank.seal(version)
        with pytest.raises(NotKept, match=r"node [12] .*version"):
            rank.wait(version, timeout_s=0.2)
        rank.replicator.close()
        rank.replicator.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "flashrec-replicate"]


def test_several_nodes_give_a_share_each_and_one_that_dies_is_made_up_for(
    start: Callable[..., Node], rank_on: Callable[..., Rank]
) -> None:
    home, *keepers = start("home"), start("a"), start("b"), start("c")
    rank = rank_on(home, *(keeper.address for keeper in keepers))
    layout = rank_layout([24 * MIB, 24 * MIB])
    rank.seal(0, layout)
    rank.wait(0)
    home.kill()
    stores = [RemoteStore(keeper.address, unsecured, b"", lambda: False) for keeper in keepers]
    states = [store.sealed_state("replica", RANK, 0) for store in stores]
    part = [Source(state.manifests[0], keeper.address) for state, keeper in zip(states, keepers, strict=True)]
    one = layout.sets[0]
    for dead in (None, keepers[1]):
        if dead is not None:
            dead.kill()
        target = Tensors(one.layout, None)
        report = Puller().pull(target, one.layout, [part], version=0, generation=1, deadline_s=PATIENCE_S)
        assert target.data == Tensors(one.layout, 0).data
        assert sum(report.bytes_by_source.values()) == layout.owned_bytes
        shares = {source.address: report.bytes_by_source.get(str(source), 0) for source in part}
        assert [address for address, size_bytes in shares.items() if size_bytes == 0] == (
            [] if dead is None else [dead.address]
        )
