"""Which rank is killed, where and when: a pure function of the options and a seed."""

import random
from dataclasses import dataclass, replace
from typing import TypeVar

from flashrec.cli.demo.settings import Settings
from flashrec.errors import UsageError

PLACES = ("forward", "backward", "gate", "apply", "tail", "between")
"""Where a rank may be struck on purpose; "recovery" is struck by a fault that follows another."""

FIRST_STEP = 4  # the ranks are warm and a standby is there
SLOT_STEPS = (
    4  # of a fault and what it leads to; so no step is ever recovered more often than the daemon allows
)
SPREAD_STEPS = (
    4  # a fault strikes in the first few steps of its slot: the rest is for the next standby to get ready
)
QUIET_PART = 5  # of the steps: the last ones, undisturbed, to be measured
QUIET_STEPS = 4  # and at least so many
FOLLOWS_FROM = 8  # faults; with this many, one of them strikes in the recovery from another
BOTH_FOLLOW_FROM = 9
DAEMON_STEP = 20  # the ranks are warm, and most of the steps are still to come
MAX_WAIT_STEPS = 1.5
MAX_WAIT_MS = 30.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kill that is planned.

    It strikes `rank` in `place`, as soon as the rank is there in `step` or later. With place None it strikes
    `wait` steps (a fraction) after the rank began `step`, wherever the rank is then. A fault whose place is
    "recovery" follows the one before it: it waits, `wait` ms at most, until the rank takes part in that
    recovery; where it has the rank of the one before, it strikes the replacement.

    A fault with a place waits until `patience`, a step, for a standby to stand ready, as it would where failures
    are hours apart; one at a random time does not. Where steps are short, or the machine is busy, a place may pass
    unseen again and again: from step `latest` on it strikes wherever the rank is. `others` are killed in the same
    moment, wherever they are.
    """

    index: int
    rank: int
    step: int
    place: str | None
    wait: float = 0.0
    patience: int = 0
    latest: int | None = None
    others: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that are killed, the one that is watched first."""
        return (self.rank, *self.others)

    @property
    def follows(self) -> bool:
        return self.place == "recovery"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What is struck in one run."""

    faults: list[Fault]
    daemon_step: int | None = None
    """The daemon is killed before all others, when every rank has committed so many steps; None: it is not."""


def schedule_for(settings: Settings) -> Schedule:
    """What `settings.fault` asks for. UsageError when so many faults do not fit into so many steps."""
    steps, ranks, number, seed = settings.steps, settings.ranks, settings.num_faults, settings.seed
    if settings.fault == "rank":
        faults = make_schedule(steps=steps, ranks=ranks, num_faults=number, seed=seed)
        return Schedule(faults=[_bounded(fault) for fault in faults])
    if settings.fault == "daemon":
        faults = make_groups(1, first=DAEMON_STEP, steps=steps, ranks=ranks, num_faults=number, seed=seed)
        return Schedule(faults=faults, daemon_step=DAEMON_STEP)
    size = 2 if settings.fault == "two-ranks" else ranks
    return Schedule(
        faults=make_groups(size, first=FIRST_STEP, steps=steps, ranks=ranks, num_faults=number, seed=seed)
    )


def make_groups(size: int, *, first: int, steps: int, ranks: int, num_faults: int, seed: int) -> list[Fault]:
    """Faults that kill `size` ranks at once, spread evenly over the steps from `first` on.

    All places come up before one comes up twice: where the rank is that is watched, and the others about there.
    UsageError when so many faults do not fit.
    """
    rng = random.Random(seed)
    end = steps - QUIET_STEPS
    if num_faults and end - first < SLOT_STEPS * num_faults:
        needed = first + SLOT_STEPS * num_faults + QUIET_STEPS
        raise UsageError(f"{num_faults} faults do not fit into {steps} steps; take --steps {needed} or more")
    faults = []
    for index, place in enumerate(dealt(PLACES, num_faults, rng)):
        begin, after = (first + (end - first) * n // num_faults for n in (index, index + 1))
        step = begin + rng.randrange(min(SPREAD_STEPS, after - begin - SLOT_STEPS + 1))
        rank, *others = rng.sample(range(ranks), size)
        fault = Fault(
            index=index,
            rank=rank,
            step=step,
            place=place,
            patience=after - SLOT_STEPS,
            others=tuple(sorted(others)),
        )
        faults.append(_bounded(fault))
    return faults


def _bounded(fault: Fault) -> Fault:
    """Strikes in its slot, come what may."""
    return replace(fault, latest=max(fault.step, fault.patience) + SLOT_STEPS - 1)


def make_schedule(*, steps: int, ranks: int, num_faults: int, seed: int) -> list[Fault]:
    """The faults in the order in which they strike.

    All places come up before one comes up twice, a fifth of the kills comes at random times, and from 8 faults on
    at least one strikes during a recovery. UsageError when so many faults do not fit.
    """
    if num_faults < 0:
        raise UsageError(f"the number of faults cannot be {num_faults}")
    if num_faults and ranks < 2:
        raise UsageError(
            "with one rank nothing survives its death: nobody else holds the state. Take --ranks 2 or more, "
            "or --faults 0"
        )
    rng = random.Random(seed)
    num_following = (num_faults >= FOLLOWS_FROM) + (num_faults >= BOTH_FOLLOW_FROM)
    num_random = num_faults // 5
    num_placed = num_faults - num_following - num_random
    num_slots = num_placed + num_random
    first, end = FIRST_STEP, steps - max(QUIET_STEPS, steps // QUIET_PART)
    if num_slots and end - first < SLOT_STEPS * num_slots:
        raise UsageError(
            f"{num_faults} faults do not fit into {steps} steps; take --steps {least_steps(num_slots)} or more"
        )
    kinds: list[str | None] = [*dealt(PLACES, num_placed, rng), *([None] * num_random)]
    rng.shuffle(kinds)
    followed = _choose_followed(kinds, num_following, rng)
    victims = dealt(tuple(range(ranks)), num_slots, rng)
    faults: list[Fault] = []
    for slot, (kind, rank) in enumerate(zip(kinds, victims, strict=True)):
        begin, after = (first + (end - first) * n // num_slots for n in (slot, slot + 1))
        step = begin + rng.randrange(min(SPREAD_STEPS, after - begin - SLOT_STEPS + 1))
        wait = rng.uniform(0, MAX_WAIT_STEPS) if kind is None else 0.0
        patience = after - SLOT_STEPS if kind is not None else step
        faults.append(
            Fault(index=len(faults), rank=rank, step=step, place=kind, wait=wait, patience=patience)
        )
        if slot in followed:
            twice = followed.index(slot) == 0 or ranks == 2  # of two ranks one must be left
            victim = rank if twice else rng.choice([r for r in range(ranks) if r != rank])
            wait = rng.uniform(0, MAX_WAIT_MS)
            faults.append(Fault(index=len(faults), rank=victim, step=step, place="recovery", wait=wait))
    return faults


def least_steps(num_slots: int) -> int:
    """The smallest number of steps into which `num_slots` faults, those that follow not counted, fit."""
    steps = FIRST_STEP + SLOT_STEPS * num_slots + QUIET_STEPS
    while steps - max(QUIET_STEPS, steps // QUIET_PART) - FIRST_STEP < SLOT_STEPS * num_slots:
        steps += 1
    return steps


def dealt(cards: tuple[T, ...], number: int, rng: random.Random) -> list[T]:
    """`number` of the cards: each round shuffled, every card once in a round."""
    dealt: list[T] = []
    while len(dealt) < number:
        dealt.extend(rng.sample(cards, len(cards)))
    return dealt[:number]


def _choose_followed(kinds: list[str | None], number: int, rng: random.Random) -> list[int]:
    """Slots whose fault is followed by another: struck at a known place, so that it is known when."""
    return rng.sample([slot for slot, kind in enumerate(kinds) if kind is not None], number)
