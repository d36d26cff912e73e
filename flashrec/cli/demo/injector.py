"""Kills ranks from outside: a process of its own, which shares nothing with the job but its tags.

It watches the tag of the next victim, sends SIGKILL through a pidfd, waits for the death, and reads the tag
again: that says where the rank was when it died. Given an Order on its standard input it prints one Strike
a line, as JSON.
"""

import contextlib
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from flashrec.cli.client import Client, ask_status
from flashrec.cli.demo.schedule import SLOT_STEPS, Fault
from flashrec.errors import EnvironmentFault
from flashrec.prctl import set_timer_slack
from flashrec.protocol.phase import Phase
from flashrec.protocol.tag import Tag, TagReader, tag_path

STATUS_S = 0.05
FAR_S = 0.002
NEAR_S = 0.0002
DEATH_S = 10.0
GUESSED_STEP_NS = 200_000_000
MAX_LINE_BYTES = 1 << 16
FRESH = (Phase.STARTING, Phase.BUILDING)
"""Phases that only a process which has just taken a rank is in."""
BEFORE = {"tail": ("apply",), "between": ("apply", "tail")}
"""Places that pass in less time than it takes to wake up: what comes before them is watched without sleeping."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One kill that happened. Instants are `time.monotonic_ns()`."""

    index: int
    rank: int
    pid: int
    signal_ns: int
    died_ns: int
    place: str
    step: int
    committed: int = -1
    """Steps that the rank had committed; -1: it held no state yet."""


@dataclass(frozen=True, kw_only=True)
class Victim:
    """A process to be killed, and the rank that it holds."""

    rank: int
    pid: int
    fd: int


class Distance(Enum):
    FAR = "far"
    NEAR = "near"
    NEXT = "next"
    HERE = "here"


def distance(place: str, step: int, tag: Tag) -> Distance:
    """How far a rank with this tag is from `place` in `step` or later."""
    if tag.place == place and tag.step >= step:
        return Distance.HERE
    # Between steps a rank already counts as being at the next one.
    reached = tag.step + 1 if place == "between" else tag.step
    if reached >= step and tag.place in BEFORE.get(place, ()):
        return Distance.NEXT
    return Distance.NEAR if reached >= step - 1 else Distance.FAR


