"""Cues: what a rank does when it comes to a place that was named in advance.

Striking a rank in a phase that lasts microseconds is a matter of luck from outside. So the rank itself waits
there (`hold`) until it is struck, or until it is let go; or it fails by itself (`raise`, `exit`, ...).

The folder that ranks and injector share (its path is in FLASHREC_CHAOS):

    cues.json       the list of cues
    NAME.fired      the cue was met; made by the rank, exclusively, so that a cue is met once (or `times`)
    NAME.hold       a FIFO; a rank that holds is blocked in opening it, and opening it for writing lets it go
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

ENV_FOLDER = "FLASHREC_CHAOS"
STANDBY = -1
"""The rank of a process that holds none yet."""

ACTS = ("hold", "raise", "exit", "hard_exit", "sleep")


class ChaosError(RuntimeError):
    """What a rank raises that was told to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cue:
    """`step` None: whatever the step. `after`: cues that must have fired before this one counts."""

    name: str
    rank: int
    place: str
    step: int | None = None
    act: str = "hold"
    code: int = 0
    times: int = 1
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.act not in ACTS:
            raise ValueError(f"a cue's act is one of {', '.join(ACTS)}, not {self.act!r}")
        if self.times < 1 or not self.name:
            raise ValueError(f"a cue needs a name and must count at least once: {self}")


def fired_path(folder: Path, name: str, number: int = 0) -> Path:
    return folder / (f"{name}.fired" if number == 0 else f"{name}.fired.{number}")


def hold_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.hold"


def write_cues(folder: Path, cues: list[Cue]) -> None:
    """For the injector: make the cues known before the job starts."""
    names = [cue.name for cue in cues]
    if len(set(names)) != len(names):
        raise ValueError(f"two cues of one name among {names}")
    for cue in cues:
        if cue.act == "hold":
            os.mkfifo(hold_path(folder, cue.name), 0o600)
    (folder / "cues.json").write_text(json.dumps([asdict(cue) for cue in cues]))


def let_go(folder: Path, name: str) -> None:
    """End a hold. OSError (ENXIO) when nobody holds there."""
    os.close(os.open(hold_path(folder, name), os.O_WRONLY | os.O_NONBLOCK))


class Cues:
    """The rank's side."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._cues: list[Cue] = []
        if folder is not None:
            for fields in json.loads((folder / "cues.json").read_text()):
                self._cues.append(Cue(**{**fields, "after": tuple(fields["after"])}))

    def reach(self, place: str, step: int | None) -> None:
        """This process is at `place`; act if a cue says so. Costs nothing to speak of when none does."""
        for cue in self._cues:
            if cue.place != place or (cue.step is not None and cue.step != step):
                continue
            if cue.rank == current_rank() and self._claim(cue):
                self._act(cue)

    def _claim(self, cue: Cue) -> bool:
        assert self._folder is not None
        if not all(fired_path(self._folder, name).exists() for name in cue.after):
            return False
        for number in range(cue.times):
            try:
                os.close(os.open(fired_path(self._folder, cue.name, number), os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                continue
            return True
        return False

    def _act(self, cue: Cue) -> None:
        assert self._folder is not None
        if cue.act == "hold":
            os.close(os.open(hold_path(self._folder, cue.name), os.O_RDONLY))
        elif cue.act == "raise":
            raise ChaosError(f"on purpose, by cue {cue.name}")
        elif cue.act == "exit":
            sys.exit(cue.code)
        elif cue.act == "hard_exit":
            os._exit(cue.code)
        else:
            sleep_for_ever()


def sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(3600)


def current_rank() -> int:
    """By the environment: a standby has no RANK until it is given one."""
    return int(os.environ.get("RANK", STANDBY))


def _from_environment() -> Cues:
    folder = os.environ.get(ENV_FOLDER)
    return Cues(Path(folder) if folder else None)


cues = _from_environment()
