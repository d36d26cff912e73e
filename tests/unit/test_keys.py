"""The cluster key: its file, whom it admits, and that nobody else gets in."""

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from click.testing import CliRunner
from zmq.utils.monitor import recv_monitor_message

from flashrec.cli import commands
from flashrec.errors import EnvironmentFault, UsageError
from flashrec.protocol.keys import Authenticator, ClusterKey, LogBudget

PATIENCE_MS = 20_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster.key"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def text_of(key: ClusterKey, *more: str) -> str:
    return "\n".join([f"public = {key.public.decode()}", f"secret = {key.secret.decode()}", *more])


def test_a_written_key_is_read_back(path: Path) -> None:
    key, other = ClusterKey.generate(), ClusterKey.generate()
    key = ClusterKey(public=key.public, secret=key.secret, allow=frozenset([other.public]))
    key.write(path)
    assert ClusterKey.load(path) == key
    assert key.admitted == {key.public, other.public}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_file_is_private_whatever_the_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        ClusterKey.generate().write(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_is_never_overwritten(path: Path) -> None:
    first = ClusterKey.generate()
    first.write(path)
    with pytest.raises(UsageError, match="never overwritten"):
        ClusterKey.generate().write(path)
    assert ClusterKey.load(path) == first


def test_a_link_that_leads_nowhere_is_not_written_through(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="never overwritten"):
        ClusterKey.generate().write(path)
    assert not (tmp_path / "elsewhere").exists()


def test_no_folder_no_key(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="No such file"):
        ClusterKey.generate().write(tmp_path / "none" / "cluster.key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o601, 0o777])
def test_a_key_that_others_may_use_is_refused(path: Path, mode: int) -> None:
    write(path, text_of(ClusterKey.generate()), mode)
    with pytest.raises(UsageError, match=f"mode 0{mode:o}.*chmod 600"):
        ClusterKey.load(path)


def test_another_users_key_is_refused(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    ClusterKey.generate().write(path)
    os.chown(path, 12345, -1)
    with pytest.raises(UsageError, match="belongs to user 12345"):
        ClusterKey.load(path)


def test_what_is_not_a_file_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        ClusterKey.load(path)
    with pytest.raises(UsageError, match="not a regular file"):
        ClusterKey.load(tmp_path)
    os.mkfifo(path, 0o600)
    with pytest.raises(UsageError, match="not a regular file"):
        ClusterKey.load(path)


KEY, OTHER = ClusterKey.generate(), ClusterKey.generate()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "0 public keys"),
        (f"public = {KEY.public.decode()}", "0 secret keys"),
        (text_of(KEY, f"secret = {KEY.secret.decode()}"), "2 secret keys"),
        (f"public = {OTHER.public.decode()}\nsecret = {KEY.secret.decode()}", "does not belong"),
        (text_of(KEY, "allow = short"), "not a CURVE key"),
        (text_of(KEY, "allow = " + "~" * 40), "not a CURVE key"),
        (text_of(KEY, "allow = " + "#" * 40), "not a CURVE key"),  # more than four bytes in five characters
        (text_of(KEY, f"alow = {OTHER.public.decode()}"), "line 3 .*did you mean allow"),
        (text_of(KEY, "whatever"), "line 3"),
        (text_of(KEY) + "\n" + "#" * (1 << 16), "longer than"),
    ],
)
def test_a_malformed_key_is_refused_and_its_secret_not_shown(path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        ClusterKey.load(write(path, text))
    assert KEY.secret.decode() not in str(caught.value)
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_text_are_refused(path: Path) -> None:
    path.write_bytes(bytes(range(256)))
    path.chmod(0o600)
    with pytest.raises(UsageError, match="malformed"):
        ClusterKey.load(path)


def test_the_secret_is_not_in_the_repr() -> None:
    assert KEY.secret.decode() not in repr(KEY)


def test_a_token_follows_from_the_secret_and_does_not_show_it() -> None:
    again = ClusterKey(public=KEY.public, secret=KEY.secret, allow=frozenset([OTHER.public]))
    assert KEY.token() == again.token() != OTHER.token()
    assert len(KEY.token()) == 32
    assert KEY.secret not in KEY.token()


def test_keygen_writes_a_key_and_refuses_to_write_another_there(path: Path) -> None:
    first = CliRunner().invoke(commands, ["keygen", str(path)])
    assert first.exit_code == 0
    key = ClusterKey.load(path)
    assert key.secret.decode() not in first.output
    second = CliRunner().invoke(commands, ["keygen", str(path)])
    assert isinstance(second.exception, UsageError)
    assert ClusterKey.load(path) == key


# --- the log ------------------------------------------------------------------------------------------


def test_a_log_budget_says_how_many_lines_it_left_out() -> None:
    lines: list[str] = []
    now = [0.0]
    budget = LogBudget(lines.append, burst=2, refill_s=10, clock=lambda: now[0])
    for number in range(1000):
        budget.write(str(number))
    assert lines == ["0", "1"]
    now[0] = 10.0
    budget.write("later")
    assert lines[2:] == ["later (998 more since the last such line)"]
    now[0] = 1000.0
    for _ in range(5):
        budget.write("again")
    assert lines[3:] == ["again", "again"]
    assert budget.count == 1006


# --- sockets ------------------------------------------------------------------------------------------


class Server:
    """An echo that only holders of a key reach, and how each connection to it ended."""

    def __init__(self, context: zmq.Context[Any], key: ClusterKey) -> None:
        self.socket = zmq.Context.shadow(context).socket(zmq.ROUTER)
        self.socket.linger = 0
        key.as_server(self.socket)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def next_event(self) -> int:
        assert self.monitor.poll(PATIENCE_MS), "no connection came to an end"
        event = recv_monitor_message(self.monitor)["event"]
        assert isinstance(event, int)
        return event

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    ended = threading.Thread(target=context.term, daemon=True)  # it would wait for ever for an open socket
    ended.start()
    ended.join(PATIENCE_MS / 1000)
    assert not ended.is_alive()


def client(context: zmq.Context[Any], port: int, public: bytes, secret: bytes, server: bytes) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server, public, secret
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def test_a_holder_of_the_key_is_admitted_and_its_public_key_known(context: zmq.Context[Any]) -> None:
    with Authenticator(context, KEY) as authenticator:
        server = Server(context, KEY)
        with context.socket(zmq.DEALER) as dealer:
            KEY.as_client(dealer)
            dealer.connect(f"tcp://127.0.0.1:{server.port}")
            dealer.send(b"hello")
            assert server.socket.poll(PATIENCE_MS)
            _, frame = server.socket.recv_multipart(copy=False)
            assert frame.bytes == b"hello"
            assert frame.get("User-Id") == KEY.public.decode()
        server.close()
        assert authenticator.denied == 0


def test_only_listed_keys_are_admitted(context: zmq.Context[Any]) -> None:
    lines: list[str] = []
    stranger = ClusterKey.generate()
    key = ClusterKey(public=KEY.public, secret=KEY.secret, allow=frozenset([OTHER.public]))
    with Authenticator(context, key, lines.append) as authenticator:
        server = Server(context, key)
        with client(context, server.port, stranger.public, stranger.secret, KEY.public):
            assert server.next_event() == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        assert authenticator.denied == 1
        assert stranger.public.decode() in lines[0]
        with client(context, server.port, OTHER.public, OTHER.secret, KEY.public):
            assert server.next_event() == zmq.EVENT_HANDSHAKE_SUCCEEDED
        server.close()


def test_no_key_and_a_key_of_another_cluster_get_nowhere(context: zmq.Context[Any]) -> None:
    with Authenticator(context, KEY):
        server = Server(context, KEY)
        with client(context, server.port, OTHER.public, OTHER.secret, OTHER.public):
            assert server.next_event() == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{server.port}")
            assert server.next_event() == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        assert not server.socket.poll(0)
        server.close()


def test_a_server_without_an_authenticator_admits_nobody(context: zmq.Context[Any]) -> None:
    server = Server(context, KEY)
    with client(context, server.port, KEY.public, KEY.secret, KEY.public):
        assert server.next_event() == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    server.close()


def test_a_client_does_not_talk_to_a_server_without_the_key(context: zmq.Context[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, context.socket(zmq.DEALER) as dealer:
        listener.settimeout(PATIENCE_MS / 1000)
        dealer.linger = 0
        KEY.as_client(dealer)
        dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        dealer.send(b"what nobody may read")
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(PATIENCE_MS / 1000)
            # A ZMTP 3.0 greeting that offers no security at all: the client hangs up.
            connection.sendall(b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 16 + b"\0" * 32)
            received = b""
            while data := connection.recv(4096):
                received += data
    assert received.startswith(b"\xff")
    assert b"what nobody may read" not in received


def test_an_authenticator_ends_with_its_context() -> None:
    context: zmq.Context[Any] = zmq.Context()
    authenticator = Authenticator(context, KEY)
    ended = threading.Thread(target=context.term, daemon=True)
    ended.start()
    ended.join(PATIENCE_MS / 1000)
    assert not ended.is_alive()
    authenticator.close()


def test_an_authenticator_in_the_context_of_an_event_loop() -> None:
    context = zmq.asyncio.Context()
    with Authenticator(context, KEY):
        pass
    context.term()


def test_a_context_has_one_authenticator(context: zmq.Context[Any]) -> None:
    with Authenticator(context, KEY), pytest.raises(EnvironmentFault, match="in use"):
        Authenticator(context, KEY)
    with Authenticator(context, KEY):
        pass
