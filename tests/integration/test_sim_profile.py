"""`flashrec profile` and the comparison with real runs, with the real processes they start."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.real_runs import Observed, cases, compare, predict, profile_events, run_case
from flashrec.errors import EnvironmentFault, UsageError
from flashrec.sim import costs
from flashrec.sim.config import load
from flashrec.sim.events import Compute, Event, parse
from flashrec.sim.profile import MissingEvents, Profile
from flashrec.sim.profiler import distinct_events, measure
from tests.integration.commands import ROOT

CONFIG = """
global_batch = 8
[model]
num_layers = 2
hidden = 32
num_heads = 2
sequence = 16
vocabulary = 64
[cluster]
num_nodes = 1
devices_per_node = 4
device = { name = "core", peak_flops = { fp32 = 5e10 }, memory_bytes = 4e9, memory_bandwidth_bytes_s = 5e9 }
intra_link = { bandwidth_bytes_s = 1e9, latency_s = 1e-4 }
inter_link = { bandwidth_bytes_s = 1e9, latency_s = 1e-4 }
[strategy]
data_parallel = 2
pipeline_parallel = 2
dtype = "fp32"
gradient_dtype = "fp32"
"""
TRACED = """
import torch
from torch import nn
from flashrec.sim.tracing import TracedModule

def model():
    return TracedModule(
        name="mlp",
        make=lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)]),
        inputs=lambda n: (torch.zeros(n, 8),),
    )
