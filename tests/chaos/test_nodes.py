"""Whole nodes are lost, memory and all: what they sealed comes from where it is kept, and no bit differs.

`python -m chaos.matrix --nodes` has every fault, in every place, for every kind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.faults.corrupt_replica import CorruptReplica
from chaos.faults.cut_link import CutLink
from chaos.faults.kill_at_place import KillAtPlace
from chaos.faults.lose_node import LoseNode
from chaos.faults.lose_nodes_in_turn import LoseNodesInTurn
from chaos.job import ROOT
from chaos.nodes import LIVE, SHORT_CUT_S, scenario
from chaos.parallel import KINDS
from chaos.scenario import Outcome
from flashrec.cli.client import Client, ask_status
from flashrec.cli.demo.nodes.hosts import why_no_namespaces
from flashrec.cli.demo.nodes.node import descendants_of
from tests.leaks import wait_until


def homes(outcome: Outcome) -> list[str]:
    """The node of each rank at the end."""
    return [rank["node"] for rank in outcome.job.final_status["ranks"]]


def test_a_lost_nodes_shards_come_from_replicas(play) -> None:  # type: ignore[no-untyped-def]
    """Every parameter of its ranks is nowhere else; and a rank of the leader's node dies before."""
    outcome = play(scenario(KINDS["fsdp"], [KillAtPlace(0, "tail", 2), LoseNode(2, "apply", 5)]))
    assert homes(outcome) == ["node1", "node1", "node3", "node3"]
    assert outcome.job.final_status["regime"] == "sealed"


def test_a_lost_nodes_ranks_are_replaced_elsewhere_in_the_live_regime(play) -> None:  # type: ignore[no-untyped-def]
    outcome = play(scenario(LIVE, [LoseNode(3, "backward", 3)]))
    assert homes(outcome) == ["node1", "node1", "node3", "node3"]
    assert outcome.job.final_status["regime"] == "live"


def test_the_node_that_takes_over_is_lost_in_turn(play) -> None:  # type: ignore[no-untyped-def]
    faults = [LoseNodesInTurn(2, "vote", 3, "pull")]
    outcome = play(scenario(KINDS["fsdp"], faults, spare_nodes=2, replicas=2))
    assert homes(outcome)[:2] == ["node1", "node1"]
    lost = {name for name, _ in faults[0].lost}
    assert lost.isdisjoint(homes(outcome)) or outcome.job.happened("node joined")


@pytest.mark.parametrize("replicas", [2, 1])
def test_a_corrupt_replica_is_never_used(replicas: int, play) -> None:  # type: ignore[no-untyped-def]
    """Another node keeps the same; or else all go back to the version before it, which nobody has written over yet."""
    fault = CorruptReplica(2, "forward", 4)
    outcome = play(scenario(KINDS["fsdp"], [fault], replicas=replicas))
    assert ("sealed", 4) in [(one.what, one.version) for one in fault.corrupted]
    assert outcome.job.final_status["recoveries"][-1]["version"] == (4 if replicas == 2 else 3)
    assert homes(outcome)[2:] == ["node3", "node3"]


def test_a_node_with_a_network_and_memory_of_its_own(play) -> None:  # type: ignore[no-untyped-def]
    """Its link breaks for a while, and then it is lost."""
    if why := why_no_namespaces():
        pytest.skip(why)
    faults = [CutLink(2, "forward", 2, SHORT_CUT_S), LoseNode(2, "vote", 6)]
    outcome = play(scenario(KINDS["fsdp"], faults, namespaces=True))
    assert homes(outcome)[2:] == ["node3", "node3"]


DEMO = [
    sys.executable,
    "-c",
    "from flashrec.cli import main; main()",
    "demo",
    "--parallel",
    "fsdp",
    "--nodes",
    "2",
]
NUMBERS = {"ended": signal.SIGTERM, "killed": signal.SIGKILL}


@pytest.mark.parametrize("how", NUMBERS)
@pytest.mark.parametrize("where", ["loopback", "namespaces"])
def test_a_demo_that_is_ended_in_the_middle_leaves_nothing(how: str, where: str, folder: Path) -> None:
    if where == "namespaces" and (why := why_no_namespaces()):
        pytest.skip(why)
    command = [*DEMO, "--steps", "400", *(["--namespaces"] if where == "namespaces" else [])]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'daemon'}", "TMPDIR": str(folder)}
    with (
        open(folder / "said", "wb") as said,
        subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said) as demo,
    ):
        try:
            assert wait_until(lambda: "step 10 of" in (folder / "said").read_text(), 90)
            pids = descendants_of(demo.pid)
            (leader,) = folder.glob("flashrec-*/node1")
            with Client(leader) as client:
                name = ask_status(client)["job"]["job"]
            demo.send_signal(NUMBERS[how])
            demo.wait(40)
        finally:
            demo.kill()
    assert len(pids) > 10
    assert wait_until(lambda: not any(map(_lives, pids)), 20), [pid for pid in pids if _lives(pid)]
    assert not list(Path("/dev/shm").glob(f"*-{name}-*"))
    # Where the demo could not, the daemons take their directories away.
    assert [
        path.name for path in folder.glob("flashrec-*") if not path.name.startswith("flashrec-demo-")
    ] == []
    assert how == "killed" or not list(folder.glob("flashrec-demo-*"))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
