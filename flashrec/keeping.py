"""What a rank keeps for the case that it, or another, is lost: what it seals, serves and installs."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashrec.data import Feed
from flashrec.errors import FlashrecError, IntegrityError
from flashrec.happenings import Plan
from flashrec.protected import ProtectedState
from flashrec.protocol.messages import PartReady
from flashrec.sources import Reach, Sources
from flashrec.state import tensors
from flashrec.state.arena import Arena
from flashrec.state.layout import RankLayout, ReplicaSet
from flashrec.state.manifest import ExportManifest, Part
from flashrec.state.private_slots import FULL, KEPT_FULL_VERSIONS, PRIVATE, PrivateSlots
from flashrec.state.pull import PullCancelled, Puller
from flashrec.state.replicating import KeeperAddress, NotKept
from flashrec.state.sealing import Sealer
from flashrec.state.warming import Warmer

MAX_SERVED_BYTES = 64 << 20


class SealedDamaged(FlashrecError):
    """What this rank had sealed is not what it was: the plan must do without."""


class SourcesLost(FlashrecError):
    """What other nodes were to give of the version did not come, or not whole: the plan must do without."""


class Keeper:
    """One rank's private slots and arena, the state that goes into them, and its replicas on other nodes. Main thread
    only."""

    def __init__(
        self,
        shm_dir: Path,
        job: str,
        rank: int,
        world_size: int,
        *,
        fresh: bool,
        reach: Reach | None = None,
    ) -> None:
        """`fresh`: the world starts; what an earlier start has left is of no use. `reach`: of other nodes."""
        self._shm_dir = shm_dir
        self._job = job
        self._rank = rank
        self._world_size = world_size
        self._private = PrivateSlots(shm_dir / PRIVATE, rank)
        self._full = PrivateSlots(shm_dir / FULL, rank, KEPT_FULL_VERSIONS)
        self._arena = Arena(shm_dir / "arena", rank, job)
        self._made_sealer: Sealer | None = None
        self._warmer: Warmer | None = None
        self._start_sealed = False
        self._replicator = None if reach is None else reach.replicator(rank, job)
        self._kept_full = -1  # the newest full version that the present keepers are known to have
        self.state: ProtectedState | None = None
        self.feed: Feed | None = None
        self.num_installs = 0
        self.newest_full = -1  # the newest full version that this rank has sealed; -1: none
        self._full_begun: int | None = None
        self._full_cost_s = 0.0
        if fresh:
            self.discard_above(-1)

    # --- sealing ------------------------------------------------------------------------------------------

    def seal_private(self, version: int, generation: int, *, provisional: bool) -> None:
        """Private state as of now becomes that of `version`. `provisional`: by protect(), and the script may still
        seed its generators."""
        payload = self._state.seal_private(self.feed, version=version, provisional=provisional)
        self._private.seal(version, generation, payload)
        if self._replicator is not None:
            self._replicator.keep_private(version, generation, payload)

    def check_quiet(self, version: int, generation: int) -> list[str]:
        """If the script changed private state after it was sealed, seal it again; returns what it changed."""
        disturbed = self._state.disturbed()
        if not disturbed and (self._start_sealed or version != 0):
            return []
        self._start_sealed = True
        payload = self._state.seal_private(self.feed, version=version, provisional=False)
        self._private.seal(version, generation, payload, again=True)
        if self._replicator is not None:
            self._replicator.keep_private(version, generation, payload)
        # Asked once: whoever does this step again comes here with its batch taken, which is no disturbance.
        self._state.forget_sealed(-1)
        return disturbed

    def begin_seal(self, version: int, generation: int) -> None:
        """Tensors and common state as of now are those of `version`; they are copied from here on."""
        layout, readers = self._state.sealed_parts()
        replicator = self._replicator
        self._sealer.begin(
            version,
            generation,
            layout,
            readers,
            self._state.sealed_common,
            on_sealed=None if replicator is None else lambda: replicator.sealed(version, generation),
        )

    def finish_seal(self) -> None:
        """Come back when they are sealed. EnvironmentFault when there is no room."""
        self._sealer.finish()

    def begin_full(self, version: int, generation: int) -> None:
        """As `begin_seal`, of a full version. Its private state is what was sealed for it in the last gate (by now a
        batch of this step is taken), and is copied first: where an arena has a full version, private state has it.

        EnvironmentFault when there is no room, IntegrityError when what the gate has sealed is damaged."""
        begun_at, thread_s = time.monotonic(), self._sealer.thread_cpu_s
        self._full_begun = None
        payload = self._private.read(version)
        self._full.seal(version, generation, payload)
        if self._replicator is not None:
            self._replicator.keep_private(version, generation, payload, full=True)
        self.begin_seal(version, generation)
        self._full_begun = version
        self._full_cost_s = time.monotonic() - begun_at - thread_s

    def finish_full(self) -> float | None:
        """Come back when it is sealed. Returns what it took, in seconds: of this thread, and CPU time of the other;
        None if nothing was begun. EnvironmentFault when there is no room."""
        version, self._full_begun = self._full_begun, None
        if version is None:
            return None
        began_at = time.monotonic()
        self.finish_seal()
        self.newest_full = version
        return self._full_cost_s + time.monotonic() - began_at + self._sealer.thread_cpu_s

    def discard_above(self, version: int, full: int | None = None) -> None:
        """Of everything, and of full versions (None: as well) above `full`."""
        full = version if full is None else min(version, full)
        if self._made_sealer is not None or self._arena.sealed():
            self._sealer.discard_above(full)  # before private state: see begin_full
        self._full.discard_above(full)
        self._private.discard_above(version)
        self.newest_full, self._full_begun = full, None
        if self._replicator is not None and not self._has_full(full):
            self.newest_full = -1  # what the plan found is on other nodes: this rank's past was there
        if self.state is not None:
            self.state.forget_sealed(version)

    def _has_full(self, version: int) -> bool:
        in_arena = any(one.version == version for one in self._arena.sealed())
        return in_arena and any(slot.version == version for slot in self._full.sealed())

    def get_ready(self) -> None:
        """A replacement that does not know the plan yet: it will most likely fill what its rank has sealed last."""
        with contextlib.suppress(IntegrityError):  # install() meets it again, if it matters
            sealed = self._arena.sealed()
            if sealed and self._warmer is None:
                own = self._arena.read(sealed[-1].version)
                mapping = self._arena.map_for_pull(own)
                self._warmer = Warmer(self._state.captured.prepare_ahead(own.layout), [mapping])

    # --- replicas -----------------------------------------------------------------------------------------

    def set_keepers(
        self, keepers: Sequence[tuple[int, str]], generation: int, sealed: int | None = None
    ) -> None:
        """(node, address) of those that keep what this rank seals in `generation`, which begins. They are told what
        there is: of the sealed regime version `sealed`, of the live one the last full version."""
        replicator, full = self._replicator, self.newest_full
        if replicator is None:
            return
        replicator.set_keepers([KeeperAddress(node, address) for node, address in keepers], generation)
        self._kept_full = -1
        if full >= 0 and sealed is None:
            try:
                replicator.keep_private(full, generation, self._full.read(full), full=True)
                replicator.sealed(full, generation)
            except IntegrityError:
                self.newest_full = -1
        if sealed is not None and any(one.version == sealed for one in self._arena.sealed()):
            replicator.sealed(sealed, generation)

    def await_kept(
        self, sealed: int | None, private: Sequence[int], is_cancelled: Callable[[], bool], timeout_s: float
    ) -> None:
        """Come back when every keeper has acknowledged version `sealed` and the private state of all of `private`.
        NotKept when one refuses, does not within `timeout_s` seconds, or the wait is cancelled."""
        if self._replicator is not None:
            self._replicator.wait(
                sealed=sealed, private=private, is_cancelled=is_cancelled, timeout_s=timeout_s
            )

    def full_that_counts(self) -> int:
        """The newest full version that this rank has sealed and every keeper has acknowledged; -1: none. While
        replicas of a newer one are on their way the one before is there still."""
        full = self.newest_full
        if self._replicator is None or full < 0:
            return full
        if full != self._kept_full:
            with contextlib.suppress(NotKept):
                self._replicator.wait(sealed=full, private=(full,), is_cancelled=lambda: False, timeout_s=0)
                self._kept_full = full
        return self._kept_full

    # --- recovery -----------------------------------------------------------------------------------------

    def serve(self, plan: Plan) -> bytes | None:
        """Put my part of what I serve into shared memory; returns what a puller needs, None if I serve nothing."""
        sets = []
        for index, (ranks, servers) in enumerate(plan.served):
            if self._rank in servers:
                part, num_parts = servers.index(self._rank), len(servers)
                sets.append(
                    self._state.export(self._shm_dir, plan, self._rank, ranks, index, part, num_parts)
                )
        if not sets:
            return None
        leads = any(servers[0] == self._rank for _, servers in plan.served)
        return tensors.encode(
            {"sets": sets, "common": self._state.captured.common_state() if leads else None}
        )

    def servers(self, plan: Plan) -> tuple[int, ...]:
        """The ranks whose memory I need."""
        needed = {server for ranks, servers in plan.served if self._rank in ranks for server in servers}
        return tuple(sorted(needed))

    def install(
        self,
        plan: Plan,
        served: Callable[[], list[PartReady]],
        puller: Puller,
        address: str | None,
        sources: Sources,
    ) -> list[str]:
        """Become the plan's version, verified. Returns the sources that were refused, and why.

        `served`: waits for what `servers` of the plan send. `address`: of the shard server to pull through what other
        ranks of this node serve; None: from its shared memory. `sources`: of what is sealed. Raises SealedDamaged when
        what this rank has sealed of the version does not match its checksums: it is discarded, and an older one may do.
        SourcesLost when another node does not give what it was to; IntegrityError when what this node's ranks serve
        does not match.

        It is discarded, private state with it, also when a *peer's* part of a replica set did not match: no rank may
        write in another's arena, which that one may be taking over just now, and the plan knows of versions only, not
        of who could not read whose. A peer that installs too finds its own damage; one that is at the version in
        memory does not, and keeps what nobody can read until it seals over it. So the job may go back one version
        further than it must, and never to a mixture."""
        self.num_installs += 1
        if self._warmer is not None:
            self._warmer.stop()
        has_own = any(one.version == plan.version for one in self._arena.sealed())
        try:
            return self._install(plan, served, puller, address, sources)
        except IntegrityError as error:
            if sources.is_cancelled():
                raise PullCancelled(f"version {plan.version} was not installed: {error}") from error
            if has_own:
                self.discard_above(plan.version - 1)
                raise SealedDamaged(f"version {plan.version} as it was sealed: {error}") from error
            if self._replicator is not None:
                raise SourcesLost(f"version {plan.version}: {error}") from error
            raise

    def _install(
        self,
        plan: Plan,
        served: Callable[[], list[PartReady]],
        puller: Puller,
        address: str | None,
        sources: Sources,
    ) -> list[str]:
        state = self._state
        private = sources.private(self._rank)
        # First, so that loader workers warm up during the pull.
        state.install_private(private, self.feed, self._rank, self._world_size)
        found = sources.sealed([self._rank])[self._rank] if sources.has(self._rank) else []
        own = found[0].state if found else None
        sets, parts, common = self._served_sets(plan, served(), address, sources)
        mine = [one for one in own.layout.sets if one.ranks not in sets] if own is not None else []
        others = {rank for one in mine for rank in one.ranks} - {self._rank}
        held = {self._rank: found, **sources.sealed(sorted(others))}
        for one in mine:
            sets[one.ranks] = one
            parts[one.ranks] = [[place.part(one.ranks) for place in held[rank]] for rank in one.ranks]
        layout = RankLayout(self._rank, tuple(sets[ranks] for ranks in sorted(sets)))
        refused = state.install_tensors(layout, [parts[one.ranks] for one in layout.sets], plan, puller)
        if own is not None:
            state.load_common(own.blob)
        else:
            state.captured.load_common_state(common)
        self._start_sealed = True
        self._take_over(plan, private)
        return refused

    def _take_over(self, plan: Plan, private: bytes) -> None:
        """From now on it is this node that has the rank's private state, and tells the keepers of it."""
        if self._replicator is not None:
            if not any(slot.version == plan.version for slot in self._private.sealed()):
                self._private.seal(plan.version, plan.generation, private)
            self._replicator.keep_private(plan.version, plan.generation, private)

    def _served_sets(
        self, plan: Plan, served: list[PartReady], address: str | None, sources: Sources
    ) -> tuple[dict[tuple[int, ...], ReplicaSet], dict[tuple[int, ...], list[Part]], Any]:
        """By the ranks that hold it: each of my replica sets that is served from memory, and where its parts are; and
        the common state."""
        sets: dict[tuple[int, ...], ReplicaSet] = {}
        parts: dict[tuple[int, ...], list[Part]] = {}
        payloads = [(tensors.decode(one.manifest, MAX_SERVED_BYTES), one.address) for one in served]
        for ranks, _ in plan.served:
            if self._rank in ranks:
                found = [
                    (one, where)
                    for payload, where in payloads
                    for one in payload["sets"]
                    if tuple(one["ranks"]) == ranks
                ]
                layout = next(one["layout"] for one, _ in found if one["layout"] is not None)
                sets[ranks] = self._state.replica_set(ranks, layout)
                parts[ranks] = [
                    [sources.served(ExportManifest.from_wire(one["manifest"]), where or address)]
                    for one, where in found
                ]
        common = next((payload["common"] for payload, _ in payloads if payload["common"] is not None), None)
        return sets, parts, common

    def close(self) -> None:
        if self._warmer is not None:
            self._warmer.let_go()
        if self._made_sealer is not None:
            self._made_sealer.close()
        if self._replicator is not None:
            self._replicator.close()

    @property
    def _sealer(self) -> Sealer:
        """Made when it is first needed."""
        if self._made_sealer is None:
            self._made_sealer = Sealer(self._shm_dir / "arena", self._rank, self._job)
            if self._warmer is not None:
                self._warmer.let_go()
        return self._made_sealer

    @property
    def _state(self) -> ProtectedState:
        assert self.state is not None
        return self.state
