"""What protect() was given, as one object: tensor, common and private state, and the groups' buckets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from flashrec import torch_private
from flashrec.data import Feed
from flashrec.errors import RecoveryFailed, UsageError
from flashrec.happenings import Plan
from flashrec.state import tensors
from flashrec.state.capture import capture
from flashrec.state.export import PieceReader, export
from flashrec.state.files import write_whole
from flashrec.state.layout import Layout, RankLayout, ReplicaSet
from flashrec.state.manifest import Part, export_path
from flashrec.state.private import PrivateState, Redo
from flashrec.state.pull import Puller
from flashrec.state.replication import ranks_of

MAX_PRIVATE_BYTES = 1 << 30
MAX_COMMON_BYTES = 16 << 20
ALL_RANKS = "all-ranks"
SURVIVE = ("ranks", ALL_RANKS)
PULL_DEADLINE_S = 600.0


class ProtectedState:
    """The state of one rank as flashrec sees it; nothing here runs a collective.

    `rank` None: a built standby that holds none yet. `survive`: one of SURVIVE. `seal_every`: steps from one full
    version to the next in the live regime, 0: none, None: by the budget. `external`: not `flashrec run`, but another
    launcher starts the ranks."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        private: Mapping[str, Any],
        common: Mapping[str, Any],
        *,
        rank: int | None,
        world_size: int,
        replicated_over: Any = None,
        survive: str = "ranks",
        seal_every: int | None = None,
        external: bool = False,
    ) -> None:
        self.seal_every = seal_every
        self.models = list(models)
        self.optimizers = list(optimizers)
        self._world = tuple(range(world_size))
        self._survive = survive
        self._external = external
        # A script may zero its gradients in place, or at the start of a step, or let them add up.
        self.captured = capture(
            self.models,
            self.optimizers,
            include_grads=True,
            common=common,
            rank=rank,
            world_size=world_size,
            replicated_over=replicated_over,
        )
        self.private = PrivateState(self.models, private)
        self.redo = Redo(self.private, self.captured)
        self._bucket_views: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._ddp: list[DistributedDataParallel] = [
            ddp for model in self.models for ddp in torch_private.ddp_modules(model)
        ]
        self._refuse_lost_hooks(private)
        self._quiet: dict[str, Any] | None = None
        self._quiet_version = 0

    def check_common(self) -> None:
        """Common state travels in a message, so it must be small. UsageError names what is not."""
        for name, extra in self.captured.common.items():
            size_bytes = len(tensors.encode(extra.state_dict()))
            if size_bytes > MAX_COMMON_BYTES:
                raise UsageError(
                    f"{name}=... has {size_bytes >> 20} MiB of state; common state may have "
                    f"{MAX_COMMON_BYTES >> 20} MiB. If it is a module (an average of the weights), pass it as one more "
                    f"model: protect(model=[model, {name}], ...), and if every rank holds the same, say so: "
                    f"replicated_over={{{name}: torch.distributed.group.WORLD}}"
                )

    def _refuse_lost_hooks(self, private: Mapping[str, Any]) -> None:
        """A communication hook's state (PowerSGD's error feedback, say) changes in every step and differs by rank,
        so it must be saved with the rest, which needs state_dict/load_state_dict."""
        for ddp in self._ddp:
            for state in torch_private.comm_hook_state(ddp):
                stateless = state is None or isinstance(state, torch.distributed.ProcessGroup)
                if not stateless and not any(state is one for one in private.values()):
                    raise UsageError(
                        f"DistributedDataParallel has a communication hook with a {type(state).__name__}, which a "
                        "replacement would begin without: give it state_dict/load_state_dict, and pass it as "
                        "protect(private=...), or use a hook without state"
                    )

    # --- layout -------------------------------------------------------------------------------------------

    def publish_layout(self, shm_dir: Path, rank: int) -> None:
        """Write the description others can compare with."""
        self.captured.take_rank(rank)
        described = self.captured.rank_layout().to_bytes()
        write_whole(shm_dir / "layout" / f"r{rank}", [described], len(described))

    def claims(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """(ranks that hold the same bytes, digest of their layout) for each replica set, to come ones included."""
        layout = self.captured.rank_layout()
        claims = [(one.ranks, one.layout.digest) for one in layout.sets]
        alone = (layout.rank,)
        if self._has_sharded_optimizer() and alone not in (ranks for ranks, _ in claims):
            claims.append((alone, ""))  # there is no state before the first step
        return tuple(claims)

    def why_sealed(self) -> str:
        """What the live regime would not protect, in words; "" if it protects all."""
        if self._external:
            return "an external launcher restarts every rank at once"
        if self._survive == ALL_RANKS:
            return "the script asks for it: protect(survive='all-ranks')"
        if len(self._world) == 1:
            return "there is one rank, so no other holds its state"
        for one in self.captured.rank_layout().sets:
            if one.ranks != self._world:
                name = one.layout.specs[0].name
                alone = len(one.ranks) == 1
                return (
                    f"{name!r} is held by rank {one.ranks[0]} alone"
                    if alone
                    else (f"{name!r} is held by ranks {list(one.ranks)} only")
                )
        if self._has_sharded_optimizer():
            return "each rank holds a part of the state of ZeroRedundancyOptimizer"
        return ""

    def check_pace(self) -> None:
        """UsageError where `seal_every` was given, and every version is sealed."""
        why = self.why_sealed()
        if why and self.seal_every not in (None, 1):
            raise UsageError(
                f"protect(seal_every={self.seal_every}): here every version is sealed, since {why}. What is sealed "
                "every so many steps is the whole state of plain data parallelism; leave it out"
            )

    def arena_bytes(self) -> int:
        """Shared memory that sealing takes on this rank: twice what it seals, once there is optimizer state."""
        layout = self.captured.rank_layout()
        to_come = self.captured.sealing_estimate() or 0
        if layout.total_bytes and not self._has_sharded_optimizer():
            to_come = to_come * layout.owned_bytes // layout.total_bytes  # it is split as its parameters are
        return 2 * (layout.owned_bytes + to_come)

    def _has_sharded_optimizer(self) -> bool:
        return len(self._world) > 1 and any(map(torch_private.is_zero, self.optimizers))

    # --- private state ------------------------------------------------------------------------------------

    def seal_private(self, feed: Feed | None, *, version: int, provisional: bool) -> bytes:
        """The private state as of now, and the data position, as bytes for the arena's slot of `version`."""
        snapshot = self.private.snapshot()
        self._quiet = None if provisional else snapshot
        self._quiet_version = version
        position = feed.position() if feed is not None else None
        return tensors.encode({"private": snapshot, "position": position, "provisional": provisional})

    def disturbed(self) -> list[str]:
        """Names of the private parts that changed since the last gate sealed them; asked once after each."""
        before, self._quiet = self._quiet, None
        return [] if before is None else self.private.changed_since(before)

    def forget_sealed(self, above: int) -> None:
        """What was sealed for versions above `above` is void: a later state need not resemble it."""
        if self._quiet_version > above:
            self._quiet = None

    def install_private(self, payload: bytes, feed: Feed | None, rank: int, world_size: int) -> None:
        """Become what `payload` describes. Loader workers start here, so that they warm up during the pull."""
        sealed = tensors.decode(payload, MAX_PRIVATE_BYTES)
        if sealed["provisional"]:
            # Sealed before the script had done what precedes its first step; this process has done the same.
            return
        if feed is not None and sealed["position"] is not None:
            feed.go_to(sealed["position"], rank, world_size)
        self.private.restore(sealed["private"])

    # --- tensor and common state --------------------------------------------------------------------------

    def sealed_parts(self) -> tuple[RankLayout, list[PieceReader]]:
        """The layout of the tensors as they are at the Enter of a step, and their bytes, which stay those until the
        gate: gradients, which do not, are read from what the redo has noted."""
        self.captured.refresh()
        layout = self.captured.rank_layout()
        return layout, [self.redo.reader(self.captured, index) for index in range(len(layout.sets))]

    def sealed_common(self) -> bytes:
        """Common state as the redo has noted it."""
        return tensors.encode(self.redo.common_state())

    def load_common(self, blob: bytes) -> None:
        self.captured.load_common_state(tensors.decode(blob, MAX_COMMON_BYTES << 1))

    @staticmethod
    def replica_set(ranks: tuple[int, ...], layout: bytes) -> ReplicaSet:
        return ReplicaSet(ranks, Layout.from_bytes(layout))

    def export(
        self,
        shm_dir: Path,
        plan: Plan,
        rank: int,
        ranks: tuple[int, ...],
        index: int,
        part: int,
        num_parts: int,
    ) -> dict[str, Any]:
        """Put part `part` of `num_parts` of the tensors of the replica set `ranks`, the `index`-th that the plan wants
        served, into shared memory; returns what a puller needs."""
        self.captured.refresh()
        sets = self.captured.rank_layout().sets
        position = next(i for i, one in enumerate(sets) if one.ranks == ranks)
        layout = sets[position].layout
        manifest = export(
            self.captured.of_set(position),
            layout.split(num_parts)[part],
            export_path(shm_dir, plan.generation, rank, index),
            rank=rank,
            version=plan.version,
            generation=plan.generation,
            layout_digest=layout.digest,
        )
        return {
            "ranks": list(ranks),
            "manifest": manifest.to_wire(),
            "layout": layout.to_bytes() if part == 0 else None,
        }

    def install_tensors(
        self, layout: RankLayout, parts: Sequence[Sequence[Part]], plan: Plan, puller: Puller
    ) -> list[str]:
        """Pull the parts of each replica set of `layout`, verified, into the live tensors. Returns what was refused."""
        for parameter, grad in self._bucket_views:
            parameter.grad = grad
        self.captured.prepare(layout)
        refused: list[str] = []
        for index, (one, sources) in enumerate(zip(layout.sets, parts, strict=True)):
            report = puller.pull(
                self.captured.of_set(index),
                one.layout,
                sources,
                version=plan.version,
                generation=plan.generation,
                deadline_s=PULL_DEADLINE_S,
            )
            refused += report.refused
        return refused

    # --- gradient buckets -----------------------------------------------------------------------------------

    @property
    def rehearsals(self) -> int:
        """How many bodies a replacement runs detached, before DDP's buckets are what they are on the others."""
        return max([1, *(torch_private.backwards_to_rebuild(ddp) for ddp in self._ddp)])

    def end_rehearsals(self) -> None:
        """Choose the buckets for good, while the last rehearsal's gradients are there.

        With gradient_as_bucket_view these become views of the buckets. DDP divides such a gradient in place, and
        multiplies any other by the reciprocal, which gives other bits; so a replacement whose step begins with
        gradients needs views too.
        """
        self.settle_buckets(self.rehearsals)
        self._bucket_views = [
            (parameter, parameter.grad)
            for ddp in self._ddp
            if ddp.gradient_as_bucket_view
            for parameter in ddp.parameters()
            if parameter.grad is not None
        ]

    def settle_buckets(self, version: int) -> None:
        """Give DDP's buckets the layout they have at `version` in an undisturbed run.

        Step 0 runs on the buckets DDP starts with, every later one on those it has rebuilt by the order in
        which gradients arrived; reduction order, and so the result, follows from the layout.
        """
        for ddp in self._ddp:
            if 0 < version < torch_private.backwards_to_rebuild(ddp) and torch_private.has_rebuilt(ddp):
                raise RecoveryFailed(
                    f"DistributedDataParallel(static_graph=True) changes its buckets after two steps, and a "
                    f"replacement, which has them changed, cannot join in between: a rank lost in step {version} "
                    "cannot be replaced"
                )
            torch_private.settle_buckets(ddp, version)

    def bucket_digests(self) -> str:
        """ "NAME=DIGEST" for each DistributedDataParallel, separated by "/"; the name tells whose must be equal."""
        return "/".join(
            f"{index}-{'.'.join(map(str, ranks_of(ddp.process_group)))}={torch_private.bucket_digest(ddp)}"
            for index, ddp in enumerate(self._ddp)
        )


def named_extras(private: Any) -> dict[str, Any]:
    """protect(private=...): one object, or a mapping of names to objects."""
    if private is None:
        return {}
    if isinstance(private, Mapping) and not hasattr(private, "state_dict"):
        return dict(private)
    return {"private": private}


def as_list(given: Any, kind: type, name: str) -> list[Any]:
    """protect(model=...) and (optimizer=...): one, or several in a list, a tuple or a mapping."""
    several = list(given.values()) if isinstance(given, Mapping) else given
    if isinstance(given, kind):
        several = [given]
    if not isinstance(several, list | tuple) or not several or not all(isinstance(s, kind) for s in several):
        raise UsageError(f"protect({name}=...) takes a {kind.__name__}, or several")
    return list(several)
