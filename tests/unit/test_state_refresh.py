"""What a captured rank notices in every step, and what it says ahead of the first."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flashrec.errors import LayoutMismatch, UsageError
from flashrec.state.capture import Captured, capture
from flashrec.state.layout import Layout, Piece, RankLayout, ReplicaSet
from flashrec.state.private import PrivateState, Redo
from flashrec.state.tensors import LiveTensors, encode, spec_of
from tests.unit.test_state_capture import OPTIMIZERS, Odd, Tied, bits, pair, train


def names_of(captured: Captured) -> list[str]:
    return [spec.name for one in captured.rank_layout().sets for spec in one.layout]


def made(
    make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["adamw"], **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Captured]:
    return pair(make, **options)[0]


# --- refresh


@pytest.mark.parametrize("make", [*OPTIMIZERS.values(), Odd], ids=[*OPTIMIZERS, "odd"])
def test_state_appears_once_and_then_nothing_is_new(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, optimizer, captured = made(make)
    before = names_of(captured)
    train(model, optimizer, 1)
    assert captured.refresh() == (names_of(captured) != before)
    layout = captured.rank_layout()
    for _ in range(2):
        train(model, optimizer, 1)
        assert not captured.refresh()
        assert captured.rank_layout() is layout, "kept until something changes"


def test_a_layout_is_as_of_the_last_refresh() -> None:
    model, optimizer, captured = made()
    before = captured.rank_layout()
    train(model, optimizer, 1)
    assert captured.rank_layout() is before
    captured.refresh()
    assert len(captured.rank_layout().sets[0].layout) > len(before.sets[0].layout)


def test_state_that_goes_or_changes_form_is_noticed() -> None:
    model, optimizer, captured = made()
    train(model, optimizer, 1)
    captured.refresh()
    entry = optimizer.state[model.scale]
    entry["exp_avg"] = entry["exp_avg"].double()
    assert captured.refresh()
    del entry["exp_avg"]
    assert captured.refresh()
    del optimizer.state[model.scale]
    assert captured.refresh()
    assert not captured.refresh()


def test_a_replaced_tensor_of_the_same_form_is_read_from_then_on() -> None:
    model, optimizer, captured = made()
    train(model, optimizer, 1)
    captured.refresh()
    layout = captured.rank_layout().sets[0].layout
    old = captured.of_set(0)
    name = next(spec.name for spec in layout if spec.name.endswith("exp_avg"))
    index = [spec.name for spec in layout].index(name)
    entry = next(iter(optimizer.state.values()))
    entry["exp_avg"] = torch.full_like(entry["exp_avg"], 7.0)
    assert not captured.refresh(), "the layout is the same"
    piece = next(one for one in layout.split(1)[0] if one.tensor_index == index)
    assert bytes(captured.of_set(0).read_piece(piece)) == bits(entry["exp_avg"])
    assert bytes(old.read_piece(piece)) != bits(entry["exp_avg"]), (
        "a reader keeps the tensors it was made for"
    )


def test_tensors_in_nested_state_are_noticed() -> None:
    model, optimizer, captured = made(Odd)
    train(model, optimizer, 1)
    captured.refresh()
    history = next(iter(entry for entry in optimizer.state.values() if "history" in entry))["history"]
    history[0] = history[0].double()
    assert captured.refresh()
    history.append(torch.ones(3))
    assert captured.refresh()
    assert not captured.refresh()


def test_a_resized_state_tensor_is_named_when_it_is_read() -> None:
    model, optimizer, captured = made()
    train(model, optimizer, 1)
    captured.refresh()
    layout = captured.rank_layout().sets[0].layout
    reader = captured.of_set(0)
    index = [spec.name for spec in layout].index("optimizer.state.3.exp_avg")
    optimizer.state[optimizer.param_groups[0]["params"][3]]["exp_avg"].resize_(1)
    piece = next(one for one in layout.split(1)[0] if one.tensor_index == index)
    with pytest.raises(UsageError, match=r"'optimizer\.state\.3\.exp_avg'.*resized"):
        reader.read_piece(piece)


def test_memory_that_is_exchanged_in_a_tensor_is_read_from_then_on() -> None:
    tensor = torch.arange(16.0).reshape(4, 4)
    spec = spec_of("t", tensor)
    reader, piece = LiveTensors([spec], [tensor]), Piece(0, 4, spec.size_bytes - 4)
    for exchanged in (
        lambda data: data,
        lambda data: data + 1,
        lambda data: data.t(),  # where it was, and as large, but in another order
        lambda data: data.t().clone().t(),
        lambda data: data.t(),
    ):
        tensor.data = exchanged(tensor.data)
        for _ in range(2):
            assert bytes(reader.read_piece(piece)) == bits(tensor.contiguous())[4:]
    tensor.mul_(2)
    assert bytes(reader.read_piece(piece)) == bits(tensor)[4:]


def test_noted_gradients_have_one_reader_while_they_are_the_same_objects() -> None:
    model, optimizer, captured = made(include_grads=True)
    train(model, optimizer, 1)
    model(torch.arange(4)).backward()
    captured.refresh()
    noted = [None if one.grad is None else one.grad.clone() for one in captured.parameters()]
    reader = captured.of_set(0, noted)
    assert captured.of_set(0, list(noted)) is reader
    assert captured.of_set(0) is not reader
    others = [None if one is None else one.clone() for one in noted]
    assert captured.of_set(0, others) is not reader
    optimizer.state[model.scale]["exp_avg"] = torch.ones_like(model.scale)
    captured.refresh()
    assert captured.of_set(0, noted) is not reader


def test_gradients_come_go_and_are_replaced() -> None:
    model, optimizer, captured = made(include_grads=True)
    model(torch.arange(4)).backward()
    assert captured.refresh()
    with_grads = names_of(captured)
    assert "model.mix.weight.grad" in with_grads
    model.mix.weight.grad = torch.full_like(model.mix.weight, 3.0)
    assert not captured.refresh()
    layout = captured.rank_layout().sets[0].layout
    index = with_grads.index("model.mix.weight.grad")
    piece = next(one for one in layout.split(1)[0] if one.tensor_index == index)
    assert bytes(captured.of_set(0).read_piece(piece)) == bits(model.mix.weight.grad)
    optimizer.zero_grad()
    assert captured.refresh()
    assert not captured.refresh()


# --- parameters stay what they are


def test_a_replaced_parameter_is_named() -> None:
    model, _, captured = made()
    model.mix.bias = nn.Parameter(torch.ones(4))
    with pytest.raises(UsageError, match=r"'model\.mix\.bias' was replaced"):
        captured.refresh()
    del model.mix.bias
    with pytest.raises(UsageError, match=r"'model\.mix\.bias' was replaced"):
        captured.refresh()


def test_a_module_that_was_replaced_is_not_taken_for_the_one_that_was_protected() -> None:
    model, _, captured = made()
    model.mix = nn.Linear(4, 4)
    with pytest.raises(UsageError, match=r"'model\.mix\.weight' was replaced"):
        captured.refresh()


def test_a_module_that_comes_later_is_named() -> None:
    model, _, captured = made()
    model.late = nn.Linear(1, 1)
    assert not captured.refresh(), "nothing that was there has changed"
    model.mix = nn.Sequential(model.mix)
    with pytest.raises(UsageError, match=r"'model\.late\.weight' was added"):
        captured.refresh()


def test_modules_may_be_wrapped() -> None:
    model, _, captured = made()
    model.mix = nn.Sequential(model.mix)
    assert not captured.refresh()
    model.mix[0].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(UsageError, match=r"'model\.mix\.weight' was replaced"):
        captured.refresh()


def test_a_parameter_of_another_size_or_dtype_is_named() -> None:
    model, _, captured = made()
    model.mix.bias.data = torch.ones(5)
    with pytest.raises(UsageError, match=r"'model\.mix\.bias' was resized.*\[4\].*\[5\]"):
        captured.refresh()
    model, _, captured = made()
    model.double()
    with pytest.raises(UsageError, match=r"'model\.scale' was given another dtype.*float32.*float64"):
        captured.refresh()


def test_other_memory_of_the_same_form_is_fine() -> None:
    model, _, captured = made()
    model.mix.bias.data = torch.full((4,), 5.0)
    assert not captured.refresh()
    layout = captured.rank_layout().sets[0].layout
    index = names_of(captured).index("model.mix.bias")
    piece = next(one for one in layout.split(1)[0] if one.tensor_index == index)
    assert bytes(captured.of_set(0).read_piece(piece)) == bits(model.mix.bias)


def test_parameters_that_come_later_are_refused() -> None:
    _, optimizer, captured = made()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(UsageError, match="add_param_group"):
        captured.refresh()


# --- prepare for a rank


def test_prepare_refuses_what_belongs_to_another_rank_or_set() -> None:
    captured = made()[2]
    layout = captured.rank_layout()
    specs = layout.sets[0].layout
    with pytest.raises(LayoutMismatch, match=r"rank 3.*rank 0"):
        captured.prepare(RankLayout(3, (ReplicaSet((3,), specs),)))
    with pytest.raises(LayoutMismatch, match=r"\[0\] here.*\[0, 1\]"):
        captured.prepare(RankLayout(0, (ReplicaSet((0, 1), specs),)))
    with pytest.raises(LayoutMismatch, match="same name"):
        captured.prepare(
            RankLayout(0, (ReplicaSet((0,), specs), ReplicaSet((0, 1), Layout(specs.specs[-1:]))))
        )
    captured.prepare(layout)
    assert captured.rank_layout() == layout


# --- the estimate


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_estimate_is_what_comes(name: str) -> None:
    model, optimizer, captured = made(OPTIMIZERS[name])
    before = captured.rank_layout().total_bytes
    estimate = captured.sealing_estimate()
    before_names = names_of(captured)
    captured.refresh()
    assert names_of(captured) == before_names
    train(model, optimizer, 1)
    captured.refresh()
    assert estimate == captured.rank_layout().total_bytes - before
    assert captured.sealing_estimate() == 0


def test_the_estimate_leaves_no_trace() -> None:
    called = []
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    captured = capture(model, optimizer, common={"scheduler": scheduler})
    before = encode(captured.common_state())
    weights = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["pos"]
    assert captured.sealing_estimate()
    assert encode(captured.common_state()) == before
    assert called == []
    assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state[0])
    assert random.getstate() == random_state[1]
    assert np.random.get_state(legacy=False)["state"]["pos"] == random_state[2]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_estimate_is_none_for_a_step_that_is_not_torchs_own() -> None:
    assert made(Odd)[2].sealing_estimate() is None


def test_the_estimate_counts_groups_dtypes_and_what_is_trained() -> None:
    half, whole, frozen = nn.Linear(3, 2).bfloat16(), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": half.parameters(), "amsgrad": True},
            {"params": whole.parameters()},
            {"params": frozen.parameters()},
        ]
    )
    captured = capture(nn.ModuleList([half, whole, frozen]), optimizer)
    steps = 4 * 4
    assert captured.sealing_estimate() == 3 * 2 * 8 + 2 * 4 * 6 + steps


# --- what is noted is what is sealed


def test_gradients_are_read_as_they_were_noted() -> None:
    model, optimizer, captured = made(include_grads=True)
    model(torch.arange(4)).backward()
    captured.refresh()
    redo = Redo(PrivateState(model), captured)
    redo.note()
    layout = captured.rank_layout().sets[0].layout
    pieces = layout.split(1)[0]
    before = [bytes(captured.of_set(0).read_piece(piece)) for piece in pieces]
    model(torch.arange(4)).backward()
    optimizer.param_groups[0]["lr"] = 7.0
    assert [bytes(captured.of_set(0).read_piece(piece)) for piece in pieces] != before
    assert [bytes(redo.reader(captured, 0).read_piece(piece)) for piece in pieces] == before


def test_common_state_is_sealed_as_it_was_noted() -> None:
    model, optimizer, _ = made()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    captured = capture(model, optimizer, common={"scheduler": scheduler})
    redo = Redo(PrivateState(model), captured)
    redo.note()
    before = encode(captured.common_state())
    assert encode(redo.common_state()) == before
    train(model, optimizer, 1)  # a step in the body of a micro-batch loop, say
    optimizer.state.clear()
    scheduler.step()
    assert encode(captured.common_state()) != before
    assert encode(redo.common_state()) == before


def test_common_state_follows_plain_values_in_the_state() -> None:
    model, optimizer, captured = made(Odd)
    train(model, optimizer, 1)
    captured.refresh()
    before = encode(captured.common_state())
    train(model, optimizer, 1)
    captured.refresh()
    assert encode(captured.common_state()) != before, "it counts its calls"


def test_what_is_made_of_other_tensors_is_refused() -> None:
    class Quantized(torch.Tensor):
        def __tensor_flatten__(self) -> Any:
            return [], None

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    captured = capture(model, optimizer)
    optimizer.state[model.weight]["exp_avg"] = torch.ones(2).as_subclass(Quantized)
    with pytest.raises(UsageError, match=r"'optimizer\.state\.0\.exp_avg'.*Quantized"):
        captured.refresh()
