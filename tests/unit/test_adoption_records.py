"""What a daemon leaves for the one after it, and which of what it finds that one believes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flashrec import __version__
from flashrec.errors import ProtocolError
from flashrec.protocol import messages as msg
from flashrec.protocol import records as rec
from flashrec.protocol.codec import encode
from flashrec.protocol.jobdir import JobDirectory
from flashrec.protocol.jobfiles import JobFiles, is_ours, lives, number_of
from flashrecd.adoption import Orphaned, find, standing, take_over
from flashrecd.core.state import JobState, Member, RankStatus
from flashrecd.launching import Process
from flashrecd.records import Records
from flashrecd.supervise.descendants import process_stat

ADDRESS = "ipc:///run/control.sock"
CLAIMS = (((0,), "digest"),)


def submit() -> msg.Submit:
    return msg.Submit(
        release=__version__, pid=os.getpid(), target="train.py", module=False, args=(), cwd="/", umask=0o077,
        python="python", env=(("SECRET", "x"),), world_size=1, num_standbys=0, max_restarts=None, log_dir=None,
        start_method="fork", preload=(), pull="shm", suspect_after_s=3.0,
    )  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[JobDirectory]:
    made = JobDirectory.make("job", tmp_path)
    yield made
    made.remove()


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def records(directory: JobDirectory, notes: list[str]) -> Records:
    """Of a job whose only rank is this very process."""
    records = Records(directory.path, lambda event, reason: notes.append(f"{event}: {reason}"))
    records.describe("job", submit(), ADDRESS, Path("/logs"))
    state = JobState(members=(Member("p1", claims=CLAIMS),), generation=3, num_launched=7, why_sealed="why")
    records.count(state)
    records.took(Process("p1", 1, 0, 1, False, pid=os.getpid()), state)
    return records


def found(directory: JobDirectory, notes: list[str]) -> Orphaned | None:
    return find(
        ADDRESS, lambda event, reason: notes.append(f"{event}: {reason}"), parent=directory.path.parent
    )


def test_a_job_is_found_with_all_that_was_written(
    directory: JobDirectory, records: Records, notes: list[str]
) -> None:
    orphaned = found(directory, notes)
    assert orphaned is not None, notes
    assert orphaned.directory.path == directory.path
    assert orphaned.submit == submit()
    assert orphaned.ledger == rec.LedgerRecord(3, 7, 0, (-1, 0))
    (process,) = orphaned.processes
    assert (process.proc, process.rank, process.claims, process.why_sealed) == ("p1", 0, CLAIMS, "why")
    assert lives(process.pid, process.start_ticks)
    assert notes == []
    orphaned.directory.leave()


def test_nobody_else_can_read_it(directory: JobDirectory, records: Records) -> None:
    files = [path for path in directory.path.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_directory_that_is_open_to_others_is_not_believed(
    directory: JobDirectory, records: Records, notes: list[str], mode: int
) -> None:
    directory.path.chmod(mode)
    assert not is_ours(directory.path)
    assert found(directory, notes) is None


def test_a_link_in_its_place_is_not_believed(
    tmp_path: Path, directory: JobDirectory, records: Records
) -> None:
    link = tmp_path / "elsewhere" / f"flashrec-{os.getuid()}-job-1"
    link.parent.mkdir()
    link.symlink_to(directory.path)
    assert not is_ours(link)
    assert find(ADDRESS, lambda *_: None, parent=link.parent) is None


def test_another_run_directorys_job_is_left_alone(
    directory: JobDirectory, records: Records, notes: list[str]
) -> None:
    records.describe("job", submit(), "ipc:///another", Path("/logs"))
    assert found(directory, notes) is None
    assert notes == []


def test_another_releases_job_is_left_alone(
    directory: JobDirectory, records: Records, notes: list[str]
) -> None:
    record = rec.JobRecord("0.0.0", "job", ADDRESS, "/logs", 0, encode(submit()))
    JobFiles(directory.path).describe(record)
    assert found(directory, notes) is None
    assert "its job is of flashrec 0.0.0" in notes[0]


@pytest.mark.parametrize("name", ["job", "ledger", "process/p1"])
@pytest.mark.parametrize("data", [b"", b"\x00garbage", encode(msg.Released())])
def test_what_does_not_decode_is_not_believed(
    directory: JobDirectory, records: Records, notes: list[str], name: str, data: bytes
) -> None:
    (directory.path / name).write_bytes(data)
    assert found(directory, notes) is None
    assert len(notes) == 1


def test_a_job_without_a_living_rank_is_not_found(
    directory: JobDirectory, records: Records, notes: list[str]
) -> None:
    """The number of its process is another's by now: the start tells."""
    stat = process_stat(os.getpid())
    assert stat is not None
    files = JobFiles(directory.path)
    (process,) = files.processes()
    assert lives(process.pid, stat.start_ticks)
    assert not lives(process.pid, stat.start_ticks + 1)
    files.took(rec.ProcessRecord("p1", os.getpid(), stat.start_ticks + 1, 0, 1, False, False, None, ""))
    assert found(directory, notes) is None
    assert "no rank of its job lives" in notes[0]


