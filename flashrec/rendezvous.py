"""The store in which gloo's ranks find each other, carried by the daemon: no port is opened for it.

A value is put once per generation and fetched by whoever needs it; a fetch waits in the daemon until the
value is there. `abort()` ends every wait of this store, from any thread.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from flashrec.errors import GroupsAborted
from flashrec.protocol import messages as msg
from flashrec.torch_private import Store

DEADLINE_S = 1800.0


class RendezvousStore(Store):
    """One generation's key-value store. Keys and values are small (addresses)."""

    def __init__(self, proc: str, generation: int, send: Callable[[msg.Message], None]) -> None:
        super().__init__()
        self.generation = generation
        self._proc = proc
        self._send = send
        self._values: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._asked: set[str] = set()
        self._changed = threading.Condition()
        self._aborted = False

    def take(self, value: msg.Value) -> None:
        """The daemon's answer to a fetch; called by the link's thread."""
        with self._changed:
            if value.generation == self.generation:
                self._values[value.key] = value.value
                self._changed.notify_all()

    def say_again(self) -> None:
        """To another daemon, which has heard nothing of this generation; called by the link's thread."""
        with self._changed:
            for key, value in self._own.items():
                self._send(msg.Put(self._proc, self.generation, key, value))
            for key in self._asked - self._values.keys():
                self._send(msg.Get(self._proc, self.generation, key))

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = self._own[key] = data
        self._send(msg.Put(self._proc, self.generation, key, data))

    def get(self, key: str) -> bytes:
        self._await([key])
        return self._values[key]

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        self._await(list(keys))

    def check(self, keys: Any) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        raise NotImplementedError("the rendezvous store only carries addresses")

    def _await(self, keys: list[str]) -> None:
        with self._changed:
            for key in keys:
                if key not in self._values and key not in self._asked:
                    self._asked.add(key)
                    self._send(msg.Get(self._proc, self.generation, key))
            arrived = self._changed.wait_for(
                lambda: self._aborted or all(key in self._values for key in keys), timeout=DEADLINE_S
            )
            if self._aborted:
                raise GroupsAborted(f"the forming of generation {self.generation} was given up")
            if not arrived:
                raise TimeoutError(
                    f"generation {self.generation}: {keys} did not arrive in {DEADLINE_S:.0f} s"
                )
