"""The faults' own tests: a fault that did not happen, and a bit that differs, are objected to."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos import scenario
from chaos.cues import ENV_FOLDER, ChaosError, Cue, Cues, fired_path, let_go, write_cues
from chaos.faults.base import Evidence, Fault
from chaos.faults.corrupt_export import CorruptExport
from chaos.faults.corrupt_replica import CorruptReplica
from chaos.faults.cut_link import CutLink
from chaos.faults.exit_early import ExitEarly
from chaos.faults.hang import Hang
from chaos.faults.hard_exit import HardExit
from chaos.faults.kill_at_place import KillAtPlace
from chaos.faults.kill_at_random import KillAtRandom
from chaos.faults.kill_in_recovery import KillInRecovery
from chaos.faults.kill_member_daemon import KillMemberDaemon
from chaos.faults.kill_standby import KillStandby
from chaos.faults.kill_together import KillTogether
from chaos.faults.kill_with import KillWith
from chaos.faults.lose_node import LoseNode
from chaos.faults.lose_nodes_in_turn import LoseNodesInTurn
from chaos.faults.raise_error import RaiseError
from chaos.faults.stop import Stop
from chaos.recipe import Recipe
from chaos.redone import given_up_steps, redone_steps
from chaos.soak import Growth, Reading
from flashrec.cli.demo.nodes.corrupt import Corrupted
from flashrec.cli.demo.nodes.node import Loss

FAULTS: list[Fault] = [
    CorruptExport(1, 3),
    CorruptReplica(1, "forward", 3),
    CutLink(1, "forward", 3, 1.0),
    CutLink(1, "forward", 3, None),
    ExitEarly(1, "forward", 3),
    Hang(1, "forward", 3),
    HardExit(1, "forward", 3),
    KillAtPlace(1, "forward", 3),
    KillAtRandom(1, 3, seed=0),
    KillInRecovery(1, "forward", 3, 0, "serve"),
    KillMemberDaemon(1, "forward", 3),
    KillStandby(3),
    KillTogether((0, 1), "forward", 3),
    KillWith(1, "forward", 3, (0,)),
    LoseNode(1, "forward", 3),
    LoseNodesInTurn(1, "forward", 3, "pull"),
    RaiseError(1, "forward", 3),
    Stop(1, "forward", 3),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_fault_that_did_not_happen_is_missed(fault: Fault) -> None:
    fired = frozenset(cue.name for cue in fault.cues())
    assert fault.missing(Evidence((), (), frozenset()))
    assert fault.missing(Evidence((), (), fired))
    elsewhere = {"rank": 2, "kind": "SIGKILL", "place": "forward", "step": 3}
    assert fault.missing(Evidence((elsewhere,), (), fired))


def test_a_kill_counts_only_in_its_place_and_step() -> None:
    fault = KillAtPlace(1, "backward", 3)
    fired = frozenset({fault.name})
    death = {"rank": 1, "kind": "SIGKILL", "place": "backward", "step": 3}
    assert fault.missing(Evidence((death,), (), fired)) is None
    for wrong in ({"place": "forward"}, {"step": 4}, {"rank": 0}, {"kind": "exit 1"}):
        assert fault.missing(Evidence(({**death, **wrong},), (), fired))
    between = KillAtPlace(1, "between", 3)
    after = {**death, "place": "between", "step": 4}  # the tag shows the version that is held
    assert between.missing(Evidence((after,), (), frozenset({between.name}))) is None


def ranks_cues(folder: Path, *given: Cue) -> Cues:
    write_cues(folder, list(given))
    return Cues(folder)


def test_a_lost_node_counts_only_with_its_memory_its_ranks_and_in_its_place() -> None:
    def words(*deaths: int, **changes: Any) -> str | None:
        fault = LoseNode(1, "backward", 3)
        fault.loss, fault.ranks, fault.was_at = (
            Loss(signal_ns=1, died_ns=2, pids=(7,), files=4),
            [0, 1],
            ("backward", 3),
        )
        for name, value in changes.items():
            setattr(fault, name, value)
        record = tuple({"rank": rank, "kind": "node lost"} for rank in deaths)
        return fault.missing(Evidence(record, (), frozenset({fault.name})))

    assert words(0, 1) is None
    assert "rank 0 being lost" in str(words(1))
    assert "was in ('gate', 3)" in str(words(0, 1, was_at=("gate", 3)))
    assert "no memory" in str(words(0, 1, loss=Loss(signal_ns=1, died_ns=2, pids=(7,), files=0)))


def test_a_corrupt_replica_must_be_noticed() -> None:
    fault = CorruptReplica(1, "vote", 3)
    fault._loss.loss, fault._loss.ranks = Loss(signal_ns=1, died_ns=2, pids=(7,), files=4), [1]
    fault._loss.was_at = ("gate", 3)
    fault.corrupted = [Corrupted(what="sealed", rank=1, version=3, path="replica/r1.0", offset=9)]
    record, fired = ({"rank": 1, "kind": "node lost"},), frozenset({fault.name})
    sealed = {"event": "sealed regime", "reason": "'w' is held by rank 1 alone"}
    noticed = (sealed, {"event": "source refused", "reason": "bytes 0 to 9 do not match their checksum"})
    assert "was corrupted" in str(fault.missing(Evidence(record, noticed, fired)))
    fault.is_damaged = True
    assert fault.missing(Evidence(record, noticed, fired)) is None
    assert "nobody noticed" in str(fault.missing(Evidence(record, (sealed,), fired)))
    assert fault.missing(Evidence(record, (), fired)) is None  # nobody had to read it


def test_a_cue_is_met_once_by_its_rank_in_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cues = ranks_cues(tmp_path, Cue(name="a", rank=1, place="forward", step=3, act="raise"))
    monkeypatch.setenv("RANK", "0")
    cues.reach("forward", 3)
    monkeypatch.setenv("RANK", "1")
    cues.reach("forward", 2)
    cues.reach("backward", 3)
    assert not fired_path(tmp_path, "a").exists()
    with pytest.raises(ChaosError, match="by cue a"):
        cues.reach("forward", 3)
    assert fired_path(tmp_path, "a").exists()
    cues.reach("forward", 3)
    Cues(tmp_path).reach("forward", 3)  # nor by the process that takes the rank


def test_a_standby_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    cues = ranks_cues(
        tmp_path,
        Cue(name="a", rank=0, place="build", act="raise"),
        Cue(name="b", rank=-1, place="build", act="raise"),
    )
    with pytest.raises(ChaosError, match="by cue b"):
        cues.reach("build", None)


def test_cues_in_order_and_several_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    cues = ranks_cues(
        tmp_path,
        Cue(name="late", rank=1, place="tail", act="raise", after=("early",)),
        Cue(name="early", rank=1, place="forward", act="raise", times=2),
    )
    cues.reach("tail", 0)
    for _ in range(2):
        with pytest.raises(ChaosError, match="early"):
            cues.reach("forward", 1)
    cues.reach("forward", 1)
    with pytest.raises(ChaosError, match="late"):
        cues.reach("tail", 1)


def test_other_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    cues = ranks_cues(
        tmp_path,
        Cue(name="end", rank=1, place="tail", act="exit", code=3),
        Cue(name="die", rank=1, place="end", act="hard_exit", code=4),
    )
    with pytest.raises(SystemExit) as ended:
        cues.reach("tail", 1)
    assert ended.value.code == 3
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    cues.reach("end", 1)
    assert codes == [4]


def test_nobody_holds_nobody_is_let_go(tmp_path: Path) -> None:
    write_cues(tmp_path, [Cue(name="a", rank=0, place="tail")])
    with pytest.raises(OSError, match="No such device"):
        let_go(tmp_path, "a")


def test_without_a_folder_there_are_no_cues() -> None:
    assert ENV_FOLDER not in os.environ
    Cues(None).reach("forward", 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cue(name="", rank=0, place="tail"),
        lambda: Cue(name="a", rank=0, place="tail", act="explode"),
        lambda: Cue(name="a", rank=0, place="tail", times=0),
    ],
)
def test_a_cue_is_checked(make: Callable[[], Cue]) -> None:
    with pytest.raises(ValueError, match="a cue"):
        make()


def test_an_unknown_trait_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    recipe = Recipe(steps=3, extras=("ema",))
    recipe.write(path)
    assert Recipe.read(path) == recipe
    path.write_text(json.dumps({"stepz": 3}))
    with pytest.raises(ValueError, match="no stepz"):
        Recipe.read(path)


def outcome(folder: Path, digests: dict[str, str], losses: str) -> Path:
    folder.mkdir()
    (folder / "outcome.r0.json").write_text(json.dumps(digests))
    (folder / "losses.r0").write_text(losses)
    return folder


def test_what_differs_from_the_reference_is_named(tmp_path: Path) -> None:
    told: Any = scenario._differences
    wanted = outcome(tmp_path / "wanted", {"model": "a", "random": "b"}, "0 0x1p0\n1 0x1p1\n2 0x1p2\n")
    same = outcome(tmp_path / "same", {"model": "a", "random": "b"}, "0 0x1p0\n2 0x1p2\n")
    assert told(same, wanted, 0, 3) == []
    other = outcome(tmp_path / "other", {"model": "a", "random": "c"}, "0 0x1p0\n1 0x1p1\n1 0x1p3\n2 0x1p2\n")
    assert told(other, wanted, 0, 3) == [
        "rank 0: random differs",
        f"rank 0: the loss of step 1 is { {'0x1p1', '0x1p3'} }, not { {'0x1p1'} }",
    ]
    (same / "outcome.r0.json").unlink()
    assert told(same, wanted, 0, 3) == ["rank 0 left no outcome"]


def test_growth_is_told() -> None:
    flat = [Reading(10_000, 5, 20)] * 40
    growth = Growth()
    growth.readings = {"daemon": flat, "rank 0": flat}
    growth.num_files = [7] * 40
    nothing = Evidence((), (), frozenset())
    assert growth.missing(nothing) is None
    growth.readings["rank 0"] = [Reading(10_000 + 500 * n, 5 + n // 5, 20 + n) for n in range(40)]
    growth.num_files = list(range(40))
    said = growth.missing(nothing) or ""
    for words in (
        "rank 0: memory grew",
        "rank 0: num_threads grew",
        "num_descriptors grew",
        "files in shared",
    ):
        assert words in said


def test_what_a_recovery_gives_up_is_counted_from_the_newest_commit_before_its_plan(tmp_path: Path) -> None:
    recovery = {"version": 4, "marks": {"planned": 100}}
    for newest, given_up in ((3, 0), (4, 1), (5, 2)):
        commits = {0: [(2, 10), (newest, 50)], 1: [(3, 60), (9, 200)]}
        assert redone_steps(recovery, commits) == given_up
    # Step 5 was given up by an earlier recovery, and step 4 committed again: nothing is lost now.
    assert redone_steps({"version": 5, "marks": {"planned": 100}}, {0: [(5, 10), (4, 50)], 1: []}) == 0
    restarted = {"version": None, "marks": {}, "began_ns": 100}
    assert redone_steps(restarted, {0: [(0, 10), (0, 200)], 1: []}) == 1
    for rank, lines in enumerate(("3 10\n4 20\n", "3 11\n")):
        (tmp_path / f"commits.r{rank}").write_text(lines)
    assert given_up_steps([recovery], tmp_path, world_size=2, bound=1) == []
    assert given_up_steps([recovery], tmp_path, world_size=2, bound=0) == [
        "the recovery to version 4 gave up 1 committed steps, not 0 at most"
    ]


def test_ranks_killed_with_another_may_be_a_step_apart_and_must_be_dead() -> None:
    fault = KillWith(1, "backward", 3, (0,))
    fired = frozenset({fault.name})
    struck = {"rank": 1, "kind": "SIGKILL", "place": "forward", "step": 3}
    near = {"rank": 0, "kind": "SIGKILL", "place": "tail", "step": 2}
    assert fault.missing(Evidence((struck, near), (), fired)) is None
    assert fault.missing(Evidence((struck,), (), fired))
    assert fault.missing(Evidence((struck, {**near, "step": 1}), (), fired))
    assert fault.missing(Evidence(({**struck, "place": "tail"}, near), (), fired))
