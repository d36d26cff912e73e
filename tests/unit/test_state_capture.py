"""Capture: a second set of objects becomes bit-identical to the first through pieces and common state
alone."""

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flashrec.errors import LayoutMismatch, ProtocolError, UsageError
from flashrec.state import codec
from flashrec.state import tensors as tensors_module
from flashrec.state.capture import Captured, capture
from flashrec.state.layout import Layout, Piece, RankLayout, ReplicaSet, TensorSpec
from flashrec.state.tensors import decode, encode, read_bytes, spec_of, write_bytes

MAX = 1 << 26


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


class Tied(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, dtype=dtype)
        self.mix = nn.Linear(4, 4, dtype=dtype)
        self.conv = nn.Conv2d(2, 3, 2, dtype=dtype).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, 7, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(3, 5).to(dtype).t())
        self.frozen = nn.Parameter(torch.randn(3).to(dtype), requires_grad=False)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.embed(index)) * self.scale
        image = self.conv(hidden.reshape(1, 2, -1, 2).expand(1, 2, 4, 2))
        return self.head(hidden).sum() + image.sum() + self.turned.square().sum() + self.nothing.sum()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(4) + step % 3).backward()
        optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-foreach-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop-centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor([one for one in p if one.numel()]),
    "nadam": lambda p: torch.optim.NAdam(p),
}


def pair(
    make_optimizer: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[
    tuple[nn.Module, torch.optim.Optimizer, Captured], tuple[nn.Module, torch.optim.Optimizer, Captured]
]:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Tied(dtype)
        optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)
        made.append((model, optimizer, capture(model, optimizer, **options)))
    return made[0], made[1]


def transfer(source: Captured, target: Captured, num_parts: int = 3) -> None:
    """All pieces, then the common state, the latter as it goes over a wire."""
    source.refresh()
    layout = RankLayout.from_bytes(source.rank_layout().to_bytes())
    target.prepare(layout)
    for index, one in enumerate(layout.sets):
        reader, writer = source.of_set(index), target.of_set(index)
        for part in one.layout.split(num_parts):
            for piece in part:
                writer.write_piece(piece, bytes(reader.read_piece(piece)))
    target.load_common_state(decode(encode(source.common_state()), MAX))


def layout_of(captured: Captured) -> Layout:
    """Of all tensors as they are now: this rank holds them alone."""
    captured.refresh()
    return captured.rank_layout().sets[0].layout


def for_rank_0(layout: Layout) -> RankLayout:
    return RankLayout(0, (ReplicaSet((0,), layout),))


def assert_same_state(
    one: tuple[nn.Module, torch.optim.Optimizer, Captured],
    other: tuple[nn.Module, torch.optim.Optimizer, Captured],
) -> None:
    for (name, mine), theirs in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        assert bits(mine) == bits(theirs), name
    assert encode(one[1].state_dict()["param_groups"]) == encode(other[1].state_dict()["param_groups"])
    mine, theirs = one[1].state_dict()["state"], other[1].state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for index in mine:
        assert encode(mine[index]) == encode(theirs[index]), index
    assert layout_of(one[2]) == layout_of(other[2])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_rank_becomes_bit_identical_and_goes_on_alike(name: str) -> None:
    source, target = pair(OPTIMIZERS[name])
    train(source[0], source[1], 3)
    transfer(source[2], target[2])
    assert_same_state(source, target)
    train(source[0], source[1], 2)
    train(target[0], target[1], 2)
    assert_same_state(source, target)


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adagrad"])
def test_state_before_the_first_step(name: str) -> None:
    source, target = pair(OPTIMIZERS[name])
    train(target[0], target[1], 2)  # the target has state that the source has not
    transfer(source[2], target[2])
    assert_same_state(source, target)


def test_an_older_state_over_a_newer_one() -> None:
    source, target = pair(OPTIMIZERS["adamw"])
    train(source[0], source[1], 1)
    train(target[0], target[1], 5)
    held = target[1].state[next(iter(target[1].state))]["exp_avg"]
    transfer(source[2], target[2])
    assert_same_state(source, target)
    assert target[1].state[next(iter(target[1].state))]["exp_avg"] is held, "tensors that fit are kept"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    source, target = pair(OPTIMIZERS["adamw"], dtype)
    train(source[0], source[1], 2)
    transfer(source[2], target[2])
    assert_same_state(source, target)


