"""How long a process takes to start, and how soon its death is known.

    python benchmarks/spawn.py [--count 30]

Printed, in ms, as median / 90th percentile / largest:
    fork        `Supervisor.spawn` from a fork server with torch imported, until the pid is known
    running     the same, until the process's own code runs
    fresh       a fresh interpreter that imports torch, until its own code runs
    death       SIGKILL of a process that has run one training step, until `on_exit` is called
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from flashrec.protocol.spawn import ProcSpec
from flashrecd.supervise import Launch, Supervisor


def announce(spec: ProcSpec) -> None:
    """What the measured process runs: say when it began, train one step, wait to be killed."""
    began = time.monotonic()
    import torch

    imported = time.monotonic()
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(32, 256)).sum().backward()
    optimizer.step()
    path = Path(str(spec.program["path"]))
    path.with_suffix(".new").write_text(f"{began} {imported}")
    path.with_suffix(".new").rename(path)
    time.sleep(600)


async def measure(count: int, folder: Path) -> dict[str, list[float]]:
    deaths: dict[str, float] = {}
    supervisor = Supervisor(lambda proc, *_: deaths.__setitem__(proc, time.monotonic()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    launch = Launch(name="bench", python=sys.executable, env=environment, cwd=str(folder))
    print(f"fork server ready after {await supervisor.start_fork_server(launch):.0f} ms of imports")
    times: dict[str, list[float]] = {"fork": [], "running": [], "fresh": [], "death": []}
    try:
        for number in range(count + 3):
            fresh = number >= count
            proc, path = f"rank{number}", folder / str(number)
            log = str(folder / "log")
            spec = ProcSpec(
                proc=proc,
                entry="spawn:announce",
                stdout_path=log,
                stderr_path=log,
                cwd=str(folder),
                program={"path": str(path)},
            )
            started = time.monotonic()
            await supervisor.spawn(spec, launch, fresh=fresh)
            forked = time.monotonic()
            while not path.exists():
                await asyncio.sleep(0.01)
            began, imported = map(float, path.read_text().split())
            killed = time.monotonic()
            supervisor.signal(proc, signal.SIGKILL)
            while proc not in deaths:
                await asyncio.sleep(0.001)
            times["death"].append((deaths[proc] - killed) * 1000)
            if fresh:
                times["fresh"].append((imported - started) * 1000)
            else:
                times["fork"].append((forked - started) * 1000)
                times["running"].append((began - started) * 1000)
    finally:
        await supervisor.shutdown(0)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = asyncio.run(measure(options.count, Path(folder)))
    for name, values in times.items():
        ordered = sorted(values)
        high = ordered[int(0.9 * (len(ordered) - 1))]
        print(f"{name:10}{statistics.median(ordered):9.1f} /{high:9.1f} /{ordered[-1]:9.1f} ms")


if __name__ == "__main__":
    main()
