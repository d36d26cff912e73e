"""What of a cluster needs no socket: addresses, options, who a node may be, and how much may wait for it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flashrec.errors import ProtocolError, UsageError
from flashrec.protocol import nodes as nd
from flashrec.protocol.keys import ClusterKey
from flashrecd.__main__ import main
from flashrecd.cluster import ClusterOptions, NodeInfo
from flashrecd.cluster.check import Check
from flashrecd.cluster.info import (
    check_private,
    format_address,
    is_loopback,
    is_wildcard,
    new_incarnation,
    parse_address,
)
from flashrecd.cluster.links import MESSAGE_OVERHEAD_BYTES, Window
from flashrecd.cluster.options import cluster_options

KEY = ClusterKey.generate()
INFO: dict[str, Any] = {
    "name": "node-1",
    "domain": "rack-7",
    "data_address": "10.0.0.1",
    "incarnation": "0123456789abcdef",
    "memory_bytes": 1 << 40,
}


# --- addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:7400", "10.0.0.1", 7400),
        ("[::1]:0", "::1", 0),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
        ("node-1.cluster:1", "node-1.cluster", 1),
    ],
)
def test_an_address_is_read_and_written(text: str, host: str, port: int) -> None:
    assert parse_address(text, option="--join") == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":7400",
        "::1:7400",
        "[host]:1",
        "host:x",
        "host:-1",
        "host:65536",
        "a b:1",
        "host:\u0661",
    ],
)
def test_what_is_no_address_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(UsageError, match="--join"):
        parse_address(text, option="--join")


def test_loopback_and_wildcard() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "192.0.2.1", "::", "2001:db8::1")] == [False] * 4
    assert [is_wildcard(host) for host in ("0.0.0.0", "::", "127.0.0.1", "host")] == [
        True,
        True,
        False,
        False,
    ]


def test_without_a_key_other_machines_must_not_reach_it() -> None:
    check_private("127.0.0.1", None, option="--listen")
    check_private("192.0.2.1", KEY, option="--listen")
    with pytest.raises(UsageError, match=r"--listen 192\.0\.2\.1 .*flashrec keygen"):
        check_private("192.0.2.1", None, option="--listen")


# --- who a node may be --------------------------------------------------------------------------------


def test_a_node() -> None:
    assert NodeInfo(**INFO).shard_endpoint == ""
    assert NodeInfo(**INFO, shard_endpoint="tcp://[2001:db8::1]:7400").name == "node-1"
    assert new_incarnation() != new_incarnation()
    NodeInfo(**{**INFO, "incarnation": new_incarnation()})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "-a"),
        ("name", "a\n"),
        ("name", "é"),
        ("name", "x" * 64),
        ("domain", "rack 7"),
        ("data_address", ""),
        ("data_address", "host\x00"),
        ("shard_endpoint", "tcp://host"),
        ("shard_endpoint", "tcp://host:0"),
        ("shard_endpoint", "tcp://host:65536"),
        ("shard_endpoint", "tcp://h/../x:1"),
        ("release", ""),
        ("incarnation", "0123456789ABCDEF"),
        ("memory_bytes", -1),
        ("memory_bytes", 1 << 63),
    ],
)
def test_what_a_node_cannot_be(field: str, value: object) -> None:
    with pytest.raises(UsageError, match="cannot be a node's"):
        NodeInfo(**{**INFO, field: value})


# --- options ------------------------------------------------------------------------------------------


def test_a_leader_on_one_machine_needs_no_key() -> None:
    options = ClusterOptions(listen="127.0.0.1:0", name="n0")
    assert (options.name, options.domain, options.data_address) == ("n0", "n0", "127.0.0.1")
    me = options.node_info(memory_bytes=7)
    assert (me.name, me.memory_bytes) == ("n0", 7)
    assert me.incarnation != options.node_info().incarnation


def test_a_member_uses_the_address_that_it_reaches_the_leader_from() -> None:
    assert ClusterOptions(join="127.0.0.1:7400").data_address == "127.0.0.1"
    assert (
        ClusterOptions(join="127.0.0.1:7400", name="a", data_address="127.0.0.9").data_address == "127.0.0.9"
    )


def test_a_node_is_called_like_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "_gpü 1.cluster-")
    assert ClusterOptions(listen="127.0.0.1:0").name == "gp-1.cluster"
    monkeypatch.setattr("socket.gethostname", lambda: "")
    assert ClusterOptions(listen="127.0.0.1:0").name == "node"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "--listen .*--join"),
        ({"listen": "127.0.0.1:0", "join": "127.0.0.1:1"}, "one of them"),
        ({"join": "127.0.0.1:0"}, "nobody can be reached"),
        ({"join": "0.0.0.0:7400", "key": KEY}, "nobody can be reached"),
        ({"listen": "nowhere"}, "--listen: 'nowhere' is not HOST:PORT"),
        ({"listen": "0.0.0.0:7400", "key": KEY}, "give --data-address"),
        ({"listen": "0.0.0.0:7400", "data_address": "127.0.0.1"}, r"--listen 0\.0\.0\.0 .*keygen"),
        ({"listen": "127.0.0.1:0", "data_address": "192.0.2.1"}, r"--data-address 192\.0\.2\.1 .*keygen"),
        ({"join": "192.0.2.1:7400", "data_address": "127.0.0.1"}, r"--join 192\.0\.2\.1 .*keygen"),
        ({"listen": "127.0.0.1:0", "data_address": "::", "key": KEY}, "other nodes cannot reach"),
        ({"listen": "127.0.0.1:0", "name": "a b"}, "cannot be a node's name"),
        ({"listen": "127.0.0.1:0", "domain": "a/b"}, "cannot be a node's failure domain"),
        ({"listen": "127.0.0.1:0", "bulk": "fast", "key": KEY}, "encrypted or plain"),
        ({"listen": "127.0.0.1:0", "bulk": "plain"}, "needs a --key"),
        ({"listen": "127.0.0.1:0", "replica_mbps": 0.0}, "--replica-mbps must be more than 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ClusterOptions(**options)


def test_with_a_key_any_address_will_do() -> None:
    options = ClusterOptions(listen="0.0.0.0:7400", data_address="192.0.2.1", key=KEY, bulk="plain")
    assert (options.data_address, options.bulk) == ("192.0.2.1", "plain")


def test_the_command_line_of_a_daemon_that_is_alone() -> None:
    assert cluster_options(listen=None, join=None, key_file=None, name=None, data_address=None) is None


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ({"key_file": Path("k")}, "--key"),
        ({"name": "n"}, "--name"),
        ({"data_address": "h"}, "--data-address"),
        ({"replica_mbps": 1.0}, "--replica-mbps"),
    ],
)
def test_options_of_a_cluster_without_one_are_refused(said: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is of a cluster"):
        cluster_options(**{"listen": None, "join": None, "key_file": None, **said})


def test_the_key_is_read_where_the_command_line_says(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    KEY.write(path)
    options = cluster_options(listen="127.0.0.1:0", join=None, key_file=path, bulk=None)
    assert options is not None
    assert (options.key, options.key_file, options.bulk) == (KEY, path, "encrypted")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        cluster_options(listen="127.0.0.1:0", join=None, key_file=path)


# --- how much may wait --------------------------------------------------------------------------------


def test_a_window_closes_when_nothing_is_taken_and_opens_when_it_is() -> None:
    here, there = Window(10_000), Window(10_000)
    sent = 0
    while here.admit(1000):
        sent += 1
    assert sent == 10_000 // (1000 + MESSAGE_OVERHEAD_BYTES) + 1
    for _ in range(sent):
        there.take(1000)
    here.acknowledge(there.told())
    assert here.admit(1000)


def test_the_other_end_is_told_before_the_window_closes() -> None:
    there = Window(8_000)
    told_after = [n for n in range(1, 9) if there.take(744) and there.told()]
    assert told_after == [2, 4, 6, 8]  # an eighth of the window is 1000 bytes, one message


def test_what_was_never_sent_cannot_have_been_taken() -> None:
    window = Window()
    window.admit(100)
    window.acknowledge(50)
    for taken_bytes in (49, -1, 100 + MESSAGE_OVERHEAD_BYTES + 1):
        with pytest.raises(ProtocolError, match="it has taken"):
            window.acknowledge(taken_bytes)


# --- who reaches whom ---------------------------------------------------------------------------------


class Nodes:
    """Answers a Check as nodes would; `rates` for (by, node), taken from the front; `absent` ones cannot be asked."""

    def __init__(self, rates: dict[tuple[str, str], list[tuple[float, float]]], absent: str = "") -> None:
        self.check = Check(self.ask)
        self.rates, self.absent = rates, absent
        self.at_once: list[tuple[str, str]] = []
        self.opened: dict[str, bytes] = {}
        self.closed: list[str] = []

    def ask(self, node: str, message: Any) -> bool:
        if node == self.absent:
            return False
        answer: Any = None
        match message:
            case nd.OpenProbe():
                self.opened[node] = message.token
                answer = nd.ProbeOpened(message.request, (("data", node, 1),), "")
            case nd.Probe():
                assert message.token == self.opened[message.node]
                data, control = self.rates[node, message.node].pop(0)
                answer = nd.Probed(message.request, message.node, (("data", data), ("control", control)), "")
            case nd.CloseProbe():
                self.closed.append(node)
        if answer is not None:
            asyncio.get_running_loop().call_soon(self.check.answered, node, answer)
        return True


def test_a_check_asks_each_ordered_pair() -> None:
    names = ["a", "b", "c"]
    pairs = [(by, node) for by in names for node in names if by != node]
    nodes = Nodes({pair: [(2e9, 1e9)] for pair in pairs})
    reports = asyncio.run(nodes.check.run(names, {}))
    assert sorted((r.by, r.node) for r in reports) == pairs
    assert not any(r.warning for r in reports)
    assert nodes.closed == names


def test_data_that_is_slower_than_control_is_warned_about_once_it_is_so_twice() -> None:
    nodes = Nodes({("a", "b"): [(1e8, 1e9), (1e8, 1e9)], ("b", "a"): [(1e8, 1e9), (1e9, 1e9)]})
    slow, other = asyncio.run(nodes.check.run(["a", "b"], {}))
    assert "node a gets data from node b at 100 MB/s, and at 1000 MB/s" in slow.warning
    assert "--data-address of node b" in slow.warning
    assert other.warning == ""


def test_a_node_that_is_not_there_is_named_in_its_pairs() -> None:
    nodes = Nodes({("a", "c"): [(1, 1)], ("c", "a"): [(1, 1)]}, absent="b")
    reports = {(r.by, r.node): r.warning for r in asyncio.run(nodes.check.run(["a", "b", "c"], {}))}
    assert {pair for pair, warning in reports.items() if warning} == {
        (by, node) for by, node in reports if "b" in (by, node)
    }
    assert reports["a", "b"] == "node a does not reach node b: it is not in the cluster"


def test_a_node_that_goes_ends_the_wait_for_it() -> None:
    def ask(node: str, message: Any) -> bool:
        asyncio.get_running_loop().call_soon(check.gone, node, "its connection closed")
        return True

    check = Check(ask)
    reports = asyncio.run(check.run(["a", "b"], {}))
    assert {r.problem for r in reports} == {"it has gone: its connection closed"}


def test_an_answer_that_nobody_asked_for_changes_nothing() -> None:
    Check(lambda node, message: True).answered("a", nd.Probed(7, "b", (), ""))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--listen", "0.0.0.0:7400", "--data-address", "127.0.0.1"], "flashrec keygen"),
        (["--listen", "127.0.0.1:7400", "--join", "127.0.0.1:7400"], "one of them"),
        (["--domain", "rack-7"], "--domain is of a cluster"),
        (["--join", "127.0.0.1:7400", "--key", "/nowhere/cluster.key"], "cannot read the cluster key"),
    ],
)
def test_a_daemon_says_in_one_line_what_is_wrong_with_its_options(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    run_dir = tmp_path / "run"
    done = CliRunner().invoke(main, ["--dir", str(run_dir), *arguments])
    assert done.exit_code == 1
    assert done.stderr.startswith("flashrecd: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not run_dir.exists()
