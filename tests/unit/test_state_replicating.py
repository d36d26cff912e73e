"""What a rank asks of its keepers and when it may go on; what a keeper keeps, for which generation; and what travels
between them. The other side is played by the test: no process, no waiting."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashrec.errors import IntegrityError, UsageError
from flashrec.state.arena import Arena
from flashrec.state.arena_writer import ArenaWriter
from flashrec.state.codec import checksum
from flashrec.state.describing import describe, described, enclose, open_envelope
from flashrec.state.remote import ShardConnection, SourceFailed
from flashrec.state.replicating import KeeperAddress, NotKept, Replicator
from flashrec.state.shardwire import (
    MAX_PRIVATE_BYTES,
    PIECE_BYTES,
    Describe,
    Keep,
    Private,
    Replicate,
    ReplyHeader,
    Request,
    pack_header,
    unpack_request,
)
from flashrecd.shards.answering import piece_of
from flashrecd.shards.counters import Counters
from flashrecd.shards.replicas import Replicas
from flashrecd.shards.replication import Connect, Pace
from tests.arenas import GROWN, JOB, RANK, SMALL, blob_of, seal

PATIENCE_MS = 20_000
HOME = "tcp://127.0.0.1:9"


class ScriptedKeeper:
    """Takes requests one by one, and answers when it is told to."""

    def __init__(self, path: Path, node: int) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(f"ipc://{path}")
        self.address = KeeperAddress(node, f"ipc://{path}")

    def take(self) -> tuple[Request, Callable[..., None]]:
        """The next request, and what answers it."""
        assert self._router.poll(PATIENCE_MS), "nothing was asked"
        peer, frame, *_ = self._router.recv_multipart()
        request, key = unpack_request(frame)
        assert key == b"token"

        def answer(status: Any = "ok", detail: str = "") -> None:
            self._router.send_multipart(
                [peer, pack_header(ReplyHeader(request.request_id, status, detail)), b""]
            )

        return request, answer

    def take_about(self) -> tuple[str, int, int]:
        """The next request in short, acknowledged."""
        request, answer = self.take()
        answer()
        return about(request)

    def close(self) -> None:
        self._context.destroy(linger=0)


def about(request: Request) -> tuple[str, int, int]:
    assert isinstance(request, Replicate | Keep)
    return type(request).__name__, request.version, request.generation


@pytest.fixture
def keepers(tmp_path: Path) -> Iterator[list[ScriptedKeeper]]:
    made = [ScriptedKeeper(tmp_path / f"k{node}", node) for node in (1, 2)]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def replicator() -> Iterator[Replicator]:
    made = Replicator(RANK, JOB, HOME, lambda _: None, b"token")
    yield made
    made.close()


def wait(replicator: Replicator, sealed: int | None, *private: int, timeout_s: float = 20) -> None:
    replicator.wait(sealed=sealed, private=private, is_cancelled=lambda: False, timeout_s=timeout_s)


def is_missing(replicator: Replicator, sealed: int | None, *private: int) -> bool:
    """Whether a wait would not be over at once."""
    try:
        wait(replicator, sealed, *private, timeout_s=0)
    except NotKept:
        return True
    return False


def test_without_keepers_nothing_is_waited_for(replicator: Replicator) -> None:
    wait(replicator, None, timeout_s=0)
    replicator.set_keepers([], 1)
    replicator.sealed(5, 1)
    wait(replicator, 5, timeout_s=0)


def test_every_keeper_must_have_acknowledged(replicator: Replicator, keepers: list[ScriptedKeeper]) -> None:
    one, two = keepers
    replicator.set_keepers([one.address], 3)
    replicator.sealed(7, 3)
    request, answer = one.take()
    assert request == Replicate(request.request_id, RANK, 7, 3, HOME, "arena")
    answer()
    wait(replicator, 7)
    replicator.set_keepers([one.address, two.address], 3)
    _, answer = two.take()
    with pytest.raises(NotKept, match=r"node 2 .*sealed version 7 within 0 s: it has not answered yet"):
        wait(replicator, 7, timeout_s=0.0)
    answer()
    wait(replicator, 7)


def test_whatever_ends_the_thread_is_told(keepers: list[ScriptedKeeper]) -> None:
    def secure(_: object) -> None:
        raise ValueError("no such key")

    replicator = Replicator(RANK, JOB, HOME, secure)
    replicator.set_keepers([keepers[0].address], 1)
    replicator.sealed(1, 1)
    with pytest.raises(NotKept, match="no such key"):
        wait(replicator, 1)
    replicator.close()


def test_private_state_goes_along_oldest_first(replicator: Replicator, keepers: list[ScriptedKeeper]) -> None:
    replicator.keep_private(8, 1, b"eight")
    replicator.keep_private(7, 1, b"seven")
    replicator.set_keepers([keepers[0].address], 1)
    with pytest.raises(NotKept):  # not said in this generation, but named
        wait(replicator, None, 7, 8, timeout_s=0)
    request, answer = keepers[0].take()
    assert request == Keep(request.request_id, RANK, 7, 1, False, 5, checksum(b"seven"), 0)
    answer()
    assert keepers[0].take_about() == ("Keep", 8, 1)
    wait(replicator, None, 7, 8)


def test_large_private_state_is_acknowledged_by_its_last_piece(
    replicator: Replicator, keepers: list[ScriptedKeeper]
) -> None:
    replicator.set_keepers([keepers[0].address], 1)
    replicator.keep_private(1, 1, bytes(2 * PIECE_BYTES + 1))
    taken = [keepers[0].take() for _ in range(3)]
    assert [request.offset for request, _ in taken if isinstance(request, Keep)] == [
        0,
        PIECE_BYTES,
        2 * PIECE_BYTES,
    ]
    taken[0][1]()
    taken[1][1]()
    assert is_missing(replicator, None, 1)
    taken[2][1]()
    wait(replicator, None, 1)


def test_what_is_refused_ends_the_wait_and_what_failed_is_asked_again(
    replicator: Replicator, keepers: list[ScriptedKeeper]
) -> None:
    replicator.set_keepers([keepers[0].address], 1)
    replicator.sealed(1, 1)
    _, answer = keepers[0].take()
    answer("failed", "no room")
    request, answer = keepers[0].take()
    assert about(request) == ("Replicate", 1, 1)
    answer("refused", "it is over")
    with pytest.raises(NotKept, match=r"node 1 .*does not keep sealed version 1: it is over") as caught:
        wait(replicator, 1)
    assert not caught.value.is_cancelled


def test_a_cancelled_wait_says_so(replicator: Replicator, keepers: list[ScriptedKeeper]) -> None:
    replicator.set_keepers([keepers[0].address], 1)
    replicator.sealed(1, 1)
    with pytest.raises(NotKept) as caught:
        replicator.wait(sealed=1, private=[], is_cancelled=lambda: True, timeout_s=100)
    assert caught.value.is_cancelled


def test_an_answer_is_of_the_last_thing_said(replicator: Replicator, keepers: list[ScriptedKeeper]) -> None:
    """Private state that changed after the gate is sealed again, and must be kept again."""
    replicator.set_keepers([keepers[0].address], 1)
    replicator.keep_private(3, 1, b"first")
    _, answer = keepers[0].take()
    replicator.keep_private(3, 1, b"second")
    answer()
    request, answer = keepers[0].take()
    assert isinstance(request, Keep)
    assert request.checksum == checksum(b"second")
    assert is_missing(replicator, None, 3)
    answer()
    wait(replicator, None, 3)


def test_the_same_said_twice_is_asked_once(replicator: Replicator, keepers: list[ScriptedKeeper]) -> None:
    replicator.set_keepers([keepers[0].address], 1)
    replicator.keep_private(3, 1, b"as it was")
    assert keepers[0].take_about() == ("Keep", 3, 1)
    wait(replicator, None, 3)
    replicator.keep_private(3, 1, bytes(bytearray(b"as it was")))
    wait(replicator, None, 3, timeout_s=0)
    replicator.keep_private(4, 1, b"next")
    assert keepers[0].take_about() == ("Keep", 4, 1)


def test_private_state_of_a_full_version_is_waited_for_as_such(
    replicator: Replicator, keepers: list[ScriptedKeeper]
) -> None:
    replicator.set_keepers([keepers[0].address], 1)
    replicator.keep_private(3, 1, b"full", full=True)
    request, answer = keepers[0].take()
    assert isinstance(request, Keep)
    assert request.full
    answer()
    wait(replicator, None, 3)
    # The other kind is let go of sooner, so it does not stand in for this one.
    replicator.keep_private(4, 1, b"full")
    assert keepers[0].take_about() == ("Keep", 4, 1)
    wait(replicator, None, 4)
    replicator.keep_private(4, 1, b"full", full=True)
    assert is_missing(replicator, None, 4)
    assert keepers[0].take_about() == ("Keep", 4, 1)
    wait(replicator, None, 4)


def test_a_new_generation_repeats_only_what_is_named(
    replicator: Replicator, keepers: list[ScriptedKeeper]
) -> None:
    one, two = keepers
    replicator.set_keepers([one.address], 1)
    replicator.sealed(4, 1)
    assert one.take_about() == ("Replicate", 4, 1)
    wait(replicator, 4)
    replicator.sealed(5, 1)
    replicator.keep_private(6, 1, b"lost with its step")
    one.take(), one.take()  # never answered
    replicator.set_keepers([one.address, two.address], 2)
    assert is_missing(replicator, 4)
    assert two.take_about() == ("Replicate", 4, 2)
    wait(replicator, 4)  # what the first had acknowledged counts still
    replicator.sealed(5, 2)
    assert one.take_about() == ("Replicate", 5, 2)
    assert two.take_about() == ("Replicate", 5, 2)
    wait(replicator, 5)
    with pytest.raises(UsageError, match="never told its private state of version 9"):
        wait(replicator, None, 9)


def test_a_version_done_again_is_asked_for_again(
    replicator: Replicator, keepers: list[ScriptedKeeper]
) -> None:
    one = keepers[0]
    replicator.set_keepers([one.address], 1)
    for version in (4, 5):
        replicator.sealed(version, 1)
        assert one.take_about() == ("Replicate", version, 1)
        wait(replicator, version)
    replicator.set_keepers([one.address], 2)
    replicator.sealed(4, 2)  # resumed at
    assert one.take_about() == ("Replicate", 4, 2)
    wait(replicator, 4)
    replicator.sealed(5, 2)
    assert is_missing(replicator, 5)
    assert one.take_about() == ("Replicate", 5, 2)
    wait(replicator, 5)
    replicator.sealed(5, 2)  # said twice: nothing to do
    wait(replicator, 5, timeout_s=0)


def test_what_an_older_generation_says_late_is_not_heard(
    replicator: Replicator, keepers: list[ScriptedKeeper]
) -> None:
    replicator.set_keepers([keepers[0].address], 2)
    replicator.keep_private(9, 1, b"late")
    replicator.sealed(9, 1)
    replicator.sealed(3, 2)
    assert keepers[0].take_about() == ("Replicate", 3, 2)


def test_private_state_that_no_keeper_takes_is_refused(
    replicator: Replicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashrec.state.replicating.MAX_PRIVATE_BYTES", 10)
    with pytest.raises(UsageError, match="among the tensors"):
        replicator.keep_private(1, 1, bytes(11))
    assert MAX_PRIVATE_BYTES > 100 << 20


# --- the keeper ------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def replicas_in(root: Path) -> Replicas:
    counters = Counters()
    return Replicas(root, JOB, counters, Connect(), Pace(None, counters))


@pytest.fixture
def replicas(root: Path) -> Iterator[Replicas]:
    with replicas_in(root) as made:
        yield made


def keep(
    replicas: Replicas, version: int, generation: int, payload: bytes, *, rank: int = RANK, full: bool = False
) -> list[str]:
    """The statuses of the answers to all pieces."""
    digest = checksum(payload)
    return [
        replicas.keep(
            Keep(1, rank, version, generation, full, len(payload), digest, offset),
            memoryview(payload)[offset : offset + PIECE_BYTES],
        ).status
        for offset in range(0, max(1, len(payload)), PIECE_BYTES)
    ]


def told(replicas: Replicas, make: Callable[[int], Describe | Private]) -> bytes | str:
    """All pieces together, or why there are none."""
    answers: queue.SimpleQueue[tuple[ReplyHeader, bytes]] = queue.SimpleQueue()
    whole = b""
    while True:
        replicas.tell(make(len(whole)), lambda header, data: answers.put((header, bytes(data))))
        header, data = answers.get(timeout=20)
        if header.status != "ok":
            return header.detail
        whole += data
        if len(whole) >= header.total_bytes:
            return whole


def private_of(replicas: Replicas, version: int) -> bytes | str:
    found = told(replicas, lambda offset: Private(1, "replica", RANK, version, offset))
    return found if isinstance(found, str) else bytes(open_envelope(found))


def test_private_state_of_any_size_is_kept(replicas: Replicas) -> None:
    for version, size_bytes in enumerate([0, 1, PIECE_BYTES, PIECE_BYTES + 1]):
        payload = bytes([version]) * size_bytes
        assert set(keep(replicas, version, 1, payload)) == {"ok"}
        assert keep(replicas, version, 1, payload)[-1] == "ok", "it is said again when its answer was lost"
        assert private_of(replicas, version) == payload
    assert replicas.holdings() == [(RANK, [1, 2, 3], [])]
    assert "no sealed version 9" in private_of(replicas, 9)  # type: ignore[operator]


def test_an_older_version_said_again_is_no_mistake(replicas: Replicas) -> None:
    for version in (1, 2):
        keep(replicas, version, 1, b"x%d" % version)
    assert keep(replicas, 1, 1, b"x1") == ["ok"]
    assert keep(replicas, 1, 1, b"another") == ["refused"]
    assert private_of(replicas, 1) == b"x1"


def test_what_changed_after_the_gate_takes_its_place(replicas: Replicas) -> None:
    keep(replicas, 1, 1, b"before")
    assert keep(replicas, 1, 1, b"after") == ["ok"]
    assert private_of(replicas, 1) == b"after"


@pytest.mark.parametrize(
    ("request_", "data", "status"),
    [
        (Keep(1, RANK, 1, 1, False, 5, checksum(b"right"), 0), b"wrong", "failed"),
        (Keep(1, RANK, 1, 1, False, 5, checksum(b"right"), 0), b"righ", "refused"),
        (Keep(1, RANK, 1, 1, False, 5, checksum(b"right"), 0), b"right!", "refused"),
        (Keep(1, RANK, 1, 1, False, 5, checksum(b"right"), 9), b"", "refused"),
        (Keep(1, RANK, 1, 1, False, 2 * PIECE_BYTES, 5, PIECE_BYTES), bytes(PIECE_BYTES), "failed"),
    ],
)
def test_pieces_that_do_not_fit_are_not_kept(
    replicas: Replicas, request_: Keep, data: bytes, status: str
) -> None:
    assert replicas.keep(request_, memoryview(data)).status == status
    assert replicas.holdings() == []


def test_full_private_state_is_kept_apart(replicas: Replicas) -> None:
    keep(replicas, 2, 1, b"full", full=True)
    for version in range(5, 10):
        keep(replicas, version, 1, b"x")
    assert replicas.holdings() == [(RANK, [2, 7, 8, 9], [])]
    assert private_of(replicas, 2) == b"full"


def test_a_fence_holds_also_for_the_next_process(root: Path, replicas: Replicas) -> None:
    keep(replicas, 1, 3, b"x")
    assert replicas.fence(3) == [(RANK, [1], [])]
    assert replicas.fence(2) == [(RANK, [1], [])]
    assert keep(replicas, 2, 3, b"late") == ["refused"]
    answers: list[ReplyHeader] = []
    replicas.replicate(Replicate(5, RANK, 1, 3, HOME), lambda header, _: answers.append(header))
    assert [answer.status for answer in answers] == ["refused"]
    with replicas_in(root) as again:
        assert keep(again, 2, 3, b"late") == ["refused"]
        assert keep(again, 2, 4, b"next") == ["ok"]
    (root / "fence").write_bytes(b"junk")
    with replicas_in(root) as again:
        assert keep(again, 3, 4, b"next") == ["ok"]


def test_nothing_is_pulled_while_a_lost_version_is_here(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan went back to 4: were 5 pulled beside the lost attempt at it, 4 would have to give way."""
    with_arena(root, [(4, 1), (5, 1)])
    there: list[list[int]] = []

    class Watched(Connect):
        def to(self, address: str, is_given_up: Callable[[], bool]) -> ShardConnection:
            there.append([one.version for one in Arena(root / "replica", RANK, JOB).sealed()])
            raise SourceFailed("this test has no source")

    counters = Counters()
    pace = Pace(None, counters)
    monkeypatch.setattr(pace, "be_nice", lambda: None)
    with Replicas(root, JOB, counters, Watched(), pace) as replicas:
        monkeypatch.setattr(replicas._pullers, "submit", lambda work, rank: work(rank))
        answers: list[str] = []

        def ask(generation: int, version: int = 5) -> None:
            request = Replicate(1, RANK, version, generation, HOME)
            replicas.replicate(request, lambda header, _: answers.append(header.status))

        replicas.fence(1)
        ask(2)
        replicas.discard(1, 4, 4)  # of a generation that is over
        assert (there, answers) == ([], [])
        replicas.discard(2, 4, 4)
        assert (there, answers) == ([[4]], ["failed"])
        ask(2)
        assert there == [[4], [4]]
        replicas.fence(2)
        ask(3)
        replicas.fence(3)  # what waits is over, and hears it
        assert answers == ["failed", "failed", "failed"]


