"""Scenarios as documents, and the program that reads one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from flashrec.errors import UsageError
from flashrec.sim.failures import FailureScenario, Fault, Layout, Scope, write_trace
from flashrec.sim.failures.documents import scenario_from
from flashrecd.simulate.__main__ import main

DOCUMENT: dict[str, Any] = {
    "layout": {"devices": 64, "devices_per_node": 8, "nodes_per_rack": 2},
    "step_s": 2.0,
    "state_bytes": 1e8,
    "duration_s": 500.0,
}


def test_a_document_is_a_scenario(tmp_path: Path) -> None:
    layout = Layout(64, 8, 2)
    assert scenario_from(DOCUMENT) == FailureScenario(
        layout=layout, step_s=2.0, state_bytes=1e8, duration_s=500.0
    )
    faults = (Fault(100.0, Scope.NODE, 3),)
    write_trace(tmp_path / "trace", faults, layout)
    assert scenario_from({**DOCUMENT, "trace": str(tmp_path / "trace")}).faults() == faults


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"steps_s": 1}, "the scenario has no 'steps_s': did you mean 'step_s'?"),
        ({"colour": 1}, "the scenario has no 'colour': known are layout, step_s"),
        ({"costs": {"pull_bytes_per": 1}}, "costs has no 'pull_bytes_per': did you mean 'pull_bytes_per_s'?"),
        ({"layout": {}}, "layout: .*missing.*devices"),
        ({"layout": 3}, "layout must be a table, not 3"),
        ({"step_s": "long"}, "the scenario: "),
    ],
)
def test_a_wrong_document_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("?", r"\?")):
        scenario_from({**DOCUMENT, **change})


def said(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(list(arguments))


def test_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(monkeypatch, json.dumps(DOCUMENT)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["goodput"] == pytest.approx(0.996, abs=0.005)
    assert [one["policy"] for one in report["policies"]] == [
        "flashrec",
        "checkpoint-restart",
        "replica-dropping",
    ]
    assert report["policies"][0]["p50_s"] is None
    assert said(monkeypatch, json.dumps(DOCUMENT), "--table") == 0
    assert capsys.readouterr().out.startswith("| policy |")
    assert said(monkeypatch, "nonsense") == 2
    assert "not JSON" in capsys.readouterr().err
    assert said(monkeypatch, "[]") == said(monkeypatch, "{}") == said(monkeypatch, "", "--what") == 2
