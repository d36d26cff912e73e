"""Checks that every description of the performance model shares, and the words of their errors."""

import difflib
from collections.abc import Iterable

from flashrec.errors import UsageError


def nearest_key(key: str, known: Iterable[str]) -> str:
    """The known key most like `key` (the first in alphabetical order where none is alike)."""
    names = sorted(known)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
    return close[0] if close else ""


def require_known(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raises UsageError on the first of `given` that is not in `known`, and names the nearest."""
    names = tuple(known)
    for key in given:
        if key not in names:
            raise UsageError(f"{where}: unknown key {key!r}; did you mean {nearest_key(key, names)!r}?")


def require_choice(value: str, choices: Iterable[str], what: str) -> None:
    """Raises UsageError unless `value` is one of `choices`."""
    names = tuple(choices)
    if value not in names:
        raise UsageError(
            f"{what} is {value!r}; it must be one of {', '.join(names)} (nearest: {nearest_key(value, names)!r})"
        )


def require_count(value: int, what: str, least: int = 1) -> None:
    """Raises UsageError unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} is {value!r}; it must be an integer of at least {least}")


def require_number(
    value: float, what: str, *, above: float | None = None, least: float | None = None
) -> None:
    """Raises UsageError unless `value` is a finite number above `above`, or at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{what} is {value!r}; it must be a number")
    if value != value or value in (float("inf"), float("-inf")):
        raise UsageError(f"{what} is {value!r}; it must be finite")
    if above is not None and not value > above:
        raise UsageError(f"{what} is {value!r}; it must be above {above}")
    if least is not None and value < least:
        raise UsageError(f"{what} is {value!r}; it must be at least {least}")


def nearest_divisors(total: int, wanted: int) -> list[int]:
    """The divisors of `total` next to `wanted`: the greatest below and the least above, as far as there are any."""
    divisors = [d for d in range(1, int(total**0.5) + 1) if total % d == 0]
    divisors = sorted({*divisors, *(total // d for d in divisors)})
    below = [d for d in divisors if d < wanted]
    above = [d for d in divisors if d > wanted]
    return below[-1:] + above[:1]


def nearest_multiples(unit: int, wanted: int) -> list[int]:
    """The multiples of `unit` next to `wanted`: the greatest below (if positive) and the least above."""
    below = wanted // unit * unit
    return [m for m in (below, below + unit) if m > 0]


def words(values: Iterable[int]) -> str:
    """`3 or 4`."""
    return " or ".join(str(v) for v in values)


def require_division(total: int, total_name: str, part: int, part_name: str) -> None:
    """Raises UsageError unless `part` divides `total`; the message names the nearest values that do."""
    if total % part:
        raise UsageError(
            f"{total_name} ({total}) cannot be divided by {part_name} ({part}); "
            f"nearest valid {part_name}: {words(nearest_divisors(total, part))}; "
            f"nearest valid {total_name}: {words(nearest_multiples(part, total))}"
        )
