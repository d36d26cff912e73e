"""The ranks of one generation, met: their groups, and the gate. Formed anew after each failure."""

from collections.abc import Sequence
from pathlib import Path

from flashrec.gate import Gate, open_gate
from flashrec.groups import GateBroken, GroupSet
from flashrec.link import Link
from flashrec.protocol import messages as msg
from flashrec.rendezvous import RendezvousStore


class Assembly:
    """`form()` and `agree()` on the main thread; the rest from any."""

    def __init__(self, link: Link, groups: GroupSet, shm_dir: Path, world_size: int) -> None:
        self.groups = groups
        self._link = link
        self._shm_dir = shm_dir
        self._world_size = world_size
        self._store: RendezvousStore | None = None
        self._gate: Gate | None = None

    def form(self, rank: int, generation: int) -> None:
        """Meet the others. GroupsAborted when the generation is given up meanwhile."""
        store = RendezvousStore(self._link.proc, generation, self._link.send)
        self._store = store
        if self._gate is not None:
            self._gate.close()
        welcome = self._link.welcome
        # A job of several nodes has replicas' addresses, for all its life; how many nodes there are changes.
        shared = None if welcome.replica_address else self._shm_dir
        self._gate = open_gate(self.groups, shared, rank, self._world_size, generation)
        self.groups.form(store, generation, welcome.data_address)

    def agree(self, values: Sequence[int]) -> list[int] | None:
        """Element-wise minimum over all ranks; None when no result came."""
        assert self._gate is not None
        try:
            return self._gate.agree(list(values))
        except GateBroken as broken:
            # Nobody shall wait in a collective for a rank that waits for a plan.
            self.groups.abort(str(broken), self._gate.generation)
            return None

    def abort(self, generation: int, reason: str) -> None:
        """End every wait of `generation`, or of the forming of it."""
        # The groups first: a gate that is opened later belongs to a form() that fails by this.
        self.groups.abort(reason, generation)
        gate = self._gate
        if gate is not None and gate.generation <= generation:
            gate.abort(reason)

    def break_gate(self, reason: str) -> None:
        """A collective failed here: whoever waits for my vote hears of it at once."""
        gate = self._gate
        if gate is not None:
            gate.abort(reason)

    def take_value(self, value: msg.Value) -> None:
        """The daemon's answer to what the rendezvous asked."""
        store = self._store
        if store is not None:
            store.take(value)

    def say_again(self) -> None:
        """Another daemon has taken over: what a forming under way had told the last one is lost."""
        store = self._store
        if store is not None:
            store.say_again()

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self.groups.close()
