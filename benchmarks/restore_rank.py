"""A process of `sealing` that stands for a replacement: it builds model and optimizer, and takes what was sealed.

Prints one JSON object: GB/s of the restore, from the look into the arena on, and of a memcpy of as many bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks import sealing
from flashrec.state.arena import Arena
from flashrec.state.warming import Warmer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--size-mb", type=int, required=True)
    parser.add_argument(
        "--ahead", action="store_true", help="have the memory before, as a rehearsing replacement"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    captured = sealing.state_of(options.size_mb, stepped=False)[1]
    if options.ahead:
        arena = Arena(options.directory, sealing.RANK, sealing.JOB)
        own = arena.read(arena.sealed()[-1].version)
        warmer = Warmer(captured.prepare_ahead(own.layout), [arena.map_for_pull(own)])
        warmer.wait()
        warmer.stop()
    started, cpu = time.perf_counter(), time.process_time()
    sealing.restore(options.directory, captured)
    taken, cpu = time.perf_counter() - started, time.process_time() - cpu
    size_bytes = captured.rank_layout().owned_bytes
    source, target = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    copies = []
    for _ in range(5):
        started, copy_cpu = time.perf_counter(), time.process_time()
        np.copyto(target, source)
        copies.append((time.perf_counter() - started, time.process_time() - copy_cpu))
    copy, copy_cpu = map(min, zip(*copies, strict=True))
    seconds = {"restore": taken, "restore_cpu": cpu, "memcpy": copy, "memcpy_cpu": copy_cpu}
    print(json.dumps({f"{what}_gbps": size_bytes / one / 1e9 for what, one in seconds.items()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
