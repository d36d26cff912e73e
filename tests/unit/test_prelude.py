"""The record of what ranks exchanged before the first gate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashrec import collectives, prelude
from flashrec.prelude import Player, Recorder


def record(path: Path, *results: object) -> None:
    recorder = Recorder(path)
    for result in results:
        recorder.expect("broadcast", "world").fill(result)
    recorder.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(7),
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([1 + 2j]),
    ],
)
def test_any_small_tensor_comes_back_bit_for_bit(tmp_path: Path, tensor: torch.Tensor) -> None:
    record(tmp_path / "r", [tensor])
    output = torch.zeros_like(tensor)
    assert Player(tmp_path / "r").play("broadcast", "world", [output])
    assert (
        output.contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
    )


def test_results_come_back_in_the_order_of_issue_whatever_order_they_completed_in(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    first, second = recorder.expect("a", "world"), recorder.expect("b", "world")
    second.fill([torch.tensor(2)])
    assert (tmp_path / "r").stat().st_size == 0
    first.fill([torch.tensor(1)])
    recorder.close()
    player = Player(tmp_path / "r")
    output = torch.tensor(0)
    assert player.play("a", "world", [output])
    assert output == 1
    assert player.play("b", "world", [output])
    assert output == 2
    assert not player.play("c", "world", [output])


def test_what_never_completed_ends_the_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    recorder.expect("a", "world").fill([torch.tensor(1)])
    recorder.expect("b", "world")
    recorder.expect("c", "world").fill([torch.tensor(3)])
    recorder.close()
    assert Player(tmp_path / "r").remaining == 1


def test_a_failure_ends_the_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r")
    recorder.expect("a", "world").fill([torch.tensor(1)])
    recorder.expect("b", "world").fail()
    recorder.expect("c", "world").fill([torch.tensor(3)])
    recorder.close()
    assert Player(tmp_path / "r").remaining == 1


def test_a_large_result_is_left_out_and_the_next_one_is_not(tmp_path: Path) -> None:
    record(tmp_path / "r", [torch.zeros(prelude.LIMIT_BYTES + 1, dtype=torch.uint8)], [torch.tensor(5)])
    player = Player(tmp_path / "r")
    output = torch.tensor(0)
    assert not player.play("broadcast", "world", [torch.ones(prelude.LIMIT_BYTES + 1, dtype=torch.uint8)])
    assert player.play("broadcast", "world", [output])
    assert output == 5


def test_the_record_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prelude, "TOTAL_LIMIT_BYTES", 10_000)
    record(tmp_path / "r", *([torch.zeros(1000)] for _ in range(10)))
    assert (tmp_path / "r").stat().st_size < 20_000
    assert 0 < Player(tmp_path / "r").remaining < 10


@pytest.mark.parametrize(
    ("op", "group", "output"),
    [
        ("allreduce", "world", torch.zeros(2)),
        ("broadcast", "pair", torch.zeros(2)),
        ("broadcast", "world", torch.zeros(3)),
        ("broadcast", "world", torch.zeros(2, dtype=torch.float64)),
    ],
)
def test_the_first_difference_ends_the_play(
    tmp_path: Path, op: str, group: str, output: torch.Tensor
) -> None:
    record(tmp_path / "r", [torch.ones(2)], [torch.ones(2)])
    player = Player(tmp_path / "r")
    assert not player.play(op, group, [output])
    assert output.count_nonzero() == 0
    assert player.remaining == 0


def test_a_record_that_was_torn_counts_up_to_the_tear(tmp_path: Path) -> None:
    record(tmp_path / "r", [torch.ones(2)], [torch.ones(2)])
    whole = (tmp_path / "r").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "r").write_bytes(whole[:size])
        assert Player(tmp_path / "r").remaining == (size >= len(whole) // 2)


def test_something_else_in_its_place_is_no_record(tmp_path: Path) -> None:
    for content in (b"\xc1\xc1", b"\x01\x02", b'{"op": 1}', b"\x81\xa2op\xa9broadcast"):
        (tmp_path / "r").write_bytes(content)
        assert not Player(tmp_path / "r").play("broadcast", "world", [torch.zeros(1)])
    assert Player(tmp_path / "nobody").remaining == 0


@pytest.mark.parametrize(
    ("op", "result", "tells"),
    [
        ("recv", [torch.zeros(1, dtype=torch.int32)], True),
        ("recv_anysource", [torch.zeros(1, dtype=torch.bool)], True),
        ("recv", [torch.zeros(1)], False),
        ("recv", [torch.zeros(1, dtype=torch.complex64)], False),
        ("send", None, False),
        ("broadcast", [torch.zeros(1, dtype=torch.int64)], False),
    ],
)
def test_integers_from_one_peer_tell_a_rank_what_to_do(op: str, result: object, tells: bool) -> None:
    assert collectives.tells(op, result) == tells


def test_what_is_skipped_keeps_its_place_and_must_be_what_the_record_has(tmp_path: Path) -> None:
    record(tmp_path / "r", [torch.ones(2)], [torch.ones(3)], [torch.ones(4)])
    player = Player(tmp_path / "r")
    player.skip("broadcast", "world")
    output = torch.zeros(3)
    assert player.play("broadcast", "world", [output])
    assert output.equal(torch.ones(3))
    player.skip("scatter", "world")
    assert player.remaining == 0
    player.skip("broadcast", "world")  # beyond the end
