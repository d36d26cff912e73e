"""The options of one demo, and the two programs it runs."""

from dataclasses import dataclass
from pathlib import Path

import flashrec

PROGRAMS = Path(flashrec.__file__).parent / "demo"
EPOCH_STEPS = 30  # short, so that ranks are lost in several epochs
MODEL = "a GPT with 2.7 million parameters"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `flashrec demo` was asked for."""

    steps: int
    ranks: int
    num_faults: int
    seed: int
    standby: str
    """How far the standby goes on its own: built, forked, or none is kept."""

    def arguments(self, out: Path) -> tuple[str, ...]:
        """The options that both programs are run with."""
        return (
            "--steps",
            str(self.steps),
            "--seed",
            str(self.seed),
            "--epoch-steps",
            str(EPOCH_STEPS),
            "--out",
            str(out),
            "--quiet",
        )
