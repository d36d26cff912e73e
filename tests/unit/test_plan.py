"""plan_recovery against a reference that tries every version, written from the definition."""

from hypothesis import given, settings
from hypothesis import strategies as st

from flashrecd.core import plan as planning
from flashrecd.core.plan import Inventory, Survivor, plan_recovery

VERSIONS = st.integers(0, 4)
PAST_ALL = 7
Sets = tuple[tuple[int, ...], ...]


@st.composite
def replica_sets(draw: st.DrawFn, world_size: int) -> Sets:
    """Partitions of the ranks, one for each part of the model: a rank may be in several sets, or in none."""
    found = set()
    for _ in range(draw(st.integers(0, 2))):
        ranks = draw(st.permutations(range(world_size)))
        cuts = sorted(draw(st.sets(st.integers(0, world_size), max_size=world_size)))
        found |= {
            tuple(sorted(ranks[a:b])) for a, b in zip([0, *cuts], [*cuts, world_size], strict=True) if a < b
        }
    dropped = draw(st.sets(st.sampled_from(sorted(found)), max_size=1)) if found else set()
    return tuple(sorted(found - dropped))


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    """Losses of any size, with versions close enough together that several are often possible."""
    world_size = draw(st.integers(1, 5))
    ranks = st.integers(0, world_size - 1)
    versions = st.lists(VERSIONS, max_size=3, unique=True).map(tuple)
    some = st.dictionaries(ranks, versions)
    newest = draw(VERSIONS)
    common = {rank: tuple(range(max(newest - 1, 0), newest + 1)) for rank in range(world_size)}
    mostly = some.map(lambda differing: {**common, **differing})
    kept = st.one_of(some, mostly)
    versions_held = st.one_of(st.none(), VERSIONS, st.just(newest))
    survivors = draw(st.dictionaries(ranks, st.builds(Survivor, versions_held, st.booleans())))
    return Inventory(world_size, survivors, draw(kept), draw(kept), draw(replica_sets(world_size)))


# --- the definition ---------------------------------------------------------------------------------------


def is_live(inventory: Inventory, rank: int, version: int) -> bool:
    """A survivor can be where it is, and one step further if it voted and somebody holds what comes of it."""
    me = inventory.survivors.get(rank)
    if me is None or me.version is None:
        return False
    somebody_is_there = any(other.version == version for other in inventory.survivors.values())
    return me.version == version or (me.version == version - 1 and me.can_advance and somebody_is_there)


def in_arenas(inventory: Inventory, members: tuple[int, ...], version: int) -> bool:
    return all(version in inventory.sealed.get(member, ()) for member in members)


def in_memory(inventory: Inventory, members: tuple[int, ...], version: int) -> bool:
    return any(is_live(inventory, member, version) for member in members)


def has_tensors(inventory: Inventory, rank: int, version: int) -> bool:
    return is_live(inventory, rank, version) or all(
        in_arenas(inventory, members, version) or in_memory(inventory, members, version)
        for members in inventory.sets
        if rank in members
    )


def has_private(inventory: Inventory, rank: int, version: int) -> bool:
    return is_live(inventory, rank, version) or version in inventory.private.get(rank, ())


def is_possible(inventory: Inventory, version: int) -> bool:
    return all(
        has_tensors(inventory, rank, version) and has_private(inventory, rank, version)
        for rank in range(inventory.world_size)
    )


# --- properties -------------------------------------------------------------------------------------------


@settings(max_examples=400)
@given(inventories(), st.integers(2, 9))
def test_the_greatest_possible_version_is_found_if_there_is_one(
    inventory: Inventory, generation: int
) -> None:
    plan, reason = plan_recovery(inventory, generation)
    possible = [version for version in range(PAST_ALL) if is_possible(inventory, version)]
    assert reason
    if not possible:
        assert plan is None
        return
    assert plan is not None
    assert (plan.generation, plan.version) == (generation, max(possible))
    assert reason.startswith(f"version {plan.version}: ")


@settings(max_examples=400)
@given(inventories())
def test_every_set_that_somebody_needs_has_a_source_and_no_source_lacks_it(inventory: Inventory) -> None:
    plan, _ = plan_recovery(inventory, 2)
    if plan is None:
        return
    served = dict(plan.served)
    assert len(served) == len(plan.served)
    for members in inventory.sets:
        needed = any(rank in plan.replaced for rank in members)
        if not needed or in_arenas(inventory, members, plan.version):
            assert members not in served
            continue
        at = [rank for rank in members if is_live(inventory, rank, plan.version)]
        assert list(served.pop(members)) == at
        assert at
    assert not served


@settings(max_examples=400)
@given(inventories())
def test_exactly_the_ranks_that_are_not_at_the_version_install_it(inventory: Inventory) -> None:
    plan, _ = plan_recovery(inventory, 2)
    if plan is not None:
        ranks = range(inventory.world_size)
        assert list(plan.replaced) == [r for r in ranks if not is_live(inventory, r, plan.version)]
        assert all(plan.version in inventory.private[rank] for rank in plan.replaced)


