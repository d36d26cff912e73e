"""`flashrec run` as a process: what it refuses, what it passes on, what it shows, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from flashrecd.supervise.descendants import descendants_of
from tests.integration.commands import (
    FLASHREC,
    LIGHT,
    WAITING,
    environment,
    flashrec,
    private_daemon_of,
    ranks_are_there,
    rss_kib,
    run,
    script,
    started,
)
from tests.leaks import wait_until

FAILED = re.compile(r"flashrec: job \w{6} failed: (.*)\n")


def reason(stderr: str) -> str:
    """Of the one line at the end of a failed job."""
    *_, last = stderr.splitlines(keepends=True)
    match = FAILED.fullmatch(last)
    assert match, stderr
    return match[1]


# --- what it refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothere.py"], "no such script: nothere.py"),
        (["folder"], "no such script: folder"),
        (["notpython.py"], r"notpython\.py is not a Python script: invalid syntax \(notpython\.py, line 1\)"),
        (["binary.py"], r"binary\.py is not a Python script: .*null bytes"),
        (["-m", "no.such.module"], r"no module named 'no\.such\.module'"),
        (["-m", "broken module"], "no module named 'broken module'"),
        (["--nproc-per-node", "0", "fine.py"], "a job needs at least one rank, not 0"),
        (["--nproc-per-node", "-3", "fine.py"], "a job needs at least one rank, not -3"),
        (["--nproc-per-node", "5000", "fine.py"], "a daemon takes at most 4096 ranks and standbys"),
        (["--standby", "-1", "fine.py"], "the number of standbys cannot be -1"),
        (["--max-restarts", "-1", "fine.py"], "max restarts cannot be -1"),
        (["--suspect-after", "0", "fine.py"], r"suspect_after_s must be positive, not 0\.0"),
        (["--suspect-after", "nan", "fine.py"], "suspect_after_s must be positive, not nan"),
        (["--tee", "4", "fine.py"], "--tee takes 0, 1, 2 or 3, or RANK:N pairs, not '4'"),
        (["--tee", "a:1", "fine.py"], "--tee takes .* not 'a:1'"),
        (["--tee", "", "fine.py"], "--tee takes .* not ''"),
        (["--dir", "nobody", "fine.py"], "no daemon runs in nobody; start one with `flashrecd`"),
    ],
)
def test_what_cannot_be_run_is_one_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "folder").mkdir()
    script(tmp_path, "def (", "notpython.py")
    (tmp_path / "binary.py").write_bytes(b"\x00\x01\xff\xfe")
    script(tmp_path, "", "fine.py")
    found = run(*arguments, cwd=tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert re.fullmatch(rf"flashrec: {says}\n", found.stderr), found.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stanby", "1", "x.py"], "No such option '--stanby'. Did you mean '--standby'"),
        ([], "Missing argument 'TARGET'"),
        (["--nproc-per-node", "two", "x.py"], "'two' is not a valid integer"),
        (["--start-method", "spawn", "x.py"], "'spawn' is not one of 'fork', 'fresh'"),
    ],
)
def test_a_wrong_option_is_a_usage_error(tmp_path: Path, arguments: list[str], says: str) -> None:
    found = run(*arguments, cwd=tmp_path)
    assert found.returncode == 2
    assert re.search(says, found.stderr)


def test_a_log_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = run("--log-dir", tmp_path / "file", script(tmp_path, ""))
    assert found.returncode != 0
    assert "Not a directory" in reason(found.stderr)
    assert str(tmp_path / "file") in reason(found.stderr)


def with_shared_memory_of(mebibytes: int, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """`flashrec run` in a mount namespace of its own, in which /dev/shm is that small."""
    mount = f"mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm"
    within = f'{mount} && "$@"; code=$?; ls /dev/shm; exit $code'
    command = [*FLASHREC, "run", "--standby", "0", *map(str, args)]
    found = subprocess.run(
        ["unshare", "-rm", "sh", "-c", within, "sh", *command],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unshare" in found.stderr or "mount:" in found.stderr:
        pytest.skip(f"no mount namespaces here: {found.stderr}")
    return found


def test_shared_memory_that_is_too_small(tmp_path: Path) -> None:
    found = with_shared_memory_of(2, *LIGHT, script(tmp_path, ""))
    assert (found.returncode, found.stdout) == (1, "")
    says = "/dev/shm has 2 MiB free; a job needs at least 16 MiB there, and room for its state"
    assert found.stderr == f"flashrec: {says}\n"


FILLS = """
import torch, flashrec
flashrec.init()
model = torch.nn.Linear(4, 4)
with open("/dev/shm/fill", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(1 << 16))
    except OSError:
        pass
