"""Both state machines together: all interleavings of a small world, and what planted mistakes do to it."""

import functools

import pytest

from tests.exploration.explore import Explorer
from tests.exploration.model import Config, Regime
from tests.exploration.mutants import FULL_MUTANTS, MUTANTS, SEALED_MUTANTS, Mutant

SMALL = Config(num_ranks=2, steps=2, num_faults=1)
SEALED = SMALL._replace(regime=Regime.SEALED, private_slots=3)
FULL = SMALL._replace(steps=3, full_every=1, all_die=True)
ALIKE = ((0, 1),)


def explore(capsys: pytest.CaptureFixture[str], config: Config) -> Explorer:
    explorer = Explorer(config)
    report = explorer.run()
    with capsys.disabled():
        print(f"\n  {report}", end=" ")
    assert not report.violation, str(report)
    assert report.outcomes[0] > 1
    return explorer


@pytest.mark.timeout(600)
def test_every_interleaving_of_three_ranks_and_two_faults(capsys: pytest.CaptureFixture[str]) -> None:
    explore(capsys, Config(num_ranks=3, steps=2, num_faults=2))


@pytest.mark.parametrize(
    "config",
    [
        Config(num_ranks=1, steps=2, num_faults=3),
        Config(num_ranks=2, steps=3, num_faults=2),
        Config(num_ranks=3, steps=1, num_faults=1, num_standbys=1),
        Config(num_ranks=2, steps=1, num_faults=2, num_standbys=1),
    ],
    ids=str,
)
@pytest.mark.timeout(600)
def test_every_interleaving_of_other_small_worlds(capsys: pytest.CaptureFixture[str], config: Config) -> None:
    explore(capsys, config)


@pytest.mark.parametrize(
    "config",
    [
        SEALED._replace(num_faults=2, shared=True),
        SEALED._replace(num_faults=2, communicates=True, sets=ALIKE, from_start=False),
        SEALED._replace(num_faults=2, damages=True, from_start=False),
        SEALED._replace(num_ranks=3),
        SEALED._replace(num_ranks=3, steps=1, communicates=True, sets=((0,), (1, 2)), from_start=False),
        SEALED._replace(steps=3, communicates=True, regime=Regime.SWITCHING),
    ],
    ids=str,
)
@pytest.mark.timeout(600)
def test_every_interleaving_of_sealing_worlds(capsys: pytest.CaptureFixture[str], config: Config) -> None:
    explore(capsys, config)


@pytest.mark.parametrize(
    "config",
    [
        FULL._replace(steps=2, num_faults=2, full_fails=True),
        FULL._replace(steps=5, full_every=2, full_fails=True),
        FULL._replace(num_ranks=3, from_start=False),
    ],
    ids=str,
)
@pytest.mark.timeout(600)
def test_every_interleaving_of_worlds_that_seal_full_versions(
    capsys: pytest.CaptureFixture[str], config: Config
) -> None:
    """Whatever dies once a full version's gate has passed, the job goes on, from a version that is complete."""
    explore(capsys, config)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        SMALL._replace(steps=1, num_faults=2),
        SMALL._replace(num_ranks=3, steps=1, from_start=False),
        SMALL._replace(steps=1, num_standbys=1),
        FULL._replace(steps=2, full_fails=True, from_start=False),
        SEALED._replace(shared=True),
        SEALED._replace(steps=1, num_faults=2, from_start=False),
        SEALED._replace(communicates=True, sets=ALIKE, from_start=False),
        SEALED._replace(communicates=True, regime=Regime.SWITCHING, from_start=False),
    ],
    ids=str,
)
def test_the_reductions_lose_no_situation(config: Config) -> None:
    """Without them the search meets the same inventories, makes the same plans, and ends in the same ways."""
    reduced, full = Explorer(config), Explorer(config._replace(reduced=False))
    reports = [explorer.run() for explorer in (reduced, full)]
    assert not any(report.violation for report in reports)
    assert reports[0].num_states < reports[1].num_states
    assert reports[0].outcomes == reports[1].outcomes
    assert reduced.planned() == full.planned() != set()


@functools.cache
def is_sound(config: Config) -> bool:
    return not Explorer(config).run().violation


@pytest.mark.parametrize(
    ("config", "mutant"),
    [
        *((SMALL._replace(num_ranks=3, steps=1), mutant) for mutant in MUTANTS),
        *((SEALED, mutant) for mutant in SEALED_MUTANTS),
        *((FULL._replace(steps=4), mutant) for mutant in FULL_MUTANTS),
    ],
    ids=lambda value: value.name if isinstance(value, Mutant) else value.regime,
)
def test_a_planted_mistake_is_seen(config: Config, mutant: Mutant) -> None:
    assert is_sound(config)
    with mutant.patch():
        report = Explorer(mutant.config(config)).run()
    assert mutant.seen_as in report.violation, str(report)
    assert report.trace
    assert sum(event.startswith("!") for event in report.trace) <= config.num_faults
