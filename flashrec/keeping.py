"""What a rank keeps for the case that it, or another, is lost: what it seals, serves and installs."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashrec.data import Feed
from flashrec.errors import FlashrecError, IntegrityError
from flashrec.happenings import Plan
from flashrec.protected import ProtectedState
from flashrec.state import tensors
from flashrec.state.arena import Arena
from flashrec.state.layout import RankLayout, ReplicaSet
from flashrec.state.manifest import ExportManifest, Part, Source
from flashrec.state.private_slots import PrivateSlots
from flashrec.state.pull import Puller
from flashrec.state.sealing import Sealer
from flashrec.state.warming import Warmer

MAX_SERVED_BYTES = 64 << 20


class SealedDamaged(FlashrecError):
    """What this rank had sealed is not what it was: the plan must do without."""


class Keeper:
    """One rank's private slots and arena, and the state that goes into them. Main thread only."""

    def __init__(self, shm_dir: Path, job: str, rank: int, world_size: int, *, fresh: bool) -> None:
        """`fresh`: the world starts; what an earlier start has left is of no use."""
        self._shm_dir = shm_dir
        self._job = job
        self._rank = rank
        self._world_size = world_size
        self._private = PrivateSlots(shm_dir / "private", rank)
        self._arena = Arena(shm_dir / "arena", rank, job)
        self._made_sealer: Sealer | None = None
        self._warmer: Warmer | None = None
        self._start_sealed = False
        self.state: ProtectedState | None = None
        self.feed: Feed | None = None
        self.num_installs = 0
        if fresh:
            self.discard_above(-1)

    # --- sealing ------------------------------------------------------------------------------------------

    def seal_private(self, version: int, generation: int, *, provisional: bool) -> None:
        """Private state as of now becomes that of `version`. `provisional`: by protect(), and the script may still
        seed its generators."""
        payload = self._state.seal_private(self.feed, version=version, provisional=provisional)
        self._private.seal(version, generation, payload)

    def check_quiet(self, version: int, generation: int) -> list[str]:
        """If the script changed private state after it was sealed, seal it again; returns what it changed."""
        disturbed = self._state.disturbed()
        if not disturbed and (self._start_sealed or version != 0):
            return []
        self._start_sealed = True
        payload = self._state.seal_private(self.feed, version=version, provisional=False)
        self._private.seal(version, generation, payload, again=True)
        # Asked once: whoever does this step again comes here with its batch taken, which is no disturbance.
        self._state.forget_sealed(-1)
        return disturbed

    def begin_seal(self, version: int, generation: int) -> None:
        """Tensors and common state as of now are those of `version`; they are copied from here on."""
        layout, readers = self._state.sealed_parts()
        self._sealer.begin(version, generation, layout, readers, self._state.sealed_common)

    def finish_seal(self) -> None:
        """Come back when they are sealed. EnvironmentFault when there is no room."""
        self._sealer.finish()

    def discard_above(self, version: int) -> None:
        if self._made_sealer is not None or self._arena.sealed():
            self._sealer.discard_above(version)
        self._private.discard_above(version)
        if self.state is not None:
            self.state.forget_sealed(version)

    def get_ready(self) -> None:
        """A replacement that does not know the plan yet: it will most likely fill what its rank has sealed last."""
        with contextlib.suppress(IntegrityError):  # install() meets it again, if it matters
            sealed = self._arena.sealed()
            if sealed and self._warmer is None:
                layout = self._arena.read(sealed[-1].version).layout
                self._warmer = Warmer(self._state.captured.prepare_ahead(layout))

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
        self, plan: Plan, served: Callable[[], list[bytes]], puller: Puller, address: str | None
    ) -> list[str]:
        """Become the plan's version, verified. Returns the sources that were refused, and why.

        `served`: waits for what `servers` of the plan send. `address`: of the shard server to pull through; None: from
        this node's shared memory. Raises SealedDamaged when what this rank has sealed of the version does not match its
        checksums: it is discarded, and an older one may do. IntegrityError when that is so of what is served."""
        self.num_installs += 1
        if self._warmer is not None:
            self._warmer.stop()
        has_own = any(one.version == plan.version for one in self._arena.sealed())
        try:
            return self._install(plan, has_own, served, puller, address)
        except IntegrityError as error:
            if not has_own:
                raise
            self.discard_above(plan.version - 1)
            raise SealedDamaged(f"version {plan.version} as it was sealed: {error}") from error

    def _install(
        self,
        plan: Plan,
        has_own: bool,
        served: Callable[[], list[bytes]],
        puller: Puller,
        address: str | None,
    ) -> list[str]:
        state = self._state
        # First, so that loader workers warm up during the pull.
        state.install_private(self._private.read(plan.version), self.feed, self._rank, self._world_size)
        own = self._arena.read(plan.version) if has_own else None
        payloads = [tensors.decode(payload, MAX_SERVED_BYTES) for payload in served()]
        sets, parts = self._served_sets(plan, payloads, address)
        for one in own.layout.sets if own is not None else ():
            if one.ranks not in sets:
                sets[one.ranks] = one
                parts[one.ranks] = [
                    [self._sealed_part(rank, one, plan.version, address)] for rank in one.ranks
                ]
        layout = RankLayout(self._rank, tuple(sets[ranks] for ranks in sorted(sets)))
        refused = state.install_tensors(layout, [parts[one.ranks] for one in layout.sets], plan, puller)
        if own is not None:
            state.load_common(own.blob)
        else:
            common = next(payload["common"] for payload in payloads if payload["common"] is not None)
            state.captured.load_common_state(common)
        self._start_sealed = True
        return refused

    def _served_sets(
        self, plan: Plan, payloads: list[Any], address: str | None
    ) -> tuple[dict[tuple[int, ...], ReplicaSet], dict[tuple[int, ...], list[Part]]]:
        """By the ranks that hold it: each of my replica sets that is served from memory, and where its parts are."""
        sets: dict[tuple[int, ...], ReplicaSet] = {}
        parts: dict[tuple[int, ...], list[Part]] = {}
        for ranks, _ in plan.served:
            if self._rank in ranks:
                found = [
                    one for payload in payloads for one in payload["sets"] if tuple(one["ranks"]) == ranks
                ]
                layout = next(one["layout"] for one in found if one["layout"] is not None)
                sets[ranks] = self._state.replica_set(ranks, layout)
                parts[ranks] = [[Source(ExportManifest.from_wire(one["manifest"]), address)] for one in found]
        return sets, parts

    def _sealed_part(self, rank: int, replicas: ReplicaSet, version: int, address: str | None) -> Source:
        """What `rank` has sealed of `replicas`."""
        sealed = Arena(self._shm_dir / "arena", rank, self._job).read(version)
        index = next(i for i, one in enumerate(sealed.layout.sets) if one.ranks == replicas.ranks)
        return Source(sealed.manifests[index], address)

    def close(self) -> None:
        if self._warmer is not None:
            self._warmer.stop()
        if self._made_sealer is not None:
            self._made_sealer.close()

    @property
    def _sealer(self) -> Sealer:
        """Made when it is first needed: in the live regime there is nothing for its thread to do."""
        if self._made_sealer is None:
            self._made_sealer = Sealer(self._shm_dir / "arena", self._rank, self._job)
        return self._made_sealer

    @property
    def _state(self) -> ProtectedState:
        assert self.state is not None
        return self.state
