"""Memory had before it is needed: nothing is seen of it until it is, and it is what is used then."""

from __future__ import annotations

import gc
import mmap
import threading
from pathlib import Path

import pytest
import torch

from flashrec.errors import EnvironmentFault, IntegrityError
from flashrec.state import warming
from flashrec.state.arena import Arena
from flashrec.state.arena_writer import ArenaWriter
from flashrec.state.layout import RankLayout
from flashrec.state.mapping import mapping_of
from flashrec.state.tensors import direct_bytes
from flashrec.state.warming import Warmer
from tests.arenas import JOB, RANK, check, seal
from tests.unit.test_state_capture import OPTIMIZERS, bits, pair, train


def test_every_page_is_touched_and_nothing_after_the_stop() -> None:
    memory = memoryview(bytearray(b"\1" * (3 * mmap.PAGESIZE + 10)))
    warmer = Warmer([memory[:0], memory])
    warmer.wait()
    assert not any(memory[:: mmap.PAGESIZE])
    assert sum(memory) == len(memory) - 4
    warmer.stop()
    warmer.stop()
    memory[:] = b"\1" * len(memory)
    assert all(memory)


def test_a_thread_that_does_not_come_back_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(Warmer, "_run", lambda self: may_go_on.wait(60))
    monkeypatch.setattr(warming, "STUCK_S", 0.01)
    warmer = Warmer([])
    try:
        with pytest.raises(EnvironmentFault, match="a thread that touches memory"):
            warmer.stop()
    finally:
        may_go_on.set()
    monkeypatch.setattr(warming, "STUCK_S", 60)
    warmer.stop()


def test_a_mapping_is_there_for_the_puller_and_the_next_writer_until_it_is_let_go_of(tmp_path: Path) -> None:
    directory = tmp_path / "arena"
    seal(ArenaWriter(directory, RANK, JOB), 0)
    gc.collect()
    (path,) = directory.iterdir()
    before = path.read_bytes()
    arena = Arena(directory, RANK, JOB)
    with path.open("rb") as file:
        assert mapping_of(file.fileno()) is None
        warmer = Warmer([], [arena.map_for_pull(arena.read(0))])
        warmer.wait()
        warmer.stop()
        mapping = mapping_of(file.fileno())
        assert mapping is not None
        assert path.read_bytes() == before
        check(arena, [0])
        writer = ArenaWriter(directory, RANK, JOB)
        warmer.let_go()
        warmer.let_go()
        assert mapping_of(file.fileno()) is mapping, "the writer has it"
        seal(writer, 1)
        check(arena, [0, 1])


def test_a_file_that_is_gone_is_not_mapped(tmp_path: Path) -> None:
    directory = tmp_path / "arena"
    seal(ArenaWriter(directory, RANK, JOB), 0)
    arena = Arena(directory, RANK, JOB)
    own = arena.read(0)
    own.path.unlink()
    with pytest.raises(IntegrityError, match="cannot open"):
        arena.map_for_pull(own)


@pytest.mark.parametrize("include_grads", [False, True])
def test_what_is_made_ahead_is_what_prepare_uses(include_grads: bool) -> None:
    (model, optimizer, source), (other, its_optimizer, target) = pair(
        OPTIMIZERS["adamw"], include_grads=include_grads
    )
    train(model, optimizer, 1)
    model(torch.arange(4)).backward()
    source.refresh()
    layout = source.rank_layout()
    before = target.rank_layout().digest
    memories = target.prepare_ahead(layout)
    assert (
        0 < sum(map(len, memories)) < layout.total_bytes
    )  # not what is no run of bytes, like a transposed weight's
    for memory in memories:
        memory[:] = b"\x7f" * len(memory)
    target.refresh()
    assert target.rank_layout().digest == before, "nothing is there yet"
    assert not its_optimizer.state
    assert all(parameter.grad is None for parameter in other.parameters())
    target.prepare(layout)
    assert target.rank_layout().digest == layout.digest
    places = {_address(memory) for memory in memories}
    made = [tensor for entry in its_optimizer.state.values() for tensor in entry.values()]
    grads = [parameter.grad for parameter in other.parameters() if parameter.grad is not None]
    assert bool(grads) == include_grads
    runs = [tensor for tensor in [*made, *grads] if tensor.is_contiguous()]
    assert len(runs) == len(memories)
    for tensor in runs:
        assert set(bits(tensor)) <= {0x7F}
        assert tensor.data_ptr() in places


def test_what_another_layout_has_not_is_let_go_of() -> None:
    (model, optimizer, source), (_, its_optimizer, target) = pair(OPTIMIZERS["adamw"])
    bare = RankLayout.from_bytes(source.rank_layout().to_bytes())
    train(model, optimizer, 1)
    source.refresh()
    target.prepare_ahead(source.rank_layout())
    target.prepare(bare)
    assert not any(its_optimizer.state.values())
    target.prepare(source.rank_layout())
    (entry, *_) = its_optimizer.state.values()
    assert direct_bytes(entry["exp_avg"]) is not None


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr() if len(memory) else 0