def test_names_and_tied_parameters() -> None:
    source, _ = pair(OPTIMIZERS["adamw"])
    train(source[0], source[1], 1)
    names = [spec.name for spec in layout_of(source[2])]
    assert len(set(names)) == len(names)
    assert "model.embed.weight" in names
    assert "model.head.weight" not in names, "tied: once, under its first name"
    assert {"model.frozen", "model.nothing", "optimizer.state.0.exp_avg", "optimizer.state.0.step"} <= set(
        names
    )


def test_memory_shared_by_two_parameters_counts_once() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight.data = model[0].weight.data
    names = [spec.name for spec in layout_of(capture(model, torch.optim.SGD(model.parameters(), lr=1)))]
    assert names == ["model.0.weight", "model.0.bias", "model.1.bias"]


def test_reading_a_contiguous_tensor_copies_nothing() -> None:
    model = nn.Linear(4, 4)
    captured = capture(model, torch.optim.SGD(model.parameters(), lr=1))
    reader = captured.of_set(0)
    memory = reader.piece_memory(Piece(0, 16, 16))
    assert memory is not None
    with torch.no_grad():
        model.weight[1, 0] = 42.0
    assert reader.read_piece(Piece(0, 16, 4)).cast("f")[0] == 42.0
    assert memory.cast("B").cast("f")[0] == 42.0


