"""A rank is killed in every place of a step, whatever stands by to replace it."""

import pytest

from chaos.faults.kill_at_place import KillAtPlace
from chaos.recipe import Recipe
from chaos.scenario import Scenario

PLACES = ("forward", "backward", "seal", "vote", "voted", "apply", "tail", "between", "section")
DEPTHS = {"built": ("built", 1), "forked": ("forked", 1), "none": ("forked", 0)}


def kills(first: int, gap: int) -> list[KillAtPlace]:
    """Every place, for rank 0 and another in turn, `gap` steps apart; a section follows every third step."""
    faults, step = [], first
    for place in PLACES:
        for rank in (0, 1):
            if place == "section":
                step += -(step + 1) % 3
            faults.append(KillAtPlace(rank, place, step))
            step += gap
    return faults


@pytest.mark.parametrize("depth", DEPTHS)
def test_killed_in_every_place(depth: str, play) -> None:  # type: ignore[no-untyped-def]
    standby, standbys = DEPTHS[depth]
    faults = kills(first=3, gap=2)
    steps = max(fault.step or 0 for fault in faults) + 4
    recipe = Recipe(steps=steps, standby=standby, section_every=3, extras=("scheduler",))
    outcome = play(Scenario(recipe=recipe, faults=faults, standbys=standbys, deadline_s=120))
    in_sections = [fault.step for fault in faults if fault.place == "section"]
    # Rank 2 lives through it all, and knows which of its sections were worthless.
    said = dict(line.split() for line in (outcome.folder / "out" / "sections.r2").read_text().splitlines())
    assert {said[str(step)] for step in in_sections} == {"False"}
    assert list(said.values()).count("True") > len(said) // 2
    recovered = outcome.job.final_status["recoveries"]
    assert len(recovered) == len(faults)
    assert all(record["complete"] for record in recovered)
    # A rank lost before its gate passed is redone, one lost after it is not: no step is done twice.
    for fault, record in zip(faults, recovered, strict=True):
        assert fault.step is not None
        passed = fault.place in ("voted", "apply", "tail", "between", "section")
        assert record["version"] == fault.step + passed, (fault.name, record)
