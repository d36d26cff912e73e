"""The sealed regime meets what it cannot use: state that changes its form, no memory, a damaged arena."""

import signal
from pathlib import Path

import pytest

from chaos.cues import Cue, fired_path
from chaos.job import Job
from flashrec.state.arena import Arena
from tests.chaos.started import started

SCRIPT = """
import resource, torch, flashrec
from chaos.cues import cues
flashrec.init()
torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum={momentum})
flashrec.protect(model=model, optimizer=optimizer)
for step in flashrec.steps([torch.ones(1, 256) * number for number in range(8)], total=8):
    with step:
        model(step.batch).square().mean().backward()
        cues.reach("backward", step.index)
        optimizer.step()
        optimizer.zero_grad()
    if step.committed:
        print("step", step.index, float(model.weight.detach().sum()).hex(), flush=True)
    if step.index >= 3:
        {mischief}
"""

MISCHIEF = {
    "a parameter replaced": (
        "model.weight = torch.nn.Parameter(torch.zeros(256, 256))",
        "'model.weight' was replaced since protect()",
    ),
    "a parameter resized": (
        "model.weight.data = torch.zeros(128, 256); optimizer.state.clear()",
        "'model.weight' was resized since protect()",
    ),
    "a parameter added": (
        "optimizer.add_param_group({'params': [torch.nn.Parameter(torch.zeros(2))]})",
        "has other parameters than at protect()",
    ),
    # The momentum's buffers need a larger arena than there is room for from now on.
    "no memory": (
        "optimizer.param_groups[0]['momentum'] = 0.9; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))",
        "cannot write in",
    ),
}


@pytest.mark.parametrize("what", MISCHIEF)
def test_it_ends_with_the_reason(what: str, folder: Path) -> None:
    mischief, words = MISCHIEF[what]
    with started(folder, script(mischief, momentum=0), world_size=1, standbys=1) as job:
        ended = job.follow()
        assert ended.code == 1, job.story()
        assert words in ended.reason, ended.reason


def test_a_truncated_arena_is_refused_in_words(folder: Path) -> None:
    with held_in_step(folder, 5) as job:
        (arena,) = (job.shm_dir / "arena").glob("r0.*")
        with open(arena, "r+b") as file:
            file.truncate(10_000)
        job.strike(0, signal.SIGKILL)
        ended = job.follow()
        assert ended.code == 1
        assert "rank 0 failed first: killed by SIGKILL" in ended.reason, ended.reason
        assert "no arena does" in ended.reason, ended.reason
        assert job.happened("arena refused"), job.story()


def test_a_damaged_version_gives_way_to_the_one_before(folder: Path, tmp_path: Path) -> None:
    with started(tmp_path, script("pass"), world_size=1, standbys=0) as undisturbed:
        assert undisturbed.follow().code == 0
        wanted = steps(undisturbed)
    with held_in_step(folder, 5) as job:
        name = job.shm_dir.name.split("-")[2]
        manifest = Arena(job.shm_dir / "arena", 0, name).read(5).manifests[0]
        with open(manifest.path, "r+b") as file:
            file.seek(manifest.offset + 1000)
            (byte,) = file.read(1)
            file.seek(manifest.offset + 1000)
            file.write(bytes([byte ^ 1]))
        job.strike(0, signal.SIGKILL)
        assert job.follow().code == 0, job.story()
        assert [event["step"] for event in job.happened("plan")] == [5, 4], job.story()
        assert any("as it was sealed" in event["reason"] for event in job.happened("forming failed"))
        assert steps(job) == wanted


def script(mischief: str, *, momentum: float = 0.9) -> str:
    return SCRIPT.replace("{mischief}", mischief).replace("{momentum}", str(momentum))


def held_in_step(folder: Path, step: int) -> Job:
    """A job of one rank, which holds in the backward pass of `step`, and has sealed what the step began with."""
    cue = Cue(name="hold", rank=0, place="backward", step=step)
    job = started(folder, script("pass"), world_size=1, standbys=1, cues=[cue])
    job.until(lambda: fired_path(folder, "hold").exists(), what="backward")
    arena = Arena(job.shm_dir / "arena", 0, job.shm_dir.name.split("-")[2])
    job.until(lambda: any(one.version == step for one in arena.sealed()), what="a sealed version")
    return job


def steps(job: Job) -> dict[str, str]:
    """What was printed for each step; what is done again must print the same."""
    printed: dict[str, str] = {}
    for line in job.text("stdout").splitlines():
        _, step, value = line.split()[-3:]
        assert printed.setdefault(step, value) == value, f"step {step} differs when it is done again"
    return printed
