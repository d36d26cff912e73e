"""SIGKILL at a moment nobody chose: a seeded time after the rank was first seen in a step."""

import random
import signal
import time

from chaos.cues import Cue
from chaos.faults.base import Evidence, Fault
from chaos.job import Job
from flashrec.protocol.tag import TagReader, tag_path


class KillAtRandom(Fault):
    """Strikes once, between 0 and `spread_s` after the rank's tag first shows a step of at least `step`."""

    def __init__(self, rank: int, step: int, seed: int, *, spread_s: float = 0.05) -> None:
        self.rank, self.step = rank, step
        self.name = f"kill-random-r{rank}-s{step}-seed{seed}"
        self._delay_s = random.Random(seed).uniform(0.0, spread_s)
        self._due: float | None = None
        self._reader: TagReader | None = None
        self.struck = False

    def cues(self) -> list[Cue]:
        return []

    def poll(self, job: Job) -> None:
        if self.struck:
            return
        if self._due is None:
            self._reader = self._reader or TagReader(tag_path(job.shm_dir, self.rank))
            tag = self._reader.read()
            if tag is not None and tag.step >= self.step:
                self._due = time.monotonic() + self._delay_s
        elif time.monotonic() >= self._due and job.pid(self.rank) is not None:
            job.strike(self.rank, signal.SIGKILL)
            self.struck = True

    def missing(self, evidence: Evidence) -> str | None:
        if self.struck and evidence.died(self.rank, "SIGKILL"):
            return None
        return f"rank {self.rank} was {'struck, but not' if self.struck else 'never'} seen to die"
