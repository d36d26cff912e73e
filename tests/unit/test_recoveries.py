"""The time-line of a recovery: from the first sign of a failure to the last rank's next commit."""

from __future__ import annotations

import json

from flashrec.protocol.phase import Phase
from flashrec.protocol.tag import Tag
from flashrecd import recoveries
from flashrecd.recoveries import Recoveries

TAG = Tag(Phase.GATED, 0, 0, 1, 7, 3, 90, 80, 6, 0.5)


def test_one_recovery_from_fault_to_commit() -> None:
    log = Recoveries(2)
    log.fault(100, 1, "SIGKILL", TAG)
    for mark, at_ns in [("parked", 110), ("parked", 120), ("parked", 115), ("formed", 150), ("pulled", 0)]:
        log.mark(mark, at_ns)
    log.planned(2, 7, 130)
    assert log.committed(2, 0, 160) is None
    done = log.committed(2, 1, 155)
    assert done is not None
    assert done.complete
    assert (done.generation, done.version) == (2, 7)
    # The last rank's instant counts, whatever order the messages come in; an instant of 0 means: did not happen.
    assert done.marks == {"detected": 100, "parked": 120, "planned": 130, "formed": 150, "redone": 160}
    assert done.faults == [
        {"rank": 1, "kind": "SIGKILL", "at_ns": 100, "place": "gate", "step": 7, "changed_ns": 90}
    ]
    assert log.open is None
    assert log.taken.cumulative()[-1] == ("+Inf", 1.0)


def test_a_failure_during_a_recovery_belongs_to_it() -> None:
    log = Recoveries(2)
    log.fault(100, 1, "SIGKILL", None)
    log.planned(2, 7, 110)
    assert log.committed(2, 0, 120) is None
    log.fault(130, 0, "SIGKILL", None)
    assert (
        log.committed(2, 1, 125) is None
    )  # of the generation that has ended; one rank has not committed since
    log.planned(3, 7, 140)
    assert log.committed(3, 1, 150) is None
    done = log.committed(3, 0, 160)
    assert done is not None
    assert [fault["rank"] for fault in done.faults] == [1, 0]
    assert done.began_ns == 100
    assert done.generation == 3
    assert len(log.records) == 1


def test_what_belongs_to_no_recovery_is_nothing() -> None:
    log = Recoveries(1)
    log.mark("parked", 5)
    log.planned(2, 7, 5)
    assert log.committed(1, 0, 5) is None
    assert log.to_json() == []


def test_a_commit_of_another_generation_completes_nothing() -> None:
    log = Recoveries(1)
    log.suspicion(100)
    log.planned(2, 7, 110)
    assert log.committed(1, 0, 120) is None
    assert log.committed(3, 0, 120) is None
    assert log.open is not None
    assert log.committed(2, 0, 120) is not None


def test_the_record_is_bounded_and_counts_on() -> None:
    log = Recoveries(1)
    for number in range(recoveries.KEPT + 5):
        log.suspicion(number)
        log.planned(number + 2, 0, number)
        assert log.committed(number + 2, 0, number + 1) is not None
    assert len(log.records) == recoveries.KEPT
    assert log.taken.cumulative()[-1][1] == recoveries.KEPT + 5


def test_the_document_is_json() -> None:
    log = Recoveries(2)
    log.fault(100, 1, "exit 3", TAG)
    (record,) = json.loads(json.dumps(log.to_json()))
    assert record["faults"][0]["kind"] == "exit 3"
    assert record["complete"] is False
