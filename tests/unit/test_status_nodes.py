"""What `flashrec status` says of a job on several nodes, as a person reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from flashrec.cli.status import ranks, render_nodes
from flashrecd.core.state import Status
from flashrecd.status import _replicas


def node(name: str, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": name,
        "domain": "",
        "life": "live",
        "spare": False,
        "unheard": "",
        "ranks": [],
    }
    return made | {"keeps": [], "shard_address": ""} | changes


def job(**changes: Any) -> dict[str, Any]:
    nodes = [
        node("a", ranks=[0, 1], keeps=[2, 3]),
        node("b", domain="rack-7", life="lost", unheard="its connection is closed", ranks=[9]),
        node("c", ranks=[2, 3], keeps=[0, 1], unheard="no word for 4 s"),
        node("d", spare=True),
    ]
    replicas = {"wanted": 1, "too_few": "", "losses": 1, "being_made": []}
    return {"nodes": nodes, "links": [], "replicas": replicas, "waits_for": ""} | changes


def shown(document: dict[str, Any]) -> list[str]:
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(render_nodes(document))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_each_node_has_a_row() -> None:
    lines = shown(job())
    assert lines[0].startswith(
        "1 copy on other nodes of what each rank seals; any one of the nodes may be lost"
    )
    rows = {line.split()[0]: line for line in lines if line}
    assert rows["a"].split()[1:] == ["a", "live", "0-1", "2-3"]
    assert rows["b"].split()[1:] == ["rack-7", "lost", "-", "-"]
    assert "silent: no word for 4 s" in rows["c"]
    assert rows["d"].split()[1:] == ["d", "live,", "spare", "-", "-"]


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        ({"wanted": 2, "losses": 2}, "2 copies on other nodes of what each rank seals; any 2 of the nodes"),
        ({"wanted": 0, "losses": 0}, "no node may be lost"),
        ({"losses": 0, "being_made": [0, 1, 2, 5]}, "being made now for ranks 0-2, 5: no node may be lost"),
        ({"too_few": "only one failure domain is left"}, "only one failure domain is left"),
    ],
)
def test_it_says_what_may_be_lost(replicas: dict[str, Any], words: str) -> None:
    assert words in "\n".join(shown(job(replicas=job()["replicas"] | replicas)))


def test_it_says_how_fast_the_nodes_reach_each_other() -> None:
    links = [{"data_bytes_per_s": rate} for rate in (2.5e9, 1e8, None)]
    assert "between nodes: 100 to 2500 MB/s when the job began" in shown(job(links=links))


def test_ranks_are_written_as_people_write_them() -> None:
    assert ranks([5, 1, 2, 3, 7, 8]) == "1-3, 5, 7-8"
    assert ranks([]) == "-"


@pytest.mark.parametrize(
    ("tags", "losses"),
    [
        ([(3, 8), (3, 8)], 1),
        ([(3, 8), (3, 7)], 0),  # its vote has not passed: keepers may lack what it holds
        ([(2, 8), (3, 8)], 0),  # of the generation before
        ([None, (3, 8)], 0),
    ],
)
def test_no_loss_is_stood_before_a_vote_of_the_generation(
    tags: list[tuple[int, int] | None], losses: int
) -> None:
    """Also where nobody had failed, and all have parked for a keeper that has come."""
    found = [None if one is None else SimpleNamespace(generation=one[0], committed=one[1]) for one in tags]
    members = [SimpleNamespace(keepers=(1,)), SimpleNamespace(keepers=(0,))]
    state = SimpleNamespace(status=Status.RUNNING, generation=3, version=7, too_few="", members=members)
    core = SimpleNamespace(state=state, config=SimpleNamespace(replicas=1))
    told_of = SimpleNamespace(core=core, recoveries=SimpleNamespace(open=None), tag=lambda rank: found[rank])
    told = _replicas(cast(Any, told_of))
    assert (told["losses"], told["being_made"]) == (losses, [] if losses else [0, 1])
