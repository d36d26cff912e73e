"""What a rank gives to other nodes, and when it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from flashrec.keeping import Keeper
from flashrec.sources import Reach
from flashrec.state.keeperlink import KeeperAddress
from flashrec.state.replicating import NotKept
from tests.arenas import JOB, RANK, SMALL, blob_of, tensors

KEEPERS = ((2, "tcp://10.0.0.2:1"),)


class State:
    """In place of a ProtectedState: at `version`."""

    version = 0
    changed: Sequence[str] = ()

    def sealed_parts(self) -> tuple[Any, Any]:
        return SMALL, tensors(SMALL, self.version)

    def sealed_common(self) -> bytes:
        return blob_of(self.version)

    def seal_private(self, feed: object, *, version: int, provisional: bool) -> bytes:
        return b"private %d%s" % (version, b" again" if self.changed else b"")

    def disturbed(self) -> list[str]:
        return list(self.changed)

    def forget_sealed(self, above: int) -> None:
        pass


class Replicator:
    """In place of the real one: remembers what it was told; `kept` is what keepers have acknowledged."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.kept: set[tuple[str, int]] = set()
        self.closed = False

    def set_keepers(self, keepers: Sequence[KeeperAddress], generation: int) -> None:
        self.told.append(("keepers", [one.node for one in keepers], generation))

    def sealed(self, version: int, generation: int) -> None:
        self.told.append(("sealed", version, generation))

    def keep_private(self, version: int, generation: int, payload: bytes, *, full: bool = False) -> None:
        self.told.append(("full" if full else "private", version, generation, payload))

    def wait(
        self,
        *,
        sealed: int | None,
        private: Sequence[int],
        is_cancelled: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        wanted = {("private", version) for version in private}
        if sealed is not None:
            wanted.add(("sealed", sealed))
        if wanted - self.kept:
            raise NotKept(f"{sorted(wanted - self.kept)} after {timeout_s:g} s")

    def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class FakeReach(Reach):
    made: Replicator

    def replicator(self, rank: int, job: str) -> Any:
        return self.made


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Keeper, State, Replicator]]:
    keeper, state, replicator = keeper_at(tmp_path)
    yield keeper, state, replicator
    keeper.close()
    assert replicator.closed


def keeper_at(folder: Path, *, fresh: bool = True) -> tuple[Keeper, State, Replicator]:
    replicator, state = Replicator(), State()
    reach = FakeReach(1, "tcp://10.0.0.1:1", lambda socket: None, b"", replicator)
    keeper = Keeper(folder, JOB, RANK, 4, fresh=fresh, reach=reach)
    keeper.state = cast(Any, state)
    return keeper, state, replicator


def seal_full(keeper: Keeper, state: State, version: int) -> None:
    state.version = version
    keeper.seal_private(version, 1, provisional=False)
    keeper.begin_full(version, 1)
    assert keeper.finish_full() is not None


def test_private_state_is_given_as_it_is_sealed(made: tuple[Keeper, State, Replicator]) -> None:
    keeper, state, replicator = made
    keeper.seal_private(4, 2, provisional=False)
    assert replicator.told == [("private", 4, 2, b"private 4")]
    assert keeper.check_quiet(4, 2) == []
    state.changed = ("random state",)
    assert keeper.check_quiet(4, 2) == ["random state"]
    assert replicator.told[1:] == [("private", 4, 2, b"private 4 again")]


def test_a_version_is_announced_when_it_is_sealed_also_if_it_was_before(
    made: tuple[Keeper, State, Replicator],
) -> None:
    keeper, _, replicator = made
    for generation in (1, 2):
        keeper.begin_seal(0, generation)
        keeper.finish_seal()
    assert replicator.told == [("sealed", 0, 1), ("sealed", 0, 2)]


def test_what_is_given_up_is_not_announced(made: tuple[Keeper, State, Replicator]) -> None:
    keeper, state, replicator = made
    keeper.begin_seal(0, 1)
    keeper.finish_seal()

    def no_room() -> bytes:
        raise OSError("no room")

    state.sealed_common = no_room  # type: ignore[method-assign]
    keeper.begin_seal(1, 1)
    with pytest.raises(OSError, match="no room"):
        keeper.finish_seal()
    assert replicator.told == [("sealed", 0, 1)]


def test_a_full_version_counts_once_it_is_acknowledged(made: tuple[Keeper, State, Replicator]) -> None:
    keeper, state, replicator = made
    seal_full(keeper, state, 3)
    assert ("full", 3, 1, b"private 3") in replicator.told
    assert ("sealed", 3, 1) in replicator.told
    assert (keeper.newest_full, keeper.full_that_counts()) == (3, -1)
    replicator.kept = {("sealed", 3), ("private", 3)}
    assert keeper.full_that_counts() == 3
    seal_full(keeper, state, 7)
    assert keeper.full_that_counts() == 3, "until the keepers have the next"
    replicator.kept |= {("sealed", 7)}
    assert keeper.full_that_counts() == 3, "they lack its private state"
    replicator.kept |= {("private", 7)}
    assert keeper.full_that_counts() == 7


def test_new_keepers_are_told_of_the_last_full_version(made: tuple[Keeper, State, Replicator]) -> None:
    keeper, state, replicator = made
    seal_full(keeper, state, 3)
    replicator.kept = {("sealed", 3), ("private", 3)}
    assert keeper.full_that_counts() == 3
    keeper.discard_above(5, 3)
    replicator.told.clear()
    replicator.kept.clear()
    keeper.set_keepers(KEEPERS, 2)
    assert replicator.told == [("keepers", [2], 2), ("full", 3, 2, b"private 3"), ("sealed", 3, 2)]
    assert keeper.full_that_counts() == -1, "the new ones have not acknowledged it"


def test_new_keepers_are_told_of_the_version_that_all_resume_at(
    made: tuple[Keeper, State, Replicator],
) -> None:
    keeper, _, replicator = made
    keeper.begin_seal(0, 1)
    keeper.finish_seal()
    replicator.told.clear()
    keeper.set_keepers(KEEPERS, 2, sealed=0)
    keeper.set_keepers(KEEPERS, 3, sealed=1)  # which this rank has yet to install
    assert replicator.told == [("keepers", [2], 2), ("sealed", 0, 2), ("keepers", [2], 3)]


def test_a_replacement_elsewhere_has_no_full_version_of_its_past(
    made: tuple[Keeper, State, Replicator],
) -> None:
    keeper, _, replicator = made
    keeper.discard_above(5, 3)
    keeper.set_keepers(KEEPERS, 2)
    assert (keeper.newest_full, keeper.full_that_counts()) == (-1, -1)
    assert replicator.told == [("keepers", [2], 2)]


def test_on_one_node_nobody_is_waited_for(tmp_path: Path) -> None:
    keeper, state = Keeper(tmp_path, JOB, RANK, 4, fresh=True), State()
    keeper.state = cast(Any, state)
    keeper.set_keepers((), 1)
    keeper.await_kept(7, (7, 8), lambda: False, 0.0)
    seal_full(keeper, state, 3)
    assert keeper.full_that_counts() == 3
    keeper.close()
