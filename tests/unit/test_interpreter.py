"""What a rank's process does with messages of a daemon, and what it says of itself, without torch's groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flashrec import phases as ph
from flashrec.assembly import Assembly
from flashrec.gate import AllReduceGate, SharedMemoryGate
from flashrec.interpreter import Interpreter
from flashrec.link import Link
from flashrec.protocol import messages as msg
from flashrec.protocol.phase import Phase
from flashrec.state.replicating import NotKept

OFFER = msg.Rejoin("p1", 1, "1.0", "job", 0, 1, 0, None, False, None, "", 0, False)
CLAIMS = (((0,), "digest"),)


class State:
    """In place of a ProtectedState."""

    seal_every = None

    def publish_layout(self, shm_dir: Path, rank: int) -> None:
        pass

    def why_sealed(self) -> str:
        return "the script asks for it"

    def arena_bytes(self) -> int:
        return 7

    def claims(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        return CLAIMS


class Kept:
    """In place of a Keeper."""

    def __init__(self, on_seal: Callable[[], None]) -> None:
        self.state: Any = None
        self.seal_private = lambda version, generation, *, provisional: on_seal()
        self.set_keepers = lambda keepers, generation: None


def interpreter(*, replacement: bool, says: msg.Message | None = None) -> Interpreter:
    """Rank 0's; `says`: what the daemon says when it is waited for."""
    welcome = SimpleNamespace(
        world_size=1, shm_dir="/nowhere", replacement=replacement, job="job", rank=0, patience_s=1.0
    )
    link = SimpleNamespace(
        welcome=welcome, proc="p1", daemon_lost=False, forsaken="", send=lambda message: None,
        receive=lambda timeout_s=None: says,
    )  # fmt: skip
    made = Interpreter(cast(Link, link), cast(Any, SimpleNamespace()))
    phase = Phase.BUILDING if replacement else Phase.STARTING
    made._machine = ph.RankMachine(ph.RankState(0, phase))
    return made


def test_a_rank_that_replaced_another_need_not_be_told_the_regime() -> None:
    """A daemon that has adopted all says it to all, in whatever phase they are."""
    made = interpreter(replacement=True)
    state = ph.RankState(0, Phase.COMPUTING, generation=2, version=5, sealing=True)
    made._machine = ph.RankMachine(state)
    made._take(msg.Regime(True))
    assert made._machine.state == state


def test_no_daemon_hears_of_a_protected_rank_without_what_it_holds() -> None:
    """It may ask at any moment, from another thread."""
    made = interpreter(replacement=False, says=msg.Regime(True))
    heard: list[msg.Rejoin] = []
    made._keeper = cast(Any, Kept(lambda: heard.append(made._standing(OFFER))))
    made.protect(cast(Any, State()))
    (offer,) = heard
    assert offer.phase == Phase.IDLE
    assert (offer.claims, offer.why_sealed, offer.arena_bytes) == (CLAIMS, "the script asks for it", 7)
    assert made.sealing


# --- the wait for other nodes ---------------------------------------------------------------------------------


class Gate:
    """A rank in its gate, with a keeper and an assembly that are none. `wait`: what the wait for keepers does."""

    def __init__(self, wait: Callable[[], None], phase: Phase = Phase.GATED) -> None:
        self.said: list[msg.Message] = []
        self.done: list[str] = []
        self.aborted = False
        welcome = SimpleNamespace(
            world_size=2,
            shm_dir="/nowhere",
            replacement=False,
            job="job",
            rank=0,
            patience_s=1.0,
            kept_within_s=3.0,
        )
        link = SimpleNamespace(
            welcome=welcome, proc="p1", daemon_lost=False, forsaken="", send=self.said.append, post=self.queue,
            receive=lambda timeout_s=None: self.queued.pop(0), parts=SimpleNamespace(aborted=lambda _: self.aborted),
        )  # fmt: skip
        self.queued: list[Any] = []
        self.groups = SimpleNamespace(latched=None)
        self.made = Interpreter(cast(Link, link), cast(Any, self.groups))
        plan = ph.Plan(1, 5, ()) if phase is Phase.REFORMING else None
        self.made._machine = ph.RankMachine(ph.RankState(0, phase, version=5, plan=plan))
        self.made.state = cast(Any, object())
        self.made._keeper = cast(Any, SimpleNamespace(await_kept=self.await_kept))
        self.made._assembly = cast(
            Any, SimpleNamespace(break_gate=lambda why: self.done.append(f"broke: {why}"))
        )
        self.made._vote = lambda: self.done.append("voted") or ph.Verdict(True)  # type: ignore[method-assign,func-returns-value]
        self.wait = wait

    def queue(self, event: ph.Latch) -> None:
        self.queued.append(event)

    def await_kept(
        self, sealed: int | None, private: tuple[int, ...], is_cancelled: Callable[[], bool], timeout_s: float
    ) -> None:
        assert (sealed, private, timeout_s) == (None, (5, 6), 3.0)
        self.is_cancelled = is_cancelled
        self.wait()

    def go(self, *then: ph.Action) -> Phase:
        assert self.made._machine is not None
        for action in (ph.AwaitKept(None, (5, 6)), *then):
            if not self.made._execute(action):
                break
        return self.made._machine.state.phase


