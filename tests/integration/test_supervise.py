"""Supervision of real processes: how they start, that their end is noticed, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from flashrec.errors import EnvironmentFault, UsageError
from flashrec.prctl import is_subreaper
from flashrec.protocol.spawn import ProcSpec
from flashrecd.supervise import ForkRefused, ForkServerGone, Launch, LogLayout, Supervisor, Tail, processes
from flashrecd.supervise.descendants import (
    children_of,
    descendants_of,
    process_stat,
)

ROOT = Path(__file__).parents[2]
ENV = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "daemon", Path(__file__).parent])),
}
SLEEP = "import time; time.sleep(600)"


class Bench:
    """A supervisor, one launch, and the exits it reported."""

    def __init__(self, folder: Path, **launch: object) -> None:
        self.folder = folder
        self.exits: dict[str, tuple[int | None, int | None]] = {}
        self.exited_at: dict[str, float] = {}
        self._changed = asyncio.Event()
        self.supervisor = Supervisor(self._on_exit)
        options: dict[str, object] = {
            "name": "job",
            "python": sys.executable,
            "env": ENV,
            "cwd": str(folder),
            "preload": (),
            "log_path": folder / "forkserver.log",
        }
        self.launch = Launch(**(options | launch))  # type: ignore[arg-type]

    def _on_exit(self, proc: str, returncode: int | None, number: int | None) -> None:
        self.exited_at[proc] = time.monotonic()
        assert proc not in self.exits
        self.exits[proc] = (returncode, number)
        self._changed.set()

    def spec(self, proc: str, code: str, **fields: object) -> ProcSpec:
        options: dict[str, object] = {
            "proc": proc,
            "entry": "supervised:run_code",
            "stdout_path": str(self.folder / f"{proc}.out"),
            "stderr_path": str(self.folder / f"{proc}.err"),
            "cwd": str(self.folder),
            "program": {"code": code},
        }
        return ProcSpec(**(options | fields))  # type: ignore[arg-type]

    async def spawn(self, proc: str, code: str, *, fresh: bool = False, **fields: object) -> int:
        return await self.supervisor.spawn(self.spec(proc, code, **fields), self.launch, fresh=fresh)

    async def exited(self, proc: str) -> tuple[int | None, int | None]:
        async with asyncio.timeout(20):
            while proc not in self.exits:
                self._changed.clear()
                await self._changed.wait()
        return self.exits[proc]

    def out(self, proc: str) -> str:
        return (self.folder / f"{proc}.out").read_text()

    def err(self, proc: str) -> str:
        return (self.folder / f"{proc}.err").read_text()

    async def appears(self, name: str) -> str:
        """Waits until a process has put a file there (by renaming, so complete)."""
        path = self.folder / name
        await until(path.exists)
        return path.read_text()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def put(name: str, expression: str) -> str:
    """Code that makes the file that `Bench.appears` waits for."""
    return f"import os; open('{name}.new', 'w').write(str({expression})); os.rename('{name}.new', '{name}')\n"


def is_gone(pid: int) -> bool:
    return process_stat(pid) is None


def run(folder: Path, test: Callable[[Bench], Awaitable[None]], **launch: object) -> None:
    """`test` with a supervisor that must leave no process, descriptor or thread."""

    async def main() -> None:
        before = leftovers()
        async with bench(folder, **launch) as made:
            await test(made)
        assert leftovers() == before
        assert is_subreaper() is False

    asyncio.run(main())


@contextlib.asynccontextmanager
async def bench(folder: Path, **launch: object) -> AsyncIterator[Bench]:
    made = Bench(folder, **launch)
    try:
        yield made
    finally:
        assert await made.supervisor.shutdown(0) == []


def leftovers() -> tuple[list[int], list[str], int]:
    def target(fd: str) -> str:
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists them
            return os.readlink(f"/proc/self/fd/{fd}")
        return "gone"

    fds = sorted(target(fd) for fd in os.listdir("/proc/self/fd"))
    return children_of(os.getpid()), fds, threading.active_count()


@pytest.fixture(params=["forked", "fresh"])
def fresh(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "fresh")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", (0, None)),
        ("code = 3", (3, None)),
        ("raise SystemExit", (0, None)),
        ("raise SystemExit(7)", (7, None)),
        ("raise SystemExit('a reason')", (1, None)),
        ("1 / 0", (1, None)),
        ("class Odd(BaseException): pass\nraise Odd", (1, None)),
        ("import os; os._exit(9)", (9, None)),
        ("import os; os.kill(os.getpid(), 15)", (None, signal.SIGTERM)),
        ("import os; os.kill(os.getpid(), 2)", (None, signal.SIGINT)),
        ("import os; os.abort()", (None, signal.SIGABRT)),
        ("import sys, atexit; atexit.register(print, 'finalized'); sys.exit(4)", (4, None)),
    ],
)
def test_exit_codes_and_signals(
    tmp_path: Path, fresh: bool, code: str, expected: tuple[int | None, int | None]
) -> None:
    async def test(bench: Bench) -> None:
        pid = await bench.spawn("rank0", code, fresh=fresh)
        assert await bench.exited("rank0") == expected
        assert is_gone(pid)
        assert bench.supervisor.pids == {}
        err = bench.err("rank0")
        if code == "1 / 0":
            assert err.endswith("ZeroDivisionError: division by zero\n")
            assert 'File "<script>", line 1' in err
            assert "forkserver" not in err  # the frames are the user's
        elif "a reason" in code:
            assert err == "a reason\n"
        elif "Odd" in code:
            assert "Odd" in err
        elif "KeyboardInterrupt" not in err:
            assert err == ""
        if "atexit" in code:
            assert bench.out("rank0") == "finalized\n"

    run(tmp_path, test)


def test_the_end_is_noticed_at_once(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.spawn("rank0", put("ready", "1") + SLEEP)
        await bench.appears("ready")
        started = time.monotonic()
        assert bench.supervisor.signal("rank0", signal.SIGKILL)
        assert await bench.exited("rank0") == (None, signal.SIGKILL)
        # No timer is involved: a second means that something was polled, or lost.
        assert bench.exited_at["rank0"] - started < 1
        assert bench.supervisor.signal("rank0", signal.SIGKILL) is False
        assert bench.supervisor.kill_group("rank0") is False

    run(tmp_path, test)


def test_a_stopped_process_can_be_killed(tmp_path: Path, fresh: bool) -> None:
    async def test(bench: Bench) -> None:
        pid = await bench.spawn("rank0", put("ready", "1") + SLEEP, fresh=fresh)
        await bench.appears("ready")
        bench.supervisor.signal("rank0", signal.SIGSTOP)
        await until(lambda: (stat := process_stat(pid)) is not None and stat.state == "T")
        assert bench.exits == {}
        bench.supervisor.kill_group("rank0")
        assert await bench.exited("rank0") == (None, signal.SIGKILL)

    run(tmp_path, test)


FAMILY = """
import os, subprocess, sys, time
def fork_off(body):
    if os.fork() == 0:
        try: body()
        finally: os._exit(0)
