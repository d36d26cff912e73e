"""The demo's model, small, in the parallelism of the recipe: what is struck to see that any of them is saved.

usage: parallel.py RECIPE OUT

Runs on flashrec, or with FLASHREC_CHAOS_PLAIN set on plain torch (`chaos.plain`). Each rank leaves its losses
in OUT/losses.rN and the instants of its commits in OUT/commits.rN as it goes, and digests of all it holds at
the end in OUT/outcome.rN.json.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from chaos import pace
from chaos.cues import cues
from chaos.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "flashrec" / "demo"))

import outcome
import parallelism
import recipe as demo
import text

PLAIN = bool(os.environ.get("FLASHREC_CHAOS_PLAIN"))
flashrec: Any = importlib.import_module("chaos.plain" if PLAIN else "flashrec")
CORPUS_BYTES = 1 << 17


def options_of(recipe: Recipe, out: Path) -> demo.Options:
    return demo.Options(
        steps=recipe.steps,
        seed=5,
        out=out,
        batch=1,
        context=8,
        width=32,
        layers=8 if recipe.schedule == "interleaved" else 4,
        epoch_steps=5,
        workers=0,
        quiet=True,
        standby=recipe.standby,
        parallel=recipe.parallel,
        schedule=recipe.schedule,
        **{name: name in recipe.sizes for name in ("mixed_precision", "frozen", "uneven", "moe")},
        tied="tied" in recipe.sizes or not recipe.parallel.startswith("pp"),
    )


class Run:
    def __init__(self, recipe: Recipe, out: Path) -> None:
        self.options, self.out = options_of(recipe, out), out
        self._is_paced = recipe.paced and not PLAIN
        self.training = parallelism.build(self.options)
        self.scheduler = demo.build_scheduler(self.training.optimizer, self.options)
        self.index = 0
        blocks = [module for name, module in self.training.plain.named_modules() if name.endswith("blocks.0")]
        self._blocks = (
            blocks
            or [
                module
                for name, module in self.training.plain.named_modules()
                if name.endswith("attention_out")
            ][:1]
        )
        self._blocks[0].register_forward_hook(self._in_forward)

    def _in_forward(self, _: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
        self._reach("forward")
        if output.requires_grad:
            output.register_hook(lambda _: self._reach("backward"))

    def watch_optimizer(self) -> None:
        """After protect(): this hook comes after the gate."""
        self.training.optimizer.register_step_pre_hook(lambda *_: self._reach("apply"))

    def _reach(self, place: str) -> None:
        rehearsing = False
        if not PLAIN:
            engine = importlib.import_module("flashrec.session").current_engine()
            rehearsing = engine is not None and engine.rehearsing
        cues.reach(f"rehearsal {place}" if rehearsing else place, self.index)

    def run(self) -> None:
        corpus = text.load_corpus(CORPUS_BYTES)
        optimizer = self.training.optimizer
        for step in flashrec.steps(demo.loader_factory(self.options, corpus), total=self.options.steps):
            self.index = step.index
            with step:
                if self._is_paced:
                    pace.keep(self.out, step.index)
                inputs, targets = step.batch
                loss = self.training.forward_backward(inputs, targets)
                self.training.clip_gradients(1.0)
                optimizer.step()
                self.scheduler.step()
                optimizer.zero_grad()
                self._reach("tail")
            if step.committed:
                self.committed(step.index, "none" if loss is None else loss.item().hex())

    def committed(self, index: int, loss: str) -> None:
        rank = flashrec.rank()
        with open(self.out / f"commits.r{rank}", "a") as file:
            file.write(f"{index} {time.monotonic_ns()}\n")
        with open(self.out / f"losses.r{rank}", "a") as file:
            file.write(f"{index} {loss}\n")
        self._reach("between")

    def outcome(self) -> dict[str, str]:
        named = outcome.named_tensors(self.training.plain, self.training.optimizer)
        found = {name: outcome.tensor_digest(tensor) for name, tensor in named}
        found["random"] = outcome.tensor_digest(torch.get_rng_state())
        found["scheduler"] = str(self.scheduler.get_last_lr())
        return found


def main() -> None:
    recipe, out = Recipe.read(Path(sys.argv[1])), Path(sys.argv[2])
    if not PLAIN:
        importlib.import_module("chaos.probes").install()
    cues.reach("start", None)
    flashrec.init(standby=recipe.standby)
    run = Run(recipe, out)
    cues.reach("build", None)
    flashrec.protect(
        model=run.training.model,
        optimizer=run.training.optimizer,
        scheduler=run.scheduler,
        replicated_over=run.training.replicated_over,
        survive=recipe.survive,
        seal_every=recipe.seal_every,
    )
    run.watch_optimizer()
    cues.reach("protected", None)
    run.run()
    (out / f"outcome.r{flashrec.rank()}.json").write_text(json.dumps(run.outcome()))
    cues.reach("end", None)


if __name__ == "__main__":
    main()
