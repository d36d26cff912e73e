"""State on a real accelerator. Skipped, with its reason in the summary, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashrec.device import Accelerator, TorchLane
from flashrec.staging import Staging
from flashrec.state.arena import Arena
from flashrec.state.layout import Layout, Piece, RankLayout, ReplicaSet, TensorSpec
from flashrec.state.manifest import Source
from flashrec.state.pull import Puller
from flashrec.state.sealing import Sealer

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device here: flashrec.staging on a real one is NOT tested"
)


def test_what_is_sealed_is_the_state_at_begin_while_training_goes_on(tmp_path: Path) -> None:
    where = torch.device("cuda")
    weights = torch.randn(2048, 2048, device=where)
    tensors = [weights, torch.randn(1000, 30, device=where).t(), torch.tensor(3, device=where)]
    specs = [
        TensorSpec(
            f"t{i}", str(one.dtype).removeprefix("torch."), tuple(one.shape), one.numel() * one.itemsize
        )
        for i, one in enumerate(tensors)
    ]
    layout = Layout(specs)
    ranks = RankLayout(0, (ReplicaSet((0,), layout),))
    staging = Staging(TorchLane(where), tensors)
    sealer = Sealer(tmp_path / "arena", 0, "job")
    other = torch.randn(2048, 2048, device=where)
    expected: list[torch.Tensor] = []
    for version in range(3):
        for tensor in tensors:
            tensor.add_(1)
        for _ in range(20):
            weights.copy_(weights @ other / 50)  # keeps the training stream busy when begin() comes
        expected = [tensor.clone() for tensor in tensors]
        staging.begin()
        sealer.begin(version, 1, ranks, [staging], lambda: b"")
        for _ in range(50):
            other @ other  # the rest of the step
        sealer.finish()
        staging.end()
        for tensor in tensors:
            tensor.mul_(2)
    sealer.close()
    state = Arena(tmp_path / "arena", 0, "job").read(2)
    staging.begin()
    Puller().pull(staging, layout, [[Source(state.manifests[0])]], version=2, generation=1, deadline_s=60)
    staging.end()
    assert all(torch.equal(one, wanted) for one, wanted in zip(tensors, expected, strict=True))
    staging.close()


def test_copies_go_on_beside_a_busy_training_stream() -> None:
    where = torch.device("cuda")
    tensor = torch.full((1 << 20,), 7, dtype=torch.uint8, device=where)
    staging = Staging(TorchLane(where), [tensor])
    staging.begin()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second of the training stream
    busy.record()
    with staging.lend([Piece(0, 0, 1 << 20)]) as (view,):
        assert not busy.query(), "the copy waited for the training stream"
        assert set(bytes(view)) == {7}
    staging.close()


def test_random_state_comes_back() -> None:
    device = Accelerator("cuda")
    torch.rand(10, device="cuda")
    states = device.rng_states()
    first = torch.rand(10, device="cuda")
    device.set_rng_states(states)
    assert torch.equal(torch.rand(10, device="cuda"), first)
    with pytest.raises(ValueError, match="this process trains on cuda"):
        device.set_rng_states({"xpu": b""})