def stay(name, session=False):
    if session: os.setsid()
    name = spec.proc + name
    open(f"{name}.new", "w").write(str(os.getpid())); os.rename(f"{name}.new", name)
    time.sleep(600)
fork_off(lambda: stay("child"))                                       # in the rank's own group
fork_off(lambda: stay("leader", session=True))                        # in a session of its own
def twice():
    os.setsid()
    fork_off(lambda: stay("daemonized", session=True))                # its parent ends at once
fork_off(twice); os.wait()
def keeper():
    fork_off(lambda: stay("below", session=True))                     # a grandchild with a living parent
    stay("keeper", session=True)
fork_off(keeper)
subprocess.Popen([sys.executable, "-c", "import sys, time, os; os.setsid(); name = sys.argv[1]; "
    "open(name + '.new', 'w').write(str(os.getpid())); os.rename(name + '.new', name); time.sleep(600)",
    spec.proc + "exec"])
"""
MEMBERS = ("child", "leader", "daemonized", "below", "keeper", "exec")


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_descendants_are_gone_after_a_processs_death(
    tmp_path: Path, fresh: bool, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_LATE_SWEEP_S", 600.0)  # the second look must not be what finds them

    async def test(bench: Bench) -> None:
        code = FAMILY + "\nwhile not os.path.exists('end'): time.sleep(0.005)\nos._exit(0)"
        pid = await bench.spawn("rank0", code, fresh=fresh)
        other = await bench.spawn("rank1", FAMILY + SLEEP)
        family = [int(await bench.appears(f"rank0{name}")) for name in MEMBERS]
        abandoned = int(await bench.appears("rank1daemonized"))
        assert set(family) <= set(descendants_of(pid))
        if end == "killed":
            bench.supervisor.signal("rank0", signal.SIGKILL)
        else:
            (tmp_path / "end").touch()
        await bench.exited("rank0")
        await until(lambda: all(is_gone(member) for member in family))
        assert await bench.supervisor.settled(0)
        # What another, living rank has abandoned is that rank's own business.
        assert not is_gone(abandoned)
        assert abandoned in children_of(other)
        assert bench.supervisor.pids == {"rank1": other}

    run(tmp_path, test)


def test_own_children_and_programs_are_left_alone(tmp_path: Path) -> None:
    earlier = subprocess.Popen(["sleep", "600"])

    async def test(bench: Bench) -> None:
        program = bench.supervisor.start_program("shards", ["sleep", "600"], env=ENV, cwd="/")
        await bench.spawn("rank0", "pass")
        await bench.exited("rank0")
        assert await bench.supervisor.settled(10)
        assert earlier.poll() is None
        assert not is_gone(program)
        assert bench.supervisor.pids == {"shards": program}
        bench.supervisor.kill_group("shards")
        assert await bench.exited("shards") == (None, signal.SIGKILL)

    try:
        run(tmp_path, test)
        assert earlier.poll() is None
    finally:
        earlier.kill()
        earlier.wait()


LOOK = """
import json, os, signal, sys, threading
fds = {}
for fd in os.listdir("/proc/self/fd"):
    try: fds[fd] = os.readlink("/proc/self/fd/" + fd)
    except FileNotFoundError: pass
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "pid": os.getpid(), "session": os.getsid(0), "group": os.getpgid(0), "parent": os.getppid(), "fds": fds,
    "blocked": int(status["SigBlk"], 16), "ignored": int(status["SigIgn"], 16),
    "caught": int(status["SigCgt"], 16), "threads": threading.active_count(), "name": status["Name"].strip(),
    "cwd": os.getcwd(), "rank": os.environ.get("RANK"), "blas": os.environ.get("OPENBLAS_NUM_THREADS"),
    "path": sys.path, "stdin": sys.stdin.read(),
    "interrupt": signal.getsignal(2) is signal.default_int_handler,
}))
"""


def test_what_a_process_inherits(tmp_path: Path, fresh: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    lent = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(lent, True)  # a careless library in the daemon

    async def test(bench: Bench) -> None:
        await bench.spawn(
            "a-rather-long-name", LOOK, fresh=fresh, env={"RANK": "3"}, cwd=str(tmp_path / "elsewhere")
        )
        assert await bench.exited("a-rather-long-name") == (0, None), bench.err("a-rather-long-name")
        seen = json.loads(bench.out("a-rather-long-name"))
        assert seen["session"] == seen["group"] == seen["pid"]
        assert seen["parent"] == os.getpid()
        assert seen["fds"] == {
            "0": "/dev/null",
            "1": str(tmp_path / "a-rather-long-name.out"),
            "2": str(tmp_path / "a-rather-long-name.err"),
        }
        assert seen["blocked"] == 0
        # What Python cannot name (two signals that the C library keeps to itself), nobody here can set.
        ignored = seen["ignored"] & _bits(*signal.valid_signals())
        assert ignored == _bits(signal.SIGPIPE, signal.SIGXFSZ)
        assert seen["caught"] == _bits(signal.SIGINT)
        assert seen["interrupt"]
        assert seen["threads"] == 1
        assert seen["name"] == "a-rather-long-n"
        assert (seen["cwd"], seen["rank"], seen["blas"]) == (str(tmp_path / "elsewhere"), "3", "5")
        assert seen["stdin"] == ""
        assert str(tmp_path) not in seen["path"]  # a file torch.py in the launch's folder is not torch

    # As under nohup, and in a daemon that blocks signals around a fork.
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        run(tmp_path, test, env={**ENV, "OPENBLAS_NUM_THREADS": "5"})
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(lent)


def _bits(*numbers: int) -> int:
    return sum(1 << (number - 1) for number in numbers)


def test_output_is_appended_and_a_printed_line_survives_a_kill(tmp_path: Path, fresh: bool) -> None:
    async def test(bench: Bench) -> None:
        (tmp_path / "rank0.out").write_text("earlier\n")
        await bench.spawn("rank0", "print('printed')\n" + put("ready", "1") + SLEEP, fresh=fresh)
        await bench.appears("ready")
        bench.supervisor.kill_group("rank0")
        await bench.exited("rank0")
        assert bench.out("rank0") == "earlier\nprinted\n"

    run(tmp_path, test)


def test_every_line_of_a_process_is_delivered_in_order(tmp_path: Path, fresh: bool) -> None:
    """Also those printed right before its end, and a last one without newline."""

    async def test(bench: Bench) -> None:
        lines: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        tail = Tail(lambda _proc, stream, line: lines[stream].append(line))
        polling = asyncio.create_task(tail.run())
        files = LogLayout(tmp_path, "job").rank_files(0)
        tail.follow("rank0", files)
        await bench.spawn(
            "rank0",
            "import sys\nfor n in range(50_000): print(n); print(-n, file=sys.stderr) if n % 10 == 0 else 0\n"
            "sys.stdout.write('the end')",
            fresh=fresh,
            stdout_path=str(files["stdout"]),
            stderr_path=str(files["stderr"]),
        )
        assert await bench.exited("rank0") == (0, None)
        await tail.finish("rank0")
        assert lines["stdout"] == [*(b"%d" % n for n in range(50_000)), b"the end"]
        assert lines["stderr"] == [b"%d" % -n for n in range(0, 50_000, 10)]
        polling.cancel()
        await asyncio.wait([polling])

    run(tmp_path, test)


def test_lines_are_streamed_while_the_process_lives(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        lines: list[bytes] = []
        tail = Tail(lambda _proc, _stream, line: lines.append(line))
        polling = asyncio.create_task(tail.run())
        for proc in ("rank0", "rank1"):
            tail.follow(proc, {"stdout": tmp_path / f"{proc}.out"})
            await bench.spawn(proc, f"print('{proc} lives')\n" + SLEEP)
            await until(lambda proc=proc: f"{proc} lives".encode() in lines)  # type: ignore[misc]
        polling.cancel()
        await asyncio.wait([polling])
        tail.close()

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"cwd": "/no/such/folder"}, "/no/such/folder"),
        ({"entry": "no_such_module:main"}, "no_such_module"),
        ({"entry": "supervised:no_such_function"}, "no_such_function"),
    ],
)
def test_a_process_that_cannot_start_says_why(
    tmp_path: Path, fresh: bool, fields: dict[str, str], told: str
) -> None:
    async def test(bench: Bench) -> None:
        await bench.spawn("rank0", "", fresh=fresh, **fields)
        assert await bench.exited("rank0") == (1, None)
        assert told in bench.err("rank0")

    run(tmp_path, test)


def test_a_fork_server_that_died_is_started_again_and_ranks_live_on(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.supervisor.start_fork_server(bench.launch)
        first = await bench.spawn("rank0", put("ready", "1") + SLEEP)
        await bench.appears("ready")
        server = bench.supervisor.fork_server_pids["job"]
        os.kill(server, signal.SIGKILL)
        await until(lambda: is_gone(server))
        second = await bench.spawn("rank1", SLEEP)
        assert bench.supervisor.fork_server_pids["job"] != server
        assert bench.supervisor.pids == {"rank0": first, "rank1": second}
        assert bench.exits == {}

    run(tmp_path, test)


def test_a_fork_server_that_dies_or_hangs_during_a_fork_is_replaced(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.supervisor.start_fork_server(bench.launch)
        for number, doing in enumerate((signal.SIGSTOP, signal.SIGKILL)):
            server = bench.supervisor.fork_server_pids["job"]
            os.kill(server, signal.SIGSTOP)
            spawning = asyncio.create_task(bench.spawn(f"rank{number}", put(f"ready{number}", "1") + SLEEP))
            await asyncio.sleep(0.05)
            os.kill(server, doing)
            await spawning
            await bench.appears(f"ready{number}")
            assert bench.supervisor.fork_server_pids["job"] != server
            await until(lambda server=server: is_gone(server))  # type: ignore[misc]
        assert set(bench.supervisor.pids) == {"rank0", "rank1"}

    run(tmp_path, test, fork_timeout_s=1.0)


def test_killing_the_fork_server_between_forks_loses_nobody(tmp_path: Path) -> None:
    """Whatever the moment, a spawn gives a process that runs, or one whose end is told."""

    async def test(bench: Bench) -> None:
        for number in range(20):
            proc = f"rank{number}"
            await bench.supervisor.start_fork_server(bench.launch)
            server = bench.supervisor.fork_server_pids["job"]
            spawning = asyncio.create_task(bench.spawn(proc, put(proc, "1")))
            await asyncio.sleep(number * 0.0004)
            # The last one's death may be known to the rank it took along before it is known to us.
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
            await spawning
            returncode, _ = await bench.exited(proc)
            assert (returncode == 0) == (tmp_path / proc).exists()
        assert await bench.supervisor.settled(10)
        assert bench.supervisor.pids == {}

    run(tmp_path, test)


def test_a_fork_server_that_never_gets_ready_is_tried_twice(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(ForkServerGone, match=r"job.*(ended|exit code 7).*forkserver.log"):
            await bench.spawn("rank0", SLEEP)
        assert (tmp_path / "tries").read_text() == "try\ntry\n"
        assert bench.supervisor.fork_server_pids == {}

    (tmp_path / "dies.py").write_text("import os\nopen('tries', 'a').write('try\\n')\nos._exit(7)\n")
    env = {**ENV, "PYTHONPATH": f"{ENV['PYTHONPATH']}:{tmp_path}"}
    run(tmp_path, test, preload=("dies",), env=env)


def test_a_failing_import_is_told_and_not_tried_again(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(EnvironmentFault, match="RuntimeError: broken on purpose"):
            await bench.supervisor.start_fork_server(bench.launch)
        await until(lambda: bench.supervisor.fork_server_pids == {})

    run(tmp_path, test, preload=("supervised",), env={**ENV, "SUPERVISED_BROKEN": "1"})


def test_imports_that_take_too_long(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(ForkServerGone, match=r"not ready within 0.2 s"):
            await bench.supervisor.start_fork_server(bench.launch)
        await until(lambda: bench.supervisor.fork_server_pids == {})

    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    env = {**ENV, "PYTHONPATH": f"{ENV['PYTHONPATH']}:{tmp_path}"}
    run(tmp_path, test, preload=("slow",), env=env, ready_timeout_s=0.2)


def test_a_fork_server_with_a_second_thread_refuses(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(ForkRefused, match=r"rank0.* 2 threads .*careless"):
            await bench.spawn("rank0", SLEEP)
        assert bench.supervisor.pids == {}
        # It is still there, and so is the way around it.
        assert list(bench.supervisor.fork_server_pids) == ["job"]
        await bench.spawn("rank0", "code = 5", fresh=True)
        assert await bench.exited("rank0") == (5, None)

    run(tmp_path, test, preload=("supervised",), env={**ENV, "SUPERVISED_THREAD": "1"})


def test_what_a_fork_server_prints_is_in_its_log(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.spawn("rank0", "pass")
        await bench.exited("rank0")
        assert bench.err("rank0") == ""
        assert (tmp_path / "forkserver.log").read_text() == "said while importing\n"

    run(tmp_path, test, preload=("supervised",), env={**ENV, "SUPERVISED_NOISE": "1"})


def test_usage(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.spawn("rank0", SLEEP)
        with pytest.raises(UsageError, match="rank0"):
            await bench.spawn("rank0", SLEEP)
        with pytest.raises(UsageError, match="rank0"):
            await bench.spawn("rank0", SLEEP, fresh=True)
        with pytest.raises(UsageError, match="launched differently"):
            await bench.supervisor.start_fork_server(
                Launch(name="job", python=sys.executable, env={}, cwd="/", preload=())
            )
        nowhere = Launch(name="other", python="/no/python", env={}, cwd="/", preload=())
        with pytest.raises(EnvironmentFault, match="/no/python"):
            await bench.supervisor.start_fork_server(nowhere)
        with pytest.raises(EnvironmentFault, match="/no/python"):
            await bench.supervisor.spawn(bench.spec("rank1", ""), nowhere, fresh=True)
        with pytest.raises(UsageError, match="fork_timeout_s"):
            Launch(name="job", python="", env={}, cwd="", fork_timeout_s=0)

    run(tmp_path, test)


def test_a_cancelled_spawn_leaves_no_process(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.supervisor.start_fork_server(bench.launch)
        server = bench.supervisor.fork_server_pids["job"]
        os.kill(server, signal.SIGSTOP)
        spawning = asyncio.create_task(bench.spawn("rank0", put("ran", "1") + SLEEP))
        await asyncio.sleep(0.05)
        spawning.cancel()
        await asyncio.wait([spawning])
        assert spawning.cancelled()
        os.kill(server, signal.SIGCONT)
        assert await bench.exited("rank0") == (None, signal.SIGKILL)
        await bench.spawn("rank1", "pass")  # the server is in order
        assert await bench.exited("rank1") == (0, None)

    run(tmp_path, test)


def test_on_exit_may_start_a_successor_at_once(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        successors: list[asyncio.Task[int]] = []
        record = bench.supervisor._on_exit

        def on_exit(proc: str, returncode: int | None, number: int | None) -> None:
            record(proc, returncode, number)
            if not successors:
                del bench.exits[proc]
                successors.append(asyncio.ensure_future(bench.spawn("rank0", "code = 2")))

        bench.supervisor._on_exit = on_exit
        await bench.spawn("rank0", "code = 1")
        assert await bench.exited("rank0") == (2, None)

    run(tmp_path, test)


def test_in_on_exit_the_pid_is_still_the_processs(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        states: list[str] = []
        record = bench.supervisor._on_exit

        def on_exit(proc: str, returncode: int | None, number: int | None) -> None:
            record(proc, returncode, number)
            stat = process_stat(pids[proc])
            states.append(stat.state if stat is not None else "gone")

        bench.supervisor._on_exit = on_exit
        pids = {"rank0": await bench.spawn("rank0", "pass")}
        await bench.exited("rank0")
        assert states == ["Z"]

    run(tmp_path, test)


def test_an_error_in_on_exit_does_not_lose_the_process(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        told: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _loop, context: told.append(context["exception"])
        )
        record = bench.supervisor._on_exit

        def on_exit(proc: str, returncode: int | None, number: int | None) -> None:
            record(proc, returncode, number)
            raise RuntimeError("in the callback")

        bench.supervisor._on_exit = on_exit
        pid = await bench.spawn("rank0", "pass")
        await bench.exited("rank0")
        assert is_gone(pid)
        assert [str(error) for error in told] == ["in the callback"]

    run(tmp_path, test)


@contextlib.contextmanager
def anothers(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that no supervisor starts; made before any, for later children of ours would be taken for orphans."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as one:
        assert one.stdout is not None
        try:
            yield one
        finally:
            one.kill()


# Starts a process that leads a group, and another in that group; says both pids; ends them when it is ended.
STARTER = """
import ctypes, subprocess, sys
def follow():
    ctypes.CDLL(None).prctl(1, 9)
