"""What an arena's file looks like: one rank's tensors and common state at two versions. No torch.

    offset
    0          file header: magic | format | size, checksum of | [job, rank, generation, sizes ...]
    4096       the rank's layout (RankLayout.to_bytes)
    .          slot 0: slot header | chunk table | blob | data
    .          slot 1: the same

Layout, table, blob and the data of each replica set begin at a page boundary. A replica set's data are the
pieces that this rank owns (`ReplicaSet.part`), one after another, in chunks of 1 MiB (CHUNK_BYTES); the table has
a word for each chunk of the slot, its xxh3_64. The blob (the common state) may use all of the room it has. File header
and layout are written before the file gets its name, and never again.

A slot header is eight words of 64 bits:

    state | version | generation | blob: size | its checksum | checksum of the table | of words 1 to 5 | 0

                  begin                     seal
        EMPTY ------------->  WRITING  -------------->  SEALED
          ^  table zeroed        ^   words 1-6 written     | |
          |  before              +-------------------------+ |
          |                                begin             |
          +--------------------------------------------------+
                          discard

Each transition is one aligned store, made when everything it promises is in place; so a slot is SEALED only with
a whole version in it, whenever the writer dies. (Its stores reach the memory all readers share, in order; the
machine's own death is another matter, and takes the memory with it.) In a WRITING slot each word of the table
is true by itself: it is zeroed before its chunk is overwritten and set when the chunk is complete, so that
whoever goes on, the writer's replacement too, need not copy again what is there already. In an EMPTY slot
nothing is true.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import msgpack

from flashrec.errors import IntegrityError, UsageError
from flashrec.state.codec import Buffer, checksum
from flashrec.state.layout import Piece, RankLayout
from flashrec.state.manifest import MAX_CHUNK_BYTES

FILE_NAME = re.compile(r"r(\d{1,9})\.(\d{1,18})", re.ASCII)
PAGE_BYTES = 4096
NUM_SLOTS = 2

# Far apart, so that no damaged bit turns one into another.
EMPTY = 0
WRITING = int.from_bytes(b"WRITING ", "little")
SEALED = int.from_bytes(b" SEALED ", "little")

# Words of a slot header; the table follows.
STATE, VERSION, GENERATION, BLOB_BYTES, BLOB_CHECKSUM, TABLE_CHECKSUM, HEADER_CHECKSUM = range(7)
TABLE = 8
WORD_BYTES = 8

_MAGIC = b"FLASHARN"
_FORMAT = 1
_PREFIX = struct.Struct("<8sIIQ")  # magic, format, size of the body, its checksum
# The blob's room beyond its present size, as a share of the slot: a few floats more must not cost a new file.
_SPARE = 100


@dataclass(frozen=True)
class FileHeader:
    """The file's first page, and all offsets that follow from it. Sizes in bytes."""

    job: str
    rank: int
    generation: int
    layout_digest: str
    layout_bytes: int
    layout_checksum: int
    chunk_bytes: int
    num_chunks: int
    blob_room: int
    data_bytes: int

    @property
    def blob_offset(self) -> int:
        """In the slot."""
        return page_up(WORD_BYTES * (TABLE + self.num_chunks))

    @property
    def data_offset(self) -> int:
        """In the slot."""
        return self.blob_offset + self.blob_room

    @property
    def slot_bytes(self) -> int:
        return self.data_offset + self.data_bytes

    def slot_offset(self, slot: int) -> int:
        """In the file."""
        return PAGE_BYTES + page_up(self.layout_bytes) + slot * self.slot_bytes

    @property
    def file_bytes(self) -> int:
        return self.slot_offset(NUM_SLOTS)

    def to_page(self) -> bytes:
        """Raises UsageError for a job whose name does not fit."""
        body: bytes = msgpack.packb(list(astuple(self)))
        if _PREFIX.size + len(body) > PAGE_BYTES:
            raise UsageError(f"the job's name is too long: {self.job[:80]!r}...")
        return (_PREFIX.pack(_MAGIC, _FORMAT, len(body), checksum(body)) + body).ljust(PAGE_BYTES, b"\0")

    @staticmethod
    def from_page(page: bytes) -> FileHeader:
        """Raises IntegrityError when `page` is not what `to_page` makes, saying in what."""
        if len(page) < PAGE_BYTES:
            raise IntegrityError("it is truncated in its header")
        magic, file_format, size_bytes, body_checksum = _PREFIX.unpack_from(page)
        if magic != _MAGIC or file_format != _FORMAT:
            raise IntegrityError("it is not in a form this release reads")
        body = page[_PREFIX.size :][:size_bytes]
        if checksum(body) != body_checksum:
            raise IntegrityError("its header is damaged")
        try:
            job, *values = msgpack.unpackb(body)
            header = FileHeader(job, *values)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise IntegrityError(f"its header is malformed ({error or type(error).__name__})") from error
        numbers = [header.rank, header.generation, header.layout_bytes, header.layout_checksum]
        numbers += [header.chunk_bytes, header.num_chunks, header.blob_room, header.data_bytes]
        if type(job) is not str or type(header.layout_digest) is not str:
            raise IntegrityError("its header is malformed: job and layout are not text")
        if any(type(number) is not int or not 0 <= number < 1 << 64 for number in numbers):
            raise IntegrityError(f"its header has the numbers {numbers}")
        if not 1 <= header.chunk_bytes <= MAX_CHUNK_BYTES:
            raise IntegrityError(f"it has chunks of {header.chunk_bytes} bytes")
        if header.blob_room % PAGE_BYTES or header.data_bytes % PAGE_BYTES:
            raise IntegrityError("its parts do not begin at page boundaries")
        return header


