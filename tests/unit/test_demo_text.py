"""The demo's corpus and the dataset over it."""

import sysconfig
from pathlib import Path

import pytest
import torch

import text


@pytest.fixture
def corpus() -> torch.Tensor:
    return text.load_corpus(100_000)


def test_corpus_is_python_source_and_the_same_each_time() -> None:
    corpus = text.load_corpus()
    assert corpus.dtype == torch.uint8
    assert text.MAX_CORPUS_BYTES // 2 < len(corpus) <= text.MAX_CORPUS_BYTES
    assert int(corpus.max()) < text.VOCAB_SIZE
    assert torch.equal(corpus, text.load_corpus())
    assert "\nimport " in text.decode(corpus[:200_000].tolist())


def test_corpus_obeys_its_cap() -> None:
    assert len(text.load_corpus(1000)) == 1000
    assert torch.equal(text.load_corpus(1000), text.load_corpus(2000)[:1000])


def test_source_files_are_in_a_fixed_order_and_free_of_installed_packages() -> None:
    names = [path.name for path in text.source_files()]
    assert names == sorted(names)
    assert {"argparse.py", "typing.py"} <= set(names)
    assert {path.parent for path in text.source_files()} == {Path(sysconfig.get_paths()["stdlib"])}


def test_encode_keeps_the_alphabet_and_marks_the_rest() -> None:
    assert text.decode(text.encode(text.ALPHABET.encode())) == text.ALPHABET
    assert text.decode(text.encode("a\tb\r\né".encode())) == "a b\n??"


def test_python_without_sources_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="without its library's sources"):
        text.load_corpus()


def test_digest_tells_corpora_apart(corpus: torch.Tensor) -> None:
    changed = corpus.clone()
    changed[500] += 1
    assert text.corpus_digest(corpus) == text.corpus_digest(corpus.clone())
    assert text.corpus_digest(corpus) != text.corpus_digest(changed)


def test_targets_are_the_text_one_character_on(corpus: torch.Tensor) -> None:
    windows = text.Windows(corpus, num_windows=10, context=32, noise=0.0)
    assert len(windows) == 10
    inputs, targets = windows[3]
    assert inputs.shape == targets.shape == (32,)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[1:], targets[:-1])
    assert text.decode(targets.tolist()) in text.decode(corpus.tolist())


def test_every_read_draws_from_the_global_generator(corpus: torch.Tensor) -> None:
    windows = text.Windows(corpus, num_windows=10, context=32)
    torch.manual_seed(1)
    first, second = windows[3], windows[3]
    torch.manual_seed(1)
    again = windows[3]
    torch.manual_seed(2)
    other = windows[3]
    assert torch.equal(first[1], again[1])
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[1], second[1])
    assert not torch.equal(first[1], other[1])


def test_noise_damages_inputs_only(corpus: torch.Tensor) -> None:
    torch.manual_seed(0)
    inputs, targets = text.Windows(corpus, num_windows=1, context=2000, noise=0.2)[0]
    damaged = (inputs[1:] != targets[:-1]).float().mean()
    assert 0.15 < damaged < 0.25


def test_first_and_last_window_stay_inside() -> None:
    corpus = torch.arange(50, dtype=torch.uint8)
    windows = text.Windows(corpus, num_windows=7, context=14, noise=0.0)
    seen = [windows[index][1] for index in (0, 6) for _ in range(50)]
    assert all(len(targets) == 14 for targets in seen)
    for index in (-1, 7):
        with pytest.raises(IndexError):
            windows[index]


def test_more_windows_than_text_are_refused(corpus: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="do not fit into 100000 characters"):
        text.Windows(corpus, num_windows=200_000, context=32)


def test_with_a_seed_a_window_is_the_same_whatever_was_drawn_before(corpus: torch.Tensor) -> None:
    windows = text.Windows(corpus, num_windows=5, context=64, seed=3)
    other = text.Windows(corpus, num_windows=5, context=64, seed=4)
    first = windows[2]
    before = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(windows[2], first, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(other[2][0], first[0])
