"""Explore one world, and say how many states it has.

python -m tests.exploration [live|sealed|switching] [communicating] [RANKS [STEPS [FAULTS [STANDBYS]]]]
python -m tests.exploration nodes [NAME ...]    the worlds of node_worlds.py, or those whose names contain a NAME
"""

import sys

from tests.exploration.explore import Explorer
from tests.exploration.model import Config, Regime
from tests.exploration.node_worlds import LARGE, SMALL


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] == "nodes":
        return explore_nodes(arguments[1:])
    config = Config()
    if arguments and not arguments[0].isdigit():
        regime = Regime(arguments.pop(0))
        config = config._replace(regime=regime, private_slots=2 if regime is Regime.LIVE else 3)
    if arguments and arguments[0] == "communicating":
        config = config._replace(communicates=bool(arguments.pop(0)))
    numbers = [int(argument) for argument in arguments]
    names = ("num_ranks", "steps", "num_faults", "num_standbys")
    report = Explorer(config._replace(**dict(zip(names, numbers, strict=False)))).run()
    print(report)
    return int(bool(report.violation))


def explore_nodes(parts: list[str]) -> int:
    wrong = 0
    for name, config in {**SMALL, **LARGE}.items():
        if not parts or any(part in name for part in parts):
            report = Explorer(config).run()
            wrong += bool(report.violation)
            print(f"{name}\n  {report}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
