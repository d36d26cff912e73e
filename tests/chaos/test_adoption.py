"""The daemon is killed, alone or with a rank, at any time; another goes on with the job, and no bit differs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.cues import ENV_FOLDER, Cue, fired_path, let_go, write_cues
from chaos.recipe import Recipe
from chaos.reference import Reference
from flashrec.protocol.jobfiles import JobFiles
from tests.integration.commands import DEADLINE_S, Daemon, started
from tests.leaks import wait_until

WORLD_SIZE = 2
LIVE = Recipe(steps=9, standby="forked", parallel="ddp")
SEALED = Recipe(steps=9, standby="forked", parallel="fsdp")
REGIMES = pytest.mark.parametrize("recipe", [LIVE, SEALED], ids=["live", "sealed"])


class Struck:
    """A job whose ranks wait at cues, and whose daemon can be killed and started again."""

    def __init__(self, folder: Path, recipe: Recipe, cues: list[Cue]) -> None:
        self.folder, self.recipe = folder, recipe
        self.out = folder / "out"
        self.out.mkdir()
        recipe.write(folder / "recipe.json")
        write_cues(folder, cues)
        self.daemons = [Daemon(folder / "run")]
        self._shm_dir: Path | None = None

    @property
    def daemon(self) -> Daemon:
        return self.daemons[-1]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The job; afterwards it has ended well."""
        command = ["--nproc-per-node", str(WORLD_SIZE), "--standby", "1", "--log-dir", self.folder / "logs"]
        script = [self.recipe.script, self.folder / "recipe.json", self.out]
        try:
            with started("run", "--dir", self.folder / "run", *command, *script) as job:
                yield
                try:
                    _, says = job.communicate(timeout=DEADLINE_S)
                except subprocess.TimeoutExpired:
                    raise AssertionError(f"no end in {DEADLINE_S:.0f} s\n{self.story()}") from None
                assert job.returncode == 0, says + self.story()
            self.daemon.stop()
        finally:
            for daemon in self.daemons:
                if daemon.process.poll() is None:
                    daemon.process.kill()
                    daemon.process.wait()

    def await_cue(self, name: str) -> None:
        fired = wait_until(lambda: fired_path(self.folder, name).exists(), DEADLINE_S)
        assert fired, f"nobody came to {name}\n{self.story()}"

    def release(self, name: str) -> None:
        let_go(self.folder, name)

    def kill_daemon(self) -> None:
        self._shm_dir = Path(self.daemon.status()["job"]["shm_dir"])
        self.daemon.process.kill()
        self.daemon.process.wait()

    def start_daemon(self) -> None:
        self.daemons.append(Daemon(self.folder / "run"))

    def adopts(self) -> None:
        """Wait until the newest daemon has every rank, and goes on."""
        pids = self.pids()

        def has_all() -> bool:
            job = self.daemon.status()["job"]
            return bool(job["status"] == "running" and [rank["pid"] for rank in job["ranks"]] == pids)

        assert wait_until(has_all, DEADLINE_S), self.story()

    def pids(self) -> list[int]:
        """Of the ranks, by what the last daemon has left behind."""
        assert self._shm_dir is not None
        last = {one.rank: one.pid for one in JobFiles(self._shm_dir).processes() if one.rank is not None}
        return [last[rank] for rank in range(WORLD_SIZE)]

    def kill(self, rank: int) -> None:
        os.kill(self.pids()[rank], signal.SIGKILL)

    def events(self, event: str) -> int:
        return len(self.daemon.events(event))

    def story(self) -> str:
        return (self.folder / "run" / "events.jsonl").read_text()

    def verify(self, reference: Reference) -> None:
        undisturbed = reference.run(self.recipe, WORLD_SIZE)
        for rank in range(WORLD_SIZE):
            name = f"outcome.r{rank}.json"
            assert json.loads((self.out / name).read_text()) == json.loads((undisturbed / name).read_text())
            wanted = (undisturbed / f"losses.r{rank}").read_text().splitlines()
            assert set((self.out / f"losses.r{rank}").read_text().splitlines()) <= set(wanted)
        assert self.events("rank lost") > 0, self.story()


def at(name: str, step: int | None, *, rank: int = 0, place: str = "forward", after: str = "") -> Cue:
    return Cue(name=name, rank=rank, place=place, step=step, after=(after,) if after else ())


@pytest.fixture(autouse=True)
def cue_folder(reference: Reference, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the job's ranks; the undisturbed runs' process is older, and meets no cue."""
    monkeypatch.setenv(ENV_FOLDER, str(folder))


def test_a_rank_that_dies_after_the_adoption_is_replaced(folder: Path, reference: Reference) -> None:
    struck = Struck(folder, LIVE, [at("first", 2), at("second", 5)])
    with struck.running():
        struck.await_cue("first")
        struck.kill_daemon()
        struck.release("first")
        struck.await_cue("second")  # so training goes on without a daemon
        struck.start_daemon()
        struck.adopts()
        assert struck.events("adopted") == WORLD_SIZE
        struck.kill(1)
        struck.release("second")
    struck.verify(reference)


def test_a_rank_that_dies_while_there_is_no_daemon_is_replaced(folder: Path, reference: Reference) -> None:
    struck = Struck(folder, SEALED, [at("first", 2), at("second", 4)])
    with struck.running():
        struck.await_cue("first")
        struck.kill_daemon()
        struck.release("first")
        struck.await_cue("second")
        struck.kill(1)
        struck.release("second")
        struck.start_daemon()
        assert wait_until(lambda: struck.events("plan") == 1, DEADLINE_S), struck.story()
    struck.verify(reference)


@REGIMES
def test_a_daemon_that_dies_in_the_midst_of_a_recovery_leaves_it_to_the_next(
    recipe: Recipe, folder: Path, reference: Reference
) -> None:
    """The replacement is being built, and the survivor waits for it in the forming of a generation."""
    struck = Struck(folder, recipe, [at("first", 3), at("built", None, rank=1, place="build", after="first")])
    with struck.running():
        struck.await_cue("first")
        os.kill(struck.daemon.status()["job"]["ranks"][1]["pid"], signal.SIGKILL)
        struck.release("first")
        struck.await_cue("built")
        assert wait_until(lambda: struck.events("plan") == 1, DEADLINE_S), struck.story()
        struck.kill_daemon()
        struck.start_daemon()
        assert wait_until(lambda: struck.events("plan") == 2, DEADLINE_S), struck.story()
        struck.release("built")
    struck.verify(reference)


def test_two_daemons_die_one_after_the_other(folder: Path, reference: Reference) -> None:
    struck = Struck(folder, SEALED, [at("first", 2), at("second", 4), at("third", 6)])
    with struck.running():
        for before, after in (("first", "second"), ("second", "third")):
            struck.await_cue(before)
            struck.kill_daemon()
            struck.release(before)
            struck.await_cue(after)
            struck.start_daemon()
            struck.adopts()
        struck.kill(1)
        struck.release("third")
    assert struck.events("adopting") == 2
    struck.verify(reference)