flashrec.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
"""


def test_shared_memory_that_fills_up(tmp_path: Path) -> None:
    found = with_shared_memory_of(18, script(tmp_path, FILLS))
    assert (found.returncode, found.stdout) == (1, "fill\n")
    assert "EnvironmentFault: /dev/shm/flashrec-" in reason(found.stderr)
    assert re.search(r"is full: \d+ bytes needed, 0 free; give it more room", reason(found.stderr))


# --- how a script ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (
            "raise ValueError('boom')",
            1,
            r"rank \d failed before its first step: exit code 1: ValueError: boom",
        ),
        ("import sys; sys.exit(3)", 3, r"rank \d failed before its first step: exit code 3"),
        (
            "import sys; sys.exit('no data')",
            1,
            r"rank \d failed before its first step: exit code 1.*: no data",
        ),
        ("import os; os._exit(7)", 7, r"rank \d failed before its first step: exit code 7"),
        ("import no_such_thing", 1, r"rank \d .*: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("x = 1\nx.y", 1, r"rank \d .*: AttributeError: 'int' object has no attribute 'y'"),
        (
            "import os, sys; print('why', file=sys.stderr); os.abort()",
            1,
            r"rank \d: killed by SIGABRT.*: why.*",
        ),
    ],
    ids=["raises", "exit 3", "exit text", "os._exit", "import", "attribute", "abort"],
)
def test_why_it_failed_and_its_exit_code(tmp_path: Path, text: str, code: int, says: str) -> None:
    found = run("--nproc-per-node", "2", script(tmp_path, text))
    assert found.returncode == code, found.stderr
    assert re.fullmatch(says, reason(found.stderr)), found.stderr
    assert found.stderr.count("flashrec: ") == 1


def test_a_traceback_is_that_of_a_script_started_directly(tmp_path: Path) -> None:
    path = script(tmp_path, "def f():\n    raise ValueError('boom')\n\nf()\n")
    found = run(path)
    assert found.stderr.splitlines()[:-1] == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 4, in <module>',
        "    f()",
        f'  File "{path}", line 2, in f',
        "    raise ValueError('boom')",
        "ValueError: boom",
    ]


def test_the_rank_that_failed_first_is_named(tmp_path: Path) -> None:
    """The others fail, too, because of it; or would have gone on for ever."""
    text = "import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(9)\ntime.sleep(60)"
    found = run("--nproc-per-node", "3", script(tmp_path, text))
    assert found.returncode == 9
    assert reason(found.stderr) == "rank 2 failed before its first step: exit code 9"


def test_ranks_that_end_at_different_times(tmp_path: Path) -> None:
    text = """
import os, sys, time
rank = int(os.environ["RANK"])
time.sleep(rank * 0.2)
print(rank)
sys.exit(4 if rank == 2 else 0)
"""
    found = run("--nproc-per-node", "3", script(tmp_path, text))
    assert found.returncode == 4
    assert sorted(found.stdout.splitlines()) == ["[0]: 0", "[1]: 1", "[2]: 2"]


@pytest.mark.parametrize("budget", [0, 1])
def test_the_restart_budget(tmp_path: Path, budget: int) -> None:
    text = "import os, signal; print('here', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    found = run("--max-restarts", str(budget), script(tmp_path, text))
    assert found.returncode == 1
    assert reason(found.stderr) == f"rank 0: killed by SIGKILL; the restart budget of {budget} is spent"
    assert found.stdout == "here\n" * (budget + 1)


def test_without_a_budget_a_world_that_never_starts_is_given_up(tmp_path: Path) -> None:
    found = run(script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert found.returncode == 1
    says = reason(found.stderr)
    assert says == "rank 0: killed by SIGKILL; the world was started 4 times and never got past its start"


@pytest.mark.parametrize("method", ["fork", "fresh"])
def test_the_environment_and_arguments_a_script_sees(tmp_path: Path, method: str) -> None:
    text = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS"]
print(json.dumps([[os.environ.get(name) for name in names], sys.argv[1:], __name__, __file__, os.getcwd(),
                  sys.path[0], "torch" in sys.modules, sys.stdin.read()]))
"""
    path = script(tmp_path, text)
    found = run(
        "--nproc-per-node", "2", "--start-method", method, path, "--lr", "1", "-m", "--", "x", cwd=tmp_path
    )
    assert (found.returncode, found.stderr) == (0, "")
    lines = sorted(found.stdout.splitlines())
    for rank, line in enumerate(lines):
        seen = f'[["{rank}", "{rank}", "2", "2", "0", "1"], ["--lr", "1", "-m", "--", "x"], "__main__", '
        seen += f'"{path}", "{tmp_path}", "{tmp_path}", false, ""]'
        assert line == f"[{rank}]: {seen}"
    assert len(lines) == 2


