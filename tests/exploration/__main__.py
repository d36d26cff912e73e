"""Explore one world, and say how many states it has.

python -m tests.exploration [RANKS [STEPS [FAULTS [STANDBYS]]]]
"""

import sys

from tests.exploration.explore import Explorer
from tests.exploration.model import Config


def main(arguments: list[str]) -> int:
    numbers = [int(argument) for argument in arguments]
    names = ("num_ranks", "steps", "num_faults", "num_standbys")
    report = Explorer(Config()._replace(**dict(zip(names, numbers, strict=False)))).run()
    print(report)
    return int(bool(report.violation))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
