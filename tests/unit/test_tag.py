"""The tag in shared memory: what a watcher sees of a rank, at any instant."""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrec.errors import EnvironmentFault, IntegrityError
from flashrec.protocol import tag as tags
from flashrec.protocol.phase import IN_BODY, Phase


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tags.tag_path(tmp_path, 3)


@pytest.fixture
def writer(path: Path) -> Iterator[tags.TagWriter]:
    writer = tags.TagWriter(path)
    yield writer
    writer.close()


@pytest.fixture
def reader(path: Path) -> Iterator[tags.TagReader]:
    reader = tags.TagReader(path)
    yield reader
    reader.close()


def read(reader: tags.TagReader) -> tags.Tag:
    tag = reader.read()
    assert tag is not None
    return tag


def test_reader_sees_what_was_published_and_nothing_earlier(
    writer: tags.TagWriter, reader: tags.TagReader
) -> None:
    writer.phase, writer.step, writer.body, writer.loss = Phase.COMPUTING, 7, tags.BACKWARD, 2.5
    assert read(reader).step == -1
    writer.publish()
    tag = read(reader)
    assert (tag.place, tag.step, tag.entered, tag.loss) == ("backward", 7, 7, 2.5)


def test_tag_outlives_its_writer(path: Path, reader: tags.TagReader) -> None:
    writer = tags.TagWriter(path)
    writer.phase, writer.step, writer.loss = Phase.GATED, 4, 1.0
    writer.publish()
    before = read(reader)
    writer.close()
    assert read(reader) == before
    late = tags.TagReader(path)
    assert read(late) == before
    late.close()


def test_every_field_keeps_its_extremes(writer: tags.TagWriter, reader: tags.TagReader) -> None:
    writer.attempt, writer.generation, writer.step = 0xFFFF, 0xFFFFFFFF, (1 << 63) - 1
    writer.progress, writer.changed_ns, writer.committed_ns = (1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 1
    writer.committed, writer.loss = -(1 << 63), float("-inf")
    writer.publish()
    tag = read(reader)
    assert (tag.attempt, tag.generation, tag.step) == (0xFFFF, 0xFFFFFFFF, (1 << 63) - 1)
    assert (tag.progress, tag.changed_ns, tag.committed_ns) == ((1 << 64) - 1,) * 3
    assert (tag.committed, tag.loss) == (-(1 << 63), float("-inf"))


def test_successor_takes_the_tag_over(path: Path, writer: tags.TagWriter, reader: tags.TagReader) -> None:
    writer.step = 9
    writer.publish()
    assert read(reader).step == 9
    successor = tags.TagWriter(path)
    assert read(reader).step == -1
    successor.close()


def test_writer_that_died_in_the_middle_is_still_read(
    path: Path, writer: tags.TagWriter, reader: tags.TagReader
) -> None:
    writer.phase, writer.step, writer.loss = Phase.APPLYING, 5, 0.5
    writer.publish()
    with open(path, "r+b") as file:
        file.seek(4)
        file.write(struct.pack("<I", 7))  # odd: a write is under way, for ever
    assert read(reader).place == "apply"
    assert read(reader).step == 5


def test_tag_that_is_missing_or_not_written_yet_is_none(path: Path, reader: tags.TagReader) -> None:
    assert reader.read() is None
    path.write_bytes(b"")  # created
    assert reader.read() is None
    path.write_bytes(bytes(tags.SIZE_BYTES))  # given its size, by a writer that was interrupted there
    assert reader.read() is None


def test_other_bytes_are_refused(path: Path, reader: tags.TagReader) -> None:
    path.write_bytes(b"x" * tags.SIZE_BYTES)
    with pytest.raises(IntegrityError, match=r"r3\.tag is not a tag"):
        reader.read()


def test_unknown_phase_is_refused(path: Path, writer: tags.TagWriter, reader: tags.TagReader) -> None:
    writer.phase = max(Phase) + 1
    writer.publish()
    with pytest.raises(IntegrityError, match="not a tag"):
        reader.read()


def test_link_is_not_followed(tmp_path: Path, path: Path, reader: tags.TagReader) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    path.symlink_to(elsewhere)
    with pytest.raises(EnvironmentFault, match="cannot write"):
        tags.TagWriter(path)
    with pytest.raises(EnvironmentFault, match="cannot read"):
        reader.read()
    assert elsewhere.read_bytes() == b"precious"


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_has_a_place(phase: Phase, writer: tags.TagWriter, reader: tags.TagReader) -> None:
    writer.phase = phase
    writer.publish()
    tag = read(reader)
    assert tag.place in tags.PLACES
    assert (tag.entered is not None) == (phase in IN_BODY)


@pytest.mark.parametrize(
    ("phase", "body", "place"),
    [
        (Phase.COMPUTING, tags.FORWARD, "forward"),
        (Phase.COMPUTING, tags.BACKWARD, "backward"),
        (Phase.IDLE, tags.FORWARD, "between"),
        (Phase.IDLE, tags.SECTION, "section"),
        (Phase.HELD, tags.FORWARD, "recovery"),
        (Phase.BUILDING, tags.FORWARD, "recovery"),
    ],
)
def test_places(phase: Phase, body: int, place: str, writer: tags.TagWriter, reader: tags.TagReader) -> None:
    writer.phase, writer.body = phase, body
    writer.publish()
    assert read(reader).place == place