class Injector:
    """Carries out a schedule, one fault after another."""

    def __init__(self, client: Client, shm_dir: Path, world_size: int, standby: str) -> None:
        self._client = client
        self._standby = standby
        self._tags = [TagReader(tag_path(shm_dir, rank)) for rank in range(world_size)]
        self._owner = os.getppid()
        self._last: Strike | None = None
        self._generation = 0  # in which the last one struck
        self._struck = -1  # the last step in which one struck
        self._step_ns: deque[int] = deque([GUESSED_STEP_NS], maxlen=5)

    def strike_all(self, faults: list[Fault]) -> Iterator[list[Strike]]:
        for fault in faults:
            strikes = self._strike(fault)
            self._last = strikes[0]
            yield strikes

    def _strike(self, fault: Fault) -> list[Strike]:
        """Wait for the moment, and kill. A process that ended by itself meanwhile is not counted as struck."""
        not_pid = self._last.pid if fault.follows and self._last is not None else None
        while True:
            with contextlib.ExitStack() as opened:
                victims = self._open(fault, not_pid, opened)
                if fault.follows:
                    self._await_recovery(fault, victims[0].fd)
                elif fault.place is None:
                    self._await_time(fault)
                else:
                    self._await_standby(fault)
                    self._await_place(fault, fault.place)
                before = {victim.rank: self._tag(victim.rank) for victim in victims}
                signal_ns = time.monotonic_ns()
                struck = [victim for victim in victims if _killed(victim)]
                if struck:
                    return [
                        self._struck_at(fault, victim, signal_ns, before[victim.rank]) for victim in struck
                    ]

    def _struck_at(self, fault: Fault, victim: Victim, signal_ns: int, before: Tag) -> Strike:
        if not _ended(victim.fd, DEATH_S):
            raise EnvironmentFault(f"process {victim.pid} outlived a SIGKILL by {DEATH_S:.0f} s")
        died_ns = time.monotonic_ns()
        tag = self._tag(victim.rank)
        if tag.phase in FRESH and before.phase not in FRESH:
            tag = before  # a standby was so quick to take the rank that this is its tag already
        self._generation, self._struck = tag.generation, max(self._struck, tag.step)
        return Strike(
            index=fault.index,
            rank=victim.rank,
            pid=victim.pid,
            signal_ns=signal_ns,
            died_ns=died_ns,
            place=tag.place,
            step=tag.step,
            committed=tag.committed,
        )

    def _open(self, fault: Fault, not_pid: int | None, opened: contextlib.ExitStack) -> list[Victim]:
        """The processes that hold the fault's ranks when the fault is near."""
        while not fault.follows and self._tag(fault.rank).step < self._not_before(fault) - 1:
            self._pause(FAR_S)
        while True:
            job = ask_status(self._client)["job"]
            ranks = [job["ranks"][rank] for rank in fault.ranks] if job is not None else []
            pids: list[int] = [rank["pid"] for rank in ranks if rank["pid"] is not None]
            if len(pids) == len(fault.ranks) and pids[0] != not_pid:
                with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as so_far:
                    victims = []
                    for rank, pid in zip(fault.ranks, pids, strict=True):
                        victims.append(Victim(rank=rank, pid=pid, fd=os.pidfd_open(pid)))
                        so_far.callback(os.close, victims[-1].fd)
                    opened.enter_context(so_far.pop_all())
                    return victims
            self._pause(NEAR_S)

    def _not_before(self, fault: Fault) -> int:
        """Two steps after the fault before at least, so that a step is not made to fail again and again."""
        return max(fault.step, self._struck + 2)

    def _await_standby(self, fault: Fault) -> None:
        while self._tag(fault.rank).step < fault.patience:
            job = ask_status(self._client)["job"]
            if job is None or self._standby in ("none", *(standby["depth"] for standby in job["standbys"])):
                return
            self._pause(STATUS_S)

    def _await_place(self, fault: Fault, place: str) -> None:
        step, begun = self._not_before(fault), self._tag(fault.rank).step
        latest = math.inf if fault.latest is None else max(fault.latest, begun + SLOT_STEPS)
        while (away := distance(place, step, tag := self._tag(fault.rank))) is not Distance.HERE:
            if tag.step >= latest:
                return
            if away is not Distance.NEXT:
                self._pause(NEAR_S if away is Distance.NEAR else FAR_S)

    def _await_time(self, fault: Fault) -> None:
        step = self._not_before(fault)
        begun = self._tag(fault.rank)
        while (tag := self._tag(fault.rank)).step < step:
            if tag.committed == begun.committed + 1 and begun.committed_ns:
                self._step_ns.append(tag.committed_ns - begun.committed_ns)
            begun = tag
            self._pause(NEAR_S if tag.step == step - 1 else FAR_S)
        due_ns = time.monotonic_ns() + int(fault.wait * statistics.median(self._step_ns))
        while (left_ns := due_ns - time.monotonic_ns()) > 0:
            self._pause(left_ns / 1e9)

    def _await_recovery(self, fault: Fault, fd: int) -> None:
        """Until the rank takes part in the recovery that is under way, and has done so for a while."""
        assert self._last is not None
        since_ns: int | None = None
        while not _ended(fd, 0):
            tag, now_ns = self._tag(fault.rank), time.monotonic_ns()
            if tag.place == "recovery" and tag.changed_ns > self._last.signal_ns:
                since_ns = since_ns or now_ns
                if now_ns - since_ns >= fault.wait * 1e6 or tag.phase == Phase.REFORMING:
                    return
            elif tag.generation > self._generation and tag.place in ("forward", "backward"):
                return  # it was too quick for us; the report says where it was struck
            self._pause(NEAR_S)

    def _tag(self, rank: int) -> Tag:
        """The rank's tag; waits for its first one."""
        while (tag := self._tags[rank].read()) is None:
            self._pause(FAR_S)
        return tag

    def _pause(self, seconds: float) -> None:
        if os.getppid() != self._owner:
            raise SystemExit("the demo is gone")
        time.sleep(seconds)


def _killed(victim: Victim) -> bool:
    try:
        signal.pidfd_send_signal(victim.fd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _ended(pidfd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(int(timeout_s * 1000)))


class StrikingProcess:
    """The demo's end of a process that strikes: starts it with an order, and collects the lines that it reports."""

    def __init__(self, program: str, order: dict[str, Any]) -> None:
        """`program`: a module, whose main() it runs."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {program} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the demo, which ends this process
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode())
        self._process.stdin.close()
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def lines(self) -> list[dict[str, Any]]:
        """What was reported since the last call. EnvironmentFault when the process ended with an error."""
        with contextlib.suppress(BlockingIOError):
            self._unread += os.read(self._output.fileno(), MAX_LINE_BYTES)
        if self._process.poll():
            assert self._process.stderr is not None
            why = self._process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            raise EnvironmentFault(f"the injector failed: {' '.join(why) or 'no reason given'}")
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


class InjectorProcess(StrikingProcess):
    """Kills ranks."""

    def __init__(
        self, run_dir: Path, shm_dir: Path, world_size: int, standby: str, faults: list[Fault]
    ) -> None:
        order = {
            "run_dir": str(run_dir),
            "shm_dir": str(shm_dir),
            "world_size": world_size,
            "standby": standby,
            "faults": [asdict(fault) for fault in faults],
        }
        super().__init__("flashrec.cli.demo.injector", order)

    def poll(self) -> list[Strike]:
        """What was struck since the last call."""
        return [Strike(**line) for line in self.lines()]


def main() -> None:
    """Reads an order, strikes, reports."""
    order = json.load(sys.stdin)
    set_timer_slack(1000)  # sleep for what was asked, not 50 us more
    with Client(Path(order["run_dir"])) as client:
        injector = Injector(client, Path(order["shm_dir"]), order["world_size"], order["standby"])
        faults = [Fault(**{**fault, "others": tuple(fault["others"])}) for fault in order["faults"]]
        for strikes in injector.strike_all(faults):
            sys.stdout.write("".join(json.dumps(asdict(strike)) + "\n" for strike in strikes))
            sys.stdout.flush()