"""


def flashrec(folder: Path, *args: str, code: int = 0) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    ran = subprocess.run(
        [sys.executable, "-c", "from flashrec.cli import main; main()", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_the_command_that_an_error_names_measures_what_is_missing(tmp_path: Path) -> None:
    """`MissingEvents` prints a command; run as printed it measures those events, and keeps what was there."""
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    found = load(config)
    assert found.strategy is not None
    with pytest.raises(MissingEvents) as raised:
        costs.build(found.model, found.cluster, found.strategy, found.global_batch, Profile())
    words = raised.value.command.split()
    assert words.pop(0) == "flashrec"
    given = {
        "MODEL": "run.toml",
        "CLUSTER": "run.toml",
        "STRATEGY": "run.toml",
        "N": "8",
        "PROFILE": "p.json",
    }
    command = [given.get(word, word) for word in words]

    events = distinct_events(found.model, found.cluster, found.strategy, found.global_batch)
    kept = next(event for event in events if isinstance(event, Compute))
    sample = {"min_s": 1.0, "median_s": 2.0, "count": 1000}
    (tmp_path / "p.json").write_text(json.dumps({"format": 1, "note": "mine", "events": {str(kept): sample}}))
    planned = flashrec(tmp_path, *command, "--dry-run").split()
    flashrec(tmp_path, *command, "--rounds", "2")

    profile = Profile.load(tmp_path / "p.json")
    assert set(map(str, profile.samples)) == {*planned, str(kept)}
    assert profile.samples[kept].median_s == 2.0
    assert all(s.min_s > 0 for s in profile.samples.values())
    assert "mine" in profile.note
    assert "flashrec profile --model run.toml" in profile.note
    costs.build(found.model, found.cluster, found.strategy, found.global_batch, profile)
    assert "0 events timed" in flashrec(tmp_path, *command)
    shown = flashrec(tmp_path, "profile", "--show", "p.json")
    assert shown == profile.inspect() + "\n"


def test_a_traced_module_is_profiled(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TRACED)
    (tmp_path / "run.toml").write_text(CONFIG)
    files = ("--cluster", "run.toml", "--strategy", "run.toml", "-o", "p.json")
    planned = flashrec(tmp_path, "profile", "--model", "mine:model", *files, "--dry-run").split()
    assert "gemm[1,1,8,8]/fp32@core" in planned
    assert "mine" in flashrec(tmp_path, "profile", "--model", "mine:nothing", *files, code=2)


def test_profiles_are_merged(tmp_path: Path) -> None:
    for name, size in (("a", 1), ("b", 2)):
        events = {f"traffic[{size}]/fp32@core": {"min_s": 1, "median_s": 1, "count": 1}}
        (tmp_path / f"{name}.json").write_text(json.dumps({"format": 1, "note": name, "events": events}))
    flashrec(tmp_path, "profile", "--merge", "a.json", "--merge", "b.json", "-o", "c.json")
    merged = Profile.load(tmp_path / "c.json")
    assert len(merged.samples) == 2
    assert merged.note == "a; b"


COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send")


def test_every_kind_of_event_is_timed() -> None:
    events: list[Event] = [parse(f"{name}[4096]/2in1x1@core") for name in COLLECTIVES]
    events += [parse(text) for text in ("host_copy[4096]/1in1x1@core", "traffic[4096]/bf16@core")]
    events += [parse(f"gemm[{batch},8,8,8]/{dtype}@core") for batch in (1, 2) for dtype in ("fp32", "bf16")]
    found = measure(events, rounds=4)
    assert set(found) == set(events)
    assert all(len(values) == 2 and min(values) > 0 for values in found.values())


def test_a_process_that_fails_is_quoted() -> None:
    with pytest.raises(EnvironmentFault, match="no products of fp8"):
        measure([parse("gemm[1,8,8,8]/fp8@core")], rounds=1)


def test_two_nodes_are_two_commands(tmp_path: Path) -> None:
    """The other rank's command, on the other node, gets its events from the first one's."""
    text = CONFIG.replace("num_nodes = 1\ndevices_per_node = 4", "num_nodes = 4\ndevices_per_node = 1")
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "other.json").write_text('{"format": 1, "note": "", "events": {}}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = ["--model", "run.toml", "--cluster", "run.toml", "--strategy", "run.toml", "--rounds", "2"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "daemon")])
    where = ["--master", f"127.0.0.1:{port}"]
    program = "from flashrec.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "profile", *files, *where, "--rank", "1", "-o", "other.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    ) as other:
        try:
            said = flashrec(tmp_path, "profile", *files, *where, "-o", "p.json")
            assert other.wait(60) == 0
        finally:
            other.kill()
    assert "not timed" not in said
    found = load(tmp_path / "run.toml")
    assert found.strategy is not None
    profile = Profile.load(tmp_path / "p.json")
    costs.build(found.model, found.cluster, found.strategy, found.global_batch, profile)
    assert Profile.load(tmp_path / "other.json").samples == {}


@pytest.mark.parametrize("name", ["DP 2 x TP 2 x PP 2, 1F1B", "PP 4, ZB-H1", "PP 4, interleaved x2"])
def test_a_real_run_follows_the_schedule(name: str) -> None:
    """No times are judged here: every operation happens, after those that it needs, on every rank."""
    case = next(c for c in cases() if c.name == name)
    observed = Observed()
    observed.add(profile_events(case, 2), run_case(case, 1))
    timeline = predict(case, observed.seconds)
    width = case.strategy.data_parallel * case.strategy.tensor_parallel
    ranks = observed.steps[0]
    assert len(ranks) == case.strategy.num_devices
    ends = {}
    for rank, noted in enumerate(ranks):
        ops = case.schedule.ops[rank // width]
        assert len(noted["start"]) == len(noted["end"]) == len(ops)
        for op, end in zip(ops, noted["end"], strict=True):
            ends[
                rank % width, op.kind, op.micro_batch, case.schedule.virtual_stage(rank // width, op.chunk)
            ] = end
    for rank, noted in enumerate(ranks):
        for op, start in zip(case.schedule.ops[rank // width], noted["start"], strict=True):
            part = case.schedule.virtual_stage(rank // width, op.chunk)
            before = {0: part - 1, 1: part + 1}.get(int(op.kind))
            key = (rank % width, op.kind, op.micro_batch, before)
            assert start >= ends.get(key, 0.0)
        assert noted["end"][-1] <= noted["sync"] <= noted["done"]
    figures = compare(case, observed)
    assert figures["measured_ms"] > 0
    assert figures["predicted_ms"] == pytest.approx(timeline.batch_s * 1e3)


LATE_S = 0.5


def gloo_rank(rank: int, folder: Path) -> None:
    """Rank 0 sends twice to a rank that receives late: blocking, then not. Writes how long each call took."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    data, took = torch.zeros(1000), []
    for send in (dist.send, dist.isend):
        dist.barrier()
        if rank:
            time.sleep(LATE_S)
            dist.recv(data, 0)
            continue
        began = time.monotonic()
        work = send(data, 1)
        took.append(time.monotonic() - began)
        if isinstance(work, dist.Work):
            work.wait()
    if not rank:
        (folder / "took").write_text(json.dumps(took))
    dist.barrier()
    dist.destroy_process_group()


def test_gloo_s_sends(tmp_path: Path) -> None:
    """Why real runs are compared with `sends_block=False`: gloo's blocking send waits for its receiver, for which the
    engine has no word; the other one costs its sender nothing."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=gloo_rank, args=(rank, tmp_path)) for rank in range(2)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    blocking, posted = json.loads((tmp_path / "took").read_text())
    assert blocking > 0.8 * LATE_S
    assert posted < 0.5 * LATE_S


def test_nothing_to_measure_starts_nothing() -> None:
    assert measure([]) == {}
    with pytest.raises(UsageError):
        measure([], rounds=0)
