"""A leader and a member with addresses of their own, and links between them that fail and are slow."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrec.protocol.keys import ClusterKey
from tests.namespaces import Host, two_hosts

ROOT = Path(__file__).parents[2]
PORT = 7400


class Node:
    """A process on a host, and what it says."""

    def __init__(self, host: Host, **options: str | Path) -> None:
        self.process = host.popen(
            [
                sys.executable,
                "-m",
                "tests.integration.cluster_process",
                *(f"{k}={v}" for k, v in options.items()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}"},
        )
        self.said: list[list[Any]] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def until(self, *begins: str) -> list[Any]:
        """The next thing it says that begins so."""
        try:
            while True:
                self.said.append(json.loads(self._lines.get(timeout=30)))
                if self.said[-1][: len(begins)] == list(begins):
                    return self.said[-1]
        except queue.Empty:
            raise AssertionError(f"it never said {begins}: {self.said}") from None

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def check(self) -> dict[tuple[str, str], dict[str, Any]]:
        """(by, node) -> report."""
        self.tell("check")
        return {(report["by"], report["node"]): report for report in self.until("reports")[1]}

    def end(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            if stream is self.process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    ClusterKey.generate().write(path)
    return path


@contextlib.contextmanager
def cluster(hosts: tuple[Host, Host], key_file: Path) -> Iterator[tuple[Node, Node]]:
    """A leader n0 that listens on every address, and a member n1, both with the data network for data."""
    one, two = hosts
    nodes: list[Node] = []
    try:
        leader = Node(
            one, listen=f"0.0.0.0:{PORT}", name="n0", key_file=key_file, data_address=one.address("data")
        )
        nodes.append(leader)
        leader.until("started")
        member = Node(
            two,
            join=f"{one.address('control')}:{PORT}",
            name="n1",
            key_file=key_file,
            data_address=two.address("data"),
        )
        nodes.append(member)
        assert leader.until("joined", "n1")[2] == two.address("data")
        assert member.until("joined", "n0")[2] == one.address("data")
        yield leader, member
    finally:
        for node in nodes:
            node.end()


def test_two_hosts_form_a_cluster_and_a_cut_link_is_noticed(hosts: tuple[Host, Host], key_file: Path) -> None:
    with cluster(hosts, key_file) as (leader, member):
        member.tell("leader hello")
        assert leader.until("message", "n1")[2] == "hello"
        leader.tell("n1 and hello")
        assert member.until("message", "")[2] == "and hello"

        hosts[1].run("ip", "link", "set", "control", "down")  # nothing says goodbye
        leader.until("closed", "n1")
        member.until("closed", "")
        hosts[1].run("ip", "link", "set", "control", "up")
        leader.until("joined", "n1")
        member.until("joined", "n0")
        member.tell("leader again")
        assert leader.until("message", "n1")[2] == "again"


def test_a_data_address_that_cannot_be_reached_is_named(hosts: tuple[Host, Host], key_file: Path) -> None:
    with cluster(hosts, key_file) as (leader, _):
        reports = leader.check()
        assert [report["problem"] for report in reports.values()] == ["", ""]
        assert all(report["data_bytes_per_s"] > 0 for report in reports.values())
        assert reports["n0", "n1"]["control_bytes_per_s"] > 0

        hosts[1].run("ip", "address", "flush", "dev", "data")
        hosts[1].run("ip", "address", "add", f"{hosts[1].address('data')}/32", "dev", "lo")
        warning = leader.check()["n0", "n1"]["warning"]
        assert f"node n0 does not reach node n1: its data address {hosts[1].address('data')}:" in warning


def test_a_data_address_that_is_slow_is_warned_about(hosts: tuple[Host, Host], key_file: Path) -> None:
    with cluster(hosts, key_file) as (leader, _):
        try:
            slow = "qdisc add dev data root tbf rate 40mbit burst 32kb latency 400ms"
            hosts[1].run("tc", *slow.split())
        except OSError as error:
            pytest.skip(f"links cannot be made slow here: {error}")
        report = leader.check()["n0", "n1"]
        assert report["problem"] == ""
        assert report["data_bytes_per_s"] < 10e6 < report["control_bytes_per_s"]
        assert "is the --data-address of node n1 the right one?" in report["warning"]


def test_without_a_key_nobody_listens_where_others_can_reach_it(hosts: tuple[Host, Host]) -> None:
    node = Node(hosts[0], listen=f"{hosts[0].address('control')}:{PORT}", name="n0")
    try:
        assert "flashrec keygen" in node.until("refused")[1]
    finally:
        node.end()
