"""The demo's model, recipe and outcome files."""

import ast
import hashlib
import json
import math
import struct
import time
from pathlib import Path

import pytest
import torch

import gpt
import outcome
import recipe
import text

DEMO = Path(recipe.__file__).parent


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch):
    """Options as a command line gives them, small enough for a unit test."""

    def parse(*arguments: str):
        monkeypatch.setattr("sys.argv", ["train.py", "--out", "unused", "--workers", "0", *arguments])
        return recipe.parse_options("a test")

    return parse


@pytest.fixture
def small(options):
    return options("--width", "32", "--layers", "1", "--context", "16", "--epoch-steps", "3")


def test_default_model_has_a_few_million_parameters(options) -> None:
    assert 2_000_000 < recipe.build_model(options()).num_parameters() < 3_000_000


def test_every_process_builds_the_same_weights(small) -> None:
    first = recipe.build_model(small).state_dict()
    torch.manual_seed(99)
    second = recipe.build_model(small).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_model_sees_no_future_and_starts_undecided(small) -> None:
    model = recipe.build_model(small).eval()
    codes = torch.randint(model.config.vocab_size, (2, 16))
    changed = codes.clone()
    changed[:, 9] = (changed[:, 9] + 1) % model.config.vocab_size
    before, after = model(codes), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])
    assert gpt.loss_of(before, codes).item() == pytest.approx(math.log(model.config.vocab_size), rel=0.1)


def test_dropout_is_on_while_training(small) -> None:
    model = recipe.build_model(small)
    codes = torch.randint(model.config.vocab_size, (2, 16))
    assert not torch.equal(model(codes), model(codes))


def test_embedding_and_head_are_one_tensor(small) -> None:
    model = recipe.build_model(small)
    assert model.head.weight is model.characters.weight


def test_width_must_divide_among_heads() -> None:
    with pytest.raises(ValueError, match="not a multiple of num_heads"):
        gpt.GPT(gpt.GPTConfig(vocab_size=4, width=50, num_heads=6))


def test_a_few_steps_lower_the_loss(small) -> None:
    model = recipe.build_model(small)
    optimizer = recipe.build_optimizer(model.parameters())
    codes = torch.randint(model.config.vocab_size, (4, 16))
    losses = []
    for _ in range(20):
        loss = gpt.loss_of(model(codes), codes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_learning_rate_warms_up_and_decays(options) -> None:
    optimizer = recipe.build_optimizer(torch.nn.Linear(1, 1).parameters())
    scheduler = recipe.build_scheduler(optimizer, options("--steps", "50"))
    rates = []
    for _ in range(50):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == pytest.approx(1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(1e-4, rel=0.05)


def test_loader_is_seeded_by_rank_when_the_rank_is_known(small) -> None:
    loader_of = recipe.loader_factory(small, text.load_corpus(100_000))
    torch.manual_seed(12345)
    loader = loader_of(3, 4)
    assert torch.initial_seed() == small.seed + 3
    assert len(loader) == small.epoch_steps


def test_ranks_share_an_epoch_without_overlap(small) -> None:
    loader_of = recipe.loader_factory(small, text.load_corpus(100_000))
    indices = [index for rank in range(4) for index in loader_of(rank, 4).sampler]
    assert sorted(indices) == list(range(small.epoch_steps * small.batch * 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "0 is less than 1"),
        (["--width", "50"], "not a multiple of 32"),
        (["--standby", "built"], "unrecognized arguments"),
        (["--parallel", "dp"], "invalid choice: 'dp'"),
    ],
)
def test_impossible_options_end_with_usage(
    options, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        options(*arguments)
    assert message in capsys.readouterr().err


def test_only_where_ranks_are_alike_is_a_standby_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*arguments: str):
        monkeypatch.setattr("sys.argv", ["train.py", "--out", "unused", *arguments])
        return recipe.parse_options("a test", with_standby=True)

    assert parse().standby == "built"
    assert parse("--parallel", "fsdp").standby == "forked"
    with pytest.raises(SystemExit):
        parse("--parallel", "fsdp", "--standby", "built")


def test_embedding_and_head_are_tied_where_no_pipeline_is_between_them(options) -> None:
    assert options("--parallel", "tp+fsdp").tied
    assert not options("--parallel", "pp").tied
    assert options("--parallel", "pp+fsdp", "--tied").tied
    assert not options("--no-tied").tied


@pytest.mark.parametrize(
    ("parallel", "replicas"),
    [
        ("ddp", [0, 1, 2, 3]),
        ("zero", [0, 1, 2, 3]),
        ("hsdp", [0, 1, 2, 3]),
        ("tp", [0, 0, 0, 0]),
        ("pp", [0, 0, 0, 0]),
        ("tp+fsdp", [0, 0, 1, 1]),
        ("pp+fsdp", [0, 0, 1, 1]),
    ],
)
def test_ranks_that_work_together_read_the_same_batch(options, parallel: str, replicas: list[int]) -> None:
    loader_of = recipe.loader_factory(
        options("--parallel", parallel, "--epoch-steps", "3", "--batch", "2"), text.load_corpus(100_000)
    )
    batches = []
    for rank in range(4):
        loader = loader_of(rank, 4)
        torch.rand(rank)  # a stage that draws more random numbers than another
        batches.append(next(iter(loader))[0])
    assert sum(len(batch) for batch in batches) == 8 * (4 // len(set(replicas)))
    for rank, replica in enumerate(replicas):
        for other, another in enumerate(replicas):
            assert torch.equal(batches[rank], batches[other]) == (replica == another)


@pytest.mark.parametrize("arguments", [(), ("--tied", "--uneven"), ("--moe", "--mixed-precision")])
def test_stages_one_after_another_are_the_whole_model(options, arguments: tuple[str, ...]) -> None:
    given = options("--width", "32", "--layers", "4", "--context", "16", "--parallel", "pp", *arguments)
    model = recipe.build_model(given)
    stages = [
        model.stage([0], first=True, last=False),
        model.stage([1, 2], first=False, last=False),
        model.stage([3], first=False, last=True),
    ]
    codes = torch.randint(model.config.vocab_size, (2, 16))
    hidden = codes
    for stage in stages:
        hidden = stage.eval()(hidden)
    assert torch.equal(hidden, model.eval()(codes))
    held = [name for stage in stages for name, _ in stage.named_parameters()]
    both = ["head.weight"] if given.tied else []
    assert sorted(held) == sorted([*both, *(name for name, _ in model.named_parameters())])
    assert (stages[0].characters.weight.data_ptr() == stages[0].positions.weight.data_ptr()) is False


def test_an_expert_that_nobody_chose_has_no_gradient_or_zeros(options) -> None:
    """What makes `--moe` worth a test elsewhere."""
    sizes = ("--width", "32", "--layers", "2", "--context", "16", "--moe")
    for parallel, idle_has_grad in (("ddp", False), ("fsdp", True)):
        given = options(*sizes, "--parallel", parallel)
        model = recipe.build_model(given)
        codes = torch.zeros(1, 16, dtype=torch.long)
        gpt.loss_of(model(codes), codes).backward()
        grads = [parameter.grad for name, parameter in model.named_parameters() if "experts" in name]
        idle = [grad for grad in grads if grad is None or not grad.count_nonzero()]
        assert 0 < len(idle) < len(grads)
        assert all((grad is not None) == idle_has_grad for grad in idle)


def test_frozen_parts_leave_something_to_train_in_every_stage(options) -> None:
    model = recipe.build_model(options("--width", "32", "--layers", "4", "--parallel", "pp", "--frozen"))
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert {"characters.weight", "positions.weight", "blocks.0.query_key_value.weight"} <= set(frozen)
    first = model.stage([0], first=True, last=False)
    assert any(parameter.requires_grad for parameter in first.parameters())


def test_history_survives_a_change_of_process_and_a_redone_step() -> None:
    first = outcome.LossHistory()
    first.record(0, 0.1)
    first.record(1, 7.0)
    second = outcome.LossHistory()
    second.load_state_dict(first.state_dict())
    second.record(1, 0.2)
    second.record(2, 0.3)
    assert second.as_hex() == [(0.1).hex(), (0.2).hex(), (0.3).hex()]
    assert first.as_hex() == [(0.1).hex(), (7.0).hex()]


def test_log_goes_on_where_the_rank_before_ended(tmp_path: Path) -> None:
    for step, attempt, loss in ((0, 0, torch.tensor(0.5)), (1, 1, None)):
        log = outcome.StepLog(tmp_path / "new", rank=2)
        log.committed(step, loss, 12.3456, attempt)
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "new" / "log.r2.jsonl").read_text().splitlines()]
    ended_ns = [line.pop("ended_ns") for line in lines]
    assert 0 < ended_ns[0] <= ended_ns[1] <= time.monotonic_ns()
    assert lines == [
        {"step": 0, "loss": "0x1.0000000000000p-1", "ms": 12.346, "attempt": 0},
        {"step": 1, "loss": None, "ms": 12.346, "attempt": 1},
    ]


