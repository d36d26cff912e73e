"""The writing side of a rank's arena: files made, taken over and let go of, slots filled chunk by chunk. No
torch.

One process at a time writes a rank's files: its replacement takes them over when it has died. Which versions
are kept when:

- A version is never written over the newest sealed one below it. That one is what the job goes back to if the
  step fails in which the new one is sealed; what is older has been passed by every rank.
- A new file is made when the tensors or the size of the blob have changed too much for the ones there are. One that
  holds no version still needed goes away before the next is made, or at the latest when the next version
  begins.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from flashrec.errors import IntegrityError, UsageError
from flashrec.state.arena_format import (
    BLOB_BYTES,
    BLOB_CHECKSUM,
    EMPTY,
    GENERATION,
    HEADER_CHECKSUM,
    NUM_SLOTS,
    PAGE_BYTES,
    SEALED,
    STATE,
    TABLE,
    VERSION,
    WORD_BYTES,
    WRITING,
    Chunk,
    Cut,
    FileHeader,
    check_slot,
    header_for,
    header_words,
    numbered_files,
    open_file,
)
from flashrec.state.codec import checksum
from flashrec.state.export import Lender, PieceReader
from flashrec.state.files import ASIDE, fault, free_bytes, make_directory, no_space, remove
from flashrec.state.layout import RankLayout
from flashrec.state.manifest import CHUNK_BYTES
from flashrec.state.mapping import map_file
from flashrec.state.memory import copy_bytes

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

# Memory is had in slices of this size, so that giving up is possible in between.
_ALLOCATED_AT_ONCE = 16 << 20
# Pieces up to this size are gathered before they are copied.
_GATHERED_BYTES = 1 << 10


class GivenUp(Exception):
    """What was under way was no longer wanted."""


class Stores:
    """Every change of a file that has its name goes through here; tests stop the writer at each."""

    def word(self, words: Words, index: int, value: int) -> None:
        """One aligned store of 64 bits."""
        words[index] = value

    def copy(self, place: Bytes, data: Bytes) -> None:
        copy_bytes(place, data)


class ArenaWriter:
    """The files of `rank` of `job` in `directory`, which is made if it is not there; those that a dead process of
    this rank left are taken over.

    `problems` names what was damaged, and has been removed or emptied. Raises EnvironmentFault."""

    def __init__(
        self,
        directory: Path | str,
        rank: int,
        job: str,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        stores: Stores | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.rank = rank
        self.job = job
        self.problems: list[str] = []
        self._chunk_bytes = chunk_bytes
        self._stores = stores or Stores()
        self._last_number = -1
        self._cut: tuple[str, Cut, list[Chunk], bytearray] | None = None
        make_directory(self.directory)
        try:
            self._sweep()
            # Oldest first; a new one is appended.
            self._files: list[_MappedFile] = list(self._taken_over())
        except OSError as error:
            raise fault(self.directory, 0, error) from error

    def newest(self, below: int | None = None) -> int | None:
        """The newest sealed version (below another)."""
        slot = self._newest_slot(below)
        return None if slot is None else slot.version

    def holds(self, version: int) -> bool:
        return any(slot.is_sealed and slot.version == version for slot in self._slots())

    def open_slot(
        self,
        version: int,
        generation: int,
        layout: RankLayout,
        blob_bytes: int,
        is_given_up: Callable[[], bool] = lambda: False,
        *,
        again: bool = False,
    ) -> OpenSlot:
        """A slot to write `version` in, WRITING from now on; versions above it are discarded. `again`: beside the same
        version as an older generation sealed it.

        Raises EnvironmentFault, saying what is needed and what is free, when there is no room for a new file;
        UsageError for a generation older than one that has sealed here; GivenUp."""
        assert layout.rank == self.rank, "a rank seals its own state"
        assert again or not self.holds(version), "a sealed version is not written again"
        newest_generation = max((slot.generation for slot in self._slots() if slot.is_sealed), default=0)
        if generation < newest_generation:
            raise UsageError(
                f"rank {self.rank} cannot seal version {version} in generation {generation}: "
                f"generation {newest_generation} has already sealed; this process has been replaced"
            )
        cut, chunks, changing = self._cut_of(layout)
        self._discard_above(version)
        kept = self._newest_slot(below=version + again)
        target = self._free_slot(layout, blob_bytes, kept)
        # Before a new file is made: its memory may be what these still hold.
        self._remove_all_but(kept, target)
        if target is None:
            target = self._make_file(generation, layout, cut, blob_bytes, is_given_up).slots[0]
        target.begin()
        return OpenSlot(target, version, generation, chunks, changing)

    def close(self) -> None:
        """Let go of the memory; the files stay."""
        self._files.clear()

    def _slots(self) -> Iterator[_MappedSlot]:
        return (slot for file in tuple(self._files) for slot in file.slots)

    def _newest_slot(self, below: int | None) -> _MappedSlot | None:
        sealed = [
            slot for slot in self._slots() if slot.is_sealed and (below is None or slot.version < below)
        ]
        return max(sealed, key=lambda slot: (slot.version, slot.generation), default=None)

    def _free_slot(self, layout: RankLayout, blob_bytes: int, kept: _MappedSlot | None) -> _MappedSlot | None:
        """The slot that can be spared most: one that holds nothing, or the oldest version."""
        fitting = [
            slot
            for file in self._files
            if file.header.layout_digest == layout.digest
            and file.header.chunk_bytes == self._chunk_bytes
            and file.header.blob_room >= blob_bytes
            for slot in file.slots
            if slot is not kept
        ]
        return min(fitting, key=lambda slot: slot.version if slot.is_sealed else -1, default=None)

    def _discard_above(self, version: int) -> None:
        for slot in self._slots():
            if slot.is_sealed and slot.version > version:
                slot.discard()

    def _remove_all_but(self, *needed: _MappedSlot | None) -> None:
        """Remove the files that have none of these slots; their memory is free when this returns, unless
        somebody else has mapped them."""
        unneeded = [file for file in self._files if not any(slot in file.slots for slot in needed)]
        self._files = [file for file in self._files if file not in unneeded]
        for file in unneeded:
            remove(file.path)

    def _cut_of(self, layout: RankLayout) -> tuple[Cut, list[Chunk], bytearray]:
        """(how it is cut, its chunks, for each whether it had changed when it was last compared)."""
        if self._cut is None or self._cut[0] != layout.digest:
            cut = Cut.of(layout, self._chunk_bytes)
            self._cut = (layout.digest, cut, cut.chunks(), bytearray(cut.num_chunks))
        return self._cut[1:]

    def _make_file(
        self,
        generation: int,
        layout: RankLayout,
        cut: Cut,
        blob_bytes: int,
        is_given_up: Callable[[], bool],
    ) -> _MappedFile:
        """A file with two EMPTY slots, whose memory is had already: writing to it cannot fail."""
        header = header_for(self.job, generation, layout, cut, blob_bytes)
        self._last_number += 1
        path = self.directory / f"r{self.rank}.{self._last_number}"
        aside = self.directory / f"{ASIDE}{path.name}.{os.getpid()}"
        if free_bytes(self.directory) < header.file_bytes:
            raise no_space(self.directory, header.file_bytes)
        try:
            fd = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise fault(self.directory, header.file_bytes, error) from error
        try:
            for offset in range(0, header.file_bytes, _ALLOCATED_AT_ONCE):
                if is_given_up():
                    raise GivenUp
                os.posix_fallocate(fd, offset, min(_ALLOCATED_AT_ONCE, header.file_bytes - offset))
            os.pwrite(fd, header.to_page(), 0)
            os.pwrite(fd, layout.to_bytes(), PAGE_BYTES)
            file = _MappedFile(path, fd, header, self._stores)
            os.rename(aside, path)
        except BaseException as error:
            # Free bytes are counted before the torso is removed: they say why.
            problem = fault(self.directory, header.file_bytes, error) if isinstance(error, OSError) else None
            remove(aside)
            if problem is not None:
                raise problem from error
            raise
        finally:
            os.close(fd)
        self._files.append(file)
        return file

    def _taken_over(self) -> Iterator[_MappedFile]:
        for number, path in numbered_files(self.directory, self.rank):
            self._last_number = max(self._last_number, number)
            try:
                fd, header = open_file(path, os.O_RDWR, self.rank, self.job)
            except IntegrityError as error:
                self.problems.append(f"{path}: {error}")
                if not path.is_dir():
                    remove(path)
                continue
            try:
                file = _MappedFile(path, fd, header, self._stores)
            finally:
                os.close(fd)
            for index, slot in enumerate(file.slots):
                problem = slot.problem()
                if problem is not None:
                    self.problems.append(f"{path}: slot {index} {problem}")
                    slot.discard()
            yield file

    def _sweep(self) -> None:
        """Remove the files that writers of this rank were making when they died."""
        prefix = f"{ASIDE}r{self.rank}."
        for name in os.listdir(self.directory):
            if name.startswith(prefix):
                remove(self.directory / name)


class OpenSlot:
    """A slot that is being written: every chunk once, in any order and from several threads, then the seal."""

    def __init__(
        self,
        slot: _MappedSlot,
        version: int,
        generation: int,
        chunks: Sequence[Chunk],
        changing: bytearray,
    ) -> None:
        self._slot = slot
        self._version = version
        self._generation = generation
        self._chunks = chunks
        self._changing = changing
        self._missing = set(range(len(chunks)))

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    def put(self, index: int, readers: Sequence[PieceReader]) -> tuple[int, int]:
        """Put a chunk in place from the live tensors, `readers[i]` being that of the i-th replica set; returns
        how many bytes were copied, and how many were there already.

        A chunk that had not changed when it was last compared is compared first, by its checksum. Any other is
        copied first: its bytes are still in a cache then when they are read for their checksum."""
        chunk = self._chunks[index]
        with self._views(index, readers[chunk.set_index]) as views:
            copied_bytes = self._put(index, chunk, views)
        self._missing.discard(index)
        return copied_bytes, chunk.size_bytes - copied_bytes

    @contextlib.contextmanager
    def _views(self, index: int, reader: PieceReader) -> Iterator[list[memoryview]]:
        chunk = self._chunks[index]
        if isinstance(reader, Lender):
            following = self._chunks[index + 1 : index + 2]
            ahead = following[0].pieces if following and following[0].set_index == chunk.set_index else ()
            with reader.lend(chunk.pieces, ahead) as views:
                yield views
        else:
            yield [reader.read_piece(piece) for piece in chunk.pieces]

    def _put(self, index: int, chunk: Chunk, views: Sequence[memoryview]) -> int:
        if [view.nbytes for view in views] != [piece.size_bytes for piece in chunk.pieces]:
            raise ValueError(f"the reader of replica set {chunk.set_index} gave too few or too many bytes")
        before = self._slot.checksum_of(index)
        digest = None
        if before and not self._changing[index]:
            digest = _checksum_of(views)
            if digest == before:
                return 0
        self._slot.fill(index, chunk, _runs(views))
        if digest is None:
            # Of the live bytes, not of the copy, and after small ones were gathered: if they change between the one
            # and the other, which they must not, no reader takes what has come out.
            digest = _checksum_of(views)
        self._slot.vouch_for(index, digest)
        if before:
            self._changing[index] = digest != before
        return chunk.size_bytes

    def has(self, index: int, digest: int) -> bool:
        """Whether a chunk with this checksum is in place already; if so, it need not be put there."""
        found = digest != 0 and self._slot.checksum_of(index) == digest
        if found:
            self._missing.discard(index)
        return found

    def put_whole(self, index: int, data: Bytes, digest: int) -> None:
        """Put a chunk in place that is at hand as one run of bytes, with their checksum."""
        chunk = self._chunks[index]
        assert data.nbytes == chunk.size_bytes, "a chunk is put in place whole"
        self._slot.fill(index, chunk, [data])
        self._slot.vouch_for(index, digest)
        self._missing.discard(index)

    def seal(self, blob: bytes) -> None:
        """Make the version visible, now that every chunk is in place."""
        assert not self._missing, f"chunks {sorted(self._missing)[:4]} have not been put in place"
        self._slot.seal(self._version, self._generation, blob)


class _MappedFile:
    def __init__(self, path: Path, fd: int, header: FileHeader, stores: Stores) -> None:
        self.path = path
        self.header = header
        mapping = map_file(fd, header.file_bytes)
        self.slots = [_MappedSlot(mapping, header, index, stores) for index in range(NUM_SLOTS)]


class _MappedSlot:
    """One slot's memory."""

    def __init__(self, mapping: mmap.mmap, header: FileHeader, index: int, stores: Stores) -> None:
        offset = header.slot_offset(index)
        self._header = header
        self._stores = stores
        self._words = np.frombuffer(mapping, "<u8", TABLE + header.num_chunks, offset)
        self._blob = np.frombuffer(mapping, np.uint8, header.blob_room, offset + header.blob_offset)
        self._data = np.frombuffer(mapping, np.uint8, header.data_bytes, offset + header.data_offset)

    @property
    def is_sealed(self) -> bool:
        return int(self._words[STATE]) == SEALED

    @property
    def version(self) -> int:
        """Of a slot that is SEALED."""
        return int(self._words[VERSION])

    @property
    def generation(self) -> int:
        """Of a slot that is SEALED."""
        return int(self._words[GENERATION])

    def problem(self) -> str | None:
        """Why what a dead writer left here is not one of the three states, if it is not."""
        words: list[int] = self._words[:TABLE].tolist()
        if words[STATE] in (EMPTY, WRITING):
            return None
        if words[STATE] != SEALED:
            return f"has the state {words[STATE]:#x}, which is none"
        try:
            check_slot(self._header, words, self._words[TABLE:].data)
        except IntegrityError as error:
            return str(error)
        blob = self._blob[: words[BLOB_BYTES]]
        return None if checksum(blob.data) == words[BLOB_CHECKSUM] else "has a damaged blob"

    def discard(self) -> None:
        self._stores.word(self._words, STATE, EMPTY)

    def begin(self) -> None:
        if int(self._words[STATE]) not in (WRITING, SEALED):
            for index in np.flatnonzero(self._words[TABLE:]).tolist():
                self._stores.word(self._words, TABLE + index, 0)
        self._stores.word(self._words, STATE, WRITING)

    def checksum_of(self, index: int) -> int:
        """Of what is in a chunk's place; 0 where that is not known."""
        return int(self._words[TABLE + index])

    def fill(self, index: int, chunk: Chunk, data: Sequence[Bytes]) -> None:
        """Make `data` the chunk's bytes, which are not valid from here on until somebody vouches for them."""
        self._stores.word(self._words, TABLE + index, 0)
        offset = chunk.offset
        for view in data:
            self._stores.copy(self._data[offset : offset + view.nbytes], view)
            offset += view.nbytes

    def vouch_for(self, index: int, digest: int) -> None:
        self._stores.word(self._words, TABLE + index, digest)

    def seal(self, version: int, generation: int, blob: bytes) -> None:
        assert int(self._words[STATE]) == WRITING, "a slot is sealed once"
        self._stores.copy(self._blob[: len(blob)], np.frombuffer(blob, np.uint8))
        table_checksum = checksum(self._words[TABLE:].data)
        words = [SEALED, version, generation, len(blob), checksum(blob), table_checksum]
        words.append(checksum(header_words(words)))
        for index in range(VERSION, HEADER_CHECKSUM + 1):
            self._stores.word(self._words, index, words[index])
        self._stores.word(self._words, STATE, SEALED)


def _runs(views: Sequence[memoryview]) -> list[Bytes]:
    """The same bytes in fewer pieces: small ones are gathered, for what each takes on its way is more than its bytes
    do, and holds the interpreter's lock."""
    runs: list[Bytes] = []
    for are_small, group in itertools.groupby(views, lambda view: view.nbytes <= _GATHERED_BYTES):
        if are_small:
            runs.append(np.frombuffer(b"".join(group), np.uint8))
        else:
            runs += [np.frombuffer(view, np.uint8) for view in group]
    return runs


def _checksum_of(views: Sequence[memoryview]) -> int:
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


assert TABLE * WORD_BYTES <= PAGE_BYTES
