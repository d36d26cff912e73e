"""A daemon that has died, and another that goes on with its job: what the ranks say, and what follows from it.

ADOPTING lasts until every rank is accounted for: it has said where it stands, or is proven dead. Then, if all are in
the newest generation and undisturbed, the job runs on. In every other case (a rank died, or waits for a plan, or was in
the midst of a forming) that generation is ended, and recovered from as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashrecd.core import events as ev
from flashrecd.core.claims import contradiction
from flashrecd.core.detection import ADOPT_FACTOR
from flashrecd.core.state import Member, RankStatus, Status

if TYPE_CHECKING:
    from flashrecd.core.job import Core

_UNDISTURBED = (RankStatus.LIVE, RankStatus.STARTING, RankStatus.LEFT)


def adopt(core: Core, event: ev.Adopt, now: float) -> None:
    members = tuple(
        Member(proc, RankStatus.AWAITED, claims=claims)
        for proc, claims in zip(event.holders, event.claims, strict=True)
    )
    core._begin_nodes(core.config.nodes)
    core._set(
        status=Status.ADOPTING,
        members=members,
        generation=event.generation,
        num_launched=event.num_launched,
        restarts=event.restarts,
        tries=event.tries,
        why_sealed=event.why_sealed,
        deadline=now + ADOPT_FACTOR * core.config.suspect_after_s,
    )
    core._log("adopting", "the daemon that ran this job has died; its ranks are awaited")


def adopted(core: Core, event: ev.Adopted, now: float) -> None:
    rank = core.rank_of(event.proc)
    if rank is None or core.state.members[rank].status is not RankStatus.AWAITED:
        return
    core._update(
        rank,
        status=event.status,
        version=event.version,
        can_advance=event.can_advance,
        claims=event.claims or core.state.members[rank].claims,
        private=event.private,
        sealed=event.sealed,
        joined=event.generation,
    )
    core._set(
        generation=max(core.state.generation, event.generation),
        why_sealed=core.state.why_sealed or event.why_sealed,
    )
    core.detector.heard(event.proc, now)
    if event.status in (RankStatus.STARTING, RankStatus.BUILDING):
        core.detector.building(event.proc, now)
    where = f"{event.proc} is {event.status} in generation {event.generation}"
    core._log("adopted", where, rank, event.version)
    settle(core, now, event.shortage)


def ended(core: Core, rank: int, event: ev.Exited, how: str, now: float) -> None:
    """A process ended before all were accounted for, perhaps long ago."""
    if event.left is not None:
        core._update(rank, status=RankStatus.DONE, version=event.left)
        core._log("at its end", "its script was over, and the process has ended", rank, event.left)
    elif event.step is None and not core.state.members[rank].claims:
        before = "and had not come to flashrec.init(): whether its script was done is not known"
        core._finish(1, f"rank {rank} {how}, {before}")
    else:
        core._log("rank lost", how, rank, event.step)
        if not core.state.first_failure:
            core._set(first_failure=f"rank {rank} failed first: {how}")
    settle(core, now)


def expire(core: Core, now: float) -> None:
    """Those who have not rejoined, and live, are stopped or know nothing of us: they would be in the way."""
    if core.state.deadline is None or now <= core.state.deadline:
        return
    core._set(deadline=None)
    for rank, member in enumerate(core.state.members):
        if member.status is RankStatus.AWAITED:
            core._kill_suspect(rank, "it lives, and has not told the daemon that adopts it where it stands")


def settle(core: Core, now: float, shortage: str = "") -> None:
    """Once every rank is accounted for."""
    members = core.state.members
    if core.state.status is not Status.ADOPTING or any(m.status is RankStatus.AWAITED for m in members):
        return
    core._set(deadline=None)
    odd = contradiction(members) if all(m.claims is not None for m in members) else None
    lost = [r for r, m in enumerate(members) if m.status in (RankStatus.DEAD, RankStatus.DONE)]
    current = all(m.joined == core.state.generation for m in members)
    if odd is not None:
        core._finish(1, f"rank {odd[0]} and rank {odd[1]} disagree about the layout of the state")
    elif all(m.status in (RankStatus.LEFT, RankStatus.DONE) for m in members):
        core._close(now)
    elif not lost and current and all(m.status in _UNDISTURBED for m in members):
        _go_on(core, shortage)
    elif any(m.status is RankStatus.STARTING for m in members) or not core._anything_to_lose():
        why = "the daemon was lost, and a rank, before every rank had protected its state"
        if core._charge(why):
            core._start_over(why, blame=why)
    else:
        _recover(core, lost)


def _go_on(core: Core, shortage: str) -> None:
    if any(m.status is RankStatus.STARTING for m in core.state.members):
        core._set(status=Status.STARTING)
        core._log("world starting", "every rank was adopted, before all had protected their state")
    elif core.state.why_sealed and shortage and not any(m.sealed for m in core.state.members):
        # Not one has begun to seal: that daemon died before it could look. Whoever has begun has what it needs.
        core._finish(1, f"{shortage} (sealed: {core.state.why_sealed})")
        return
    else:
        core._set(status=Status.RUNNING)
        core._log("running", f"every rank was adopted, undisturbed, in generation {core.state.generation}")
        keepers = core._choose_keepers()
        why = core.state.why_unsealed
        core._do(ev.SetRegime(bool(core.state.why_sealed), core._live_procs(), keepers, why))
    core._refill_standbys()


def _recover(core: Core, lost: list[int]) -> None:
    names = ", ".join(map(str, lost))
    if lost:
        why = f"while there was no daemon ranks were lost: {names}"
        if not core._charge(why):
            return
    else:
        why = "the daemon was lost in the midst of a recovery"
    core._park_all(why)
    for rank in lost:
        core._replace(rank)
    core._plan_if_parked()
