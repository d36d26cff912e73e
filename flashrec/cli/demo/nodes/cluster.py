"""The daemons of the demo's nodes: started, started anew where one was lost, and taken away with all that is theirs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from flashrec.cli.client import LONGEST_PARENT
from flashrec.cli.demo.nodes.hosts import Host, Links, loopback_hosts, namespace_hosts
from flashrec.cli.demo.nodes.node import Node, children_of
from flashrec.cli.orphans import end_orphans, subreaper
from flashrec.errors import EnvironmentFault
from flashrec.protocol.jobdir import remove_stale
from flashrec.protocol.keys import ClusterKey

START_S = 30.0
END_S = 15.0
POLL_S = 0.01
NAMESPACE_PORT = 7400
LOG = "daemon.log"
# It ends with the demo, but the demo does not own it: an owned daemon's ranks would end with it. If the demo is killed,
# and can do it no more, it takes its directory away, and the last one everybody's.
PROGRAM = """
import os, pathlib, shutil, signal, sys
from flashrec.prctl import die_with_parent
die_with_parent(signal.SIGTERM)
owner = os.getppid()
from flashrecd.__main__ import main
from flashrec.protocol.places import daemon_runs_in
try:
    main()
finally:
    if os.getppid() != owner:
        run_dir = pathlib.Path(sys.argv[sys.argv.index("--dir") + 1])
        shutil.rmtree(run_dir, ignore_errors=True)
        if not any(map(daemon_runs_in, run_dir.parent.glob("node*"))):
            shutil.rmtree(run_dir.parent, ignore_errors=True)
"""


class Cluster:
    """`nodes`: the leader's first. `links`: of hosts in namespaces, None on the loopback interface."""

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[Host],
        links: Links | None,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Makes the key of this cluster in `folder`, which nobody else may look into. `options`: of every daemon."""
        self.links = links
        self.key_file = folder / "cluster.key"
        ClusterKey.generate().write(self.key_file)
        self._env = _absolute_path({**os.environ, **(env or {})})
        self._hosts = list(hosts)
        self._options = list(options)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes = [
            Node(
                number=number,
                name=f"node{number}",
                address=host.address,
                run_dir=folder / f"node{number}",
                memory=host.memory,
            )
            for number, host in enumerate(hosts, 1)
        ]
        port = NAMESPACE_PORT if links is not None else _free_port(self.leader.address)
        self._leads_at = f"{self.leader.address}:{port}"

    @property
    def leader(self) -> Node:
        return self.nodes[0]

    def named(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    @property
    def started(self) -> list[int]:
        """Children of this process which are the cluster's, and not a lost daemon's orphans."""
        holders = [host.holder for host in self._hosts if host.holder]
        hub = [self.links.hub] if self.links is not None else []
        return [*(process.pid for process in self._processes.values()), *holders, *hub]

    def start(self) -> None:
        """All daemons, one after another, so that the job has the nodes in this order. EnvironmentFault when one does
        not come up or is not admitted, with what it said."""
        for node in self.nodes:
            self.start_daemon(node)
            self.await_daemon(node)
            if node is not self.leader:
                self._await_member(node)

    def start_daemon(self, node: Node) -> None:
        node.run_dir.mkdir(mode=0o700, exist_ok=True)
        where = ["--listen" if node is self.leader else "--join", self._leads_at]
        options = ["--dir", str(node.run_dir), *where, "--name", node.name, "--key", str(self.key_file)]
        options += ["--data-address", node.address, *self._options]
        command = [sys.executable, "-c", PROGRAM, *options]
        with open(node.run_dir / LOG, "ab") as output:
            self._processes[node.name] = subprocess.Popen(
                self._hosts[node.number - 1].command(*command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._env,
                start_new_session=True,  # Ctrl-C is for the demo, which ends it
            )

    def await_daemon(self, node: Node) -> None:
        self._await(node, lambda: node.daemon_pid() is not None and (node.run_dir / "control.sock").exists())

    def _await_member(self, node: Node) -> None:
        self._await(node, lambda: any(f"{node.name}," in one for one in self.events("node joined")))

    def _await(self, node: Node, done: object) -> None:
        assert callable(done)
        process = self._processes[node.name]
        deadline = time.monotonic() + START_S
        while not done():
            if process.poll() is not None or time.monotonic() > deadline:
                text = (node.run_dir / LOG).read_text(errors="replace").strip()
                raise EnvironmentFault(f"the daemon of {node.name} did not start: {text or 'no output'}")
            time.sleep(POLL_S)

    def events(self, event: str, node: Node | None = None) -> list[str]:
        """The reasons of such lines in the event log of `node`, the leader if None."""
        try:
            text = ((node or self.leader).run_dir / "events.jsonl").read_text()
        except OSError:
            return []
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [line["reason"] for line in lines if line["event"] == event]

    def process(self, node: Node) -> subprocess.Popen[bytes]:
        """The daemon that was started last."""
        return self._processes[node.name]

    def is_up(self, node: Node) -> bool:
        """Whether the daemon that was started last has not ended."""
        return self._processes[node.name].poll() is None

    def reap(self, spared: Collection[int] = ()) -> None:
        """The orphans of a lost daemon are children of this process, and their zombies its to take. `spared`: children
        that somebody else waits for."""
        known = {*self.started, *spared}
        for pid in children_of(os.getpid()):
            if pid not in known:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def orphans(self, spared: Collection[int] = ()) -> list[int]:
        """Processes whose daemon is gone, and which live."""
        self.reap(spared)
        return sorted(set(children_of(os.getpid())) - {*self.started, *spared})

    def close(self, spared: Collection[int] = ()) -> None:
        """End every daemon, the leader first, which ends its job; then whatever is left of them."""
        self.reap(spared)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes.values():
                if process.poll() is None:
                    process.send_signal(number)
            deadline = time.monotonic() + END_S
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        end_orphans({*spared, *self.started})
        for memory in {node.memory for node in self.nodes}:
            remove_stale(memory)


@contextlib.contextmanager
def cluster(
    number: int,
    *,
    namespaces: bool = False,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[Cluster]:
    """`number` nodes, whose daemons run with `options`; at the end nothing of them is left. Raises UsageError where
    namespaces cannot be made, EnvironmentFault when a daemon does not start."""
    spared = children_of(os.getpid())
    # The path of a socket is short, that of a temporary directory need not be.
    parent = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > LONGEST_PARENT else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(subreaper())
        folder = Path(tempfile.mkdtemp(prefix="flashrec-", dir=parent))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts: Sequence[Host]
        links: Links | None = None
        if namespaces:
            hosts, links = stack.enter_context(namespace_hosts(number))
        else:
            hosts = stack.enter_context(loopback_hosts(number))
        made = Cluster(folder, hosts, links, env, options)
        stack.callback(made.close, spared)
        made.start()
        yield made


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _absolute_path(env: dict[str, str]) -> dict[str, str]:
    """In a namespace a process does not begin in this directory."""
    if path := env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(one) for one in path.split(os.pathsep) if one)
    return env
