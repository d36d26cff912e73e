"""The script whose ranks are struck: small, fast, and with every trait its recipe asks for.

usage: train.py RECIPE OUT

Runs on flashrec, or with FLASHREC_CHAOS_PLAIN set on plain torch (`chaos.plain`). Each rank leaves its losses
in OUT/losses.rN as it goes, and digests of all it holds at the end in OUT/outcome.rN.json.
"""

import contextlib
import hashlib
import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from chaos.cues import cues
from chaos.recipe import Recipe

PLAIN = bool(os.environ.get("FLASHREC_CHAOS_PLAIN"))
flashrec: Any = importlib.import_module("chaos.plain" if PLAIN else "flashrec")

WIDTH, ROWS, BATCH = 16, 24, 4


def build_model(recipe: Recipe) -> nn.Module:
    if recipe.model == "deep":
        layers: list[nn.Module] = []
        for _ in range(6):
            layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
        return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    norm: nn.Module = nn.BatchNorm1d(2 * WIDTH) if recipe.model == "norm" else nn.GELU()
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), norm, nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))


def build_optimizers(recipe: Recipe, model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    if recipe.optimizer == "two":
        half = len(parameters) // 2
        return [
            torch.optim.SGD(parameters[:half], lr=0.05, momentum=0.9),
            torch.optim.Adam(parameters[half:]),
        ]
    if recipe.optimizer == "sgd":
        return [torch.optim.SGD(parameters, lr=0.05, momentum=0.9)]
    return [torch.optim.AdamW(parameters, lr=1e-3)]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Noise added in the loader's worker (or the rank), so that their random streams matter too."""

    def __init__(self, rank: int) -> None:
        self._rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 + rank))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randn(WIDTH) + random.random() + float(np.random.rand())
        return self._rows[index] + 0.1 * noise


def seed_worker(_: int) -> None:
    seed = torch.initial_seed() % 2**32
    random.seed(seed)
    np.random.seed(seed)


