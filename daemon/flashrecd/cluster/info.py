"""Who a node is, and how its addresses are written."""

import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass

from flashrec import __version__
from flashrec.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:%_-]{0,254}", re.ASCII)
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]{2,60}\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})", re.ASCII)
_RELEASE = re.compile(r"[A-Za-z0-9.+!_-]{1,64}", re.ASCII)
_INCARNATION = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """A node as the cluster knows it. Raises UsageError for what cannot be."""

    name: str
    """Unique in the cluster."""
    domain: str
    """What fails together with it."""
    data_address: str
    """The host or IP that the ranks' traffic uses."""
    shard_endpoint: str = ""
    """Where its shards are served: tcp://host:port, or "" while no job runs."""
    release: str = __version__
    incarnation: str
    """Of its daemon: 64 random bits in hexadecimal."""
    memory_bytes: int
    """Host memory that it has for state."""

    def __post_init__(self) -> None:
        for what, text, pattern in (
            ("name", self.name, _NAME),
            ("failure domain", self.domain, _NAME),
            ("data address", self.data_address, _HOST),
            ("release", self.release, _RELEASE),
            ("incarnation", self.incarnation, _INCARNATION),
        ):
            if not pattern.fullmatch(text):
                raise UsageError(f"{text!r:.80} cannot be a node's {what}")
        endpoint = _ENDPOINT.fullmatch(self.shard_endpoint)
        if self.shard_endpoint and (endpoint is None or not 0 < int(endpoint[2]) < 65536):
            raise UsageError(f"{self.shard_endpoint!r:.80} cannot be a node's shard endpoint")
        if not 0 <= self.memory_bytes < 1 << 63:
            raise UsageError(f"{self.memory_bytes} cannot be a node's memory in bytes")


def new_incarnation() -> str:
    """For one life of a daemon."""
    return secrets.token_hex(8)


def parse_address(text: str, *, option: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT; an IPv6 host is in brackets, and without them in the result. Raises UsageError."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (":" in bare) != (bare != host) or not _HOST.fullmatch(bare) or not re.fullmatch(r"[0-9]{1,5}", port):
        raise UsageError(f"{option}: {text!r:.80} is not HOST:PORT")
    if int(port) > 65535:
        raise UsageError(f"{option}: there is no port {port}")
    return bare, int(port)


def format_address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> list[str]:
    """The IP addresses of `host`, at least one. Raises UsageError if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"there is no address of {host}: {error.strerror}") from None
    return [str(address[0]) for *_, address in found]


def is_loopback(host: str) -> bool:
    """Whether `host` stands for addresses of this machine alone. Raises UsageError if it stands for none."""
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in resolve(host))


def check_private(host: str, key: object | None, *, option: str) -> None:
    """Raises UsageError if there is no key, and `host` is not of the loopback interface alone."""
    if key is None and not is_loopback(host):
        raise UsageError(
            f"{option} {host} can be reached from other machines: make a key with `flashrec keygen PATH`, copy it "
            "to every node, and give it as --key PATH"
        )


def is_wildcard(host: str) -> bool:
    """Whether it stands for every address of the machine (0.0.0.0 or ::)."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False


def address_towards(host: str, port: int) -> str:
    """The address of this machine that a connection to `host` would come from. Sends nothing. Raises UsageError."""
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port or 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise UsageError(f"no way leads from this machine to {host}")
