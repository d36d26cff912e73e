"""The tail delivers every line once, whole and in order, in bounded memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import EnvironmentFault, UsageError
from flashrecd.supervise.logs import LogLayout, Tail


class Lines:
    def __init__(self) -> None:
        self.got: list[tuple[str, str, bytes]] = []

    def __call__(self, proc: str, stream: str, line: bytes) -> None:
        self.got.append((proc, stream, line))

    @property
    def texts(self) -> list[bytes]:
        return [line for _, _, line in self.got]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stdout.log"


def test_only_complete_lines_are_delivered_and_in_order(lines: Lines, path: Path) -> None:
    tail = Tail(lines)
    tail.follow("r0", {"stdout": path})
    assert tail.poll() is False  # no file yet
    append(path, b"one\ntwo\nthr")
    assert tail.poll() is True
    assert lines.texts == [b"one", b"two"]
    append(path, b"ee\n\n")
    tail.poll()
    assert lines.got == [("r0", "stdout", line) for line in (b"one", b"two", b"three", b"")]
    assert tail.poll() is False
    tail.close()


def test_finish_delivers_everything_and_a_last_line_without_newline(lines: Lines, path: Path) -> None:
    tail = Tail(lines)
    tail.follow("r0", {"stdout": path})
    append(path, b"x" * 99 + b"\n")
    tail.poll()
    append(path, (b"y" * 99 + b"\n") * 20_000 + b"the end")  # 2 MB: several reads
    asyncio.run(tail.finish("r0"))
    assert lines.texts == [b"x" * 99, *[b"y" * 99] * 20_000, b"the end"]
    append(path, b"nobody listens\n")
    assert tail.poll() is False


def test_finish_of_an_unknown_process_and_twice_is_nothing(lines: Lines, path: Path) -> None:
    tail = Tail(lines)
    tail.follow("r0", {"stdout": path})
    append(path, b"a")

    async def twice() -> None:
        await asyncio.gather(tail.finish("r0"), tail.finish("r0"), tail.finish("nobody"))

    asyncio.run(twice())
    assert lines.texts == [b"a"]


def test_a_long_line_is_split_and_memory_stays_bounded(lines: Lines, path: Path) -> None:
    tail = Tail(lines, max_line_bytes=1000)
    tail.follow("r0", {"stdout": path})
    line = os.urandom(10_000_000).replace(b"\n", b"\r")
    append(path, line)
    held = []
    while tail.poll():
        held.append(len(tail._followed["r0"][0].unfinished))
    assert max(held) <= 1000
    append(path, b"\nnext\n")
    asyncio.run(tail.finish("r0"))
    assert lines.texts[-1] == b"next"
    pieces = lines.texts[:-1]
    assert b"".join(pieces) == line
    assert {len(piece) for piece in pieces[:-1]} == {1000}


def test_bytes_that_are_not_text_are_kept(lines: Lines, path: Path) -> None:
    tail = Tail(lines)
    tail.follow("r0", {"stdout": path})
    append(path, b"\xff\x00\xfe\n")
    tail.poll()
    assert lines.texts == [b"\xff\x00\xfe"]
    tail.close()


def test_what_was_there_before_is_not_delivered(lines: Lines, path: Path) -> None:
    append(path, b"of an earlier process\n")
    tail = Tail(lines)
    tail.follow("r0", {"stdout": path})
    append(path, b"of this one\n")
    tail.poll()
    assert lines.texts == [b"of this one"]
    tail.close()


def test_a_file_that_somebody_truncated_is_read_from_its_start(lines: Lines, path: Path) -> None:
    tail = Tail(lines)
    tail.follow("r0", {"stdout": path})
    append(path, b"before, long enough\n")
    tail.poll()
    path.write_bytes(b"after\n")
    tail.poll()
    assert lines.texts == [b"before, long enough", b"after"]
    tail.close()


def test_one_busy_file_does_not_hold_up_another(lines: Lines, tmp_path: Path) -> None:
    tail = Tail(lines)
    tail.follow("busy", {"stdout": tmp_path / "busy"})
    tail.follow("calm", {"stderr": tmp_path / "calm"})
    append(tmp_path / "busy", b"z\n" * 5_000_000)
    append(tmp_path / "calm", b"help\n")
    tail.poll()
    assert ("calm", "stderr", b"help") in lines.got
    assert len(lines.got) < 500_000
    tail.close()


def test_a_callback_may_follow_another_process(path: Path, tmp_path: Path) -> None:
    got: list[bytes] = []

    def deliver(proc: str, stream: str, line: bytes) -> None:
        got.append(line)
        if proc == "r0":
            tail.follow("r1", {"stdout": tmp_path / "other"})

    tail = Tail(deliver)
    tail.follow("r0", {"stdout": path})
    append(path, b"start the other\n")
    tail.poll()
    append(tmp_path / "other", b"here\n")
    tail.poll()
    assert got == [b"start the other", b"here"]
    tail.close()


@given(
    chunks=st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"x", b"\n")), max_size=30),
    limit=st.integers(1, 20),
)
def test_nothing_is_lost_or_made_up(
    chunks: list[bytes], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("logs") / "stdout.log"
    lines = Lines()
    tail = Tail(lines, max_line_bytes=limit)
    tail.follow("r0", {"stdout": path})
    for chunk in chunks:
        append(path, chunk)
        tail.poll()
    asyncio.run(tail.finish("r0"))
    whole = b"".join(chunks)
    expected = whole.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert b"".join(lines.texts) == whole.replace(b"\n", b"")
    assert all(len(text) <= limit for text in lines.texts)
    assert [text for text in lines.texts if len(text) < limit] == [
        piece for line in expected if (piece := _last_piece(line, limit)) is not None
    ]


def _last_piece(line: bytes, limit: int) -> bytes | None:
    """What of a line is delivered and shorter than the limit; no empty piece follows a full one."""
    rest = len(line) % limit
    if not line:
        return b""
    return line[len(line) - rest :] if rest else None


def test_descriptors_are_given_back(lines: Lines, tmp_path: Path, num_fds: Callable[[], int]) -> None:
    tail = Tail(lines)
    before = num_fds()
    for number in range(50):
        path = tmp_path / str(number)
        tail.follow(f"r{number}", {"stdout": path, "stderr": path})
        append(path, b"line\n")
        tail.poll()
        asyncio.run(tail.finish(f"r{number}"))
    assert num_fds() == before


@pytest.fixture
def num_fds() -> Callable[[], int]:
    asyncio.run(asyncio.sleep(0))  # whatever a first loop opens for good
    return lambda: len(os.listdir("/proc/self/fd"))


def test_following_twice_and_impossible_settings_are_refused(lines: Lines, path: Path) -> None:
    tail = Tail(lines)
    tail.follow("r0", {"stdout": path})
    with pytest.raises(UsageError, match="r0"):
        tail.follow("r0", {"stdout": path})
    with pytest.raises(UsageError, match="max_line_bytes"):
        Tail(lines, max_line_bytes=0)
    with pytest.raises(UsageError, match="pause"):
        Tail(lines, shortest_pause_s=1, longest_pause_s=0.5)


def test_layout_is_torchruns(tmp_path: Path) -> None:
    layout = LogLayout(tmp_path, "job7", attempt=2)
    files = layout.rank_files(3)
    assert files["stderr"] == tmp_path / "job7" / "attempt_2" / "3" / "stderr.log"
    append(files["stdout"], b"it can be written\n")


def test_replacements_appear_in_the_ranks_folder(tmp_path: Path) -> None:
    layout = LogLayout(tmp_path, "job")
    for number in (0, 1):
        append(layout.standby_files(number)["stdout"], b"standby %d\n" % number)
        layout.link_replacement(5, number)
    folder = layout.rank_files(5)["stdout"].parent
    assert (folder / "stdout.1.log").read_bytes() == b"standby 0\n"
    assert (folder / "stdout.2.log").read_bytes() == b"standby 1\n"
    assert not (folder / "stdout.log").exists()


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentFault, match="file"):
        LogLayout(tmp_path / "file", "job").rank_files(0)


def test_finish_asks_for_room_before_each_read(lines: Lines, path: Path) -> None:
    """However much an ended process has printed: what the reader has no room for stays in the file."""
    tail = Tail(lines)
    tail.follow("r0", {"stdout": path})
    append(path, (b"y" * 999 + b"\n") * 1000)
    held: list[int] = []

    async def room() -> None:
        held.append(sum(map(len, lines.texts)))
        await asyncio.sleep(0)

    asyncio.run(tail.finish("r0", room))
    assert lines.texts == [b"y" * 999] * 1000
    assert len(held) > 10
    assert max(after - before for before, after in pairwise(held)) < 70_000  # a read, and the rest of a line


@given(
    st.lists(st.binary(max_size=12).map(lambda raw: raw.replace(b"a", b"\n")), max_size=8),
    st.integers(0, 8),
    st.sampled_from([3, 1000]),
)
def test_another_tail_goes_on_where_one_was_left(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes], switch_at: int, max_line_bytes: int
) -> None:
    """A daemon dies and another follows the same files: no byte is shown twice, and none is lost."""
    path = tmp_path_factory.mktemp("tail") / "stdout.log"
    lines = Lines()
    tail = Tail(lines, max_line_bytes=max_line_bytes)
    tail.follow("r0", {"stdout": path})
    for number, chunk in enumerate(chunks):
        if number == switch_at:
            seen, tail = tail.delivered("r0", "stdout"), Tail(lines, max_line_bytes=max_line_bytes)
            tail.follow("r0", {"stdout": path}, {"stdout": seen})
        append(path, chunk)
        while tail.poll():
            pass
    asyncio.run(tail.finish("r0"))
    text = b"".join(chunks)
    if max_line_bytes == 1000:
        assert lines.texts == text.removesuffix(b"\n").split(b"\n") if text else lines.texts == []
    assert b"".join(lines.texts) == text.replace(b"\n", b"")
