"""The tag in shared memory: what a watcher sees of a rank, at any instant."""

from pathlib import Path

import pytest

from flashrec.errors import IntegrityError
from flashrec.phases import Phase
from flashrec.protocol import tag as tags


def test_reader_sees_what_was_published(tmp_path: Path) -> None:
    path = tags.tag_path(tmp_path, 3)
    writer, reader = tags.TagWriter(path), tags.TagReader(path)
    writer.phase, writer.step, writer.body = Phase.COMPUTING, 7, tags.BACKWARD
    assert reader.read() is not None and reader.read().step == -1  # not published yet
    writer.publish()
    tag = reader.read()
    assert tag is not None
    assert (tag.place, tag.step, tag.entered) == ("backward", 7, 7)
    writer.close()
    assert reader.read() == tag  # it outlives its writer
    reader.close()


def test_tag_that_is_missing_or_not_written_yet_is_none(tmp_path: Path) -> None:
    path = tags.tag_path(tmp_path, 0)
    reader = tags.TagReader(path)
    assert reader.read() is None
    path.write_bytes(b"")  # created
    assert reader.read() is None
    path.write_bytes(bytes(tags.SIZE_BYTES))  # given its size, by a writer that was interrupted there
    assert reader.read() is None
    reader.close()


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    path = tags.tag_path(tmp_path, 0)
    path.write_bytes(b"x" * tags.SIZE_BYTES)
    reader = tags.TagReader(path)
    with pytest.raises(IntegrityError, match=r"r0\.tag is not a tag"):
        reader.read()
    reader.close()


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_has_a_place(phase: Phase, tmp_path: Path) -> None:
    path = tags.tag_path(tmp_path, 0)
    writer, reader = tags.TagWriter(path), tags.TagReader(path)
    writer.phase = phase
    writer.publish()
    tag = reader.read()
    assert tag is not None
    assert tag.place in tags.PLACES
    writer.close()
    reader.close()
