"""Both state machines on several nodes, with the keepers of replicas: all interleavings of small worlds, and what
planted mistakes do to them."""

import functools

import pytest

from tests.exploration.explore import Explorer
from tests.exploration.model import Config
from tests.exploration.mutants import Mutant
from tests.exploration.node_mutants import NODE_MUTANTS
from tests.exploration.node_worlds import ALIKE, SMALL


@functools.cache
def explored(config: Config) -> tuple[str, int, str]:
    """What is wrong, how many final states are a success, and a summary."""
    report = Explorer(config).run()
    return report.violation, report.outcomes.get(0, 0), str(report)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.timeout(600)
def test_no_fault_of_a_rank_or_a_node_loses_a_version(capsys: pytest.CaptureFixture[str], name: str) -> None:
    violation, num_successes, text = explored(SMALL[name])
    with capsys.disabled():
        print(f"\n  {text}", end=" ")
    assert not violation, text
    assert num_successes > 1


@pytest.mark.parametrize("config", ALIKE, ids=str)
@pytest.mark.timeout(600)
def test_the_reductions_lose_no_situation(config: Config) -> None:
    """Without them the search meets the same inventories and makes the same plans."""
    reduced, full = Explorer(config), Explorer(config._replace(reduced=False))
    reports = [explorer.run() for explorer in (reduced, full)]
    assert not any(report.violation for report in reports)
    assert reports[0].num_states < reports[1].num_states
    assert reports[0].outcomes.keys() == reports[1].outcomes.keys()
    assert reduced.planned() == full.planned() != set()


@pytest.mark.parametrize(
    ("config", "mutant"),
    NODE_MUTANTS,
    ids=lambda value: value.name if isinstance(value, Mutant) else "",
)
@pytest.mark.timeout(600)
def test_a_planted_mistake_is_seen(config: Config, mutant: Mutant) -> None:
    assert not explored(config)[0]
    with mutant.patch():
        report = Explorer(mutant.config(config)).run()
    assert mutant.seen_as in report.violation, str(report)
    assert report.trace
    assert sum(event.startswith("!") for event in report.trace) <= mutant.config(config).num_faults
