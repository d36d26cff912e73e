"""The demo's two programs: the reference, in plain torch under torchrun, gives the same bits each time, and the
training under flashrec gives those bits, too, whatever the parallelism."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import recipe
from tests.integration.commands import flashrec

DEMO = Path(recipe.__file__).parent
RANKS = 2
TINY = ["--width", "32", "--layers", "2", "--batch", "1", "--epoch-steps", "3", "--steps", "7"]


def run_reference(out: Path, poisoned: Path, *arguments: str, ranks: int = RANKS) -> list[dict[str, object]]:
    """Each rank's outcome, of a run in which importing flashrec would fail."""
    poisoned.mkdir(exist_ok=True)
    (poisoned / "flashrec.py").write_text("raise AssertionError('the reference imported flashrec')\n")
    # Paths and names only: whatever else a caller's environment holds must not matter.
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(poisoned), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(DEMO / "reference.py"), "--out", str(out), *TINY, *arguments]
    done = subprocess.run(
        [*launcher, *script], env=environment, cwd=poisoned, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return outcomes(out, ranks)


def outcomes(out: Path, ranks: int) -> list[dict[str, object]]:
    return [json.loads((out / f"outcome.r{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("reference")
    return run_reference(folder / "out", folder / "poisoned", "--seed", "5")


def test_two_runs_are_bit_identical(first_run: list[dict[str, object]], tmp_path: Path) -> None:
    again = run_reference(tmp_path / "out", tmp_path / "poisoned", "--seed", "5")
    for before, after in zip(first_run, again, strict=True):
        assert before["tensors"] == after["tensors"]
        assert before["losses"] == after["losses"]
        assert before["corpus_sha256"] == after["corpus_sha256"]


def test_a_different_seed_gives_different_bits(first_run: list[dict[str, object]], tmp_path: Path) -> None:
    other = run_reference(tmp_path / "out", tmp_path / "poisoned", "--seed", "6")
    assert first_run[0]["losses"] != other[0]["losses"]
    assert first_run[0]["tensors"] != other[0]["tensors"]


def test_ranks_agree_on_state_and_differ_in_data(first_run: list[dict[str, object]]) -> None:
    assert first_run[0]["tensors"] == first_run[1]["tensors"]
    assert first_run[0]["losses"] != first_run[1]["losses"]
    assert [len(outcome["losses"]) for outcome in first_run] == [7, 7]


def test_training_under_flashrec_is_that_of_the_reference(tmp_path: Path) -> None:
    arguments = ("--parallel", "pp+fsdp", "--tied")
    plain = run_reference(tmp_path / "plain", tmp_path / "poisoned", *arguments, ranks=4)
    script = [DEMO / "train.py", "--out", tmp_path / "ours", *TINY, *arguments]
    done = flashrec("run", "--nproc-per-node", "4", "--standby", "0", *script)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = outcomes(tmp_path / "ours", 4)
    assert [len(outcome["losses"]) for outcome in ours] == [0, 7, 0, 7]  # the last stages have them
    for mine, theirs in zip(ours, plain, strict=True):
        assert {**mine, "step_ms": None} == {**theirs, "step_ms": None}
