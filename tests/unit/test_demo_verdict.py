"""The demo's verdict and figures: one bit, one loss, one rank that is missing must show."""

import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import outcome
from flashrec.cli.demo import report
from flashrec.cli.demo.faults import FaultReport, join, unplanned
from flashrec.cli.demo.injector import Strike
from flashrec.cli.demo.schedule import Fault
from flashrec.cli.demo.settings import Settings
from flashrec.cli.demo.timing import StepLine, cost, read_logs, redone_steps, undisturbed
from flashrec.cli.demo.verdict import compare, compare_runs
from flashrec.cli.demo.view import rank_grid
from flashrec.protocol.phase import Phase
from flashrec.protocol.tag import Tag

STEPS = 3
MS = 1_000_000


def left_behind(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": 2,
        "corpus_sha256": "c0",
        "losses": [(1.5 + rank).hex(), (1.25).hex(), (0.75).hex()],
        "tensors": {"model.a": "d1", "model.b": "d2", "optimizer.a.exp_avg": "d3"},
        "step_ms": {},
    }


@pytest.fixture
def pairs() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(left_behind(rank), left_behind(rank)) for rank in range(2)]


def test_equal_runs_are_identical(pairs: Any) -> None:
    verdict = compare(pairs, steps=STEPS)
    assert verdict.identical
    assert verdict.first_difference is None
    assert (verdict.num_tensors, verdict.num_losses) == (6, 6)


def test_a_flipped_bit_of_a_loss_is_seen(pairs: Any) -> None:
    mantissa, exponent = pairs[1][0]["losses"][1].split("p")
    last = f"{int(mantissa[-1], 16) ^ 1:x}"
    pairs[1][0]["losses"][1] = f"{mantissa[:-1]}{last}p{exponent}"
    verdict = compare(pairs, steps=STEPS)
    assert (verdict.losses_identical, verdict.weights_identical, verdict.optimizer_identical) == (
        False,
        True,
        True,
    )
    assert verdict.first_difference is not None
    assert verdict.first_difference.startswith("rank 1, step 1: loss 1.25")


