"""A scenario: a recipe, faults, and the verdict on what came of them."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.cues import Cue, fired_path, write_cues
from chaos.faults.base import Evidence, Fault
from chaos.job import Job, JobStuck
from chaos.nodes_job import NodesJob
from chaos.recipe import Recipe
from chaos.redone import given_up_steps
from chaos.reference import Reference
from flashrec.protocol.messages import JobEnded

BEFORE_STEPS = ("start", "build", "protected")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    recipe: Recipe
    faults: Sequence[Fault] = ()
    world_size: int = 3
    standbys: int = 1
    pull: str = "shm"
    start_method: str = "fork"
    max_restarts: int | None = None
    suspect_after_s: float = 3.0
    deadline_s: float = 60.0
    nodes: int = 1
    """With more than one each has a daemon of its own."""
    spare_nodes: int = 0
    replicas: int = 0
    namespaces: bool = False


@dataclass(frozen=True)
class Outcome:
    scenario: Scenario
    folder: Path
    ended: JobEnded
    evidence: Evidence
    job: Job


def run(scenario: Scenario, folder: Path) -> Outcome:
    """To the job's end, faults included. `folder` is new and empty. JobStuck when it does not end."""
    out = folder / "out"
    out.mkdir()
    scenario.recipe.write(folder / "recipe.json")
    waiting: dict[str, tuple[Fault, Cue]] = {
        cue.name: (fault, cue) for fault in scenario.faults for cue in fault.cues()
    }
    write_cues(folder, [cue for _, cue in waiting.values()])
    with _started(scenario, folder, [str(folder / "recipe.json"), str(out)]) as job:
        ended = _drive(job, scenario, waiting)
        names = [cue.name for fault in scenario.faults for cue in fault.cues()]
        deaths = [death for recovery in job.final_status["recoveries"] for death in recovery["faults"]]
        fired = frozenset(name for name in names if fired_path(folder, name).exists())
        evidence = Evidence(tuple(deaths), tuple(job.events), fired)
    return Outcome(scenario, folder, ended, evidence, job)


def _started(scenario: Scenario, folder: Path, arguments: list[str]) -> Job:
    options: dict[str, Any] = {
        "world_size": scenario.world_size,
        "standbys": scenario.standbys,
        "pull": scenario.pull,
        "start_method": scenario.start_method,
        "max_restarts": scenario.max_restarts,
        "suspect_after_s": scenario.suspect_after_s,
    }
    if scenario.nodes == 1:
        return Job(folder, scenario.recipe.script, arguments, **options)
    return NodesJob(
        folder,
        scenario.recipe.script,
        arguments,
        nodes=scenario.nodes,
        spare_nodes=scenario.spare_nodes,
        replicas=scenario.replicas,
        namespaces=scenario.namespaces,
        **options,
    )


def _drive(job: Job, scenario: Scenario, waiting: dict[str, tuple[Fault, Cue]]) -> JobEnded:
    deadline = time.monotonic() + scenario.deadline_s
    while job.poll():
        for name, (fault, cue) in list(waiting.items()):
            # Before every rank has protected, a death restarts the world: a fault in a step is held until then.
            early = cue.place in BEFORE_STEPS or bool(job.happened("running"))
            if early and fired_path(job.folder, name).exists():
                del waiting[name]
                if cue.act == "hold":
                    fault.strike(job, cue)
        for fault in scenario.faults:
            fault.poll(job)
        if time.monotonic() > deadline:
            raise JobStuck(f"no end in {scenario.deadline_s:.0f} s; not met: {list(waiting)}\n{job.story()}")
    assert job.ended is not None
    return job.ended


def objections(outcome: Outcome, reference: Reference) -> list[str]:
    """What speaks against the run: a fault that did not happen, or a bit that differs. Empty: all is well."""
    scenario, out = outcome.scenario, outcome.folder / "out"
    if outcome.ended.code != 0:
        return [f"the job ended with code {outcome.ended.code}: {outcome.ended.reason}"]
    found = [f"{f.name}: {why}" for f in scenario.faults if (why := f.missing(outcome.evidence))]
    seed_file = outcome.folder / "seed" if scenario.recipe.prelude else None
    undisturbed = reference.run(scenario.recipe, scenario.world_size, seed_file)
    if scenario.recipe.parallel:
        recoveries = outcome.job.final_status["recoveries"]
        found += given_up_steps(recoveries, out, scenario.world_size, scenario.recipe.redone_at_most)
    for rank in range(scenario.world_size):
        found += _differences(out, undisturbed, rank, scenario.recipe.steps)
    return found


def verify(outcome: Outcome, reference: Reference) -> None:
    """AssertionError with every objection, and the story of the job."""
    found = objections(outcome, reference)
    assert not found, "\n".join([*found, outcome.job.story()])


def _differences(out: Path, undisturbed: Path, rank: int, steps: int) -> list[str]:
    try:
        mine = json.loads((out / f"outcome.r{rank}.json").read_text())
    except FileNotFoundError:
        return [f"rank {rank} left no outcome"]
    wanted = json.loads((undisturbed / f"outcome.r{rank}.json").read_text())
    found = [f"rank {rank}: {name} differs" for name in wanted if mine.get(name) != wanted[name]]
    losses, expected = _losses(out / f"losses.r{rank}"), _losses(undisturbed / f"losses.r{rank}")
    for step, values in sorted(losses.items()):
        if values != expected.get(step):
            found.append(f"rank {rank}: the loss of step {step} is {values}, not {expected.get(step)}")
    # A rank that dies between its commit and the writing of its loss takes one line with it.
    lost = [step for step in range(steps) if step not in losses]
    if len(lost) > steps // 2:
        found.append(f"rank {rank}: no loss on record for steps {lost}")
    return found


def _losses(path: Path) -> dict[int, set[str]]:
    losses: dict[int, set[str]] = {}
    for line in path.read_text().splitlines():
        step, _, value = line.partition(" ")
        losses.setdefault(int(step), set()).add(value)
    return losses
