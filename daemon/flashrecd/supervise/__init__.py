"""Rank processes: how they start, are watched, and end without a trace."""

from flashrecd.supervise.forkclient import ForkRefused, ForkServerGone, Launch
from flashrecd.supervise.logs import LogLayout, Tail
from flashrecd.supervise.processes import Supervisor

__all__ = ["ForkRefused", "ForkServerGone", "Launch", "LogLayout", "Supervisor", "Tail"]
