"""The tag under adverse conditions: torn writes, garbage, links, a writer that died."""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import EnvironmentFault, IntegrityError
from flashrec.protocol.phase import IN_BODY, Phase
from flashrec.protocol.tag import PLACES, SIZE_BYTES, Tag, TagReader, TagWriter, tag_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tag_path(tmp_path, 3)


def read(path: Path) -> Tag:
    reader = TagReader(path)
    tag = reader.read()
    reader.close()
    assert tag is not None
    return tag


def test_every_field_comes_back_and_the_file_is_private(path: Path) -> None:
    writer = TagWriter(path)
    writer.phase, writer.step, writer.loss, writer.generation = Phase.GATED, 17, 0.25, 4
    writer.attempt, writer.progress, writer.committed, writer.committed_ns = 2, 99, 17, 5
    writer.publish()
    assert read(path) == Tag(Phase.GATED, 0, 2, 4, 17, 99, 0, 5, 17, 0.25)
    assert path.stat().st_size == SIZE_BYTES == 64
    assert path.stat().st_mode & 0o777 == 0o600


@given(st.binary(min_size=SIZE_BYTES - 4, max_size=SIZE_BYTES - 4))
def test_garbage_after_the_magic_fails_no_reader(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tag_path(tmp_path_factory.mktemp("tag"), 0)
    TagWriter(path).close()
    path.write_bytes(path.read_bytes()[:4] + data)
    try:
        tag = read(path)
    except IntegrityError:
        return
    assert tag.place in PLACES
    assert tag.entered == (tag.step if tag.phase in IN_BODY else None)


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(bytes(SIZE_BYTES))
    path.symlink_to(target)
    with pytest.raises(EnvironmentFault, match="cannot write"):
        TagWriter(path)
    with pytest.raises(EnvironmentFault, match="cannot read"):
        TagReader(path).read()
    assert target.read_bytes() == bytes(SIZE_BYTES)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="No such file"):
        TagWriter(tag_path(tmp_path / "gone", 0))


def test_a_writer_that_died_in_mid_write_leaves_something_readable(path: Path) -> None:
    writer = TagWriter(path)
    writer.step = 8
    writer.publish()
    with open(path, "r+b") as file:  # the sequence is odd, as between the two ends of a write
        file.seek(4)
        (sequence,) = struct.unpack("<I", file.read(4))
        file.seek(4)
        file.write(struct.pack("<I", sequence + 1))
    assert read(path).step == 8


def test_no_reader_sees_half_a_write(path: Path) -> None:
    """All fields carry the same number, written by one thread and read by another as fast as they can."""
    writer, reader = TagWriter(path), TagReader(path)
    done = threading.Event()

    def write() -> None:
        for number in range(20_000):
            writer.step = writer.progress = writer.changed_ns = writer.committed_ns = writer.committed = (
                number
            )
            writer.publish()
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        tag = reader.read()
        assert tag is not None
        if tag.committed >= 0:
            assert tag.step == tag.progress == tag.changed_ns == tag.committed_ns == tag.committed
    thread.join()
    assert read(path).step == 19_999


def test_the_sequence_may_wrap(path: Path) -> None:
    writer = TagWriter(path)
    writer._sequence = 0xFFFFFFFC
    for step in range(4):
        writer.step = step
        writer.publish()
        assert read(path).step == step


def test_descriptors_are_given_back(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        writer, reader = TagWriter(path), TagReader(path)
        reader.read()
        writer.close()
        reader.close()
        reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
