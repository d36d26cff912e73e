"""A rank of another node whose daemon has died: what it says to the one that came in its place.

Its job was never without its leader, which knows of it what its daemon had passed on. What that daemon had been told
and not passed on, and what it was to tell the rank and had not, is made up for here: an offer says where a rank stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashrec.protocol import messages as msg
from flashrecd.adoption import refusal, standing
from flashrecd.core import events as ev
from flashrecd.core.state import RankStatus, Status

if TYPE_CHECKING:
    from flashrecd.jobrun import JobRun


def rejoined(job: JobRun, offer: msg.Rejoin) -> msg.Refused | None:
    """Welcome the rank, or say why not. Raises ProtocolError for an offer that makes no sense."""
    process = job.processes.get(offer.proc)
    is_awaited = process is not None and process.node != 0 and process.heard
    if (refused := refusal(offer, job.name, process, is_awaited=is_awaited)) is not None:
        return refused
    assert process is not None
    stands = standing(offer, *job.procs.host(process).kept(offer.rank))
    job.arena_bytes[offer.rank] = offer.arena_bytes
    job.welcome(process)
    where = f"{offer.proc} is {stands.status} in generation {offer.generation}"
    job.log("adopted", where, offer.rank, offer.version)
    job.feed(ev.Heartbeat(offer.proc))
    if offer.built_offered:
        job.feed(ev.BuiltOffered())
    if offer.why_sealed:
        job.feed(ev.Switched(offer.proc, offer.why_sealed))
    if offer.why_unsealed:
        job.feed(ev.Unsealed(offer.proc, offer.why_unsealed))
    _say_regime(job, offer.proc, offer.rank)
    if stands.status is RankStatus.PARKED:
        parked = (offer.generation, offer.version, offer.can_advance, stands.private, stands.sealed)
        job.feed(ev.Parked(offer.proc, *parked))
    elif stands.status is RankStatus.LEFT and offer.version is not None:
        job.feed(ev.Leaving(offer.proc, offer.generation, offer.version))
    return None


def _say_regime(job: JobRun, proc: str, rank: int) -> None:
    """It may wait for it; who knows it does not mind."""
    state = job.core.state
    if state.status is Status.RUNNING:
        keepers = job.nodes.keepers(rank, [member.keepers for member in state.members])
        job.procs.send(proc, msg.Regime(bool(state.why_sealed), keepers, state.why_unsealed))
