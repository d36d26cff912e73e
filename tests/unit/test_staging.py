"""State on an accelerator, against a double that notices what is read, written or used again too early; and the double
itself, against staging that makes each of those mistakes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashrec import staging as staging_module
from flashrec.device import device_of, flat_bytes, store_bytes
from flashrec.errors import EnvironmentFault
from flashrec.staging import Staging
from flashrec.state.arena import Arena
from flashrec.state.layout import Layout, Piece, RankLayout, ReplicaSet, TensorSpec
from flashrec.state.manifest import CHUNK_BYTES, Source
from flashrec.state.pull import Puller
from flashrec.state.sealing import Sealer
from tests.accelerator import POLICIES, Double, Mark, Tensor, Violation

SIZES = [10, 5000, 0, 1, 3000, 64]
BUFFER = 1024
RANK, JOB = 0, "job"

policies = pytest.mark.parametrize("policy", POLICIES)
seeds = pytest.mark.parametrize("seed", range(5))


def device(sizes: list[int] = SIZES) -> list[Tensor]:
    return [Tensor(size) for size in sizes]


def train(lane: Double, tensors: list[Tensor], seed: int) -> list[bytes]:
    """A step's writes, and what they are."""
    source = random.Random(seed)
    written = [source.randbytes(len(tensor.data)) for tensor in tensors]
    for tensor, data in zip(tensors, written, strict=True):
        lane.train(tensor, data)
    return written


def loans(sizes: list[int] = SIZES) -> list[list[Piece]]:
    """Everything, in pieces of a buffer at most, small ones together."""
    cut: list[list[Piece]] = [[]]
    room = BUFFER
    for index, size in enumerate(sizes):
        for start in range(0, size, BUFFER):
            piece = Piece(index, start, min(BUFFER, size - start))
            if piece.size_bytes > room:
                cut.append([])
                room = BUFFER
            cut[-1].append(piece)
            room -= piece.size_bytes
    return cut


def check_loan(lane: Double, staging: Staging[Tensor, Mark], number: int, written: list[bytes]) -> None:
    cut = loans()
    following = cut[number + 1] if number + 1 < len(cut) else []
    with staging.lend(cut[number], following) as views:
        for _ in range(2):
            for piece, view in zip(cut[number], views, strict=True):
                expected = written[piece.tensor_index][piece.offset : piece.offset + piece.size_bytes]
                assert lane.host_reads(view) == expected


def seal_steps(
    lane: Double, tensors: list[Tensor], staging: Staging[Tensor, Mark], stop_at: int | None = None
) -> None:
    """Three steps whose state is read, the last loans left out from `stop_at` on; training writes on at once."""
    for step in range(3):
        written = train(lane, tensors, step)
        staging.begin()
        for number in range(len(loans()) if stop_at is None else stop_at):
            check_loan(lane, staging, number, written)
        staging.end()
    train(lane, tensors, 9)
    lane.finish()


@policies
@seeds
@pytest.mark.parametrize("num_buffers", [1, 2, 4])
def test_what_is_lent_is_the_state_at_begin(policy: str, seed: int, num_buffers: int) -> None:
    lane, tensors = Double(policy, seed), device()
    staging = Staging(lane, tensors, buffer_bytes=BUFFER, num_buffers=num_buffers)
    seal_steps(lane, tensors, staging)
    staging.close()
    assert len(lane.buffers) == num_buffers, "memory is bounded"


@policies
@seeds
@pytest.mark.parametrize("stop_at", [0, 1, 3])
def test_after_a_stop_training_writes_only_when_the_copies_under_way_are_done(
    policy: str, seed: int, stop_at: int
) -> None:
    lane, tensors = Double(policy, seed), device()
    seal_steps(lane, tensors, Staging(lane, tensors, buffer_bytes=BUFFER), stop_at)


