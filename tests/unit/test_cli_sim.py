"""`flashrec simulate` and `flashrec plan` as people type them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from flashrec import cli
from flashrec.cli import commands
from tests.readme import ROOT, snippets
from tests.readme import commands as shown_commands

EXAMPLES = ROOT / "examples" / "simulate"
PIPELINE, ZERO_BUBBLE = EXAMPLES / "gpt-18b-pipeline.toml", EXAMPLES / "gpt-18b-zero-bubble.toml"
DOCS = (ROOT / "docs" / "simulator.md").read_text()


def flashrec(*arguments: object) -> Result:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments])


def changed(tmp_path: Path, *changes: tuple[str, str], text: str = "") -> Path:
    """The pipeline example with lines replaced."""
    text = text or PIPELINE.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "changed.toml"
    path.write_text(text)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A configuration that is searched in no time."""
    return changed(
        tmp_path,
        ("num_layers = 40", "num_layers = 4"),
        ("num_nodes = 8", "num_nodes = 2"),
        ("devices_per_node = 8", "devices_per_node = 2"),
        ("tensor_parallel = 4", "tensor_parallel = 1"),
        ("pipeline_parallel = 4", "pipeline_parallel = 2"),
        ("data_parallel = 4", "data_parallel = 2"),
        ("global_batch = 64", "global_batch = 8"),
        ("hidden = 6144", "hidden = 1536"),
    )


def test_help_needs_no_numpy() -> None:
    code = (
        "import sys; from flashrec.cli import commands; "
        "commands(['simulate', '--help'], standalone_mode=False); commands(['plan', '-h'], standalone_mode=False); "
        "print([name for name in ('numpy', 'torch', 'flashrec.sim') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.splitlines()[-1] == "[]"
    assert "Predict a training step" in ran.stdout


def test_simulate_prints_what_a_person_wants_to_know() -> None:
    result = flashrec("simulate", PIPELINE)
    assert result.exit_code == 0, result.output
    for text in (
        "GPT-18B (18.4 billion parameters) on 64 x A100-80GB",
        "TP4 PP4 DP4, 1f1b, micro-batch 2, recompute selective, zero1",
        "batch time",
        "tokens/s",
        "MFU",
        "bubble",
        "exposed communication",
        "tensor-parallel exchanges",
        "Memory of one device, GiB of 80.0",
        "Critical path",
        "idle (pipeline bubble, slower devices)",
    ):
        assert text in result.output
    assert "\x1b" not in result.output  # plain where nobody looks
    assert max(len(line) for line in result.output.splitlines()) <= 128


def test_the_table_and_the_document_agree() -> None:
    document = json.loads(flashrec("simulate", PIPELINE, "--json").output)
    shown = flashrec("simulate", PIPELINE).output
    assert re.search(rf"batch time +{document['batch_s']:.3f} s", shown)
    assert f"{document['tokens_per_s']:,.0f}" in shown
    assert f"{document['mfu']:.1%}" in shown
    assert f"{document['bubble']:.1%} of the pipeline" in shown


def test_files_are_written(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "step.svg"
    assert flashrec("simulate", PIPELINE, "--trace", trace, "--svg", picture).exit_code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    operations = 4 * 8 * 2
    assert sum(e.get("cat") in ("forward", "backward") for e in events) == operations
    root = ElementTree.parse(picture).getroot()
    titles = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(": forward, " in t or ": backward, " in t for t in titles) == operations
    result = flashrec("simulate", PIPELINE, "--svg", tmp_path / "nowhere" / "step.svg")
    assert result.exit_code == 2
    assert "cannot be written" in result.output


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tensor_parallel = 4", "tensor_parallel = 5", r"nearest valid products: 16 or 32"),
        (
            "num_heads = 48",
            "num_heads = 30",
            r"hidden \(6144\) cannot be divided by num_heads \(30\).*nearest",
        ),
        (
            "num_layers = 40",
            "num_layers = 42",
            r"num_layers \(42\) cannot be divided .*nearest valid num_layers: 40 or 44",
        ),
        ("global_batch = 64", "global_batch = 60", r"nearest valid global_batch: 56 or 64"),
        ('"1f1b"', '"1f1"', r"nearest: '1f1b'"),
        ("micro_batch = 2", "mikro_batch = 2", r"unknown key 'mikro_batch'; did you mean 'micro_batch'"),
        ('"A100-80GB"', '"A100-80"', r"nearest: 'A100-80GB'"),
        ("[model]", "[model", r"changed\.toml: "),
        ('"1f1b"', '[["F0", "B0"]]', r"strategy"),
    ],
)
def test_bad_input_says_what_is_valid(tmp_path: Path, old: str, new: str, says: str) -> None:
    result = flashrec("simulate", changed(tmp_path, (old, new)))
    assert result.exit_code == 2, result.output
    assert result.output.startswith("flashrec: ")
    assert re.search(says, result.output), result.output
    assert "Traceback" not in result.output