class Ema:
    """An average of the weights, changed after the optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for mine, parameter in zip(self.shadow, model.parameters(), strict=True):
            mine.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": [t.clone() for t in self.shadow]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip(self.shadow, state["shadow"], strict=True):
            mine.copy_(saved)


class Training:
    def __init__(self, recipe: Recipe, out: Path) -> None:
        self.recipe, self.out = recipe, out
        seed = torch.tensor([7 if not recipe.prelude else torch.seed() % 1000])
        if recipe.prelude:
            if PLAIN:
                # What the job under flashrec drew is in a file: the reference goes on from the same seed.
                seed.fill_(int((out.parent / "seed").read_text()))
            dist.broadcast(seed, 0)
            box = [int(seed) if int(os.environ.get("RANK", "0")) == 0 else None]
            dist.broadcast_object_list(box, 0)
            assert box == [int(seed)], f"rank 0 drew {int(seed)}, and says {box[0]}"
            if not PLAIN:
                with contextlib.suppress(FileExistsError), open(out.parent / "seed", "x") as file:
                    file.write(str(int(seed)))
        torch.manual_seed(int(seed))
        random.seed(int(seed))
        np.random.seed(int(seed))
        self.model = DistributedDataParallel(
            build_model(recipe),
            bucket_cap_mb=recipe.bucket_mb,
            gradient_as_bucket_view=recipe.bucket_view,
            find_unused_parameters=recipe.find_unused,
            static_graph=recipe.static_graph,
        )
        self.optimizers = build_optimizers(recipe, self.model)
        self.common: dict[str, Any] = {}
        if "scheduler" in recipe.extras:
            self.common["scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, gamma=0.9)
        if "ema" in recipe.extras:
            self.common["ema"] = Ema(self.model)
        if "averaged" in recipe.extras:
            self.common["averaged"] = AveragedModel(self.model.module)
        if "scaler" in recipe.extras:
            self.common["scaler"] = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        self.index = 0
        self.loss = torch.zeros(())
        self._hooks()

    def _hooks(self) -> None:
        first = next(self.model.parameters())  # its gradient is the last to be complete
        first.register_post_accumulate_grad_hook(lambda _: self._reach("backward"))

    def watch_optimizers(self) -> None:
        """After protect(): these hooks come after the gate."""
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._reach("apply"))

    def _reach(self, place: str) -> None:
        rehearsing = False
        if not PLAIN:
            engine = importlib.import_module("flashrec.session").current_engine()
            rehearsing = engine is not None and engine.rehearsing
        cues.reach(f"rehearsal {place}" if rehearsing else place, self.index)

    def data(self, rank: int, world_size: int) -> Any:
        torch.manual_seed(100 + rank)
        random.seed(200 + rank)
        np.random.seed(300 + rank)
        return torch.utils.data.DataLoader(
            Rows(rank),
            batch_size=BATCH,
            shuffle=True,
            num_workers=self.recipe.workers,
            worker_init_fn=seed_worker,
        )

    # --- one step ---------------------------------------------------------------------------------------

    def forward_backward(self, batch: torch.Tensor, scale: float) -> None:
        output = self.model(batch)
        self._reach("forward")
        loss = (output - batch).pow(2).mean() * scale
        self.loss = self.loss + loss.detach()
        scaler = self.common.get("scaler")
        (scaler.scale(loss) if scaler is not None else loss).backward()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.recipe.zero_grad != "keep")

    def body(self, batches: list[torch.Tensor]) -> None:
        if self.recipe.swallow:
            with contextlib.suppress(Exception):
                self._body(batches)
        else:
            self._body(batches)

    def _body(self, batches: list[torch.Tensor]) -> None:
        recipe = self.recipe
        self.loss = torch.zeros(())
        if recipe.zero_grad == "start":
            self.zero_grad()
        if recipe.objects:
            told: list[Any] = [None] * flashrec.world_size()
            dist.all_gather_object(told, {"rank": flashrec.rank(), "index": self.index})
            batches = [batch + 0.01 * told[-1]["index"] for batch in batches]
        if recipe.optimizer == "closure":

            def closure() -> torch.Tensor:
                self.forward_backward(batches[0], 1.0)
                return self.loss

            self.optimizers[0].step(closure)
        else:
            for number, batch in enumerate(batches):
                reduced = not recipe.no_sync or number == len(batches) - 1
                with contextlib.nullcontext() if reduced else self.model.no_sync():
                    self.forward_backward(batch, 1.0 / len(batches))
            for optimizer in self.optimizers:
                if "scaler" in self.common:
                    self.common["scaler"].step(optimizer)
                else:
                    optimizer.step()
        if "tail" in recipe.extras:
            self._average()
        if "scaler" in self.common:
            self.common["scaler"].update()
        if "scheduler" in self.common:
            self.common["scheduler"].step()
        if "ema" in self.common:
            self.common["ema"].update(self.model)
        if "averaged" in self.common:
            self.common["averaged"].update_parameters(self.model.module)
        if recipe.zero_grad in ("end", "keep"):
            self.zero_grad()
        self._reach("tail")

    def _average(self) -> None:
        """Communicates after the gate, and changes parameters by it: a rank that is cut off here is torn."""
        parameter = next(self.model.parameters())
        total = parameter.detach() * (flashrec.rank() + 1)
        dist.all_reduce(total)
        with torch.no_grad():
            parameter.add_(total, alpha=1e-3)

    def committed(self, index: int) -> None:
        with open(self.out / f"losses.r{flashrec.rank()}", "a") as file:
            file.write(f"{index} {float(self.loss).hex()}\n")
        self._reach("between")

    # --- the loops --------------------------------------------------------------------------------------

    def run(self) -> None:
        recipe = self.recipe
        data = self.data if recipe.loader == "callable" else self.data(flashrec.rank(), flashrec.world_size())
        if recipe.loop != "steps":
            self.run_own()
            return
        for step in flashrec.steps(data, total=recipe.steps, micro=recipe.micro):
            self.index = step.index
            with step:
                self.body(step.batches)
            if step.committed:
                self.committed(step.index)
                self.maybe_section(step.index)

    def run_own(self) -> None:
        """Batches made from the step's number: the loop itself has no position to restore."""

        @flashrec.step()
        def whole_step(index: int) -> int:
            self.index = index
            self.body([self.own_batch(index)])
            return index

        while (index := flashrec.current_step()) < self.recipe.steps:
            if self.recipe.loop == "decorated":
                whole_step(index)
                self.committed(index)
                continue
            with flashrec.step() as step:
                self.index = step.index
                self.body([self.own_batch(step.index)])
            if step.committed:
                self.committed(step.index)

    def own_batch(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10_000 * flashrec.rank() + index)
        return torch.randn(BATCH, WIDTH, generator=generator)

    def maybe_section(self, index: int) -> None:
        if not self.recipe.section_every or (index + 1) % self.recipe.section_every:
            return
        with flashrec.section() as section:
            total = torch.randn(3) if not PLAIN else torch.zeros(3)
            dist.all_reduce(total)
            self._reach("section")
            dist.all_reduce(total)
        with open(self.out / f"sections.r{flashrec.rank()}", "a") as file:
            file.write(f"{index} {section.valid}\n")

    # --- the outcome ------------------------------------------------------------------------------------

    def outcome(self) -> dict[str, str]:
        held: dict[str, Any] = {"model": self.model.state_dict()}
        for number, optimizer in enumerate(self.optimizers):
            held[f"optimizer.{number}"] = optimizer.state_dict()
        held |= {name: extra.state_dict() for name, extra in self.common.items()}
        held["grads"] = [parameter.grad for parameter in self.model.parameters()]
        held["random"] = [random.getstate(), str(np.random.get_state()), torch.get_rng_state()]
        return {name: digest(value) for name, value in held.items()}


def digest(value: Any) -> str:
    """Every tensor's bytes and every plain value below `value`."""
    hasher = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            hasher.update(f"{item.dtype}{tuple(item.shape)}".encode())
            hasher.update(item.detach().contiguous().numpy().tobytes())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                hasher.update(str(key).encode())
                add(item[key])
        elif isinstance(item, list | tuple):
            for one in item:
                add(one)
        else:
            hasher.update(repr(item).encode())

    add(value)
    return hasher.hexdigest()


def main() -> None:
    recipe, out = Recipe.read(Path(sys.argv[1])), Path(sys.argv[2])
    if not PLAIN:
        importlib.import_module("chaos.probes").install()
    cues.reach("start", None)
    flashrec.init(standby=recipe.standby)
    training = Training(recipe, out)
    cues.reach("build", None)
    optimizer = training.optimizers if len(training.optimizers) > 1 else training.optimizers[0]
    flashrec.protect(
        model=training.model, optimizer=optimizer, seal_every=recipe.seal_every, **training.common
    )
    training.watch_optimizers()
    cues.reach("protected", None)
    training.run()
    (out / f"outcome.r{flashrec.rank()}.json").write_text(json.dumps(training.outcome()))
    cues.reach("end", None)


if __name__ == "__main__":
    main()