@policies
@seeds
def test_what_is_written_is_what_training_sees(policy: str, seed: int) -> None:
    lane, tensors = Double(policy, seed), device()
    staging = Staging(lane, tensors, buffer_bytes=BUFFER, num_buffers=2)
    train(lane, tensors, 1)
    staging.begin()
    wanted = [random.Random(7).randbytes(size) for size in SIZES]
    for index, data in enumerate(wanted):
        staging.write_piece(Piece(index, 0, len(data)), data)
        assert staging.piece_memory(Piece(index, 0, len(data))) is None
        assert bytes(staging.read_piece(Piece(index, 0, len(data)))) == data, "what a puller checks"
    staging.end()
    assert [lane.read(tensor) for tensor in tensors] == wanted
    staging.close()


def test_begin_and_end_do_not_block_and_reading_ahead_saves_copies() -> None:
    lane, tensors = Double("training first"), device()
    staging = Staging(lane, tensors, buffer_bytes=BUFFER)
    written = train(lane, tensors, 0)
    staging.begin()
    assert lane.num_host_waits == 0
    for number in range(len(loans())):
        check_loan(lane, staging, number, written)
    waits = lane.num_host_waits
    assert waits == len(loans()), "one for each loan, none for a buffer"
    staging.end()
    staging.end()
    assert lane.num_host_waits == waits


# --- the double notices -------------------------------------------------------------------------------------------


class NoMarkAtBegin(Double):
    def side_waits(self, mark: Mark) -> None:
        pass


class NoMarkAtEnd(Double):
    def training_waits(self, mark: Mark) -> None:
        pass


class NoHostWait(Double):
    def wait(self, mark: Mark) -> None:
        pass


class Hasty(Staging[Tensor, Mark]):
    """Takes a buffer again without a look at its copy."""

    def _free_buffer(self) -> memoryview:
        return self._draining.popleft().buffer if self._draining else super()._free_buffer()


def sealing(lane: Double, tensors: list[Tensor]) -> None:
    seal_steps(lane, tensors, Staging(lane, tensors, buffer_bytes=BUFFER), 2)


def sealing_hastily(lane: Double, tensors: list[Tensor]) -> None:
    seal_steps(lane, tensors, Hasty(lane, tensors, buffer_bytes=BUFFER, num_buffers=3), 1)


def restoring(lane: Double, tensors: list[Tensor]) -> None:
    staging = Staging(lane, tensors, buffer_bytes=BUFFER)
    train(lane, tensors, 0)
    staging.begin()
    staging.write_piece(Piece(1, 0, 5000), bytes(range(250)) * 20)
    staging.end()
    if lane.read(tensors[1]) != bytes(range(250)) * 20:
        raise Violation("training read a tensor before what was written to it")


def restoring_hastily(lane: Double, tensors: list[Tensor]) -> None:
    staging = Hasty(lane, tensors, buffer_bytes=BUFFER, num_buffers=2)
    staging.begin()
    staging.write_piece(Piece(1, 0, 5000), random.Random(0).randbytes(5000))
    lane.finish()


