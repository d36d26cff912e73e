"""Layouts: cut evenly, each byte once; compared by name; refused when malformed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import ProtocolError
from flashrec.state.layout import CUT_ALIGNMENT_BYTES, Layout, Piece, TensorSpec

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