def start(code, group):
    one = subprocess.Popen([sys.executable, "-c", code], process_group=group, stdout=subprocess.PIPE, preexec_fn=follow)
    print(one.pid, flush=True)
    return one
first = start({code!r}, 0)
second = start("import time; time.sleep(600)", first.pid)
{then}
import time; time.sleep(600)
"""


@pytest.mark.parametrize("parent", ["waits", "never waits"])
@pytest.mark.parametrize("how", ["kill_group", "signal", "itself"])
def test_an_adopted_process_is_watched_and_signalled_alone(tmp_path: Path, how: str, parent: str) -> None:
    code = "import time; time.sleep(0.5)" if how == "itself" else SLEEP
    starter = STARTER.format(code=code, then="first.wait()" if parent == "waits" else "")

    async def test(bench: Bench) -> None:
        bench.supervisor.adopt("rank0", pid)
        assert bench.supervisor.pids == {"rank0": pid}
        if how == "kill_group":
            assert bench.supervisor.kill_group("rank0")
        elif how == "signal":
            assert bench.supervisor.signal("rank0", signal.SIGTERM)
        assert await bench.exited("rank0") == (None, None)
        assert bench.supervisor.pids == {}
        assert not bench.supervisor.signal("rank0", signal.SIGTERM)
        assert not bench.supervisor.kill_group("rank0")
        assert await bench.supervisor.settled(5)
        neighbour = process_stat(other)
        assert neighbour is not None
        assert neighbour.state != "Z"

    with anothers(starter) as it:
        assert it.stdout is not None
        pid, other = int(it.stdout.readline()), int(it.stdout.readline())
        run(tmp_path, test)


# Starts the leader of a session, which starts a worker in it that would outlive it; says both pids.
LEADER_AND_WORKER = """
import subprocess, sys
inner = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
inner += "print(p.pid, flush=True); p.wait()"
leader = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True, stdout=subprocess.PIPE)
print(leader.pid, flush=True)
print(int(leader.stdout.readline()), flush=True)
leader.wait()
import time; time.sleep(600)
"""


@pytest.mark.parametrize("how", ["kill_group", "signal"])
def test_an_adopted_leader_of_a_session_takes_its_session_with_it(tmp_path: Path, how: str) -> None:
    """As a rank does that another daemon started: its data loader's workers, say."""

    async def test(bench: Bench) -> None:
        stat = process_stat(leader)
        assert stat is not None
        with pytest.raises(EnvironmentFault, match="has ended"):
            bench.supervisor.adopt("rank0", leader, start_ticks=stat.start_ticks + 1, leads_session=True)
        bench.supervisor.adopt("rank0", leader, start_ticks=stat.start_ticks, leads_session=True)
        if how == "kill_group":
            assert bench.supervisor.kill_group("rank0")
        else:
            assert bench.supervisor.signal("rank0", signal.SIGKILL)
        assert await bench.exited("rank0") == (None, None)
        await until(lambda: is_gone(worker) or process_stat(worker).state == "Z")  # type: ignore[union-attr]
        starter = process_stat(it.pid)
        assert starter is not None
        assert starter.state != "Z"

    with anothers(LEADER_AND_WORKER) as it:
        assert it.stdout is not None
        leader, worker = int(it.stdout.readline()), int(it.stdout.readline())
        run(tmp_path, test)