def test_a_schedule_in_a_circle_names_who_waits(tmp_path: Path) -> None:
    lists = '[["F0", "B0"], ["B0", "F0"], ["F0", "B0"], ["F0", "B0"]]'
    path = changed(tmp_path, ('"1f1b"', lists))
    result = flashrec("simulate", path)
    assert result.exit_code == 2
    assert "B0 of stage 1 never becomes ready" in result.output


def test_what_does_not_fit_ends_with_1(tmp_path: Path) -> None:
    path = changed(
        tmp_path, ("tensor_parallel = 4", "tensor_parallel = 1"), ("data_parallel = 4", "data_parallel = 16")
    )
    path = changed(
        tmp_path, ("micro_batch = 2", "micro_batch = 4"), ('"selective"', '"none"'), text=path.read_text()
    )
    result = flashrec("simulate", path)
    assert result.exit_code == 1
    assert "does not fit in device memory:\n  stage 3: " in result.output
    assert "batch time" not in result.output


def test_wrong_calls_end_with_2(tmp_path: Path) -> None:
    for arguments, says in (
        (("simulate",), "Missing argument"),
        (("simulate", tmp_path / "none.toml"), "does not exist"),
        (("simulate", tmp_path / "none.yaml"), "must end in .toml or .json"),
        (("simulate", EXAMPLES / "gpt-175b-1024.toml"), "no [strategy]"),
        (("simulate", PIPELINE, "--fill-missing"), "--profile"),
        (("simulate", PIPELINE, "--profile", tmp_path / "none.json"), "does not exist"),
        (("plan",), "give --model, --cluster, --global-batch"),
        (("plan", "--config", PIPELINE, "--schedule", "1f1"), "nearest: '1f1b'"),
        (("plan", "--explain", PIPELINE, EXAMPLES / "gpt-175b-1024.toml"), "no [strategy]"),
    ):
        result = flashrec(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert says in result.output


def test_missing_events_are_listed(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"format": 1, "note": "", "events": {}}))
    result = flashrec("simulate", PIPELINE, "--profile", profile)
    assert result.exit_code == 2
    assert "events are not in the profile" in result.output
    assert "gemm[" in result.output
    assert "measure them with: flashrec profile" in result.output
    filled = flashrec("simulate", PIPELINE, "--profile", profile, "--fill-missing", "--json")
    shown = flashrec("simulate", PIPELINE, "--profile", profile, "--fill-missing").output
    assert re.search(r"\d+ events were not in the profile: their times are the analytic model's", shown)
    bare = flashrec("simulate", PIPELINE, "--json")
    assert json.loads(filled.output)["batch_s"] == json.loads(bare.output)["batch_s"]


@pytest.mark.parametrize("form", ["plan", "simulate"])
def test_two_strategies_are_compared(form: str) -> None:
    arguments = ("plan", "--explain", PIPELINE, ZERO_BUBBLE)
    if form == "simulate":
        arguments = ("simulate", PIPELINE, "--explain", ZERO_BUBBLE)
    document = json.loads(flashrec(*arguments, "--json").output)
    parts = document["parts"]
    assert sum(part["difference_ns"] for part in parts) == document["difference_ns"]
    for key, which in (("first_ns", "first"), ("second_ns", "second")):
        assert sum(part[key] for part in parts) == round(document[which]["batch_s"] * 1e9)
    shown = flashrec(*arguments).output
    assert "B is faster" in shown
    assert parts[0]["part"] == "idle"
    assert f"{document['difference_ns'] / 1e6:,.3f} ms" in shown


def test_plan_ranks_and_says_why_others_lose(small: Path) -> None:
    result = flashrec("plan", "--config", small, "--best", 3)
    assert result.exit_code == 0, result.output
    assert "The best" in result.output
    assert "Why the others lose" in result.output
    document = json.loads(flashrec("plan", "--config", small, "--best", 3, "--json").output)
    steps = [one["batch_s"] for one in document["best"]]
    assert len(steps) == 3
    assert steps == sorted(steps)
    assert document["considered"] == 3 + len(document["losers"])
    assert all(loser["reason"] and loser["detail"] for loser in document["losers"])
    best = document["best"][0]["strategy"]
    assert re.search(
        rf"^1 +{best['tensor_parallel']} +{best['pipeline_parallel']} +{best['data_parallel']} ",
        result.output,
        re.M,
    )


