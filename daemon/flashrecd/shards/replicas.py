"""What this node keeps for the ranks of others, in the job's directory:

    replica/r<rank>.<n>       sealed versions, in the files of `flashrec.state.arena_format`, two slots each
    replica-private/          private state, as `flashrec.state.private_slots` has it
    replica-full/             that of full versions
    fence                     the newest generation that is over

Generations end by `fence`: afterwards nothing of an older one is kept any more, not even what is on its way.
A server that is started again goes on from what is there.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrec.errors import EnvironmentFault, IntegrityError, UsageError
from flashrec.state.arena import Arena, check_bytes
from flashrec.state.arena_format import FILE_NAME
from flashrec.state.codec import checksum
from flashrec.state.files import ASIDE, remove, write_whole
from flashrec.state.manifest import REPLICA
from flashrec.state.private_slots import REPLICA_FULL, REPLICA_PRIVATE, SLOT_NAME, PrivateSlots
from flashrec.state.shardwire import PIECE_BYTES, Describe, Doubt, Keep, Private, Replicate, ReplyHeader
from flashrecd.shards.answering import Later
from flashrecd.shards.counters import Counters
from flashrecd.shards.replication import Connect, GivenUp, Pace, Replication, ReplicationFailed
from flashrecd.shards.telling import Telling

_FENCE = "fence"
# Private state that has come in part.
_MAX_ASSEMBLED_BYTES = 1 << 30
_MAX_WAITING_FOR_ONE = 16
_MAX_DOUBTED = 64
_MAX_RANKS = 4096
_NUM_THREADS = 4

Holdings = list[tuple[int, list[int], list[int]]]
"""(rank, versions of its private state, of its sealed state)."""


@dataclass
class _Wanted:
    """A version that somebody wants to be kept here."""

    request: Replicate
    waiting: list[tuple[int, Later]] = field(default_factory=list)
    is_given_up: bool = False

    def is_same(self, other: Replicate) -> bool:
        mine = self.request
        return (mine.version, mine.generation, mine.address, mine.where) == (
            other.version,
            other.generation,
            other.address,
            other.where,
        )


@dataclass
class _Rank:
    """One rank's replica; a thread has it while `is_busy`."""

    replication: Replication
    now: _Wanted | None = None
    next: _Wanted | None = None
    is_busy: bool = False
    is_forgotten: bool = False


@dataclass
class _Arriving:
    key: tuple[int, int, int, int]
    data: bytearray


