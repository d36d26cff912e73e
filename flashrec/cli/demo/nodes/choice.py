"""The demo on several nodes that is meant by a command line's options. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from flashrec.cli.demo.nodes.hosts import why_no_namespaces
from flashrec.cli.demo.nodes.schedule import FIRST_STEP, SLOT_STEPS
from flashrec.cli.demo.schedule import QUIET_STEPS
from flashrec.cli.demo.settings import NODE_FAULTS, PAIRS_OF_PAIRS, Settings
from flashrec.errors import UsageError

NUM_FAULTS = {"node-during-recovery": 1, "daemon": 1}
DEFAULT_FAULTS = 2
TWO_AT_ONCE = "node-during-recovery"


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """None: not given."""

    nodes: int | None = None
    spare_nodes: int | None = None
    replicas: int | None = None
    namespaces: bool = False

    @property
    def given(self) -> bool:
        return self.namespaces or (self.nodes, self.spare_nodes, self.replicas) != (None, None, None)


def choose_nodes(
    options: NodeOptions,
    *,
    steps: int | None,
    ranks: int | None,
    num_faults: int | None,
    seed: int,
    standby: str | None,
    parallel: str | None,
    fault: str | None,
) -> Settings:
    """UsageError for what does not go together, or cannot be done by this user on this machine."""
    parallel, fault = parallel or "ddp", fault or "node"
    if fault not in NODE_FAULTS:
        raise UsageError(f"--fault {fault} is shown on one node: leave --nodes out")
    nodes = options.nodes if options.nodes is not None else 2
    if nodes < 2 or PAIRS_OF_PAIRS % nodes:
        raise UsageError(
            f"--nodes {nodes}: the {PAIRS_OF_PAIRS} ranks are on 2 nodes or on 4, alike; the first is the leader's, "
            "whose loss is not survived yet and not shown"
        )
    if ranks not in (None, PAIRS_OF_PAIRS):
        raise UsageError(f"--nodes goes with {PAIRS_OF_PAIRS} ranks, not with {ranks}: leave --ranks out")
    if standby == "built" and parallel != "ddp":
        raise UsageError(f"--standby built does not go with --parallel {parallel}: take --standby forked")
    spare_nodes = options.spare_nodes if options.spare_nodes is not None else 1 + (fault == TWO_AT_ONCE)
    replicas = options.replicas if options.replicas is not None else 1
    if options.replicas is None and fault in (TWO_AT_ONCE, "replica-corrupt"):
        replicas = 2
    _check(fault, nodes + spare_nodes, spare_nodes, replicas)
    namespaces = options.namespaces or fault == "link"
    if namespaces and (why := why_no_namespaces()):
        option = "--fault link cuts a node's link, which takes a network namespace for each node"
        raise UsageError(f"{'--namespaces' if options.namespaces else option}: {why}")
    number = NUM_FAULTS.get(fault, DEFAULT_FAULTS) if num_faults is None else num_faults
    return Settings(
        steps=FIRST_STEP + 2 * SLOT_STEPS * max(number, 1) + QUIET_STEPS if steps is None else steps,
        ranks=PAIRS_OF_PAIRS,
        num_faults=number,
        seed=seed,
        standby=standby or ("built" if parallel == "ddp" else "forked"),
        parallel=parallel,
        fault=fault,
        brief=True,
        nodes=nodes,
        spare_nodes=spare_nodes,
        replicas=replicas,
        namespaces=namespaces,
    )


def _check(fault: str, all_nodes: int, spare_nodes: int, replicas: int) -> None:
    if spare_nodes < 0 or replicas < 0:
        raise UsageError("there cannot be fewer than no spare nodes or replicas")
    needed = {"rank": 0, "link": 0, TWO_AT_ONCE: 2}.get(fault, 1)
    if spare_nodes < needed:
        raise UsageError(
            f"--fault {fault} loses {max(needed, 1)} of the nodes at a time, and their ranks need room: take "
            f"--spare-nodes {needed}"
        )
    if fault == TWO_AT_ONCE and replicas < 2:
        raise UsageError(
            f"--fault {fault} with --replicas {replicas}: a shard's home and the only other node that has it may both "
            "be lost. Take --replicas 2"
        )
    if fault == "replica-corrupt" and replicas == 1:
        raise UsageError(
            f"--fault {fault} with --replicas 1: the corrupt one is the only one, and the version before it is of use "
            "only while no rank has gone on. Take --replicas 2"
        )
    if not replicas and fault != "rank":
        raise UsageError(f"--fault {fault} with --replicas 0: what a lost node had is nowhere else")
    if replicas >= all_nodes:
        raise UsageError(f"{replicas} replicas need {replicas + 1} nodes, and there are {all_nodes}")
