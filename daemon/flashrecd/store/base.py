"""What the cluster agrees on: members, the lease, the generation, the rank table, the job. Little, and rarely.

One contract; every implementation passes `tests/contract/test_store.py`. Values are bytes, and each write
gives its key a new revision. Time is handed in where a lease is concerned.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple


class Entry(NamedTuple):
    value: bytes
    revision: int


class Lease(NamedTuple):
    """`token` grows with every new holder: a write that bears an older one is refused elsewhere (fencing)."""

    holder: str
    token: int
    expires_at: float


class Conflict(Exception):
    """The key is not at the revision the writer had seen."""


class Store(ABC):
    """A small, strongly consistent map with leases."""

    @abstractmethod
    def get(self, key: str) -> Entry | None:
        """The newest value."""

    @abstractmethod
    def put(self, key: str, value: bytes, expected: int | None) -> Entry:
        """Write; `expected`: the revision seen (0: the key must not exist; None: whatever is there). Conflict."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove; nothing happens if it is not there."""

    @abstractmethod
    def keys(self, prefix: str) -> list[str]:
        """Sorted."""

    @abstractmethod
    def acquire(self, name: str, holder: str, ttl_s: float, now: float) -> Lease | None:
        """Take or renew a lease; None while another holds it."""

    @abstractmethod
    def release(self, name: str, token: int) -> None:
        """Give it back, if it is still the one with this token."""
