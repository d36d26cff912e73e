"""How far ranks may run ahead of the faults that are to strike them: a job's steps are fixed in advance, and how long
it takes until the next fault can strike is not.

Whoever strikes writes how many steps may be done by now; from there on each takes longer, and never stands still.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LONGEST_S = 1.0
"""Far below what a rank may stand still before it counts as stuck."""
GROWTH_S = 0.05


def allow(out: Path, steps: int) -> None:
    """Up to step number `steps` nobody waits."""
    aside = out / "pace.new"
    aside.write_text(str(steps))
    os.replace(aside, out / "pace")


def keep(out: Path, step: int) -> None:
    """A rank is about to do step number `step`."""
    try:
        allowed = int((out / "pace").read_text())
    except FileNotFoundError:
        allowed = 0
    if step > allowed:
        time.sleep(min(LONGEST_S, GROWTH_S * (step - allowed)))
