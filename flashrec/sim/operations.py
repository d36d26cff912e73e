"""The operations of a pipeline schedule: one micro-batch through one chunk of a stage, forward or backward."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import lru_cache

from flashrec.errors import UsageError


class Kind(enum.IntEnum):
    """What an operation computes. BACKWARD is the input's gradient alone where the schedule has WEIGHT."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.WEIGHT: "W"}
_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_OP = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Op:
    """One micro-batch through one chunk of a stage. Written "F0", or "F0.1" for chunk 1."""

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")

    @classmethod
    def parse(cls, text: str) -> Op:
        """The operation that "F0", "B3" or "W2.1" names. Raises UsageError for any other text."""
        found = _OP.fullmatch(text.strip())
        if found is None:
            raise UsageError(
                f"{text!r} is no operation: write F, B or W, the micro-batch, and .chunk if any ('F0', 'B3.1')"
            )
        letter, micro_batch, chunk = found.groups()
        return operation(_KINDS[letter], int(micro_batch), int(chunk or 0))


@lru_cache(maxsize=1 << 16)
def operation(kind: Kind, micro_batch: int, chunk: int = 0) -> Op:
    """The operation; an equal one is the same object, for a large schedule has thousands."""
    return Op(kind, micro_batch, chunk)
