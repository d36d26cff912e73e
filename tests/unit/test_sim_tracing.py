"""Modules traced without memory: FLOPs, parameters, activations and blocks."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flashrec.errors import UsageError
from flashrec.sim import costs, engine
from flashrec.sim.analytic import AnalyticDurations
from flashrec.sim.architecture import Division, Gemm, model_flops
from flashrec.sim.bill import StepBill
from flashrec.sim.cluster import a100_cluster
from flashrec.sim.memory import estimate
from flashrec.sim.model import Transformer
from flashrec.sim.strategy import Strategy
from flashrec.sim.tracing import TracedModule


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


class Gpt(nn.Module):
    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        vocabulary: int,
        tied: bool = False,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Layer(hidden, heads, causal) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


SMALL = {"layers": 3, "hidden": 32, "heads": 4, "vocabulary": 64}


def traced(sequence: int = 16, dtype: torch.dtype = torch.float32, **shapes: Any) -> TracedModule:
    return TracedModule(
        name="gpt",
        make=lambda: Gpt(**shapes).to(dtype),
        inputs=lambda n: (torch.zeros(n, sequence, dtype=torch.long),),
        layers="blocks",
        sequence=sequence,
    )


def test_flops_are_those_that_torch_counts() -> None:
    with sdpa_kernel(SDPBackend.MATH):  # torch does not count the fused one of CPUs
        with FlopCounterMode(display=False) as counter:
            output = Gpt(**SMALL)(torch.zeros(2, 16, dtype=torch.long))
            forward = counter.get_total_flops()
            output.sum().backward()
        blocks = traced(**SMALL).blocks(Division(micro_batch=2))
    assert sum(b.forward.flops for b in blocks) == forward
    backward = sum(b.backward_input.flops + b.backward_weight.flops for b in blocks)
    assert forward + backward == counter.get_total_flops()


def test_a_layer_is_the_transformer_s() -> None:
    layer = traced(**SMALL, causal=True, dtype=torch.bfloat16).blocks(Division(micro_batch=2))[1]
    shapes = Transformer(
        num_layers=3, hidden=32, num_heads=4, sequence=16, vocabulary=64, dropout=False, fused_attention=True
    )
    same = shapes.blocks(Division(micro_batch=2))[1]
    assert layer.parameters == same.parameters
    for name in ("forward", "backward_input", "backward_weight"):
        ours, theirs = getattr(layer, name).gemms, getattr(same, name).gemms
        assert sorted(g.flops for g in ours) == sorted(g.flops for g in theirs), name
    assert layer.output_bytes == same.output_bytes
    assert layer.saved_bytes["full"] == same.saved_bytes["full"]
    # The norms keep their mean and deviation, attention an index or two: no more than that apart.
    assert layer.saved_bytes["none"] == pytest.approx(same.saved_bytes["none"], rel=0.05)


def test_parameters_are_counted_where_they_are_used_first() -> None:
    untied, tied = traced(**SMALL), traced(**SMALL, tied=True)
    assert untied.parameters == sum(p.numel() for p in Gpt(**SMALL).parameters())
    assert tied.parameters == sum(p.numel() for p in Gpt(**SMALL, tied=True).parameters())
    assert (untied.tied_parameters, tied.tied_parameters) == (0, 64 * 32)
    first, *layers, last = tied.blocks(Division(micro_batch=1))
    assert (first.parameters, last.parameters) == (64 * 32, 2 * 32)
    assert len({id(layer) for layer in layers}) == 1
    assert tied.num_layers == 3


def test_a_module_too_large_for_this_machine() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = traced(
        layers=4, hidden=65536, heads=512, vocabulary=131072, sequence=4096, dtype=torch.bfloat16, causal=True
    )
    assert 2 * model.parameters > 400e9  # bytes
    assert model.blocks(Division(micro_batch=8))[1].saved_bytes["none"] > 10e9
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 300 << 10


def test_it_is_simulated_like_any_other() -> None:
    model = traced(layers=8, hidden=1024, heads=16, vocabulary=50304, sequence=1024, dtype=torch.bfloat16)
    strategy = Strategy(data_parallel=2, pipeline_parallel=4, recompute="full")
    cluster = a100_cluster(1)
    bill = StepBill(model, cluster, strategy)
    assert len(bill.bills) == 3
    built = costs.price(bill, 16, AnalyticDurations(cluster))
    assert engine.run(costs.make_schedule(strategy, 16), built).batch_s > 0
    assert [stage.fits for stage in estimate(model, cluster, strategy, 16)] == [True] * 4
    assert model_flops(model, 2) == 2 * model_flops(model, 1)


def test_convolutions_are_products() -> None:
    def make() -> nn.Module:
        kept = nn.Sequential(nn.Conv2d(8, 16, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(16, 4, 2, stride=2))
        return kept.requires_grad_()

    model = TracedModule(name="convolutions", make=make, inputs=lambda n: (torch.zeros(n, 8, 10, 10),))
    with FlopCounterMode(display=False) as counter:
        output = make()(torch.zeros(2, 8, 10, 10))
        forward = counter.get_total_flops()
    blocks = model.blocks(Division(micro_batch=2))
    assert sum(b.forward.flops for b in blocks) == forward
    assert blocks[1].forward.gemms == (Gemm(m=2 * 8 * 8, k=4 * 9, n=8, batch=2),)
    assert blocks[1].output_bytes == 4 * 2 * 16 * 8 * 8
    assert output.shape == (2, 4, 16, 16)
    # Both gradients of each convolution: its input is an activation that was cut off, which wants one.
    backward = sum(b.backward_input.flops + b.backward_weight.flops for b in blocks)
    assert backward == 2 * forward


class Asks(nn.Module):
    """Looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) if x.sum().item() > 0 else x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[0](self.layers[0](x))


@pytest.mark.parametrize(
    ("make", "layers", "says"),
    [
        (Asks, None, "cannot be traced with tensors that have no values"),
        (Twice, None, "its 1 layers ran"),
        (Asks, "layer", "nearest: 'layers'"),
        (lambda: nn.Linear(4, 4), None, "no ModuleList or Sequential"),
    ],
)
def test_what_cannot_be_traced_is_named(make: Any, layers: str | None, says: str) -> None:
    model = TracedModule(name="m", make=make, inputs=lambda n: (torch.zeros(n, 4),), layers=layers)
    with pytest.raises(UsageError, match=says):
        model.blocks(Division(micro_batch=1))


def test_it_is_not_divided() -> None:
    with pytest.raises(UsageError, match=r"tensor_parallel is 2.*nearest valid: 1"):
        traced(**SMALL).blocks(Division(micro_batch=1, tensor_parallel=2))
