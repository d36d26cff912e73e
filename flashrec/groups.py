"""All process groups of this process, formed again in place after a failure.

The states of the set, and what a collective does in each:

    detached   no peer is connected: as if every peer held my data   (`start`, `detach`)
    formed     a real collective                                     (`form`)
    latched    something failed: finished work, integer outputs zero (`abort`, `latch`, an error)

c10d's own store is one whose barriers are always satisfied (`SoloStore`), so creating a group is a
local act; ranks really meet only when a generation is formed. That is what lets a replacement build
its model alone and join later.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from flashrec import torch_private
from flashrec.collectives import NO_RANK, InPlaceGroup, Shared
from flashrec.errors import GroupsAborted, UsageError
from flashrec.latching import describe
from flashrec.prelude import Player, Recorder
from flashrec.torch_private import Store
from flashrec.transport import Transport
from flashrec.waiting import LeftBehind, await_work

BACKEND = "flashrec"

# How long `close()` waits for the last generation's threads; they take milliseconds unless stuck.
_BURIAL_S = 2.0


class GateBroken(Exception):
    """The agreement got no result here: a peer is gone, or it was aborted.

    Other ranks may have seen it pass.
    """


class SoloStore(Store):
    """The store c10d keeps its books in: it answers every barrier as if all had arrived."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._world_size = world_size

    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key: str) -> bytes:
        return self._values.get(key, b"")

    def add(self, key: str, value: int) -> int:
        return self._world_size

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        return None

    def check(self, keys: list[str]) -> bool:
        return True


