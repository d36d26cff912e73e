"""The store inside a daemon: for one machine, with no other program."""

from flashrecd.store.base import Conflict, Entry, Lease, Store


class EmbeddedStore(Store):
    """Dies with its daemon; what is in it can be published again."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._leases: dict[str, Lease] = {}
        self._revision = 0
        self._token = 0

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def put(self, key: str, value: bytes, expected: int | None) -> Entry:
        current = self._entries.get(key)
        revision = current.revision if current else 0
        if expected is not None and expected != revision:
            raise Conflict(f"{key} is at revision {revision}, not {expected}")
        self._revision += 1
        entry = self._entries[key] = Entry(bytes(value), self._revision)
        return entry

    def delete(self, key: str) -> None:
        self._entries.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self._entries if key.startswith(prefix))

    def acquire(self, name: str, holder: str, ttl_s: float, now: float) -> Lease | None:
        current = self._leases.get(name)
        if current is None or current.expires_at <= now:
            self._token += 1
            lease = Lease(holder, self._token, now + ttl_s)
        elif current.holder == holder:
            lease = current._replace(expires_at=now + ttl_s)
        else:
            return None
        self._leases[name] = lease
        return lease

    def release(self, name: str, token: int) -> None:
        if name in self._leases and self._leases[name].token == token:
            del self._leases[name]
