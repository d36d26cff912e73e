"""Real text that every machine with Python has: the standard library's own source files.

The corpus is a tensor of character codes (uint8) over a fixed alphabet: newline and the printable
ASCII characters. The same Python installation gives the same corpus, in every process and run.
"""

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.utils.data import Dataset

ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
VOCAB_SIZE = len(ALPHABET)
UNKNOWN = ALPHABET.index("?")
MAX_CORPUS_BYTES = 1 << 21

_CODES = bytes(ALPHABET.index(chr(byte)) if chr(byte) in ALPHABET else UNKNOWN for byte in range(256))


def source_files() -> list[Path]:
    """The standard library's top-level modules, sorted by name.

    Only the top level: below it lie site-packages and, on some machines, files that come and go.
    """
    return sorted(path for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py") if path.is_file())


def encode(text: bytes) -> bytes:
    """One code per byte; a tab becomes a space, whatever else the alphabet lacks a question mark."""
    return text.replace(b"\r\n", b"\n").replace(b"\t", b" ").translate(_CODES)


def decode(codes: Iterable[int]) -> str:
    """The text that codes stand for."""
    return "".join(ALPHABET[code] for code in codes)


def load_corpus(max_bytes: int = MAX_CORPUS_BYTES) -> torch.Tensor:
    """The corpus, at most `max_bytes` characters, as a tensor of shape (characters,) and type uint8.

    Raises:
        FileNotFoundError: this Python came without its sources.
    """
    pieces: list[bytes] = []
    size_bytes = 0
    for path in source_files():
        if size_bytes >= max_bytes:
            break
        pieces.append(encode(path.read_bytes()))
        size_bytes += len(pieces[-1])
    if not pieces:
        folder = sysconfig.get_paths()["stdlib"]
        raise FileNotFoundError(f"no .py files in {folder}: this Python came without its library's sources")
    return torch.frombuffer(bytearray(b"".join(pieces)[:max_bytes]), dtype=torch.uint8)


def corpus_digest(corpus: torch.Tensor) -> str:
    """sha256 of the corpus: two runs can only be compared if they read the same text."""
    return hashlib.sha256(corpus.numpy().tobytes()).hexdigest()


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of the corpus, evenly spread, each moved and damaged at random when it is read.

    The randomness comes from torch's global generator in whichever process reads: with loader workers
    that is the worker's, seeded from its rank's. So what a rank sees depends on its own RNG state, which
    is what makes this hard to bring back after a failure. With a `seed` a window is always moved and damaged
    in the same way: what ranks need that must all read the same.

    An item is (inputs, targets), each of shape (context,) and type int64; targets are the inputs one
    character on, undamaged.
    """

    def __init__(
        self,
        corpus: torch.Tensor,
        *,
        num_windows: int,
        context: int,
        noise: float = 0.05,
        seed: int | None = None,
    ) -> None:
        self._stride = (len(corpus) - context - 1) // num_windows
        if self._stride < 1:
            raise ValueError(
                f"{num_windows} windows of {context} characters do not fit into {len(corpus)} characters"
            )
        self._corpus = corpus
        self._num_windows = num_windows
        self._context = context
        self._noise = noise
        self._seed = seed

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self._num_windows:
            raise IndexError(f"window {index} of {self._num_windows}")
        generator = None
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed * self._num_windows + index)
        start = index * self._stride + int(torch.randint(self._stride, (), generator=generator))
        window = self._corpus[start : start + self._context + 1].long()
        inputs, targets = window[:-1], window[1:]
        damaged = torch.rand(self._context, generator=generator) < self._noise
        noise = torch.randint(VOCAB_SIZE, (self._context,), generator=generator)
        return torch.where(damaged, noise, inputs), targets
