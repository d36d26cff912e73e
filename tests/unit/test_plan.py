"""plan_recovery against a reference that tries every version there could be."""

from hypothesis import given
from hypothesis import strategies as st

from flashrecd.core.plan import (
    Inventory,
    Survivor,
    find_sources,
    plan_recovery,
    reachable_versions,
    required_shards,
)

VERSIONS = st.integers(0, 4)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    world_size = draw(st.integers(1, 5))
    ranks = st.integers(0, world_size - 1)
    survivors = draw(st.dictionaries(ranks, st.builds(Survivor, VERSIONS, st.booleans())))
    sealed = draw(st.dictionaries(ranks, st.lists(VERSIONS, max_size=3, unique=True).map(tuple)))
    return Inventory(world_size, survivors, sealed)


def can_be_at(inventory: Inventory, rank: int, version: int) -> bool:
    """A survivor can be where it is; one step further only if it voted and somebody saw that gate pass."""
    me = inventory.survivors[rank]
    seen = any(other.version == me.version + 1 for other in inventory.survivors.values())
    newest = max(other.version for other in inventory.survivors.values())
    return version == me.version or (
        version == me.version + 1 and me.can_advance and seen and newest == version
    )


def possible(inventory: Inventory, version: int) -> bool:
    """By the definition: every shard of every rank has a source at `version`."""
    if not any(can_be_at(inventory, rank, version) for rank in inventory.survivors):
        return False
    return all(
        can_be_at(inventory, rank, version)
        if rank in inventory.survivors
        else version in inventory.sealed.get(rank, ())
        for rank in range(inventory.world_size)
    )


@given(inventories(), st.integers(2, 9))
def test_the_greatest_possible_version_is_found_if_there_is_one(
    inventory: Inventory, generation: int
) -> None:
    plan, reason = plan_recovery(inventory, generation)
    versions = [version for version in range(7) if possible(inventory, version)]
    assert reason
    if not versions:
        assert plan is None
        return
    assert plan is not None
    assert plan.version == max(versions)
    assert plan.generation == generation
    assert str(plan.version) in reason


@given(inventories())
def test_every_shard_has_sources_and_no_source_lacks_it(inventory: Inventory) -> None:
    plan, _ = plan_recovery(inventory, 2)
    if plan is None:
        return
    assert set(plan.sources) == set(required_shards(inventory))
    assert set(plan.sources) == {"tensors", *(f"private/{rank}" for rank in range(inventory.world_size))}
    assert plan.sources["tensors"]
    for source in plan.sources["tensors"]:
        assert can_be_at(inventory, source, plan.version)
    for rank in range(inventory.world_size):
        assert plan.sources[f"private/{rank}"] == (rank,)
        if rank not in inventory.survivors:
            assert plan.version in inventory.sealed[rank]


@given(inventories())
def test_exactly_the_lost_are_replaced_and_every_survivor_is_a_source(inventory: Inventory) -> None:
    plan, _ = plan_recovery(inventory, 2)
    if plan is not None:
        assert set(plan.replaced) == set(range(inventory.world_size)) - set(inventory.survivors)
        assert set(plan.sources["tensors"]) == set(inventory.survivors)


@given(inventories())
def test_without_a_plan_the_reason_names_what_is_missing(inventory: Inventory) -> None:
    plan, reason = plan_recovery(inventory, 2)
    if plan is not None:
        return
    if not inventory.survivors:
        assert "no rank is left" in reason
        return
    for version in {v for versions in reachable_versions(inventory).values() for v in versions}:
        for shard, sources in find_sources(inventory, version).items():
            assert sources or shard in reason
        assert f"version {version}" in reason


def test_all_votes_are_not_a_pass() -> None:
    voted = {0: Survivor(4, True), 1: Survivor(4, True)}
    plan, _ = plan_recovery(Inventory(3, voted, {2: (4, 5)}), 2)
    assert plan is not None
    assert plan.version == 4


def test_whoever_voted_follows_the_one_that_saw_the_gate_pass() -> None:
    plan, reason = plan_recovery(Inventory(3, {0: Survivor(5, False), 1: Survivor(4, True)}, {2: (4, 5)}), 7)
    assert plan is not None
    assert (plan.version, plan.replaced, plan.sources["tensors"]) == (5, (2,), (0, 1))
    assert "[1] voted and roll forward" in reason


def test_a_version_that_the_lost_rank_never_sealed_is_impossible() -> None:
    plan, reason = plan_recovery(Inventory(2, {0: Survivor(5, False)}, {1: (3, 4)}), 2)
    assert plan is None
    assert reason == "version 5: no source for private/1"


def test_nobody_left() -> None:
    plan, reason = plan_recovery(Inventory(2, {}, {0: (1, 2), 1: (1, 2)}), 2)
    assert plan is None
    assert reason == "no rank is left that holds the tensor state"