@dataclass(frozen=True, slots=True)
class Chunk:
    """`size_bytes` of replica set `set_index`, kept at `offset` of a slot's data; `pieces` are their places in
    the set's tensors."""

    set_index: int
    offset: int
    size_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Stream:
    """One replica set's part: `size_bytes` from `offset` of a slot's data on, `num_chunks` from `first_chunk`."""

    pieces: tuple[Piece, ...]
    offset: int
    size_bytes: int
    first_chunk: int
    num_chunks: int


@dataclass(frozen=True)
class Cut:
    """How a rank's part of its tensors is laid out in a slot's data."""

    streams: tuple[Stream, ...]
    chunk_bytes: int
    num_chunks: int
    data_bytes: int

    @staticmethod
    def of(layout: RankLayout, chunk_bytes: int) -> Cut:
        streams: list[Stream] = []
        offset = first_chunk = 0
        for one in layout.sets:
            pieces = tuple(one.part(layout.rank))
            size_bytes = sum(piece.size_bytes for piece in pieces)
            num_chunks = -(-size_bytes // chunk_bytes)
            streams.append(Stream(pieces, offset, size_bytes, first_chunk, num_chunks))
            offset += page_up(size_bytes)
            first_chunk += num_chunks
        return Cut(tuple(streams), chunk_bytes, first_chunk, offset)

    def chunks(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for set_index, stream in enumerate(self.streams):
            cut: list[Piece] = []
            size_bytes = 0
            start = stream.offset
            for piece in stream.pieces:
                taken = 0
                while taken < piece.size_bytes:
                    share = min(piece.size_bytes - taken, self.chunk_bytes - size_bytes)
                    cut.append(Piece(piece.tensor_index, piece.offset + taken, share))
                    taken += share
                    size_bytes += share
                    if size_bytes == self.chunk_bytes:
                        chunks.append(Chunk(set_index, start, size_bytes, tuple(cut)))
                        start += size_bytes
                        cut, size_bytes = [], 0
            if cut:
                chunks.append(Chunk(set_index, start, size_bytes, tuple(cut)))
        assert len(chunks) == self.num_chunks
        return chunks


def page_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def header_for(job: str, generation: int, layout: RankLayout, cut: Cut, blob_bytes: int) -> FileHeader:
    """Of a new file for `layout`, with room for a blob of `blob_bytes` and somewhat more."""
    packed = layout.to_bytes()
    return FileHeader(
        job,
        layout.rank,
        generation,
        layout.digest,
        len(packed),
        checksum(packed),
        cut.chunk_bytes,
        cut.num_chunks,
        page_up(blob_bytes + (blob_bytes + cut.data_bytes) // _SPARE),
        cut.data_bytes,
    )


def check_slot(header: FileHeader, words: Sequence[int], table: Buffer) -> None:
    """Raises IntegrityError unless `words` (a slot header's first seven) and `table` are those of a slot that was
    sealed whole. The blob has its own checksum, and each chunk."""
    if checksum(header_words(words)) != words[HEADER_CHECKSUM]:
        raise IntegrityError("has a damaged header")
    if words[BLOB_BYTES] > header.blob_room:
        raise IntegrityError(f"has a blob of {words[BLOB_BYTES]} bytes in a room of {header.blob_room}")
    if checksum(table) != words[TABLE_CHECKSUM]:
        raise IntegrityError("has a damaged table of chunks")


def header_words(words: Sequence[int]) -> bytes:
    """What the checksum of a slot header is of."""
    return struct.pack("<5Q", *words[VERSION:HEADER_CHECKSUM])


def open_file(path: Path, flags: int, rank: int, job: str) -> tuple[int, FileHeader]:
    """A descriptor of a rank's arena file, and its header. Raises IntegrityError, saying why, when it is not a
    whole one of this rank and job; OSError."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a directory, a socket
            raise IntegrityError("it is not a regular file") from error
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise IntegrityError("it is not a regular file")
        header = FileHeader.from_page(os.pread(fd, PAGE_BYTES, 0))
        if header.job != job:
            raise IntegrityError(f"it belongs to job {header.job!r}")
        if header.rank != rank:
            raise IntegrityError(f"it belongs to rank {header.rank}")
        if status.st_size != header.file_bytes:
            raise IntegrityError(f"it has {status.st_size} bytes, not {header.file_bytes}")
        if checksum(os.pread(fd, header.layout_bytes, PAGE_BYTES)) != header.layout_checksum:
            raise IntegrityError("its layout is damaged")
    except BaseException:
        os.close(fd)
        raise
    return fd, header


def numbered_files(directory: Path, rank: int) -> list[tuple[int, Path]]:
    """The rank's files by name, (number, path), ascending; none if there is no directory. Raises OSError."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    matches = [match for name in names if (match := FILE_NAME.fullmatch(name)) and int(match[1]) == rank]
    return sorted((int(match[2]), directory / match[0]) for match in matches)
