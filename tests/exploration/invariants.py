"""What must always hold, in the words of the design, as assertions on the simulated world."""

from collections.abc import Iterable, Sequence

from flashrec import phases as ph
from flashrecd.core.plan import Plan
from tests.exploration import arenas
from tests.exploration.model import DAMAGED, Content, Life, Proc, Slot, Violation

STEPPING = (ph.Phase.COMPUTING, ph.Phase.GATED, ph.Phase.APPLYING, ph.Phase.TAIL, ph.Phase.CLOSING)


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


# --- of every state -----------------------------------------------------------------------------------


Pace = tuple[int | None, int, int, int]  # a step, and what is known in it of full versions: see is_due()
View = tuple[int, Content | None, Pace | None]


def view(slot: Slot) -> View:
    """What `of_state` looks at: the generation a rank steps in, the tensors a live rank holds, and what it goes by in
    sealing full versions."""
    if slot.life is not Life.ALIVE or slot.proc is None:
        return 0, None, None
    state = slot.proc.state
    undecided = state.phase in (ph.Phase.COMPUTING, ph.Phase.GATED) and state.generation == slot.joined
    pace = (state.version, state.full, state.watermark, state.every) if undecided else None
    return slot.joined if state.phase in STEPPING else 0, slot.proc.tensors, pace


def of_state(views: Iterable[View]) -> None:
    pairs = list(views)
    worlds = {generation for generation, _, _ in pairs if generation}
    require(len(worlds) <= 1, f"at most one world steps: generations {sorted(worlds)} do")
    paces = {pace for _, _, pace in pairs if pace}
    steps = {step for step, *_ in paces}
    require(len(paces) == len(steps), f"ranks in one step differ in when a full version is due: {paces}")
    held = {tensors for _, tensors, _ in pairs if tensors}
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


def at_apply(slot: Slot, proc: Proc) -> None:
    require(not arenas.is_writing(slot), f"step {proc.state.version} is applied while it is being sealed")
    require(proc.grads > 0, f"step {proc.state.version} is applied without complete gradients")
    assert proc.tensors is not None
    require(proc.tensors.version == proc.state.version, "a rank's memory is not at the version it believes")


def at_verdict(to: ph.RankState, passed: bool) -> None:
    require(
        to.phase is not ph.Phase.APPLYING or passed, "a step is applied though not every rank voted for it"
    )


def at_serve(proc: Proc, plan: ph.Plan) -> None:
    require(
        proc.tensors is not None and proc.tensors.version == plan.version,
        f"{proc.tensors} is served as version {plan.version}",
    )


def at_form(slot: Slot, proc: Proc) -> ph.Plan:
    """A rank is about to connect to a generation that resumes at its plan's version; returns the plan."""
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
    sealed = [kept.content for kept in slot.arena if kept.sealed]
    private = (*slot.private, *slot.full_private)
    above = [content for content in (*private, *sealed) if content.version > plan.version]
    require(not above, f"{at} with {above} still sealed above it")
    require(proc.tensors in private, f"{at} with {proc.tensors} not sealed: private {private}")
    fitting = (proc.tensors, Content(plan.version, DAMAGED))
    same = [content for content in sealed if content.version == plan.version and content not in fitting]
    require(not same, f"{at} as {proc.tensors}, and another is sealed: {same}")
    return plan


def at_formed(slots: Sequence[Slot], generation: int) -> None:
    """Some rank goes on in `generation`: all ranks that are in it have equal content."""
    contents = {
        slot.proc.tensors
        for slot in slots
        if slot.life is Life.ALIVE and slot.proc and slot.joined == slot.proc.state.generation == generation
    }
    require(len(contents) <= 1, f"generation {generation} starts with different contents: {contents}")


def at_plan(slots: Sequence[Slot], plan: Plan, sealing: bool, damages: bool, waived: bool = False) -> None:
    """`slots` as they are at the very moment of the decision, the dead whose death is not known included. `damages`:
    sealed versions may have been spoilt; `waived`: home and keepers of a rank have died."""
    floor = max(slot.floor for slot in slots)
    damages = damages or waived
    require(
        waived or plan.version >= floor,
        f"resuming at {plan.version}, behind {floor}, which every rank had sealed",
    )
    for rank, slot in enumerate(slots):
        proc = slot.proc
        if slot.life is not Life.ALIVE or proc is None:
            continue
        require(proc.state.generation <= plan.generation, "a plan for a generation that is over")
        if proc.tensors is None:
            require(rank in plan.replaced, f"rank {rank} holds nothing and is not replaced")
            continue
        held = proc.tensors.version
        if plan.version < held:
            ended = proc.state.closed or proc.state.phase is ph.Phase.LEFT
            require(not ended or damages, f"rank {rank} is past its last step, and is to make it again")
            require(sealing or waived, f"resuming at {plan.version} loses a step that rank {rank} applied")
            require(
                held == plan.version + 1 or damages,
                f"resuming at {plan.version} loses more than the step of rank {rank}",
            )
            require(rank in plan.replaced, f"rank {rank}, ahead with {proc.tensors}, is not replaced")
            continue
        behind = sealing or proc.state.communicates  # it could not follow alone
        require(
            rank not in plan.replaced or (plan.version > held and behind),
            f"rank {rank} holds {proc.tensors} and is replaced",
        )
        if plan.version > held and rank not in plan.replaced:
            require(
                plan.version == held + 1 and proc.state.phase is ph.Phase.HELD and proc.grads > 0,
                f"rank {rank} at {held} cannot be at {plan.version}",
            )
            voted = all(o.joined == slot.joined and o.voted >= held for o in slots)
            require(voted, f"rolling forward over step {held}, which not every rank voted for")


def at_release(slots: Sequence[Slot]) -> None:
    contents = {slot.proc.tensors for slot in slots if slot.life is Life.ALIVE and slot.proc}
    require(len(contents) <= 1, f"the job closes with different contents: {contents}")


def at_giving_up(slots: Sequence[Slot], damages: bool) -> None:
    if damages:  # what one fault spoils was perhaps to make up for another
        return
    holders = [r for r, s in enumerate(slots) if s.life is Life.ALIVE and s.proc and s.proc.tensors]
    require(not holders, f"no version was found, though ranks {holders} hold state")
    floor = max(slot.floor for slot in slots)
    require(floor < 0, f"no version was found, though every rank had sealed {floor}")


def at_start(slot: Slot) -> None:
    """The world starts from the beginning, perhaps not for the first time: at most one committed step is redone."""
    require(slot.floor <= 0, f"the world starts anew, though every rank had sealed version {slot.floor}")


def at_end(slots: Sequence[Slot], lives: Iterable[Life]) -> None:
    left = [life for life in (*[slot.life for slot in slots], *lives) if life is not Life.NONE]
    require(not left, f"the job has ended, and {len(left)} of its processes are not known to be gone")
