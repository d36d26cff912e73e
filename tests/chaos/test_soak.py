"""A short soak; `python -m chaos.soak` is the long one."""

from pathlib import Path

from chaos.reference import Reference
from chaos.scenario import verify
from chaos.soak import soak


def test_survivors_and_daemon_do_not_grow(folder: Path, reference: Reference) -> None:
    outcome, growth = soak(recoveries=16, world_size=2, depth="built", seed=3, folder=folder)
    verify(outcome, reference)
    assert len(growth.num_files) >= 12
