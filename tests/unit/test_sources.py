"""Where a replacement looks for what is sealed, in which order, and what it does when it is nowhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashrec import sources as module
from flashrec.errors import IntegrityError, UsageError
from flashrec.protocol import messages as msg
from flashrec.protocol.keys import ClusterKey
from flashrec.sources import Reach, Sources
from flashrec.state.arena import Arena, SealedState
from flashrec.state.arena_writer import ArenaWriter
from flashrec.state.private_slots import PrivateSlots
from flashrec.state.pull import PullCancelled
from tests.arenas import JOB, RANK, seal

HERE, THERE, FURTHER = 1, 2, 3
TOKEN = b"token"
VERSION = 5


def address(node: int) -> str:
    return f"tcp://10.0.0.{node}:1"


def places(*nodes: int) -> dict[int, Any]:
    at = tuple((node, address(node)) for node in nodes)
    return {RANK: (at, at)}


def unsecured(socket: object) -> None:
    pass


class Store:
    """In place of other nodes' servers. `have`: by address, in "arena" or "replica"; silent: never answers."""

    def __init__(self, have: dict[str, dict[str, SealedState | bytes]], silent: tuple[str, ...] = ()) -> None:
        self.have = have
        self.silent = silent
        self.asked: list[tuple[str, str]] = []

    def reach(self) -> Reach:
        return _Reach(HERE, address(HERE), unsecured, TOKEN, self)


@dataclass(frozen=True)
class _Reach(Reach):
    stores: Store

    def store(self, address: str, is_cancelled: Callable[[], bool]) -> Any:
        return _Client(self.stores, address, is_cancelled)


class _Client:
    def __init__(self, store: Store, at: str, is_cancelled: Callable[[], bool]) -> None:
        self._store, self._at, self._is_cancelled = store, at, is_cancelled

    def sealed_state(self, where: str, rank: int, version: int) -> Any:
        self._store.asked.append((self._at, where))
        if self._at in self._store.silent:
            while not self._is_cancelled():
                threading.Event().wait(0.001)
            raise IntegrityError(f"{self._at}: cancelled")
        found = self._store.have.get(self._at, {}).get(where)
        if found is None:
            raise IntegrityError(f"{self._at} has none in its {where}")
        return found

    private = sealed_state


def sources(
    folder: Path, store: Store, places: dict[int, Any], is_cancelled: Callable[[], bool] = lambda: False
) -> Sources:
    return Sources(folder, JOB, VERSION, None, is_cancelled, store.reach(), places)


def sealed_in(folder: Path, name: str) -> SealedState:
    writer = ArenaWriter(folder / name, RANK, JOB)
    seal(writer, VERSION)
    writer.close()
    return Arena(folder / name, RANK, JOB).read(VERSION)


def test_what_is_here_comes_first_then_the_nodes_in_their_order(tmp_path: Path) -> None:
    elsewhere = sealed_in(tmp_path / "other", "arena")
    store = Store({address(THERE): {"replica": elsewhere}, address(FURTHER): {"arena": elsewhere}})
    sealed_in(tmp_path, "arena")
    sealed_in(tmp_path, "replica")
    found = sources(tmp_path, store, places(FURTHER, HERE, THERE)).sealed([RANK])[RANK]
    parts = [one.part((RANK,)) for one in found]
    assert [part.address for part in parts] == [None, None, address(FURTHER), address(THERE)]
    assert [Path(part.manifest.path).parent.name for part in parts[:2]] == ["arena", "replica"]
    assert [part.key for part in parts] == [b"", b"", TOKEN, TOKEN]
    assert [part.secure for part in parts] == [None, None, unsecured, unsecured]
    assert address(HERE) not in {at for at, _ in store.asked}


def test_a_node_that_has_it_not_is_left_out(tmp_path: Path) -> None:
    store = Store({address(THERE): {"replica": sealed_in(tmp_path / "other", "arena")}})
    (found,) = sources(tmp_path, store, places(FURTHER, THERE)).sealed([RANK])[RANK]
    assert found.part((RANK,)).address == address(THERE)