def test_only_what_was_lost_is_discarded(root: Path, replicas: Replicas) -> None:
    with_arena(root, [(4, 1), (5, 1)])
    for version in (4, 5, 6):
        keep(replicas, version, 1, b"x")
    replicas.discard(2, 4, 4)
    assert replicas.holdings() == [(RANK, [4], [4])]
    with_arena(root, [(5, 2)])
    keep(replicas, 5, 2, b"x")
    replicas.discard(2, 4, 4)
    assert replicas.holdings() == [(RANK, [4, 5], [4, 5])]
    replicas.forget((RANK, 99))
    assert replicas.holdings() == []
    assert not [path for folder in root.iterdir() if folder.is_dir() for path in folder.iterdir()]


def with_arena(root: Path, sealed: list[tuple[int, int]], where: str = "replica") -> None:
    writer = ArenaWriter(root / where, RANK, JOB)
    for version, generation in sealed:
        seal(writer, version, generation)
    writer.close()


def test_a_description_is_told_in_pieces_and_made_once(root: Path, replicas: Replicas) -> None:
    writer = ArenaWriter(root / "arena", RANK, JOB)
    blob = bytes(range(256)) * (PIECE_BYTES // 100)
    seal(writer, 3, 1, GROWN, blob)
    data = told(replicas, lambda offset: Describe(1, "arena", RANK, 3, offset))
    assert isinstance(data, bytes)
    state = described(data, RANK, 3)
    assert state == Arena(root / "arena", RANK, JOB).read(3)
    assert state.blob == blob
    assert "no sealed version 3" in told(replicas, lambda offset: Describe(1, "replica", RANK, 3, offset))  # type: ignore[operator]
    assert piece_of(data, 5, 1)[0].status == "gone"
    assert piece_of(data, len(data) // PIECE_BYTES * PIECE_BYTES + PIECE_BYTES, 1)[0].status == "gone"
    assert piece_of(b"", 0, 1)[0] == ReplyHeader(1, "ok", "", 0)


# --- what travels ----------------------------------------------------------------------------------------------------


@pytest.fixture
def document(root: Path) -> bytes:
    with_arena(root, [(3, 1)], "arena")
    return describe(Arena(root / "arena", RANK, JOB).read(3))


@given(st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_description_is_none(document: bytes, data: st.DataObject) -> None:
    damaged = bytearray(document)
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(IntegrityError):
        described(damaged, RANK, 3)
    with pytest.raises(IntegrityError):
        described(document[:place], RANK, 3)


@given(st.binary(max_size=200), st.integers(0, 7))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_liar_encloses_is_no_description(document: bytes, junk: bytes, kind: int) -> None:
    content = bytearray(open_envelope(document))
    if kind < 4:
        content[: len(junk)] = junk
    else:
        content = bytearray(junk)
    try:
        state = described(enclose(bytes(content)), RANK, 3)
    except IntegrityError:
        return
    # Whatever is let through is consistent in itself: of this rank and version, each chunk with a checksum.
    assert (state.layout.rank, state.sealed.version) == (RANK, 3)
    for manifest, one in zip(state.manifests, state.layout.sets, strict=True):
        assert list(manifest.pieces) == one.part(RANK)
        assert len(manifest.checksums) == -(-manifest.size_bytes // manifest.chunk_bytes)


def test_a_description_is_of_what_was_asked_for(document: bytes) -> None:
    state = described(document, RANK, 3)
    assert (state.layout, state.blob, state.sealed.version) == (SMALL, blob_of(3), 3)
    for rank, version in ((RANK + 1, 3), (RANK, 4)):
        with pytest.raises(IntegrityError, match="a description of version 3 of rank 3, not"):
            described(document, rank, version)


def test_the_pace_is_that_of_all_threads_together() -> None:
    now = 100.0
    slept: list[float] = []

    def sleep(wait_s: float) -> None:
        nonlocal now
        slept.append(wait_s)
        now += wait_s

    counters = Counters()
    pace = Pace(1000.0, counters, clock=lambda: now, sleep=sleep)
    for _ in range(10):
        pace.take(500)
    assert now == pytest.approx(105.0, abs=0.06)
    assert counters.paced_ms == pytest.approx(1000 * sum(slept), abs=len(slept))
    now += 1000  # what was not used is not saved up
    pace.take(500)
    assert slept[-1] == pytest.approx(0.5, abs=0.06)
    Pace(None, counters, clock=lambda: now, sleep=lambda _: pytest.fail("there is no cap")).take(1 << 40)