@pytest.mark.parametrize(
    ("make", "act", "policy", "message"),
    [
        (NoMarkAtBegin, sealing, "side first", "had not written yet"),
        (NoMarkAtBegin, restoring, "side first", "still using"),
        (NoMarkAtEnd, sealing, "training first", "wrote later"),
        (NoMarkAtEnd, restoring, "training first", "before what was written"),
        (NoHostWait, sealing, "training first", "read before its copy"),
        (Double, sealing_hastily, "training first", "used again before its copy"),
        (Double, restoring_hastily, "training first", "used again|changed before"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_wait_that_is_left_out_is_noticed(
    make: type[Double], act: Callable[[Double, list[Tensor]], None], policy: str, message: str
) -> None:
    def try_often() -> None:
        for seed in range(10):
            act(make(policy, seed), device())

    with pytest.raises(Violation, match=message):
        try_often()
    for one in POLICIES:
        correct = {sealing_hastily: sealing, restoring_hastily: restoring}.get(act, act)
        correct(Double(one), device())


# --- who has a buffer ---------------------------------------------------------------------------------------------


def test_whoever_finds_no_buffer_waits_for_one_to_be_given_back() -> None:
    lane, tensors = Double("random"), device()
    staging = Staging(lane, tensors, buffer_bytes=BUFFER, num_buffers=1)
    written = train(lane, tensors, 0)
    staging.begin()
    started = threading.Event()

    def other() -> None:
        started.set()
        check_loan(lane, staging, 1, written)

    thread = threading.Thread(target=other)
    with staging.lend(loans()[0]):
        thread.start()
        started.wait()
        assert thread.is_alive()
    thread.join(20)
    assert not thread.is_alive()
    staging.end()


def test_a_buffer_that_never_comes_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "STUCK_S", 0.0)
    lane, tensors = Double("random"), device()
    staging = Staging(lane, tensors, buffer_bytes=BUFFER, num_buffers=1)
    staging.begin()
    with (
        staging.lend(loans()[0]),
        pytest.raises(EnvironmentFault, match="none of 1 pinned buffers"),
        staging.lend(loans()[1]),
    ):
        pass
    staging.end()


def test_a_reader_that_fails_leaves_its_buffer_and_nothing_is_read_outside() -> None:
    lane, tensors = Double("random"), device()
    staging = Staging(lane, tensors, buffer_bytes=BUFFER, num_buffers=1)
    staging.begin()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), staging.lend(loans()[0]):
            raise ZeroDivisionError
    staging.end()
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"between begin\(\) and end\(\)"):
            staging.read_piece(Piece(1, 0, 10))
        with pytest.raises(RuntimeError, match=r"between begin\(\) and end\(\)"):
            staging.write_piece(Piece(1, 0, 10), bytes(10))
    staging.close()


# --- sealed and pulled --------------------------------------------------------------------------------------------


@policies
def test_a_sealer_seals_it_and_a_puller_brings_it_back(policy: str, tmp_path: Path) -> None:
    sizes = [100, 3 * CHUNK_BYTES + 5, 40, CHUNK_BYTES]
    layout = Layout([TensorSpec(f"t{i}", "uint8", (size,), size) for i, size in enumerate(sizes)])
    ranks = RankLayout(RANK, (ReplicaSet((RANK,), layout),))
    lane, tensors = Double(policy), device(sizes)
    staging = Staging(lane, tensors)
    sealer = Sealer(tmp_path / "arena", RANK, JOB)
    for version in range(3):
        written = train(lane, tensors, version)
        staging.begin()
        sealer.begin(version, 1, ranks, [staging], lambda: b"")
        sealer.finish()
        staging.end()
    sealer.close()
    train(lane, tensors, 9)
    state = Arena(tmp_path / "arena", RANK, JOB).read(2)
    staging.begin()
    Puller().pull(staging, layout, [[Source(state.manifests[0])]], version=2, generation=1, deadline_s=60)
    staging.end()
    assert [lane.read(tensor) for tensor in tensors] == written
    staging.close()


# --- what torch does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6),
        torch.arange(24.0).reshape(4, 6).t(),
        torch.arange(24.0)[::2],
        torch.tensor(3, dtype=torch.int16),
        torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
    ],
    ids=["plain", "transposed", "every other", "scalar", "conjugated"],
)
def test_bytes_of_tensors_of_every_form(tensor: torch.Tensor) -> None:
    before = tensor.clone()
    flat = flat_bytes(tensor)
    assert torch.equal(flat, before.resolve_conj().contiguous().reshape(-1).view(torch.uint8))
    data = torch.tensor([7, 9], dtype=torch.uint8)
    expected = flat.clone()
    expected[:2] = data
    store_bytes(tensor, 0, data)
    assert torch.equal(flat_bytes(tensor), expected)


def test_the_refusal_says_what_is_missing() -> None:
    with pytest.raises(EnvironmentFault, match=r"host memory only.*has not run on one.*NCCL.*standbys"):
        device_of(torch.empty(1, device="meta"))
