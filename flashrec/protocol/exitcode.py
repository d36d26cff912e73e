"""With which code a process exits, for a daemon that cannot ask the kernel: another program is its parent.

It is left in a file, for a message might be read after the kernel's news that the process is gone. Python tells its
exit handlers nothing of it, and where `raise SystemExit(3)` is concerned nobody else. The C library does: what is
registered with on_exit() is called with the code and one argument, when the interpreter has ended and no Python can
run. Just so one calls fputc(), and what it writes is one byte. Torch-free.
"""

import contextlib
import ctypes
import os
from pathlib import Path


def _path(directory: Path, proc: str) -> Path:
    return directory / f"exit-{proc}"


def leave_exit_code(directory: Path, proc: str) -> bool:
    """From now on an orderly end of this process, not of its forks, leaves its code there; no signal does, nor
    os._exit(). False where the C library cannot do that."""
    libc = ctypes.CDLL(None)
    try:
        on_exit, fputc, fopen, fileno = libc.on_exit, libc.fputc, libc.fopen, libc.fileno
    except AttributeError:
        return False
    fopen.restype = ctypes.c_void_p
    file = fopen(os.fsencode(_path(directory, proc)), b"we")
    if not file:
        return False
    on_exit.argtypes = ctypes.c_void_p, ctypes.c_void_p
    fileno.argtypes = (ctypes.c_void_p,)
    fd = fileno(file)

    def redirect() -> None:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, fd, inheritable=False)
        os.close(null)

    os.register_at_fork(after_in_child=redirect)
    registered: int = on_exit(ctypes.cast(fputc, ctypes.c_void_p), file)
    return registered == 0


def say_exit_code(directory: Path, proc: str, code: int) -> None:
    """This process is about to exit with `code`. What cannot be written is not: then nobody can know."""
    with contextlib.suppress(OSError):
        _path(directory, proc).write_bytes(bytes([code & 0xFF]))


def exit_code(directory: Path, proc: str) -> int | None:
    """What a process has left; None if nothing."""
    try:
        left = _path(directory, proc).read_bytes()
    except OSError:
        return None
    return left[0] if left else None