def test_a_rank_votes_when_other_nodes_have_what_it_sealed() -> None:
    gate = Gate(lambda: None)
    assert gate.go(ph.Vote()) is Phase.APPLYING
    assert gate.done == ["voted"]


def test_a_wait_in_a_gate_that_is_over_ends_without_a_vote() -> None:
    def ended() -> None:
        assert not gate.is_cancelled()
        gate.groups.latched = "a peer is gone"
        assert gate.is_cancelled()
        raise NotKept("the wait was cancelled", is_cancelled=True)

    gate = Gate(ended)
    assert gate.go(ph.Vote()) is Phase.UNWINDING
    assert gate.done == ["broke: the wait was cancelled"]
    assert gate.made._machine is not None
    assert gate.made._machine.state.latched
    assert not gate.said


@pytest.mark.parametrize("phase", [Phase.GATED, Phase.CLOSING])
def test_a_rank_whose_keepers_do_not_acknowledge_gives_the_generation_up(phase: Phase) -> None:
    def refused() -> None:
        raise NotKept("node 2 does not keep version 5")

    gate = Gate(refused, phase)
    assert gate.go(ph.Vote()) is (Phase.UNWINDING if phase is Phase.GATED else Phase.PARKED)
    assert gate.done == ["broke: node 2 does not keep version 5"]
    noted = gate.said[0]
    assert isinstance(noted, msg.Noted)
    assert (noted.event, noted.reason) == ("not kept", "node 2 does not keep version 5")
    parked = [message for message in gate.said if isinstance(message, msg.Parked)]
    assert [(p.version, p.can_advance) for p in parked] == ([(5, False)] if phase is Phase.CLOSING else [])


def test_nothing_is_formed_before_the_new_keepers_have_acknowledged() -> None:
    def refused() -> None:
        raise NotKept("node 2 does not keep version 5")

    gate = Gate(refused, Phase.REFORMING)
    assert gate.go(ph.Form(1)) is Phase.PARKED
    assert [(type(m), getattr(m, "event", "")) for m in gate.said] == [
        (msg.Noted, "forming failed"),
        (msg.Parked, ""),
    ]


def test_a_wait_in_a_recovery_ends_with_it() -> None:
    def ended() -> None:
        assert not gate.is_cancelled()
        gate.aborted = True
        assert gate.is_cancelled()
        gate.queued.append(msg.Abort(1, "another rank died"))
        raise NotKept("the wait was cancelled", is_cancelled=True)

    gate = Gate(ended, Phase.REFORMING)
    assert gate.go(ph.Form(1)) is Phase.PARKED
    assert [type(message) for message in gate.said] == [msg.Parked]


# --- a job on several nodes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("replica_address", ["", "tcp://10.0.0.1:1"])
def test_ranks_on_several_nodes_listen_where_others_reach_them_and_share_no_memory(
    tmp_path: Path, replica_address: str
) -> None:
    """For all the job's life, however many nodes there are left."""
    formed: list[Any] = []
    groups = SimpleNamespace(form=lambda store, generation, address: formed.append((generation, address)))
    welcome = SimpleNamespace(replica_address=replica_address, data_address="10.0.0.1", num_nodes=1)
    link = SimpleNamespace(welcome=welcome, proc="p1", send=lambda message: None)
    assembly = Assembly(cast(Link, link), cast(Any, groups), tmp_path, 2)
    assembly.form(0, 4)
    assert formed == [(4, "10.0.0.1")]
    assert type(assembly._gate) is (AllReduceGate if replica_address else SharedMemoryGate)
    assert assembly._gate is not None
    assembly._gate.close()
