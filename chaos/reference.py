"""Undisturbed runs in plain torch, forked from a process that has torch imported: a second each.

python -m chaos.reference        reads requests from standard input, one JSON object a line, answers each with
                                 one line; `Reference` below is the other end
"""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType

from chaos.recipe import Recipe

DEADLINE_S = 60
ROOT = Path(__file__).parent.parent


class Reference:
    """Runs recipes undisturbed. Equal recipes are run once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[tuple[Recipe, int], Path] = {}
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}", "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "chaos.reference"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def run(self, recipe: Recipe, world_size: int, seed_file: Path | None = None) -> Path:
        """The folder of outcomes. `seed_file`: what rank 0 of the job to compare with drew (recipe.prelude)."""
        kept = self._kept.get((recipe, world_size)) if seed_file is None else None
        if kept is not None:
            return kept
        out = self._folder / f"reference{len(list(self._folder.iterdir()))}" / "out"
        out.mkdir(parents=True)
        if seed_file is not None:
            (out.parent / "seed").write_text(seed_file.read_text())
        recipe.write(out.parent / "recipe.json")
        self._ask(out, world_size)
        self._kept[recipe, world_size] = out
        return out

    def _ask(self, out: Path, world_size: int) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"out": str(out), "world_size": world_size}) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline().strip()
        if answer != "ok":
            raise RuntimeError(f"the reference run failed: {answer or 'its process is gone'}")

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(DEADLINE_S)
        self._server.stdout.close()

    def __enter__(self) -> "Reference":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve() -> None:
    import flashrec.warm  # noqa: F401  # torch, and what its first use imports; nothing of flashrec runs

    for line in sys.stdin:
        request = json.loads(line)
        print(_run(Path(request["out"]), request["world_size"]), flush=True)


def _run(out: Path, world_size: int) -> str:
    pids = [_fork(out, rank, world_size) for rank in range(world_size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if not any(codes):
        return "ok"
    with contextlib.suppress(OSError):
        return (out / "error").read_text().strip().replace("\n", " | ")
    return f"exit codes {codes}"


def _fork(out: Path, rank: int, world_size: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        import torch.distributed as dist

        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), FLASHREC_CHAOS_PLAIN="1")
        store = dist.FileStore(str(out.parent / "store"), world_size)
        _use_store(store)
        recipe = out.parent / "recipe.json"
        script = str(Recipe.read(recipe).script)
        sys.argv = [script, str(recipe), str(out)]
        runpy.run_path(script, run_name="__main__")
        dist.destroy_process_group()
        code = 0
    except BaseException:
        (out / "error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _use_store(store: object) -> None:
    import chaos.plain

    chaos.plain.store = store


if __name__ == "__main__":
    serve()
