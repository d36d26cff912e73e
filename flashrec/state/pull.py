"""Getting this rank's state from others: every part from its best source, all parts at once. No torch.

A chunk is copied once, straight into the tensors' own memory, and its checksum is taken *there*, after the
copy: one check that covers the source, the wire and the copying. A source that is gone, stalls or gives
bytes that do not match is left for the part's next one, which goes on with the chunks still missing.
Nothing may use the tensors before `pull` has returned.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from flashrec.errors import FlashrecError, IntegrityError
from flashrec.state.codec import Buffer
from flashrec.state.layout import Layout, Piece
from flashrec.state.manifest import REPLICA, ExportManifest, Part, Source
from flashrec.state.mapping import mapping_of
from flashrec.state.memory import copy_bytes
from flashrec.state.remote import ShardConnection, SourceFailed
from flashrec.state.shardwire import Doubt

Bytes = npt.NDArray[np.uint8]
# A stream of pieces, and the chunks it is cut into.
_Shape = tuple[tuple[Piece, ...], int]

# A source that sends nothing for this long is left for the next one.
STALL_S = 2.0
# A part is cut among several threads only if each gets at least this much.
_MIN_UNIT_BYTES = 8 << 20
_MAX_THREADS = 16
# Damage on the wire passes, damage in a file stays; so remote sources are asked again before giving up.
_ROUNDS = 2
# For a keeper to read through what it has of one rank.
_CHECK_S = 60.0


class PieceWriter(Protocol):
    """What `flashrec.state.capture.Captured` is to the puller."""

    def piece_memory(self, piece: Piece) -> memoryview | None: ...

    def write_piece(self, piece: Piece, data: Buffer) -> None: ...

    def read_piece(self, piece: Piece) -> memoryview: ...


class PullCancelled(FlashrecError):
    """The pull was ended from outside; nothing may use the tensors."""


class PullIncomplete(IntegrityError):
    """Some parts have no good source left. `parts` are their positions in what `pull` was given; pull again
    with other sources for the same pieces, and only the chunks still missing are fetched."""

    def __init__(self, message: str, parts: Sequence[int]) -> None:
        super().__init__(message)
        self.parts = tuple(parts)


@dataclass(frozen=True)
class PullReport:
    """What a pull did: for the event log."""

    size_bytes: int
    bytes_by_source: dict[str, int]
    refused: tuple[str, ...]


@dataclass
class _Progress:
    """One part: which chunks are in place, by the checksum they were found to have."""

    done: dict[int, int] = field(default_factory=dict)


class Puller:
    """`is_cancelled` is asked often, from every thread; once it is true a pull ends. `max_threads`: at most
    so many threads; by default one per part (on one node at most one per core), and more for large parts on
    a machine with more cores. `own_server`: this node's shard server, which keeps the replicas that lie here."""

    def __init__(
        self,
        is_cancelled: Callable[[], bool] = lambda: False,
        *,
        max_threads: int | None = None,
        stall_s: float = STALL_S,
        own_server: str | None = None,
    ) -> None:
        self._is_cancelled = is_cancelled
        self._max_threads = max_threads
        self._stall_s = stall_s
        self._own_server = own_server
        self._lock = threading.Lock()
        # What is in place already of one (version, generation), by layout and shape: so that a second call for
        # the same layout goes on, whichever others were pulled in between.
        self._progress_of: tuple[int, int] | None = None
        self._progress: dict[tuple[str, _Shape], _Progress] = {}
        self._bytes_by_source: dict[str, int] = {}
        self._refused: list[str] = []
        self._doubtful: dict[tuple[str, int], Source] = {}  # by the server's address and the rank

    def pull(
        self,
        writer: PieceWriter,
        layout: Layout,
        parts: Sequence[Part],
        *,
        version: int,
        generation: int,
        deadline_s: float,
    ) -> PullReport:
        """Fetch all `parts` of `version` into `writer`, which has been prepared for `layout`, within
        `deadline_s` seconds. The parts must be the whole layout, each byte once. A rank with several replica
        sets calls this for each, with that set's writer and layout.

        `generation` is the one that is being formed: exports must be of it, sealed bytes may be older.

        Raises IntegrityError when they are not or no source is of this version, generation and layout;
        PullIncomplete when a part's sources are exhausted or the time is over; PullCancelled."""
        deadline = time.monotonic() + deadline_s
        self._bytes_by_source, self._refused, self._doubtful = {}, [], {}
        if self._progress_of != (version, generation):
            self._progress_of, self._progress = (version, generation), {}
        usable = [self._usable(part, layout, version, generation) for part in parts]
        gap = layout.missing([piece for part in usable for piece in part[0].manifest.pieces])
        if gap is not None:
            raise IntegrityError(f"the parts are not the whole state: {gap}")
        units = list(self._units(usable))
        failed: set[int] = set()
        if units:
            is_local = all(source.address is None for part in usable for source in part)
            # Copying keeps a core busy; waiting for a socket does not.
            most = self._max_threads or (_num_cores() if is_local else _MAX_THREADS)
            threads = min(len(units), most)
            with ThreadPoolExecutor(threads, thread_name_prefix="flashrec-pull") as pool:
                futures = [
                    (number, pool.submit(self._pull_unit, writer, layout, part, chunks, deadline))
                    for number, part, chunks in units
                ]
                failed = {number for number, future in futures if not future.result()}
                for where, source in self._doubtful.items():
                    pool.submit(self._doubt, *where, source, version, deadline)
        if self._is_cancelled():
            raise PullCancelled(f"the pull of version {version} was cancelled")
        if failed:
            reasons = "; ".join(self._refused[:8]) or "the time was over"
            raise PullIncomplete(
                f"{len(failed)} of {len(parts)} parts of version {version} could not be pulled within "
                f"{deadline_s:g} s: {reasons}",
                sorted(failed),
            )
        return PullReport(
            layout.total_bytes,
            dict(self._bytes_by_source),
            tuple(self._refused),
        )

    def _usable(self, part: Part, layout: Layout, version: int, generation: int) -> list[Source]:
        """The sources of a part that offer what is wanted, in the same pieces and chunks as the first."""
        usable: list[Source] = []
        reason = "it has no source"
        for source in part:
            try:
                source.manifest.check(layout, version, generation)
            except IntegrityError as error:
                reason = str(error)
                self._refused.append(f"{source}: {error}")
                continue
            if usable and _shape(source.manifest) != _shape(usable[0].manifest):
                self._refused.append(f"{source}: offers other pieces than {usable[0]}")
                continue
            usable.append(source)
        if not usable:
            raise IntegrityError(f"a part of version {version} has no usable source: {reason}")
        return usable

    def _units(self, parts: Sequence[list[Source]]) -> Iterator[tuple[int, list[Source], range]]:
        """(number of the part, its sources, chunks): the shares of the threads."""
        threads = min(self._max_threads or _num_cores(), _num_cores())
        for number, part in enumerate(parts):
            manifest = part[0].manifest
            num_chunks = len(manifest.checksums)
            # Of several nodes that have it each gives a share, and stands behind the others. A connection keeps more
            # than one core busy: one thread here receives what another puts in place.
            is_remote = all(source.address is not None for source in part)
            others = len(part) if is_remote else 1
            wanted = max(1, -(-others // len(parts)), threads // (2 if is_remote else 1) // len(parts))
            num_units = min(wanted, max(1, manifest.size_bytes // _MIN_UNIT_BYTES))
            for unit in range(num_units):
                chunks = range(num_chunks * unit // num_units, num_chunks * (unit + 1) // num_units)
                if chunks:
                    first = unit % others
                    yield number, part[first:] + part[:first], chunks

    def _pull_unit(
        self, writer: PieceWriter, layout: Layout, part: list[Source], chunks: range, deadline: float
    ) -> bool:
        """Whether all `chunks` are in place. Runs in a thread of the pool."""
        pieces, chunk_bytes = shape = _shape(part[0].manifest)
        with self._lock:
            progress = self._progress.setdefault((layout.digest, shape), _Progress())
        target = _Target(writer, pieces, chunk_bytes)
        tried: set[int] = set()
        for _ in range(_ROUNDS):
            for number, source in enumerate(part):
                if number in tried and source.address is None:
                    continue
                tried.add(number)
                # A chunk that an earlier source gave counts only if this one would have given the same: the
                # state must not be a mixture.
                todo = [
                    chunk for chunk in chunks if progress.done.get(chunk) != source.manifest.checksums[chunk]
                ]
                if not todo:
                    return True
                try:
                    self._pull_from(source, todo, target, progress, deadline)
                except SourceFailed as error:
                    with self._lock:
                        self._refused.append(f"{source}: {error}")
                else:
                    return not self._is_cancelled()
                if self._is_cancelled() or time.monotonic() >= deadline:
                    return False
        return False

    def _pull_from(
        self, source: Source, todo: Sequence[int], target: _Target, progress: _Progress, deadline: float
    ) -> None:
        manifest = source.manifest
        fetched = _mapped(manifest, todo) if source.address is None else self._served(source, todo, deadline)
        count = 0
        try:
            for chunk, data in fetched:
                progress.done.pop(chunk, None)
                if target.put(chunk, data) != manifest.checksums[chunk]:
                    self._note_damage(source)
                    offset, size_bytes = manifest.chunk_range(chunk)
                    raise SourceFailed(f"bytes {offset} to {offset + size_bytes} do not match their checksum")
                progress.done[chunk] = manifest.checksums[chunk]
                count += data.nbytes
                if self._is_cancelled():
                    return
                if time.monotonic() >= deadline:
                    raise SourceFailed("the time was over")
        finally:
            fetched.close()
            with self._lock:
                self._bytes_by_source[str(source)] = self._bytes_by_source.get(str(source), 0) + count

    def _note_damage(self, source: Source) -> None:
        address = source.address or self._own_server
        if address and source.manifest.name.startswith(f"{REPLICA}/"):
            with self._lock:
                self._doubtful[address, source.manifest.rank] = source

    def _doubt(self, address: str, rank: int, source: Source, version: int, deadline: float) -> None:
        """Have the keeper check what did not match, so that the next plan does not count on it."""
        secure = source.secure if source.address else None
        timeout_s = min(_CHECK_S, max(0.1, deadline - time.monotonic()))
        try:
            with ShardConnection(address, source.key, self._is_cancelled, secure) as connection:
                connection.call(Doubt(0, rank, version), timeout_s)
        except SourceFailed as error:
            with self._lock:
                self._refused.append(f"{source}: {error}")

    def _served(self, source: Source, todo: Sequence[int], deadline: float) -> Generator[tuple[int, Bytes]]:
        assert source.address is not None
        manifest = source.manifest
        with ShardConnection(source.address, source.key, self._is_cancelled, source.secure) as connection:
            ranges = {chunk: manifest.chunk_range(chunk) for chunk in todo}
            for chunk, data in connection.fetch(manifest.name, ranges, self._stall_s, deadline):
                yield chunk, np.frombuffer(data, np.uint8)


class _Target:
    """Where the bytes of a part belong: its stream of pieces, cut into chunks."""

    def __init__(self, writer: PieceWriter, pieces: Sequence[Piece], chunk_bytes: int) -> None:
        self._writer = writer
        self._chunk_bytes = chunk_bytes
        self._pieces = pieces
        memories = [writer.piece_memory(piece) for piece in pieces]
        self._memories = [None if memory is None else np.frombuffer(memory, np.uint8) for memory in memories]
        self._starts = np.cumsum([0, *(piece.size_bytes for piece in pieces)])

    def put(self, chunk: int, data: Bytes) -> int:
        """Copy a chunk to where it belongs; returns the checksum of the bytes that are there afterwards."""
        digest = xxhash.xxh3_64()
        start = chunk * self._chunk_bytes
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        taken = 0
        while taken < data.nbytes:
            piece, memory = self._pieces[index], self._memories[index]
            begin = start + taken - int(self._starts[index])
            size_bytes = min(piece.size_bytes - begin, data.nbytes - taken)
            share = data[taken : taken + size_bytes]
            if memory is not None:
                place = memory[begin : begin + size_bytes]
                copy_bytes(place, share)
                digest.update(place.data)
            else:
                fragment = Piece(piece.tensor_index, piece.offset + begin, size_bytes)
                self._writer.write_piece(fragment, share.data)
                digest.update(self._writer.read_piece(fragment))
            taken += size_bytes
            index += 1
        return digest.intdigest()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _shape(manifest: ExportManifest) -> _Shape:
    return manifest.pieces, manifest.chunk_bytes


def _mapped(manifest: ExportManifest, todo: Sequence[int]) -> Generator[tuple[int, Bytes]]:
    """The chunks of a file on this node. Mapped, not read, and in the mapping that this process has of it, if it has
    one: what it sealed itself, or had ready before there was a plan, is copied at the speed of memory.

    The file is never cut once it has its name (it may be unlinked), so no page of it can go away."""
    try:
        fd = os.open(manifest.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise SourceFailed(f"cannot open {manifest.path}: {error.strerror}") from error
    try:
        end = manifest.offset + manifest.size_bytes
        size_bytes = os.fstat(fd).st_size
        if size_bytes < end:
            raise SourceFailed(f"{manifest.path} has {size_bytes} bytes, not {end}")
        start = 0
        mapping = mapping_of(fd)
        if mapping is None or len(mapping) < end:
            start = manifest.offset - manifest.offset % mmap.ALLOCATIONGRANULARITY
            mapping = mmap.mmap(fd, end - start, prot=mmap.PROT_READ, offset=start)
    except OSError as error:
        raise SourceFailed(f"cannot map {manifest.path}: {error.strerror}") from error
    finally:
        os.close(fd)
    data = np.frombuffer(mapping, np.uint8)
    data.flags.writeable = False
    for chunk in todo:
        offset, chunk_bytes = manifest.chunk_range(chunk)
        yield chunk, data[offset - start : offset - start + chunk_bytes]
