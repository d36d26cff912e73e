"""What ranks told each other before the first gate, on its way from node to node."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrec.errors import EnvironmentFault, ProtocolError
from flashrec.protocol import agents as ag
from flashrecd import preludes
from flashrecd.preludes import Preludes


def node(tmp_path: Path, name: str) -> tuple[Preludes, Path]:
    directory = tmp_path / name / "prelude"
    directory.mkdir(parents=True)
    return Preludes(directory.parent), directory


def test_what_is_added_is_told_once_and_arrives_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preludes, "PIECE_BYTES", 4)
    member, recorded = node(tmp_path, "member")
    leader, kept = node(tmp_path, "leader")

    def tell() -> int:
        pieces = list(member.news(3))
        for piece in pieces:
            leader.take(piece)
        return len(pieces)

    assert tell() == 0
    (recorded / "r3").write_bytes(b"seed is 5")
    (recorded / "r13").write_bytes(b"another's")
    assert tell() == 3
    (recorded / "first-r3").write_bytes(b"shape")
    with open(recorded / "r3", "ab") as file:
        file.write(b", and more")
    assert tell() == 5
    assert tell() == 0
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {
        "r3": b"seed is 5, and more",
        "first-r3": b"shape",
    }
    # To the node that the rank moves to; what it was told is no news from there.
    other, there = node(tmp_path, "other")
    for piece in leader.all(3):
        other.take(piece)
    assert (there / "r3").read_bytes() == b"seed is 5, and more"
    assert list(other.news(3)) == []
    assert oct((there / "r3").stat().st_mode & 0o777) == "0o600"


def test_a_rank_that_begins_anew_takes_the_place_of_its_past(tmp_path: Path) -> None:
    member, recorded = node(tmp_path, "member")
    leader, kept = node(tmp_path, "leader")
    for text in (b"a long record", b"short"):
        (recorded / "r3").write_bytes(text)
        member.begun_anew(3)
        for piece in member.news(3):
            leader.take(piece)
        assert (kept / "r3").read_bytes() == text


@pytest.mark.parametrize("name", ["../ledger", "r3/../../job", "", "r", "r-1", "first-r", "r3\n", "R3"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    leader, kept = node(tmp_path, "leader")
    with pytest.raises(ProtocolError, match="no prelude is called"):
        leader.take(ag.Prelude(name, 0, b"x"))
    assert list(kept.iterdir()) == []


def test_a_piece_without_what_comes_before_it_is_refused(tmp_path: Path) -> None:
    leader, _ = node(tmp_path, "leader")
    with pytest.raises(ProtocolError, match="before byte 7"):
        leader.take(ag.Prelude("r3", 7, b"x"))
    for offset in (-1, preludes.MAX_BYTES):
        with pytest.raises(ProtocolError):
            leader.take(ag.Prelude("r3", offset, b"x"))
    with pytest.raises(EnvironmentFault, match="cannot write"):
        Preludes(tmp_path / "nowhere").take(ag.Prelude("r3", 0, b"x"))