def test_what_cannot_be_adopted(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        own = await bench.spawn("rank0", SLEEP)
        for proc, wanted, words in [
            ("rank0", pid, "there is a process 'rank0' already"),
            ("rank1", own, f"process {own} is watched already"),
            ("rank1", os.getpid(), "is watched already"),
        ]:
            with pytest.raises(UsageError, match=words):
                bench.supervisor.adopt(proc, wanted)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: is_gone(pid))
        for gone in (pid, 0, -1, 2**40):
            with pytest.raises(EnvironmentFault, match=r"there is no process .* that could be adopted"):
                bench.supervisor.adopt("rank1", gone)
        assert bench.supervisor.pids == {"rank0": own}

    with anothers(STARTER.format(code=SLEEP, then="first.wait()")) as it:
        assert it.stdout is not None
        pid = int(it.stdout.readline())
        run(tmp_path, test)


def test_an_adopted_process_is_ended_with_the_others(tmp_path: Path) -> None:
    deaf = "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint(1, flush=True)\n" + SLEEP

    async def test(bench: Bench) -> None:
        bench.supervisor.adopt("rank0", pid)
        assert await bench.supervisor.shutdown(0.1) == []
        assert bench.exits == {"rank0": (None, None)}
        await until(lambda: is_gone(pid))

    then = "print(int(first.stdout.readline()), flush=True)\nfirst.wait()"
    with anothers(STARTER.format(code=deaf, then=then)) as it:
        assert it.stdout is not None
        pid, _, _ = (int(it.stdout.readline()) for _ in range(3))
        run(tmp_path, test)


