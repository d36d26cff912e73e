"""`python -m flashrecd.simulate < scenario.json`: the report, as JSON, or (`--table`) for a person."""

from __future__ import annotations

import json
import sys

from flashrec.errors import UsageError
from flashrec.sim.failures.documents import report_as_dict, scenario_from
from flashrecd.simulate.run import simulate_failures


def main(arguments: list[str]) -> int:
    """0, or 2 where the scenario is wrong; why is written to standard error."""
    if arguments not in ([], ["--table"]):
        print("usage: python -m flashrecd.simulate [--table] < scenario.json", file=sys.stderr)
        return 2
    try:
        try:
            document = json.load(sys.stdin)
        except ValueError as error:
            raise UsageError(f"the scenario is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise UsageError("the scenario must be an object")
        report = simulate_failures(scenario_from(document))
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    print(report.table() if arguments else json.dumps(report_as_dict(report), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
