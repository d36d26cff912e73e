"""Where a rank that must become a version finds what is sealed of it: on this node, and on others. No torch.

On each node that has it lies what its own ranks sealed (the arena, private slots), or what it keeps for ranks of other
nodes (replicas), in the same form. A plan says which nodes have a version of a rank, not which of the two it is: a
replacement may come to a node that had kept replicas of its rank.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from flashrec.errors import IntegrityError
from flashrec.protocol import messages as msg
from flashrec.protocol.keys import ClusterKey
from flashrec.state.arena import Arena, SealedState
from flashrec.state.keeperlink import Secure
from flashrec.state.manifest import ARENA, REPLICA, ExportManifest, Source
from flashrec.state.private_slots import FULL, PRIVATE, REPLICA_FULL, REPLICA_PRIVATE, read_first
from flashrec.state.pull import PullCancelled
from flashrec.state.replicating import RemoteStore, Replicator
from flashrec.state.shardwire import Where

Places = tuple[tuple[int, str], ...]
"""(node, address of its shard server), in the order to try."""

# How long slow nodes are waited for once there is a source.
_STRAGGLERS_S = 0.5
_MAX_THREADS = 16
_LOOK_S = 0.05

T = TypeVar("T")


@dataclass(frozen=True)
class Reach:
    """How the shard servers of other nodes are reached, from node `node`, whose own is at `replica_address`."""

    node: int
    replica_address: str
    secure: Secure
    token: bytes

    @staticmethod
    def of(welcome: msg.Welcome) -> Reach | None:
        """None where the job runs on one node. Raises UsageError when the cluster's key cannot be used."""
        if not welcome.replica_address:
            return None
        secure: Secure = lambda socket: None  # noqa: E731  # the loopback interface, or a token with each request
        token = b""
        if welcome.key_file:
            key = ClusterKey.load(Path(welcome.key_file))
            if welcome.plain_bulk:
                token = key.token()
            else:
                secure = key.as_client
        return Reach(welcome.node, welcome.replica_address, secure, token)

    def replicator(self, rank: int, job: str) -> Replicator:
        return Replicator(rank, job, self.replica_address, self.secure, self.token)

    def store(self, address: str, is_cancelled: Callable[[], bool]) -> RemoteStore:
        return RemoteStore(address, self.secure, self.token, is_cancelled)

    def source(self, manifest: ExportManifest, address: str) -> Source:
        return Source(manifest, address, self.token, self.secure)


@dataclass(frozen=True)
class Found:
    """A sealed version of one rank in one place."""

    state: SealedState
    source_of: Callable[[ExportManifest], Source]

    def part(self, ranks: tuple[int, ...]) -> Source:
        """Its part of the replica set `ranks`. Raises IntegrityError when it has none."""
        for one, manifest in zip(self.state.layout.sets, self.state.manifests, strict=True):
            if one.ranks == ranks:
                return self.source_of(manifest)
        raise IntegrityError(f"{self.state.path} has no part of what ranks {list(ranks)} hold")