def test_a_flipped_bit_of_a_weight_is_seen(tmp_path: Path) -> None:
    """From real tensors to the verdict, through the files."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    history, log = outcome.LossHistory(), outcome.StepLog(tmp_path / "ours", 0)
    history.record(0, 1.0)
    log.close()

    def write(folder: str) -> None:
        outcome.write_outcome(
            tmp_path / folder,
            rank=0,
            world_size=1,
            corpus_sha256="c",
            model=model,
            optimizer=optimizer,
            history=history,
            log=log,
        )

    write("ours")
    write("reference")
    assert compare_runs(tmp_path / "ours", tmp_path / "reference", ranks=1, steps=1).identical
    with torch.no_grad():
        model.weight.view(torch.int32)[2, 3] ^= 1
    write("ours")
    verdict = compare_runs(tmp_path / "ours", tmp_path / "reference", ranks=1, steps=1)
    assert not verdict.weights_identical
    assert verdict.optimizer_identical
    assert verdict.first_difference == "rank 0: model.weight differs"
    with torch.no_grad():
        model.weight.view(torch.int32)[2, 3] ^= 1
        optimizer.state[model.bias]["exp_avg_sq"].view(torch.int32)[0] ^= 1
    write("ours")
    verdict = compare_runs(tmp_path / "ours", tmp_path / "reference", ranks=1, steps=1)
    assert verdict.weights_identical
    assert verdict.first_difference == "rank 0: optimizer.bias.exp_avg_sq differs"


def test_a_missing_loss_is_not_identical(pairs: Any) -> None:
    del pairs[0][0]["losses"][-1]
    verdict = compare(pairs, steps=STEPS)
    assert not verdict.losses_identical
    assert verdict.first_difference == "rank 0: this run has 2 losses for 3 steps"


def test_losses_missing_in_both_runs_are_not_identical(pairs: Any) -> None:
    for ours, reference in pairs:
        del ours["losses"][-1], reference["losses"][-1]
    assert not compare(pairs, steps=STEPS).losses_identical


@pytest.mark.parametrize("side", [0, 1])
def test_a_missing_tensor_is_not_identical(pairs: Any, side: int) -> None:
    del pairs[1][side]["tensors"]["optimizer.a.exp_avg"]
    verdict = compare(pairs, steps=STEPS)
    assert verdict.weights_identical
    assert not verdict.optimizer_identical


def test_no_tensors_at_all_are_not_identical(pairs: Any) -> None:
    for ours, reference in pairs:
        ours["tensors"], reference["tensors"] = {}, {}
    verdict = compare(pairs, steps=STEPS)
    assert not verdict.weights_identical
    assert not verdict.optimizer_identical


@pytest.mark.parametrize("key", ["rank", "world_size", "corpus_sha256"])
def test_another_training_proves_nothing(pairs: Any, key: str) -> None:
    pairs[1][0][key] = "other"
    verdict = compare(pairs, steps=STEPS)
    assert not any((verdict.weights_identical, verdict.optimizer_identical, verdict.losses_identical))
    assert verdict.first_difference is not None
    assert f"not the same training: {key}" in verdict.first_difference


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}"])
def test_an_outcome_that_cannot_be_read_is_not_identical(tmp_path: Path, text: str | None) -> None:
    for folder in ("ours", "reference"):
        (tmp_path / folder).mkdir()
        for rank in range(2):
            (tmp_path / folder / f"outcome.r{rank}.json").write_text(json.dumps(left_behind(rank)))
    assert compare_runs(tmp_path / "ours", tmp_path / "reference", ranks=2, steps=STEPS).identical
    path = tmp_path / "ours" / "outcome.r1.json"
    path.unlink() if text is None else path.write_text(text)
    verdict = compare_runs(tmp_path / "ours", tmp_path / "reference", ranks=2, steps=STEPS)
    assert not verdict.identical
    assert verdict.first_difference is not None
    assert "outcome.r1.json" in verdict.first_difference


# --- what became of the faults ------------------------------------------------------------------------

FAULTS = [
    Fault(index=0, rank=1, step=4, place="tail"),
    Fault(index=1, rank=2, step=4, place="recovery"),
    Fault(index=2, rank=0, step=12, place=None),
]
STRIKES = [
    Strike(index=0, rank=1, pid=11, signal_ns=100 * MS, died_ns=101 * MS, place="tail", step=4),
    Strike(index=1, rank=2, pid=12, signal_ns=120 * MS, died_ns=121 * MS, place="recovery", step=-1),
]
RECOVERY: dict[str, Any] = {
    "began_ns": 101 * MS,
    "faults": [{"rank": 1, "at_ns": 101 * MS}, {"rank": 2, "at_ns": 122 * MS}],
    "version": 5,
    "marks": {
        "detected": 101 * MS,
        "parked": 130 * MS,
        "planned": 131 * MS,
        "exported": 133 * MS,
        "pulled": 150 * MS,
        "rehearsed": 50 * MS,
        "formed": 160 * MS,
        "redone": 200 * MS,
    },
    "complete": True,
}


def test_each_fault_gets_its_own_times() -> None:
    first, second, third = join(FAULTS, STRIKES, [RECOVERY], {(0, 1): "built", (1, 2): "none"})
    assert first.timeline == {
        "detected": 1,
        "parked": 30,
        "planned": 31,
        "pulled": 50,
        "rehearsed": 0,
        "formed": 60,
        "redone": 100,
    }
    assert (first.recovered_ms, second.recovered_ms, third.recovered_ms) == (100, 80, None)
    assert second.timeline["detected"] == 2
    assert (first.standby, second.standby, third.standby) == ("built", "none", None)
    assert second.step == 5, "it held nothing yet: the step it was to go on with"


def test_json_says_what_happened() -> None:
    first, second, third = (one.to_json({5}, set()) for one in join(FAULTS, STRIKES, [RECOVERY], {}))
    assert (first["kind"], first["rank"], first["step"], first["phase"]) == ("SIGKILL", 1, 4, "tail")
    assert (first["fired"], first["recovered_ms"], first["redone_steps"]) == (True, 100, 1)
    assert second["planned_phase"] == "recovery"
    assert (third["fired"], third["phase"], third["recovered_ms"]) == (False, None, None)
    assert third["redone_steps"] == 0


def test_recovery_that_is_not_over_has_no_time() -> None:
    unfinished = {**copy.deepcopy(RECOVERY), "complete": False}
    (report_,) = join(FAULTS[:1], STRIKES[:1], [unfinished], {})
    assert report_.recovered_ms is None
    assert report_.timeline["parked"] == 30


def test_death_nobody_noticed_has_no_times() -> None:
    (one,) = join(FAULTS[:1], STRIKES[:1], [{**RECOVERY, "faults": [{"rank": 1, "at_ns": 99 * MS}]}], {})
    assert (one.timeline, one.complete) == ({}, False)


def test_a_death_of_another_cause_is_named() -> None:
    assert unplanned(STRIKES, [RECOVERY]) == []
    crash = {"rank": 0, "kind": "exit 1", "at_ns": 140 * MS, "place": "forward"}
    early = {"rank": 1, "kind": "SIGKILL", "at_ns": 90 * MS}
    found = unplanned(STRIKES, [{**RECOVERY, "faults": [early, *RECOVERY["faults"], crash]}])
    assert found == [
        "rank 1, SIGKILL, in an unknown place of step 5",
        "rank 0, exit 1, in forward of step 5",
    ]


# --- figures --------------------------------------------------------------------------------------------


def line(step: int, ms: float, ended_ms: int, attempt: int = 0, rank: int = 0) -> StepLine:
    return StepLine(step=step, rank=rank, ms=ms, ended_ns=ended_ms * MS, attempt=attempt)


def test_only_undisturbed_steps_count() -> None:
    lines = [
        line(0, 10, 10),  # starts an epoch
        line(1, 10, 20),
        line(2, 30, 50),  # a kill fell into it
        line(3, 10, 60, attempt=1),  # redone
        line(4, 10, 70),  # a standby was being built
        line(5, 10, 80),
        line(5, 18, 80, rank=1),
        line(6, 10, 90),  # starts an epoch
    ]
    assert undisturbed(lines, [(25 * MS, 61 * MS)], epoch_steps=6) == {1: 10, 5: 14}
    assert redone_steps(lines) == {3}


def test_overhead_is_that_of_the_same_steps() -> None:
    figures = cost({1: 11.0, 2: 22.0, 9: 500.0}, {1: 10.0, 2: 20.0, 7: 1.0})
    assert figures.overhead_percent == pytest.approx(10)
    assert (figures.num_paired, figures.step_ms, figures.reference_step_ms) == (2, 22.0, 10.0)
    spread = cost({step: 10.0 + step for step in range(1, 4)}, dict.fromkeys(range(1, 4), 10.0))
    assert spread.overhead_percent == pytest.approx(20)
    assert spread.overhead_quartiles == pytest.approx((10, 30))
    assert cost({}, {1: 1.0}).overhead_percent is None
    assert cost({1: 2.0}, {1: 1.0}).overhead_quartiles is None


def test_logs_are_read_as_written(tmp_path: Path) -> None:
    log = outcome.StepLog(tmp_path, 1)
    log.committed(3, 0.5, 12.5, attempt=1)
    log.close()
    (read,) = read_logs(tmp_path, 2)
    assert (read.step, read.rank, read.ms, read.attempt) == (3, 1, 12.5, 1)
    assert read.ended_ns - read.began_ns == int(12.5 * MS)


# --- what a person sees -----------------------------------------------------------------------------------


def shown(what: Any, width: int = 110) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def reports() -> list[FaultReport]:
    return join(FAULTS, STRIKES, [RECOVERY], {(0, 1): "built"})


def test_table_at_the_end() -> None:
    rows = shown(report.fault_table(reports(), 110)).splitlines()
    assert re.split(" +", rows[1].strip()) == re.split(" ", "1 1 tail 4 1.0 30 31 50 0.0 60 100 built")
    assert "recovery" in rows[2]
    assert "random: never fired" in rows[3]


@pytest.mark.parametrize("width", [80, 110])
def test_table_fits(width: int) -> None:
    text = shown(report.fault_table(reports(), width, now_ns=300 * MS), width)
    assert "…" not in text
    assert "redone" in text


def test_grid_marks_the_dead() -> None:
    tags = [Tag(Phase.TAIL, 0, 0, 1, 4, 0, 99 * MS, 0, 4, 1.0) for _ in range(2)]
    rows = shown(rank_grid([*tags, None], reports())).splitlines()
    assert ("●" in rows[1], "✗" in rows[1]) == (True, False)
    assert "●" not in rows[2]
    assert rows[2].count("✗") == 2, "where it died, and the count of its deaths"
    assert "starting" in rows[3]


def test_summary_names_the_difference(pairs: Any) -> None:
    settings = Settings(steps=STEPS, ranks=2, num_faults=3, seed=0, standby="built")
    figures = cost({1: 11.0}, {1: 10.0})
    good = shown(report.summary(settings, reports(), compare(pairs, steps=STEPS), figures, None))
    assert good.count("bit-identical") == 3
    assert "2 of 3 faults fired" in good
    pairs[0][0]["tensors"]["model.b"] = "other"
    bad = shown(report.summary(settings, reports(), compare(pairs, steps=STEPS), figures, None))
    assert "DIFFERENT" in bad
    assert "First difference: rank 0: model.b differs" in bad
    failed = shown(report.summary(settings, [], compare(pairs, steps=STEPS), figures, "no room"))
    assert "The job failed, so there is nothing to compare: no room" in failed
