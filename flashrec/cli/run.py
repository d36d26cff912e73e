"""`flashrec run`: submit a job, show what it prints, return its exit code."""

import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click

from flashrec import __version__
from flashrec.cli.client import Client, connect, daemon_runs_in, private_daemon
from flashrec.cli.submit import submit_from_here
from flashrec.errors import DaemonUnavailable, ProtocolError, UsageError
from flashrec.protocol import messages as msg
from flashrec.protocol.jobdir import remove_stale
from flashrec.protocol.jobfiles import end_processes
from flashrec.protocol.places import default_run_dir

PRESENT_S = 1.0
LOOK_S = 0.2  # for another daemon, when the job's is gone
ATTACH_S = 5.0  # for its answer
GONE_S = 5.0  # for killed processes to be gone
TELL_BYTES = 256 << 10
INTERRUPTED = 130
# What a person should see of a recovery without asking: that there is one, why, and that it is over.
SHOWN_EVENTS = {
    "abort": "recovering",
    "recovered": "recovered",
    "sealed regime": "sealed regime",
    "arena memory": "arena memory",
}
STREAMS = {"0": (), "1": ("stdout",), "2": ("stderr",), "3": ("stdout", "stderr")}


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--nnodes", type=int, default=1, show_default=True, help="Nodes that have ranks.")
@click.option(
    "--nproc-per-node", "--nproc_per_node", type=int, default=1, show_default=True, help="Ranks on each node."
)
@click.option(
    "--spare-nodes",
    "--spare_nodes",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Nodes that take over from one that is lost.",
)
@click.option(
    "--replicas",
    type=int,
    default=None,
    help="Other nodes that keep a copy of what each rank seals.  [default: 1 where there are several nodes]",
)
@click.option(
    "--standby",
    type=int,
    default=1,
    show_default=True,
    help="Warm processes on each node, kept ready to take a rank.",
)
@click.option("-m", "--module", is_flag=True, help="The target is a module, as with python -m.")
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=int,
    default=None,
    help="Recoveries before the job fails. [default: no bound]",
)
@click.option(
    "--log-dir",
    "--log_dir",
    type=click.Path(path_type=Path),
    default=None,
    help="Keep the ranks' output there.",
)
@click.option(
    "-t",
    "--tee",
    default="3",
    show_default=True,
    help="Streams shown here: 0 none, 1 stdout, 2 stderr, 3 both; or RANK:N,...",
)
@click.option(
    "--start-method",
    type=click.Choice(["fork", "fresh"]),
    default="fork",
    show_default=True,
    help="How ranks start: forked from a process that has torch imported, or as fresh interpreters.",
)
@click.option(
    "--preload",
    multiple=True,
    default=["flashrec.warm"],
    show_default="flashrec.warm, which is torch",
    metavar="MODULE",
    help="What the process that ranks are forked from imports; may be given several times.",
)
@click.option(
    "--pull",
    type=click.Choice(["shm", "zmq"]),
    default="shm",
    show_default=True,
    help="How a replacement gets state on this node: shared memory, or through the shard server.",
)
@click.option(
    "--suspect-after",
    type=float,
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Silence after which a rank is killed and replaced.",
)
@click.option("--events", is_flag=True, help="Show the event log's lines, too (on stderr).")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=None,
    help="Run directory of the daemon to use.",
)
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    nnodes: int, nproc_per_node: int, spare_nodes: int, replicas: int | None, standby: int,
    module: bool, max_restarts: int | None, log_dir: Path | None, tee: str,
    start_method: str, preload: tuple[str, ...], pull: str, suspect_after: float, events: bool,
    directory: Path | None, target: str, arguments: tuple[str, ...],
) -> None:  # fmt: skip
    """Run TARGET under this machine's daemon, or under one of its own if none runs."""
    shown = _streams(tee)
    submit = submit_from_here(
        _checked(target, module),
        world_size=_ranks(nnodes, nproc_per_node),
        num_nodes=nnodes,
        num_spare_nodes=spare_nodes,
        num_replicas=_replicas(replicas, nnodes + spare_nodes),
        module=module,
        args=arguments,
        num_standbys=standby,
        max_restarts=max_restarts,
        log_dir=str(log_dir.absolute()) if log_dir else None,
        start_method=start_method,
        preload=preload,
        pull=pull,
        suspect_after_s=suspect_after,
    )
    with _daemon(directory) as client:
        show = None if events else SHOWN_EVENTS
        sys.exit(Submission(client, submit, shown, show_events=show).follow())


