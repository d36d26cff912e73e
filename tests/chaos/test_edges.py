"""Before there is a version to recover, and after the last."""

import signal

import pytest

from chaos.cues import Cue, fired_path
from chaos.faults.kill_at_place import KillAtPlace
from chaos.job import Job
from chaos.recipe import Recipe
from chaos.scenario import Scenario, run, verify
from flashrec.protocol.tag import TagReader, tag_path
from tests.chaos.started import started


class KillEarly(KillAtPlace):
    """Before protect() a death is not recovered from: the world starts anew."""

    def missing(self, evidence) -> str | None:  # type: ignore[no-untyped-def]
        lost = [e for e in evidence.events if e["event"] == "rank lost" and e["rank"] == self.rank]
        if self.name not in evidence.fired or not lost:
            return f"rank {self.rank} was not killed at {self.place}"
        return None


@pytest.mark.parametrize(("rank", "place"), [(0, "start"), (1, "build"), (0, "protected")])
def test_killed_before_the_first_step(place: str, rank: int, play) -> None:  # type: ignore[no-untyped-def]
    outcome = play(Scenario(recipe=Recipe(steps=4), faults=[KillEarly(rank, place)], world_size=2))
    if place != "protected":
        assert len(outcome.job.happened("world starting")) == 2


def test_a_rank_that_dies_in_every_start_ends_the_job(folder) -> None:  # type: ignore[no-untyped-def]
    faults = [
        KillEarly(1, "build", name=f"kill-{n}", after=(f"kill-{n - 1}",) if n else ()) for n in range(6)
    ]
    outcome = run(Scenario(recipe=Recipe(steps=4), faults=faults, world_size=2), folder)
    assert outcome.ended.code != 0
    assert "never got past its start" in outcome.ended.reason
    assert "rank 1" in outcome.ended.reason


def test_killed_in_the_last_step_and_after_it(play) -> None:  # type: ignore[no-untyped-def]
    faults = [KillAtPlace(0, "backward", 5), KillAtPlace(1, "between", 5, after=("kill-r0-backward-5",))]
    play(Scenario(recipe=Recipe(steps=6), faults=faults, standbys=2))


def test_killed_while_it_lingers(folder, reference) -> None:  # type: ignore[no-untyped-def]
    """Rank 1 is kept from its end until rank 0 has come to its own and was killed there."""

    class KillLingering(KillAtPlace):
        def poll(self, job) -> None:  # type: ignore[no-untyped-def]
            if not self.struck and any(e["rank"] == 0 for e in job.happened("at its end")):
                self.struck = True
                job.strike(0, 9)
                job.until(lambda: job.happened("rank lost"), what="rank 0's death")
                from chaos.cues import let_go

                let_go(job.folder, self.name)

        def strike(self, job, cue) -> None:  # type: ignore[no-untyped-def]
            self.held = True

        def missing(self, evidence) -> str | None:  # type: ignore[no-untyped-def]
            return (
                None
                if evidence.died(0, "SIGKILL", "end")
                else f"rank 0 did not die at its end: {evidence.deaths}"
            )

    fault = KillLingering(1, "end")
    fault.struck = False  # type: ignore[attr-defined]
    outcome = run(Scenario(recipe=Recipe(steps=5), faults=[fault], world_size=2), folder)
    verify(outcome, reference)


def test_a_world_of_one_comes_back_from_shared_memory(play) -> None:  # type: ignore[no-untyped-def]
    """No other rank holds its state, so each version is sealed."""
    faults = [KillAtPlace(0, "backward", 3), KillAtPlace(0, "between", 5)]
    play(Scenario(recipe=Recipe(steps=8), faults=faults, world_size=1))


OWN_LOOP = """
import torch, torch.distributed as dist, flashrec
from chaos.cues import cues
flashrec.init()
torch.manual_seed(flashrec.rank())
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
flashrec.protect(model=model, optimizer=optimizer)
while (index := flashrec.current_step()) < 4:
    with flashrec.step() as step:
        loss = model(torch.full((1, 8), float(index))).square().mean()
        dist.all_reduce(total := loss.detach().clone())
        (loss * total).backward()
        optimizer.step()
        optimizer.zero_grad()
        cues.reach("tail", index)
    if step.committed:
        print("committed", index, float(model.weight.detach().sum()).hex(), flush=True)
cues.reach("end", None)
print("final", float(model.weight.detach().sum()).hex(), flush=True)
"""


def test_the_last_step_is_lost_when_the_others_loops_are_over(folder, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Nobody can go back into a loop that has ended: a replacement runs the script from the version before."""
    with started(tmp_path, OWN_LOOP, world_size=2, standbys=0) as undisturbed:
        assert undisturbed.follow().code == 0
    cue = Cue(name="last", rank=1, place="tail", step=3)
    with started(folder, OWN_LOOP, world_size=2, standbys=1, cues=[cue]) as job:
        job.until(lambda: fired_path(folder, "last").exists(), what="the last step's tail")
        job.until(lambda: at_its_end(job, 0), what="rank 0 at its end")
        job.strike(1, signal.SIGKILL)
        assert job.follow().code == 0, job.story()
        assert "the loop that would make it again" in job.text(), job.story()
        assert finals(job) == finals(undisturbed)


def at_its_end(job: Job, rank: int) -> bool:
    tag = TagReader(tag_path(job.shm_dir, rank)).read()
    return tag is not None and tag.place == "end"


def finals(job: Job) -> set[tuple[int, str]]:
    lines = [(rank, line) for rank, _, text in job.output for line in text.splitlines()]
    return {(rank, line) for rank, line in lines if line.startswith("final")}