def test_shutdown_gives_time_then_kills(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        polite = (
            "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(5))\n"
            + put("polite", "1")
            + SLEEP
        )
        deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\n" + put("deaf", "1") + SLEEP
        await bench.spawn("polite", polite)
        await bench.spawn("stopped", polite.replace("'polite", "'stopped"))
        await bench.spawn("deaf", deaf + "\n")
        for proc in ("polite", "stopped", "deaf"):
            await bench.appears(proc)
        bench.supervisor.signal("stopped", signal.SIGSTOP)
        assert await bench.supervisor.shutdown(1.0) == []
        assert bench.exits == {"polite": (5, None), "stopped": (5, None), "deaf": (None, signal.SIGKILL)}
        with pytest.raises(EnvironmentFault, match="shutting down"):
            await bench.spawn("rank9", "pass")

    run(tmp_path, test)


def test_a_hundred_processes_leave_nothing_behind(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        async def round_of_ten() -> None:
            procs = [f"rank{number}" for number in range(10)]
            await asyncio.gather(*(bench.spawn(proc, "pass") for proc in procs))
            for proc in procs:
                assert await bench.exited(proc) == (0, None), bench.err(proc)
            bench.exits.clear()

        await round_of_ten()
        before = leftovers()
        server = f"/proc/{bench.supervisor.fork_server_pids['job']}"
        server_fds = os.listdir(f"{server}/fd")
        for _ in range(10):
            await round_of_ten()
        assert leftovers() == before
        assert os.listdir(f"{server}/fd") == server_fds
        assert children_of(bench.supervisor.fork_server_pids["job"]) == []

    run(tmp_path, test)


DAEMON = """
import asyncio, sys
from flashrec.protocol.spawn import ProcSpec
from flashrecd.supervise import Launch, Supervisor
assert "torch" not in sys.modules
async def main():
    import os
    supervisor = Supervisor(lambda *_: None)
    launch = Launch(name="job", python=sys.executable, env=dict(os.environ), cwd=".", preload=())
    pids = []
    for number in range(2):
        spec = ProcSpec(proc=f"rank{number}", entry="supervised:run_code", cwd=".",
                        stdout_path=f"{number}.out", stderr_path=f"{number}.err",
                        program={"code": "open(spec.proc, 'w').close(); import time; time.sleep(600)"})
        pids.append(await supervisor.spawn(spec, launch, fresh=number == 1))
    print(supervisor.fork_server_pids["job"], *pids, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_the_daemons_death_ends_the_fork_server_and_no_rank(tmp_path: Path) -> None:
    async def test() -> None:
        with subprocess.Popen(
            [sys.executable, "-c", DAEMON], cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, text=True
        ) as daemon:
            assert daemon.stdout is not None
            server, *ranks = map(int, daemon.stdout.readline().split())
            try:
                await until(lambda: all((tmp_path / f"rank{number}").exists() for number in range(2)))
                daemon.kill()
                daemon.wait()
                await until(lambda: is_gone(server))
                await asyncio.sleep(0.1)
                stats = [process_stat(rank) for rank in ranks]
                assert [stat.state if stat else "gone" for stat in stats] == ["S", "S"]
            finally:
                for rank in ranks:
                    os.kill(rank, signal.SIGKILL)
        await until(lambda: all(is_gone(rank) for rank in ranks))

    asyncio.run(test())


TRAIN = """
import os, random, sys, numpy, torch
assert spec.proc == "rank2" or len(os.listdir("/proc/self/task")) == 1
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(random.random(), numpy.random.random(), torch.rand(1).item(), torch.get_num_threads())
"""


def test_forks_of_a_warm_server_train_as_fresh_interpreters_do(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.spawn("rank0", TRAIN)
        await bench.spawn("rank1", TRAIN)
        await bench.spawn("rank2", TRAIN, fresh=True)
        said = []
        for proc in ("rank0", "rank1", "rank2"):
            assert await bench.exited(proc) == (0, None), bench.err(proc)
            said.append(bench.out(proc).split())
        # Random as in three interpreters, not as in one that was copied.
        for generator in (0, 1, 2):
            assert len({drawn[generator] for drawn in said}) == 3, said
        assert {drawn[3] for drawn in said} == {"2"}

    run(tmp_path, test, preload=("flashrec.warm",), env={**ENV, "OMP_NUM_THREADS": "2"})