def test_a_silent_node_is_not_waited_for_once_there_is_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STRAGGLERS_S", 0.0)
    have = {address(THERE): {"arena": sealed_in(tmp_path / "other", "arena")}}
    store = Store(have, silent=(address(FURTHER),))
    (found,) = sources(tmp_path, store, places(FURTHER, THERE)).sealed([RANK])[RANK]
    assert found.part((RANK,)).address == address(THERE)


def test_what_is_nowhere_is_named_with_every_reason(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=rf"rank {RANK} is not to be had: .*10\.0\.0\.2:1 has none"):
        sources(tmp_path, Store({}), places(THERE)).sealed([RANK])
    with pytest.raises(IntegrityError, match="no node is said to have it"):
        sources(tmp_path, Store({}), {}).sealed([RANK])


def test_private_state_comes_from_here_or_else_from_who_has_it(tmp_path: Path) -> None:
    store = Store({address(THERE): {"replica": b"there"}})
    wanted = sources(tmp_path, store, places(THERE))
    assert wanted.private(RANK) == b"there"
    PrivateSlots(tmp_path / "replica-private", RANK).seal(VERSION, 1, b"kept here for another node")
    assert wanted.private(RANK) == b"kept here for another node"
    PrivateSlots(tmp_path / "private", RANK).seal(VERSION, 1, b"its own")
    assert wanted.private(RANK) == b"its own"
    with pytest.raises(IntegrityError, match="has none in its arena"):
        sources(tmp_path / "nowhere", store, places(FURTHER)).private(RANK)


def test_a_search_ends_with_its_generation(tmp_path: Path) -> None:
    store = Store({}, silent=(address(THERE),))
    wanted = sources(tmp_path, store, places(THERE), lambda: bool(store.asked))
    for search in (lambda: wanted.sealed([RANK]), lambda: wanted.private(RANK)):
        store.asked.clear()
        with pytest.raises(PullCancelled):
            search()


def test_on_one_node_only_its_own_memory_is_looked_at(tmp_path: Path) -> None:
    sealed_in(tmp_path, "replica")
    assert not Sources(tmp_path, JOB, VERSION, None, lambda: False).has(RANK)
    sealed_in(tmp_path, "arena")
    alone = Sources(tmp_path, JOB, VERSION, None, lambda: False)
    assert alone.has(RANK)
    (found,) = alone.sealed([RANK])[RANK]
    assert found.part((1, RANK)).address is None
    with pytest.raises(IntegrityError, match="has no part"):
        found.part((0, RANK))


def test_a_job_on_one_node_reaches_no_other() -> None:
    assert Reach.of(welcome()) is None


def test_the_cluster_s_key_secures_sockets_or_makes_a_token(tmp_path: Path) -> None:
    key = ClusterKey.generate()
    key.write(tmp_path / "key")
    several = {"replica_address": address(HERE), "node": HERE}
    encrypted = Reach.of(welcome(key_file=str(tmp_path / "key"), **several))
    plain = Reach.of(welcome(key_file=str(tmp_path / "key"), plain_bulk=True, **several))
    assert encrypted is not None
    assert plain is not None
    secure: Any = encrypted.secure
    assert (encrypted.token, secure.__self__, secure.__name__) == (b"", key, "as_client")
    assert plain.token == key.token()
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(UsageError, match="others may use"):
        Reach.of(welcome(key_file=str(tmp_path / "key"), **several))


def welcome(**changes: Any) -> msg.Welcome:
    return msg.Welcome(
        proc="p1", job=JOB, shm_dir="/nowhere", rank=RANK, world_size=4, generation=1, replacement=False,
        pull="shm", shard_address="", heartbeat_s=1.0, daemon_pid=1, external=False, patience_s=0.0, **changes,
    )  # fmt: skip
