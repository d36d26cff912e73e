"""Memory by the megabyte: copies are right at every alignment, and a file is mapped once."""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from flashrec.state.mapping import map_file, mapping_of
from flashrec.state.memory import copy_bytes, populate


@pytest.mark.parametrize("shift", [0, 1, 4, 31, 64])
@pytest.mark.parametrize("size_bytes", [0, 1, 63, 4096, 100_000])
def test_copies_are_exact_and_nothing_beside_them_changes(size_bytes: int, shift: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, size_bytes + 200, dtype=np.uint8)
    place = np.full(size_bytes + 200, 7, np.uint8)
    copy_bytes(place[shift : shift + size_bytes], data[100 : 100 + size_bytes])
    assert place[shift : shift + size_bytes].tobytes() == data[100 : 100 + size_bytes].tobytes()
    assert set(place[:shift]) | set(place[shift + size_bytes :]) == {7}


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile(dir="/dev/shm") as opened:
        os.posix_fallocate(opened.fileno(), 0, 8 * mmap.PAGESIZE)
        yield opened.fileno()


def test_a_file_is_mapped_once_while_somebody_has_it(file: int) -> None:
    assert mapping_of(file) is None
    first = map_file(file, 8 * mmap.PAGESIZE)
    assert map_file(file, mmap.PAGESIZE) is first
    assert mapping_of(file) is first
    with tempfile.TemporaryFile(dir="/dev/shm") as other:
        assert mapping_of(other.fileno()) is None
    view = np.frombuffer(first, np.uint8)
    del first
    assert mapping_of(file) is not None, "somebody has its bytes"
    del view
    gc.collect()
    assert mapping_of(file) is None


def test_populating_changes_no_byte(file: int) -> None:
    os.pwrite(file, b"\x05" * (8 * mmap.PAGESIZE), 0)
    mapping = map_file(file, 8 * mmap.PAGESIZE)
    populate(mapping, mmap.PAGESIZE, 100 * mmap.PAGESIZE)
    assert set(mapping[:]) == {5}
