"""What ranks told each other before the first gate, kept for a replacement that was not there.

A script may exchange small things while it builds (a seed broadcast from rank 0, a vocabulary
size). A replacement runs the same lines alone, so each rank's results are recorded, and given
back to whoever takes that rank. There are two records:

    until protect()     every collective
    of the first step   with `told_only`: what tells a rank what to do, and is said once. That is objects, and
                        integers from one peer; it is how the stages of a pipeline tell each other the
                        shapes they will send. The rest of the step is data, which a rehearsal makes up.

A record is a file of msgpack maps, one per collective, in the order of issue:

    {"op": str, "group": str, "source": int | nil, "results": [[dtype, shape, bytes], ...] | nil}

`results` is nil where they were larger than LIMIT_BYTES: the replacement then does that one
detached (parameters broadcast by DDP, say: they are pulled later anyway). A file that ends in the
middle of a map counts as ended before it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch import Tensor

from flashrec.detached import tensors_in

LIMIT_BYTES = 64 * 1024
TOTAL_LIMIT_BYTES = 16 * 1024 * 1024


class Entry:
    """One collective's place in the record; the place is taken at issue, filled at completion."""

    def __init__(self, recorder: Recorder, op: str, group: str) -> None:
        self._recorder = recorder
        self.op = op
        self.group = group
        self.packed: bytes | None = None
        self.failed = False

    def fill(self, results: Any, source: int | None = None) -> None:
        """Record the outputs as they are now. Only the first call counts."""
        if self.packed is None and not self.failed:
            record = {"op": self.op, "group": self.group, "source": source, "results": _capture(results)}
            self._recorder.settle(self, msgpack.packb(record))

    def fail(self) -> None:
        """The collective failed: the record ends before it."""
        self._recorder.settle(self, None)


class Recorder:
    """Writes a record. Thread-safe: completions also arrive on the transport's threads."""

    def __init__(self, path: Path, *, told_only: bool = False) -> None:
        self.told_only = told_only
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        self._lock = threading.Lock()
        self._pending: deque[Entry] = deque()
        self._written_bytes = 0

    def expect(self, op: str, group: str) -> Entry:
        entry = Entry(self, op, group)
        with self._lock:
            self._pending.append(entry)
        return entry

    def settle(self, entry: Entry, packed: bytes | None) -> None:
        with self._lock:
            entry.packed, entry.failed = packed, packed is None
            self._write_settled()

    def close(self) -> None:
        """End the record; what has not completed by now is left out, and with it all after it."""
        with self._lock:
            self._pending.clear()
            self._file.close()

    def _write_settled(self) -> None:
        while self._pending and not self._file.closed:
            head = self._pending[0]
            if head.failed or self._written_bytes > TOTAL_LIMIT_BYTES:
                self._pending.clear()
                self._file.close()
                return
            if head.packed is None:
                break
            self._pending.popleft()
            self._file.write(head.packed)
            self._written_bytes += len(head.packed)
        if not self._file.closed:
            self._file.flush()


class Player:
    """Gives a record back, in order, for as long as the script does what the record says."""

    def __init__(self, path: Path, *, told_only: bool = False) -> None:
        self.told_only = told_only
        self._entries: deque[dict[str, Any]] = deque(_read(path))
        self.source: int | None = None

    @property
    def remaining(self) -> int:
        return len(self._entries)

    def skip(self, op: str, group: str) -> None:
        """This collective needs no results; one that differs from the record ends it, as in `play`."""
        if self._entries and (self._entries[0].get("op"), self._entries[0].get("group")) == (op, group):
            self._entries.popleft()
        else:
            self._entries.clear()

    def play(self, op: str, group: str, results: Any) -> bool:
        """Fill `results` with what was recorded; False where the caller must do it detached.

        The first collective that differs from the record (op, group, shapes or dtypes) ends it:
        from there on this process does something else than its predecessor did.
        """
        self.source = None
        if not self._entries:
            return False
        entry = self._entries.popleft()
        if entry.get("op") != op or entry.get("group") != group:
            self._entries.clear()
            return False
        if entry.get("results") is None:
            return False
        outputs = list(tensors_in(results))
        try:
            values = [_restore(item) for item in entry["results"]]
        except (TypeError, ValueError, AttributeError, RuntimeError):
            values = []  # not something a Recorder writes: treated as a record that differs
        if [(v.dtype, v.shape) for v in values] != [(o.dtype, o.shape) for o in outputs]:
            self._entries.clear()
            return False
        with torch.no_grad():
            for output, value in zip(outputs, values, strict=True):
                output.copy_(value)
        self.source = entry.get("source")
        return True


def _capture(results: Any) -> list[tuple[str, list[int], bytes]] | None:
    outputs = list(tensors_in(results))
    if any(o.layout != torch.strided for o in outputs) or sum(o.nbytes for o in outputs) > LIMIT_BYTES:
        return None
    return [(str(o.dtype).removeprefix("torch."), list(o.shape), _bytes(o)) for o in outputs]


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _restore(item: Any) -> Tensor:
    name, shape, data = item
    dtype = getattr(torch, name)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _read(path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    if not path.exists():
        return entries  # nobody was there to record anything
    with open(path, "rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=2 * TOTAL_LIMIT_BYTES)
        try:
            for entry in unpacker:
                if not isinstance(entry, dict):
                    break
                entries.append(entry)
        except (msgpack.UnpackException, ValueError):
            pass  # a predecessor that was killed while it wrote: the record ends before the tear
    return entries
