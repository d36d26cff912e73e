"""A byte of a replica is changed in the memory of the node that keeps it: its checksum is then another's."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from flashrec.errors import IntegrityError
from flashrec.state.arena import Arena, check_bytes
from flashrec.state.manifest import REPLICA
from flashrec.state.private_slots import HEADER_BYTES, REPLICA_FULL, REPLICA_PRIVATE, SLOT_NAME


@dataclass(frozen=True, kw_only=True)
class Corrupted:
    """`what`: "sealed" or "private"."""

    what: str
    rank: int
    version: int
    path: str
    offset: int

    def __str__(self) -> str:
        return f"{self.what} version {self.version} of rank {self.rank}"


def corrupt(
    directory: Path, rank: int, job: str, *, all_private: bool = False, but: Collection[Corrupted] = ()
) -> list[Corrupted]:
    """Change a byte of the newest version of `rank` that lies whole in `directory`, the job's on a node: of its
    tensors, if they are kept there, and of its private state (`all_private`: of all versions of that, for which of them
    a plan needs is not known beforehand). Which; those in `but` are corrupt already."""
    known = {(one.path, one.version) for one in but}
    found = [*_newest_tensors(directory, rank, job)]
    private = sorted(_private(directory, rank), reverse=True)
    for version, path in private if all_private else private[:1]:
        offset = HEADER_BYTES + (path.stat().st_size - HEADER_BYTES) // 2
        found.append((path, _said("private", rank, version, path, offset)))
    new = [(path, one) for path, one in found if (one.path, one.version) not in known]
    for path, one in new:
        _flip(path, one.offset)
    return [one for _, one in new]


def _newest_tensors(directory: Path, rank: int, job: str) -> Iterator[tuple[Path, Corrupted]]:
    arena = Arena(directory / REPLICA, rank, job)
    for sealed in reversed(arena.sealed()):
        try:
            state = arena.read(sealed.version)
        except IntegrityError:
            continue  # it has just been written over
        for manifest in state.manifests:
            if manifest.size_bytes:
                offset = manifest.offset + manifest.size_bytes // 2
                yield state.path, _said("sealed", rank, sealed.version, state.path, offset)
                return


def damaged(directory: Path, rank: int, job: str, version: int) -> bool:
    """Whether the sealed bytes of `version` that lie in `directory` are not those that were sealed."""
    try:
        check_bytes(Arena(directory / REPLICA, rank, job).read(version))
    except IntegrityError:
        return True
    return False


def _private(directory: Path, rank: int) -> Iterator[tuple[int, Path]]:
    for name in (REPLICA_PRIVATE, REPLICA_FULL):
        folder = directory / name
        for path in folder.iterdir() if folder.is_dir() else ():
            match = SLOT_NAME.fullmatch(path.name)
            if match is not None and int(match[1]) == rank:
                yield int(match[2]), path


def _flip(path: Path, offset: int) -> None:
    """Nothing if the file has just been taken away: a newer version has come."""
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def _said(what: str, rank: int, version: int, path: Path, offset: int) -> Corrupted:
    name = f"{path.parent.name}/{path.name}"
    return Corrupted(what=what, rank=rank, version=version, path=name, offset=offset)
