"""The demo of one parallelism and one kind of fault: what is chosen, struck, judged and said."""

import io
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import recipe
from flashrec.cli.demo import brief
from flashrec.cli.demo.brief import Findings, steps_again
from flashrec.cli.demo.daemon import WITHOUT_STEPS, DaemonFault, DaemonStrike
from flashrec.cli.demo.faults import FaultReport, join
from flashrec.cli.demo.injector import Strike
from flashrec.cli.demo.schedule import (
    DAEMON_STEP,
    PLACES,
    QUIET_STEPS,
    SLOT_STEPS,
    Fault,
    make_groups,
    make_schedule,
    schedule_for,
)
from flashrec.cli.demo.settings import BRIEF, FAULTS, PARALLEL, WHOLE, Settings, choose
from flashrec.cli.demo.timing import StepLine, committed_again
from flashrec.cli.demo.verdict import Verdict, compare, unproven
from flashrec.errors import UsageError

MS = 1_000_000
NOT_GIVEN: dict[str, Any] = {
    "steps": None,
    "ranks": None,
    "num_faults": None,
    "seed": 0,
    "standby": None,
    "parallel": None,
    "fault": None,
}


def chosen(**options: Any) -> Settings:
    return choose(**{**NOT_GIVEN, **options})


# --- what is meant ----------------------------------------------------------------------------------------


def test_without_the_two_options_it_is_the_whole_demo() -> None:
    assert chosen() == Settings(steps=80, ranks=4, num_faults=10, seed=0, standby="built")
    assert chosen(ranks=3, standby="none").ranks == 3


def test_every_parallelism_of_the_training_is_shown() -> None:
    assert tuple(PARALLEL) == recipe.PARALLEL


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_combination_has_a_schedule_that_fits(parallel: str, fault: str) -> None:
    settings = chosen(parallel=parallel, fault=fault)
    schedule = schedule_for(settings)
    assert len(schedule.faults) == settings.num_faults > 0
    assert max(fault.step for fault in schedule.faults) < settings.steps
    assert (schedule.daemon_step is not None) == (fault == "daemon")
    sizes = {"two-ranks": 2, "all-ranks": 4}
    assert {len(fault.ranks) for fault in schedule.faults} == {sizes.get(settings.fault, 1)}


def test_one_of_the_two_options_is_enough() -> None:
    assert chosen(parallel="pp") == chosen(parallel="pp", fault="rank")
    assert chosen(fault="daemon") == chosen(parallel="ddp", fault="daemon")


def test_a_standby_is_built_where_it_can_be() -> None:
    assert chosen(fault="two-ranks").standby == "built"
    assert chosen(fault="all-ranks").standby == chosen(parallel="zero").standby == "forked"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "fsdp", "ranks": 3}, "shown on 4 ranks"),
        ({"fault": "daemon", "ranks": 2}, "not on 2: leave --ranks out"),
        ({"parallel": "pp", "standby": "built"}, "--standby built does not go with --parallel pp"),
        ({"fault": "all-ranks", "standby": "built"}, "--standby built does not go with --fault all-ranks"),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        chosen(**options)


def test_only_ddp_has_to_ask_for_the_death_of_all() -> None:
    asked = {
        parallel: "--survive"
        in chosen(parallel=parallel, fault="all-ranks").training_arguments(recipe.Path("o"))
        for parallel in PARALLEL
    }
    assert [parallel for parallel, asks in asked.items() if asks] == ["ddp"]
    assert "--survive" not in chosen(fault="rank").training_arguments(recipe.Path("o"))


