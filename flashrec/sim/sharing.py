"""Links that several transfers use at once: max-min fair rates, and when each transfer is over.

Fairness by progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2): all flows grow alike until a
link is full; its flows keep what they have, the others grow on. Works in any numbers: floats, or fractions, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from flashrec.errors import UsageError


def fair_rates(flows: Sequence[Sequence[Hashable]], capacity: Mapping[Any, Any]) -> list[Any]:
    """The max-min fair rate of each flow, in the unit of `capacity`.

    `flows[i]` are the links that flow i crosses (one named twice is crossed once), `capacity` what each link carries.
    A flow that crosses no link has the rate inf. Raises UsageError for an unknown link, or a capacity not above 0.
    """
    paths = [frozenset(flow) for flow in flows]
    unknown = sorted({str(link) for path in paths for link in path if link not in capacity})
    if unknown:
        raise UsageError(f"no capacity is given for link {unknown[0]}")
    users: dict[Hashable, set[int]] = {}
    for flow, path in enumerate(paths):
        for link in path:
            users.setdefault(link, set()).add(flow)
    left = {link: capacity[link] for link in users}
    for link, carries in left.items():
        if not carries > 0:
            raise UsageError(f"link {link} carries {carries}; it must be above 0")
    rates: list[Any] = [math.inf] * len(paths)
    while users:
        tightest = min(users, key=lambda link: left[link] / len(users[link]))
        rate = left[tightest] / len(users[tightest])
        for flow in sorted(users[tightest]):
            rates[flow] = rate
            for link in paths[flow]:
                left[link] -= rate
                users[link].discard(flow)
        users = {link: flows_left for link, flows_left in users.items() if flows_left}
    return rates


def finish_times(
    flows: Sequence[Sequence[Hashable]], sizes_bytes: Sequence[Any], capacity: Mapping[Any, Any]
) -> list[Any]:
    """When each of `flows` is over, in seconds, if all begin at 0 and share fairly; rates change when a flow ends.

    `sizes_bytes[i]` is what flow i carries, `capacity` in bytes a second. Raises UsageError as `fair_rates` does, and
    for a size below 0 or a list of another length.
    """
    if len(sizes_bytes) != len(flows):
        raise UsageError(f"{len(flows)} flows have {len(sizes_bytes)} sizes; give one each")
    if any(not size >= 0 for size in sizes_bytes):
        raise UsageError("a flow carries less than 0 bytes")
    ends: list[Any] = [0] * len(flows)
    left = {flow: size for flow, size in enumerate(sizes_bytes) if size > 0}
    now: Any = 0
    while left:
        rates = dict(zip(left, fair_rates([flows[flow] for flow in left], capacity), strict=True))
        lasts = {flow: size / rates[flow] if rates[flow] != math.inf else 0 for flow, size in left.items()}
        step = min(lasts.values())
        now += step
        for flow, size in list(left.items()):
            if lasts[flow] == step:  # by the time it lasts: a rest of bytes would be blurred by rounding
                ends[flow] = now
                del left[flow]
            else:
                left[flow] = size - rates[flow] * step
    return ends
