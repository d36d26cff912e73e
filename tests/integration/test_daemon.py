"""`flashrecd` as a process: how it starts and refuses to, what it tells, and whom it does not obey."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from flashrec import __version__
from flashrec.cli.client import Client
from flashrec.errors import UsageError, VersionMismatch
from flashrec.protocol import messages as msg
from flashrec.protocol.codec import decode, encode
from tests.integration.commands import (
    DEADLINE_S,
    LIGHT,
    ROOT,
    WAITING,
    daemon,
    environment,
    flashrec,
    ranks_are_there,
    script,
)
from tests.leaks import wait_until
from tests.unit.test_protocol_codec import NOISE, instances

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def run_dir() -> Path:
    """Not there yet; short enough for a socket; removed, and looked through for leaks, with TMPDIR."""
    return Path(tempfile.gettempdir()) / "run"


@pytest.fixture(autouse=True)
def clean(run_dir: Path) -> Iterator[None]:
    yield
    for path in run_dir.parent.glob("run*"):
        shutil.rmtree(path)


def refused(*args: str | Path) -> str:
    """What `flashrecd` says, on one line, when it does not start."""
    found = subprocess.run(
        [sys.executable, "-m", "flashrecd", *map(str, args)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert found.returncode == 1, found.stderr
    assert found.stdout == ""
    assert found.stderr.startswith("flashrecd: ")
    assert found.stderr.count("\n") == 1
    return found.stderr.removeprefix("flashrecd: ").strip()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# --- starting -----------------------------------------------------------------------------------------------


def test_it_starts_small_and_without_torch(run_dir: Path, tmp_path: Path) -> None:
    with daemon(run_dir) as made:
        print(f"\ndaemon: socket there after {made.start_s * 1000:.0f} ms, {made.rss_kib() / 1024:.0f} MiB")
        with made.run("--nproc-per-node", "2", script(tmp_path, WAITING), tmp_path) as job:
            ranks_are_there(tmp_path, 2)
            mapped = Path(f"/proc/{made.pid}/maps").read_text()
            assert "_zmq" in mapped or "zmq" in mapped
            assert not re.search("torch|numpy", mapped)
            assert made.rss_kib() < 60 * 1024
            (tmp_path / "go").touch()
            assert job.wait(timeout=30) == 0
        with Client(run_dir) as client:
            assert client.ask(msg.ShutDown()) == msg.Done("the daemon ends")
        assert made.process.wait(timeout=10) == 0
    assert sorted(path.name for path in run_dir.iterdir()) == ["daemon.lock", "events.jsonl", "jobs"]


def test_two_in_one_directory_and_two_in_two(run_dir: Path) -> None:
    with daemon(run_dir) as first, daemon(run_dir.with_name("run2")) as second:
        says = refused("--dir", run_dir)
        assert says == f"a daemon (pid {first.pid}) runs in {run_dir} already"
        assert first.status()["daemon"]["pid"] == first.pid
        assert second.status()["daemon"]["pid"] == second.pid


def test_after_a_killed_daemon_another_one_starts_in_its_place(run_dir: Path) -> None:
    with daemon(run_dir) as first:
        first.process.kill()
        first.process.wait()
        assert (run_dir / "control.sock").exists()
        says = flashrec("status", "--dir", run_dir)
        assert (says.returncode, says.stdout) == (1, "")
        assert says.stderr == f"flashrec: no daemon runs in {run_dir}; start one with `flashrecd`\n"
    with daemon(run_dir) as second:
        assert second.status()["job"] is None


def test_a_directory_it_cannot_use_is_refused(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o755)
    assert refused("--dir", run_dir) == f"the run directory {run_dir} is open to others; `chmod 700` it"
    assert not list(run_dir.iterdir())
    deep = run_dir / ("x" * 100)
    assert refused("--dir", deep) == f"the path of the run directory is too long for a socket: {deep}"
    (run_dir / "file").touch()
    assert refused("--dir", run_dir / "file" / "in").endswith("Not a directory")


def test_an_address_for_metrics_that_cannot_be(run_dir: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        says = refused("--dir", run_dir, "--metrics", f"127.0.0.1:{port}")
        assert says == f"cannot serve metrics on 127.0.0.1:{port}: Address already in use"
    for wrong in ("9475", "localhost:", ":9475", "localhost:0", "localhost:65536", "localhost:x"):
        found = subprocess.run(
            [sys.executable, "-m", "flashrecd", "--dir", run_dir, "--metrics", wrong],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert found.returncode == 2
        assert f"'{wrong}' is not HOST:PORT" in found.stderr
    with daemon(run_dir):  # nothing of the failures is in its way
        pass


# --- what it tells ------------------------------------------------------------------------------------------


def scrape(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_metrics(run_dir: Path, tmp_path: Path) -> None:
    port = free_port()
    with daemon(run_dir, "--metrics", f"127.0.0.1:{port}") as made:
        idle = scrape(port)
        assert set(idle) == {"flashrec_refused_messages"}
        (sample,) = idle["flashrec_refused_messages"].samples
        assert (sample.name, sample.value) == ("flashrec_refused_messages_total", 0)
        options = ("--nproc-per-node", "2", "--pull", "zmq")
        with made.run(*options, script(tmp_path, WAITING), tmp_path) as job:
            ranks_are_there(tmp_path, 2)
            found = scrape(port)
            for name, family in found.items():
                assert re.fullmatch(r"flashrec_\w+", name)
                assert family.documentation
                # What is measured says its unit; what is counted says what.
                assert name.endswith(
                    ("_seconds", "_bytes", "_ranks", "_processes", "_steps", "_messages", "_versions")
                ) or (name in ("flashrec_generation", "flashrec_restarts", "flashrec_shards_up")), name
            world = found["flashrec_world_size_ranks"].samples[0]
            assert world.value == 2
            assert world.labels == {"job": made.status()["job"]["job"]}
            assert found["flashrec_restarts"].type == "counter"
            assert found["flashrec_shards_up"].samples[0].value == 1
            assert found["flashrec_shards_waiting_versions"].type == "gauge"
            recovery = {s.name for s in found["flashrec_recovery_seconds"].samples}
            assert {f"flashrec_recovery_seconds_{part}" for part in ("bucket", "count", "sum")} <= recovery
            (tmp_path / "go").touch()
            assert job.wait(timeout=30) == 0
        assert wait_until(lambda: set(scrape(port)) == set(idle))


def test_status_before_during_and_after_a_job(run_dir: Path, tmp_path: Path) -> None:
    with daemon(run_dir) as made:
        head, rest = flashrec("status", "--dir", run_dir).stdout.splitlines()
        assert re.fullmatch(rf"flashrecd {__version__}, pid {made.pid}, up \d s", head)
        assert rest == "no job runs here"
        with made.run("--nproc-per-node", "2", script(tmp_path, WAITING), tmp_path) as job:
            pids = ranks_are_there(tmp_path, 2)
            document = made.status()
            assert document["release"] == __version__
            assert [rank["pid"] for rank in document["job"]["ranks"]] == pids
            assert document["job"]["world_size"] == 2
            assert document["job"]["recoveries"] == []
            assert document["last_job"] is None
            shown = flashrec("status", "--dir", run_dir).stdout
            assert f"job {document['job']['job']}: starting, generation 1" in shown
            for rank, pid in enumerate(pids):
                assert re.search(rf"^ +{rank} +{pid} +starting", shown, re.MULTILINE), shown
            (tmp_path / "go").touch()
            assert job.wait(timeout=30) == 0
        document = made.status()
        assert document["job"] is None
        assert document["last_job"]["outcome"]["code"] == 0
        assert "every rank ended with exit code 0" in flashrec("status", "--dir", run_dir).stdout


def test_time_outs_are_explained(run_dir: Path, tmp_path: Path) -> None:
    with (
        daemon(run_dir) as made,
        made.run("--suspect-after", "4", script(tmp_path, WAITING), tmp_path) as job,
    ):
        ranks_are_there(tmp_path, 1)
        shown = flashrec("status", "--explain-timeouts", "--dir", run_dir)
        assert shown.returncode == 0
        assert re.search(r"suspect after +4\.0 s", shown.stdout), shown.stdout
        assert re.search(r"no progress +40\.0 s", shown.stdout)
        (tmp_path / "go").touch()
        assert job.wait(timeout=30) == 0


# --- what it is asked ---------------------------------------------------------------------------------------


def test_kill_reaches_a_rank_and_nothing_else(run_dir: Path, tmp_path: Path) -> None:
    def kill(*args: str) -> tuple[int, str]:
        found = flashrec("kill", "--dir", run_dir, *args)
        return found.returncode, (found.stdout + found.stderr).strip()

    with daemon(run_dir) as made:
        assert kill("--rank", "0") == (1, "flashrec: no job runs here")
        with made.run("--nproc-per-node", "2", script(tmp_path, WAITING), tmp_path) as job:
            pids = ranks_are_there(tmp_path, 2)
            assert kill("--rank", "2") == (1, "flashrec: the job has ranks 0 to 1, not 2")
            assert kill("--rank", "-1") == (1, "flashrec: the job has ranks 0 to 1, not -1")
            code, says = kill("--rank", "0", "--signal", "HUP")
            assert code == 2
            assert "'HUP' is not one of 'KILL', 'STOP', 'TERM'" in says
            assert kill("--rank", "1", "--signal", "STOP") == (0, "sent SIGSTOP to rank 1")
            assert wait_until(lambda: Path(f"/proc/{pids[1]}/stat").read_text().split()[2] == "T")
            os.kill(pids[1], signal.SIGCONT)
            (tmp_path / "go").touch()
            assert job.wait(timeout=30) == 0
        assert [line["rank"] for line in made.events("signal")] == [1]


def test_one_job_at_a_time(run_dir: Path, tmp_path: Path) -> None:
    with daemon(run_dir) as made:
        with made.run(script(tmp_path, WAITING), tmp_path) as job:
            ranks_are_there(tmp_path, 1)
            name = made.status()["job"]["job"]
            second = flashrec("run", "--dir", run_dir, *LIGHT, script(tmp_path, WAITING), tmp_path)
            assert second.returncode == 1
            assert second.stderr == f"flashrec: job {name} runs here already\n"
            (tmp_path / "go").touch()
            assert job.wait(timeout=30) == 0
        third = flashrec("run", "--dir", run_dir, *LIGHT, script(tmp_path, WAITING), tmp_path)
        assert (third.returncode, third.stdout) == (0, "went\n")


def test_a_job_ends_with_the_command_line_that_submitted_it(run_dir: Path, tmp_path: Path) -> None:
    with daemon(run_dir) as made:
        with made.run("--nproc-per-node", "2", script(tmp_path, WAITING), tmp_path) as job:
            pids = ranks_are_there(tmp_path, 2)
            job.kill()
            assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        assert wait_until(lambda: made.status()["job"] is None)
        reason = made.status()["last_job"]["outcome"]["reason"]
        assert reason == "the command line that submitted the job is gone"


def test_a_daemon_that_is_stopped_ends_its_job(run_dir: Path, tmp_path: Path) -> None:
    with (
        daemon(run_dir) as made,
        made.run("--nproc-per-node", "2", script(tmp_path, WAITING), tmp_path) as job,
    ):
        ranks_are_there(tmp_path, 2)
        made.stop()
        _, says = job.communicate(timeout=20)
        assert job.returncode == 130
        assert re.fullmatch(r"flashrec: job \w+ ended: the daemon was stopped\n", says)


def test_another_daemon_adopts_the_ranks_of_one_that_was_killed(run_dir: Path, tmp_path: Path) -> None:
    with (
        daemon(run_dir) as made,
        made.run("--nproc-per-node", "2", script(tmp_path, WAITING), tmp_path) as job,
    ):
        pids = ranks_are_there(tmp_path, 2)
        status = made.status()["job"]
        made.process.kill()
        made.process.wait()
        with daemon(run_dir) as second:
            assert wait_until(lambda: len(second.events("adopted")) == 2, DEADLINE_S)
            assert second.events("cleaned") == []
            now = second.status()["job"]
            assert [rank["pid"] for rank in now["ranks"]] == pids
            assert (now["job"], now["status"]) == (status["job"], "starting")
            (tmp_path / "go").touch()
            out, says = job.communicate(timeout=DEADLINE_S)
            assert job.returncode == 0
            assert sorted(out.splitlines()) == ["[0]: went", "[1]: went"]
            assert re.match(r"flashrec: the daemon of job \w+ is gone; training goes on", says)
            assert f"daemon {second.pid} goes on with job {status['job']}" in says
        assert not Path(status["shm_dir"]).exists()


def test_ranks_whose_daemon_stays_away_end_by_themselves(run_dir: Path, tmp_path: Path) -> None:
    with (
        daemon(run_dir) as made,
        made.run("--nproc-per-node", "2", script(tmp_path, WAITING), tmp_path) as job,
    ):
        ranks_are_there(tmp_path, 2)
        status = made.status()["job"]
        made.process.kill()
        made.process.wait()
        (tmp_path / "go").touch()
        _, says = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 1
        assert "its ranks have ended since: how is not known" in says
        assert status["log_dir"] in says
    assert not Path(status["shm_dir"]).exists()
    for rank in range(2):
        printed = Path(status["log_dir"]) / "attempt_0" / str(rank) / "stdout.log"
        assert printed.read_text() == "went\n"


def test_an_interrupt_ends_ranks_that_have_no_daemon(run_dir: Path, tmp_path: Path) -> None:
    with (
        daemon(run_dir) as made,
        made.run("--nproc-per-node", "2", script(tmp_path, WAITING), tmp_path) as job,
    ):
        pids = ranks_are_there(tmp_path, 2)
        shared = Path(made.status()["job"]["shm_dir"])
        made.process.kill()
        made.process.wait()
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 130
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), DEADLINE_S)
    assert not shared.exists()


def test_a_daemon_ends_the_ranks_whose_command_line_went_away_meanwhile(
    run_dir: Path, tmp_path: Path
) -> None:
    with (
        daemon(run_dir) as made,
        made.run("--nproc-per-node", "2", script(tmp_path, WAITING), tmp_path) as job,
    ):
        pids = ranks_are_there(tmp_path, 2)
        shared = Path(made.status()["job"]["shm_dir"])
        for process in (made.process, job):
            process.kill()
            process.wait()
    with daemon(run_dir) as second:
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), DEADLINE_S)
        assert wait_until(lambda: not shared.exists(), DEADLINE_S)
        assert "the command line that submitted the job is gone" in str(second.events("ended"))


def test_what_ranks_killed_together_with_their_daemon_left_is_cleaned(run_dir: Path, tmp_path: Path) -> None:
    with daemon(run_dir) as made, made.run("--nproc-per-node", "2", script(tmp_path, WAITING), tmp_path):
        pids = ranks_are_there(tmp_path, 2)
        shared = Path(made.status()["job"]["shm_dir"])
        for pid in (made.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        made.process.wait()
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert shared.exists()
    with daemon(run_dir) as second:
        (line,) = second.events("cleaned")
        assert line["reason"] == f"{shared} was left behind by processes that are dead"
        assert not shared.exists()


TRAINING = """
import sys, time, pathlib, torch, flashrec
here = pathlib.Path(sys.argv[1])
flashrec.init(standby="built")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
flashrec.protect(model=model, optimizer=optimizer)
while flashrec.current_step() < 300:
    with flashrec.step():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    (here / f"rank{flashrec.rank()}").write_text(str(flashrec.current_step()))
