"""Shapes -> parameters, FLOPs, activations, against published figures and formulas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.architecture import Division, model_flops
from flashrec.sim.model import Transformer


def gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51200) -> Transformer:
    return Transformer(
        num_layers=layers, hidden=hidden, num_heads=heads, sequence=2048, vocabulary=vocabulary
    )


LLAMA_2_70B = Transformer(
    num_layers=80,
    hidden=8192,
    num_heads=64,
    kv_heads=8,
    ffn_hidden=28672,
    gated=True,
    sequence=4096,
    vocabulary=32000,
    biases=False,
    rms_norm=True,
    learned_positions=False,
    tied_embeddings=False,
    dropout=False,
    fused_attention=True,
)
MIXTRAL_8X7B = Transformer(
    num_layers=32,
    hidden=4096,
    num_heads=32,
    kv_heads=8,
    ffn_hidden=14336,
    gated=True,
    num_experts=8,
    experts_per_token=2,
    sequence=4096,
    vocabulary=32000,
    biases=False,
    rms_norm=True,
    learned_positions=False,
    tied_embeddings=False,
    dropout=False,
)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(96, 12288, 96), (24, 2304, 24), (48, 8192, 64)])
def test_gpt_parameters_are_the_published_formula(layers: int, hidden: int, heads: int) -> None:
    """arXiv 2104.04473, equation 2, and the final norm, which the formula leaves out."""
    h, v, s = hidden, 51200, 2048
    published = 12 * layers * h * h * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert gpt(layers, hidden, heads).parameters == round(published) + 2 * h


def test_known_models_have_their_published_sizes() -> None:
    assert gpt(96, 12288, 96, 50257).parameters / 1e9 == pytest.approx(174.6, abs=0.1)
    assert LLAMA_2_70B.parameters == 68_976_648_192
    assert MIXTRAL_8X7B.parameters == 46_702_792_704
    assert MIXTRAL_8X7B.active_parameters / 1e9 == pytest.approx(12.88, abs=0.01)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(30, 3072, 32), (48, 8192, 64)])
def test_flops_are_the_published_formula(layers: int, hidden: int, heads: int) -> None:
    """arXiv 2104.04473, equation 3 with recomputation; three quarters of its layers' part without."""
    s, v, batch = 2048, 51200, 16
    layer = 72 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden))
    head = 6 * batch * s * hidden * v
    assert model_flops(gpt(layers, hidden, heads), batch) == pytest.approx(layer + head, rel=1e-12)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activations_are_the_published_formula(tensor: int, sequence_parallel: bool) -> None:
    """arXiv 2205.05198, equations 2 and 4, and table 2."""
    s, b, h, a, t = 2048, 4, 3072, 32, tensor
    division = Division(micro_batch=b, tensor_parallel=t, sequence_parallel=sequence_parallel)
    saved = gpt(30, h, a).blocks(division)[1].saved_bytes
    core = 5 * a * s / (h * t)
    rest = 34 / t if sequence_parallel else 10 + 24 / t
    assert saved["none"] == pytest.approx(s * b * h * (rest + core))
    assert saved["selective"] == pytest.approx(s * b * h * rest)
    assert saved["full"] == pytest.approx(2 * s * b * h / (t if sequence_parallel else 1))


@given(tensor=st.sampled_from([1, 2, 4, 8]), micro_batch=st.integers(1, 4))
def test_tensor_parallel_divides_products_exactly(tensor: int, micro_batch: int) -> None:
    whole = LLAMA_2_70B.blocks(Division(micro_batch=micro_batch))[1]
    part = LLAMA_2_70B.blocks(Division(micro_batch=micro_batch, tensor_parallel=tensor))[1]
    assert part.forward.flops * tensor == whole.forward.flops
    assert part.backward_weight.flops * tensor == whole.backward_weight.flops
    assert len(part.forward.exchanges) == (2 if tensor > 1 else 0)


def test_sequence_parallel_moves_the_same_bytes_around_a_ring() -> None:
    plain = LLAMA_2_70B.blocks(Division(micro_batch=1, tensor_parallel=4))[1]
    divided = LLAMA_2_70B.blocks(Division(micro_batch=1, tensor_parallel=4, sequence_parallel=True))[1]
    assert [e.collective for e in plain.forward.exchanges] == ["all_reduce"] * 2
    assert [e.collective for e in divided.forward.exchanges] == ["all_gather", "reduce_scatter"] * 2
    # An all-reduce is a reduce-scatter and an all-gather: half its volume each.
    assert sum(2 * e.size_bytes for e in plain.forward.exchanges) == sum(
        e.size_bytes for e in divided.forward.exchanges
    )


def test_experts_are_divided_and_tokens_travel() -> None:
    whole = MIXTRAL_8X7B.blocks(Division(micro_batch=1))[1]
    part = MIXTRAL_8X7B.blocks(Division(micro_batch=1, expert_parallel=4))[1]
    assert part.expert_parameters * 4 == whole.expert_parameters
    assert part.parameters == whole.parameters
    assert part.forward.flops == whole.forward.flops  # as many tokens come as go
    tokens = [e for e in part.forward.exchanges if e.axis == "expert"]
    assert [e.collective for e in tokens] == ["all_to_all"] * 2
    assert tokens[0].size_bytes == 2 * 2 * 4096 * 4096  # bf16, two experts a token


def test_impossible_divisions_name_the_nearest_valid() -> None:
    with pytest.raises(UsageError, match=r"num_heads \(32\).*tensor_parallel \(3\).*: 2 or 4"):
        gpt(30, 3072, 32).blocks(Division(micro_batch=1, tensor_parallel=3))
    with pytest.raises(UsageError, match=r"kv_heads \(8\).*tensor_parallel \(16\)"):
        LLAMA_2_70B.check_division(16, 1)
    with pytest.raises(UsageError, match=r"num_experts \(8\).*expert_parallel \(3\).*: 2 or 4"):
        MIXTRAL_8X7B.check_division(1, 3)
    with pytest.raises(UsageError, match=r"hidden \(3000\).*num_heads \(32\)"):
        gpt(30, 3000, 32)
