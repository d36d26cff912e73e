"""Where replicas are kept, against every other way to place them."""

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashrecd.core.placement import NodeView, fewest, place

Keepers = tuple[int, ...]


# --- the definition ---------------------------------------------------------------------------------------


def domain_of(nodes: Sequence[NodeView], node: int) -> object:
    domains = {view.node: view.domain for view in nodes}
    return domains.get(node) or node


def right_sets(home: int, nodes: Sequence[NodeView], replicas: int) -> list[frozenset[int]]:
    """Every set of keepers than which none is better: more of them, then fewer beside the owner, then more domains."""
    others = [view.node for view in nodes if view.node != home]
    own = domain_of(nodes, home)

    def merit(keepers: Keepers) -> tuple[int, int, int]:
        foreign = [domain_of(nodes, node) for node in keepers if domain_of(nodes, node) != own]
        return len(keepers), len(foreign), len(set(foreign))

    every = [keepers for count in range(replicas + 1) for keepers in itertools.combinations(others, count)]
    best = max(merit(keepers) for keepers in every)
    return [frozenset(keepers) for keepers in every if merit(keepers) == best]


def every_placement(
    homes: Sequence[int], nodes: Sequence[NodeView], replicas: int, before: Sequence[Keepers]
) -> Iterator[tuple[frozenset[int], ...]]:
    """Every right placement that moves as little as any."""
    choices = []
    for home, kept in zip(homes, before, strict=True):
        sets = right_sets(home, nodes, replicas)
        most = max(len(one & set(kept)) for one in sets)
        choices.append([one for one in sets if len(one & set(kept)) == most])
    return itertools.product(*choices)


def greatest_load(placement: Sequence[frozenset[int] | Keepers], sizes: Sequence[int]) -> int:
    load: dict[int, int] = {}
    for keepers, size in zip(placement, sizes, strict=True):
        for node in keepers:
            load[node] = load.get(node, 0) + size
    return max(load.values(), default=0)


# --- worlds -----------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn, num_ranks: int = 4) -> tuple[list[int], list[NodeView], int]:
    num_nodes = draw(st.integers(1, 5))
    domains = draw(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=num_nodes, max_size=num_nodes))
    nodes = [NodeView(2 * i, domain) for i, domain in enumerate(domains)]
    homes = draw(st.lists(st.sampled_from([view.node for view in nodes]), min_size=1, max_size=num_ranks))
    return sorted(homes), nodes, draw(st.integers(0, 3))


@st.composite
def changed_worlds(draw: st.DrawFn) -> tuple[list[int], list[NodeView], int, list[Keepers]]:
    """Kept before by nodes that may be gone, or were right in another membership."""
    homes, nodes, replicas = draw(worlds())
    anywhere = st.lists(st.integers(0, 11), max_size=3, unique=True).map(tuple)
    return homes, nodes, replicas, [draw(anywhere) for _ in homes]


@settings(max_examples=150, deadline=None)
@given(changed_worlds())
def test_every_rank_has_keepers_than_which_there_are_no_better(
    world: tuple[list[int], list[NodeView], int, list[Keepers]],
) -> None:
    homes, nodes, replicas, before = world
    for home, keepers in zip(homes, place(homes, nodes, replicas, before), strict=True):
        assert len(set(keepers)) == len(keepers)
        assert frozenset(keepers) in right_sets(home, nodes, replicas)


@settings(max_examples=150, deadline=None)
@given(changed_worlds())
def test_no_replica_moves_that_could_stay(
    world: tuple[list[int], list[NodeView], int, list[Keepers]],
) -> None:
    homes, nodes, replicas, before = world
    for home, kept, keepers in zip(homes, before, place(homes, nodes, replicas, before), strict=True):
        most = max(len(one & set(kept)) for one in right_sets(home, nodes, replicas))
        assert len(set(keepers) & set(kept)) == most


@settings(max_examples=150, deadline=None)
@given(worlds())
@example(([0, 0, 6, 6], [NodeView(0), NodeView(2), NodeView(4), NodeView(6)], 1))  # two have to make room
def test_the_load_of_a_new_job_is_as_even_as_it_can_be(world: tuple[list[int], list[NodeView], int]) -> None:
    homes, nodes, replicas = world
    ones, nobody = [1] * len(homes), [()] * len(homes)
    least = min(greatest_load(other, ones) for other in every_placement(homes, nodes, replicas, nobody))
    assert greatest_load(place(homes, nodes, replicas), ones) == least


