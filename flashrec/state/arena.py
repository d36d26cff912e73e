"""What a rank has sealed, seen by whoever may need it: the daemon, its replacement, the other ranks. No torch.

`flashrec.state.arena_format` draws the files; `flashrec.state.sealing` writes them. Here they are read, with
read(2) alone: a file that is cut while it is looked at costs an answer, never a signal. (The tensors' bytes
are mapped, by `flashrec.state.pull`, and checked chunk by chunk where they end up.) A file or slot that is not
right is left out, with its reason; a rank may go on sealing meanwhile.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flashrec.errors import IntegrityError, ProtocolError
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
    Cut,
    FileHeader,
    check_slot,
    numbered_files,
    open_file,
)
from flashrec.state.codec import checksum
from flashrec.state.files import fault
from flashrec.state.layout import RankLayout
from flashrec.state.manifest import ExportManifest
from flashrec.state.mapping import map_file

_SLOT_HEADER = struct.Struct(f"<{HEADER_CHECKSUM + 1}Q")
_STATE = struct.Struct("<Q")


@dataclass(frozen=True, order=True)
class SealedVersion:
    """One whole version, and the generation that sealed it."""

    version: int
    generation: int


@dataclass(frozen=True)
class SealedState:
    """What a rank sealed of one version: its part of every replica set, `manifests` in the order of
    `layout.sets`, and the `blob` that came with it; all in the file at `path`."""

    sealed: SealedVersion
    path: Path
    blob: bytes
    layout: RankLayout
    manifests: tuple[ExportManifest, ...]


@dataclass(frozen=True)
class _Slot:
    """A slot that was found whole."""

    sealed: SealedVersion
    path: Path
    number: int
    header: FileHeader
    index: int
    table: bytes
    blob: bytes
    layout: bytes


class Arena:
    """The files of `rank` of `job` in `directory` (`arena/` below the job's directory in shared memory)."""

    def __init__(self, directory: Path | str, rank: int, job: str) -> None:
        self.directory = Path(directory)
        self.rank = rank
        self.job = job

    def sealed(self, problems: list[str] | None = None) -> list[SealedVersion]:
        """The versions that are whole, oldest first; of one sealed in several generations, the last. `problems` gets
        what `problems()` tells.

        Headers, tables and blobs have been checked, the tensors' bytes have not."""
        return sorted(slot.sealed for slot in self._newest(problems).values())

    def problems(self) -> list[str]:
        """Why files and slots are left out: one line each, none when all is well."""
        problems: list[str] = []
        for _ in self._slots(problems):
            pass
        return problems

    def read(self, version: int) -> SealedState:
        """All but the tensors' bytes, which the manifests tell how to get.

        Raises IntegrityError when the version is not there or not whole: take another source."""
        problems: list[str] = []
        slot = self._newest(problems).get(version)
        if slot is None:
            why = f" ({'; '.join(problems)})" if problems else ""
            raise IntegrityError(f"rank {self.rank} has no sealed version {version} in {self.directory}{why}")
        try:
            layout = RankLayout.from_bytes(slot.layout)
        except ProtocolError as error:
            raise IntegrityError(f"{slot.path}: its layout is none: {error}") from error
        header = slot.header
        cut = Cut.of(layout, header.chunk_bytes)
        if (layout.rank, layout.digest) != (self.rank, header.layout_digest) or (
            cut.num_chunks,
            cut.data_bytes,
        ) != (header.num_chunks, header.data_bytes):
            raise IntegrityError(f"{slot.path}: its layout is not the one it was made for")
        table = struct.unpack(f"<{cut.num_chunks}Q", slot.table)
        data = header.slot_offset(slot.index) + header.data_offset
        manifests = tuple(
            ExportManifest(
                str(slot.path.absolute()),
                self.rank,
                version,
                slot.sealed.generation,
                one.layout.digest,
                stream.pieces,
                cut.chunk_bytes,
                table[stream.first_chunk : stream.first_chunk + stream.num_chunks],
                stream.size_bytes,
                data + stream.offset,
            )
            for one, stream in zip(layout.sets, cut.streams, strict=True)
        )
        return SealedState(slot.sealed, slot.path, slot.blob, layout, manifests)

    def map_for_pull(self, state: SealedState) -> mmap.mmap:
        """The whole file that `state` lies in, for `flashrec.state.warming`: what is pulled from it here goes through
        this mapping as long as somebody has it, and a writer takes it over. Raises IntegrityError when the file is
        not that any more."""
        try:
            fd, header = open_file(state.path, os.O_RDWR, self.rank, self.job)
        except OSError as error:
            raise IntegrityError(f"cannot open {state.path}: {error.strerror}") from error
        try:
            return map_file(fd, header.file_bytes)
        except OSError as error:
            raise IntegrityError(f"cannot map {state.path}: {error.strerror}") from error
        finally:
            os.close(fd)

    def discard_above(self, version: int) -> None:
        """Let go of every sealed version above `version`; what is being written was never visible.

        To be called before a generation that resumes at `version` seals, when the rank does not: it is parked or
        dead. Raises EnvironmentFault when that cannot be done."""
        self._discard(lambda sealed, _: sealed > version)

    def discard(self, version: int, generation: int) -> None:
        """Let go of this sealed version, which is damaged. Raises EnvironmentFault when that cannot be done."""
        self._discard(lambda *sealed: sealed == (version, generation))

    def _discard(self, is_lost: Callable[[int, int], bool]) -> None:
        try:
            for _, path in numbered_files(self.directory, self.rank):
                with contextlib.suppress(IntegrityError, FileNotFoundError):
                    self._discard_in(path, is_lost)
        except OSError as error:
            raise fault(self.directory, 0, error) from error

    def _discard_in(self, path: Path, is_lost: Callable[[int, int], bool]) -> None:
        fd, header = open_file(path, os.O_RDWR, self.rank, self.job)
        try:
            for index in range(NUM_SLOTS):
                offset = header.slot_offset(index)
                words = _SLOT_HEADER.unpack(os.pread(fd, _SLOT_HEADER.size, offset))
                if words[STATE] == SEALED and is_lost(words[VERSION], words[GENERATION]):
                    os.pwrite(fd, _STATE.pack(EMPTY), offset + WORD_BYTES * STATE)
        finally:
            os.close(fd)

    def _newest(self, problems: list[str] | None = None) -> dict[int, _Slot]:
        """For each version, the slot that the latest generation sealed."""
        newest: dict[int, _Slot] = {}
        for slot in self._slots([] if problems is None else problems):
            found = newest.get(slot.sealed.version)
            rank = (slot.sealed.generation, slot.number)
            if found is None or (found.sealed.generation, found.number) < rank:
                newest[slot.sealed.version] = slot
        return newest

    def _slots(self, problems: list[str]) -> Iterator[_Slot]:
        """Every whole slot; why others are not is appended to `problems`."""
        try:
            files = numbered_files(self.directory, self.rank)
        except OSError as error:
            problems.append(f"{self.directory}: {error.strerror}")
            return
        for number, path in files:
            try:
                fd, header = open_file(path, os.O_RDONLY, self.rank, self.job)
            except FileNotFoundError:
                continue  # removed since it was listed: what it held is not needed
            except (OSError, IntegrityError) as error:
                problems.append(f"{path}: {error.strerror if isinstance(error, OSError) else error}")
                continue
            try:
                for index in range(NUM_SLOTS):
                    try:
                        slot = self._slot(fd, path, number, header, index)
                    except IntegrityError as error:
                        problems.append(f"{path}: slot {index} {error}")
                        continue
                    if slot is not None:
                        yield slot
            except OSError as error:
                problems.append(f"{path}: {error.strerror}")
            finally:
                os.close(fd)

    def _slot(self, fd: int, path: Path, number: int, header: FileHeader, index: int) -> _Slot | None:
        """The slot if it holds a whole version, None if it is empty or being written. Raises IntegrityError."""
        offset = header.slot_offset(index)
        words = _SLOT_HEADER.unpack(_read(fd, offset, _SLOT_HEADER.size))
        if words[STATE] in (EMPTY, WRITING):
            return None
        try:
            if words[STATE] != SEALED:
                raise IntegrityError(f"has the state {words[STATE]:#x}, which is none")
            table = _read(fd, offset + WORD_BYTES * TABLE, WORD_BYTES * header.num_chunks)
            check_slot(header, words, table)
            blob = _read(fd, offset + header.blob_offset, words[BLOB_BYTES])
            if checksum(blob) != words[BLOB_CHECKSUM]:
                raise IntegrityError("has a damaged blob")
            layout = _read(fd, PAGE_BYTES, header.layout_bytes)
        except IntegrityError:
            # Not damage if the rank has written here since.
            if _SLOT_HEADER.unpack(_read(fd, offset, _SLOT_HEADER.size)) == words:
                raise
            return None
        sealed = SealedVersion(words[VERSION], words[GENERATION])
        return _Slot(sealed, path, number, header, index, table, blob, layout)


def check_bytes(state: SealedState) -> None:
    """Raises IntegrityError unless all of the tensors' bytes are those that were sealed. Reads all of them."""
    try:
        fd = os.open(state.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise IntegrityError(f"{state.path} cannot be read: {error.strerror}") from None
    try:
        for manifest in state.manifests:
            for chunk, expected in enumerate(manifest.checksums):
                offset, size_bytes = manifest.chunk_range(chunk)
                if checksum(_read(fd, offset, size_bytes)) != expected:
                    raise IntegrityError(
                        f"{state.path}: bytes {offset} to {offset + size_bytes} do not match their checksum"
                    )
    finally:
        os.close(fd)


def _read(fd: int, offset: int, size_bytes: int) -> bytes:
    """Raises IntegrityError when the file is shorter: it has been cut since."""
    data = os.pread(fd, size_bytes, offset)
    if len(data) != size_bytes:
        raise IntegrityError("is truncated")
    return data
