"""One JSON object a line, whatever is logged."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrecd import eventlog
from flashrecd.eventlog import EventLog

FIELDS = ["time", "job", "generation", "step", "rank", "event", "reason"]


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_all_fields_and_is_there_at_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("rank lost", "SIGKILL", job="k3f9", generation=2, step=17, rank=3)
    log.write("daemon started", "pid 1")
    first, second = read(log.path)
    assert list(first) == FIELDS
    assert first == first | {"job": "k3f9", "generation": 2, "step": 17, "rank": 3, "event": "rank lost"}
    assert first["reason"] == "SIGKILL"
    assert second == second | dict.fromkeys(["job", "generation", "step", "rank"])
    assert datetime.fromisoformat(str(first["time"])).utcoffset() is not None
    assert log.path.stat().st_mode & 0o777 == 0o600
    log.close()


@given(st.text())
def test_any_text_is_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    log = EventLog(tmp_path_factory.mktemp("log") / "events.jsonl")
    log.write(text, text + "\n")
    log.close()
    (line,) = read(log.path)
    assert (line["event"], line["reason"]) == (text, text + "\n")


def test_a_path_that_is_not_utf8_can_be_logged(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("cleaned", os.fsdecode(b"/dev/shm/\xff"))
    log.close()
    assert read(log.path)[0]["reason"] == "/dev/shm/\udcff"


def test_an_older_log_is_continued(tmp_path: Path) -> None:
    for number in range(3):
        log = EventLog(tmp_path / "events.jsonl")
        log.write("daemon started", str(number))
        log.close()
    assert [line["reason"] for line in read(tmp_path / "events.jsonl")] == ["0", "1", "2"]


def test_the_listener_hears_what_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    heard: list[str] = []
    log.listener = heard.append
    log.write("plan", "because")
    log.listener = None
    log.write("plan", "again")
    log.close()
    assert [json.loads(line)["reason"] for line in heard] == ["because"]


def test_a_full_disk_loses_lines_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EventLog, "_open", lambda self: os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC))
    log = EventLog(tmp_path / "events.jsonl")
    heard: list[str] = []
    log.listener = heard.append
    log.write("plan", "because")
    log.write("plan", "again")
    log.close()
    assert [json.loads(line)["reason"] for line in heard] == ["because", "again"]
    assert capsys.readouterr().err.count("loses lines: No space left on device") == 1


def test_a_large_log_is_turned_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eventlog, "MAX_BYTES", 2000)
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(100):
        log.write("e", str(number))
    log.close()
    older, newer = read(tmp_path / "events.jsonl.1"), read(tmp_path / "events.jsonl")
    numbers = [int(str(line["reason"])) for line in older + newer]
    assert numbers == list(range(numbers[0], 100))
    assert all((tmp_path / name).stat().st_size < 2500 for name in ("events.jsonl", "events.jsonl.1"))
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        EventLog(tmp_path / "events.jsonl")