@settings(max_examples=150, deadline=None)
@given(worlds(), st.data())
def test_after_a_loss_the_load_is_even_but_for_one_replica(
    world: tuple[list[int], list[NodeView], int], data: st.DataObject
) -> None:
    """What stays may stand where a better placement would need what moves."""
    homes, nodes, replicas = world
    before = place(homes, nodes, replicas)
    lost = data.draw(st.sampled_from(nodes))
    left = [view for view in nodes if view != lost]
    moved_to = st.sampled_from(left) if left else st.just(lost)
    homes = [data.draw(moved_to).node if home == lost.node else home for home in homes]
    ones = [1] * len(homes)
    least = min(greatest_load(other, ones) for other in every_placement(homes, left, replicas, before))
    assert greatest_load(place(homes, left, replicas, before), ones) <= least + 1


@settings(max_examples=150, deadline=None)
@given(worlds(), st.data())
def test_large_replicas_are_spread_by_their_size(
    world: tuple[list[int], list[NodeView], int], data: st.DataObject
) -> None:
    homes, nodes, replicas = world
    sizes = [data.draw(st.integers(1, 100)) for _ in homes]
    nobody = [()] * len(homes)
    least = min(greatest_load(other, sizes) for other in every_placement(homes, nodes, replicas, nobody))
    assert greatest_load(place(homes, nodes, replicas, sizes=sizes), sizes) <= least + max(sizes)


@given(changed_worlds())
def test_it_says_the_same_again(world: tuple[list[int], list[NodeView], int, list[Keepers]]) -> None:
    homes, nodes, replicas, before = world
    first = place(homes, nodes, replicas, before)
    assert place(homes, nodes, replicas, before) == first
    assert [set(keepers) for keepers in place(homes, nodes, replicas, first)] == [set(k) for k in first]


@given(worlds())
def test_how_many_replicas_every_rank_can_have(world: tuple[list[int], list[NodeView], int]) -> None:
    homes, nodes, replicas = world
    assert fewest(homes, nodes, replicas) == min(len(keepers) for keepers in place(homes, nodes, replicas))


# --- situations -------------------------------------------------------------------------------------------


def test_a_ring_of_equal_nodes() -> None:
    nodes = [NodeView(node) for node in range(3)]
    assert place([0, 0, 1, 1, 2, 2], nodes, 1) == ((1,), (1,), (2,), (2,), (0,), (0,))


def test_the_ranks_of_one_node_have_few_keepers_where_the_load_allows_it() -> None:
    """Else nearly every loss of a second node before the replicas are made again would take some rank's last copy."""
    num_nodes, per_node = 16, 8
    homes = [rank // per_node for rank in range(num_nodes * per_node)]
    placed = place(homes, [NodeView(node) for node in range(num_nodes)], 1)
    assert (
        len({(home, keeper) for home, keepers in zip(homes, placed, strict=True) for keeper in keepers}) == 16
    )
    assert greatest_load(placed, [1] * len(homes)) == per_node


def test_racks_are_left_for_other_racks() -> None:
    nodes = [NodeView(0, "a"), NodeView(1, "a"), NodeView(2, "b"), NodeView(3, "b"), NodeView(4, "c")]
    for home, (first, second) in zip([0, 2, 4], place([0, 2, 4], nodes, 2), strict=True):
        racks = {domain_of(nodes, node) for node in (home, first, second)}
        assert racks == {"a", "b", "c"}


def test_one_rack_is_better_than_nothing() -> None:
    assert place([0, 1], [NodeView(0, "a"), NodeView(1, "a")], 2) == ((1,), (0,))


def test_a_node_that_comes_back_moves_nothing() -> None:
    before = ((1,), (0,), (0,))
    assert place([0, 1, 1], [NodeView(0), NodeView(1), NodeView(7)], 1, before) == before


def test_but_is_used_where_a_replica_was_beside_its_owner() -> None:
    nodes = [NodeView(0, "a"), NodeView(1, "a"), NodeView(2, "b")]
    assert place([0], nodes, 1, [(1,)]) == ((2,),)


def test_only_the_replicas_of_a_lost_node_move() -> None:
    homes = [0, 1, 2, 3]
    before = place(homes, [NodeView(node) for node in range(5)], 2)
    after = place([0, 1, 4, 3], [NodeView(node) for node in (0, 1, 3, 4)], 2, before)
    for old, new in zip(before, after, strict=True):
        assert set(old) - {2, 4} <= set(new)
