"""Which processes belong to the daemon, and whose they were.

The daemon is a child subreaper: a process whose parent dies becomes its child, wherever in the tree and in
whatever session it was. A rank is a subreaper too, so what a live rank's script abandons stays under that
rank. A child of the daemon that nobody started on purpose therefore was a dead rank's, and may be ended.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """What /proc/<pid>/stat says that matters here."""

    name: str
    state: str
    parent: int
    session: int
    start_ticks: int
    """Since boot; with the pid it names one process, for ever."""


def process_stat(pid: int) -> ProcessStat | None:
    """None when there is no such process (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may hold anything, also spaces and parentheses.
    head, _, tail = text.rpartition(b")")
    fields = tail.split()
    return ProcessStat(
        name=head.partition(b"(")[2].decode(errors="replace"),
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def has_open(pid: int, path: Path) -> bool:
    """Whether the process has this file or directory open: proof that it is who it says, where `path` is ours alone.

    A number may be another process's here: the sender's, in a container, counts only there."""
    try:
        wanted = os.stat(path)
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), wanted):
                    return True
    except OSError:
        pass  # it has ended, or is not this user's
    return False


def children_of(pid: int) -> list[int]:
    """The direct children of `pid`, zombies included; [] when it is gone.

    The kernel's list may miss an entry while a neighbour in it is exiting: look again after an exit.
    """
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children += map(int, file.read().split())
        except ProcessLookupError:
            continue  # that thread has ended; its children are another thread's now
        except FileNotFoundError:
            if not os.path.exists(f"/proc/{pid}/task/{thread}"):
                continue
            return _children_by_parent(pid)  # a kernel without CONFIG_PROC_CHILDREN
    return children


def _children_by_parent(pid: int) -> list[int]:
    children = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(PermissionError):  # /proc mounted with hidepid: not ours
                stat = process_stat(int(name))
                if stat is not None and stat.parent == pid:
                    children.append(int(name))
    return children


def descendants_of(pid: int) -> list[int]:
    """Children, their children and so on, parents first."""
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in children_of(parent) if child not in found]
        found += level
    return found