@pytest.mark.parametrize("settings", [chosen(), chosen(parallel="fsdp"), chosen(parallel="pp+fsdp")])
def test_the_model_has_the_size_that_is_said(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = settings.arguments(recipe.Path("unused"))
    monkeypatch.setattr("sys.argv", ["reference.py", *arguments])
    model = recipe.build_model(recipe.parse_options("a test"))
    tied = not settings.parallel.startswith("pp")
    assert settings.sizes.num_parameters(tied=tied) == model.num_parameters()
    assert settings.sizes is (BRIEF if settings.brief else WHOLE)


def test_the_last_stage_has_the_loss() -> None:
    assert chosen(parallel="pp").ranks_with_loss == {3}
    assert chosen(parallel="pp+fsdp").ranks_with_loss == {1, 3}
    assert chosen(parallel="tp").ranks_with_loss == {0, 1, 2, 3}


# --- what is struck -----------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(0, 20), st.integers(0, 1 << 40), st.integers(0, 50))
def test_groups_are_apart_and_of_different_ranks(size: int, number: int, seed: int, more: int) -> None:
    steps = DAEMON_STEP + SLOT_STEPS * number + QUIET_STEPS + more
    faults = make_groups(size, first=DAEMON_STEP, steps=steps, ranks=4, num_faults=number, seed=seed)
    assert len(faults) == number
    for before, after in itertools.pairwise(faults):
        assert after.step - max(before.step, before.patience) >= SLOT_STEPS
    for fault in faults:
        assert len(set(fault.ranks)) == size
        assert set(fault.ranks) <= set(range(4))
        assert DAEMON_STEP <= max(fault.step, fault.patience) <= steps - QUIET_STEPS - SLOT_STEPS
    counts = [[fault.place for fault in faults].count(place) for place in PLACES]
    assert max(counts) - min(counts) <= 1
    assert faults == make_groups(size, first=DAEMON_STEP, steps=steps, ranks=4, num_faults=number, seed=seed)


def test_too_few_steps_for_groups_says_how_many_it_takes() -> None:
    with pytest.raises(UsageError, match="3 faults do not fit into 12 steps; take --steps 20 or more"):
        schedule_for(chosen(fault="two-ranks", steps=12))
    assert len(schedule_for(chosen(fault="two-ranks", steps=20)).faults) == 3


@pytest.mark.parametrize("settings", [chosen(), chosen(parallel="tp")])
def test_single_ranks_are_struck_in_their_slots(settings: Settings) -> None:
    expected = make_schedule(steps=settings.steps, ranks=4, num_faults=settings.num_faults, seed=0)
    faults = schedule_for(settings).faults
    assert [replace(fault, latest=None) for fault in faults] == expected
    of_their_own = [fault for fault in faults if not fault.follows]
    for fault, following in itertools.pairwise(of_their_own):
        assert fault.latest is not None
        assert max(fault.step, fault.patience) < fault.latest < following.step


# --- what became of it ----------------------------------------------------------------------------------------

ALL = Fault(index=0, rank=2, step=5, place="apply", others=(0, 1, 3))


def strike(rank: int, place: str, step: int = 6, committed: int = 6) -> Strike:
    return Strike(
        index=0,
        rank=rank,
        pid=100 + rank,
        signal_ns=100 * MS,
        died_ns=101 * MS,
        place=place,
        step=step,
        committed=committed,
    )


STRIKES = [strike(2, "apply"), strike(0, "between", committed=7), strike(1, "apply"), strike(3, "gate")]
RECOVERY: dict[str, Any] = {
    "faults": [{"rank": rank, "kind": "SIGKILL", "at_ns": (101 + rank) * MS} for rank in range(4)],
    "version": 6,
    "marks": {"detected": 101 * MS, "planned": 105 * MS, "formed": 300 * MS, "redone": 400 * MS},
    "complete": True,
}


def reports(recovery: dict[str, Any] = RECOVERY, strikes: list[Strike] = STRIKES) -> list[FaultReport]:
    return join([ALL], strikes, [recovery], {(0, 2): "forked", (0, 0): "none"})


def line(rank: int, step: int, ended_ms: int) -> StepLine:
    return StepLine(step=step, rank=rank, ms=1.0, ended_ns=ended_ms * MS, attempt=0)


IDENTICAL = Verdict(
    weights_identical=True,
    optimizer_identical=True,
    losses_identical=True,
    first_difference=None,
    num_tensors=8,
    num_losses=40,
)


def findings(**changes: Any) -> Findings:
    before = Findings(
        settings=chosen(parallel="fsdp", fault="all-ranks"),
        reports=reports(),
        again={0: {6}},
        daemon=None,
        regime="sealed",
        why_sealed="'a' is held by rank 0 alone",
        verdict=IDENTICAL,
        failure=None,
    )
    return replace(before, **changes)


def test_a_fault_of_several_ranks_is_one() -> None:
    (report,) = reports()
    assert report.seen
    assert (report.place, report.step, report.version) == ("apply", 6, 6)
    assert report.timeline["detected"] == 4, "the last of the deaths"
    assert report.recovered_ms == 300
    assert report.standbys == ("forked", "none")
    told = report.to_json(set(), {6})
    assert told["ranks"] == [2, 0, 1, 3]
    assert told["phases"] == {"2": "apply", "0": "between", "1": "apply", "3": "gate"}
    assert (told["fired"], told["deaths_seen"], told["committed_steps_again"]) == (True, 4, 1)


def test_a_step_that_a_dead_rank_had_committed_counts_as_done_again() -> None:
    """By its tag: it was killed before it could write its log."""
    assert steps_again([], reports()) == {0: {6}}
    forward = {**RECOVERY, "version": 7}
    assert steps_again([], reports(forward)) == {0: set()}


def test_what_is_in_a_log_twice_was_done_again() -> None:
    lines = [
        line(0, 5, 80),
        line(0, 6, 90),
        line(1, 5, 85),
        line(0, 6, 410),
        line(0, 7, 420),
        line(0, 7, 900),
    ]
    assert committed_again(lines, {0: 100 * MS, 1: 500 * MS}) == {0: {6}, 1: {7}}
    assert committed_again(reversed(lines), {0: 100 * MS, 1: 500 * MS}) == {0: {6}, 1: {7}}
    assert committed_again(lines[:4], {}) == {-1: {6}}


def test_good_findings_pass() -> None:
    assert findings().complaints() == []
    assert findings().passed
    assert findings(again={0: set()}).most_again == 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"failure": "no room"}, "the job failed: no room"),
        ({"reports": join([ALL], [], [RECOVERY], {})}, "fault 1 never fired"),
        ({"reports": reports(strikes=STRIKES[:3])}, "fault 1 killed 3 of 4 ranks only"),
        (
            {"reports": reports({**RECOVERY, "faults": RECOVERY["faults"][:3]})},
            "fault 1 killed 4, of which the daemon has seen 3",
        ),
        ({"reports": reports({**RECOVERY, "complete": False})}, "fault 1 was not recovered from"),
        ({"again": {0: {5, 6}}}, "committed steps 5, 6 were done again after fault 1"),
        ({"regime": "live"}, "the live regime allows 0"),
        ({"again": {-1: {3}}}, "committed steps 3 were done again without a cause"),
        ({"settings": chosen(fault="daemon")}, "the daemon was never killed"),
    ],
)
def test_what_is_missing_is_said_and_fails(changes: dict[str, Any], complaint: str) -> None:
    found = findings(**changes)
    assert not found.passed
    assert any(complaint in one for one in found.complaints()), found.complaints()
    assert complaint in shown(brief.summary(found), 200)
    assert "survived" not in shown(brief.summary(found), 200)


