"""What a rank's tag says of its progress, since who is behind is judged by it."""

from dataclasses import replace
from pathlib import Path

from flashrec.beacon import Beacon
from flashrec.phases import RankState
from flashrec.protocol.phase import Phase
from flashrec.protocol.tag import Tag, TagReader, tag_path

IDLE = RankState(0, Phase.IDLE, version=6)
COMPUTING = replace(IDLE, phase=Phase.COMPUTING)


def shown(folder: Path, *states: RankState, collectives: int = 0) -> Tag:
    beacon = Beacon()
    beacon.light(folder, 0)
    for state in states:
        beacon.show(state, 0)
    for _ in range(collectives):
        beacon.count_collective()
    tag = TagReader(tag_path(folder, 0)).read()
    beacon.close()
    assert tag is not None
    return tag


def test_a_rank_between_two_steps_is_behind_one_that_has_begun_the_second(tmp_path: Path) -> None:
    tail = replace(IDLE, phase=Phase.TAIL, version=5)
    between = shown(tmp_path, tail, IDLE, IDLE, collectives=50)
    begun = shown(tmp_path, tail, IDLE, COMPUTING)
    assert between.step == begun.step == 6
    assert between.progress < begun.progress


def test_each_collective_and_each_phase_is_progress(tmp_path: Path) -> None:
    begun = shown(tmp_path, COMPUTING)
    assert shown(tmp_path, COMPUTING, collectives=3).progress == begun.progress + 3
    assert shown(tmp_path, COMPUTING, replace(COMPUTING, phase=Phase.GATED)).progress == begun.progress + 1


def test_a_redo_starts_where_the_first_attempt_started(tmp_path: Path) -> None:
    parked = replace(COMPUTING, phase=Phase.PARKED)
    assert shown(tmp_path, COMPUTING, parked, COMPUTING).progress == shown(tmp_path, COMPUTING).progress


def test_a_standby_shows_nothing(tmp_path: Path) -> None:
    Beacon().show(COMPUTING, 0)
    assert list(tmp_path.iterdir()) == []
