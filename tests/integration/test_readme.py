"""README.md's script is run as written, and its commands have the options it shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import readme

FLASHREC = [sys.executable, "-c", "import sys; from flashrec.cli import main; sys.exit(main())"]
ENVIRONMENT = {"PATH": os.defpath, "PYTHONPATH": f"{readme.ROOT}:{readme.ROOT / 'daemon'}"}


def run(arguments: list[str], cwd: Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FLASHREC, *arguments], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s
    )


def test_script_trains_as_shown(tmp_path: Path) -> None:
    (snippet,) = readme.snippets("python")
    (tmp_path / "train.py").write_text(snippet)
    (shown,) = [arguments for arguments in readme.commands("flashrec") if arguments[0] == "run"]
    done = run(shown, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if " loss " in line]
    assert len(losses) == 40
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("arguments", readme.commands("flashrec"), ids=lambda arguments: arguments[0])
def test_shown_options_exist(arguments: list[str], tmp_path: Path) -> None:
    done = run([arguments[0], "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    for option in [argument for argument in arguments if argument.startswith("--")]:
        assert option in done.stdout
