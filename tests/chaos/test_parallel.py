"""Ranks of every parallelism are killed: one, two, and all at once, in places that differ from kind to kind.

`python -m chaos.matrix --parallel` has every place, for every kind and loss.
"""

import pytest

from chaos.parallel import KINDS, LOSSES, PECULIAR, sample, scenario

# As many as there is time for: the plain kind of each parallelism, or a peculiar one in its stead.
CASES = {
    "ddp": KINDS["ddp"],
    "zero": KINDS["zero"],
    "fsdp": PECULIAR["fsdp, uneven, frozen"],
    "hsdp": KINDS["hsdp"],
    "tp": PECULIAR["tp, uneven, experts"],
    "pp": PECULIAR["pp, tied"],
    "tp+fsdp": KINDS["tp+fsdp"],
    "pp+fsdp": PECULIAR["pp+fsdp, interleaved, experts"],
}


@pytest.mark.parametrize("case", CASES)
def test_lost_ranks_change_no_bit_and_cost_one_step_at_most(case: str, play) -> None:  # type: ignore[no-untyped-def]
    outcome = play(scenario(CASES[case], sample(list(CASES).index(case))))
    recovered = outcome.job.final_status["recoveries"]
    assert sorted(len(record["faults"]) for record in recovered) == sorted(LOSSES.values())
