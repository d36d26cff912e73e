"""Sealed versions of one rank's private state in shared memory, which outlive the rank. No torch.

A slot is one file, private/r<rank>.v<version>.g<generation>, that appears by rename when it is complete:

    0        8        12     16        24           32      40                    48                56 |
    magic  | format | rank | version | generation | size  | checksum of payload | of the header   | payload
    ...

The three newest versions are kept: private state of `s + 1` is sealed in the gate of step `s`, when it is not yet
known that every rank has sealed its tensors at `s`, and the job may have to go back to `s - 1`. That of full versions
(live regime) lies in a directory of its own, `full/`, where the two newest are kept: the next is sealed only when every
rank has sealed the one before. A version sealed
again in a later generation (its step was redone) takes the place of the earlier attempt, and one of an
earlier generation is refused: whoever writes it has been replaced.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashrec.errors import IntegrityError, UsageError
from flashrec.state.codec import Buffer, checksum
from flashrec.state.files import ASIDE, fault, make_directory, remove, write_whole

SLOT_NAME = re.compile(r"r(\d{1,9})\.v(\d{1,18})\.g(\d{1,18})", re.ASCII)

KEPT_VERSIONS = 3
KEPT_FULL_VERSIONS = 2
# Directories: of what this node's ranks sealed, and of what it keeps for those of other nodes.
PRIVATE, FULL = "private", "full"
REPLICA_PRIVATE, REPLICA_FULL = "replica-private", "replica-full"

_MAGIC = b"FLASHSLT"
_FORMAT = 1
_FIELDS = struct.Struct("<8sIIQQQQ")
_HEADER_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _HEADER_CHECKSUM.size


@dataclass(frozen=True, order=True)
class SealedSlot:
    """One complete version; `size_bytes` is that of the payload."""

    version: int
    generation: int
    size_bytes: int


class PrivateSlots:
    """The slots of `rank` in `directory` (`private/` or `full/` below the job's directory in shared memory), of which
    the `kept` newest stay.

    One process at a time seals; any may read. Raises EnvironmentFault when the directory cannot be made."""

    def __init__(self, directory: Path | str, rank: int, kept: int = KEPT_VERSIONS) -> None:
        self.directory = Path(directory)
        self.rank = rank
        self.kept = kept
        self._is_swept = False
        make_directory(self.directory)

    def seal(self, version: int, generation: int, payload: Buffer, *, again: bool = False) -> None:
        """Make `payload` the rank's state at `version`, then let go of all but the newest versions.

        `again`: it takes the place, atomically, of what this generation sealed for the version before.

        Raises UsageError for a generation older than one already sealed, a version older than one this
        generation sealed, and when this very (version, generation) is sealed with other bytes;
        EnvironmentFault when there is no room. Either way all sealed versions stay as they are."""
        slots = self._slots()
        newest_generation = max((slot.generation for slot in slots), default=0)
        if generation < newest_generation:
            raise UsageError(
                f"rank {self.rank} cannot seal version {version} in generation {generation}: "
                f"generation {newest_generation} has already sealed; this process has been replaced"
            )
        if any(slot.generation == generation and slot.version > version for slot in slots):
            raise UsageError(
                f"rank {self.rank} cannot seal version {version}: generation {generation} has sealed a later "
                "one"
            )
        if not self._is_swept:
            self._sweep()
        key = (version, generation)
        same = next((slot for slot in slots if (slot.version, slot.generation) == key), None)
        if same is not None and not again:
            if self._read(same) != bytes(payload):
                raise UsageError(
                    f"rank {self.rank} has sealed version {version} in generation {generation} already, "
                    "with other bytes"
                )
        else:
            size_bytes = memoryview(payload).nbytes
            header = _header(self.rank, version, generation, size_bytes, checksum(payload))
            write_whole(self._path(version, generation), [header, payload], HEADER_BYTES + size_bytes)
            slots = [slot for slot in slots if slot is not same]
            slots.append(SealedSlot(version, generation, size_bytes))
        # What an older generation sealed above this version was lost with it: the plan resumed below.
        current = [slot for slot in slots if slot.version <= version]
        keep = set(_newest(current)[-self.kept :])
        for slot in slots:
            if slot not in keep:
                remove(self._path(slot.version, slot.generation))

    def sealed(self) -> list[SealedSlot]:
        """The complete slots, oldest version first; of a version sealed in several generations, the last."""
        return _newest([slot for slot in self._slots() if self._is_whole(slot)])

    def read(self, version: int) -> bytes:
        """The payload of `version`, as the latest generation sealed it.

        Raises IntegrityError when there is none, or its bytes are not those that were sealed: take another
        source."""
        slots = [slot for slot in self._slots() if slot.version == version]
        if not slots:
            raise IntegrityError(f"rank {self.rank} has no sealed version {version} in {self.directory}")
        return self._read(max(slots))

    def discard_above(self, version: int) -> list[SealedSlot]:
        """Remove every version above `version`, whole or not, and what dead writers left; returns the slots
        removed. To be called before a generation that resumes at `version` seals."""
        removed = [slot for slot in self._slots() if slot.version > version]
        for slot in removed:
            remove(self._path(slot.version, slot.generation))
        self._sweep()
        return removed

    def _path(self, version: int, generation: int) -> Path:
        return self.directory / f"r{self.rank}.v{version}.g{generation}"

    def _slots(self) -> list[SealedSlot]:
        """Every visible slot of this rank, by name, with the size its file has."""
        slots = []
        prefix = f"r{self.rank}."
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    match = SLOT_NAME.fullmatch(entry.name) if entry.name.startswith(prefix) else None
                    if match is not None:
                        try:
                            size_bytes = entry.stat(follow_symlinks=False).st_size - HEADER_BYTES
                        except FileNotFoundError:
                            continue  # removed since it was listed
                        slots.append(SealedSlot(int(match[2]), int(match[3]), size_bytes))
        except OSError as error:
            raise fault(self.directory, 0, error) from error
        return slots

    def _is_whole(self, slot: SealedSlot) -> bool:
        try:
            with open(self._path(slot.version, slot.generation), "rb") as file:
                header = file.read(HEADER_BYTES)
            return self._check_header(header, slot) == slot.size_bytes
        except (OSError, IntegrityError):
            return False

    def _read(self, slot: SealedSlot) -> bytes:
        where = f"version {slot.version} (generation {slot.generation}) of rank {self.rank}"
        try:
            data = self._path(slot.version, slot.generation).read_bytes()
        except OSError as error:
            raise IntegrityError(f"{where} cannot be read: {error.strerror}") from error
        size_bytes = self._check_header(data[:HEADER_BYTES], slot)
        payload = data[HEADER_BYTES:]
        if len(payload) != size_bytes:
            raise IntegrityError(f"{where} is truncated: {len(payload)} bytes of {size_bytes}")
        if checksum(payload) != _FIELDS.unpack_from(data)[6]:
            raise IntegrityError(f"{where} does not match its checksum")
        return payload

    def _check_header(self, header: bytes, slot: SealedSlot) -> int:
        """The size of the payload; raises IntegrityError when this is not the header of `slot`."""
        where = f"version {slot.version} (generation {slot.generation}) of rank {self.rank}"
        if len(header) != HEADER_BYTES:
            raise IntegrityError(f"{where} is truncated in its header")
        if checksum(header[: _FIELDS.size]) != _HEADER_CHECKSUM.unpack_from(header, _FIELDS.size)[0]:
            raise IntegrityError(f"{where} has a damaged header")
        magic, file_format, rank, version, generation, size_bytes, _ = _FIELDS.unpack_from(header)
        if magic != _MAGIC or file_format != _FORMAT:
            raise IntegrityError(f"{where} is not in a form this release reads")
        if (rank, version, generation) != (self.rank, slot.version, slot.generation):
            raise IntegrityError(
                f"{where} holds version {version} (generation {generation}) of rank {rank} instead"
            )
        assert isinstance(size_bytes, int)
        return size_bytes

    def _sweep(self) -> None:
        """Remove what writers of this rank that died while writing left aside."""
        prefix = f"{ASIDE}r{self.rank}."
        try:
            names = [name for name in os.listdir(self.directory) if name.startswith(prefix)]
        except OSError as error:
            raise fault(self.directory, 0, error) from error
        for name in names:
            remove(self.directory / name)
        self._is_swept = True


def _header(rank: int, version: int, generation: int, size_bytes: int, payload_checksum: int) -> bytes:
    fields = _FIELDS.pack(_MAGIC, _FORMAT, rank, version, generation, size_bytes, payload_checksum)
    return fields + _HEADER_CHECKSUM.pack(checksum(fields))


def _newest(slots: list[SealedSlot]) -> list[SealedSlot]:
    """For each version its latest generation; oldest version first."""
    latest: dict[int, SealedSlot] = {}
    for slot in slots:
        if slot.version not in latest or latest[slot.version].generation < slot.generation:
            latest[slot.version] = slot
    return sorted(latest.values())


def read_first(root: Path, names: Sequence[str], rank: int, version: int) -> bytes:
    """The payload of `version`, from the first of these directories below `root` that has it whole. IntegrityError when
    none has, with what each said."""
    problems = []
    for name in names:
        if (root / name).is_dir():
            try:
                return PrivateSlots(root / name, rank).read(version)
            except IntegrityError as error:
                problems.append(str(error))
    raise IntegrityError("; ".join(problems) or f"no private state of rank {rank} is here")