def test_indirect_writes_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that write neighbours in a row read and write back the same row."""
    source, target = pair(OPTIMIZERS["sgd"])
    locks = []

    def write(tensor: torch.Tensor, offset: int, data: Any) -> None:
        locks.append(target[2].of_set(0)._indirect_write.locked())
        write_bytes(tensor, offset, data)

    monkeypatch.setattr(tensors_module, "write_bytes", write)
    transfer(source[2], target[2])
    assert_same_state(source, target)
    assert len(locks) >= 2, "no tensor was written indirectly"
    assert all(locks)


def test_plain_state_that_the_source_has_not_is_dropped() -> None:
    source, target = pair(OPTIMIZERS["sgd"])
    target[1].state[next(target[0].parameters())] = {"calls": 3}
    target[1].state["total"] = {"count": 1}
    transfer(source[2], target[2])
    assert not target[1].state


def test_several_models_and_optimizers_by_name() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    temperature = nn.Parameter(torch.ones(()))
    captured = capture(
        {"actor": one, "critic": two},
        [torch.optim.SGD(one.parameters(), lr=1), torch.optim.SGD([*two.parameters(), temperature], lr=1)],
    )
    assert [spec.name for spec in layout_of(captured)] == [
        "model.actor.weight",
        "model.actor.bias",
        "model.critic.weight",
        "model.critic.bias",
        "optimizer.1.params.2",
    ]


def test_gradients_on_request() -> None:
    source, target = pair(OPTIMIZERS["sgd"], include_grads=True)
    source[0](torch.arange(4)).backward()
    train(target[0], target[1], 1)
    source[0].scale.grad = None
    transfer(source[2], target[2])
    for mine, theirs in zip(source[0].parameters(), target[0].parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            assert bits(mine.grad) == bits(theirs.grad)


# --- mismatches
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: nn.Linear(4, 3), "'model.weight'"),
        (lambda: nn.Linear(4, 4, bias=False), "'model.bias'"),
        (lambda: nn.Linear(4, 4, dtype=torch.bfloat16), "'model.weight'"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "'model.0.weight'"),
    ],
)
def test_a_mismatch_names_the_tensor_and_changes_nothing(other: Callable[[], nn.Module], named: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    captured = capture(model, optimizer)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    theirs = other()
    layout = capture(theirs, torch.optim.AdamW(theirs.parameters())).rank_layout()
    with pytest.raises(LayoutMismatch) as caught:
        capture(theirs, torch.optim.AdamW(theirs.parameters())).prepare(for_rank_0(layout_of(captured)))
    assert "model" in str(caught.value)
    with pytest.raises(LayoutMismatch) as caught:
        captured.prepare(layout)
    assert named in str(caught.value) or "'model.weight'" in str(caught.value)
    assert len(optimizer.state) == 2


def test_state_of_a_parameter_that_does_not_exist() -> None:
    model = nn.Linear(2, 2)
    captured = capture(model, torch.optim.AdamW(model.parameters()))
    specs = [*layout_of(captured), TensorSpec("optimizer.state.9.exp_avg", "float32", (2,), 8)]
    with pytest.raises(LayoutMismatch, match=r"optimizer\.state\.9\.exp_avg"):
        captured.prepare(for_rank_0(Layout(specs)))


def test_common_state_of_other_groups_is_refused() -> None:
    model = nn.Linear(2, 2)
    one = capture(model, torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=1))
    other = capture(model, torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(UsageError, match="groups of"):
        other.load_common_state(one.common_state())
    with pytest.raises(UsageError, match="common state"):
        other.load_common_state({"optimizers": {}})
    with pytest.raises(UsageError, match="ema"):
        other.load_common_state(
            capture(model, other.optimizers[0].optimizer, common={"ema": nn.Linear(1, 1)}).common_state()
        )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Parameter(torch.ones(1).expand(4)), "share memory"),
        (lambda: nn.Parameter(torch.ones(2, 2).to_sparse()), "layout"),
        (lambda: nn.Parameter(torch.ones(2, device="meta")), "meta"),
    ],
)
def test_tensors_that_cannot_be_protected_are_named(make: Callable[[], nn.Parameter], reason: str) -> None:
    model = nn.Module()
    model.odd = make()
    with pytest.raises(UsageError, match=rf"'model\.odd'.*{reason}"):
        capture(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1))


def test_a_lazy_module_is_named() -> None:
    model = nn.LazyLinear(2)
    with pytest.raises(UsageError, match=r"'model\.weight'.*not initialized"):
        capture(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1))


@pytest.mark.parametrize("given_model", [None, [], {}, [1], {"a.b": nn.Linear(1, 1)}, "model"])
def test_what_is_no_model_is_refused(given_model: Any) -> None:
    with pytest.raises(UsageError):
        capture(given_model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1))


def test_an_extra_without_state_dict_is_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="schedule=int"):
        capture(model, torch.optim.SGD(model.parameters(), lr=1), common={"schedule": 3})


# --- common state
# ----------------------------------------------------------------------------------------------


def test_schedulers_scaler_and_average_follow() -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any], Captured]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])
        common = {
            "scheduler": torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, steps], [3]),
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
            "ema": torch.optim.swa_utils.AveragedModel(model),
        }
        return model, optimizer, common, capture(model, optimizer, common=common)

    def run(built: tuple[nn.Module, torch.optim.Optimizer, dict[str, Any], Captured], steps: int) -> None:
        model, optimizer, common, _ = built
        for step in range(steps):
            optimizer.zero_grad()
            common["scaler"].scale(model(torch.ones(3) * step).square().sum()).backward()
            common["scaler"].step(optimizer)
            common["scaler"].update()
            common["scheduler"].step()
            common["ema"].update_parameters(model)

    one, other = build(1), build(2)
    run(one, 5)
    transfer(one[3], other[3])
    run(one, 4)
    run(other, 4)
    assert encode(one[3].common_state()) == encode(other[3].common_state())
    assert bits(one[0].weight) == bits(other[0].weight)
    assert isinstance(other[2]["scheduler"]._schedulers[1].milestones, collections.Counter)


def test_common_state_is_a_copy() -> None:
    model = nn.Linear(2, 2)
    ema = nn.Linear(2, 2)
    captured = capture(model, torch.optim.SGD(model.parameters(), lr=1), common={"ema": ema})
    common = captured.common_state()
    before = encode(common)
    with torch.no_grad():
        ema.weight.zero_()
    captured.optimizers[0].optimizer.param_groups[0]["lr"] = 5
    assert encode(common) == before


def test_a_tensor_learning_rate_keeps_its_identity() -> None:
    source, target = pair(OPTIMIZERS["adamw-tensor-lr"])
    rate = target[1].param_groups[0]["lr"]
    source[1].param_groups[0]["lr"].fill_(0.025)
    transfer(source[2], target[2])
    assert target[1].param_groups[0]["lr"] is rate
    assert bits(rate) == bits(torch.tensor(0.025))


class Odd(torch.optim.Optimizer):
    """State of every shape: nested, shared, plain values, and an entry that belongs to no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5, "table": [1, (2, "x")]})

    def step(self, closure: Any = None) -> None:
        self.state.setdefault("total", {"count": 0, "norms": torch.zeros(2)})["count"] += 1
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                state["none"] = None
                state.setdefault("history", [torch.zeros_like(parameter), {"deep": torch.ones(3, number)}])
                state.setdefault("kron", {(0, 1): torch.eye(2), "b-c": torch.arange(3)})
                with torch.no_grad():
                    state["history"][0].add_(parameter.grad)
                    state["kron"][(0, 1)].mul_(1.1)
                    parameter.sub_(state["history"][0], alpha=group["lr"])


