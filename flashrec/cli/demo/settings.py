"""The options of one demo, and the two programs it runs."""

from dataclasses import dataclass
from pathlib import Path

import flashrec
from flashrec.errors import UsageError

PROGRAMS = Path(flashrec.__file__).parent / "demo"
PARALLEL = {
    "ddp": "every rank has all of the model, and its own batch",
    "zero": "every rank has the model, its own batch, and a part of the optimizer's state",
    "fsdp": "every rank has a part of each parameter, and its own batch",
    "hsdp": "each half of the ranks is one fsdp, with the same parts in both",
    "tp": "every rank has some heads and some of each feed-forward layer; one batch",
    "pp": "every rank has some of the blocks; one batch, micro-batch by micro-batch",
    "tp+fsdp": "neighbours are tensor-parallel, and fsdp goes across the pairs",
    "pp+fsdp": "neighbours are a pipeline, and fsdp goes across the pairs",
}
FAULTS = {
    "rank": "one rank, in every phase of a step",
    "two-ranks": "two ranks at once",
    "all-ranks": "all ranks at once",
    "daemon": "the daemon, then single ranks",
}
NODE_FAULTS = {
    "node": "a node: its memory, then its daemon and all of its processes",
    "rank": "one rank, on a member's node and on the leader's in turn",
    "daemon": "a member's daemon, while its ranks live",
    "link": "nobody: a node's link is cut, and healed",
    "replica-corrupt": "a node, when a replica of its ranks is corrupt",
    "node-during-recovery": "a node, and in the recovery the one that its ranks go to",
}
"""With --nodes."""
PAIRS_OF_PAIRS = 4
VOCAB_SIZE = 96  # of flashrec/demo/text.py


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model (see flashrec/demo/recipe.py) and of an epoch, in steps."""

    width: int
    layers: int
    context: int
    workers: int
    epoch_steps: int

    def arguments(self) -> tuple[str, ...]:
        names = ("width", "layers", "context", "workers", "epoch_steps")
        return tuple(
            word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(self, name)))
        )

    def num_parameters(self, *, tied: bool) -> int:
        block = 12 * self.width**2 + 13 * self.width
        embedding = VOCAB_SIZE * self.width
        return (1 if tied else 2) * embedding + (self.context + 2) * self.width + self.layers * block


# Epochs are short, so that ranks are lost in several of them.
WHOLE = Sizes(width=192, layers=6, context=64, workers=1, epoch_steps=30)
BRIEF = Sizes(width=64, layers=4, context=32, workers=0, epoch_steps=15)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `flashrec demo` was asked for."""

    steps: int
    ranks: int
    num_faults: int
    seed: int
    standby: str
    """How far the standby goes on its own: built, forked, or none is kept."""
    parallel: str = "ddp"
    fault: str = "rank"
    brief: bool = False
    """One parallelism and one kind of fault on a small model, rather than all about DDP."""
    nodes: int = 0
    """Nodes that have ranks, each with a daemon of its own; 0: one daemon, and nothing between nodes."""
    spare_nodes: int = 0
    replicas: int = 0
    namespaces: bool = False
    """Every node in a network namespace, with a /dev/shm of its own."""
    suspect_after_s: float = 3.0

    @property
    def sizes(self) -> Sizes:
        return BRIEF if self.brief else WHOLE

    @property
    def model(self) -> str:
        """What is trained, in words."""
        number = self.sizes.num_parameters(tied=not self.parallel.startswith("pp"))
        return (
            f"a GPT with {number / 1e6:.1f} million parameters"
            if number >= 1e6
            else f"a GPT with {number // 1000} thousand parameters"
        )

    @property
    def ranks_with_loss(self) -> frozenset[int]:
        """Of a pipeline the last stage alone has it."""
        stages = {"pp": self.ranks, "pp+fsdp": 2}.get(self.parallel, 1)
        return frozenset(rank for rank in range(self.ranks) if rank % stages == stages - 1)

    def arguments(self, out: Path) -> tuple[str, ...]:
        """The options that both programs are run with."""
        return (
            "--parallel",
            self.parallel,
            "--steps",
            str(self.steps),
            "--seed",
            str(self.seed),
            *self.sizes.arguments(),
            "--out",
            str(out),
            "--quiet",
        )

    def training_arguments(self, out: Path) -> tuple[str, ...]:
        """Those of the run under flashrec."""
        depth = self.standby if self.standby != "none" else "forked"
        # Elsewhere every version is sealed anyway: no other rank has what a rank has.
        asked = self.fault == "all-ranks" and self.parallel == "ddp"
        survive = ("--survive", "all-ranks") if asked else ()
        return (*self.arguments(out), "--standby", depth, *survive)


def choose(
    *,
    steps: int | None,
    ranks: int | None,
    num_faults: int | None,
    seed: int,
    standby: str | None,
    parallel: str | None,
    fault: str | None,
) -> Settings:
    """The demo that is meant by these options; None: not given. UsageError for what does not go together."""
    if parallel is None and fault is None:
        return Settings(
            steps=80 if steps is None else steps,
            ranks=4 if ranks is None else ranks,
            num_faults=10 if num_faults is None else num_faults,
            seed=seed,
            standby=standby or "built",
        )
    parallel, fault = parallel or "ddp", fault or "rank"
    if fault not in FAULTS:
        raise UsageError(f"--fault {fault} is of several nodes: say --nodes 2")
    if ranks not in (None, PAIRS_OF_PAIRS):
        raise UsageError(
            f"--parallel and --fault are shown on {PAIRS_OF_PAIRS} ranks, of which some make pairs of pairs, "
            f"not on {ranks}: leave --ranks out"
        )
    if standby == "built" and parallel != "ddp":
        raise UsageError(
            f"--standby built does not go with --parallel {parallel}: there a rank's part of the model follows "
            "from its rank, which a standby does not know yet. Take --standby forked"
        )
    if standby == "built" and fault == "all-ranks":
        raise UsageError(
            "--standby built does not go with --fault all-ranks: no living rank is left whose buckets it could "
            "learn. Take --standby forked"
        )
    built = parallel == "ddp" and fault != "all-ranks"
    return Settings(
        steps=(240 if fault == "daemon" else 40) if steps is None else steps,
        ranks=PAIRS_OF_PAIRS,
        num_faults={"rank": 6, "two-ranks": 3}.get(fault, 2) if num_faults is None else num_faults,
        seed=seed,
        standby=standby or ("built" if built else "forked"),
        parallel=parallel,
        fault=fault,
        brief=True,
    )
