"""README.md's script is run as written, and its commands have the options it shows."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import readme
from tests.integration.commands import DEADLINE_S, daemon
from tests.integration.node_jobs import free_port
from tests.leaks import wait_until

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


def test_script_trains_under_torchrun_as_shown(tmp_path: Path) -> None:
    (snippet,) = readme.snippets("python")
    (tmp_path / "train.py").write_text(snippet)
    (shown,) = readme.commands("torchrun")
    assert ["&"] in readme.commands("flashrecd")
    run_dir = Path(tempfile.gettempdir()) / "run"
    with daemon(run_dir):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *shown],
            cwd=tmp_path,
            env={**ENVIRONMENT, "FLASHREC_DIR": str(run_dir), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    shutil.rmtree(run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if " loss " in line]) == 40


@pytest.mark.parametrize("arguments", readme.commands("flashrec"), ids=lambda arguments: arguments[0])
def test_shown_options_exist(arguments: list[str], tmp_path: Path) -> None:
    done = run([arguments[0], "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    for option in [argument for argument in arguments if argument.startswith("--")]:
        assert option in done.stdout


def test_a_job_runs_on_several_nodes_as_shown(tmp_path: Path) -> None:
    """docs/nodes.md's commands, with addresses of this machine, fewer ranks, and a directory for each node."""
    (snippet,) = readme.snippets("python")
    (tmp_path / "train.py").write_text(snippet)
    shown = readme.commands("flashrec", readme.NODES)
    keygen, submit, status = (
        next(one for one in shown if one[0] == name) for name in ("keygen", "run", "status")
    )
    lead, join = readme.commands("flashrecd", readme.NODES)
    assert run(keygen, tmp_path).returncode == 0
    here = {
        "10.0.0.1:7400": f"127.0.0.1:{free_port()}",
        "8": "2",
        "cluster.key": str(tmp_path / "cluster.key"),
    }
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                daemon(tmp_path / name, *(here.get(one, one) for one in options), "--name", name)
            )
            for name, options in {"a": lead, "b": join, "c": join}.items()
        ]
        assert wait_until(lambda: len(nodes[0].events("node joined")) == 2, DEADLINE_S)
        arguments = [here.get(argument, argument) for argument in submit]
        done = run([arguments[0], "--dir", str(nodes[0].run_dir), *arguments[1:]], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len([line for line in done.stdout.splitlines() if " loss " in line]) == 40
        assert run([*status, "--dir", str(nodes[0].run_dir)], tmp_path).returncode == 0


@pytest.mark.parametrize(
    "arguments", readme.commands("flashrec", readme.NODES), ids=lambda arguments: arguments[0]
)
def test_options_shown_for_several_nodes_exist(arguments: list[str], tmp_path: Path) -> None:
    test_shown_options_exist(arguments, tmp_path)
