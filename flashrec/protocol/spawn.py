"""How the daemon tells a fork server, or a fresh interpreter, which process to become.

Daemon and fork server share a socketpair of kind SOCK_SEQPACKET, inherited and known to nobody else. Each
packet is one msgpack map:

    daemon -> fork server   {"fork": proc}                    with one descriptor, a file holding the ProcSpec
    fork server -> daemon   {"ready": ms, "protocol": int}    once, when everything is imported
                            {"failed": reason}                once, instead: it will never be ready
                            {"forked": proc, "pid": pid}      sent before it can run or be re-parented
                            {"refused": proc, "reason": str}

The specification travels as a file (anonymous memory), because an argument list may be larger than a packet.
A fresh interpreter inherits the same file. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgpack

from flashrec.errors import ProtocolError, UsageError

SPAWN_PROTOCOL = 1
MAX_PACKET_BYTES = 64 * 1024
MAX_SPEC_BYTES = 16 * 1024 * 1024

EXIT_NEVER_STARTED = 75
"""Exit code of a process whose fork server died between making it and letting it run (EX_TEMPFAIL)."""


@dataclass(frozen=True, kw_only=True)
class ProcSpec:
    """One process to start."""

    proc: str
    """Its name among the processes of a supervisor; unique while it lives."""
    entry: str
    """`module:function`, called in the main thread with this ProcSpec. It returns the exit code (None is 0)
    or ends as a program ends: SystemExit, or an exception, whose traceback is printed."""
    stdout_path: str
    """File that standard output is appended to; made if it is missing, its folder is not."""
    stderr_path: str
    """The same for standard error; may be the same file."""
    cwd: str
    program: Mapping[str, object] = field(default_factory=dict)
    """What the entry needs to know: anything msgpack can carry, not looked into on the way."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to set in addition to those of its launch."""

    def __post_init__(self) -> None:
        module, _, function = self.entry.partition(":")
        if not module or not function:
            raise UsageError(
                f"entry of process {self.proc!r} must read 'module:function', not {self.entry!r}"
            )

    def pack(self) -> bytes:
        """Raises UsageError when the specification is larger than MAX_SPEC_BYTES."""
        data: bytes = msgpack.packb(
            {
                "proc": self.proc,
                "entry": self.entry,
                "stdout_path": self.stdout_path,
                "stderr_path": self.stderr_path,
                "cwd": self.cwd,
                "program": dict(self.program),
                "env": dict(self.env),
            },
            unicode_errors="surrogateescape",  # an argument or a path may be any bytes
        )
        if len(data) > MAX_SPEC_BYTES:
            raise UsageError(
                f"arguments and environment of process {self.proc!r} take {len(data)} bytes; "
                f"at most {MAX_SPEC_BYTES} can be handed over"
            )
        return data

    @classmethod
    def unpack(cls, data: bytes) -> ProcSpec:
        """Raises ProtocolError when `data` is not what `pack` makes."""
        fields = unpack_map(data, MAX_SPEC_BYTES)
        texts = {name: _text(fields, name) for name in ("proc", "entry", "stdout_path", "stderr_path", "cwd")}
        program, env = fields.pop("program", None), fields.pop("env", None)
        if not isinstance(program, dict) or not isinstance(env, dict) or fields:
            raise ProtocolError(f"not a process specification (left over: {sorted(map(str, fields))})")
        if not all(isinstance(key, str) and isinstance(value, str) for key, value in env.items()):
            raise ProtocolError("the environment in a process specification must map text to text")
        try:
            return cls(program=program, env=env, **texts)
        except UsageError as error:
            raise ProtocolError(str(error)) from error


def _text(fields: dict[str, object], name: str) -> str:
    value = fields.pop(name, None)
    if not isinstance(value, str):
        raise ProtocolError(f"field {name!r} of a process specification must be text, not {value!r}")
    return value


def unpack_map(data: bytes, max_bytes: int) -> dict[str, object]:
    """One msgpack map with text keys; anything else raises ProtocolError."""
    if len(data) > max_bytes:
        raise ProtocolError(f"a message of {len(data)} bytes where at most {max_bytes} are allowed")
    try:
        # Its limits follow from the length of `data`.
        message = msgpack.unpackb(data, unicode_errors="surrogateescape")
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message that is not msgpack: {error!r}") from error
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise ProtocolError("a message that is not a map with text keys")
    return message


def spec_file(spec: ProcSpec) -> int:
    """A descriptor of anonymous memory holding `spec`; the caller closes it."""
    data = spec.pack()
    fd = os.memfd_create("flashrec-spec", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_spec_file(fd: int) -> ProcSpec:
    """The ProcSpec in `fd`, wherever its position is. Raises ProtocolError."""
    size_bytes = os.fstat(fd).st_size
    if size_bytes > MAX_SPEC_BYTES:
        raise ProtocolError(f"a process specification of {size_bytes} bytes")
    # Not read(): the position of an open file is shared with whoever handed the descriptor over.
    return ProcSpec.unpack(os.pread(fd, size_bytes, 0))
