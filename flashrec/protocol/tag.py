"""The tag: what a rank is doing, in 64 bytes of shared memory that outlive it.

Written by the rank at every phase change and every collective (about a microsecond), read by the daemon,
by chaos scripts and by nobody's leave: at the moment of a rank's death it says where the rank was.

    offset  type  field
    0       u32   magic
    4       u32   sequence: odd while a write is under way; a reader that sees it change reads again
    8       u8    phase            flashrec.protocol.phase.Phase
    9       u8    body             1 while the step's backward pass has begun, 2 inside a section
    10      u16   attempt          of this step
    12      u32   generation
    16      i64   step             -1 before protect
    24      u64   progress         collectives and phase changes within the step
    32      u64   changed_ns       time.monotonic_ns() of the last phase change
    40      u64   committed_ns     of the last commit
    48      i64   committed        newest committed version, -1 before protect
    56      f64   loss             what the script last reported, NaN if nothing
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from flashrec.errors import EnvironmentFault, FlashrecError, IntegrityError
from flashrec.protocol.phase import IN_BODY, Phase

_LAYOUT = struct.Struct("<IIBBHIqQQQqd")
SIZE_BYTES = _LAYOUT.size
MAGIC = 0x47545246

FORWARD, BACKWARD, SECTION = 0, 1, 2

_PLACES = {
    Phase.STARTING: "start",
    Phase.IDLE: "between",
    Phase.GATED: "gate",
    Phase.APPLYING: "apply",
    Phase.TAIL: "tail",
    Phase.CLOSING: "end",
    Phase.LEFT: "end",
    Phase.GONE: "end",
}
_KNOWN_PHASES = frozenset(map(int, Phase))
PLACES = ("start", "forward", "backward", "gate", "apply", "tail", "between", "section", "recovery", "end")


@dataclass(frozen=True, slots=True)
class Tag:
    """One consistent reading."""

    phase: int
    body: int
    attempt: int
    generation: int
    step: int
    progress: int
    changed_ns: int
    committed_ns: int
    committed: int
    loss: float

    @staticmethod
    def from_bytes(data: bytes, what: str) -> "Tag | None":
        """None when nothing has been written yet. IntegrityError, which names `what` it is, for anything but a tag."""
        if not data:
            return None
        if len(data) != SIZE_BYTES:
            raise IntegrityError(f"{what} has {len(data)} bytes, not {SIZE_BYTES}")
        fields = _LAYOUT.unpack(data)
        if fields[0] == 0:
            return None  # the file was just made
        if fields[0] != MAGIC or fields[2] not in _KNOWN_PHASES:
            raise IntegrityError(f"{what} is not a tag")
        return Tag(*fields[2:])

    @property
    def place(self) -> str:
        """Where the rank is, in the words people use: one of PLACES."""
        if self.phase == Phase.COMPUTING:
            return "backward" if self.body == BACKWARD else "forward"
        if self.phase == Phase.IDLE and self.body == SECTION:
            return "section"
        return _PLACES.get(Phase(self.phase), "recovery")

    @property
    def is_at_end(self) -> bool:
        """Whether the rank's script is over: nothing of it is needed once that is so for all."""
        return self.phase in (Phase.LEFT, Phase.GONE)

    @property
    def entered(self) -> int | None:
        """The step whose body the rank is in; None between steps."""
        return self.step if self.phase in IN_BODY else None


def tag_path(shm_dir: str | Path, rank: int) -> Path:
    return Path(shm_dir) / f"r{rank}.tag"


def all_at_their_end(shm_dir: str | Path, world_size: int) -> bool:
    """Whether the script of every rank is over, by their tags."""
    for rank in range(world_size):
        reader = TagReader(tag_path(shm_dir, rank))
        try:
            tag = reader.read()
        except FlashrecError:
            return False
        finally:
            reader.close()
        if tag is None or not tag.is_at_end:
            return False
    return True


class TagWriter:
    """The rank's end. One writer per rank; the fields are attributes, `publish()` makes them visible."""

    def __init__(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EnvironmentFault(f"cannot write {path}: {error.strerror}") from None
        try:
            os.posix_fallocate(fd, 0, SIZE_BYTES)
            self._map = mmap.mmap(fd, SIZE_BYTES)
        except OSError as error:
            raise EnvironmentFault(
                f"no room for {SIZE_BYTES} bytes in {path.parent}: {error.strerror}"
            ) from None
        finally:
            os.close(fd)
        self._sequence = 0
        self.phase, self.body, self.attempt, self.generation, self.step = 0, 0, 0, 0, -1
        self.progress, self.changed_ns, self.committed_ns, self.committed = 0, 0, 0, -1
        self.loss = float("nan")
        self.publish()

    def publish(self) -> None:
        """Write all fields. The sequence goes odd first and even last, so no reader sees a mixture."""
        self._sequence = (self._sequence + 2) & 0xFFFFFFFF
        struct.pack_into("<I", self._map, 4, (self._sequence - 1) & 0xFFFFFFFF)
        packed = _LAYOUT.pack(
            MAGIC,
            (self._sequence - 1) & 0xFFFFFFFF,
            self.phase,
            self.body,
            self.attempt & 0xFFFF,
            self.generation,
            self.step,
            self.progress,
            self.changed_ns,
            self.committed_ns,
            self.committed,
            self.loss,
        )
        self._map[:] = packed
        struct.pack_into("<I", self._map, 4, self._sequence)

    def close(self) -> None:
        self._map.close()


class TagReader:
    """The watcher's end. The file may not exist yet: then `read()` gives None. IntegrityError for anything but a
    tag, EnvironmentFault when the file cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None

    def read(self) -> Tag | None:
        return Tag.from_bytes(self.raw(), str(self.path))

    def raw(self) -> bytes:
        """One consistent reading as it lies there; b"" when the file does not exist yet."""
        if self._map is None and not self._open():
            return b""
        assert self._map is not None
        # A writer that died in mid-write leaves the sequence odd: then take the fields as they are.
        for _ in range(100):
            before = self._map[4:8]
            data = self._map[:SIZE_BYTES]
            if before == self._map[4:8] and before[0] % 2 == 0:
                break
        return data

    def _open(self) -> bool:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise EnvironmentFault(f"cannot read {self.path}: {error.strerror}") from None
        try:
            if os.fstat(fd).st_size < SIZE_BYTES:
                return False
            self._map = mmap.mmap(fd, SIZE_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        return True

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
