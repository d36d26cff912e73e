"""Sealing processes that are killed for good, at any moment, again and again, and a filesystem that is really full."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrec.state.arena import Arena
from flashrec.state.arena_writer import ArenaWriter
from tests.arenas import JOB, RANK, check, used_bytes, versions
from tests.tmpfs import run_in_tmpfs

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), *sys.path])

# Layout and size of the blob change now and then, so that files are made and removed while it is killed.
SEALING = """
import sys
from pathlib import Path
from flashrec.state.arena import Arena
from flashrec.state.sealing import Sealer
from tests.arenas import JOB, RANK, blob_of, rank_layout, tensors
problems = Arena(Path(sys.argv[1]), RANK, JOB).problems()
assert not problems, problems
sealer = Sealer(Path(sys.argv[1]), RANK, JOB)
layouts = [rank_layout([3_000_000, 5, 900_000], [200_000, 7]), rank_layout([3_000_000, 5, 900_000, 2_000_000])]
version = -1 if sealer.newest() is None else sealer.newest()
while True:
    version += 1
    layout = layouts[version // 5 % 2]
    sealer.begin(version, int(sys.argv[2]), layout, tensors(layout, version), lambda: blob_of(version))
    sealer.finish()
    print(version, flush=True)
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """In shared memory, where arenas are."""
    folder = Path(tempfile.mkdtemp(prefix="flashrec-test-", dir="/dev/shm"))
    yield folder / "arena"
    shutil.rmtree(folder)


def test_a_rank_that_is_killed_while_it_seals(directory: Path) -> None:
    draw = random.Random(1)
    arena = Arena(directory, RANK, JOB)
    newest, caught_writing = -1, 0
    for generation in range(1, 16):
        process = subprocess.Popen(
            [sys.executable, "-c", SEALING, directory, str(generation)],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for _ in range(draw.randint(1, 12)):
            newest = int(process.stdout.readline())
        killer = threading.Timer(draw.random() * 0.02, process.send_signal, [signal.SIGKILL])
        killer.start()
        newest = max([newest, *map(int, process.stdout.read().split())])
        killer.join()
        assert process.wait(60) == -signal.SIGKILL
        process.stdout.close()

        assert arena.problems() == []
        seen = versions(arena)
        assert seen[-1] in (newest, newest + 1), "what finish() returned for is there, and at most one more"
        assert newest in seen
        check(arena)
        caught_writing += seen != [newest - 1, newest]
        newest = seen[-1]
    assert newest >= 15
    assert caught_writing, "it was never killed in the middle of a version"
    # Nothing of the fifteen that died is left but the files that are in use.
    writer = ArenaWriter(directory, RANK, JOB)
    assert len(list(directory.iterdir())) <= 2
    assert used_bytes(directory) < 30 << 20
    writer.close()


FILL = """
import os, sys
from pathlib import Path
from flashrec.errors import EnvironmentFault
from flashrec.state.arena import Arena
from flashrec.state.sealing import Sealer
from tests.arenas import JOB, RANK, blob_of, check, rank_layout, tensors, versions
directory = Path(sys.argv[1]) / "arena"
sealer, arena = Sealer(directory, RANK, JOB), Arena(directory, RANK, JOB)

def seal(version, layout):
    sealer.begin(version, 1, layout, tensors(layout, version), lambda: blob_of(version))
    sealer.finish()

small, large = rank_layout([1_000_000]), rank_layout([2_000_000])
seal(0, small)
seal(1, small)
Path(sys.argv[1], "ballast").write_bytes(bytes(500_000))
try:
    seal(2, large)
except EnvironmentFault as error:
    print(error)
else:
    sys.exit("the filesystem did not fill up")
assert os.listdir(directory) == ["r3.0"], os.listdir(directory)
assert versions(arena) == [0, 1]
check(arena)
# What memory was had for can be written to, however full it is now.
Path(sys.argv[1], "ballast").unlink()
seal(2, small)
free = os.statvfs(sys.argv[1])
Path(sys.argv[1], "ballast").write_bytes(bytes(free.f_bavail * free.f_frsize))
seal(3, small)
seal(4, small)
check(arena)
assert versions(arena) == [3, 4]
sealer.close()
"""


def test_a_tmpfs_that_really_fills_up(tmp_path: Path) -> None:
    printed = run_in_tmpfs(FILL, "6m", tmp_path)
    assert "is full: 40" in printed
    assert "bytes needed" in printed
