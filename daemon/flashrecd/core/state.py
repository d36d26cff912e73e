"""What the core knows of a job: plain frozen values, so that an explorer can keep and compare them."""

from dataclasses import dataclass
from enum import StrEnum

from flashrec.errors import UsageError


class Status(StrEnum):
    STARTING = "starting"
    ADOPTING = "adopting"
    RUNNING = "running"
    PARKING = "parking"
    FORMING = "forming"
    RESTARTING = "restarting"
    CLOSING = "closing"
    STOPPING = "stopping"
    ENDED = "ended"


class RankStatus(StrEnum):
    STARTING = "starting"  # runs its script, not protected yet
    LIVE = "live"
    PARKED = "parked"
    BUILDING = "building"  # a replacement that holds nothing yet
    FORMING = "forming"
    LEFT = "left"
    AWAITED = "awaited"  # of a daemon that has died: the process may live, and has not been heard yet
    DONE = "done"  # exited with code 0, and never called protect(); or while there was no daemon, after its script
    DEAD = "dead"


GONE = (RankStatus.DEAD, RankStatus.DONE)
HOLDS_STATE = (RankStatus.LIVE, RankStatus.PARKED, RankStatus.FORMING, RankStatus.LEFT)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """What the core must know of a job."""

    world_size: int
    num_standbys: int = 1
    max_restarts: int | None = None  # recoveries before the job fails; None: no bound
    max_tries_per_step: int = 3  # recoveries of the same version before the job fails
    suspect_after_s: float = 3.0
    external: bool = False  # another launcher starts the processes: what is launched is waited for

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError(f"a job needs at least one rank, not {self.world_size}")
        if self.num_standbys < 0:
            raise UsageError(f"the number of standbys cannot be {self.num_standbys}")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise UsageError(f"max restarts cannot be {self.max_restarts}")
        if not self.suspect_after_s > 0:
            raise UsageError(f"suspect_after_s must be positive, not {self.suspect_after_s}")


@dataclass(frozen=True, slots=True)
class Member:
    """A rank, and the process that holds it now."""

    proc: str
    status: RankStatus = RankStatus.STARTING
    version: int | None = None
    can_advance: bool = False
    private: tuple[int, ...] = ()  # versions in its private slots
    sealed: tuple[int, ...] = ()  # versions in its arena
    claims: tuple[tuple[tuple[int, ...], str], ...] | None = (
        None  # since protect(): its replica sets, with digests
    )
    buckets: str = ""
    joined: int = 0  # the generation it said it was in when it was adopted


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything the core knows; frozen, so that an explorer can keep and compare it."""

    status: Status = Status.STARTING
    generation: int = 1  # newest generation any rank was told of
    members: tuple[Member, ...] = ()
    awaited: tuple[str, ...] = ()  # launched, and not started by their launcher yet
    standbys: tuple[tuple[str, str], ...] = ()  # (process, depth), oldest first; depth "" until it is ready
    num_launched: int = 0
    built_offered: bool = False
    why_sealed: str = ""  # "": the live regime
    restarts: int = 0
    version: int = 0  # of the newest plan
    tries: tuple[int, int] = (-1, 0)  # step that failed, recoveries from it
    first_failure: str = ""
    errors: tuple[tuple[str, str], ...] = ()  # process -> last line of its traceback
    outcome: tuple[int, str] | None = None  # code and reason, once the end is decided
    stopping_procs: tuple[str, ...] = ()
    deadline: float | None = None  # when those who were asked to end are made to
