"""A byte of what a survivor serves is changed, after its checksum was taken and before it is pulled."""

import signal

from chaos.cues import Cue, let_go
from chaos.faults.base import Evidence, Fault
from chaos.job import Job


class CorruptExport(Fault):
    """`rank` is killed in `step`; its replacement holds before the pull, while a byte is flipped."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step
        self.name = f"corrupt-r{rank}-{step}"
        self.corrupted: str | None = None

    def cues(self) -> list[Cue]:
        first = Cue(name=f"{self.name}-kill", rank=self.rank, place="forward", step=self.step)
        return [first, Cue(name=f"{self.name}-pull", rank=self.rank, place="pull", after=(first.name,))]

    def strike(self, job: Job, cue: Cue) -> None:
        if cue.place != "pull":
            job.strike(self.rank, signal.SIGKILL)
            return
        victim = max((job.shm_dir / "export").iterdir(), key=lambda path: path.stat().st_size)
        with open(victim, "r+b") as file:
            file.seek(victim.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        self.corrupted = victim.name
        let_go(job.folder, cue.name)

    def missing(self, evidence: Evidence) -> str | None:
        if self.corrupted is None:
            return "no export was there to be corrupted"
        noticed = [e for e in evidence.events if "do not match their checksum" in e["reason"]]
        return None if noticed else f"nobody noticed that {self.corrupted} was corrupt"

    @property
    def num_recoveries(self) -> int:
        return 2
