"""Private state and redo: everything random, every buffer and every gradient exactly as it was."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flashrec.errors import UsageError
from flashrec.state.capture import capture
from flashrec.state.private import PrivateState, Redo, changed
from flashrec.state.tensors import decode, encode

MAX = 1 << 24


@pytest.fixture(autouse=True)
def random_states_are_left_alone() -> Iterator[None]:
    state = PrivateState(nn.Identity())
    before = state.random_state()
    yield
    state.restore_random(before)


class Counter:
    """A user's own extra."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def draw() -> tuple[Any, ...]:
    """Something from every generator, an odd number of normal deviates included (they come in pairs)."""
    return (
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(7),
        np.random.rand(),
        np.random.standard_normal(),
        np.random.randint(1000),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        torch.randperm(5).tolist(),
        nn.functional.dropout(torch.ones(20)).tolist(),
    )


@pytest.mark.parametrize("warm_up", [0, 1, 2, 700])
def test_random_state_is_restored_exactly_through_bytes(warm_up: int) -> None:
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    for _ in range(warm_up):
        random.gauss(0, 1), np.random.standard_normal(), torch.randn(1)
    state = PrivateState(nn.Identity())
    saved = encode(state.snapshot())
    expected = [draw() for _ in range(3)]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    PrivateState(nn.Identity()).restore(decode(saved, MAX))
    assert [draw() for _ in range(3)] == expected


def test_another_numpy_generator_is_restored_too() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = PrivateState(nn.Identity())
        saved = encode(state.snapshot())
        expected = draw()
        np.random.set_bit_generator(np.random.MT19937(1))
        state.restore(decode(saved, MAX))
        assert draw() == expected
        damaged = decode(saved, MAX)
        damaged["numpy"]["bit_generator"] = "seed"
        with pytest.raises(UsageError, match="bit generator 'seed'"):
            state.restore(damaged)
    finally:
        np.random.set_bit_generator(before)


def model_with_buffers() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.ones(2, 3, dtype=torch.bool).t(), persistent=False)
    model.register_buffer("nothing", None)
    model.register_buffer("low", torch.randn(3).bfloat16())
    return model


def test_buffers_and_extras_follow() -> None:
    one, other, mine, theirs = model_with_buffers(), model_with_buffers(), Counter(), Counter()
    one(torch.randn(8, 4))
    one.mask[0, 1] = False
    mine.seen = [1, 2]
    PrivateState(other, {"seen": theirs}).restore(
        decode(encode(PrivateState(one, {"seen": mine}).snapshot()), MAX)
    )
    for (name, buffer), copied in zip(one.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(buffer, copied), name
    assert theirs.seen == [1, 2]


def test_a_snapshot_does_not_change_with_what_it_shows() -> None:
    model, extra = model_with_buffers(), Counter()
    state = PrivateState(model, {"seen": extra})
    snapshot = state.snapshot()
    before = encode(snapshot)
    model(torch.randn(8, 4))
    extra.seen.append(1)
    draw()
    assert encode(snapshot) == before
    state.restore(snapshot)
    extra.seen.append(2)
    assert encode(snapshot) == before, "nor with what was restored from it"


def test_a_buffer_that_the_module_replaces_is_found() -> None:
    model = nn.Module()
    model.register_buffer("b", torch.zeros(2))
    state = PrivateState(model)
    model.b = torch.ones(2)
    assert state.snapshot()["buffers"]["b"].tolist() == [1, 1]
    model.b = None
    with pytest.raises(UsageError, match="'b'"):
        state.snapshot()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: nn.BatchNorm1d(5), "running_mean"),
        (lambda: nn.BatchNorm1d(4, dtype=torch.float64), "running_mean"),
        (lambda: nn.Linear(2, 2), "num_batches_tracked"),
    ],
)
def test_a_mismatch_names_the_part_and_changes_nothing(other: Callable[[], nn.Module], named: str) -> None:
    snapshot = PrivateState(nn.BatchNorm1d(4)).snapshot()
    state = PrivateState(other())
    draw()
    before = encode(state.snapshot())
    with pytest.raises(UsageError, match=named):
        state.restore(snapshot)
    assert encode(state.snapshot()) == before
    with pytest.raises(UsageError, match="'mine'"):
        PrivateState(nn.BatchNorm1d(4), {"mine": Counter()}).restore(snapshot)


def test_random_state_of_a_device_that_is_not_here() -> None:
    state = PrivateState(nn.Identity())
    snapshot = state.snapshot() | {"device": {"cuda:3": b"x"}}
    with pytest.raises(UsageError, match="cuda:3"):
        state.restore(snapshot)


def test_an_extra_needs_both_methods() -> None:
    with pytest.raises(UsageError, match="queue=list"):
        PrivateState(nn.Identity(), {"queue": []})


