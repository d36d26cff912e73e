"""What a shard server counts, for metrics and tests; and how it says what it refuses."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import dataclass, field

# So many refusals are logged one by one, later ones only now and then.
_LOGGED_REFUSALS = 20
_LOG_EVERY = 1000


@dataclass
class Counters:
    """Since the server started, but for the last two. Of files and replicas, bytes are those they have, unpacked."""

    requests: int = 0
    refused_requests: int = 0
    missing_files: int = 0
    dropped_replies: int = 0
    """To peers that asked for more than they read."""
    sent_bytes: int = 0
    """Of files."""
    told_bytes: int = 0
    """Of descriptions and private state."""
    kept_private: int = 0
    fenced: int = 0
    """Requests of generations that were over, and replications that could not be finished for that."""
    replicated_versions: int = 0
    failed_replications: int = 0
    refused_sources: int = 0
    """Sources that said or sent what cannot be."""
    received_bytes: int = 0
    copied_bytes: int = 0
    """Of replicas, from the version before: they were not sent."""
    packed_bytes: int = 0
    """By how much what was sent was made smaller."""
    unpacked_bytes: int = 0
    """By how much what was received had been made smaller."""
    unchanged_bytes: int = 0
    """Of replicas, in place already."""
    paced_ms: int = 0
    """For how long pulls have been held back by the bandwidth cap."""
    replicas_under_way: int = 0
    replicas_waiting: int = 0
    """Replicas that wait for a thread: back-pressure, if it stays."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        """From any thread."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def refuse(self, reason: str, event: str = "request refused") -> None:
        """Count a refusal and log it, but not without end."""
        self.add(refused_requests=1)
        count = self.refused_requests
        if count <= _LOGGED_REFUSALS or count % _LOG_EVERY == 0:
            line = json.dumps({"event": event, "reason": reason, "count": count})
            print(line, file=sys.stderr, flush=True)
