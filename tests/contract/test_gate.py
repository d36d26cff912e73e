"""What every transport of a step's agreement must do: one suite, run against each."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrec.errors import UsageError
from flashrec.gate import MAX_VALUES, AllReduceGate, Gate, SharedMemoryGate
from flashrec.groups import GateBroken, GroupSet
from tests.integration.rank_processes import Rank, Ranks, descriptors

KINDS = ["all-reduce", "shared memory"]
BIG = (1 << 63) - 1


class Opener:
    """Gates of one rank, generation after generation."""

    def __init__(self, kind: str, rank: Rank, directory: Path) -> None:
        self._kind, self._rank, self._directory = kind, rank, directory
        self._groups: GroupSet | None = None
        if kind == "all-reduce":
            self._groups = GroupSet()
            self._groups.start(rank.rank, rank.size)

    def open(self, generation: int) -> Gate:
        if self._groups is None:
            return SharedMemoryGate(self._directory, self._rank.rank, self._rank.size, generation)
        self._groups.form(self._rank.store(), generation)
        return AllReduceGate(self._groups, generation)

    def close(self, gate: Gate) -> None:
        gate.close()
        gate.close()
        if self._groups is not None:
            self._groups.close()


def released(gate: Gate, values: list[int]) -> float:
    """How long `agree` took to be broken, in seconds."""
    started = time.monotonic()
    with pytest.raises(GateBroken):
        gate.agree(values)
    return time.monotonic() - started


def aborting_in(gate: Gate, delay_s: float) -> threading.Thread:
    def act() -> None:
        time.sleep(delay_s)
        gate.abort("the test says so")

    thread = threading.Thread(target=act)
    thread.start()
    return thread


# --- the ranks' sides -----------------------------------------------------------------------------------


def agrees_often(rank: Rank, kind: str, directory: Path) -> list[list[int]]:
    opener = Opener(kind, rank, directory)
    gate = opener.open(1)
    found = [gate.agree(votes) for votes in votes_of(rank.rank, 300)]
    opener.close(gate)
    return found


def votes_of(rank: int, rounds: int) -> list[list[int]]:
    draw = random.Random(rank)
    shapes = random.Random(99)  # equally many numbers on each rank
    return [
        [draw.choice([0, 1, -BIG, BIG, draw.getrandbits(40)]) for _ in range(shapes.randint(1, MAX_VALUES))]
        for _ in range(rounds)
    ]


def waits_for_the_last(rank: Rank, kind: str, directory: Path) -> None:
    opener = Opener(kind, rank, directory)
    gate = opener.open(1)
    gate.agree([1])
    if rank.rank == rank.size - 1:
        rank.tell("ready")
        assert rank.hear() == "vote"
    gate.agree([1])
    rank.tell("passed")
    assert rank.hear() == "end"
    opener.close(gate)


def is_aborted_here(rank: Rank, kind: str, directory: Path) -> Any:
    opener = Opener(kind, rank, directory)
    gate = opener.open(1)
    gate.agree([1])
    if rank.rank:
        rank.hear()  # never votes
        return None
    thread = aborting_in(gate, 0.2)
    taken = released(gate, [1])
    thread.join()
    again = released(gate, [1])
    opener.close(gate)
    return taken, again


def is_aborted_elsewhere(rank: Rank, kind: str, directory: Path) -> Any:
    opener = Opener(kind, rank, directory)
    gate = opener.open(1)
    gate.agree([1])
    if rank.rank == 1:  # neither the one that gathers the votes nor the last
        time.sleep(0.2)
        gate.abort("I was told to")
        taken = released(gate, [1])
    else:
        taken = released(gate, [1])
    opener.close(gate)
    return taken


def loses_a_peer(rank: Rank, kind: str, directory: Path, victim: int) -> Any:
    opener = Opener(kind, rank, directory)
    gate = opener.open(1)
    gate.agree([1])
    rank.tell("ready")
    if rank.rank == victim:
        rank.hear()
    taken = released(gate, [1])
    opener.close(gate)
    return taken


def moves_on(rank: Rank, kind: str, directory: Path) -> Any:
    """Rank 1 votes 0 in generation 1, which is aborted before rank 0 votes; then all agree in 2."""
    opener = Opener(kind, rank, directory)
    old = opener.open(1)
    old.agree([1])
    if rank.rank == 1:
        thread = aborting_in(old, 0.2)
        released(old, [0])
        thread.join()
        rank.tell("voted")
    else:
        assert rank.hear() == "go"
        old.abort("generation 1 is over")
    new = opener.open(2)
    found = [new.agree([7 + rank.rank]), new.agree([9])]
    if kind == "shared memory":
        released(old, [5])  # an all-reduce has no groups of its own to refuse with
    opener.close(new)
    return found


def opens_and_closes(rank: Rank, kind: str, directory: Path) -> Any:
    """Descriptors held in generation 2, and in generation 11."""
    opener = Opener(kind, rank, directory)
    gate = opener.open(1)
    early = 0
    for generation in range(2, 12):
        gate.agree([1])
        gate.close()
        gate = opener.open(generation)
        early = early or descriptors()
    deadline = time.monotonic() + 3  # groups let go of older generations in the background
    while descriptors() > early and time.monotonic() < deadline:
        time.sleep(0.02)
    late = descriptors()
    gate.agree([1])
    opener.close(gate)
    return early, late


def run(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    with Ranks() as ranks:
        return ranks.results(ranks.start_all(function, size, *args))


# --- the contract ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_the_minimum_of_each_number(kind: str, size: int, tmp_path: Path) -> None:
    found = run(agrees_often, size, kind, tmp_path)
    votes = [votes_of(rank, 300) for rank in range(size)]
    expected = [
        [min(column) for column in zip(*of_round, strict=True)] for of_round in zip(*votes, strict=True)
    ]
    assert found == [expected] * size


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_passes_before_the_last_has_voted(kind: str, tmp_path: Path) -> None:
    with Ranks() as ranks:
        numbers = ranks.start_all(waits_for_the_last, 3, kind, tmp_path)
        assert ranks.hear(numbers[2]) == "ready"
        time.sleep(0.3)
        assert not any(ranks._started[number][1].poll(0) for number in numbers[:2])
        ranks.tell(numbers[2], "vote")
        assert ranks.results(numbers) == ["passed"] * 3
        for number in numbers:
            ranks.tell(number, "end")
        ranks.results(numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_ends_the_wait_for_a_silent_peer_and_every_later_one(kind: str, tmp_path: Path) -> None:
    with Ranks() as ranks:
        numbers = ranks.start_all(is_aborted_here, 2, kind, tmp_path)
        taken, again = ranks.hear(numbers[0])
    assert 0.1 < taken < 3
    assert again < 1


@pytest.mark.parametrize("kind", KINDS)
def test_one_ranks_abort_ends_the_wait_of_all(kind: str, tmp_path: Path) -> None:
    assert max(run(is_aborted_elsewhere, 3, kind, tmp_path)) < 3


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_peer_is_noticed_without_anyones_help(kind: str, victim: int, tmp_path: Path) -> None:
    with Ranks() as ranks:
        numbers = ranks.start_all(loses_a_peer, 3, kind, tmp_path, victim)
        assert ranks.results(numbers) == ["ready"] * 3
        ranks.signal(numbers[victim], signal.SIGKILL)
        left = [number for number in numbers if number != numbers[victim]]
        assert max(ranks.results(left)) < 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_vote_of_an_older_generation_counts_for_nothing(kind: str, tmp_path: Path) -> None:
    with Ranks() as ranks:
        numbers = ranks.start_all(moves_on, 2, kind, tmp_path)
        assert ranks.hear(numbers[1]) == "voted"
        ranks.tell(numbers[0], "go")
        assert ranks.results(numbers) == [[[7], [9]]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_generations_come_and_go_without_leaving_anything(kind: str, tmp_path: Path) -> None:
    for early, late in run(opens_and_closes, 2, kind, tmp_path):
        assert late <= early
    assert list(tmp_path.iterdir()) == []


# --- shared memory alone -----------------------------------------------------------------------------------


def votes_torn(rank: Rank, directory: Path) -> Any:
    gate = SharedMemoryGate(directory, rank.rank, rank.size, 1)
    gate.agree([1])
    if rank.rank == 1:
        # The word of round 2 in sight, its numbers not yet: those of round 0, which were never written.
        gate._set_word(1, 2)
        rank.tell("torn")
        assert rank.hear() == "whole"
    found = gate.agree([4 + rank.rank])
    rank.tell(found)
    gate.close()


def test_numbers_that_are_not_whole_are_not_taken(tmp_path: Path) -> None:
    with Ranks() as ranks:
        numbers = ranks.start_all(votes_torn, 2, tmp_path)
        assert ranks.hear(numbers[1]) == "torn"
        time.sleep(0.2)
        assert not ranks._started[numbers[0]][1].poll(0)
        ranks.tell(numbers[1], "whole")
        assert ranks.results(numbers) == [[4], [4]]


def test_what_cannot_be_agreed_on_is_refused(tmp_path: Path) -> None:
    gate = SharedMemoryGate(tmp_path, 0, 1, 1)
    with pytest.raises(UsageError, match=f"1 to {MAX_VALUES} numbers"):
        gate.agree([])
    with pytest.raises(UsageError, match=f"1 to {MAX_VALUES} numbers"):
        gate.agree([1] * (MAX_VALUES + 1))
    gate.close()
    with pytest.raises(GateBroken, match="closed"):
        gate.agree([1])
    gate.abort("after the end")
    with pytest.raises(UsageError, match="not in a world of 2"):
        SharedMemoryGate(tmp_path, 2, 2, 1)