def test_tensor_digest_can_be_computed_without_torch() -> None:
    raw = struct.pack("<6f", *range(6))
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert outcome.tensor_digest(tensor) == hashlib.sha256(b"<f4[2, 3]" + raw).hexdigest()
    assert outcome.tensor_digest(tensor.t().contiguous().t()) == outcome.tensor_digest(tensor)
    assert outcome.tensor_digest(-torch.zeros(1)) != outcome.tensor_digest(torch.zeros(1))


def test_outcome_covers_parameters_and_optimizer_state(small, tmp_path: Path) -> None:
    model = recipe.build_model(small)
    optimizer = recipe.build_optimizer(model.parameters())
    model(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    optimizer.step()
    history, log = outcome.LossHistory(), outcome.StepLog(tmp_path, 1)
    history.record(0, 1.5)
    log.committed(0, 1.5, 20.0)
    path = outcome.write_outcome(
        tmp_path,
        rank=1,
        world_size=2,
        corpus_sha256="c",
        model=model,
        optimizer=optimizer,
        history=history,
        log=log,
    )
    log.close()
    written = json.loads(path.read_text())
    names = [name for name, _ in model.named_parameters()]
    expected = {f"model.{name}" for name in names}
    expected |= {f"optimizer.{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(written["tensors"]) == expected
    assert written["losses"] == [(1.5).hex()]
    assert written["step_ms"] == {"0": 20.0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.r1.jsonl", "outcome.r1.json"]


def test_reference_and_what_it_imports_do_without_flashrec() -> None:
    unread, read = ["reference"], set()
    while unread:
        name = unread.pop()
        read.add(name)
        for node in ast.walk(ast.parse((DEMO / f"{name}.py").read_text())):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            else:
                continue
            assert not any(module.split(".")[0] in ("flashrec", "flashrecd") for module in imported), name
            unread += [m for m in imported if (DEMO / f"{m}.py").exists() and m not in read]
    assert {"recipe", "text", "gpt", "outcome", "parallelism"} <= read