def test_nested_state_of_any_optimizer() -> None:
    source, target = pair(Odd)
    train(source[0], source[1], 3)
    names = {spec.name for spec in layout_of(source[2])}
    assert {
        "optimizer.state.1.history[0]",
        "optimizer.state.1.history[1].deep",
        "optimizer.state.total.norms",
    } <= names
    assert {"optimizer.state.1.kron.(0, 1)", "optimizer.state.1.kron.'b-c'"} <= names
    transfer(source[2], target[2])
    train(source[0], source[1], 1)
    train(target[0], target[1], 1)
    assert encode(source[2].common_state()) == encode(target[2].common_state())
    layout = layout_of(source[2])
    assert layout == layout_of(target[2])
    for part in layout.split(1):
        for piece in part:
            assert source[2].of_set(0).read_piece(piece) == target[2].of_set(0).read_piece(piece)


# --- single tensors
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(10)[::2],
        torch.randn(1, 6, 4).transpose(1, 2),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.tensor(2.0),
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.zeros(3, 0, 2),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.tensor([True, False]),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}{tensor.stride()}",
)
def test_any_byte_range_reads_and_writes(tensor: torch.Tensor) -> None:
    whole = bits(tensor.resolve_conj())
    size = len(whole)
    for start in range(0, size + 1, 3):
        for end in (start, start + 1, start + 5, size):
            if start <= end <= size:
                assert bytes(read_bytes(tensor, start, end - start)) == whole[start:end]
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    for start in range(0, size, 5):
        write_bytes(copy, start, whole[start : start + 5])
    assert bits(copy) == whole


def test_tensors_parameters_and_their_kin_round_trip() -> None:
    value = {
        "t": torch.randn(2, 3).t(),
        "p": nn.Parameter(torch.ones(2)),
        "grad": torch.ones(1, requires_grad=True),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    again = decode(encode(value), MAX)
    assert encode(again) == encode(value)
    assert isinstance(again["p"], nn.Parameter)
    assert again["grad"].requires_grad
    assert again["dtype"] is torch.bfloat16
    assert isinstance(again["size"], torch.Size)


@given(
    st.lists(
        st.one_of(st.integers(-3, 9), st.text(max_size=3), st.binary(max_size=16), st.booleans()), max_size=5
    ),
    st.sampled_from(
        ["torch.Tensor", "torch.Parameter", "torch.dtype", "torch.device", "torch.Size", "torch.x"]
    ),
)
@settings(max_examples=200)
def test_malformed_tensors_are_refused(body: list[Any], kind: str) -> None:
    try:
        decode(codec.encode(codec.Foreign(kind, body)), MAX)
    except ProtocolError:
        return


@pytest.mark.parametrize(
    "body",
    [
        ["float32", [2], False, b"123"],
        ["float32", [-1], False, b""],
        ["object", [1], False, b"1"],
        ["int8", [1], True, b"1"],
        ["qint8", [1], False, b"1"],
        ["float32", [1 << 61, 8], False, b""],
    ],
)
def test_lying_tensors_are_refused(body: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        decode(codec.encode(codec.Foreign("torch.Tensor", body)), MAX)


def test_spec_names_the_tensor() -> None:
    spec = spec_of("x", torch.zeros(2, 3, dtype=torch.bfloat16))
    assert (spec.name, spec.dtype, spec.shape, spec.size_bytes) == ("x", "bfloat16", (2, 3), 12)