@pytest.mark.parametrize(
    ("disturb", "part"),
    [
        (lambda model, extra: random.random(), "random"),
        (lambda model, extra: random.gauss(0, 1), "random"),
        (lambda model, extra: np.random.rand(), "numpy"),
        (lambda model, extra: torch.rand(1), "torch"),
        (lambda model, extra: model.low.add_(1), "buffer low"),
        (lambda model, extra: extra.seen.append(1), "private seen"),
    ],
)
def test_the_digest_names_what_changed(disturb: Callable[[Any, Any], Any], part: str) -> None:
    model, extra = model_with_buffers(), Counter()
    state = PrivateState(model, {"seen": extra})
    before, snapshot = state.quiet_digest(), state.snapshot()
    assert changed(before, state.quiet_digest(state.snapshot())) == [], "looking changes nothing"
    assert state.changed_since(snapshot) == []
    disturb(model, extra)
    assert changed(before, state.quiet_digest()) == [part]
    assert state.changed_since(snapshot) == [part]


def test_a_pending_normal_deviate_counts() -> None:
    state = PrivateState(nn.Identity())
    random.seed(1)
    np.random.seed(1)
    np.random.standard_normal(), random.gauss(0, 1)
    before = state.quiet_digest()
    np.random.standard_normal(), random.gauss(0, 1)  # these come from what was kept; the twisters stand still
    assert changed(before, state.quiet_digest()) == ["numpy", "random"]


# --- redo
# -------------------------------------------------------------------------------------------------------


def protected(**common: Any) -> tuple[nn.Module, torch.optim.Optimizer, Redo]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, Redo(PrivateState(model), capture(model, optimizer, common=common))


def grads(model: nn.Module) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def test_a_redone_step_gives_the_same_bits() -> None:
    model, optimizer, redo = protected()

    def body() -> list[float]:
        loss = model(torch.randn(5, 3)).square().sum()
        loss.backward()
        return [loss.item(), random.random(), np.random.rand()]

    body()
    redo.note()
    first = body()
    first_grads = grads(model)
    first_buffers = encode(dict(model.named_buffers()))
    optimizer.param_groups[0]["lr"] *= 0.1
    for _ in range(2):
        redo.put_back()
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert body() == first
        assert grads(model) == first_grads
        assert encode(dict(model.named_buffers())) == first_buffers


def test_none_is_not_zero_and_objects_stay_the_same() -> None:
    model, _, redo = protected()
    weight, bias = model[0].weight, model[0].bias
    weight.grad = torch.full((3, 3), 2.0)
    held = weight.grad
    for _ in range(2):
        redo.note()
        weight.grad.add_(1)
        weight.grad = torch.zeros(3, 3)
        bias.grad = torch.zeros(3)
        redo.put_back()
        assert weight.grad is held, "DDP may know this tensor as a view of its bucket"
        assert held.tolist() == [[2.0] * 3] * 3
        assert bias.grad is None


def test_the_scaler_forgets_that_the_abandoned_step_unscaled() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    redo = Redo(PrivateState(model), capture(model, optimizer, common={"scaler": scaler}))
    expected = None
    for index in range(5):
        redo.note()
        before = scaler.state_dict()
        for attempt in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.unscale_(optimizer)
            unscaled = model.weight.grad.tolist()
            if attempt == 0:
                expected = unscaled
                redo.put_back()
                assert scaler.state_dict() == before
            else:
                # A second unscale_ raises if the scaler still remembers the first.
                assert unscaled == expected == [[1.0, 1.0], [1.0, 1.0]]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if index < 2 else 8.0)


def test_a_scaler_that_never_scaled_is_put_back_too() -> None:
    scaler = torch.amp.GradScaler("cpu")
    _, _, redo = protected(scaler=scaler)
    redo.note()
    redo.put_back()
    assert scaler.get_scale() == 65536.0


def test_common_extras_are_put_back() -> None:
    extra = Counter()
    _, _, redo = protected(seen=extra)
    extra.seen = [1]
    redo.note()
    extra.seen.append(2)
    redo.put_back()
    extra.seen.append(3)
    redo.put_back()
    assert extra.seen == [1]


def test_an_average_that_changed_before_the_gate_is_named() -> None:
    average = nn.Linear(2, 2)
    _, _, redo = protected(average=average)
    redo.note()
    redo.put_back()
    with torch.no_grad():
        average.weight.mul_(0.9)
    with pytest.raises(UsageError, match="average changed before the optimizer's step"):
        redo.put_back()


def test_put_back_needs_a_note() -> None:
    _, _, redo = protected()
    with pytest.raises(RuntimeError, match="without note"):
        redo.put_back()


def test_every_way_to_move_numpys_state_is_noticed() -> None:
    model = torch.nn.Linear(1, 1)
    private = PrivateState(model)
    np.random.seed(3)
    seen = [private.quiet_digest()]

    def look(must_differ: bool = True) -> None:
        now = private.quiet_digest()
        fresh = PrivateState(model).quiet_digest()
        assert now == fresh, "what was kept is not what is there"
        assert (now != seen[-1]) == must_differ
        seen.append(now)

    look(must_differ=False)
    np.random.rand()
    look()
    np.random.randn()  # draws two, keeps one
    look()
    np.random.randn()  # gives the one kept: the Twister does not move
    look()
    look(must_differ=False)
    np.random.seed(3)
    look()
    saved = private.snapshot()
    np.random.bytes(5)
    look()
    private.restore(saved)
    look()
    for _ in range(700):  # past a regeneration of the words
        np.random.randint(5)
    look()
