"""A process specification survives its way, and nothing else is taken for one."""

from __future__ import annotations

import os

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import ProtocolError, UsageError
from flashrec.protocol.spawn import MAX_SPEC_BYTES, ProcSpec, read_spec_file, spec_file

SPEC = ProcSpec(
    proc="rank0",
    entry="flashrec.runner:main",
    stdout_path="/logs/stdout.log",
    stderr_path="/logs/stderr.log",
    cwd="/",
    program={"script": "train.py", "argv": ["--lr", "0.1"], "raw": b"\xff", "none": None},
    env={"RANK": "0"},
)


def test_round_trip() -> None:
    assert ProcSpec.unpack(SPEC.pack()) == SPEC


def test_a_file_may_be_read_twice_and_is_larger_than_a_packet() -> None:
    spec = ProcSpec(**{**vars(SPEC), "program": {"argv": ["x" * 100] * 20_000}})
    fd = spec_file(spec)
    try:
        assert read_spec_file(fd) == spec == read_spec_file(fd)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_too_large_is_refused_by_both_sides() -> None:
    spec = ProcSpec(**{**vars(SPEC), "program": {"data": b"\0" * MAX_SPEC_BYTES}})
    with pytest.raises(UsageError, match="rank0"):
        spec_file(spec)
    fd = os.memfd_create("large")
    try:
        os.truncate(fd, MAX_SPEC_BYTES + 1)
        with pytest.raises(ProtocolError, match="bytes"):
            read_spec_file(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("entry", ["", "module", ":function", "module:"])
def test_an_entry_names_module_and_function(entry: str) -> None:
    with pytest.raises(UsageError, match="module:function"):
        ProcSpec(**{**vars(SPEC), "entry": entry})


@pytest.mark.parametrize(
    "change",
    [
        {"proc": 1},
        {"entry": "nothing"},
        {"cwd": None},
        {"env": {"RANK": 0}},
        {"env": [1]},
        {"program": []},
        {"surprise": 1},
    ],
)
def test_a_wrong_field_is_refused(change: dict[str, object]) -> None:
    fields = msgpack.unpackb(SPEC.pack()) | change
    with pytest.raises(ProtocolError):
        ProcSpec.unpack(msgpack.packb(fields))


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        ProcSpec.unpack(data)


@given(st.data())
def test_a_damaged_specification_is_refused_or_another_valid_one(data: st.DataObject) -> None:
    packed = bytearray(SPEC.pack())
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        spec = ProcSpec.unpack(bytes(packed))
    except ProtocolError:
        return
    assert isinstance(spec.proc, str)
