"""The rank's side of replication: tell the keepers on other nodes what is sealed, and wait for them. No torch.

A keeper is the shard server of another node. It pulls a sealed version from the shard server of this rank's own node,
and is sent private state; what it acknowledges survives this node. One thread talks to all keepers, over a connection
each, which is made anew for as long as it breaks; what has not been acknowledged is said again.

What counts when: an acknowledgement is of the last thing said about a version. A version that is sealed again in a
later generation (its step was redone) is asked for again; one that was acknowledged before the generation changed and
is not said again counts still. Nothing that was said in an older generation is repeated in a new one unless `wait`
names it: it may have been lost with its step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from flashrec.errors import FlashrecError, IntegrityError, UsageError
from flashrec.state.arena import SealedState
from flashrec.state.codec import checksum
from flashrec.state.describing import described, open_envelope
from flashrec.state.keeperlink import Broken, KeeperAddress, KeeperLink, Kind, Said, Saying, Secure
from flashrec.state.private_slots import KEPT_VERSIONS
from flashrec.state.remote import ShardConnection, SourceFailed
from flashrec.state.shardwire import (
    MAX_PRIVATE_BYTES,
    PIECE_BYTES,
    Describe,
    Keep,
    Private,
    Replicate,
    ReplyHeader,
    Request,
    Where,
)

__all__ = ["KeeperAddress", "NotKept", "RemoteStore", "Replicator"]

# How soon a cancellation is noticed.
_POLL_S = 0.02
# Acknowledgements of versions older than the newest few are of no use to anybody.
_KEPT_ACKNOWLEDGEMENTS = 16


class NotKept(FlashrecError):
    """A keeper has not acknowledged what must be kept; the message names it and says why. `is_cancelled`: the wait was
    ended from outside, and nothing is known to be wrong."""

    def __init__(self, message: str, *, is_cancelled: bool = False) -> None:
        super().__init__(message)
        self.is_cancelled = is_cancelled


@dataclass
class _Keeper:
    """What is known of one keeper. Guarded by the replicator's lock."""

    address: KeeperAddress
    acknowledged: dict[tuple[Kind, int], int] = field(default_factory=dict)  # serial
    reason: str = "it has not answered yet"
    # Why it never will, by serial.
    refused: dict[int, str] = field(default_factory=dict)

    def has(self, said: Said) -> bool:
        return self.acknowledged.get((said.kind, said.version)) == said.serial