class Sources:
    """Of `version` of the job in `shm_dir`. `address`: the server to pull through on this node; None: its memory.
    `reach` None, and no `places`: there is no other node. `places`: of each rank's sealed part, and private state."""

    def __init__(
        self,
        shm_dir: Path,
        job: str,
        version: int,
        address: str | None,
        is_cancelled: Callable[[], bool],
        reach: Reach | None = None,
        places: Mapping[int, tuple[Places, Places]] | None = None,
    ) -> None:
        self.version = version
        self.is_cancelled = is_cancelled
        self._shm_dir = shm_dir
        self._job = job
        self._address = address
        self._reach = reach
        self._places = places or {}
        self._known_here: dict[int, list[Found]] = {}

    def has(self, rank: int) -> bool:
        """Whether the rank's sealed part is here, or said to be on another node."""
        sealed, _ = self._places.get(rank, ((), ()))
        return bool(sealed) or bool(self._here(rank))

    def sealed(self, ranks: Sequence[int]) -> dict[int, list[Found]]:
        """Each rank's sealed part, in every place where it is whole; those on this node first. Raises IntegrityError
        when one is nowhere, PullCancelled."""
        found = {rank: list(self._here(rank)) for rank in ranks}
        asks = [
            (rank, lambda ended, rank=rank, address=address: self._there(rank, address, ended))
            for rank in ranks
            for address in self._elsewhere(rank, 0)
        ]
        problems: list[str] = []
        for rank, one in self._ask(asks, {rank for rank in ranks if not found[rank]}, problems):
            found[rank].append(one)
        for rank, places in found.items():
            if not places:
                why = "; ".join(problems) or "no node is said to have it"
                raise IntegrityError(f"version {self.version} of rank {rank} is not to be had: {why}")
        return found

    def private(self, rank: int) -> bytes:
        """Its private state. Raises IntegrityError when it is nowhere, PullCancelled."""
        problems: list[str] = []
        names = (PRIVATE, FULL) if self._reach is None else (PRIVATE, FULL, REPLICA_PRIVATE, REPLICA_FULL)
        try:
            return read_first(self._shm_dir, names, rank, self.version)
        except IntegrityError as error:
            problems.append(str(error))
        asks = [
            (rank, lambda ended, address=address: self._private_there(rank, address, ended))
            for address in self._elsewhere(rank, 1)
        ]
        for _, payload in self._ask(asks, {rank}, problems):
            return payload
        raise IntegrityError("; ".join(problems))

    def served(self, manifest: ExportManifest, address: str | None) -> Source:
        """What a survivor serves: at another node's server, or (its `address` is this node's, or None) on this one."""
        if self._reach is None or address is None or address == self._address:
            return Source(manifest, address)
        return self._reach.source(manifest, address)

    # --- one place ----------------------------------------------------------------------------------------

    def _elsewhere(self, rank: int, half: int) -> list[str]:
        if self._reach is None:
            return []
        places = self._places.get(rank, ((), ()))[half]
        return [address for node, address in places if node != self._reach.node]

    def _here(self, rank: int) -> list[Found]:
        if rank in self._known_here:
            return self._known_here[rank]
        found = self._known_here[rank] = []
        for name in (ARENA,) if self._reach is None else (ARENA, REPLICA):
            with contextlib.suppress(IntegrityError):
                state = Arena(self._shm_dir / name, rank, self._job).read(self.version)
                found.append(Found(state, lambda manifest: Source(manifest, self._address)))
        return found

    def _there(self, rank: int, address: str, ended: Callable[[], bool]) -> Found:
        reach = self._reach
        assert reach is not None
        store = reach.store(address, ended)
        state = _either(lambda where: store.sealed_state(where, rank, self.version))
        return Found(state, lambda manifest: reach.source(manifest, address))

    def _private_there(self, rank: int, address: str, ended: Callable[[], bool]) -> bytes:
        assert self._reach is not None
        store = self._reach.store(address, ended)
        return _either(lambda where: store.private(where, rank, self.version))

    def _ask(
        self,
        asks: Sequence[tuple[int, Callable[[Callable[[], bool]], T]]],
        wanted: set[int],
        problems: list[str],
    ) -> list[tuple[int, T]]:
        """All at once; (rank, answer) in the order of `asks`. Those that are slow are not waited for when each rank in
        `wanted` has an answer."""
        if not asks:
            return []
        is_over = False
        enough_at: float | None = None
        answered: dict[int, tuple[int, T]] = {}
        with ThreadPoolExecutor(min(len(asks), _MAX_THREADS), thread_name_prefix="flashrec-ask") as pool:
            pending: dict[Future[Any], int] = {
                pool.submit(ask, lambda: is_over or self.is_cancelled()): number
                for number, (_, ask) in enumerate(asks)
            }
            while pending:
                for done in wait(pending, _LOOK_S, FIRST_COMPLETED).done:
                    number = pending.pop(done)
                    try:
                        answered[number] = asks[number][0], done.result()
                    except IntegrityError as error:
                        problems.append(str(error))
                if wanted <= {rank for rank, _ in answered.values()}:
                    enough_at = enough_at or time.monotonic() + _STRAGGLERS_S
                if self.is_cancelled() or (enough_at is not None and time.monotonic() > enough_at):
                    break
            is_over = True
            pool.shutdown(cancel_futures=True)
        if self.is_cancelled():
            raise PullCancelled(f"the search for version {self.version} was cancelled")
        return [answered[number] for number in sorted(answered)]


def _either(get: Callable[[Where], T]) -> T:
    problems = []
    for where in get_args(Where):
        try:
            return get(where)
        except IntegrityError as error:
            problems.append(str(error))
    raise IntegrityError("; ".join(problems))
