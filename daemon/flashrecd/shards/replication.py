"""One rank's replica on this node: a version is pulled from where it was sealed, beside the one that is here.

    describe    at the source: layout, checksum of every chunk, blob
    compare     a chunk that is in place already stays (a transfer that broke off goes on where it stopped); one that
                the version kept before has is copied from there, after it was checked
    get         the rest, each chunk checked before it is put in place
    seal        when all are there, and the generation is not over

A source that says or sends what cannot be is left; what it sent is nowhere, for a chunk counts only with its checksum.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from flashrec.errors import EnvironmentFault, IntegrityError
from flashrec.state.arena import Arena, SealedState
from flashrec.state.arena_format import numbered_files
from flashrec.state.arena_writer import ArenaWriter, GivenUp, OpenSlot
from flashrec.state.describing import described
from flashrec.state.files import remove
from flashrec.state.manifest import CHUNK_BYTES
from flashrec.state.remote import ShardConnection, SourceFailed
from flashrec.state.shardwire import Describe, Replicate
from flashrecd.shards.counters import Counters

__all__ = ["Connect", "GivenUp", "Pace", "Replication", "ReplicationFailed"]

STALL_S = 5.0
# A transfer that goes on and on is not worth waiting for: its rank has long been told so.
DEADLINE_S = 3600.0
_NICENESS = 10


class ReplicationFailed(Exception):
    """It could not be done now; the message says why."""


@dataclass(frozen=True)
class Connect:
    """How other nodes' servers are reached."""

    key: bytes = b""
    secure: Callable[[Any], None] | None = None
    packs: bool = False
    """Ask for chunks made smaller where that pays."""

    def to(self, address: str, is_given_up: Callable[[], bool]) -> ShardConnection:
        return ShardConnection(address, self.key, is_given_up, self.secure)