class GroupSet:
    """The one set of in-place groups of a process.

    One thread (the main one) starts, forms, detaches, agrees and closes. `abort` and `latch` may
    come from any other, at any moment.
    """

    def __init__(self, *, on_collective: Callable[[str, int], None] | None = None) -> None:
        """`on_collective(op, running count)` is called before each collective; it must be cheap."""
        self.on_latch: Callable[[str], None] | None = None
        """Called once per generation, on the first error a collective sees, on the thread it saw it on."""
        self.generation = -1
        self._shared = Shared(on_collective=on_collective, adopt=self._adopt, dismiss=self._dismiss)
        self._shared.latch.on_first = self._on_first_error
        self._lock = threading.Lock()
        self._groups: list[InPlaceGroup] = []
        self._dismissed: list[ProcessGroup] = []  # of destroyed groups: kept until all are buried
        self._world: InPlaceGroup | None = None
        self._store: Store | None = None
        self._transport: Transport | None = None
        self._timeout_s = 0.0
        self._aborted_through = -1
        self._abort_reason = ""

    # -- life ---------------------------------------------------------------------------------

    def start(self, rank: int | None, world_size: int) -> None:
        """Initialise torch.distributed with this set's world group, detached.

        Args:
            rank: this process's rank, or None for a standby that is nobody yet: until
                `assign_rank`, asking any group for its rank raises UsageError.

        Raises:
            UsageError: torch.distributed is initialised already, or the rank is out of range.
            EnvironmentFault: this torch lacks a private name that is needed.
        """
        global _current
        torch_private.check()
        if dist.is_initialized() or self._world is not None:
            raise UsageError("torch.distributed is initialised already; flashrec.init() takes its place")
        if world_size < 1 or (rank is not None and not 0 <= rank < world_size):
            raise UsageError(f"rank {rank} is not in a world of {world_size}")
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
        _current = self
        dist.init_process_group(BACKEND, store=SoloStore(world_size), rank=rank or 0, world_size=world_size)
        world = dist.group.WORLD
        assert isinstance(world, InPlaceGroup)
        world.take_rank(rank)
        self._world = world
        atexit.register(self.close)

    def assign_rank(self, rank: int) -> None:
        """Turn a standby without a rank into `rank`."""
        world = self._started()
        if not 0 <= rank < world.size():
            raise UsageError(f"rank {rank} is not in a world of {world.size()}")
        world.act_as(None)
        world.take_rank(rank)
        torch_private.set_global_rank(rank)

    def act_as(self, rank: int | None) -> None:
        """Let a standby without a rank rehearse: groups answer `rank` until this is called with None."""
        self._started().act_as(rank)

    def close(self) -> None:
        """End it all: no thread and no socket is left. Safe to call twice, and before `start`."""
        global _current
        burial = self._drop()
        if burial is not None:
            burial.join(_BURIAL_S)
        self._shared.bystander.close()
        self.record_to(None)
        self._shared.player = None
        world, self._world = self._world, None
        self._groups.clear()
        if world is not None and dist.group.WORLD is world:
            dist.destroy_process_group()
        if _current is self:
            _current = None
        atexit.unregister(self.close)

    # -- generations --------------------------------------------------------------------------

    def form(
        self, store: Store, generation: int, address: str = "127.0.0.1", timeout_s: float = 1800
    ) -> None:
        """Meet the ranks of `generation` in `store` and connect every group this rank belongs to.

        Groups are connected in the order of their creation, which is the same on all ranks; one
        that is created later connects at once, through the same store. Clears the latch.

        Args:
            store: where ranks find each other. Its `get` may block; if it has an `abort()`, that
                must end a blocked `get` with an exception. It is used until the next `form`.
            generation: greater than any before.
            address: of the interface to listen on.
            timeout_s: how long a collective, and a connection, may take; and how long three threads
                of gloo's linger after a cut in the middle of a message (see `waiting`).

        Raises:
            GroupsAborted: `abort()` was called, or a peer could not be reached. Nothing is formed.
            UsageError: a group exists on this rank and not on another member.
            EnvironmentFault: nothing can listen on `address`.
        """
        world = self._started()
        if generation <= self.generation:
            raise UsageError(f"generation {generation} is not newer than {self.generation}")
        if not world.has_rank:
            raise UsageError(NO_RANK)
        self._drop()
        transport = Transport(address)
        with self._lock:
            self.generation, self._timeout_s = generation, timeout_s
            self._store, self._transport = store, transport
            aborted = generation <= self._aborted_through
        try:
            if aborted:
                raise GroupsAborted(self._abort_reason)
            for group in list(self._groups):
                group.inner = self._connect(group, transport, store)
                if group is world:
                    self._check_same_groups(group.inner)
            transport.keep_sockets()
            with self._lock:
                if generation <= self._aborted_through:
                    raise GroupsAborted(self._abort_reason)
                self._shared.latch.renew()
        except BaseException as error:
            reason = describe(f"forming generation {generation}", error)
            self._shared.latch.set(reason)
            self._drop()
            if self._is_aborted():
                raise GroupsAborted(self._abort_reason) from error
            if isinstance(error, RuntimeError):
                raise GroupsAborted(reason) from error
            raise

    def detach(self) -> None:
        """Drop all connections: from here on a collective behaves as if every peer held my data."""
        self._drop()
        with self._lock:
            self._shared.latch.renew()

    def abort(self, reason: str, generation: int | None = None) -> None:
        """Latch, cut this generation's connections, and make a `form()` under way raise.

        Thread-safe, and prompt even where a peer is silent. `generation` names the one that is
        meant: an older one is ignored, a newer one makes its `form()` fail as soon as it is called.
        """
        with self._lock:
            if generation is None:
                generation = self.generation
            if generation > self._aborted_through:
                self._aborted_through, self._abort_reason = generation, reason
            store, transport = self._store, self._transport
            if generation == self.generation:
                self._shared.latch.set(reason)
        if generation == self.generation:
            release = getattr(store, "abort", None)
            if release is not None:
                release()
            if transport is not None:
                transport.cut()

    def latch(self, reason: str) -> None:
        """From now on every collective returns finished work. Connections stay."""
        self._shared.latch.set(reason)

    @property
    def latched(self) -> str | None:
        """The first reason of this generation, or None."""
        return self._shared.latch.text

    @property
    def formed(self) -> bool:
        """Whether the world group has connections (they may be broken: see `latched`)."""
        return self._world is not None and self._world.inner is not None

    # -- the gate -----------------------------------------------------------------------------

    def agree(self, values: Sequence[int]) -> list[int]:
        """Element-wise minimum of all ranks' `values` (64-bit integers, equally many on each).

        Raises:
            GateBroken: no result arrived here. That does not mean none arrived elsewhere.
        """
        latch = self._shared.latch
        inner = self._started().inner
        if inner is None or latch.text is not None:
            raise GateBroken(latch.text or "no peer is connected")
        votes = torch.tensor(list(values), dtype=torch.int64)
        epoch = latch.begin()
        try:
            await_work(inner.allreduce([votes], ReduceOp.MIN), lambda: latch.is_lost(epoch))
        except RuntimeError as error:
            if not isinstance(error, LeftBehind):
                latch.end(epoch)
            reason = describe("the gate's agreement", error)
            latch.trip(reason, epoch)
            raise GateBroken(reason) from error
        latch.end(epoch)
        return [int(value) for value in votes.tolist()]

    # -- bookkeeping --------------------------------------------------------------------------

    @property
    def collectives(self) -> int:
        """How many collectives the model has issued so far, in whatever state."""
        return self._shared.collectives

    @property
    def last_collective(self) -> str:
        return self._shared.last_collective

    def record_to(self, path: Path | None, *, told_only: bool = False) -> None:
        """Record small results of the collectives from here on in `path` (replaced); None ends it.
        `told_only`: of those alone by which ranks tell each other what to do (see `prelude`)."""
        if self._shared.recorder is not None:
            self._shared.recorder.close()
        self._shared.recorder = Recorder(path, told_only=told_only) if path is not None else None

    def play_back(self, path: Path, *, told_only: bool = False) -> None:
        """Give the results recorded in `path` to the coming collectives while detached."""
        self._shared.player = Player(path, told_only=told_only)

    # -- inside -------------------------------------------------------------------------------

    def _started(self) -> InPlaceGroup:
        if self._world is None:
            raise UsageError("the groups have not been started")
        return self._world

    def _adopt(self, group: InPlaceGroup) -> None:
        """A group was created. If ranks are connected they meet for this one too, as they do in torch."""
        self._groups.append(group)
        transport, store, latch = self._transport, self._store, self._shared.latch
        if transport is None or store is None or latch.text is not None:
            return
        epoch = latch.epoch
        try:
            group.inner = self._connect(group, transport, store)
            transport.keep_sockets()
        except (RuntimeError, GroupsAborted) as error:
            latch.trip(describe(f"creating {group.group_name}", error), epoch)

    def _dismiss(self, group: InPlaceGroup) -> None:
        if group.inner is not None:
            self._dismissed.append(group.inner)
            group.inner = None
        if group in self._groups:
            self._groups.remove(group)

    def _connect(self, group: InPlaceGroup, transport: Transport, store: Store) -> ProcessGroup:
        prefix = f"{self.generation}/{group.group_name}/"
        inner = transport.build(store, prefix, group.rank(), group.size(), self._timeout_s)
        if inner is None or self._is_aborted():
            raise GroupsAborted(self._abort_reason)
        return inner

    def _is_aborted(self) -> bool:
        with self._lock:
            return self.generation <= self._aborted_through

    def _check_same_groups(self, world: ProcessGroup) -> None:
        """Every member of each of my groups has that group, or it would be waited for in vain."""
        mine = {_group_hash(group): group for group in self._groups[1:]}
        size = world.size()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        await_work(world.allgather([counts], [torch.tensor([len(mine)])]), self._is_aborted)
        most = max(int(count) for count in counts)
        if most == 0:
            return
        padded = torch.zeros(most, dtype=torch.int64)
        padded[: len(mine)] = torch.tensor(list(mine), dtype=torch.int64)
        everyones = [torch.zeros(most, dtype=torch.int64) for _ in range(size)]
        await_work(world.allgather([everyones], [padded]), self._is_aborted)
        known = [set(hashes.tolist()) for hashes in everyones]
        for key, group in mine.items():
            for member in group.ranks:
                if key not in known[member]:
                    raise UsageError(
                        f"group {group.group_name!r} of ranks {group.ranks} exists here but not on rank "
                        f"{member}: create every group before the first step, so that a replacement "
                        "creates it too"
                    )

    def _on_first_error(self, reason: str) -> None:
        # Whoever waits for this rank would wait in vain: the cut tells them sooner than anyone could.
        transport = self._transport
        if transport is not None:
            transport.cut()
        if self.on_latch is not None:
            self.on_latch(reason)

    def _drop(self) -> threading.Thread | None:
        """Leave the present generation; returns the thread that buries it."""
        with self._lock:
            transport, self._transport, self._store = self._transport, None, None
        if transport is None:
            return None
        transport.cut()
        buried = [group.inner for group in self._groups if group.inner is not None] + self._dismissed
        self._dismissed.clear()
        for group in self._groups:
            group.inner = None
        return transport.bury(buried, wait=not self._shared.latch.idle)


_current: GroupSet | None = None


def _create(options: Any, _backend_options: Any = None) -> InPlaceGroup:
    if _current is None:
        raise UsageError('the "flashrec" backend is started by flashrec.init()')
    return InPlaceGroup(
        _current._shared,
        options.group_rank,
        options.group_size,
        str(options.group_id),
        list(options.global_ranks_in_group) or list(range(options.group_size)),
    )


def _group_hash(group: InPlaceGroup) -> int:
    text = f"{group.group_name}|{group.ranks}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
