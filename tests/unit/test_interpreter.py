"""What a rank's process does with messages of a daemon, and what it says of itself, without torch's groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from flashrec import phases as ph
from flashrec.interpreter import Interpreter
from flashrec.link import Link
from flashrec.protocol import messages as msg
from flashrec.protocol.phase import Phase

OFFER = msg.Rejoin("p1", 1, "1.0", "job", 0, 1, 0, None, False, None, "", 0, False)
CLAIMS = (((0,), "digest"),)


class State:
    """In place of a ProtectedState."""

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
