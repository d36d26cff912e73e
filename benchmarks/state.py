"""What moving and sealing state costs, beside plain memcpy in the same run: `python benchmarks/state.py`.

Figures are medians (costs) and bests (bandwidths) of a few rounds on this machine; GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from flashrec.state import tensors
from flashrec.state.capture import capture
from flashrec.state.export import export
from flashrec.state.manifest import ExportManifest, Source, export_path
from flashrec.state.private import PrivateState, Redo
from flashrec.state.private_slots import PrivateSlots
from flashrec.state.pull import Puller

ROUNDS = 5


def microseconds(act: Callable[[], object], repeats: int = 300) -> float:
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        act()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e6


def gigabytes_per_s(size_bytes: int, act: Callable[[], object]) -> float:
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        act()
        taken.append(time.perf_counter() - started)
    return size_bytes / min(taken) / 1e9


def small_model() -> nn.Module:
    """24 layers, 147 tensors, as a small GPT has them; buffers as a small convolutional net."""
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(24)]
    )


def costs(directory: Path) -> dict[str, float]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    private = PrivateState(model)
    buffered = PrivateState(nn.Sequential(model, *[nn.BatchNorm1d(64) for _ in range(10)]))
    redo = Redo(private, capture(model, optimizer))
    slots = PrivateSlots(directory / "private", 0)
    payload = tensors.encode(private.snapshot())
    version = iter(range(1 << 30))
    return {
        "snapshot_us": microseconds(private.snapshot),
        "snapshot_with_30_buffers_us": microseconds(buffered.snapshot),
        "encode_us": microseconds(lambda: tensors.encode(private.snapshot()))
        - microseconds(private.snapshot),
        "seal_us": microseconds(lambda: slots.seal(next(version), 1, payload)),
        "payload_bytes": len(payload),
        "quiet_digest_us": microseconds(private.quiet_digest),
        "redo_note_us": microseconds(redo.note),
    }


@contextlib.contextmanager
def shard_server(directory: Path) -> Iterator[str]:
    """A shard server over `directory`, at the address given, answering."""
    address = f"ipc://{directory}/s.sock"
    command = [sys.executable, "-m", "flashrecd.shards", "--root", str(directory), "--bind", address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        yield address
        server.terminate()


def bandwidths(directory: Path, size_mib: int) -> dict[str, float]:
    side = int((size_mib * (1 << 20) / 3 / 4 / 8) ** 0.5)
    model = nn.ModuleList([nn.Linear(side, side, bias=False) for _ in range(8)])
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    captured = capture(model, optimizer)
    layout = captured.rank_layout().sets[0].layout
    size_bytes = layout.total_bytes

    def make(num_parts: int) -> list[ExportManifest]:
        return [
            export(
                captured.of_set(0),
                pieces,
                export_path(directory, 1, part),
                rank=part,
                version=1,
                generation=1,
                layout_digest=layout.digest,
            )
            for part, pieces in enumerate(layout.split(num_parts))
        ]

    source, target = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    figures = {
        "size_mb": size_bytes / 1e6,
        "memcpy_gbps": gigabytes_per_s(size_bytes, lambda: np.copyto(target, source)),
        "export_gbps": gigabytes_per_s(size_bytes, lambda: make(1)),
    }
    for num_parts in (1, 3):
        manifests = make(num_parts)

        def pull(address: str | None, manifests: list[ExportManifest] = manifests) -> None:
            parts = [[Source(manifest, address)] for manifest in manifests]
            Puller().pull(captured.of_set(0), layout, parts, version=1, generation=1, deadline_s=300)

        figures[f"pull_shared_memory_{num_parts}_parts_gbps"] = gigabytes_per_s(
            size_bytes, lambda: pull(None)
        )
        started = time.perf_counter()
        with shard_server(directory) as address:
            figures["shard_server_start_s"] = time.perf_counter() - started
            figures[f"pull_zeromq_{num_parts}_parts_gbps"] = gigabytes_per_s(
                size_bytes, lambda: pull(address)
            )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mib", type=int, default=256, help="state to move")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="flashrec-bench-", dir="/dev/shm") as name:
        figures = costs(Path(name)) | bandwidths(Path(name), options.size_mib)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=2))


if __name__ == "__main__":
    main()
