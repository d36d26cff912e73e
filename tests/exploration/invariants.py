"""What must always hold, in the words of the design, as assertions on the simulated world."""

from collections.abc import Iterable, Sequence

from flashrec import phases as ph
from flashrecd.core.plan import Plan
from tests.exploration.model import Content, Life, Proc, Slot, Violation

STEPPING = (ph.Phase.COMPUTING, ph.Phase.GATED, ph.Phase.APPLYING, ph.Phase.TAIL)


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


# --- of every state -----------------------------------------------------------------------------------


def view(slot: Slot) -> tuple[int, Content | None]:
    """What `of_state` looks at: the generation a rank steps in, and the tensors a live rank holds."""
    if slot.life is not Life.ALIVE or slot.proc is None:
        return 0, None
    return slot.joined if slot.proc.state.phase in STEPPING else 0, slot.proc.tensors


def of_state(views: Iterable[tuple[int, Content | None]]) -> None:
    pairs = list(views)
    worlds = {generation for generation, _ in pairs if generation}
    require(len(worlds) <= 1, f"at most one world steps: generations {sorted(worlds)} do")
    held = {tensors for _, tensors in pairs if tensors}
    versions = {tensors.version for tensors in held}
    require(len(versions) == len(held), f"a step was applied twice, by different ranks: {sorted(held)}")
    spread = max(versions, default=0) - min(versions, default=0)
    require(spread <= 1, f"a step was applied by some ranks and not by others: {sorted(held)}")


# --- of single events -----------------------------------------------------------------------------------


def at_vote(slot: Slot, proc: Proc) -> None:
    require(
        slot.joined > proc.promised,
        f"a rank that promised not to vote in generation {proc.promised} votes in {slot.joined}",
    )
    require(not proc.state.latched, "a rank votes though it knows of a failure")


def at_apply(proc: Proc) -> None:
    require(proc.grads > 0, f"step {proc.state.version} is applied without complete gradients")
    assert proc.tensors is not None
    require(proc.tensors.version == proc.state.version, "a rank's memory is not at the version it believes")


def at_verdict(to: ph.Phase, passed: bool) -> None:
    require(to is not ph.Phase.APPLYING or passed, "a step is applied though not every rank voted for it")


def at_form(slot: Slot, proc: Proc) -> None:
    """A rank is about to connect to a generation that resumes at its plan's version."""
    plan = proc.state.plan
    assert plan is not None
    at = f"resuming at {plan.version}"
    require(
        proc.tensors is not None and proc.tensors.version == plan.version,
        f"{at} with tensors of {proc.tensors}",
    )
    require(
        proc.private == proc.tensors, f"{at} with tensors of {proc.tensors}, private state {proc.private}"
    )
    above = [content for content in slot.arena if content.version > plan.version]
    require(not above, f"{at} with {above} still sealed above it")
    require(proc.tensors in slot.arena, f"{at} with {proc.tensors} not sealed: arena {slot.arena}")


def at_formed(slots: Sequence[Slot], generation: int) -> None:
    """Some rank goes on in `generation`: all ranks that are in it have equal content."""
    contents = {
        slot.proc.tensors
        for slot in slots
        if slot.life is Life.ALIVE and slot.proc and slot.joined == slot.proc.state.generation == generation
    }
    require(len(contents) <= 1, f"generation {generation} starts with different contents: {contents}")


def at_plan(slots: Sequence[Slot], plan: Plan) -> None:
    """`slots` as they are at the very moment of the decision, the dead whose death is not known included."""
    for rank, slot in enumerate(slots):
        proc = slot.proc
        if slot.life is not Life.ALIVE or proc is None:
            continue
        require(proc.state.generation <= plan.generation, "a plan for a generation that is over")
        if proc.tensors is None:
            require(rank in plan.replaced, f"rank {rank} holds nothing and is not replaced")
            continue
        require(rank not in plan.replaced, f"rank {rank} holds {proc.tensors} and is replaced")
        held = proc.tensors.version
        require(plan.version >= held, f"resuming at {plan.version} loses a step that rank {rank} applied")
        if plan.version > held:
            require(
                plan.version == held + 1 and proc.state.phase is ph.Phase.HELD and proc.grads > 0,
                f"rank {rank} at {held} cannot be at {plan.version}",
            )
            voted = all(o.joined == slot.joined and o.voted >= held for o in slots)
            require(voted, f"rolling forward over step {held}, which not every rank voted for")


def at_release(slots: Sequence[Slot]) -> None:
    contents = {slot.proc.tensors for slot in slots if slot.life is Life.ALIVE and slot.proc}
    require(len(contents) <= 1, f"the job closes with different contents: {contents}")


def at_giving_up(slots: Sequence[Slot]) -> None:
    holders = [r for r, s in enumerate(slots) if s.life is Life.ALIVE and s.proc and s.proc.tensors]
    require(not holders, f"no version was found, though ranks {holders} hold state")


def at_end(slots: Sequence[Slot], lives: Iterable[Life]) -> None:
    left = [life for life in (*[slot.life for slot in slots], *lives) if life is not Life.NONE]
    require(not left, f"the job has ended, and {len(left)} of its processes are not known to be gone")
