"""Every benchmark runs and gives its figures. What the figures are is nobody's business here: no time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(module: str, *args: object) -> dict[str, Any]:
    """The figures of one run."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, args), "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    assert figures["machine"]["cores"] >= 1
    assert figures["machine"]["command"].startswith(f"python -m benchmarks.{module} ")
    return figures


def test_step_cost_compares_pairs_and_names_the_parts() -> None:
    figures = run("step_cost", "--sizes", "tiny", "--pairs", 3, "--block-steps", 4)
    (size,) = figures["sizes"]
    for what in ("step_ms", "cpu_ms"):
        assert size[what]["pairs"] == 3
        assert size[what]["bare"] > 0
        low, high = size[what]["overhead_percent_95"]
        assert low <= size[what]["overhead_percent"] <= high
    assert size["parts"]["seal: write"]["calls"] == 1
    assert size["parts"]["gate: agreement, with waiting"]["calls"] == 1


def test_compression_tells_what_is_left_of_each_kind_of_state() -> None:
    figures = run("compression", "--size", "tiny", "--steps", 2, "--rounds", 1)
    assert len(figures["kinds"]) == 4
    for one in figures["kinds"].values():
        assert 0 < one["left"] < 1
        assert one["pays_below_mb_s"] == one["pack_mb_s"] > 0


def test_full_versions_compares_steps_that_seal_with_those_beside_them() -> None:
    figures = run("full_versions", "--sizes", "tiny", "--steps", 120)
    (size,) = figures["sizes"]
    assert size["full_versions"] > size["step_ms"]["pairs"] >= 1
    assert size["every"] >= 1
    assert size["pace_ms"] > 0


def test_recovery_kills_and_accounts_for_the_time() -> None:
    figures = run("recovery", "--size", "tiny", "--kills", 1, "--depths", "built", "--restarts", 0)
    (found,) = figures["depths"]
    (kill,) = found["each"]
    assert kill["total"] == pytest.approx(kill["net"] + kill["step"] + kill["to_gate"])
    assert 0 < kill["detected"] <= kill["planned"] <= kill["pulled"] <= kill["formed"] <= kill["redone"]


def test_the_comparison_loses_steps_and_does_them_again() -> None:
    figures = run("recovery", "--size", "tiny", "--depths", "--restarts", 1)
    assert figures["torchrun"]["kills"] == 1
    assert figures["torchrun"]["each"][0]["steps_again"] >= 0
    assert figures["torchrun"]["total"]["median"] > 0


def test_node_loss_loses_a_node_and_a_rank_and_accounts_for_the_time() -> None:
    figures = run("node_loss", "--sizes", "tiny", "--losses", 1)
    node, rank = figures["losses"]
    (lost,), (killed,) = node["each"], rank["each"]
    assert lost["total"] == lost["redone"]
    for one in (lost, killed):
        assert 0 < one["planned"] <= one["pulled"] <= one["formed"] <= one["redone"]
    assert lost["dead"] > 0
    assert lost["full"] > 0
    assert "full" not in killed


@pytest.mark.parametrize("case", ["frozen", "live"])
def test_replication_cost_compares_three_sides(case: str) -> None:
    options = ["--sizes", "tiny", "--rounds", 2, "--block-steps", 4, "--intervals", 2]
    figures = run("replication_cost", "--cases", case, *options)
    (found,) = figures["cases"]
    for what in ("step_ms", "cpu_ms"):
        assert all(found[what][side] > 0 for side in ("bare", "alone", "replicas"))
        for base in ("bare", "alone"):
            low, high = found[what][f"over_{base}_percent_95"]
            assert low <= found[what][f"over_{base}_percent"] <= high
    part = found["replication"]
    assert part["rounds"] == 2
    assert part["sent_mb"] > 0


def test_gate_measures_both_transports() -> None:
    figures = run("gate", "--ranks", 2, "--rounds", 20)
    assert [one["kind"] for one in figures["gates"]] == ["all-reduce", "shared memory"]
    for one in figures["gates"]:
        assert one["busy_us"]["n"] == one["latency_us"]["n"] == 40


def test_sealing_gives_bandwidths_costs_and_memory() -> None:
    figures = run("sealing", "--sizes", 4, "--rounds", 2)
    (size,) = figures["sizes"]
    assert 3.5 < size["size_mb"] < 4.5
    for what in ("memcpy", "seal_first", "seal_all", "seal_none", "thread", "pull"):
        assert size[f"{what}_gbps"] > 0
    for what in ("begin_us", "finish_us"):
        assert size[what]["n"] == 2
    for how in ("cold", "ahead"):
        assert size["replace"][how]["restore_cpu_gbps"] > 0
    assert 1 <= size["arena_bytes"] / size["held_bytes"] <= 1.05


def test_sealing_cost_compares_pairs_and_says_where_the_time_goes() -> None:
    figures = run("sealing_cost", "--sizes", "tiny", "--ranks", 2, 1, "--pairs", 3, "--block-steps", 4)
    assert [one["ranks"] for one in figures["sizes"]] == [2, 1]
    for one in figures["sizes"]:
        assert one["step_ms"]["pairs"] == 3
        sealing = one["sealing"]
        assert sealing["copied_bytes"] + sealing["unchanged_bytes"] == sealing["owned_bytes"]
        assert sealing["arena_bytes"] >= sealing["held_bytes"]
        assert one["parts"]["sealing: begin"]["calls"] == 1
        assert one["parts"]["sealing: what is left at the gate"]["calls"] == 1
        assert sum(one["summary_us"].values()) == pytest.approx(sum(p["us"] for p in one["parts"].values()))