@settings(max_examples=400)
@given(inventories())
def test_the_reason_says_what_each_greater_version_lacked(inventory: Inventory) -> None:
    plan, reason = plan_recovery(inventory, 2)
    said = dict(part.split(": ", 1) for part in reason.split("; ") if ": no source for " in part)
    for version in range(plan.version + 1 if plan else 0, PAST_ALL):
        begun = any(is_live(inventory, rank, version) for rank in inventory.survivors) or any(
            version in versions for versions in inventory.sealed.values()
        )
        if begun:
            lack = said.pop(f"version {version}")
            ranks = range(inventory.world_size)
            for half, has in (("tensors", has_tensors), ("private state", has_private)):
                without = [rank for rank in ranks if not has(inventory, rank, version)]
                assert (f"the {half} of ranks {without}" in lack) == bool(without)
    assert bool(inventory.sets) <= (not said)


# --- situations -------------------------------------------------------------------------------------------

ALL_OF_THREE = ((0, 1, 2),)
UNIQUE_TO_THREE = ((0,), (1,), (2,))
SEALED = dict.fromkeys(range(3), (4, 5))
PRIVATE = dict.fromkeys(range(3), (4, 5, 6))


def test_all_votes_are_not_a_pass() -> None:
    voted = {0: Survivor(4, True), 1: Survivor(4, True)}
    plan, _ = plan_recovery(Inventory(3, voted, {2: (4, 5)}, {}, ALL_OF_THREE), 2)
    assert plan is not None
    assert plan.version == 4


def test_whoever_voted_follows_the_one_that_saw_the_gate_pass() -> None:
    survivors = {0: Survivor(5, False), 1: Survivor(4, True)}
    plan, reason = plan_recovery(Inventory(3, survivors, {2: (4, 5)}, {}, ALL_OF_THREE), 7)
    assert plan is not None
    assert (plan.version, plan.replaced, plan.served) == (5, (2,), (((0, 1, 2), (0, 1)),))
    assert "held by [0], [1] voted and roll forward" in reason
    assert "[2] install it from the memory of [0, 1]" in reason


def test_a_version_whose_private_state_the_lost_rank_never_sealed_is_impossible() -> None:
    plan, reason = plan_recovery(Inventory(2, {0: Survivor(5, False)}, {1: (3, 4)}, {}, ((0, 1),)), 2)
    assert plan is None
    assert reason == "version 5: no source for the private state of ranks [1]"


def test_nobody_left_and_nothing_sealed() -> None:
    plan, reason = plan_recovery(Inventory(2, {}, {0: (1, 2), 1: (1, 2)}, {}, ((0, 1),)), 2)
    assert plan is None
    assert reason == "no rank is left that holds the tensor state, and no arena does"


def test_survivors_that_are_ahead_go_back_to_what_the_lost_rank_had_sealed() -> None:
    survivors = {0: Survivor(6, False), 2: Survivor(6, False)}
    plan, reason = plan_recovery(Inventory(3, survivors, PRIVATE, SEALED, UNIQUE_TO_THREE), 2)
    assert plan is not None
    assert (plan.version, plan.replaced, plan.served) == (5, (0, 1, 2), ())
    assert "version 5: [0, 1, 2] install it from arenas" in reason
    assert "version 6: no source for the tensors of ranks [1]" in reason


def test_when_all_are_dead_everything_comes_from_arenas() -> None:
    plan, _ = plan_recovery(Inventory(3, {}, PRIVATE, SEALED, UNIQUE_TO_THREE), 2)
    assert plan is not None
    assert (plan.version, plan.replaced, plan.served) == (5, (0, 1, 2), ())


def test_a_torn_rank_holds_nothing_and_may_serve_nobody() -> None:
    survivors = {0: Survivor(None, False), 1: Survivor(6, False), 2: Survivor(6, False)}
    inventory = Inventory(3, survivors, PRIVATE, {}, ((0, 1), (2,)))
    plan, _ = plan_recovery(inventory, 2)
    assert plan is not None
    assert (plan.version, plan.replaced, plan.served) == (6, (0,), (((0, 1), (1,)),))


def test_one_replica_is_enough_for_its_set_and_arenas_for_the_other() -> None:
    survivors = {0: Survivor(5, False), 2: Survivor(6, False)}
    inventory = Inventory(4, survivors, dict.fromkeys(range(4), (5, 6)), {2: (5,), 3: (5,)}, ((0, 1), (2, 3)))
    plan, _ = plan_recovery(inventory, 2)
    assert plan is not None
    assert (plan.version, plan.replaced, plan.served) == (5, (1, 2, 3), (((0, 1), (0,)),))


def test_a_set_with_one_arena_behind_is_no_source() -> None:
    inventory = Inventory(2, {}, dict.fromkeys(range(2), (4, 5)), {0: (4, 5), 1: (4,)}, ((0, 1),))
    plan, reason = plan_recovery(inventory, 2)
    assert plan is not None
    assert plan.version == 4
    assert "version 5: no source for the tensors of ranks [0, 1]" in reason


def test_the_reason_stays_short_in_a_large_job() -> None:
    size = 5000
    survivors = {rank: Survivor(3, False) for rank in range(1, size)}
    plan, reason = plan_recovery(Inventory(size, survivors, {0: (3,)}, {}, (tuple(range(size)),)), 2)
    assert plan is not None
    assert len(reason) < 200
    assert f"[1, 2, 3, 4, 5, 6, 7, 8 and {size - 1 - planning.MAX_NAMED} more]" in reason