print("done", flashrec.rank(), flush=True)
"""


def test_training_goes_on_without_its_daemon(run_dir: Path, tmp_path: Path) -> None:
    with daemon(run_dir) as made:
        command = ["--nproc-per-node", "2", "--preload", "flashrec.warm", "--standby", "1"]
        with made.run(*command, script(tmp_path, TRAINING), tmp_path) as job:
            assert wait_until(
                lambda: made.events("standby ready")[-1:] and "built" in str(made.events("standby ready")), 60
            )
            ranks_are_there(tmp_path, 2)
            status = made.status()["job"]
            made.process.kill()
            made.process.wait()
            job.wait(timeout=20)
        pids = [rank["pid"] for rank in status["ranks"]] + [standby["pid"] for standby in status["standbys"]]
        assert len(pids) == 3
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30)
        assert not Path(status["shm_dir"]).exists()
        for rank in range(2):
            folder = Path(status["log_dir"]) / "attempt_0" / str(rank)
            assert (folder / "stdout.log").read_text() == f"done {rank}\n"
            assert "the daemon is gone; training goes on unprotected" in (folder / "stderr.log").read_text()


# --- whom it does not obey ----------------------------------------------------------------------------------


def test_another_release_is_refused_by_name(run_dir: Path, tmp_path: Path) -> None:
    with daemon(run_dir) as made, Client(run_dir) as client:
        submit = a_submission(tmp_path, release="0.0.0")
        with pytest.raises(
            VersionMismatch, match=f"the daemon is flashrec {__version__}, the command line 0.0.0"
        ):
            client.ask(submit)
        assert made.status()["job"] is None


def a_submission(folder: Path, **changes: Any) -> msg.Submit:
    fields: dict[str, Any] = {
        "release": __version__, "pid": os.getpid(), "target": str(script(folder, WAITING)), "module": False,
        "args": (str(folder),), "cwd": str(folder), "umask": 0o077, "python": sys.executable,
        "env": tuple(environment().items()), "world_size": 1, "num_standbys": 0, "max_restarts": None,
        "log_dir": None, "start_method": "fork", "preload": ("flashrec.link",), "pull": "shm",
        "suspect_after_s": 3.0,
    }  # fmt: skip
    return msg.Submit(**(fields | changes))


def test_a_rank_with_another_release_of_the_library_is_refused(run_dir: Path, tmp_path: Path) -> None:
    """The job's environment has its own flashrec, as a virtual environment may."""
    other = tmp_path / "other"
    shutil.copytree(ROOT / "flashrec", other / "flashrec", ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "flashrec" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{__version__}"', '"0.0.7"'))
    with daemon(run_dir) as made, Client(run_dir) as client:
        env = tuple(environment({"PYTHONPATH": str(other)}).items())
        answer = client.ask(a_submission(tmp_path, env=env))
        assert isinstance(answer, msg.Submitted)
        ended = until_ended(client)
        assert ended.code == 1
        assert f"the daemon is flashrec {__version__}, this process 0.0.7" in ended.reason
        assert made.status()["daemon"]["refused_messages"] == 1


def until_ended(client: Client) -> msg.JobEnded:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if isinstance(message := client.receive(1), msg.JobEnded):
            return message
    raise AssertionError("the job did not end")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"world_size": 0}, "a job needs at least one rank, not 0"),
        ({"world_size": 2**60}, "at most 4096 ranks and standbys"),
        ({"num_standbys": -1}, "the number of standbys cannot be -1"),
        ({"max_restarts": -1}, "max restarts cannot be -1"),
        ({"suspect_after_s": float("nan")}, "suspect_after_s must be positive"),
        ({"start_method": "spawn"}, "no start method 'spawn'"),
        ({"pull": "http"}, "or pull 'http'"),
        ({"pid": 2**40}, "process 1099511627776, which submits a job, does not exist"),
        ({"pid": -1}, "process -1, which submits a job, does not exist"),
    ],
)
def test_a_submission_that_cannot_be_is_refused(
    run_dir: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with daemon(run_dir) as made, Client(run_dir) as client:
        with pytest.raises(UsageError, match=says):
            client.ask(a_submission(tmp_path, **changes))
        assert made.status()["job"] is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"python": "/no/such/python"}, "No such file or directory: '/no/such/python'"),
        ({"cwd": "/no/such/folder"}, "No such file or directory: '/no/such/folder'"),
        ({"env": (("A=B", "C"),)}, "illegal environment variable name"),
        ({"env": (("A", "nul\0"),)}, "embedded null byte"),
        ({"preload": ("no.such.module",)}, "ModuleNotFoundError: No module named 'no'"),
        ({"log_dir": "/proc/none"}, "No such file or directory: '/proc/none'"),
    ],
)
def test_a_job_that_cannot_start_ends_and_says_why(
    run_dir: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with daemon(run_dir) as made, Client(run_dir) as client:
        assert isinstance(client.ask(a_submission(tmp_path, **changes)), msg.Submitted)
        ended = until_ended(client)
        assert ended.code != 0
        assert says in ended.reason
        assert made.status()["job"] is None


class Stranger:
    """A socket that anybody with the right to enter the directory could open."""

    def __init__(self, run_dir: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{run_dir / 'control.sock'}")

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def answers(self, timeout_ms: int = 0) -> list[msg.Message]:
        found = []
        while self._socket.poll(timeout_ms):
            found.append(decode(self._socket.recv()))
        return found

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def harmless(message: msg.Message) -> bool:
    """Whether a stranger who may open the socket may not do this anyway: end the daemon, or signal a rank."""
    if isinstance(message, msg.SignalRank):
        return message.rank != 0
    return not isinstance(message, msg.ShutDown | msg.Submit)


FRAMES = st.one_of(
    st.lists(st.binary(max_size=100), min_size=1, max_size=4),
    NOISE.map(lambda value: [msgpack.packb(value)]),
    st.sampled_from([*get_args(msg.FROM_PROCESS), *get_args(msg.FROM_COMMAND), *get_args(msg.TO_COMMAND)])
    .flatmap(instances)
    .filter(harmless)
    .map(lambda message: [encode(message)]),
)


@st.composite
def damaged(draw: st.DrawFn) -> list[bytes]:
    frames = list(draw(FRAMES))
    data = bytearray(frames[-1])
    if data:
        data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    return [*frames[:-1], bytes(data)]


def as_text(frames: list[bytes]) -> bool:
    """Damage may turn one message into another: none that may do harm."""
    try:
        return harmless(decode(frames[0]))
    except Exception:
        return True


def test_strangers_harm_nothing(run_dir: Path, tmp_path: Path) -> None:
    with (
        daemon(run_dir) as made,
        made.run("--nproc-per-node", "2", script(tmp_path, WAITING), tmp_path) as job,
    ):
        pids = ranks_are_there(tmp_path, 2)
        stranger = Stranger(run_dir)
        num_sent = 0

        @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
        @given(FRAMES | damaged().filter(as_text))
        def send(frames: list[bytes]) -> None:
            nonlocal num_sent
            stranger.send(*frames)
            num_sent += 1

        send()
        # One whose socket speaks no ZeroMQ at all.
        for data in (b"", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(run_dir / "control.sock"))
                raw.sendall(data)
        # It answers whom it knows, as promptly as ever.
        document = made.status()
        assert document["daemon"]["refused_messages"] > num_sent / 4
        assert document["daemon"]["pid"] == made.pid
        assert [rank["pid"] for rank in document["job"]["ranks"]] == pids
        assert document["job"]["generation"] == 1
        assert made.events("internal error") == []
        answers = stranger.answers()
        assert answers
        assert {type(answer) for answer in answers} <= {msg.Refused, msg.Status, msg.Done}
        stranger.close()
        (tmp_path / "go").touch()
        out, err = job.communicate(timeout=30)
        assert (job.returncode, sorted(out.splitlines()), err) == (0, ["[0]: went", "[1]: went"], "")


def test_a_stranger_that_never_reads_fills_no_memory(run_dir: Path) -> None:
    with daemon(run_dir) as made:
        before = made.rss_kib()
        stranger = Stranger(run_dir)
        for _ in range(30_000):
            stranger.send(b"nonsense")
        with Client(run_dir) as client:  # behind them in the queue, or nearly
            assert wait_until(
                lambda: json.loads(status_of(client))["daemon"]["refused_messages"] == 30_000, 60
            )
        assert made.rss_kib() - before < 20 * 1024
        stranger.close()


def status_of(client: Client) -> str:
    answer = client.ask(msg.AskStatus())
    assert isinstance(answer, msg.Status)
    return answer.document


def test_a_message_too_large_ends_only_its_connection(run_dir: Path) -> None:
    with daemon(run_dir) as made:
        stranger = Stranger(run_dir)
        stranger.send(bytes((64 << 20) + 1))
        assert made.status()["daemon"]["refused_messages"] == 0
        stranger.close()
        assert made.rss_kib() < 60 * 1024


@pytest.mark.parametrize(
    "packet", [b"\xff" * 50, b"", msgpack.packb({"fork": 7}), msgpack.packb({"fork": "p"})]
)
def test_noise_ends_a_fork_server_and_nothing_else(packet: bytes, tmp_path: Path) -> None:
    """Only the daemon has the other end of its socket; it must not hang or fork if it hears nonsense on it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(tmp_path / "err", "wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "flashrec.forkserver", "--fd", str(theirs.fileno())],
            env=environment(),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stderr=err,
        )
        theirs.close()
        ours.settimeout(20)
        assert "ready" in msgpack.unpackb(ours.recv(1000))
        ours.send(packet)
        assert process.wait(timeout=20) in (0, 1)
        assert ours.recv(1000) == b""


def test_two_daemons_share_a_machine(run_dir: Path, tmp_path: Path) -> None:
    with daemon(run_dir) as first, daemon(run_dir.with_name("run2")) as second:
        folders = [tmp_path / "a", tmp_path / "b"]
        for folder in folders:
            folder.mkdir()
        with (
            first.run(script(tmp_path, WAITING), folders[0]) as one,
            second.run(script(tmp_path, WAITING), folders[1]) as two,
        ):
            ranks_are_there(folders[0], 1)
            ranks_are_there(folders[1], 1)
            assert first.status()["job"]["shm_dir"] != second.status()["job"]["shm_dir"]
            first.stop()
            assert one.wait(timeout=20) == 130
            assert second.status()["job"]["status"] == "starting"
            (folders[1] / "go").touch()
            assert two.wait(timeout=20) == 0
