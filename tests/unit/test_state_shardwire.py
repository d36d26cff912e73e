"""What the shard server answers to whom: only complete files of two kinds, to who has the key, whatever is
sent."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashrec.errors import EnvironmentFault, ProtocolError, UsageError
from flashrec.state.manifest import MAX_CHUNK_BYTES
from flashrec.state.shardwire import (
    MAX_REQUEST_BYTES,
    PROTOCOL,
    Describe,
    Discard,
    Doubt,
    Fence,
    Forget,
    Get,
    Keep,
    Private,
    Replicate,
    ReplyHeader,
    Request,
    Stats,
    pack_header,
    pack_request,
    unpack_header,
    unpack_request,
)
from flashrecd.shards.answering import Answers
from flashrecd.shards.counters import Counters
from flashrecd.shards.server import Security, check_endpoint

DATA = bytes(range(256)) * 16
KEY = b"secret key"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("export", "arena", "private", "layout"):
        (tmp_path / "job" / folder).mkdir(parents=True)
    (tmp_path / "job" / "export" / "g2.r0.0").write_bytes(DATA)
    (tmp_path / "job" / "arena" / "r0.1").write_bytes(DATA * 2)
    (tmp_path / "job" / "arena" / ".r0.1.77.0").write_bytes(b"being made")
    (tmp_path / "job" / "private" / "r0.v7.g2").write_bytes(DATA[::-1])
    (tmp_path / "job" / "private" / ".r0.v8.g2.1.1").write_bytes(b"being written")
    (tmp_path / "job" / "layout" / "r0").write_bytes(b"layout")
    (tmp_path / "secret").write_bytes(b"secret")
    return tmp_path / "job"


class Door:
    """What a peer meets: answers, which all come at once here, to who has the key."""

    def __init__(self, root: Path, key: bytes = b"") -> None:
        self.counters = Counters()
        self.key = key
        self.answers = Answers(root, self.counters)
        self.files = self.answers.files

    def answer(self, frames: Sequence[bytes]) -> list[bytes]:
        reply = self.answers.answer(frames, lambda *_: pytest.fail("an answer that came late"), key=self.key)
        assert reply is not None
        return [bytes(frame) for frame in reply]


def ask(files: Door, frame: bytes, *more: bytes) -> tuple[ReplyHeader, bytes]:
    header, data = files.answer([frame, *more])
    return unpack_header(header), bytes(data)


def get(
    files: Door, name: str, offset: int = 0, size_bytes: int = 10, key: bytes = b""
) -> tuple[ReplyHeader, bytes]:
    return ask(files, pack_request(Get(5, name, offset, size_bytes), key))


def test_ranges_of_every_kind_of_file(root: Path) -> None:
    files = Door(root)
    assert get(files, "export/g2.r0.0", 3, 20) == (ReplyHeader(5, "ok", ""), DATA[3:23])
    assert get(files, "private/r0.v7.g2", 0, len(DATA)) == (ReplyHeader(5, "ok", ""), DATA[::-1])
    assert get(files, "arena/r0.1", len(DATA), 100) == (ReplyHeader(5, "ok", ""), DATA[:100])
    assert files.counters.sent_bytes == 20 + len(DATA) + 100


def test_what_is_written_in_an_arena_is_seen_by_the_next_request(root: Path) -> None:
    files = Door(root)
    assert get(files, "arena/r0.1")[1] == DATA[:10]
    with open(root / "arena" / "r0.1", "r+b") as file:
        file.write(b"9876543210")
    assert get(files, "arena/r0.1")[1] == b"9876543210"


@pytest.mark.parametrize(
    "name",
    [
        "secret",
        "../secret",
        "export/../../secret",
        "export/../layout/r0",
        "layout/r0",
        "/etc/passwd",
        "export/",
        "export/g2.r0.0/",
        "export/g2.r0.0\0",
        "export/g2.r0.0\n",
        "private/.r0.v8.g2.1.1",
        "export/g\u0662.r0.0",
        "export/g2.r0",
        "arena/.r0.1.77.0",
        "arena/r0",
        "arena/r0.1/../../layout/r0",
        "",
        "export//g2.r0.0",
    ],
)
def test_no_other_name_can_be_spelt(root: Path, name: str) -> None:
    files = Door(root)
    header, data = get(files, name)
    assert header.status == "refused"
    assert data == b""
    assert files.counters.refused_requests == 1
    assert files.counters.sent_bytes == 0


@pytest.mark.parametrize(
    ("offset", "size_bytes"), [(-1, 5), (0, 0), (0, -1), (0, MAX_CHUNK_BYTES + 1), (1 << 63, 1)]
)
def test_ranges_that_are_none_are_refused(root: Path, offset: int, size_bytes: int) -> None:
    assert get(Door(root), "export/g2.r0.0", offset, size_bytes)[0].status == "refused"


@pytest.mark.parametrize(
    ("name", "offset", "size_bytes"),
    [("export/g9.r0.0", 0, 1), ("export/g2.r0.0", len(DATA) - 1, 2), ("export/g2.r0.0", 1 << 40, 1)],
)
def test_what_is_not_there_is_gone(root: Path, name: str, offset: int, size_bytes: int) -> None:
    files = Door(root)
    header, data = get(files, name, offset, size_bytes)
    assert (header.request_id, header.status, data) == (5, "gone", b"")
    assert files.counters.missing_files == 1


def test_links_pipes_and_directories_are_not_followed(root: Path) -> None:
    (root / "export" / "g3.r0.0").symlink_to(root.parent / "secret")
    (root / "export" / "g3.r1.0").mkdir()
    os.mkfifo(root / "export" / "g3.r2.0")
    files = Door(root)
    for rank in range(3):
        assert get(files, f"export/g3.r{rank}.0", 0, 1)[0].status == "gone"


def test_a_file_cut_or_replaced_since_is_looked_up_anew(root: Path) -> None:
    files = Door(root)
    path = root / "export" / "g2.r0.0"
    assert get(files, "export/g2.r0.0", 0, len(DATA))[1] == DATA
    os.truncate(path, 100)
    assert get(files, "export/g2.r0.0", 0, len(DATA))[0].status == "gone"
    path.unlink()
    assert get(files, "export/g2.r0.0")[0].status == "gone"
    path.write_bytes(b"0123456789")
    assert get(files, "export/g2.r0.0")[1] == b"0123456789"
    path.write_bytes(b"")
    assert get(files, "export/g2.r0.0")[0].status == "gone"


def test_mappings_are_bounded_and_forgotten(root: Path) -> None:
    files = Door(root)
    for rank in range(100):
        (root / "export" / f"g5.r{rank}.0").write_bytes(DATA)
        assert get(files, f"export/g5.r{rank}.0")[0].status == "ok"
    mapped = sum(str(root) in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert 0 < mapped <= 70
    for rank in range(100):
        (root / "export" / f"g5.r{rank}.0").unlink()
    files.files.forget_removed()
    assert str(root / "export" / "g5.r") not in Path("/proc/self/maps").read_text()


def test_the_key_is_asked_for(root: Path) -> None:
    files = Door(root, KEY)
    assert get(files, "export/g2.r0.0")[0].status == "refused"
    assert get(files, "export/g2.r0.0", key=b"secret kex")[0].status == "refused"
    assert get(files, "export/g2.r0.0", key=KEY)[0].status == "ok"
    assert ask(files, pack_request(Stats(1), b""))[0].status == "refused"


def test_counters_can_be_asked_for(root: Path) -> None:
    files = Door(root)
    get(files, "export/g2.r0.0")
    get(files, "nothing")
    header, data = ask(files, pack_request(Stats(9), b""))
    assert header == ReplyHeader(9, "ok", "")
    counters = msgpack.unpackb(data)
    assert {name: count for name, count in counters.items() if count} == {
        "requests": 3,
        "refused_requests": 1,
        "sent_bytes": 10,
    }
    assert "dropped_replies" in counters
    assert "replicas_waiting" in counters


def test_refusals_are_logged_but_not_without_end(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = Door(root)
    for _ in range(3000):
        files.answer([b"junk"])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert files.counters.refused_requests == 3000
    assert 20 <= len(lines) < 30
    assert lines[0]["event"] == "request refused"
    assert lines[-1]["count"] == 3000


frames = st.one_of(
    st.binary(max_size=80),
    st.recursive(
        st.one_of(
            st.none(), st.booleans(), st.integers(-5, 1 << 63), st.text(max_size=20), st.binary(max_size=20)
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
    ).map(msgpack.packb),
    st.lists(
        st.one_of(
            st.integers(),
            st.none(),
            st.sampled_from([b"", "get", "stats", "export/g2.r0.0", "../x", 0, 1, 4096, -1, 1.5]),
        ).filter(lambda value: not isinstance(value, int) or abs(value) < 1 << 63),
        max_size=6,
    ).map(lambda rest: msgpack.packb([PROTOCOL, *rest])),
)


@given(st.lists(frames, max_size=3))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_sent_is_answered_and_harms_nothing(root: Path, sent: list[bytes]) -> None:
    files = Door(root)
    header, data = files.answer(sent)
    reply = unpack_header(header)
    assert reply.status in ("ok", "refused", "gone")
    assert reply.status == "ok" or bytes(data) == b""
    assert get(files, "export/g2.r0.0")[1] == DATA[:10]


@given(st.binary(max_size=60))
def test_garbage_is_no_request_and_no_header(frame: bytes) -> None:
    for unpack in (unpack_request, unpack_header):
        try:
            unpack(frame)
        except ProtocolError:
            continue


def test_round_trips_and_bounds() -> None:
    assert unpack_request(pack_request(Get(1, "export/g1.r2.0", 3, 4), b"k")) == (
        Get(1, "export/g1.r2.0", 3, 4),
        b"k",
    )
    assert unpack_request(pack_request(Stats(1), b"")) == (Stats(1), b"")
    assert unpack_header(pack_header(ReplyHeader(1, "gone", "why"))) == ReplyHeader(1, "gone", "why")
    with pytest.raises(ProtocolError, match="at most"):
        unpack_request(msgpack.packb([PROTOCOL, b"", "get", 1, "export/" + "x" * 5000, 0, 1]))
    with pytest.raises(ProtocolError, match="not a request of"):
        unpack_request(msgpack.packb(["flashrec.shards/1", b"", "stats", 1]))


REQUESTS: list[Request] = [
    Get(1, "replica/r3.0", 0, 5),
    Get(1, "replica/r3.0", 0, 5, True),
    Stats(2),
    Describe(3, "arena", 7, 8, 1 << 20),
    Private(4, "replica", 7, 8),
    Keep(5, 7, 8, 9, True, 100, (1 << 64) - 1, 0),
    Replicate(6, 7, 8, 9, "tcp://[fe80::1]:5", "replica"),
    Doubt(7, 8, 9),
    Fence(7, 9),
    Discard(8, 9, 5, 4),
    Forget(9, (1, 2, 3)),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: type(one).__name__)
def test_every_request_is_checked_field_by_field(request_: Request) -> None:
    packed = pack_request(request_, b"k")
    assert unpack_request(packed) == (request_, b"k")
    fields = msgpack.unpackb(packed)
    assert len(packed) < MAX_REQUEST_BYTES
    for index in range(4, len(fields)):
        for wrong in (None, -1, 1 << 63, 1.5, "x", b"x", [-1], {}):
            changed = [*fields[:index], wrong, *fields[index + 1 :]]
            try:
                unpack_request(msgpack.packb(changed))
            except ProtocolError:
                continue
            assert type(wrong) is type(fields[index]), (index, wrong)
    for changed in (fields[:-1], [*fields, 0]):
        with pytest.raises(ProtocolError, match=r"arguments|proper key|not a request"):
            unpack_request(msgpack.packb(changed))


@pytest.mark.parametrize("request_", REQUESTS[3:], ids=lambda one: type(one).__name__)
def test_a_server_without_replicas_knows_of_none(root: Path, request_: Request) -> None:
    more = [b"x"] if isinstance(request_, Keep) else []
    header, _ = ask(Door(root), pack_request(request_, b""), *more)
    assert header.status == "refused"
    assert "from elsewhere" in header.detail or "where no replicas are kept" in header.detail


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:0",
        "tcp://*:5",
        "tcp://[::]:5",
        "udp://x",
        "",
        "tcp://127.0.0.1.evil.org:1",
        "tcp://host:1",
    ],
)
def test_endpoints_that_strangers_reach_are_refused(endpoint: str) -> None:
    for security in (Security(KEY), Security(KEY, is_cluster=True)):
        with pytest.raises(UsageError, match="cannot serve"):
            check_endpoint(endpoint, security)


def test_other_machines_are_let_in_by_the_clusters_key_alone() -> None:
    check_endpoint("tcp://10.0.0.1:5", Security(KEY, is_cluster=True))
    for security in (Security(KEY), Security(is_open_on_loopback=True)):
        with pytest.raises(UsageError, match="cluster key"):
            check_endpoint("tcp://10.0.0.1:5", security)


def test_loopback_needs_a_key_and_paths_have_a_length() -> None:
    check_endpoint("tcp://127.0.0.1:0", Security(KEY))
    check_endpoint("tcp://127.0.0.1:0", Security(is_cluster=True))
    check_endpoint("tcp://127.0.0.1:0", Security(is_open_on_loopback=True))
    with pytest.raises(UsageError, match="key"):
        check_endpoint("tcp://127.0.0.1:0", Security())
    with pytest.raises(UsageError, match="longer"):
        check_endpoint(f"ipc:///{'x' * 120}", Security())


def test_a_path_in_use_is_an_environment_fault(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(EnvironmentFault, match="another server"):
            check_endpoint(f"ipc://{tmp_path}/s", Security())
    check_endpoint(f"ipc://{tmp_path}/s", Security())  # stale: nobody answers
