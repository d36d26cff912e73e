"""Where the demo's nodes are: at addresses of their own on the loopback interface, or in network namespaces.

A namespace is that of a process which ends when its standard input does, so with this one, however that ends; and the
kernel then removes namespace, interfaces and memory. The hub is one more, with a bridge that links the others:

    hub:   bridge --- link1 ... link2 ... link3
                       |         |         |
    nodes:            eth0      eth0      eth0     10.77.9.1, .2, .3, each with a /dev/shm of its own
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from flashrec.errors import EnvironmentFault, UsageError
from flashrec.protocol.jobdir import PARENT

READY_S = 10.0
COMMAND_S = 20.0
NETWORK = "10.77.9"
MEMORY = "mode=1777,size=50%"
TOOLS = ("ip", "unshare", "nsenter", "mount")


class Host(Protocol):
    """`address`: its own. `memory`: its /dev/shm, as this process sees it. `holder`: the process whose namespaces are
    the host's, 0 if it has none."""

    address: str
    memory: Path
    holder: int

    def command(self, *words: str) -> list[str]:
        """What runs `words` there."""


class LoopbackHost:
    """Shares network and memory with all of this machine, so it is told apart by its address alone."""

    holder = 0
    memory = PARENT

    def __init__(self, number: int) -> None:
        self.address = f"127.0.0.{1 + number}"

    def command(self, *words: str) -> list[str]:
        return list(words)


class NamespaceHost:
    """Has a network and a /dev/shm of its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.address = f"{NETWORK}.{number}"
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the demo, which ends it
        )
        self.holder = self._holder.pid
        self.memory = Path(f"/proc/{self.holder}/root") / PARENT.relative_to("/")

    def await_start(self) -> None:
        """Raises UsageError where namespaces cannot be made."""
        own = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "mnt")]
        deadline = time.monotonic() + READY_S
        while self._holder.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                theirs = [os.readlink(f"/proc/{self.holder}/ns/{kind}") for kind in ("net", "mnt")]
                program = Path(f"/proc/{self.holder}/comm").read_text().strip()
                # `unshare` itself may still be about to keep its mounts to itself.
                if program == "cat" and not set(own) & set(theirs):
                    return
            time.sleep(0.002)
        raise UsageError("--namespaces: this machine does not let us make a namespace")

    def command(self, *words: str) -> list[str]:
        return ["nsenter", "--target", str(self.holder), "--net", "--mount", *words]

    def run(self, *words: str) -> None:
        """Raises EnvironmentFault when it fails."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=COMMAND_S)
        if done.returncode:
            raise EnvironmentFault(f"--namespaces: {' '.join(words)}: {done.stderr.strip()}")

    def close(self) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(READY_S)


class Links:
    """What connects the hosts in namespaces. `hub` is the process whose namespace has the bridge."""

    def __init__(self, hub: int) -> None:
        self.hub = hub

    def cut(self, number: int) -> None:
        """Host `number` reaches nobody, and nobody it. Raises EnvironmentFault."""
        self._set(number, "down")

    def heal(self, number: int) -> None:
        self._set(number, "up")

    def _set(self, number: int, state: str) -> None:
        command = ["nsenter", "--target", str(self.hub), "--net"]
        command += ["ip", "link", "set", link_name(number), state]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
        if done.returncode:
            raise EnvironmentFault(f"the link of {link_name(number)}: {done.stderr.strip()}")


def link_name(number: int) -> str:
    return f"link{number}"


def why_no_namespaces() -> str:
    """In words; "" if they can be tried."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"no {' and no '.join(missing)} here (iproute2 and util-linux have them)" if missing else ""


@contextlib.contextmanager
def loopback_hosts(number: int) -> Iterator[list[LoopbackHost]]:
    yield [LoopbackHost(1 + index) for index in range(number)]


@contextlib.contextmanager
def namespace_hosts(number: int) -> Iterator[tuple[list[NamespaceHost], Links]]:
    """`number` hosts on one bridge. Raises UsageError where they cannot be made, EnvironmentFault if it fails."""
    if why := why_no_namespaces():
        raise UsageError(f"--namespaces: {why}")
    with contextlib.ExitStack() as stack:
        hub, *hosts = (
            stack.enter_context(contextlib.closing(NamespaceHost(index))) for index in range(number + 1)
        )
        for host in (hub, *hosts):
            host.await_start()
        hub.run("ip", "link", "add", "bridge", "type", "bridge")
        hub.run("ip", "link", "set", "bridge", "up")
        for host in hosts:
            _connect(hub, host)
            host.run("mount", "-t", "tmpfs", "-o", MEMORY, "tmpfs", str(PARENT))
        yield list(hosts), Links(hub.holder)


def _connect(hub: NamespaceHost, host: NamespaceHost) -> None:
    name = link_name(host.number)
    peer: Sequence[str] = ("peer", "name", "eth0", "netns", str(host.holder))
    hub.run("ip", "link", "add", name, "type", "veth", *peer)
    hub.run("ip", "link", "set", name, "master", "bridge")
    hub.run("ip", "link", "set", name, "up")
    host.run("ip", "link", "set", "lo", "up")
    host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
    host.run("ip", "link", "set", "eth0", "up")