class Replicas:
    """Of `job`, below `root`. `connect` reaches other nodes' servers; a few versions are pulled at a time, at `pace`.
    Everything but `replicate` and `tell` is done when it returns, and belongs to one thread."""

    def __init__(self, root: Path, job: str, counters: Counters, connect: Connect, pace: Pace) -> None:
        self._root = root
        self._job = job
        self._counters = counters
        self._connect = connect
        self._pace = pace
        # Of everything below; a version becomes visible under it.
        self._lock = threading.RLock()
        self._fenced = self._read_fence()
        self._is_settled = True  # nothing is here that was lost with the generation that was fenced
        self._resumed_at = (-1, -1)  # of private and of sealed state, the last that all went on with
        self._ranks: dict[int, _Rank] = {}
        self._arriving: dict[tuple[int, bool], _Arriving] = {}
        self._doubted: set[tuple[int, int]] = set()
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="flashrec-check")
        self._telling = Telling(root, job, counters)
        self._pullers = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="flashrec-replicate")

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for rank in self._ranks.values():
                for wanted in (rank.now, rank.next):
                    if wanted is not None:
                        wanted.is_given_up = True
                        wanted.waiting.clear()
        self._telling.close()
        self._checker.shutdown(cancel_futures=True)
        self._pullers.shutdown(cancel_futures=True)
        for rank in self._ranks.values():
            rank.replication.disconnect()

    # --- what others ask for --------------------------------------------------------------------------------

    def tell(self, request: Describe | Private, later: Later) -> None:
        """A piece of a description or of private state."""
        self._telling.tell(request, later)

    def keep(self, request: Keep, data: memoryview) -> ReplyHeader:
        """A piece of private state, or all of it."""

        def no(status: str, why: str) -> ReplyHeader:
            return ReplyHeader(request.request_id, "refused" if status == "refused" else "failed", why[:1000])

        with self._lock:
            over = self._over(request.generation)
            if over is not None:
                return no("refused", over)
            if data.nbytes != min(PIECE_BYTES, request.size_bytes - request.offset):
                self._counters.refuse("a piece of private state of another size than it was said to have")
                return no("refused", f"{data.nbytes} bytes at {request.offset} of {request.size_bytes}")
            payload = self._assembled(request, data)
            if payload is None:
                return ReplyHeader(request.request_id, "ok")
            if isinstance(payload, str):
                return no("failed", payload)
            if checksum(payload) != request.checksum:
                self._counters.refuse("private state that does not match its checksum")
                return no("failed", "the bytes do not match their checksum")
            try:
                slots = PrivateSlots(
                    self._root / (REPLICA_FULL if request.full else REPLICA_PRIVATE), request.rank
                )
                if not _has(slots, request.version, request.generation, payload):
                    slots.seal(request.version, request.generation, payload, again=True)
            except UsageError as error:
                self._counters.refuse(str(error))
                return no("refused", str(error))
            except EnvironmentFault as error:
                return no("failed", str(error))
            self._counters.add(kept_private=1, received_bytes=request.size_bytes)
            return ReplyHeader(request.request_id, "ok")

    def _assembled(self, request: Keep, data: memoryview) -> memoryview | str | None:
        """All of what `data` is a piece of; None while some is missing; text: why it cannot be had so."""
        if request.size_bytes <= PIECE_BYTES:
            return data
        whose = (request.rank, request.full)
        key = (request.version, request.generation, request.size_bytes, request.checksum)
        if request.offset == 0:
            self._arriving.pop(whose, None)
            others = sum(len(one.data) for one in self._arriving.values())
            if others + request.size_bytes > _MAX_ASSEMBLED_BYTES:
                return "too much private state comes in at once"
            self._arriving[whose] = _Arriving(key, bytearray())
        arriving = self._arriving.get(whose)
        if arriving is None or arriving.key != key or len(arriving.data) != request.offset:
            return f"the piece at {request.offset} came out of order"
        arriving.data += data
        if len(arriving.data) < request.size_bytes:
            return None
        del self._arriving[whose]
        return memoryview(arriving.data)

    def replicate(self, request: Replicate, later: Later) -> None:
        """Pull a version and keep it; `later` is told when it is sealed, or why not."""
        with self._lock:
            over = self._over(request.generation)
            if over is not None:
                later(ReplyHeader(request.request_id, "refused", over), b"")
                return
            rank = self._ranks.get(request.rank)
            if rank is None:
                if len(self._ranks) >= _MAX_RANKS:
                    later(
                        ReplyHeader(request.request_id, "failed", "replicas of too many ranks are kept here"),
                        b"",
                    )
                    return
                rank = _Rank(Replication(self._root / REPLICA, request.rank, self._job, self._counters))
                self._ranks[request.rank] = rank
            for wanted in (rank.next, rank.now):
                if wanted is not None and wanted.request.generation > request.generation:
                    why = f"generation {wanted.request.generation} has asked already"
                    later(ReplyHeader(request.request_id, "refused", why), b"")
                    return
                if wanted is not None and wanted.is_same(request) and not wanted.is_given_up:
                    # Whoever asks again has lost the connection on which the answer was to come.
                    del wanted.waiting[:-_MAX_WAITING_FOR_ONE]
                    wanted.waiting.append((request.request_id, later))
                    return
            if rank.now is not None:
                rank.now.is_given_up = True
            if rank.next is not None:
                self._finish(rank.next, "failed", "a later version was wanted")
            rank.next = _Wanted(request, [(request.request_id, later)])
            self._schedule(rank)

    def doubt(self, request: Doubt, later: Later) -> None:
        """Check a replica, all of it, and let go of it if it is damaged: the next plan must find another source.
        Nobody is believed about it."""
        with self._lock:
            one = request.rank, request.version
            if one in self._doubted or len(self._doubted) >= _MAX_DOUBTED:
                later(ReplyHeader(request.request_id, "failed", "it, or too much, is being checked"), b"")
                return
            self._doubted.add(one)
        self._checker.submit(self._check, request, later)

    def _check(self, request: Doubt, later: Later) -> None:
        header = ReplyHeader(request.request_id, "ok")
        arena = self._arena(request.rank)
        generation = -1
        try:
            state = arena.read(request.version)
            generation = state.sealed.generation
            check_bytes(state)
        except IntegrityError as error:
            if generation >= 0:
                self._counters.refuse(str(error), "damaged replica")
                try:
                    with self._lock:
                        arena.discard(request.version, generation)
                except EnvironmentFault as fault:
                    header = ReplyHeader(request.request_id, "failed", str(fault)[:1000])
        finally:
            with self._lock:
                self._doubted.discard((request.rank, request.version))
        later(header, b"")

    # --- what this node's daemon asks for ------------------------------------------------------------------------

    def fence(self, generation: int) -> Holdings:
        """Keep nothing any more of `generation` and older ones; tells what is here, for as long as nothing newer
        comes."""
        with self._lock:
            if generation > self._fenced:
                self._fenced, self._is_settled = generation, False
                try:
                    write_whole(self._root / _FENCE, [str(generation).encode()], len(str(generation)))
                except EnvironmentFault as error:  # it holds as long as this process lives
                    self._counters.refuse(str(error), "fence not written")
            for rank in self._ranks.values():
                for wanted in (rank.now, rank.next):
                    if wanted is not None and wanted.request.generation <= self._fenced:
                        wanted.is_given_up = True
                self._schedule(rank)
            self._arriving.clear()
            return self.holdings()

    def holdings(self) -> Holdings:
        with self._lock:
            private: dict[int, set[int]] = collections.defaultdict(set)
            for name in (REPLICA_PRIVATE, REPLICA_FULL):
                for rank in {rank for rank, *_ in self._private_files(name)}:
                    slots = PrivateSlots(self._root / name, rank)
                    private[rank] |= {
                        slot.version for slot in slots.sealed() if self._is_good(slots, slot.version)
                    }
            sealed = {
                rank: sorted(one.version for one in arena.sealed() if self._is_good(arena, one.version))
                for rank, arena in ((rank, self._arena(rank)) for rank in self._sealed_ranks())
            }
            return [
                (rank, sorted(private.get(rank, ())), sealed.get(rank, []))
                for rank in sorted(private.keys() | sealed.keys())
            ]

    def _is_good(self, kept: PrivateSlots | Arena, version: int) -> bool:
        """Whether a version that is whole can be counted on. Here only what the last plan chose is read, without the
        tensors: it may have failed because that is damaged. Who finds the tensors so says it (`doubt`)."""
        private, sealed = self._resumed_at
        try:
            if version == (private if isinstance(kept, PrivateSlots) else sealed):
                kept.read(version)
        except IntegrityError as error:
            self._counters.refuse(str(error), "damaged replica")
            return False
        return True

    def discard(self, generation: int, version: int, sealed: int) -> None:
        """`generation` resumes at `version`: private state that older ones kept above it was lost, and so is what they
        sealed above `sealed`. Harmless when it comes late. Raises EnvironmentFault."""
        with self._lock:
            self._resumed_at = version, sealed
            for name, newest in ((REPLICA_PRIVATE, version), (REPLICA_FULL, sealed)):
                for _, its_version, its_generation, path in list(self._private_files(name)):
                    if its_version > newest and its_generation < generation:
                        remove(path)
            for rank in self._sealed_ranks():
                arena = self._arena(rank)
                above = [one for one in arena.sealed() if one.version > sealed]
                # Whoever has sealed above it in a later generation has written over the lost ones, or discarded them.
                if above and all(one.generation < generation for one in above):
                    arena.discard_above(sealed)
            if generation > self._fenced:
                self._is_settled = True
                for wanting in self._ranks.values():
                    self._schedule(wanting)

    def forget(self, ranks: tuple[int, ...]) -> None:
        """Raises EnvironmentFault."""
        with self._lock:
            for number in ranks:
                for name in (REPLICA_PRIVATE, REPLICA_FULL):
                    for rank, _, _, path in list(self._private_files(name)):
                        if rank == number:
                            remove(path)
                found = self._ranks.setdefault(
                    number, _Rank(Replication(self._root / REPLICA, number, self._job, self._counters))
                )
                for wanted in (found.now, found.next):
                    if wanted is not None:
                        wanted.is_given_up = True
                found.is_forgotten = True
                if not found.is_busy:
                    self._ranks.pop(number)
                    found.replication.remove()

    # --- the threads ----------------------------------------------------------------------------------------------

    def _is_due(self, rank: _Rank) -> bool:
        """Not while a lost version is here: the new one is written beside the newest below it, or the lost attempt at
        it, and would take the place of the one that is to be kept."""
        return rank.next is not None and (self._is_settled or rank.next.is_given_up)

    def _schedule(self, rank: _Rank) -> None:
        if not rank.is_busy and self._is_due(rank):
            rank.is_busy = True
            self._counters.add(replicas_waiting=1)
            self._pullers.submit(self._run, rank)

    def _run(self, rank: _Rank) -> None:
        """Do what is wanted of a rank, until nothing more is."""
        self._pace.be_nice()
        self._counters.add(replicas_waiting=-1, replicas_under_way=1)
        try:
            while True:
                with self._lock:
                    if rank.is_forgotten:
                        rank.replication.remove()
                        rank.is_forgotten = False
                    if not self._is_due(rank):
                        rank.now, rank.is_busy = None, False
                        return
                    rank.now, rank.next = rank.next, None
                    assert rank.now is not None
                self._do(rank, rank.now)
        finally:
            self._counters.add(replicas_under_way=-1)

    def _do(self, rank: _Rank, wanted: _Wanted) -> None:
        request = wanted.request
        try:
            rank.replication.pull(
                request,
                self._connect,
                self._pace,
                lambda: wanted.is_given_up,
                lambda seal: self._seal(wanted, seal),
            )
        except GivenUp:
            with self._lock:
                over = self._over(request.generation)
                self._finish(wanted, "failed" if over is None else "refused", over or "it was given up")
        except ReplicationFailed as error:
            self._counters.add(failed_replications=1)
            self._finish(wanted, "failed", str(error))
        except UsageError as error:
            self._counters.refuse(str(error))
            self._finish(wanted, "refused", str(error))
        except Exception as error:  # whatever it is, the rank must hear of it
            self._counters.add(failed_replications=1)
            self._counters.refuse(f"{type(error).__name__}: {error}", "replication failed")
            self._finish(wanted, "failed", f"{type(error).__name__}: {error}")
        else:
            self._counters.add(replicated_versions=1)
            self._finish(wanted, "ok", "")

    def _seal(self, wanted: _Wanted, seal: Callable[[], None]) -> None:
        """Make a version visible, unless its generation is over: `fence` has the same lock."""
        with self._lock:
            if wanted.is_given_up or wanted.request.generation <= self._fenced:
                raise GivenUp
            seal()

    def _finish(self, wanted: _Wanted, status: Any, detail: str) -> None:
        with self._lock:
            wanted.is_given_up = True  # whoever asks from now on is not of it
            waiting, wanted.waiting = wanted.waiting, []
        for request_id, later in waiting:
            later(ReplyHeader(request_id, status, detail[:1000]), b"")

    # --- what is there --------------------------------------------------------------------------------------------

    def _over(self, generation: int) -> str | None:
        if generation > self._fenced:
            return None
        self._counters.add(fenced=1)
        return f"generation {generation} is over: generation {self._fenced} was fenced here"

    def _read_fence(self) -> int:
        try:
            return int((self._root / _FENCE).read_bytes())
        except (OSError, ValueError):
            return -1

    def _arena(self, rank: int) -> Arena:
        return Arena(self._root / REPLICA, rank, self._job)

    def _sealed_ranks(self) -> set[int]:
        return {
            int(match[1]) for name in _names(self._root / REPLICA) if (match := FILE_NAME.fullmatch(name))
        }

    def _private_files(self, name: str) -> Iterator[tuple[int, int, int, Path]]:
        """(rank, version, generation, path)."""
        for entry in _names(self._root / name):
            match = SLOT_NAME.fullmatch(entry)
            if match:
                yield int(match[1]), int(match[2]), int(match[3]), self._root / name / entry


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir() if not path.name.startswith(ASIDE)]
    except FileNotFoundError:
        return []


def _has(slots: PrivateSlots, version: int, generation: int, payload: memoryview) -> bool:
    """Whether this very thing is kept already: it was said again, for its answer was lost."""
    if not any((slot.version, slot.generation) == (version, generation) for slot in slots.sealed()):
        return False
    try:
        return slots.read(version) == payload
    except IntegrityError:
        return False
