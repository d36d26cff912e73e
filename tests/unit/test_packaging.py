"""pyproject.toml and constraints.txt tell the same story, and what is run as a script can be."""

import importlib
import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


def test_lower_bounds_are_versions_that_were_run() -> None:
    requirements = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    for requirement in requirements:
        name, bound = requirement.split(">=")
        pinned = pins()[normal(name)]
        assert pinned == bound or pinned.startswith(f"{bound}."), requirement


def test_torch_is_pinned_to_what_its_private_names_were_checked_on() -> None:
    assert pins()["torch"] == "2.13.0"


def test_ci_runs_what_a_person_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


@pytest.mark.parametrize(
    "module",
    sorted(
        f"{path.parent.name}.{path.stem}"
        for part in ("benchmarks", "chaos")
        for path in (ROOT / part).glob("*.py")
    ),
)
def test_every_script_can_be_imported(module: str) -> None:
    importlib.import_module(module)
