"""Where the processes of a job come from: a daemon's own start them, and follow what they print."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flashrec.protocol import messages as msg
from flashrec.protocol import records as rec
from flashrec.protocol.jobfiles import number_of
from flashrec.protocol.spawn import ProcSpec
from flashrecd.supervise import Launch, LogLayout, Supervisor, Tail
from flashrecd.supervise.logs import STREAMS

ENTRY = "flashrec.runner:main"
SUMMARY_CHARACTERS = 300
LAST_WORDS_BYTES = 4096
OUTPUT_PAUSE_S = 0.02
MAX_BYTES_AHEAD = 8 << 20
ATTACH_S = 10.0  # for a command line to come back to its job, which has ended


@dataclass
class Process:
    """A process the core asked for."""

    name: str
    number: int
    rank: int | None
    generation: int
    replacement: bool
    node: int = 0
    local_rank: int | None = None  # among the ranks of its node
    heard: bool = False  # it has said Hello, or Rejoin
    identity: bytes | None = None  # its ZeroMQ identity from then on, if it is on this node
    starting: asyncio.Task[None] | None = None
    gone: bool = False
    explained: bool = False  # it has sent its traceback
    said_code: int | None = None  # with which it said it would exit
    stderr: Path | None = None
    unsent: list[msg.Message] = field(default_factory=list)
    pid: int = 0  # once it runs
    own_files: bool = True  # False: it prints into those of its rank
    adopted: bool = False  # another daemon started it

    @classmethod
    def of(cls, record: rec.ProcessRecord) -> "Process":
        """One that another daemon has welcomed."""
        process = cls(record.proc, number_of(record.proc), record.rank, record.generation, record.replacement)
        process.pid, process.own_files, process.adopted = record.pid, record.own_files, True
        return process


class ProcessSource(Protocol):
    """Brings about the processes that a job's core asks for."""

    def begin(self) -> None:
        """The job starts; an event loop runs."""

    async def start(self, process: Process) -> int:
        """Comes back with its pid when it runs and is watched under its name. Raises FlashrecError."""

    def assigned(self, process: Process) -> None:
        """`process`, a standby, was given its rank."""

    async def ended(self, process: Process) -> None:
        """Comes back when all that the process printed has been passed on."""

    async def close(self) -> None:
        """All processes have ended: let go of everything."""

    def describe(self) -> dict[str, Any]:
        """What `flashrec status` shows of it."""


