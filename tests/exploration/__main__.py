"""Explore one world, and say how many states it has.

python -m tests.exploration [live|sealed|switching] [communicating] [RANKS [STEPS [FAULTS [STANDBYS]]]]
"""

import sys

from tests.exploration.explore import Explorer
from tests.exploration.model import Config, Regime


def main(arguments: list[str]) -> int:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
