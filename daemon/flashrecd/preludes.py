"""What ranks told each other before the first gate (see `flashrec.prelude`), as it lies in one node's memory: small,
and written once.

A replacement plays it back, wherever it is. So the leader has all of it in its own directory: agents tell it what their
ranks have recorded, and are told it of a rank that comes to them. It travels in pieces, for a message has a bound.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from flashrec.errors import EnvironmentFault, ProtocolError
from flashrec.protocol import agents as ag

PIECE_BYTES = 1 << 20
MAX_BYTES = 64 << 20  # several times what is ever recorded
_NAME = re.compile(r"(?:first-)?r\d{1,9}", re.ASCII)


class Preludes:
    """Those below a job's directory."""

    def __init__(self, shm_dir: Path) -> None:
        self._directory = shm_dir / "prelude"
        self._told: dict[str, int] = {}  # by name, so many bytes

    def all(self, rank: int) -> Iterator[ag.Prelude]:
        """All that there is of `rank`."""
        for name in _names(rank):
            yield from self._pieces(name, 0)

    def news(self, rank: int) -> Iterator[ag.Prelude]:
        """What was added since the last time."""
        for name in _names(rank):
            for piece in self._pieces(name, self._told.get(name, 0)):
                self._told[name] = piece.offset + len(piece.data)
                yield piece

    def begun_anew(self, rank: int) -> None:
        """What it records now takes the place of what it had recorded."""
        for name in _names(rank):
            self._told.pop(name, None)

    def take(self, piece: ag.Prelude) -> None:
        """Raises ProtocolError for what is none, EnvironmentFault when it cannot be written."""
        if not _NAME.fullmatch(piece.name) or not 0 <= piece.offset <= MAX_BYTES - len(piece.data):
            raise ProtocolError(f"no prelude is called {piece.name!r:.40} and has a byte {piece.offset}")
        path = self._directory / piece.name
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(path, flags, 0o600), "wb") as file:
                if os.fstat(file.fileno()).st_size < piece.offset:
                    raise ProtocolError(f"what comes before byte {piece.offset} of {piece.name} is missing")
                os.ftruncate(file.fileno(), piece.offset)
                file.seek(piece.offset)
                file.write(piece.data)
        except OSError as error:
            raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from None
        self._told[piece.name] = piece.offset + len(piece.data)

    def _pieces(self, name: str, start: int) -> Iterator[ag.Prelude]:
        try:
            with open(self._directory / name, "rb") as file:
                file.seek(start)
                while data := file.read(PIECE_BYTES):
                    yield ag.Prelude(name, start, data)
                    start += len(data)
        except OSError:
            return  # nobody has recorded anything


def _names(rank: int) -> tuple[str, str]:
    return f"r{rank}", f"first-r{rank}"
