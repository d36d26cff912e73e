"""Canonical keys and the profile file."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.events import COLLECTIVES, Communication, Compute, Event, parse
from flashrec.sim.profile import MissingEvents, Profile, ProfileOr, Sample

sizes = st.integers(1, 1 << 40)
events = st.one_of(
    st.builds(
        Compute,
        operator=st.just("gemm"),
        shape=st.tuples(sizes, sizes, sizes, sizes),
        dtype=st.sampled_from(["bf16", "fp32"]),
        device=st.sampled_from(["A100-80GB", "cpu"]),
    ),
    st.builds(
        Communication,
        collective=st.sampled_from(COLLECTIVES),
        size_bytes=st.integers(0, 1 << 40),
        participants=st.integers(4, 512),
        nodes=st.integers(1, 4),
        groups=st.integers(1, 8),
        device=st.just("A100-80GB"),
    ),
)


def all_reduce(size: int, participants: int = 4) -> Communication:
    return Communication(collective="all_reduce", size_bytes=size, participants=participants, device="cpu")


def gemm(m: int) -> Compute:
    return Compute(operator="gemm", shape=(1, m, 8, 8), dtype="bf16", device="cpu")


@given(event=events)
def test_text_and_key_are_one(event: Event) -> None:
    assert parse(str(event)) == event


def test_equal_events_are_one_key() -> None:
    assert len({gemm(4), gemm(4), gemm(5), all_reduce(4), all_reduce(4)}) == 3


def test_counts_are_exact() -> None:
    event = Compute(operator="gemm", shape=(3, 5, 7, 11), dtype="fp32", device="cpu")
    assert event.flops == 2 * 3 * 5 * 7 * 11
    assert event.traffic_bytes == 4 * 3 * (5 * 7 + 7 * 11 + 5 * 11)


@pytest.mark.parametrize(
    "text", ["", "gemm[1,2]/bf16@x", "gemm[1,,2,3]/bf16@x", "sum[3]/2in1x1@x", "gemm[1,2,3,4]/b@x"]
)
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


def test_a_profile_is_kept(tmp_path: Path) -> None:
    profile = Profile({gemm(4): Sample(min_s=1e-6, median_s=2e-6, count=9)}, "here")
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
    shown = profile.inspect()
    assert str(gemm(4)) in shown
    assert "2.0 us" in shown


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "a JSON object"),
        ('{"format": 2}', "is of format 2; this release reads 1"),
        ('{"format": 1, "event": {}}', "did you mean 'events'"),
        (
            '{"format": 1, "events": {"gemm": {"min_s": 1, "median_s": 1, "count": 1}}}',
            "'gemm' is not an event",
        ),
        (
            '{"format": 1, "events": {"send[1]/2in1x1@cpu": {"min_s": 1, "count": 1}}}',
            "needs min_s, median_s",
        ),
        ('{"format": 1, "events": {"send[1]/2in1x1@cpu": {"min_s": 2, "median_s": 1, "count": 1}}}', "above"),
    ],
)
def test_damaged_profiles_are_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(UsageError, match=says):
        Profile.load(tmp_path / "p.json")


def test_merging_takes_more_repeats_then_the_faster() -> None:
    few, many = Sample(min_s=1, median_s=1, count=2), Sample(min_s=3, median_s=3, count=5)
    fast = Sample(min_s=2, median_s=2, count=5)
    one = Profile({gemm(1): few, gemm(2): many, gemm(3): few}, "a")
    other = Profile({gemm(1): many, gemm(2): fast, gemm(4): few}, "b")
    merged = one.merged(other)
    assert merged.samples == {gemm(1): many, gemm(2): fast, gemm(3): few, gemm(4): few}
    assert merged.samples == other.merged(one).samples
    assert merged.note == "a; b"


def test_missing_events_are_named_all_at_once_with_the_command() -> None:
    profile = Profile({gemm(4): Sample(min_s=1, median_s=1, count=1)}, command="flashrec profile --model M")
    with pytest.raises(MissingEvents) as raised:
        profile.require([gemm(4), gemm(5), all_reduce(8), gemm(6)])
    assert raised.value.events == tuple(sorted(map(str, (gemm(5), gemm(6), all_reduce(8)))))
    assert "3 events are not in the profile" in str(raised.value)
    assert "measure them with: flashrec profile --model M" in str(raised.value)
    with pytest.raises(MissingEvents):
        profile.seconds(gemm(5))


def test_point_to_point_takes_the_minimum_and_the_rest_the_median() -> None:
    send = Communication(collective="send", size_bytes=4, participants=2, device="cpu")
    sample = Sample(min_s=1, median_s=2, count=3)
    profile = Profile({send: sample, all_reduce(4): sample})
    assert profile.seconds(send) == 1
    assert profile.seconds(all_reduce(4)) == 2


def test_all_reduces_follow_from_measured_sizes_and_ranks() -> None:
    """Times of an exact ring: 10 us a step and 1 ns a byte of ring volume."""

    def ring(size: int, n: int) -> float:
        return 2 * (n - 1) * 1e-5 + 2 * (n - 1) / n * size * 1e-9

    measured = {
        all_reduce(size, 2): Sample(min_s=ring(size, 2), median_s=ring(size, 2), count=3)
        for size in (1, 1_000_000, 2_000_000)
    }
    profile = Profile(measured)
    assert profile.seconds(all_reduce(8_000_000, 2)) == pytest.approx(ring(8_000_000, 2), rel=1e-9)
    assert ring(1_000_000, 2) < profile.seconds(all_reduce(1_500_000, 2)) < ring(2_000_000, 2)
    assert profile.seconds(all_reduce(8_000_000, 64)) == pytest.approx(ring(8_000_000, 64), rel=1e-5)
    assert profile.seconds(all_reduce(123, 1)) == 0.0


def test_another_source_answers_for_what_lacks_and_says_so() -> None:
    profile = Profile({gemm(4): Sample(min_s=1, median_s=1, count=1)})
    other = Profile({gemm(5): Sample(min_s=7, median_s=7, count=1)})
    both = ProfileOr(profile, other)
    assert (both.seconds(gemm(4)), both.seconds(gemm(5))) == (1, 7)
    assert both.used == {gemm(5)}


def test_the_file_says_its_format(tmp_path: Path) -> None:
    Profile().save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text()) == {"format": 1, "note": "", "events": {}}
