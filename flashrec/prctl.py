"""What Linux lets a process say of itself, prctl(2); every call raises OSError."""

import ctypes
import os

_SET_PDEATHSIG = 1
_SET_NAME = 15
_SET_TIMERSLACK = 29
_SET_CHILD_SUBREAPER = 36
_GET_CHILD_SUBREAPER = 37


def die_with_parent(signal_number: int) -> None:
    """Receive this signal when the parent ends. It may have ended already: compare os.getppid() afterwards."""
    _prctl(_SET_PDEATHSIG, ctypes.c_ulong(signal_number))


def set_name(name: str) -> None:
    """What ps and top show: 15 bytes of it."""
    _prctl(_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


def set_timer_slack(ns: int) -> None:
    """How much later than asked this thread may be woken."""
    _prctl(_SET_TIMERSLACK, ctypes.c_ulong(ns))


def is_subreaper() -> bool:
    value = ctypes.c_int(0)
    _prctl(_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return bool(value.value)


def set_subreaper(on: bool) -> None:
    """Whether orphans below this process become its children."""
    _prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(on))


def _prctl(option: int, argument: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, *[ctypes.c_ulong(0)] * 3) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
