"""How many committed steps a recovery did again: what the sealed regime promises is at most one."""

from pathlib import Path
from typing import Any


def redone_steps(recovery: dict[str, Any], commits: dict[int, list[tuple[int, int]]]) -> int:
    """Of the newest version that any rank had when the plan was made, how many steps the plan gave up.

    `recovery` as in the job's status. `commits`: by rank, (step, instant) of each commit on record; instants on
    the clock that all of a machine's processes share.
    """
    if recovery["version"] is None:  # no plan: the world began again, from version 0
        planned_ns, version = recovery["began_ns"], 0
    else:
        planned_ns, version = recovery["marks"]["planned"], recovery["version"]
    # Each earlier recovery may have given a step up too: what counts is what each rank committed last.
    newest = 0
    for steps in commits.values():
        before = [(at_ns, step + 1) for step, at_ns in steps if at_ns < planned_ns]
        newest = max(newest, max(before)[1] if before else 0)
    return max(0, newest - version)


def read_commits(out: Path, world_size: int) -> dict[int, list[tuple[int, int]]]:
    """What the ranks of `scripts/parallel.py` noted."""
    commits: dict[int, list[tuple[int, int]]] = {}
    for rank in range(world_size):
        lines = (out / f"commits.r{rank}").read_text().splitlines()
        commits[rank] = [(int(step), int(at_ns)) for step, at_ns in (line.split() for line in lines)]
    return commits


def given_up_steps(recoveries: list[dict[str, Any]], out: Path, world_size: int, bound: int) -> list[str]:
    """An objection for each recovery that gave up more than `bound` committed steps."""
    commits = read_commits(out, world_size)
    lost = [(recovery, redone_steps(recovery, commits)) for recovery in recoveries]
    return [
        f"the recovery to version {recovery['version']} gave up {steps} committed steps, not {bound} at most"
        for recovery, steps in lost
        if steps > bound
    ]
