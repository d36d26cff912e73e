"""A scenario as a plain document (TOML, JSON), and a report as one: so that another process can simulate it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from flashrec.errors import UsageError
from flashrec.sim.failures.costs import RecoveryCosts
from flashrec.sim.failures.report import FailureReport
from flashrec.sim.failures.scenario import FailureScenario
from flashrec.sim.failures.traces import FailureRates, Layout, read_trace

PARTS: dict[str, type[Layout | FailureRates | RecoveryCosts]] = {
    "layout": Layout,
    "rates": FailureRates,
    "costs": RecoveryCosts,
}


def scenario_from(document: Mapping[str, Any]) -> FailureScenario:
    """The keys are FailureScenario's fields; `layout`, `rates` and `costs` are tables of theirs; `trace` is a file's
    path. UsageError for an unknown or missing key, or a value of another kind, by name."""
    facts = dict(_known("the scenario", document, FailureScenario))
    for name, kind in PARTS.items():
        if name in facts:
            if not isinstance(facts[name], Mapping):
                raise UsageError(f"{name} must be a table, not {facts[name]!r}")
            facts[name] = _build(name, facts[name], kind)
    if facts.get("trace") is not None:
        if "layout" not in facts:
            raise UsageError("a trace needs a layout")
        facts["trace"] = read_trace(facts["trace"], facts["layout"])
    scenario: FailureScenario = _build("the scenario", facts, FailureScenario)
    return scenario


def _known(where: str, document: Mapping[str, Any], kind: type[Any]) -> Mapping[str, Any]:
    names = [field.name for field in fields(kind)]
    for key in document:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
            raise UsageError(f"{where} has no {key!r}: {hint}")
    return document


def _build(where: str, facts: Mapping[str, Any], kind: type[Any]) -> Any:
    try:
        return kind(**_known(where, facts, kind))
    except TypeError as error:
        raise UsageError(f"{where}: {error}") from None


def report_as_dict(report: FailureReport) -> dict[str, Any]:
    """For JSON: what was found, without the scenario. A figure that there is none of is None."""
    document: dict[str, Any] = {
        "goodput": report.goodput,
        "policies": [asdict(one) for one in report.policies],
        "replica_choices": {str(k): goodput for k, goodput in report.replica_choices.items()},
        "best_replicas": report.best_replicas,
        "disk_interval_s": report.disk_interval_s,
        "restart_interval_s": report.restart_interval_s,
        "young_s": report.young_s,
        "why_fatal": dict(report.why_fatal),
    }
    for policy in document["policies"]:
        for name, value in policy.items():
            if isinstance(value, float) and math.isnan(value):
                policy[name] = None
    return document