class OwnProcesses:
    """Forks of a warm server, or fresh interpreters. `tell(message)` reaches who submitted the job, and
    `note(event, reason, rank)` the event log."""

    def __init__(
        self,
        name: str,
        submit: msg.Submit,
        *,
        supervisor: Supervisor,
        log_dir: Path,
        address: str,
        tell: Callable[[msg.Message], None],
        note: Callable[[str, str, int | None], None],
    ) -> None:
        self.submit = submit
        self.logs = LogLayout(log_dir, name)
        self.output_bytes = 0
        self.output_seen_bytes = 0  # of those, what the command line says it has dealt with
        self.has_listener = True
        self._name = name
        self._supervisor = supervisor
        self._address = address
        self._tell = tell
        self._note = note
        self.is_expected: Callable[[], bool] = lambda: False
        """Whether the command line that submitted the job lives, and may yet ask for what is printed."""
        self.is_cut_off: Callable[[], bool] = lambda: False
        """Whether what is told does not reach it, because it has not read what it was told before."""
        self.adopted = False  # another daemon began the job
        self._tail = Tail(self._output)
        self._followed: dict[str, Process] = {}
        self._following: asyncio.Task[None] | None = None
        self._unheard: dict[str, Process] = {}  # adopted, and nobody has asked yet for what they print
        self._perhaps_heard: dict[str, Process] = {}  # have ended, and who asked has not been heard of since
        self._rest: list[asyncio.Task[None]] = []  # what those had printed that have ended
        self._source = (-1, "stdout", "")  # rank, stream, process
        self._lines: list[bytes] = []  # of that source, not told yet
        self._lines_end = 0  # in that process's file
        env = dict(submit.env)
        if submit.world_size > 1:
            env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, and for the same reason
        self._launch = Launch(
            name=name,
            python=submit.python,
            env=env,
            cwd=submit.cwd,
            log_path=self.logs.log_dir / name / "forkserver.log",
            preload=submit.preload,
        )

    def begin(self) -> None:
        self._following = asyncio.get_running_loop().create_task(self._follow_output())

    async def start(self, process: Process) -> int:
        process.own_files = process.rank is None or process.replacement or process.generation != 1
        if process.own_files and process.rank is not None:
            self.logs.link_replacement(process.rank, process.number)
        files = self._files(process)
        self._followed[process.name] = process
        self._tail.follow(process.name, files)
        spec = ProcSpec(
            proc=process.name,
            entry=ENTRY,
            stdout_path=str(files["stdout"]),
            stderr_path=str(files["stderr"]),
            cwd=self.submit.cwd,
            program={
                "address": self._address,
                "target": self.submit.target,
                "module": self.submit.module,
                "umask": self.submit.umask,
                "args": list(self.submit.args),
            },
        )
        return await self._supervisor.spawn(spec, self._launch, fresh=self.submit.start_method == "fresh")

    def _files(self, process: Process) -> dict[str, Path]:
        if process.own_files or process.rank is None:
            files = self.logs.standby_files(process.number)
        else:
            files = self.logs.rank_files(process.rank)
        process.stderr = files["stderr"]
        return files

    def take_over(self, processes: Iterable[Process]) -> None:
        """What they print is passed on once `listen()` was called."""
        self.adopted = True
        self.has_listener = False
        self._unheard = {process.name: process for process in processes if process.adopted}
        for process in self._unheard.values():
            self._files(process)

    def listen(self, shown: Mapping[tuple[str, str], int]) -> None:
        """Somebody reads what the processes print, and had got as far as `shown` says, by process and stream. Whatever
        was told before it asked has not reached it, and may be asked for once more."""
        self._lines.clear()
        self.has_listener = True
        self.output_bytes = self.output_seen_bytes = 0
        for name in self._followed:
            self._tail.rewind(name, {stream: shown.get((name, stream), 0) for stream in STREAMS})
        unheard = {**self._unheard, **self._perhaps_heard}
        self._unheard, self._perhaps_heard = {}, {}
        for name, process in unheard.items():
            files = self._files(process)
            self._followed[name] = process
            self._tail.follow(name, files, {stream: shown.get((name, stream), 0) for stream in files})
            if process.gone:
                self._rest.append(asyncio.get_running_loop().create_task(self.ended(process)))

    def seen(self, num_bytes: int) -> None:
        """Who listens says how much of what it was told it has dealt with."""
        self.output_seen_bytes = num_bytes
        self._perhaps_heard.clear()

    def assigned(self, process: Process) -> None:
        assert process.rank is not None
        self.logs.link_replacement(process.rank, process.number)

    async def ended(self, process: Process) -> None:
        try:
            await self._tail.finish(process.name, self._room_for_output)
        finally:
            self._flush_output()
            if self._followed.pop(process.name, None) is not None and self.adopted:
                self._perhaps_heard[process.name] = process

    async def close(self) -> None:
        self._supervisor.stop_fork_server(self._name)
        await self._supervisor.settled(timeout_s=5.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTACH_S):  # it is about to come, or gone
                while self._unheard and self.is_expected():
                    await asyncio.sleep(OUTPUT_PAUSE_S)
        # What cannot be read keeps no job from its end.
        await asyncio.gather(*self._rest, return_exceptions=True)
        self._tail.close()
        self._flush_output()
        if self._following is not None:
            self._following.cancel()

    def describe(self) -> dict[str, Any]:
        return {"log_dir": str(self.logs.log_dir / self._name), "launcher": None}

    # --- output -------------------------------------------------------------------------------------------

    async def _follow_output(self) -> None:
        """The files hold what the command line has not shown yet, so nothing piles up in memory."""
        pause_s = OUTPUT_PAUSE_S
        while True:
            busy = not self.output_blocked and self._tail.poll()
            for proc, stream, error in self._tail.unreadable():
                process = self._followed.get(proc)
                rank = process.rank if process is not None else None
                self._note("output not shown", f"of {proc}, {stream}: {error}", rank)
            self._flush_output()
            pause_s = OUTPUT_PAUSE_S if busy else min(pause_s * 1.5, 10 * OUTPUT_PAUSE_S)
            await asyncio.sleep(pause_s)

    @property
    def output_blocked(self) -> bool:
        if not self.has_listener:
            return False
        return self.output_bytes - self.output_seen_bytes > MAX_BYTES_AHEAD or self.is_cut_off()

    async def _room_for_output(self) -> None:
        self._flush_output()
        await asyncio.sleep(0)
        while self.output_blocked:
            await asyncio.sleep(OUTPUT_PAUSE_S)

    def _output(self, proc: str, stream: str, line: bytes) -> None:
        process = self._followed.get(proc)
        rank = process.rank if process is not None else None
        source = (-1 if rank is None else rank, stream, proc)
        if source != self._source:
            self._flush_output()
            self._source = source
        self._lines.append(line)
        self._lines_end = self._tail.delivered(proc, stream)

    def relay(self, output: msg.Output) -> None:
        """What was printed on another node."""
        self._flush_output()
        self.output_bytes += len(output.data) + msg.OUTPUT_OVERHEAD_BYTES
        self._tell(output)

    def _flush_output(self) -> None:
        """A message for each line would keep the loop busy for seconds when a rank prints a lot."""
        if self._lines:
            rank, stream, proc = self._source
            output = msg.Output(rank, stream, b"\n".join(self._lines), proc, self._lines_end)
            self._lines.clear()
            self.output_bytes += len(output.data) + msg.OUTPUT_OVERHEAD_BYTES
            self._tell(output)


def last_words(path: Path | None) -> str:
    """The last line in a process's standard error: for one that ended badly, and without a traceback."""
    try:
        with open(path or os.devnull, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LAST_WORDS_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip()[:SUMMARY_CHARACTERS] if lines else ""