class Pace:
    """Holds replication back: a cap on bytes per second for all threads together (None: none), and low priority for
    each of them."""

    def __init__(
        self,
        bytes_per_s: float | None,
        counters: Counters,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._counters = counters
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, size_bytes: int) -> None:
        """Wait until so many bytes more may come. What was not used while nothing came is lost, but for a moment's."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - 0.05) + size_bytes / self._bytes_per_s
            wait_s = self._free_at - now
        if wait_s > 0.001:
            self._sleep(wait_s)
            self._counters.add(paced_ms=int(1000 * wait_s))

    def be_nice(self) -> None:
        """Of this thread and those it makes: training comes first."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class Replication:
    """The replica of `rank` of `job` in `directory`; by one thread at a time."""

    def __init__(self, directory: Path, rank: int, job: str, counters: Counters) -> None:
        self._directory = directory
        self._rank = rank
        self._counters = counters
        self._arena = Arena(directory, rank, job)
        self._job = job
        self._writer: ArenaWriter | None = None
        # Kept from one version to the next: to make one, with its threads and its handshake, takes longer than the
        # bytes of a small version.
        self._connection: ShardConnection | None = None
        self._address = ""
        self._is_given_up: Callable[[], bool] = lambda: True

    def pull(
        self,
        request: Replicate,
        connect: Connect,
        pace: Pace,
        is_given_up: Callable[[], bool],
        seal: Callable[[Callable[[], None]], None],
    ) -> None:
        """Have the version that is wanted, sealed; `seal` calls what makes it visible, or raises GivenUp.

        Raises ReplicationFailed, GivenUp; UsageError for a generation that is over."""
        try:
            with self._connected(connect, request.address, is_given_up) as source:
                state = self._described(source, request)
                held = self._held(state)
                if held is not None and _is_same(held, state):
                    seal(lambda: None)
                    return
                slot = self._opened(state, held, is_given_up)
                missing = self._fill_from_here(slot, state, is_given_up)
                self._get(source, slot, state, missing, pace, connect.packs)
            if is_given_up():
                raise GivenUp
            seal(lambda: slot.seal(state.blob))
        except SourceFailed as error:
            raise ReplicationFailed(f"{request.address}: {error}") from error
        except IntegrityError as error:
            self._counters.add(refused_sources=1)
            raise ReplicationFailed(f"{request.address}: {error}") from error
        except EnvironmentFault as error:
            raise ReplicationFailed(str(error)) from error

    @contextlib.contextmanager
    def _connected(
        self, connect: Connect, address: str, is_given_up: Callable[[], bool]
    ) -> Iterator[ShardConnection]:
        self._is_given_up = is_given_up
        if self._connection is not None and (self._address != address or self._connection.has_ended()):
            self.disconnect()
        if self._connection is None:
            made = connect.to(address, lambda: self._is_given_up())
            self._connection, self._address = made.__enter__(), address
        is_clean = False
        try:
            yield self._connection
            is_clean = not is_given_up()
        finally:
            if not is_clean:  # an answer may be on its way yet
                self.disconnect()

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.__exit__(None, None, None)
            self._connection = None

    def remove(self) -> None:
        """Let go of it all."""
        self.disconnect()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        with contextlib.suppress(OSError, EnvironmentFault):  # then it stays until the job ends
            for _, path in numbered_files(self._directory, self._rank):
                remove(path)

    def _described(self, source: ShardConnection, request: Replicate) -> SealedState:
        """Raises IntegrityError when it is not what was asked for."""

        def ask(offset: int) -> Describe:
            return Describe(offset, request.where, request.rank, request.version, offset)

        data = source.document(ask, STALL_S, time.monotonic() + DEADLINE_S)
        if data is None:
            raise GivenUp
        self._counters.add(received_bytes=len(data))
        state = described(data, request.rank, request.version)
        if state.sealed.generation > request.generation:
            raise IntegrityError(
                f"it was sealed in generation {state.sealed.generation}, after {request.generation}"
            )
        if any(manifest.chunk_bytes != CHUNK_BYTES for manifest in state.manifests):
            raise IntegrityError(f"it is not in chunks of {CHUNK_BYTES} bytes")
        return state

    def _held(self, state: SealedState) -> SealedState | None:
        """What is here of this version. Raises IntegrityError when that contradicts it."""
        try:
            held = self._arena.read(state.sealed.version)
        except IntegrityError:
            return None
        if held.sealed.generation >= state.sealed.generation and not _is_same(held, state):
            raise IntegrityError(
                f"version {state.sealed.version}, sealed in generation {state.sealed.generation}, is not the one that "
                f"is kept here of generation {held.sealed.generation}"
            )
        return held

    def _opened(
        self, state: SealedState, held: SealedState | None, is_given_up: Callable[[], bool]
    ) -> OpenSlot:
        if self._writer is None:
            self._writer = ArenaWriter(self._directory, self._rank, self._job)
        return self._writer.open_slot(
            state.sealed.version,
            state.sealed.generation,
            state.layout,
            len(state.blob),
            is_given_up,
            again=held is not None,
        )

    def _fill_from_here(
        self, slot: OpenSlot, state: SealedState, is_given_up: Callable[[], bool]
    ) -> dict[int, tuple[int, int]]:
        """Put in place what is here already; the others, by their number in the slot: (offset in the source's file,
        size)."""
        kept = self._kept(state.sealed.version)
        missing: dict[int, tuple[int, int]] = {}
        unchanged = copied = 0
        number = -1
        for manifest in state.manifests:
            for chunk, digest in enumerate(manifest.checksums):
                number += 1
                offset, size_bytes = manifest.chunk_range(chunk)
                if slot.has(number, digest):
                    unchanged += size_bytes
                    continue
                if is_given_up():
                    raise GivenUp
                data = kept.get(digest)
                if data is not None and data.nbytes == size_bytes and _digest(data) == digest:
                    slot.put_whole(number, data, digest)
                    copied += size_bytes
                    continue
                missing[number] = offset, size_bytes
        self._counters.add(unchanged_bytes=unchanged, copied_bytes=copied)
        return missing

    def _kept(self, version: int) -> dict[int, Any]:
        """The chunks of the newest version up to `version` that is sealed here, by their checksums. Not checked."""
        found = [one.version for one in self._arena.sealed() if one.version <= version]
        if not found:
            return {}
        try:
            state = self._arena.read(found[-1])
            memory = np.frombuffer(self._arena.map_for_pull(state), np.uint8)
        except IntegrityError:
            return {}
        chunks: dict[int, Any] = {}
        for manifest in state.manifests:
            for chunk, digest in enumerate(manifest.checksums):
                offset, size_bytes = manifest.chunk_range(chunk)
                chunks[digest] = memory[offset : offset + size_bytes]
        return chunks

    def _get(
        self,
        source: ShardConnection,
        slot: OpenSlot,
        state: SealedState,
        missing: dict[int, tuple[int, int]],
        pace: Pace,
        packs: bool,
    ) -> None:
        if not missing:
            return
        digests = [digest for manifest in state.manifests for digest in manifest.checksums]
        name = state.manifests[0].name
        saved = 0  # of the chunk that comes next

        def packed(wire_bytes: int, size_bytes: int) -> None:
            nonlocal saved
            saved = size_bytes - wire_bytes
            self._counters.add(unpacked_bytes=saved)

        deadline = time.monotonic() + DEADLINE_S
        for number, data in source.fetch(name, missing, STALL_S, deadline, packed=packed if packs else None):
            self._counters.add(received_bytes=data.nbytes)
            if _digest(data) != digests[number]:
                offset, size_bytes = missing[number]
                raise IntegrityError(f"bytes {offset} to {offset + size_bytes} do not match their checksum")
            slot.put_whole(number, np.frombuffer(data, np.uint8), digests[number])
            pace.take(data.nbytes - saved)
            saved = 0


def _digest(data: Any) -> int:
    return xxhash.xxh3_64_intdigest(data)


def _is_same(one: SealedState, other: SealedState) -> bool:
    return (
        one.layout.digest == other.layout.digest
        and one.blob == other.blob
        and [manifest.checksums for manifest in one.manifests]
        == [manifest.checksums for manifest in other.manifests]
    )