def _ranks(num_nodes: int, ranks_per_node: int) -> int:
    if num_nodes < 1:
        raise UsageError(f"a job needs at least one node, not {num_nodes}")
    return num_nodes * ranks_per_node


def _replicas(wanted: int | None, num_nodes: int) -> int:
    if wanted is None:
        return int(num_nodes > 1)
    if wanted and num_nodes == 1:
        raise UsageError("--replicas: there is no other node that could keep one")
    return wanted


def _checked(target: str, module: bool) -> str:
    """The target, if it can be run at all; said here, before anything is started."""
    if module:
        try:
            sys.path.insert(0, os.getcwd())
            found = importlib.util.find_spec(target)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise UsageError(f"no module named {target!r}")
        return target
    path = Path(target)
    if not path.is_file():
        raise UsageError(f"no such script: {target}")
    try:
        compile(path.read_bytes(), target, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{target} is not a Python script: {error}") from None
    return str(path.absolute())


def _streams(tee: str) -> Callable[[int, str], bool]:
    """torchrun's --tee: one number for all ranks, or RANK:N pairs."""
    each: dict[int, tuple[str, ...]] = {}
    default: tuple[str, ...] = ()
    for item in tee.split(","):
        rank, _, number = item.rpartition(":")
        if number not in STREAMS or (rank and not rank.isdigit()):
            raise UsageError(f"--tee takes 0, 1, 2 or 3, or RANK:N pairs, not {tee!r}")
        if rank:
            each[int(rank)] = STREAMS[number]
        else:
            default = STREAMS[number]
    return lambda rank, stream: stream in each.get(rank, default)


@contextlib.contextmanager
def _daemon(directory: Path | None) -> Iterator[Client]:
    if directory is not None or daemon_runs_in(default_run_dir()):
        with connect(directory) as client:
            yield client
    else:
        with private_daemon() as client:
            yield client


class Submission:
    """A job that was submitted from here: its output, Ctrl-C, and its end."""

    def __init__(
        self,
        client: Client,
        submit: msg.Submit,
        shown: Callable[[int, str], bool],
        *,
        show_events: Container[str] | None = (),
    ) -> None:
        """`show_events`: which lines of the event log to show; None shows all."""
        self._client = client
        self._shown = shown
        self._show_events = show_events
        self._world_size = submit.world_size
        self._pid = submit.pid
        self._outputs: dict[tuple[str, str], int] = {}  # how far each process's streams were shown
        self._orphaned = False
        self._attach_at = 0.0
        self._interrupts = 0
        self._passed_on = 0
        self._writing = False
        self._num_bytes = 0
        self._num_told = 0
        self._present_at = 0.0
        answer = client.ask(submit)
        if not isinstance(answer, msg.Submitted):
            raise ProtocolError(f"expected Submitted, not {type(answer).__name__}")
        self.job = answer.job
        self.shm_dir = Path(answer.shm_dir)
        self.log_dir = Path(answer.log_dir)
        self.ended: msg.JobEnded | None = None
        client.watch_daemon(answer.daemon_pid)

    def follow(self) -> int:
        """Until the job's end; returns its exit code."""
        before = {n: signal.signal(n, self._interrupted) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self._client.woken_by_signals():
                while self.ended is None:
                    self.poll(PRESENT_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        code, reason = self.ended.code, self.ended.reason
        if code:
            how = "ended" if code == INTERRUPTED else "failed"
            print(f"flashrec: job {self.job} {how}: {reason}", file=sys.stderr, flush=True)
        return code

    def poll(self, timeout_s: float) -> msg.Message | None:
        """One message, dealt with; None if none came."""
        self._pass_on_interrupts()
        if self.ended is not None:
            return None
        now = time.monotonic()
        if self._orphaned:
            self._look_for_daemon()
            timeout_s = min(timeout_s, LOOK_S)
        elif now > self._present_at or self._num_bytes >= self._num_told + TELL_BYTES:
            self._present_at, self._num_told = now + PRESENT_S, self._num_bytes
            self._client.send(msg.Present(self.job, self._num_bytes))
        message = self._client.receive(timeout_s)
        if message is None and self._client.daemon_gone and not self._orphaned:
            message = self._client.receive(LOOK_S)  # its last words may still be under way
        match message:
            case None:
                if self._client.daemon_gone and not self._orphaned:
                    self._be_orphaned()
            case msg.Output():
                self._num_bytes += len(message.data) + msg.OUTPUT_OVERHEAD_BYTES
                self._writing = True
                self._show(message)
                self._writing = False
                self._outputs[message.proc, message.stream] = message.end
            case msg.Submitted():
                self._orphaned = False
                self._num_bytes = self._num_told = 0
                self._client.watch_daemon(message.daemon_pid)
                self._say(f"daemon {message.daemon_pid} goes on with job {self.job}")
            case msg.Refused() if self._orphaned:
                raise DaemonUnavailable(
                    f"the daemon of job {self.job} is gone, and the one that took its place does not know how it "
                    f"went on ({message.reason}); what its ranks printed is in {self.log_dir}"
                )
            case msg.Happened():
                self._show_event(json.loads(message.line))
            case msg.JobEnded():
                self.ended = message
            case _:
                pass
        return message

    def _show(self, output: msg.Output) -> None:
        if not self._shown(output.rank, output.stream):
            return
        out = sys.stdout if output.stream == "stdout" else sys.stderr
        prefix = "" if self._world_size == 1 else f"[{'standby' if output.rank < 0 else output.rank}]: "
        start = prefix.encode()
        out.buffer.write(start + output.data.replace(b"\n", b"\n" + start) + b"\n")
        out.buffer.flush()

    def _show_event(self, event: dict[str, Any]) -> None:
        if self._show_events is not None and event["event"] not in self._show_events:
            return
        places = [f"{name} {event[name]}" for name in ("rank", "step") if event[name] is not None]
        where = f" ({', '.join(places)})" if places else ""
        name = event["event"] if self._show_events is None else SHOWN_EVENTS.get(event["event"])
        print(f"flashrec: {name or event['event']}{where}: {event['reason']}", file=sys.stderr, flush=True)

    # --- without a daemon ---------------------------------------------------------------------------------

    def _be_orphaned(self) -> None:
        if self._client.private:
            raise DaemonUnavailable(f"the daemon of job {self.job} is gone, and the job with it")
        self._orphaned = True
        self._say(
            f"the daemon of job {self.job} is gone; training goes on, unprotected until another runs: "
            f"flashrecd --dir {self._client.run_dir}"
        )

    def _look_for_daemon(self) -> None:
        """Ask the one that is there, if one is, to be attached to the job again."""
        now = time.monotonic()
        if now < self._attach_at:
            return
        if daemon_runs_in(self._client.run_dir):
            self._attach_at = now + ATTACH_S
            self._client.reconnect()
            shown = tuple((proc, stream, end) for (proc, stream), end in self._outputs.items())
            self._client.send(msg.Attach(__version__, self.job, self._pid, shown))
        elif not self.shm_dir.exists():
            raise DaemonUnavailable(
                f"the daemon of job {self.job} is gone, and its ranks have ended since: how is not known. What they "
                f"printed is in {self.log_dir}"
            )

    def _end_without_daemon(self) -> None:
        """Nobody else can."""
        self._say("there is no daemon; the ranks are killed")
        until = time.monotonic() + GONE_S
        while self.shm_dir.exists() and time.monotonic() < until:
            end_processes(self.shm_dir)
            remove_stale()
            time.sleep(LOOK_S / 10)
        self.ended = msg.JobEnded(self.job, INTERRUPTED, "it was interrupted, while it had no daemon")

    @staticmethod
    def _say(text: str) -> None:
        print(f"flashrec: {text}", file=sys.stderr, flush=True)

    # --- interrupts ---------------------------------------------------------------------------------------

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            print("flashrec: ending the job; once more to end it at once", file=sys.stderr, flush=True)
        elif self._interrupts > 2:
            raise KeyboardInterrupt
        if self._writing:  # perhaps for ever: nobody reads what the job prints
            self._pass_on_interrupts()

    def _pass_on_interrupts(self) -> None:
        if self._interrupts > self._passed_on:
            self._passed_on = self._interrupts
            if self._orphaned:
                self._end_without_daemon()
                return
            self._client.send(msg.StopJob(self.job, hard=self._interrupts > 1))