def test_a_module(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    found = run("-m", "pkg.train", "--lr", "1", cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == "__main__ pkg.train ['--lr', '1']\n"


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    """Paths, variables and arguments are bytes to the system, and need not be UTF-8."""
    path = tmp_path / os.fsdecode(b"scr\xffipt.py")
    path.write_text("import os, sys; os.write(1, os.fsencode(sys.argv[1]) + os.environb[b'ODD'] + b'\\n')")
    found = flashrec("run", *LIGHT, path, os.fsdecode(b"a\xfe"), env={"ODD": os.fsdecode(b"b\xfd")})
    assert (found.returncode, found.stderr) == (0, "")
    assert os.fsencode(found.stdout) == b"a\xfeb\xfd\n"


# --- how a recovery looks from outside ----------------------------------------------------------------------

DISAGREES = """
import os, torch, flashrec
flashrec.init()
model = torch.nn.Linear(4, 4 + int(os.environ["RANK"]))
everywhere = torch.distributed.group.WORLD
flashrec.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), replicated_over=everywhere)
"""
STUMBLES = """
import os, sys, signal, torch, flashrec
flashrec.init()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
flashrec.protect(model=model, optimizer=optimizer)
mark = os.path.join(sys.argv[1], "stumbled")
while flashrec.current_step() < 8:
    with flashrec.step():
        model(torch.ones(1, 4)).sum().backward()
        if flashrec.current_step() == 5 and flashrec.rank() == 1:
            if sys.argv[2] == "always":
                raise ValueError("a poison batch")
            if not os.path.exists(mark):
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
print("done")
"""


def test_ranks_that_disagree_about_the_state_are_named_with_the_tensor() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = flashrec("run", "--standby", "0", "--nproc-per-node", "2", script(Path(folder), DISAGREES))
    assert found.returncode == 1
    says = r"rank 0 and rank 1 disagree about the layout of the state: of what is alike on ranks \[0, 1\], tensor 0 is "
    says += r"'model\.weight' \(float32, shape \[(\d), 4\]\) in rank (\d), "
    says += r"'model\.weight' \(float32, shape \[(\d), 4\]\) in rank (\d)"
    match = re.fullmatch(says, reason(found.stderr))
    assert match, found.stderr
    assert {int(match[2]): int(match[1]), int(match[4]): int(match[3])} == {0: 4, 1: 5}


def test_a_recovery_is_shown_in_two_lines(tmp_path: Path) -> None:
    found = flashrec("run", "--nproc-per-node", "2", script(tmp_path, STUMBLES), tmp_path, "once")
    assert found.returncode == 0, found.stderr
    assert sorted(found.stdout.splitlines()) == ["[0]: done", "[1]: done"]
    first, second = found.stderr.splitlines()
    assert first == "flashrec: recovering: generation 1: rank 1 is lost (killed by SIGKILL)"
    says = r"flashrec: recovered \(step 5\): the next step was committed on all ranks after \d+ ms"
    assert re.fullmatch(says, second)


def test_a_step_that_always_fails_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    found = flashrec("run", "--nproc-per-node", "2", script(tmp_path, STUMBLES), tmp_path, "always")
    assert found.returncode == 1
    assert reason(found.stderr) == (
        "step 5 failed 4 times; given up. rank 1 failed first: exit code 1: ValueError: a poison batch"
    )
    assert (
        found.stderr.count("ValueError: a poison batch") == 4 + 4 + 1
    )  # tracebacks, recoveries, the last line


def test_a_long_temporary_directory(tmp_path: Path) -> None:
    """Longer than the path of a socket may be."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    found = flashrec("run", *LIGHT, script(tmp_path, "print('fine')"), env={"TMPDIR": str(long)})
    assert (found.returncode, found.stdout, found.stderr) == (0, "fine\n", "")


# --- what it shows ------------------------------------------------------------------------------------------

SPEAKS = """
import os, sys
rank = os.environ["RANK"]
print(f"out {rank}", flush=True)
print(f"err {rank}", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize(
    ("tee", "out", "err"),
    [
        ("0", [], []),
        ("1", [0, 1], []),
        ("2", [], [0, 1]),
        ("3", [0, 1], [0, 1]),
        ("0:1,1:2", [0], [1]),
        ("1:3", [1], [1]),
        ("3,0:0", [1], [1]),
    ],
)
def test_tee_chooses_what_is_shown_and_the_log_has_all(
    tmp_path: Path, tee: str, out: list[int], err: list[int]
) -> None:
    logs = tmp_path / "logs"
    found = run("--nproc-per-node", "2", "--tee", tee, "--log-dir", logs, script(tmp_path, SPEAKS))
    assert found.returncode == 0
    assert sorted(found.stdout.splitlines()) == [f"[{rank}]: out {rank}" for rank in out]
    assert sorted(found.stderr.splitlines()) == [f"[{rank}]: err {rank}" for rank in err]
    (job,) = logs.iterdir()
    files = {str(path.relative_to(job)): path.read_text() for path in job.rglob("*.log")}
    forkserver = files.pop("forkserver.log")
    assert forkserver == ""
    assert files == {
        f"attempt_0/{rank}/{stream}.log": f"{stream[3:]} {rank}\n"
        for rank in range(2)
        for stream in ("stdout", "stderr")
    }


def test_output_is_complete_and_in_order_and_fills_no_memory(tmp_path: Path) -> None:
    """50,000 lines of two ranks, 11 MB, while nobody reads for a while: it stays in the files."""
    text = """
import os, pathlib, sys
for number in range(25_000):
    print(number, "x" * 200)
print("the last one has no newline", end="")
sys.stdout.flush()
(pathlib.Path(sys.argv[1]) / os.environ["RANK"]).touch()
"""
    path = script(tmp_path, text)
    with started("run", *LIGHT, "--standby", "0", "--nproc-per-node", "2", path, tmp_path) as job:
        assert wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), 30)
        pid = private_daemon_of(job)
        time.sleep(0.5)  # for whatever would pile up to do so
        peak = rss_kib(pid), rss_kib(job.pid)
        assert job.poll() is None
        assert job.stdout is not None
        out = job.stdout.read()
        assert job.wait(timeout=30) == 0
    assert max(peak) < 75 * 1024, peak
    for rank in range(2):
        lines = [line[5:] for line in out.splitlines() if line.startswith(f"[{rank}]: ")]
        assert lines == [f"{n} {'x' * 200}" for n in range(25_000)] + ["the last one has no newline"]
    assert len(out.splitlines()) == 50_002


def test_lines_are_shown_as_they_come(tmp_path: Path) -> None:
    path = script(tmp_path, WAITING.replace("while", "print('here', flush=True)\nwhile", 1))
    with started("run", *LIGHT, "--standby", "0", path, tmp_path) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "here\n"
        assert job.poll() is None
        (tmp_path / "go").touch()
        assert job.stdout.read() == "went\n"
        assert job.wait(timeout=20) == 0


def test_a_reader_that_goes_away_ends_the_job(tmp_path: Path) -> None:
    """As in `flashrec run ... | head`."""
    path = script(tmp_path, "while True:\n    print('x' * 1000)")
    with started("run", *LIGHT, "--standby", "0", path) as job:
        assert job.stdout is not None
        job.stdout.readline()
        job.stdout.close()
        assert job.wait(timeout=20) == 1
        assert job.stderr is not None
        assert "Traceback" not in job.stderr.read()


# --- how it is ended ----------------------------------------------------------------------------------------

POLITE = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
def bye(number, frame):
    (here / f"asked{os.environ['RANK']}").write_text(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, bye)
(here / f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
while True:
    time.sleep(0.01)
"""
DEAF = POLITE.replace("signal.signal(signal.SIGTERM, bye)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")


def test_interrupted_once_it_ends_politely(tmp_path: Path) -> None:
    with started("run", *LIGHT, "--nproc-per-node", "2", script(tmp_path, POLITE), tmp_path) as job:
        ranks_are_there(tmp_path, 2)
        began = time.monotonic()
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=20)
        print(f"\ninterrupted: ended after {(time.monotonic() - began) * 1000:.0f} ms")
    assert job.returncode == 130
    assert [(tmp_path / f"asked{rank}").read_text() for rank in range(2)] == ["SIGTERM"] * 2
    first, second = err.splitlines()
    assert first == "flashrec: ending the job; once more to end it at once"
    assert re.fullmatch(r"flashrec: job \w{6} ended: it was interrupted", second)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_twice_it_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with started("run", *LIGHT, "--nproc-per-node", "2", script(tmp_path, DEAF), tmp_path) as job:
        pids = ranks_are_there(tmp_path, 2)
        job.send_signal(number)
        assert job.stderr is not None
        assert "once more" in job.stderr.readline()
        time.sleep(0.3)
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        job.send_signal(number)
        assert job.wait(timeout=10) == 130


def test_interrupted_while_nobody_reads_what_it_shows(tmp_path: Path) -> None:
    path = script(tmp_path, WAITING.replace("while", "sys.stdout.write('x\\n' * 200_000)\nwhile", 1))
    with started("run", *LIGHT, "--standby", "0", path, tmp_path) as job:
        (pid,) = ranks_are_there(tmp_path, 1)
        time.sleep(0.3)
        job.send_signal(signal.SIGINT)
        assert wait_until(lambda: not Path(f"/proc/{pid}").exists())
        out, _ = job.communicate(timeout=20)
        assert job.returncode == 130
        assert out == "x\n" * 200_000


@pytest.mark.parametrize("who", ["command line", "daemon"])
def test_whoever_is_killed_nothing_is_left(tmp_path: Path, who: str) -> None:
    """What "nothing" is, the guard of these tests knows: processes, shared memory, the temporary directory."""
    text = WAITING.replace("while", "import subprocess; subprocess.Popen(['sleep', '600'])\nwhile", 1)
    with started("run", *LIGHT, "--nproc-per-node", "2", script(tmp_path, text), tmp_path) as job:
        pids = ranks_are_there(tmp_path, 2)
        everybody = [*descendants_of(job.pid), *pids]
        assert len(everybody) >= 6  # daemon, fork server, two ranks and what they started
        daemon = private_daemon_of(job)
        os.kill(daemon if who == "daemon" else job.pid, signal.SIGKILL)
        _, err = job.communicate(timeout=20)
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in everybody))
    if who == "daemon":
        assert job.returncode == 1
        says = r"flashrec: the daemon of job \w{6} is gone, and the job with it \(SIGKILL\)\n"
        assert re.fullmatch(says, err), err


def test_what_a_script_leaves_behind_ends_with_the_job(tmp_path: Path) -> None:
    text = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid)
"""
    found = run(script(tmp_path, text))
    assert found.returncode == 0
    assert not Path(f"/proc/{found.stdout.strip()}").exists()


def test_standbys_are_no_trouble_to_a_script_that_never_uses_flashrec(tmp_path: Path) -> None:
    found = run("--nproc-per-node", "2", script(tmp_path, SPEAKS), standby=2)
    assert found.returncode == 0
    assert sorted(found.stdout.splitlines()) == ["[0]: out 0", "[1]: out 1"]


def test_events_are_shown_when_asked_for(tmp_path: Path) -> None:
    found = run("--events", script(tmp_path, "print('x')"))
    assert found.stdout == "x\n"
    lines = found.stderr.splitlines()
    assert all(line.startswith("flashrec: ") for line in lines)
    assert any("world starting" in line for line in lines)
    assert "ended" in lines[-1]


def test_help_names_every_option_and_its_default(tmp_path: Path) -> None:
    found = subprocess.run(
        [*FLASHREC, "run", "--help"], env=environment(), capture_output=True, text=True, timeout=30
    )
    assert found.returncode == 0
    for option in ("--nproc-per-node", "--standby", "--max-restarts", "--log-dir", "--tee", "--preload"):
        assert option in found.stdout
