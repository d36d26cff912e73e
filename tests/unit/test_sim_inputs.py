"""What files say of failures, and goodput as a search uses it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashrec.errors import UsageError
from flashrec.sim.analytic import AnalyticDurations
from flashrec.sim.candidates import Space, strategies
from flashrec.sim.config import Config, load, read_table
from flashrec.sim.costs import build, make_schedule
from flashrec.sim.engine import run
from flashrec.sim.explain import Remembered
from flashrec.sim.failures.documents import scenario_from
from flashrec.sim.inputs import Input, assemble, config_document, load_input, scenario_document
from flashrec.sim.memory import estimate
from flashrec.sim.schedules import gpipe
from flashrec.sim.search import search
from flashrec.sim.strategy import Compression, Replication, Strategy
from tests.unit.sim_strategies import MODEL, config, slow, small_cluster

GIVEN = Input(config=config(), failures={})
OFTEN = Input(
    config=Config(model=MODEL, cluster=small_cluster(4), global_batch=4),
    failures={"rates": {"device_mtbf_hours": 3.0}, "costs": {"replicate_bytes_per_s": 1e8}},
)


@given(st.floats(1e-3, 1e3), st.floats(1.0, 3.0), st.floats(0, 1e11), st.floats(0, 1e11))
@settings(max_examples=200, deadline=None)
def test_longer_steps_and_more_state_are_never_better(
    step_s: float, factor: float, state_bytes: float, more_bytes: float
) -> None:
    """What lets a search take bounds through it."""
    strategy = Strategy(data_parallel=8)
    for given_ in (GIVEN, OFTEN):
        strategy = Strategy(data_parallel=given_.config.cluster.num_devices)
        short = step_s / max(given_.goodput(strategy, step_s, state_bytes), 1e-300)
        long = (
            step_s * factor / max(given_.goodput(strategy, step_s * factor, state_bytes + more_bytes), 1e-300)
        )
        assert long >= short * (1 - 1e-9)


def test_a_search_by_goodput_finds_what_trying_everything_finds() -> None:
    """With state that takes long to replicate, so that goodput decides."""
    model, cluster, batch = OFTEN.config.model, OFTEN.config.cluster, OFTEN.config.global_batch
    base, durations = Strategy(sequence_parallel=True), Remembered(AnalyticDurations(cluster))
    scores, steps = [], []
    space = Space(recompute=("none",), schedules=("1f1b", "zb-h1"))
    for strategy in strategies(model, cluster, batch, space, base):
        memory = estimate(model, cluster, strategy, batch)
        line = run(make_schedule(strategy, batch), build(model, cluster, strategy, batch, durations))
        state = max(stage.parameters + stage.optimizer for stage in memory)
        scores.append(line.batch_s / OFTEN.goodput(strategy, line.batch_s, state))
        steps.append(line.batch_s)
    outcome = search(model, cluster, batch, num_best=4, space=space, base=base, goodput=OFTEN.goodput)
    assert [one.score_s for one in outcome.best] == pytest.approx(sorted(scores)[:4], rel=1e-12)
    assert outcome.best[0].batch_s > min(steps)  # the fastest is not the best
    assert outcome.num_simulated < len(scores)
    assert "failures" in outcome.by_reason()


def test_rates_of_moving_state_follow_the_links() -> None:
    scenario = GIVEN.scenario(Strategy(data_parallel=8), 1.0, 1e9)
    assert scenario.costs.pull_bytes_per_s == scenario.costs.replicate_bytes_per_s == 0.7 * 50e9
    assert scenario.costs.seal_bytes_per_s == 0.7 * 25e9
    assert scenario.layout.devices == 8
    assert scenario.layout.devices_per_node == 4
    assert OFTEN.scenario(Strategy(data_parallel=4), 1.0, 1e9).costs.replicate_bytes_per_s == 1e8
    assert OFTEN.scenario(Strategy(data_parallel=4), 1.0, 1e9).rates.device_mtbf_hours == 3.0


def test_a_scenario_survives_as_a_document() -> None:
    for given_ in (GIVEN, OFTEN):
        strategy = Strategy(data_parallel=given_.config.cluster.num_devices)
        scenario = given_.scenario(strategy, 2.0, 1e9)
        document = json.loads(json.dumps(scenario_document(scenario, given_.failures)))
        assert scenario_from(document) == scenario


@pytest.mark.parametrize(
    ("failures", "says"),
    [
        ({"duration": 1}, "duration_s"),
        ({"costs": 3}, "failures: costs is 3"),
        ({"layout": {"device": 3}}, "did you mean 'devices'"),
    ],
)
def test_wrong_failures_are_refused(failures: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Input(config=config(), failures=failures).goodput(Strategy(data_parallel=8), 1.0, 1e9)


def test_files_are_read_by_their_names_end(tmp_path: Path) -> None:
    for name, text, says in (
        ("a.toml", "a = [", "a.toml: "),
        ("a.json", "{", "a.json: "),
        ("b.json", "[1]", "must be a table"),
        ("a.yaml", "", "must end in .toml or .json"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=says):
            read_table(tmp_path / name)
    for read in (load_input, load):
        with pytest.raises(UsageError, match="does not exist"):
            read(tmp_path / "none.toml")
        (tmp_path / f"{read.__name__}.toml").mkdir()
        with pytest.raises(UsageError, match="Is a directory"):
            read(tmp_path / f"{read.__name__}.toml")


def test_what_a_file_says_of_failures_is_no_mistake_for_who_wants_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    document = config_document(config(), Strategy(data_parallel=8))
    path.write_text(json.dumps({**document, "failures": {"is_sealed": False}}))
    assert load(path) == load_input(path).config


def test_parts_come_before_the_configuration(tmp_path: Path) -> None:
    root = Path(__file__).parents[2] / "examples" / "simulate"
    base = root / "gpt-175b-1024.toml"
    other = root / "gpt-18b-pipeline.toml"
    found = assemble(base, other, None, 64).config
    assert (found.model.name, found.cluster.num_devices, found.global_batch) == ("GPT-18B", 1024, 64)
    assert assemble(base, None, None, None).config.global_batch == 1536
    with pytest.raises(UsageError, match="give --cluster, --global-batch"):
        assemble(None, other, None, None)


def test_speeds_are_told() -> None:
    from flashrec.sim.inputs import cluster_speeds

    assert cluster_speeds(small_cluster(8)) == ""
    told = cluster_speeds(slow(small_cluster(8), {1: 0.5, 2: 0.8, 3: 1.0}))
    assert told == "2 of 8 devices are not of normal speed: 0.5 to 0.8 of it"


@pytest.mark.parametrize("speeds", [{}, {1: 0.5}])
def test_a_configuration_survives_as_a_document(tmp_path: Path, speeds: dict[int, float]) -> None:
    strategy = Strategy(
        data_parallel=2,
        pipeline_parallel=2,
        tensor_parallel=2,
        schedule="interleaved",
        chunks=2,
        sharding="zero1",
        shard_group=2,
        compression=Compression(ratio=0.5),
        replication=Replication(copies=2),
        sends_block=False,
    )
    given_ = Config(model=MODEL, cluster=slow(small_cluster(8), speeds), strategy=strategy, global_batch=16)
    path = tmp_path / "written.json"
    path.write_text(json.dumps(config_document(given_, strategy)))
    found = load_input(path).config
    assert found == given_
    assert found.cluster.speed_factors == speeds
    lists = replace(strategy, schedule=gpipe(2, 8), chunks=1)
    with pytest.raises(UsageError, match="has no name to write"):
        config_document(given_, lists)
