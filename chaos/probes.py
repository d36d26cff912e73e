"""Places inside flashrec itself, for cues: in the gate, in a recovery.

seal      about to seal private state             vote     about to take part in the agreement
voted     the agreement's result is known here    serve    a survivor, about to export its part
install   a replacement, before anything is its   pull     its private state is in, no tensor yet
pulled    all tensors are in                      form     about to connect the new generation
formed    connected, nobody told yet          finish   about to seal what is left of a version
sealed    all of it is sealed
"""

import functools
from collections.abc import Callable
from typing import Any

from chaos.cues import cues


def install() -> None:
    """Once per process, after flashrec was imported and before init()."""
    from flashrec.gate import AllReduceGate, SharedMemoryGate
    from flashrec.groups import GroupSet
    from flashrec.keeping import Keeper
    from flashrec.protected import ProtectedState
    from flashrec.state.sealing import Sealer

    _probe(Keeper, "seal_private", before="seal")
    _probe(Sealer, "finish", before="finish", after="sealed")
    for gate in (SharedMemoryGate, AllReduceGate):
        _probe(gate, "agree", before="vote", after="voted")
    _probe(GroupSet, "form", before="form", after="formed")
    _probe(ProtectedState, "export", before="serve")
    _probe(ProtectedState, "install_private", before="install")
    _probe(ProtectedState, "install_tensors", before="pull", after="pulled")


def _probe(owner: type, name: str, *, before: str, after: str | None = None) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def probed(*args: Any, **kwargs: Any) -> Any:
        cues.reach(before, _step())
        result = original(*args, **kwargs)
        if after is not None:
            cues.reach(after, _step())
        return result

    setattr(owner, name, probed)


def _step() -> int | None:
    from flashrec import session

    engine = session.current_engine()
    return None if engine is None else engine.version