def test_a_half_written_file_beside_does_not_count(directory: JobDirectory, records: Records) -> None:
    (directory.path / "process" / "p2.new").write_bytes(b"half")
    assert [one.proc for one in JobFiles(directory.path).processes()] == ["p1"]


def test_a_ranks_last_record_stays_until_there_is_the_next(directory: JobDirectory, records: Records) -> None:
    """It says what the rank holds, which no other may know."""
    files = JobFiles(directory.path)
    state = JobState(members=(Member("p2", claims=CLAIMS),))
    old, standby = Process("p1", 1, 0, 1, False), Process("p2", 2, None, 1, True, pid=os.getpid())
    records.took(standby, state)
    records.ended(old)
    assert [one.proc for one in files.processes()] == ["p1", "p2"]
    standby.rank = 0
    records.took(standby, state)
    assert [(one.proc, one.rank, one.claims) for one in files.processes()] == [("p2", 0, CLAIMS)]


def test_the_record_of_an_adopted_rank_goes_when_there_is_the_next(
    directory: JobDirectory, records: Records, notes: list[str]
) -> None:
    """Or a daemon that adopts the job once more would find two holders of one rank."""
    orphaned = found(directory, notes)
    assert orphaned is not None
    state = JobState(members=(Member("p9", claims=CLAIMS),))
    again = Records(directory.path, lambda event, reason: notes.append(f"{event}: {reason}"))
    job = SimpleNamespace(records=again, processes={}, feed=lambda event: None)
    supervisor = SimpleNamespace(adopt=lambda *args, **more: None)
    take_over(cast(Any, job), orphaned, cast(Any, supervisor))
    assert list(job.processes) == ["p1"]
    again.took(Process("p9", 9, 0, 2, True, pid=os.getpid()), state)
    assert [one.proc for one in JobFiles(directory.path).processes()] == ["p9"]
    orphaned.directory.leave()


def test_a_standbys_record_goes_with_it(directory: JobDirectory, records: Records) -> None:
    standby = Process("p2", 2, None, 1, True, pid=os.getpid())
    records.took(standby, JobState())
    records.ended(standby)
    assert [one.proc for one in JobFiles(directory.path).processes()] == ["p1"]


def test_records_that_cannot_be_kept_true_are_withdrawn(
    directory: JobDirectory, records: Records, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    records.count(JobState(generation=4))
    monkeypatch.undo()
    records.count(JobState(generation=5))
    assert len(notes) == 1
    assert "No space left" in notes[0]
    assert not (directory.path / "job").exists()
    assert found(directory, notes) is None


@pytest.mark.parametrize("name", ["", "p", "px", "7", "p-1", "../p1", "p1/../../x", "p\u0661"])
def test_a_file_is_named_after_nothing_but_a_process_of_ours(name: str) -> None:
    with pytest.raises(ProtocolError):
        number_of(name)


def test_a_phase_that_there_is_not_is_refused() -> None:
    offer = msg.Rejoin("p1", 1, "", "job", 0, 1, 99, None, False, None, "", 0, False)
    with pytest.raises(ProtocolError, match="no phase 99"):
        standing(offer, (), ())


def test_every_phase_has_its_status() -> None:
    def at(phase: int, version: int | None) -> RankStatus:
        offer = msg.Rejoin("p1", 1, "", "job", 0, 1, phase, version, False, None, "", 0, False)
        return standing(offer, (), ()).status

    assert [at(phase, 3).value for phase in range(14)] == [
        "starting", "live", "live", "live", "live", "live", "parked", "live", "parked", "forming", "building",
        "left", "left", "live",
    ]  # fmt: skip
