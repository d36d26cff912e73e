"""The phases of a rank: what its tag says, and what `flashrec.phases` moves it through."""

from enum import IntEnum


class Phase(IntEnum):
    """The values are published in the rank's tag, so they are part of the protocol."""

    STARTING = 0  # before protect(): a failure here restarts the world
    IDLE = 1
    COMPUTING = 2
    GATED = 3
    APPLYING = 4
    TAIL = 5
    HELD = 6
    UNWINDING = 7
    PARKED = 8
    REFORMING = 9
    BUILDING = 10
    LEFT = 11
    GONE = 12
    CLOSING = 13


IN_BODY = (Phase.COMPUTING, Phase.GATED, Phase.HELD, Phase.APPLYING, Phase.TAIL, Phase.UNWINDING)
