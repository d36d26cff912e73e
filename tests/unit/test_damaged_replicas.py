"""A replica whose bytes are not what they were: a plan that failed for it is not made again."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from flashrec.errors import IntegrityError
from flashrec.state.arena import Arena, SealedState, check_bytes
from flashrec.state.arena_writer import ArenaWriter
from flashrec.state.private_slots import HEADER_BYTES, PrivateSlots
from flashrec.state.shardwire import Doubt
from flashrecd.shards.counters import Counters
from flashrecd.shards.replicas import Replicas
from tests.arenas import JOB, RANK, seal

VERSIONS = [4, 5]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture
def kept(tmp_path: Path) -> Replicas:
    """A node that keeps versions 4 and 5 of one rank, sealed and private."""
    writer = ArenaWriter(tmp_path / "replica", RANK, JOB, chunk_bytes=4096)
    slots = PrivateSlots(tmp_path / "replica-private", RANK)
    for version in VERSIONS:
        seal(writer, version)
        slots.seal(version, 1, b"private state")
    unused: Any = None
    return Replicas(tmp_path, JOB, Counters(), unused, unused)


def damage_sealed(root: Path, version: int) -> None:
    state = Arena(root / "replica", RANK, JOB).read(version)
    offset, size_bytes = state.manifests[-1].chunk_range(0)
    flip(state.path, offset + size_bytes // 2)


def test_bytes_are_checked_against_what_was_sealed(kept: Replicas, tmp_path: Path) -> None:
    arena = Arena(tmp_path / "replica", RANK, JOB)
    for version in VERSIONS:
        check_bytes(arena.read(version))
    damage_sealed(tmp_path, 5)
    check_bytes(arena.read(4))
    with pytest.raises(IntegrityError, match="do not match their checksum"):
        check_bytes(arena.read(5))


def doubt(kept: Replicas, version: int) -> str:
    """The status of the answer."""
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    kept.doubt(Doubt(1, RANK, version), lambda header, _: answers.put(header.status))
    return answers.get(timeout=20)


def test_a_damaged_version_is_told_until_somebody_has_read_it(kept: Replicas, tmp_path: Path) -> None:
    """To read all of what is kept would make each recovery wait for it."""
    with kept:
        damage_sealed(tmp_path, 5)
        assert kept.fence(1) == [(RANK, VERSIONS, VERSIONS)]
        kept.discard(2, 5, 5)
        assert kept.fence(2) == [(RANK, VERSIONS, VERSIONS)]
        assert doubt(kept, 5) == "ok"
        assert kept.fence(3) == [(RANK, VERSIONS, [4])]


def test_a_doubt_without_reason_changes_nothing(kept: Replicas) -> None:
    with kept:
        assert [doubt(kept, version) for version in (4, 5, 6)] == ["ok"] * 3
        assert kept.fence(1) == [(RANK, VERSIONS, VERSIONS)]


def test_one_version_is_checked_once_at_a_time(
    kept: Replicas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    def check(state: SealedState) -> None:
        begun.set()
        assert go.wait(20)

    monkeypatch.setattr("flashrecd.shards.replicas.check_bytes", check)
    with kept:
        first: queue.SimpleQueue[str] = queue.SimpleQueue()
        kept.doubt(Doubt(1, RANK, 5), lambda header, _: first.put(header.status))
        assert begun.wait(20)
        assert doubt(kept, 5) == "failed"
        go.set()
        assert first.get(timeout=20) == "ok"
        assert doubt(kept, 5) == "ok"


def test_damaged_private_state_is_none(kept: Replicas, tmp_path: Path) -> None:
    with kept:
        flip(tmp_path / "replica-private" / f"r{RANK}.v5.g1", HEADER_BYTES + 3)
        assert kept.fence(1) == [(RANK, VERSIONS, VERSIONS)]
        kept.discard(2, 5, 5)
        assert kept.fence(2) == [(RANK, [4], VERSIONS)]
