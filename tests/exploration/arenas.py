"""The arenas: two slots of tensors per rank, filled by a thread of its process; in the sealed regime with every
version, in the live one with full versions.

When exactly the thread seals a version shows only in what is left where the process dies, parks or discards;
so the reduced search (see explore.py) lets the thread's last moment fall there, and nowhere else.
"""

from tests.exploration.model import DAMAGED, Config, Content, Kept, Life, Move, Regime, Slot, Violation

Arena = tuple[Kept, ...]


def begin(slot: Slot, tensors: Content, config: Config) -> Slot:
    """Begin to copy `tensors` beside the newest sealed version below theirs; nothing to do for a sealed one."""
    if holds(slot.arena, tensors.version):
        return slot
    older = [kept for kept in slot.arena if kept.sealed and kept.content.version < tensors.version]
    stays = older[-(config.arena_slots - 1) :] if config.arena_slots > 1 else []
    for lost in slot.arena:
        if lost.sealed and lost not in stays and lost.content.version >= slot.floor >= 0:
            raise Violation(f"{lost.content} is overwritten, at or above {slot.floor}, which is to be kept")
    generation = slot.proc.state.generation if config.several and slot.proc else 0
    return slot._replace(arena=(*stays, Kept(tensors, False, generation)))


def finish(slot: Slot, version: int) -> Slot:
    """The copy is complete: what is sealed must be what the rank holds, if nobody has damaged it since."""
    assert slot.proc is not None
    slot = _completed(slot)
    if not any(
        kept.content in (slot.proc.tensors, Content(version, DAMAGED)) and kept.sealed for kept in slot.arena
    ):
        raise Violation(f"version {version} was to be sealed of {slot.proc.tensors}: arena {slot.arena}")
    return slot


def newest(arena: Arena) -> int:
    return max((kept.content.version for kept in arena if kept.sealed), default=-1)


def holds(arena: Arena, version: int) -> bool:
    return any(kept.sealed and kept.content.version == version for kept in arena)


def is_safe(slot: Slot, version: int, config: Config) -> bool:
    """Once the gate of `version` has passed: whether every rank has it. While the regime changes a replacement may not
    know yet that steps communicate, and seals nothing until the gate has told it: it takes a second fault to lose
    by that."""
    if config.regime is Regime.SWITCHING and config.num_faults > 1:
        return holds(slot.arena, version) and holds(slot.arena, version - 1)
    return config.regime is not Regime.LIVE and not config.damages


def given_up(arena: Arena) -> Arena:
    """What is not sealed is nothing, once nobody copies any more."""
    return tuple([kept for kept in arena if kept.sealed])


def discarded(arena: Arena, version: int, config: Config) -> Arena:
    if not config.discards_tensors:
        return given_up(arena)
    return tuple([kept for kept in arena if kept.sealed and kept.content.version <= version])


def is_writing(slot: Slot) -> bool:
    return any(not kept.sealed for kept in slot.arena)


def _completed(slot: Slot) -> Slot:
    return slot._replace(arena=tuple([kept._replace(sealed=True) for kept in slot.arena]))


def resolved(slot: Slot, config: Config) -> tuple[Slot, ...]:
    """The slot as it is; and, in the reduced search, as it is when the thread has just come to its end."""
    return (slot, _completed(slot)) if config.reduced and is_writing(slot) else (slot,)


def thread_moves(slot: Slot, config: Config) -> tuple[Move, ...]:
    if config.reduced or slot.life is not Life.ALIVE or not is_writing(slot):
        return ()
    return (Move("its thread seals", _completed(slot), lasting=True),)


def damages(slot: Slot, config: Config) -> list[Slot]:
    """What a fault can make of an arena: one of its versions is there, and no longer what was sealed."""
    if not config.damages:
        return []
    intact = [kept for kept in slot.arena if kept.sealed and kept.content.lineage != DAMAGED]
    return [
        slot._replace(
            arena=tuple(
                [
                    k._replace(content=k.content._replace(lineage=DAMAGED)) if k == kept else k
                    for k in slot.arena
                ]
            )
        )
        for kept in intact
    ]