def test_another_bit_fails() -> None:
    found = findings(
        verdict=replace(IDENTICAL, weights_identical=False, first_difference="rank 0: a differs")
    )
    assert not found.passed
    assert "First difference: rank 0: a differs" in shown(brief.summary(found), 100)
    assert not findings(verdict=unproven("nothing to compare")).passed


DAEMON = DaemonStrike(step=20, pid=7, signal_ns=1, died_ns=2)
STARTED = replace(DAEMON, steps_without=5, started_ns=10 * MS, new_pid=8)
ADOPTED = replace(STARTED, adopted_ns=310 * MS)


def test_a_daemon_that_was_not_replaced_fails() -> None:
    for_daemon = {"settings": chosen(parallel="fsdp", fault="daemon")}
    assert findings(**for_daemon, daemon=ADOPTED).passed
    assert "before another was started" in findings(**for_daemon, daemon=DAEMON).complaints()[0]
    assert "never had all the ranks" in findings(**for_daemon, daemon=STARTED).complaints()[0]
    assert ADOPTED.to_json() == {
        "kind": "SIGKILL",
        "step": 20,
        "pid": 7,
        "new_pid": 8,
        "steps_without_daemon": 5,
        "adopted_ms": 300.0,
    }


class StubDaemon:
    """Remembers what is done to it."""

    def __init__(self) -> None:
        self.pid, self.done = 7, ["start"]
        self.pids = [11, 12]

    def start(self) -> None:
        self.pid += 1
        self.done.append("start")

    def kill(self) -> None:
        self.done.append("kill")

    def rank_pids(self) -> list[int]:
        return self.pids


