"""What `flashrecd --compress-replicas` makes of trained state: how much smaller, at what CPU time, and for which links.

    python -m benchmarks.compression [--size 16MB] [--steps 60] [--rounds 5] [--json]

One process trains the transformer of the other benchmarks with AdamW, and then packs and unpacks each kind of its state
as a shard server and a keeper do: in chunks of 1 MiB, on one thread. Medians of rounds.

left        bytes on the wire over bytes of state; chunks for which it does not pay count as they are
pays below  MB/s of link below which sending is faster packed than not, if one thread packs while the link is busy: the
            sender's rate, for a link slower than that is kept full by what is packed
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks import report
from benchmarks.model import SIZES, build, loader, loss_of, optimizer_of
from flashrec.state.manifest import CHUNK_BYTES
from flashrec.state.packing import pack, unpack


def trained(size: str, steps: int) -> dict[str, bytes]:
    """Each kind of state, as one stream of bytes."""
    model = build(SIZES[size])
    optimizer = optimizer_of(model)
    for batch in itertools.islice(loader(SIZES[size], 0), steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    weights = [one.detach() for one in model.parameters()]
    kinds = {
        "weights, float32": weights,
        "weights, bfloat16": [one.bfloat16() for one in weights],
        "exp_avg, float32": [one["exp_avg"] for one in optimizer.state.values()],
        "exp_avg_sq, float32": [one["exp_avg_sq"] for one in optimizer.state.values()],
    }
    return {kind: _bytes_of(tensors) for kind, tensors in kinds.items()}


def _bytes_of(tensors: Sequence[torch.Tensor]) -> bytes:
    flat = torch.cat([one.flatten() for one in tensors])
    return flat.view(torch.uint8).numpy().tobytes()


def measure(state: bytes, rounds: int) -> report.Figures:
    chunks = [state[start : start + CHUNK_BYTES] for start in range(0, len(state), CHUNK_BYTES)]
    pack_s, packed = _timed(lambda: [pack(chunk) for chunk in chunks], rounds)
    pairs = [(small, len(chunk)) for small, chunk in zip(packed, chunks, strict=True) if small is not None]
    unpack_s, _ = _timed(lambda: [unpack(small, size) for small, size in pairs], rounds)
    sent = sum(len(chunk if small is None else small) for small, chunk in zip(packed, chunks, strict=True))
    shrunk = sum(size for _, size in pairs)
    return {
        "mb": len(state) / 1e6,
        "left": sent / len(state),
        "pack_mb_s": len(state) / 1e6 / pack_s,
        "unpack_mb_s": shrunk / 1e6 / unpack_s if pairs else None,
        "pays_below_mb_s": len(state) / 1e6 / pack_s if sent < len(state) else 0.0,
    }


def _timed(work: Callable[[], list[object]], rounds: int) -> tuple[float, list[object]]:
    taken = []
    for _ in range(rounds):
        began = time.thread_time()
        found = work()
        taken.append(time.thread_time() - began)
    return statistics.median(taken), found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="16MB")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    about = report.machine()
    kinds = {
        kind: measure(state, options.rounds) for kind, state in trained(options.size, options.steps).items()
    }
    rows = [
        (
            kind,
            one["mb"],
            f"{100 * one['left']:.0f} %",
            one["pack_mb_s"],
            one["unpack_mb_s"] or "-",
            one["pays_below_mb_s"],
        )
        for kind, one in kinds.items()
    ]
    columns = ("", "MB", "left", "pack MB/s", "unpack MB/s", "pays below MB/s")
    tables = [report.table(f"State after {options.steps} steps of AdamW", columns, rows)]
    report.show({"machine": about, "kinds": kinds}, tables, as_json=options.json)


if __name__ == "__main__":
    main()
