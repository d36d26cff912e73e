"""The process group everyone holds on to: its connections change, the object does not.

DDP, FSDP2, device meshes and the script keep an `InPlaceGroup`; inside is the group of the present
generation (`inner`), or none. Three rules:

- An error inside a collective is latched, never raised into the model (see `latching`). While
  latched, every collective returns finished work.
- Only failures of a collective under way are latched. What torch or gloo refuse before anything is
  sent (a wrong argument, an unknown operation) raises, as ever.
- Work of an older generation changes nothing in the present one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import ProcessGroup, Work

from flashrec.detached import perform, tensors_in, zero_integers
from flashrec.errors import UsageError
from flashrec.latching import (
    FinishedWork,
    GuardedWork,
    Latch,
    abandon_if_object_collective,
    called_through_torch,
    comes_from_transport,
    describe,
    object_collective,
)
from flashrec.prelude import Player, Recorder
from flashrec.waiting import Bystander, await_work

NO_RANK = (
    "this process is a built standby and holds no rank yet, so it has no answer to rank(), new_group() "
    'or a device mesh. With init(standby="built") nothing before the first step may depend on the rank; '
    "move it there, or use the default standby"
)


@dataclass
class Shared:
    """What the groups of one process have in common."""

    latch: Latch = field(default_factory=Latch)
    on_collective: Callable[[str, int], None] | None = None
    adopt: Callable[[InPlaceGroup], None] | None = None
    dismiss: Callable[[InPlaceGroup], None] | None = None
    bystander: Bystander = field(default_factory=Bystander)
    recorder: Recorder | None = None
    player: Player | None = None
    collectives: int = 0
    last_collective: str = ""


class InPlaceGroup(ProcessGroup):
    """One group as torch sees it. `rank` and `size` are the group's, `ranks` its global ranks."""

    def __init__(self, shared: Shared, rank: int | None, size: int, name: str, ranks: list[int]) -> None:
        # The constructor without a store exists for subclasses; the stub does not list it.
        super().__init__(0 if rank is None else rank, size)  # type: ignore[call-arg]
        self._shared = shared
        self._my_rank = rank
        self._acting_rank: int | None = None
        self._my_size = size
        self._name = name
        self._description = "undefined"
        self.ranks = ranks
        self.inner: ProcessGroup | None = None
        if shared.adopt is not None:
            shared.adopt(self)

    def take_rank(self, rank: int | None) -> None:
        """Become `rank`, or (None) nobody in particular."""
        self._my_rank = rank

    def act_as(self, rank: int | None) -> None:
        """While it holds no rank: answer `rank` to those who ask, instead of refusing. None ends it."""
        self._acting_rank = rank

    # -- identity -----------------------------------------------------------------------------

    def rank(self) -> int:
        rank = self._my_rank if self._my_rank is not None else self._acting_rank
        if rank is None:
            raise UsageError(NO_RANK)
        return rank

    @property
    def has_rank(self) -> bool:
        return self._my_rank is not None

    def size(self) -> int:
        return self._my_size

    # torch's C++ asks by these names, for logs and to know whether it is rank 0; it cannot be refused.
    def getRank(self) -> int:
        return self._my_rank or 0

    def getSize(self) -> int:
        return self._my_size

    def getBackendName(self) -> str:
        return "flashrec"

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def shutdown(self) -> None:
        """`destroy_process_group` was called on this one: it takes no part in later formings."""
        if self._shared.dismiss is not None:
            self._shared.dismiss(self)

    # -- collectives --------------------------------------------------------------------------

    def _collective(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
        shared = self._shared
        latch = shared.latch
        epoch = latch.epoch
        shared.collectives += 1
        shared.last_collective = op
        if shared.on_collective is not None:
            shared.on_collective(op, shared.collectives)
        result = None if op in _WITHOUT_RESULT else (args[0] if args else next(iter(kwargs.values()), None))
        spoils = result
        if op in _KEEPS_MINE and (self._is_mine(op, args) or not called_through_torch()):
            spoils = None
        if latch.text is not None:
            return self._spoiled(op, result, spoils)
        inner = self.inner
        if inner is None:
            return self._alone(op, args + tuple(kwargs.values()), result)
        recorder, entry = shared.recorder, None
        if recorder is not None and (not recorder.told_only or tells(op, result)):
            entry = recorder.expect(op, self._name)
        try:
            work = getattr(inner, op)(*args, **kwargs)
        except RuntimeError as error:
            if entry is not None:
                entry.fail()
            if latch.text is None and not comes_from_transport(error):
                raise  # refused before anything was sent: an operation or an argument gloo does not know
            latch.trip(describe(f"{op} in {self._name}", error), epoch)
            return self._spoiled(op, result, spoils)
        what = f"{op} in {self._name}"
        await_it = shared.bystander.await_work if op in _POINT_TO_POINT else await_work
        return GuardedWork(latch, latch.begin(), what, work, await_it, result, spoils, entry, self._peer())

    def _is_mine(self, op: str, args: tuple[Any, ...]) -> bool:
        """Whether this rank's tensors are the collective's source, or none of its business."""
        root = getattr(args[1], "rootRank", args[1]) if len(args) > 1 else None
        return bool((root == (self._my_rank or 0)) == (op == "broadcast"))

    def _spoiled(self, op: str, result: Any, spoils: Any) -> Work:
        zero_integers(spoils)
        abandon_if_object_collective(op)
        return FinishedWork(result, self._peer())

    def _alone(self, op: str, args: tuple[Any, ...], result: Any) -> Work:
        player = self._shared.player
        root = getattr(args[-1], "rootRank", None) if args else None
        mine = root is not None and root == self._my_rank
        if player is not None and (not player.told_only or tells(op, result)):
            if player.told_only and mine and op in _NEEDS_A_PEER:
                player.skip(op, self._name)  # what I tell others now, and may be of another size than it was
            elif player.play(op, self._name, result):
                return FinishedWork(result, self._peer() if player.source is None else player.source)
        if op in _NEEDS_A_PEER and not mine and object_collective() is not None:
            raise UsageError(
                f"{object_collective()} needs an object from another rank, but no peer is connected "
                "and none was recorded: call it before the first step, or in a step"
            )
        perform(op, self._my_rank or 0, self._my_size, args)
        return FinishedWork(result, self._peer())

    def _peer(self) -> int:
        # Whom a receive "came" from where nothing came; torch refuses one's own rank.
        return ((self._my_rank or 0) + 1) % self._my_size

    # torch 2.13 calls some collectives by a new name and some by the old: both are here. The
    # arguments go through as they come, since each has several signatures.

    def allreduce(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("allreduce", args, kwargs)

    def allreduce_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("allreduce_coalesced", args, kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("broadcast", args, kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("reduce", args, kwargs)

    def allgather(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("allgather", args, kwargs)

    def allgather_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("allgather_coalesced", args, kwargs)

    def _allgather_base(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("_allgather_base", args, kwargs)

    def all_gather_single(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("all_gather_single", args, kwargs)

    def allgather_into_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("allgather_into_tensor_coalesced", args, kwargs)

    def all_gather_single_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("all_gather_single_coalesced", args, kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("reduce_scatter", args, kwargs)

    def _reduce_scatter_base(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("_reduce_scatter_base", args, kwargs)

    def reduce_scatter_single(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("reduce_scatter_single", args, kwargs)

    def reduce_scatter_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("reduce_scatter_tensor_coalesced", args, kwargs)

    def reduce_scatter_single_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("reduce_scatter_single_coalesced", args, kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("gather", args, kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("scatter", args, kwargs)

    def alltoall(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("alltoall", args, kwargs)

    def alltoall_base(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("alltoall_base", args, kwargs)

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("all_to_all_single", args, kwargs)

    def send(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("send", args, kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("recv", args, kwargs)

    def recv_anysource(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("recv_anysource", args, kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        return self._collective("barrier", args, kwargs)


def tells(op: str, result: Any) -> bool:
    """Whether torch, or a library, is being told something by a peer on which its Python code will act.

    Objects are; and integers that one peer sends, as pipelines vote on how to find their shapes out.
    """
    if object_collective() is not None:
        return True
    received = list(tensors_in(result)) if op in ("recv", "recv_anysource") else []
    return bool(received) and not any(t.is_floating_point() or t.is_complex() for t in received)


_POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})

_WITHOUT_RESULT = frozenset({"send", "barrier"})

# Where a failure may have left my own, perfectly good integers: a broadcast's root, whoever only
# contributes to a reduce, and callers in torch's C++. DDP's reducer broadcasts the bucket layout it
# has just computed, and a layout of zeros crashes the process in the next backward.
_KEEPS_MINE = frozenset({"broadcast", "reduce"})

# Detached, these cannot supply an object: the bytes would be uninitialised memory, unpickled.
_NEEDS_A_PEER = frozenset({"broadcast", "scatter", "recv", "recv_anysource"})