def test_the_daemon_is_killed_missed_for_a_while_and_replaced() -> None:
    daemon: Any = StubDaemon()
    fault = DaemonFault(daemon, step=20)
    fault.advance(19)
    assert fault.strike is None
    daemon.pids = []  # a rank is being replaced just then
    fault.advance(20)
    assert fault.strike is None
    daemon.pids = [11, 12]
    fault.advance(21)
    fault.advance(21 + WITHOUT_STEPS - 1)
    assert daemon.done == ["start", "kill"]
    fault.advance(21 + WITHOUT_STEPS)
    assert daemon.done == ["start", "kill", "start"]
    for pids in ([], [11], [11, 13]):
        daemon.pids = pids
        fault.advance(40)
        assert not fault.over, "another process holds the rank, or none yet"
    daemon.pids = [11, 12]
    fault.advance(41)
    assert fault.over
    assert fault.strike is not None
    assert (fault.strike.step, fault.strike.pid, fault.strike.new_pid) == (21, 7, 8)
    assert fault.strike.steps_without == WITHOUT_STEPS
    assert fault.strike.adopted_ms is not None
    assert daemon.done == ["start", "kill", "start"]


def test_of_a_pipeline_only_the_last_stage_has_losses() -> None:
    def left_behind(rank: int, losses: list[str]) -> dict[str, Any]:
        tensors = {"model.a": "d1", "optimizer.a.exp_avg": "d2"}
        return {"rank": rank, "world_size": 2, "corpus_sha256": "c", "losses": losses, "tensors": tensors}

    stages = [
        (left_behind(0, []), left_behind(0, [])),
        (left_behind(1, ["0x1p+0"]), left_behind(1, ["0x1p+0"])),
    ]
    assert compare(stages, steps=1, with_loss={1}).identical
    assert not compare(stages, steps=1).losses_identical
    assert not compare(stages, steps=1, with_loss={0}).losses_identical


# --- what a person sees -----------------------------------------------------------------------------------------


def shown(what: Any, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(what)
    return capture.get()


WORST = [strike(0, "recovery", 199), strike(1, "backward", 199), strike(2, "forward"), strike(3, "between")]


@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize("strikes", [STRIKES, WORST])
def test_rows_fit(width: int, strikes: list[Strike]) -> None:
    late = {**RECOVERY, "version": 199, "marks": dict.fromkeys(RECOVERY["marks"], 20_100 * MS)}
    rows = brief.strike_table(reports(late, strikes), width, again={0: {199}})
    text = shown(rows, width)
    assert "…" not in text
    assert "step 199" in text
    assert all(place in text for place in {one.place for one in strikes})
    assert len(text.splitlines()) <= 3


def test_table_says_where_when_and_how_long() -> None:
    text = shown(brief.strike_table(reports(), 110, again={0: {6}}), 110)
    assert text.splitlines()[1].split() == re.split(
        " ", "1 0 1 2 3 apply ×2, between, gate 6 4 5 200 300 6 step 6"
    )
    assert (
        brief.killed(reports()[0]) == "ranks 0, 1, 2, 3 killed at once, in apply ×2, between, gate of step 6"
    )


def test_while_the_run_goes_on_nothing_is_missing_yet() -> None:
    text = shown(brief.strike_table(join([ALL], [], [], {}), 80, now_ns=200 * MS), 80)
    assert "never" not in text
    unfinished = reports({**RECOVERY, "complete": False})
    assert "100 …" in shown(brief.strike_table(unfinished, 80, now_ns=200 * MS), 80)


def test_regime_and_its_reason_are_said() -> None:
    assert "Sealed regime: 'a' is held by rank 0 alone." in shown(
        brief.regime("sealed", "'a' is held by rank 0 alone"), 120
    )
    assert "no committed step is done again" in shown(brief.regime("live", ""), 120)
    text = shown(brief.summary(findings()), 120)
    assert "fsdp survived 4 deaths, all on record" in text
    assert text.count("bit-identical") == 3
    lines = brief.daemon_words(ADOPTED)
    assert "pid 7 killed when every rank had committed 20 steps" in lines[0]
    assert "after 300 ms" in lines[2]
    assert [len(brief.daemon_words(one)) for one in (DAEMON, STARTED, ADOPTED)] == [1, 2, 3]
