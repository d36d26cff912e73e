"""`flashrec demo` as a user runs it: short, with few faults, and what it says about itself is checked."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from flashrec.cli.demo.faults import MARKS
from flashrec.protocol.tag import PLACES

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, "-c", "from flashrec.cli import main; main()", "demo"]
SHORT = ["--ranks", "3", "--faults", "3", "--steps", "20"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}"}


def run(cwd: Path, *arguments: str, timeout_s: float = 170) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEMO, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )


@pytest.mark.parametrize(
    ("ranks", "num_faults", "steps", "standby"), [(3, 3, 20, "built"), (2, 2, 16, "none")]
)
def test_killed_ranks_change_no_bit(
    ranks: int, num_faults: int, steps: int, standby: str, tmp_path: Path
) -> None:
    size = ["--ranks", str(ranks), "--faults", str(num_faults), "--steps", str(steps)]
    done = run(tmp_path, *size, "--seed", "3", "--standby", standby, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["weights_identical"] is True
    assert found["optimizer_identical"] is True
    assert found["losses_identical"] is True
    assert found["first_difference"] is None
    assert found["failure"] is None
    assert (found["ranks"], found["steps"], found["seed"], found["standby"]) == (ranks, steps, 3, standby)
    assert found["reference_step_ms"] > 0
    assert {"step_ms", "overhead_percent"} <= found.keys()

    assert isinstance(found["unplanned"], list)  # a starved machine may make the daemon suspect a rank
    assert len(found["faults"]) == num_faults
    places = Counter()
    for fault in found["faults"]:
        assert fault["kind"] == "SIGKILL"
        assert fault["fired"] is True, "a fault that did not fire proves nothing"
        assert fault["phase"] in PLACES
        assert 0 <= fault["rank"] < ranks
        assert 0 < fault["step"] < steps
        assert list(fault["timeline"]) == [mark for mark in MARKS if mark in fault["timeline"]]
        assert {"detected", "parked", "planned", "pulled", "formed", "redone"} <= fault["timeline"].keys()
        times = [fault["timeline"][mark] for mark in ("detected", "planned", "formed", "redone")]
        assert times == sorted(times)
        assert fault["recovered_ms"] == times[-1] > 0
        assert fault["redone_steps"] in (0, 1), "no committed step is ever lost"
        places[fault["phase"] == fault["planned_phase"]] += 1
        # Whatever place was meant, each kill is told where it struck; people get to read that, too.
        assert f"rank {fault['rank']} killed in {fault['phase']}" in done.stderr
    assert places[True] >= 1, f"no fault struck where it was meant to: {found['faults']}"
    assert done.stderr.count("bit-identical") == 3


@pytest.mark.parametrize(
    ("parallel", "fault", "num_faults", "steps", "num_victims"),
    [("fsdp", "rank", 2, 18, 1), ("pp", "all-ranks", 1, 14, 4)],
)
def test_a_parallelism_survives_a_kind_of_fault(
    parallel: str, fault: str, num_faults: int, steps: int, num_victims: int, tmp_path: Path
) -> None:
    size = ["--faults", str(num_faults), "--steps", str(steps)]
    done = run(
        tmp_path, "--parallel", parallel, "--fault", fault, *size, "--seed", "1", "--json", timeout_s=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["parallel"], found["fault"], found["ranks"]) == (parallel, fault, 4)
    assert (found["passed"], found["complaints"]) == (True, [])
    assert all(found[f"{what}_identical"] for what in ("weights", "optimizer", "losses"))
    assert found["regime"] == "sealed"
    assert "is held by rank" in found["why_sealed"]
    assert found["most_committed_steps_again"] in (0, 1)
    assert len(found["faults"]) == num_faults
    for one in found["faults"]:
        assert one["fired"] is True, "a fault that did not fire proves nothing"
        assert len(set(one["ranks"])) == len(set(one["pids"])) == one["deaths_seen"] == num_victims
        assert sorted(one["phases"]) == sorted(map(str, one["ranks"]))
        assert set(one["phases"].values()) <= set(PLACES)
        assert one["resumed_step"] in (one["step"] - 1, one["step"], one["step"] + 1)
        assert one["recovered_ms"] == one["timeline"]["redone"] > 0
    assert f"{parallel} survived {num_faults * num_victims} deaths, all on record" in done.stderr
    assert done.stderr.count("bit-identical") == 3


def test_a_daemon_is_killed_and_another_goes_on(tmp_path: Path) -> None:
    done = run(tmp_path, "--parallel", "zero", "--fault", "daemon", "--faults", "1", "--json", timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["passed"], found["complaints"]) == (True, [])
    assert found["daemon"]["pid"] != found["daemon"]["new_pid"]
    assert found["daemon"]["steps_without_daemon"] > 0
    assert found["daemon"]["adopted_ms"] > 0
    (fault,) = found["faults"]
    assert (fault["fired"], fault["deaths_seen"]) == (True, 1)
    assert fault["step"] > found["daemon"]["step"]
    assert done.stderr.count("bit-identical") == 3


def test_training_without_faults(tmp_path: Path) -> None:
    """One rank may train, as long as nobody kills it."""
    done = run(tmp_path, "--ranks", "1", "--faults", "0", "--steps", "6", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert found["weights_identical"] is True
    assert found["losses_identical"] is True


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--ranks", "1"], 1, "with one rank nothing survives its death"),
        (["--steps", "20"], 1, "10 faults do not fit into 20 steps; take --steps"),
        (["--ranks", "0"], 2, "0 is not in the range"),
        (["--faults", "-1"], 2, "-1 is not in the range"),
        (["--standby", "warm"], 2, "'warm' is not one of"),
        (["--parallel", "fsdp", "--ranks", "3"], 1, "shown on 4 ranks"),
        (["--parallel", "tp", "--standby", "built"], 1, "--standby built does not go with --parallel tp"),
        (["--fault", "two-ranks", "--steps", "9"], 1, "3 faults do not fit into 9 steps; take --steps"),
        (["--fault", "fire"], 2, "'fire' is not one of"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(
    arguments: list[str], code: int, message: str, tmp_path: Path
) -> None:
    done = run(tmp_path, *arguments, timeout_s=30)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """The leak guard of tests/conftest.py looks for processes, shared memory and files afterwards."""
    with subprocess.Popen(
        [*DEMO, *SHORT, "--steps", "1000"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell's background job has SIGINT ignored, and Python leaves it at that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "killed in" in line:  # in the middle of a recovery
                break
        demo.send_signal(number)
        rest = demo.stdout.read()
        demo.wait(timeout=30)
    assert demo.returncode not in (0, -number), "it ends in order, and says that it did not finish"
    assert "Traceback" not in rest, rest
