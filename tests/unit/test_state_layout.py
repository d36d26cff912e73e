"""Layouts: cut evenly, each byte once; compared by name; refused when malformed."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import ProtocolError
from flashrec.state.layout import CUT_ALIGNMENT_BYTES, Layout, Piece, RankLayout, ReplicaSet, TensorSpec

sizes = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 100_000)), max_size=12)


def layout_of(num_elements: list[int]) -> Layout:
    return Layout([TensorSpec(f"t{i}", "float32", (n,), 4 * n) for i, n in enumerate(num_elements)])


@given(sizes, st.integers(1, 9))
def test_every_byte_is_in_exactly_one_piece_and_parts_are_even(
    num_elements: list[int], num_parts: int
) -> None:
    layout = layout_of(num_elements)
    parts = layout.split(num_parts)
    assert len(parts) == num_parts
    seen = [bytearray(spec.size_bytes) for spec in layout]
    for piece in (piece for part in parts for piece in part):
        assert piece.size_bytes > 0
        assert piece.offset % CUT_ALIGNMENT_BYTES == 0
        for position in (piece.offset, piece.offset + piece.size_bytes - 1):
            assert position < layout.specs[piece.tensor_index].size_bytes
        view = seen[piece.tensor_index]
        view[piece.offset : piece.offset + piece.size_bytes] = bytes(
            byte + 1 for byte in view[piece.offset : piece.offset + piece.size_bytes]
        )
    assert all(set(view) <= {1} for view in seen)
    part_bytes = [sum(piece.size_bytes for piece in part) for part in parts]
    assert max(part_bytes) <= layout.total_bytes / num_parts + CUT_ALIGNMENT_BYTES
    assert layout.missing([piece for part in parts for piece in part]) is None


def test_a_large_tensor_is_cut_among_parts() -> None:
    layout = layout_of([1_000_000, 10])
    parts = layout.split(4)
    assert [part[0].tensor_index for part in parts] == [0, 0, 0, 0]


@given(sizes.filter(any), st.integers(1, 5), st.data())
def test_a_missing_or_doubled_piece_is_named(
    num_elements: list[int], num_parts: int, draw: st.DataObject
) -> None:
    layout = layout_of(num_elements)
    pieces = [piece for part in layout.split(num_parts) for piece in part]
    chosen = draw.draw(st.sampled_from(pieces))
    name = repr(layout.specs[chosen.tensor_index].name)
    lost = [piece for piece in pieces if piece is not chosen]
    assert name in (layout.missing(lost) or "")
    assert name in (layout.missing([*pieces, chosen]) or "")
    assert "does not exist" in (layout.missing([*pieces, Piece(len(layout), 0, 1)]) or "")


def test_difference_names_the_first_tensor_that_differs() -> None:
    one = Layout([TensorSpec("a", "float32", (2,), 8), TensorSpec("b", "float32", (2,), 8)])
    other = Layout([TensorSpec("a", "float32", (2,), 8), TensorSpec("b", "bfloat16", (2, 2), 8)])
    assert one.difference(one) is None
    assert one.digest != other.digest
    difference = one.difference(other) or ""
    assert "'b'" in difference
    assert "bfloat16" in difference
    assert "[2, 2]" in difference
    shorter = Layout(one.specs[:1])
    assert "'b'" in (one.difference(shorter) or "")
    assert "absent" in (shorter.difference(one) or "")


@given(sizes)
def test_wire_round_trip(num_elements: list[int]) -> None:
    layout = layout_of(num_elements)
    again = Layout.from_bytes(layout.to_bytes())
    assert again == layout
    assert again.digest == layout.digest
    assert again.total_bytes == layout.total_bytes


def test_the_digest_depends_on_order() -> None:
    specs = [TensorSpec("a", "int8", (1,), 1), TensorSpec("b", "int8", (1,), 1)]
    assert Layout(specs).digest != Layout(specs[::-1]).digest


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    try:
        Layout.from_bytes(data)
    except ProtocolError:
        return


@pytest.mark.parametrize(
    "wire",
    [
        None,
        [["a", "float32", [2], 8], ["a", "float32", [2], 8]],
        [["a", "float32", [2], 7]],
        [["a", "float32", [0], 8]],
        [["a", "float32", [2], 0]],
        [["a", "float32", [-2], 8]],
        [["a", "float32", [True], 4]],
        [["a", "float 32", [2], 8]],
        [[1, "float32", [2], 8]],
        [["a", "float32", 2, 8]],
        [["a", "float32", [1 << 62, 4], 1 << 64]],
    ],
)
def test_malformed_layouts_are_refused(wire: object) -> None:
    with pytest.raises(ProtocolError):
        Layout.from_wire(wire)


@pytest.mark.parametrize(
    "wire", [None, [1, 2], [0, -1, 5], [0, 0, 0], [0, 0, 1.0], [-1, 0, 1], [0, 0, 1 << 63]]
)
def test_malformed_pieces_are_refused(wire: object) -> None:
    with pytest.raises(ProtocolError):
        Piece.from_wire(wire)


def test_a_difference_says_whose_is_whose() -> None:
    short, long = layout_of([1, 2]), layout_of([1, 2, 3])
    names = ("rank 3", "rank 0")
    assert short.difference(long, names) == f"tensor 2 is {long.specs[2]} in rank 0, absent in rank 3"
    assert long.difference(short, names) == f"tensor 2 is {long.specs[2]} in rank 3, absent in rank 0"
    other = layout_of([1, 5])
    difference = short.difference(other, names)
    assert difference == f"tensor 1 is {short.specs[1]} in rank 3, {other.specs[1]} in rank 0"
    assert short.difference(layout_of([1, 2]), names) is None


# --- replica sets

ONE, OTHER = layout_of([3]), layout_of([5, 7])


def ranks_of_hsdp() -> list[RankLayout]:
    """Two replicas of two shards: ranks 0 and 2 hold one shard, 1 and 3 the other; a tensor for each rank."""
    sets = [ReplicaSet((0, 2), ONE), ReplicaSet((1, 3), OTHER)]
    alone = [ReplicaSet((rank,), layout_of([1])) for rank in range(4)]
    return [
        RankLayout(rank, tuple(sorted([alone[rank], sets[rank % 2]], key=lambda one: one.ranks)))
        for rank in range(4)
    ]


@given(sizes.filter(len), st.integers(1, 9))
def test_members_seal_every_byte_of_a_set_once(num_elements: list[int], num_ranks: int) -> None:
    layout = layout_of(num_elements)
    ranks = tuple(range(3, 3 + 2 * num_ranks, 2))
    shared = ReplicaSet(ranks, layout)
    pieces = [piece for rank in ranks for piece in shared.part(rank)]
    assert layout.missing(pieces) is None
    owned = [RankLayout(rank, (shared,)).owned_bytes for rank in ranks]
    assert sum(owned) == layout.total_bytes
    with pytest.raises(ValueError, match="not in"):
        shared.part(4)


def test_a_part_may_be_changed_by_who_asked_for_it() -> None:
    shared = ReplicaSet((0, 1), ONE)
    shared.part(0).clear()
    assert shared.part(0)


def same_everywhere(layout: Layout, rank: int, world_size: int) -> RankLayout:
    """One replica set of all ranks."""
    return RankLayout(rank, (ReplicaSet(tuple(range(world_size)), layout),))


def test_the_digest_of_a_rank_layout_leaves_out_the_rank() -> None:
    layout = layout_of([1_000, 3])
    ranks = [same_everywhere(layout, rank, 3) for rank in range(3)]
    assert len({one.digest for one in ranks}) == 1
    assert ranks[0] != ranks[1]
    assert ranks[0].total_bytes == layout.total_bytes == sum(one.owned_bytes for one in ranks)
    assert same_everywhere(layout, 0, 2).digest != ranks[0].digest
    assert same_everywhere(layout_of([1_000, 4]), 0, 3).digest != ranks[0].digest


def test_a_rank_without_tensors_has_no_sets() -> None:
    empty = RankLayout(0, ())
    assert (empty.sets, empty.total_bytes, empty.owned_bytes) == ((), 0, 0)
    assert RankLayout.from_bytes(empty.to_bytes()) == empty


def test_ranks_of_one_job_agree() -> None:
    ranks = ranks_of_hsdp()
    for one in ranks:
        for other in ranks:
            assert one.disagreement(other) is None


def test_a_set_that_the_other_does_not_claim_is_said_by_both_sides() -> None:
    claims = RankLayout(0, (ReplicaSet((0, 2), ONE),))
    alone = RankLayout(2, (ReplicaSet((2,), ONE),))
    spec = ONE.specs[0]
    words = f"rank 0 holds {spec} alike on ranks [0, 2]; rank 2 holds {spec} alone on rank 2"
    assert claims.disagreement(alone) == alone.disagreement(claims) == words
    nothing = RankLayout(2, ())
    assert (claims.disagreement(nothing) or "").endswith("rank 2 holds no tensor 't0'")
    assert claims.disagreement(RankLayout(1, ())) is None


def test_a_set_with_another_layout_is_named() -> None:
    one, other = (
        RankLayout(rank, (ReplicaSet((0, 2), layout_of([size])),)) for rank, size in ((0, 3), (2, 4))
    )
    difference = one.disagreement(other) or ""
    assert "alike on ranks [0, 2]" in difference
    assert "shape [3]) in rank 0" in difference
    assert "shape [4]) in rank 2" in difference


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_layout_round_trips(rank: int) -> None:
    one = ranks_of_hsdp()[rank]
    again = RankLayout.from_bytes(one.to_bytes())
    assert again == one
    assert (again.digest, again.owned_bytes) == (one.digest, one.owned_bytes)


WIRE = [["t0", "float32", [3], 12]]


@pytest.mark.parametrize(
    "wire",
    [
        None,
        [0],
        [0, {}],
        [0, [[[1], WIRE]]],
        ["0", [[[0], WIRE]]],
        [True, [[[1], WIRE]]],
        [0, [[[1, 0], WIRE]]],
        [0, [[[0, 0], WIRE]]],
        [0, [[[], WIRE]]],
        [0, [[[-1, 0], WIRE]]],
        [-1, []],
        [0, [[[0, 1.0], WIRE]]],
        [0, [[[0], []]]],
        [0, [[[0], WIRE, 1]]],
        [0, [[[0], WIRE], [[0], WIRE]]],
        [0, [[[0, 1], WIRE], [[0], WIRE]]],
        [0, [[[0], [["t0", "float32", [3], 11]]]]],
        [1 << 30, []],
    ],
)
def test_malformed_rank_layouts_are_refused(wire: object) -> None:
    with pytest.raises(ProtocolError):
        RankLayout.from_bytes(msgpack.packb(wire))


@given(st.binary(max_size=100))
def test_garbage_is_no_rank_layout(data: bytes) -> None:
    try:
        RankLayout.from_bytes(data)
    except ProtocolError:
        return
