"""A reference that is shared by all chaos tests, and a folder with a short path for each job."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.reference import Reference
from chaos.scenario import Outcome, Scenario, run, verify

Play = Callable[[Scenario], Outcome]


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    with tempfile.TemporaryDirectory(prefix="flashrec-ref-") as folder, Reference(Path(folder)) as reference:
        yield reference


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path has room for a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="flashrec-c-") as path:
        yield Path(path)


@pytest.fixture
def play(folder: Path, reference: Reference) -> Play:
    """Run a scenario once; every fault must have happened, and every bit be as in the undisturbed run."""

    def played(scenario: Scenario) -> Outcome:
        outcome = run(scenario, folder)
        verify(outcome, reference)
        return outcome

    return played
