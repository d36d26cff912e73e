"""How long the main thread waits for its daemon, or for another one in its place."""

import time

from flashrec.errors import RecoveryFailed
from flashrec.link import Incoming, Link


class Patience:
    """Of one wait at a time: `renew()` begins another. While there is a daemon, there is no end to it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._gives_up_at: float | None = None

    def renew(self) -> None:
        self._gives_up_at = None

    @property
    def left_s(self) -> float:
        """Without a daemon; nothing is left when no other will come."""
        now = time.monotonic()
        if self._link.forsaken:
            return 0.0
        if self._gives_up_at is None:
            self._gives_up_at = now + self._link.welcome.patience_s
        return max(0.0, self._gives_up_at - now)

    def next(self) -> Incoming:
        """The next message. Without a daemon, waits for another as long as the job says, and raises RecoveryFailed."""
        message = self._link.receive(self.left_s if self._link.daemon_lost else None)
        if message is None:
            why = self._link.forsaken or f"none came in {self._link.welcome.patience_s:.0f} s"
            raise RecoveryFailed(
                f"this rank cannot go on without a daemon ({why}): another rank was lost, say, and nobody replaces it"
            )
        return message
