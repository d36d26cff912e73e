"""Two hosts in one machine: network namespaces, linked by pairs of virtual interfaces.

Each namespace is that of a process which ends when its standard input does, so with the test, however that ends; the
kernel then removes namespace and interfaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest


class Host:
    """One namespace. `number`: the last part of its addresses."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.pid = self._holder.pid

    def ready(self) -> bool:
        """Whether the namespace is there; False if this machine does not let us make one."""
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if self._holder.poll() is not None:
                return False
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{self.pid}/ns/net") != own:
                    return True
            time.sleep(0.005)
        return False

    def command(self, *command: str | Path) -> list[str | Path]:
        """What runs `command` on this host."""
        return ["nsenter", "--target", str(self.pid), "--net", *command]

    def run(self, *command: str) -> None:
        done = subprocess.run(self.command(*command), capture_output=True, text=True, timeout=20)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(*command), text=True, **options)

    def address(self, network: str) -> str:
        return f"{NETWORKS[network]}.{self.number}"

    def close(self) -> None:
        stdin: IO[bytes] | None = self._holder.stdin
        assert stdin is not None
        assert self._holder.stderr is not None
        stdin.close()
        self._holder.wait(10)
        self._holder.stderr.close()


NETWORKS = {"control": "10.77.7", "data": "10.78.7"}


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """With a link each for control and data. Skips the test where they cannot be made, and says why."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} here (iproute2, util-linux)")
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(contextlib.closing(Host(number))) for number in (1, 2))
        if not (one.ready() and two.ready()):
            pytest.skip("this machine does not let us make a network namespace")
        try:
            _link(one, two)
        except OSError as error:
            pytest.skip(f"no virtual interfaces here: {error}")
        yield one, two


def _link(one: Host, two: Host) -> None:
    for network in NETWORKS:
        one.run("ip", "link", "add", network, "type", "veth", "peer", "name", network, "netns", str(two.pid))
    for host in (one, two):
        host.run("ip", "link", "set", "lo", "up")
        for network in NETWORKS:
            host.run("ip", "address", "add", f"{host.address(network)}/24", "dev", network)
            host.run("ip", "link", "set", network, "up")
