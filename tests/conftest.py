"""Tests that start real processes must leave nothing behind; those of tests/unit never start any."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.leaks import MARK, Census

GUARDED = ("integration", "chaos")

# How long an example takes says how busy the machine is. The same examples every time, so that a change is
# judged by what it changes; `pytest --hypothesis-profile=search tests/unit` looks for new ones.
settings.register_profile("flashrec", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, derandomize=False, max_examples=2000, print_blob=True)
settings.load_profile("flashrec")


@pytest.fixture(autouse=True)
def no_leaks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test of tests/integration or tests/chaos that leaves a process, thread, descriptor, shared memory
    or temporary file. Such tests have a temporary directory of their own, with a path short enough for sockets."""
    if not set(GUARDED) & set(request.path.parts):
        yield
        return
    tmp_path_factory.getbasetemp()  # settled before the temporary directory changes
    folder = Path(tempfile.mkdtemp(prefix="fr-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    mark = f"{os.getpid()}/{request.node.name}"
    monkeypatch.setenv(MARK, mark)
    census = Census(mark, folder)
    yield
    left = census.left()
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, "left behind: " + "; ".join(left)