class Replicator:
    """Gets what `rank` of `job` seals acknowledged by its keepers. `own_address`: the shard server of this rank's node,
    as other nodes reach it; `secure` and `token`: what the cluster's shard servers ask of a client.

    `sealed` and `keep_private` may come from any thread, the rest belongs to one."""

    def __init__(self, rank: int, job: str, own_address: str, secure: Secure, token: bytes = b"") -> None:
        self._rank = rank
        self._job = job
        self._own_address = own_address
        self._secure = secure
        self._token = token
        self._changed = threading.Condition()
        self._generation = 0
        self._keepers: dict[KeeperAddress, _Keeper] = {}
        # The last thing said of each version, and which of them is to be repeated until it is acknowledged.
        self._said: dict[tuple[Kind, int], Said] = {}
        self._active: dict[tuple[Kind, int], Said] = {}
        self._serials = itertools.count(1)
        self._is_closed = False
        self._failure: str | None = None
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def set_keepers(self, keepers: Sequence[KeeperAddress], generation: int) -> None:
        """The keepers from `generation` on. What those who stay have acknowledged counts still; what nobody has yet is
        said again only when `sealed`, `keep_private` or `wait` names it."""
        with self._changed:
            assert not self._is_closed, "the replicator has been closed"
            if generation != self._generation:
                self._active.clear()
            self._generation = generation
            self._keepers = {one: self._keepers.get(one) or _Keeper(one) for one in keepers}
            for keeper in self._keepers.values():
                keeper.refused.clear()
            if self._keepers and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flashrec-replicate", daemon=True)
                self._thread.start()
        self._wake()

    def sealed(self, version: int, generation: int) -> None:
        """`version` is sealed in this node's arena. Returns at once. What an older generation had said of it, or of
        later versions, is void."""
        with self._changed:
            known = self._said.get(("sealed", version))
            if known is not None and known.generation == generation:
                self._active["sealed", version] = known
            else:
                self._say("sealed", version, generation, b"")
        self._wake()

    def keep_private(self, version: int, generation: int, payload: bytes, *, full: bool = False) -> None:
        """This is the private state of `version`, in place of what was said to be before. Returns at once. `full`:
        that of a full version, kept apart from those of every step.

        Raises UsageError when it is larger than what a keeper takes."""
        if len(payload) > MAX_PRIVATE_BYTES:
            raise UsageError(
                f"rank {self._rank}'s private state has {len(payload)} bytes; keepers take {MAX_PRIVATE_BYTES} "
                "at most: what is large belongs among the tensors"
            )
        with self._changed:
            kind: Kind = "full" if full else "private"
            known = self._said.get((kind, version))
            if known is not None and known.generation == generation and known.payload == payload:
                self._active[kind, version] = known
            else:
                self._say(kind, version, generation, payload)
        self._wake()

    def wait(
        self,
        *,
        sealed: int | None,
        private: Sequence[int],
        is_cancelled: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        """Until every keeper has acknowledged version `sealed` (if any) and the private state of all versions
        `private`: that of a full version, where that was said of it.

        Raises NotKept, naming the keeper: at once when it refuses (its generation is over, say), after `timeout_s`
        seconds with the last reason it gave; and when `is_cancelled` says so. UsageError for private state that was
        never given."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            needs = [] if sealed is None else [self._need(("sealed",), sealed)]
            needs += [self._need(("full", "private"), version) for version in private]
        self._wake()
        while True:
            if is_cancelled():
                raise NotKept("the wait for the keepers was cancelled", is_cancelled=True)
            with self._changed:
                lacking = [
                    (keeper, said)
                    for keeper in self._keepers.values()
                    for said in needs
                    if not keeper.has(said)
                ]
                if not lacking:
                    return
                if self._failure is not None:
                    raise NotKept(self._failure)
                for keeper, said in lacking:
                    if said.serial in keeper.refused:
                        raise NotKept(f"{keeper.address} does not keep {said}: {keeper.refused[said.serial]}")
                now = time.monotonic()
                if now >= deadline:
                    keeper, said = lacking[0]
                    more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
                    raise NotKept(
                        f"{keeper.address} has not acknowledged {said} within {timeout_s:g} s: {keeper.reason}{more}"
                    )
                self._changed.wait(min(_POLL_S, deadline - now))

    def close(self) -> None:
        """Let go of thread and connections. May be called again."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"x")
        if self._thread is not None:
            self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # --- what was said; under the lock ----------------------------------------------------------------------

    def _say(self, kind: Kind, version: int, generation: int, payload: bytes) -> None:
        if generation < self._generation:
            return  # of an attempt that is over
        said = Said(kind, version, generation, next(self._serials), payload)
        for key, other in tuple(self._said.items()):
            if key[0] == kind and key[1] >= version and other.generation < generation:
                self._forget(key)
        self._said[kind, version] = self._active[kind, version] = said
        # Keepers keep no more than these; of sealed versions two, and only the newest is on its way.
        newest = sorted((key for key in self._said if key[0] == kind), key=lambda key: key[1])
        for key in newest[:-KEPT_VERSIONS]:
            self._forget(key)
        if kind == "sealed":
            for key in [key for key in self._active if key[0] == kind and key[1] != version]:
                del self._active[key]

    def _forget(self, key: tuple[Kind, int]) -> None:
        self._said.pop(key, None)
        self._active.pop(key, None)

    def _need(self, kinds: Sequence[Kind], version: int) -> Said:
        """What was said of a version, of the first of these kinds; it is said (again) to whoever has not acknowledged
        it."""
        said = next((self._said[kind, version] for kind in kinds if (kind, version) in self._said), None)
        if said is None and "sealed" in kinds:
            self._say("sealed", version, self._generation, b"")
            said = self._said["sealed", version]
        if said is None:
            raise UsageError(f"rank {self._rank} was never told its private state of version {version}")
        self._active[said.kind, version] = said
        return said

    # --- the thread -------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            if not self._is_closed:
                with contextlib.suppress(BlockingIOError):  # it has been woken often enough
                    os.write(self._wake_write, b"x")

    def _run(self) -> None:
        links: dict[KeeperAddress, KeeperLink] = {}
        with zmq.Context() as context:
            try:
                while self._tend(context, links):
                    pass
            except Exception as error:  # whoever waits must hear of it, whatever it is
                with self._changed:
                    self._failure = f"replication has ended: {type(error).__name__}: {error}"
                    self._changed.notify_all()
            finally:
                for link in links.values():
                    link.close()

    def _tend(self, context: zmq.Context[Any], links: dict[KeeperAddress, KeeperLink]) -> bool:
        """One round: connect, say, wait a little, listen. False when it is time to end."""
        with self._changed:
            if self._is_closed:
                return False
            keepers = dict(self._keepers)
            generation = self._generation
            active = sorted(self._active.values(), key=lambda said: (said.version, said.serial))
            todo = {
                address: [said for said in active if not one.has(said)] for address, one in keepers.items()
            }
            todo = {
                address: [said for said in what if said.serial not in keepers[address].refused]
                for address, what in todo.items()
            }
        for address in [address for address in links if address not in keepers]:
            links.pop(address).close()
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        now = time.monotonic()
        wake_at = now + 1.0
        for address, what in todo.items():
            link = links.setdefault(address, KeeperLink(address, self._secure, self._token))
            try:
                again_at = link.say(context, what, self._request_for(generation), now)
            except Broken as error:
                self._heard(keepers[address], str(error))
                again_at = link.retry_at
            wake_at = min(wake_at, again_at)
            link.register(poller)
        ready = dict(poller.poll(max(1, int(1000 * (wake_at - now)))))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        for address, link in links.items():
            try:
                for said, header in link.listen(ready):
                    self._answered(keepers[address], link, said, header)
            except Broken as error:
                self._heard(keepers[address], str(error))
        return True

    def _request_for(self, generation: int) -> Saying:
        """The messages that say something, once they are given their ids."""

        def make(said: Said) -> Iterator[tuple[Request, memoryview | None]]:
            current = max(generation, said.generation)
            if said.kind == "sealed":
                yield Replicate(0, self._rank, said.version, current, self._own_address), None
                return
            payload = memoryview(said.payload)
            digest = checksum(payload)
            for offset in range(0, max(1, payload.nbytes), PIECE_BYTES):
                is_full = said.kind == "full"
                request = Keep(0, self._rank, said.version, current, is_full, payload.nbytes, digest, offset)
                yield request, payload[offset : offset + PIECE_BYTES]

        return make

    def _answered(self, keeper: _Keeper, link: KeeperLink, said: Said, header: ReplyHeader) -> None:
        with self._changed:
            if header.status == "ok":
                keeper.acknowledged[said.kind, said.version] = said.serial
                for key in list(keeper.acknowledged)[:-_KEPT_ACKNOWLEDGEMENTS]:
                    del keeper.acknowledged[key]
            else:
                keeper.reason = f"{header.status}: {header.detail}"
                if header.status == "refused":
                    keeper.refused[said.serial] = header.detail
                else:
                    link.later(said)
            self._changed.notify_all()

    def _heard(self, keeper: _Keeper, reason: str) -> None:
        with self._changed:
            keeper.reason = reason


class RemoteStore:
    """What another node's shard server at `address` has of sealed and private state: for a replacement. Both methods
    raise IntegrityError when it is not there, not whole, or the server is: take another source; and when cancelled."""

    def __init__(
        self,
        address: str,
        secure: Secure,
        token: bytes,
        is_cancelled: Callable[[], bool],
        *,
        timeout_s: float = 10.0,
    ) -> None:
        self._address = address
        self._secure = secure
        self._token = token
        self._is_cancelled = is_cancelled
        self._timeout_s = timeout_s

    def sealed_state(self, where: Where, rank: int, version: int) -> SealedState:
        """All but the tensors' bytes, which are pulled by the manifests: Source(manifest, address, token, secure)."""
        what = f"version {version} of rank {rank} at {self._address}"
        data = self._document(lambda offset: Describe(offset, where, rank, version, offset), what)
        try:
            return described(data, rank, version)
        except IntegrityError as error:
            raise IntegrityError(f"{what}: {error}") from error

    def private(self, where: Where, rank: int, version: int) -> bytes:
        """The private state of `rank` at `version`."""
        what = f"the private state of version {version} of rank {rank} at {self._address}"
        data = self._document(lambda offset: Private(offset, where, rank, version, offset), what)
        try:
            return bytes(open_envelope(data))
        except IntegrityError as error:
            raise IntegrityError(f"{what} {error}") from error

    def _document(self, ask: Callable[[int], Request], what: str) -> bytearray:
        deadline = time.monotonic() + self._timeout_s
        try:
            with ShardConnection(self._address, self._token, self._is_cancelled, self._secure) as connection:
                data = connection.document(ask, self._timeout_s, deadline)
        except SourceFailed as error:
            raise IntegrityError(f"{what}: {error}") from error
        if data is None:
            raise IntegrityError(f"{what}: cancelled")
        return data