def test_the_planned_step_is_the_simulated_one(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    result = flashrec("plan", "--config", small, "--best", 1, "--json", "--write", path)
    best = json.loads(result.output)["best"][0]
    document = json.loads(flashrec("simulate", path, "--json").output)
    assert document["batch_s"] == best["batch_s"]
    assert document["strategy"] == best["strategy"]
    wrong = flashrec("plan", "--config", small, "--write", tmp_path / "best.toml")
    assert wrong.exit_code == 2
    assert "must end in .json" in wrong.output


def test_plan_takes_model_and_cluster_from_files_of_their_own(small: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text('{"num_layers": 2, "hidden": 512, "num_heads": 4, "sequence": 128, "vocabulary": 1000}')
    result = flashrec(
        "plan", "--model", model, "--cluster", small, "--global-batch", 4, "--schedule", "gpipe"
    )
    assert result.exit_code == 0, result.output
    assert "transformer on 4 x A100-80GB, global batch 4" in result.output
    assert "1f1b" not in result.output
    wrong = flashrec("plan", "--model", model, "--cluster", model, "--global-batch", 4)
    assert wrong.exit_code == 2
    assert "cluster: unknown key 'num_layers'" in wrong.output


def test_failures_are_simulated_with_the_step(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'daemon'}")
    text = small.read_text() + "\n[failures]\nduration_s = 2e6\nrates = { device_mtbf_hours = 500.0 }\n"
    small.write_text(text)
    document = json.loads(flashrec("simulate", small, "--failures", "--json").output)
    policies = {one["policy"]: one for one in document["failures"]["policies"]}
    assert policies["flashrec"]["recoveries"] > 0
    assert policies["flashrec"]["goodput"] > policies["checkpoint-restart"]["goodput"]
    assert "| checkpoint-restart |" in flashrec("simulate", small, "--failures").output
    planned = json.loads(flashrec("plan", "--config", small, "--goodput", "--best", 2, "--json").output)
    for one in planned["best"]:
        assert 0.5 < one["goodput"] < 1
        assert one["score_s"] == pytest.approx(one["batch_s"] / one["goodput"])
    small.write_text(text.replace("duration_s", "durations_s"))
    wrong = flashrec("simulate", small, "--failures")
    assert wrong.exit_code == 2
    assert "duration_s" in wrong.output


def test_a_slow_device_is_told(tmp_path: Path) -> None:
    path = changed(tmp_path, ("num_nodes = 8", "num_nodes = 8\nspeed_factors = { 17 = 0.5 }"))
    result = flashrec("simulate", path)
    assert "1 of 64 devices are not of normal speed" in result.output
    document = json.loads(flashrec("simulate", path, "--json").output)
    assert document["batch_s"] > json.loads(flashrec("simulate", PIPELINE, "--json").output)["batch_s"]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_examples_say_how_they_are_run(example: Path) -> None:
    lines = re.findall(r"^# +flashrec (.*)$", example.read_text(), re.M)
    assert lines
    for line in lines:
        assert example.name in line
        assert_command_exists(shlex.split(line))


def test_the_pages_commands_exist() -> None:
    shown = shown_commands("flashrec", DOCS)
    assert {"simulate", "plan"} == {arguments[0] for arguments in shown}
    for arguments in shown:
        assert_command_exists(arguments)


def test_the_pages_snippets_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    for snippet in snippets("python", DOCS):
        exec(compile(snippet, "docs/simulator.md", "exec"), {})
    assert "Strategy(data_parallel=" in capsys.readouterr().out
    pictures = re.findall(r"!\[.*\]\((.*)\)", DOCS)
    assert pictures
    for picture in pictures:
        ElementTree.parse(ROOT / "docs" / picture)


def assert_command_exists(arguments: list[str]) -> None:
    """That its options are known, and the files it reads are there."""
    command = cli.commands.commands[arguments[0]]
    context = command.make_context(arguments[0], list(arguments[1:]))
    reads = [context.params.get(name) for name in ("config", "model", "cluster", "other")]
    reads += list(context.params.get("explain") or ())
    for path in reads:
        assert path is None or (ROOT / path).exists(), path
