"""What a job's processes print reaches who submitted it, though a file fails or a daemon's answer was lost."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest

from flashrec import __version__
from flashrec.protocol import messages as msg
from flashrecd.launching import OwnProcesses, Process


class Told:
    """Processes of a job whose files are written here, and what is told of them."""

    def __init__(self, folder: Path) -> None:
        submit = msg.Submit(
            release=__version__, pid=os.getpid(), target="train.py", module=False, args=(), cwd="/", umask=0o077,
            python="python", env=(), world_size=2, num_standbys=0, max_restarts=None, log_dir=None,
            start_method="fork", preload=(), pull="shm", suspect_after_s=3.0,
        )  # fmt: skip
        self.outputs: list[msg.Output] = []
        self.notes: list[tuple[str, str, int | None]] = []
        self.own = OwnProcesses(
            "job",
            submit,
            supervisor=cast(Any, None),
            log_dir=folder,
            address="",
            tell=lambda message: self.outputs.append(cast(msg.Output, message)),
            note=lambda *note: self.notes.append(note),
        )
        self.processes = [Process(f"p{rank}", rank, rank, 1, replacement=False) for rank in (0, 1)]
        for process in self.processes:
            process.own_files = False
            process.adopted = True

    def prints(self, rank: int, text: bytes) -> None:
        with open(self.own.logs.rank_files(rank)["stdout"], "ab") as file:
            file.write(text)

    def look(self) -> None:
        self.own._tail.poll()
        self.own._flush_output()

    @property
    def texts(self) -> list[tuple[int, bytes]]:
        return [(output.rank, output.data) for output in self.outputs]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_a_listener_that_asks_again_is_told_again_what_it_did_not_hear(told: Told) -> None:
    async def run() -> None:
        told.own.take_over(told.processes)
        told.prints(0, b"one\ntwo\n")
        told.prints(1, b"other\n")
        told.own.listen({("p0", "stdout"): 4})
        told.look()
        told.processes[1].gone = True
        await told.own.ended(told.processes[1])
        assert sorted(told.texts) == [(0, b"two"), (1, b"other")]
        told.outputs.clear()
        told.own.listen({("p0", "stdout"): 4})  # the answer to the first call was lost
        told.look()
        await asyncio.gather(*told.own._rest)
        assert sorted(told.texts) == [(0, b"two"), (1, b"other")]
        told.own.seen(msg.OUTPUT_OVERHEAD_BYTES)
        told.outputs.clear()
        told.own.listen({("p0", "stdout"): 8, ("p1", "stdout"): 6})
        told.look()
        assert not told.outputs
        told.own._tail.close()

    asyncio.run(run())


def test_nothing_is_told_to_a_listener_that_is_cut_off(told: Told) -> None:
    told.own.is_cut_off = lambda: True
    assert told.own.output_blocked


def test_a_file_that_cannot_be_read_is_noted_once_and_the_others_are_shown(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open
    broken = told.own.logs.rank_files(0)["stdout"]

    def fail(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == broken:
            raise OSError(5, "Input/output error")
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)

    async def run() -> None:
        told.own.take_over(told.processes)
        told.own.listen({})
        told.prints(0, b"lost\n")
        told.own.begin()
        for rank_1_prints in (b"one\n", b"two\n"):
            told.prints(1, rank_1_prints)
            async with asyncio.timeout(10):
                while not told.outputs:
                    await asyncio.sleep(0)
            assert told.texts == [(1, rank_1_prints.strip())]
            told.outputs.clear()
        told.prints(0, b"more\n")
        told.prints(1, b"three")
        with pytest.raises(OSError, match="Input/output"):
            await told.own.ended(told.processes[0])
        await told.own.ended(told.processes[1])
        assert told.texts == [(1, b"three")]
        following = told.own._following
        assert following is not None
        assert not following.done()
        following.cancel()

    asyncio.run(run())
    assert [(event, rank) for event, _, rank in told.notes] == [("output not shown", 0)]
