"""What a script does wrong is refused with an explanation; what it does carelessly is warned about."""

from pathlib import Path

from chaos.cues import Cue, fired_path
from tests.chaos.started import started

REFUSED = """
import torch, flashrec
from flashrec.errors import UsageError

def refused(words, call):
    try:
        call()
    except UsageError as error:
        assert words in str(error), f"{words!r} is not in {error}"
        print("refused:", words, flush=True)
    else:
        raise AssertionError(f"not refused: {words}")

def enter(step):
    with step:
        raise AssertionError("the body ran")

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
protect = lambda **given: flashrec.protect(**{"model": model, "optimizer": optimizer, **given})
refused("flashrec.init() first", protect)
refused("standby must be one of", lambda: flashrec.init(standby="warm"))
flashrec.init()
refused("was called before", flashrec.init)
refused("protect(model=..., optimizer=...) before", lambda: enter(flashrec.step()))
refused("before the first step", lambda: next(flashrec.steps([1], total=1)))
refused("more than once in a step", lambda: protect(optimizer=torch.optim.LBFGS(model.parameters())))
refused("seal_every must be", lambda: protect(seal_every=-1))
refused("seal_every must be", lambda: protect(seal_every=True))
refused("every version is sealed, since", lambda: protect(seal_every=2, survive="all-ranks"))
refused("takes a Module", lambda: protect(model=object()))
refused("has no state_dict()", lambda: protect(scheduler=object()))
hooked = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
hooked.register_comm_hook(object(), lambda state, bucket: bucket.buffer())
refused("a communication hook with", lambda: protect(model=[model, hooked]))
protect()
refused("was called before", protect)
refused("outside a step", optimizer.step)
refused("cannot be replayed", lambda: next(flashrec.steps(iter([1]), total=1)))
refused("at least one micro-batch", lambda: next(flashrec.steps([1], total=1, micro=0)))
refused("total cannot be", lambda: next(flashrec.steps([1], total=-1)))
refused("gave no batch", lambda: next(flashrec.steps([], total=1)))
refused("ask flashrec.current_step()", lambda: enter(flashrec.step()))
refused("was never entered", lambda: list(flashrec.steps([1, 2], total=2)))
refused("micro-batches", lambda: next(flashrec.steps([1], total=9, micro=2)).batch)
for step in flashrec.steps([torch.ones(1, 4)] * 3, total=2):
    with step:
        refused("a second steps() loop", lambda: next(flashrec.steps([1], total=9)))
        refused("a step inside a step", lambda: enter(flashrec.step()))
        refused("between steps", lambda: enter(flashrec.section()))
        model(step.batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert step.committed
    refused("was entered before", lambda: enter(step))
refused("a second steps() loop", lambda: list(flashrec.steps([torch.ones(1, 4)] * 3, total=4)))
assert flashrec.current_step() == 2
print("all refused", flush=True)
"""


def test_misuse_is_refused_with_an_explanation(folder: Path) -> None:
    job = started(folder, REFUSED, world_size=1, standbys=0)
    with job:
        assert job.follow().code == 0, job.story()
        assert "all refused" in job.text("stdout")


CARELESS = """
import torch, torch.distributed as dist, flashrec
from chaos.cues import cues
flashrec.init()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
flashrec.protect(model=model, optimizer=optimizer)
drawn = {}
for step in flashrec.steps([torch.ones(1, 4)], total=8):
    with step:
        (model(step.batch) * torch.rand(4)).sum().backward()
        cues.reach("backward", step.index)
        optimizer.step()
        dist.all_reduce(torch.ones(1))
        optimizer.zero_grad()
    if step.committed:
        drawn[step.index] = torch.rand(1).item()
        dist.all_reduce(torch.ones(1))
print("last", drawn[7], [p.sum().item().hex() for p in model.parameters()], flush=True)
"""


def test_carelessness_is_warned_about_and_recovered_from(folder: Path) -> None:
    """Random numbers drawn between steps: noticed, named, sealed anew, so that even then no bit differs."""
    lines = []
    for name, cues in (("still", []), ("struck", [Cue(name="kill", rank=1, place="backward", step=5)])):
        (folder / name).mkdir()
        with started(folder / name, CARELESS, world_size=2, standbys=1, cues=cues) as job:
            if cues:
                job.until(lambda job=job: fired_path(job.folder, "kill").exists())
                job.strike(1, 9)
            assert job.follow().code == 0, job.story()
            warned = [event["reason"] for event in job.happened("warning")]
            assert any(words.startswith("torch changed between") for words in warned), warned
            assert any("between the gate and the end of a step" in words for words in warned), warned
            assert any("runs outside a step" in words for words in warned), warned
            assert "torch changed between" in job.text("stderr")
            lines.append(sorted(line for _, stream, line in job.output if stream == "stdout"))
    assert len(lines[0]) == 2
    assert lines[0] == lines[1]


CHANGES = """
import pathlib, sys, torch, flashrec
from chaos.cues import cues
flashrec.init()
width = 4 + pathlib.Path(sys.argv[1]).exists()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.nn.Linear(4, width)
flashrec.protect(model=[model, second], optimizer=optimizer, replicated_over=torch.distributed.group.WORLD)
for step in flashrec.steps([torch.ones(1, 4)], total=8):
    with step:
        model(step.batch).sum().backward()
        cues.reach("backward", step.index)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_replacement_with_another_layout_is_named(folder: Path) -> None:
    cue = Cue(name="kill", rank=1, place="backward", step=3)
    mark = str(fired_path(folder, "kill"))
    with started(folder, CHANGES, mark, world_size=2, standbys=1, cues=[cue]) as job:
        job.until(lambda: fired_path(folder, "kill").exists())
        job.strike(1, 9)
        ended = job.follow()
        assert ended.code == 1
        assert "disagree about the layout" in ended.reason, job.story()
        assert "rank 1" in ended.reason
        assert "model.1.weight" in ended.reason
        assert "[5, 4]" in ended.reason


ASKS_EARLY = CHANGES.replace("flashrec.init()", "flashrec.init(standby='built'); flashrec.rank()")


def test_a_script_that_breaks_its_promise_loses_its_standby_only(folder: Path) -> None:
    cue = Cue(name="kill", rank=1, place="backward", step=3)
    with started(folder, ASKS_EARLY, "/nowhere", world_size=2, standbys=1, cues=[cue]) as job:
        job.until(lambda: job.happened("standby lost"))
        assert "holds no rank yet" in job.happened("standby lost")[0]["reason"]
        job.until(lambda: fired_path(folder, "kill").exists())
        job.strike(1, 9)
        assert job.follow().code == 0, job.story()
        assert len(job.final_status["recoveries"]) == 1
