"""What the chaos script trains, and how: every trait a script may have that a recovery must cope with."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Frozen and plain, so that equal recipes share one reference run."""

    steps: int = 12
    standby: str = "built"
    """As in flashrec.init()."""
    model: str = "mlp"
    """"mlp"; "deep" (many small layers); "norm" (BatchNorm, whose buffers differ by rank)."""
    bucket_mb: float = 25.0
    """DDP's bucket_cap_mb; small values make many buckets."""
    bucket_view: bool = False
    """DDP's gradient_as_bucket_view."""
    find_unused: bool = False
    static_graph: bool = False
    optimizer: str = "adamw"
    """"adamw", "sgd" (momentum), "closure" (step(closure)), "two" (one each for two halves of the model)."""
    loop: str = "steps"
    """"steps", "own" (while current_step()), "decorated"."""
    micro: int = 1
    no_sync: bool = True
    """Gradients are reduced with the last micro-batch only."""
    workers: int = 0
    """Processes of the data loader."""
    loader: str = "callable"
    """"callable" (rank, world) -> loader, or "iterable": made before the first step (standby "forked" only)."""
    extras: tuple[str, ...] = ()
    """Of "scheduler", "ema", "averaged" (torch's AveragedModel, itself a module), "scaler"."""
    zero_grad: str = "end"
    """"end", "start" (of the body), "keep" (set_to_none=False, at the end), "never" (gradients add up)."""
    section_every: int = 0
    """A section with collectives before every so many steps; 0: never."""
    prelude: bool = False
    """Rank 0 draws a seed and broadcasts it before protect()."""
    objects: bool = False
    """Object collectives in the body."""
    swallow: bool = False
    """The body catches every Exception."""
    parallel: str = ""
    """One of the demo's parallelisms: then its model is trained (`scripts/parallel.py`), and of what is above only
    `steps` and `standby` count."""
    schedule: str = "1f1b"
    """Of a pipeline."""
    sizes: tuple[str, ...] = ()
    """What is peculiar about the demo's model, of "mixed_precision", "frozen", "uneven", "tied", "moe"."""
    survive: str = "ranks"
    """As in flashrec.protect()."""
    seal_every: int | None = None
    """As in flashrec.protect(). Without a number it follows from times how much is done again when all have died."""
    paced: bool = False
    """Ranks do not run far ahead of what strikes them (`chaos.pace`)."""

    @property
    def redone_at_most(self) -> int:
        """How many committed steps a recovery may do again."""
        if self.parallel != "ddp" or self.survive != "ranks":
            return 1
        # After a recovery the ranks agree first on when the next full version is due, which takes them a step.
        return self.seal_every + 1 if self.seal_every else 0

    @property
    def script(self) -> Path:
        return SCRIPTS / ("parallel.py" if self.parallel else "train.py")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "Recipe":
        given: dict[str, Any] = json.loads(path.read_text())
        unknown = given.keys() - {field.name for field in fields(Recipe)}
        if unknown:
            raise ValueError(f"a recipe has no {', '.join(sorted(unknown))}")
        return Recipe(**{**given, "extras": tuple(given["extras"]), "sizes": tuple(given["sizes"])})
