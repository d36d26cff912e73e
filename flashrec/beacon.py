"""What a rank shows of itself while it works: the writing end of its tag."""

import time
from pathlib import Path

from flashrec.phases import RankState
from flashrec.protocol.phase import Phase
from flashrec.protocol.tag import FORWARD, SECTION, TagWriter, tag_path

BODY_BEGUN = 1 << 20
"""Progress at a body's start: more than that of any rank which is still between the two steps."""


class Beacon:
    """Dark until `light()`: a standby that holds no rank has nothing to show. Each call costs about a
    microsecond."""

    def __init__(self) -> None:
        self._tag: TagWriter | None = None

    def light(self, shm_dir: Path, rank: int) -> None:
        """From here on the tag of `rank` is this process's. Raises EnvironmentFault."""
        self._tag = TagWriter(tag_path(shm_dir, rank))

    def show(self, state: RankState, attempt: int) -> None:
        """Phase, step and generation, for all to see."""
        tag = self._tag
        if tag is None:
            return
        step = -1 if state.version is None else state.version
        if state.phase is Phase.COMPUTING and tag.phase != Phase.COMPUTING:
            tag.progress = BODY_BEGUN
        elif state.phase is not Phase.IDLE:
            tag.progress += 1
        elif step != tag.step:
            tag.progress = 0
        if tag.body != SECTION and state.phase != tag.phase:
            tag.body = FORWARD
        tag.phase, tag.generation, tag.attempt = state.phase, state.generation, attempt
        tag.step = step
        tag.changed_ns = time.monotonic_ns()
        tag.publish()

    def committed(self, version: int, at_ns: int) -> None:
        """Published with the next `show`."""
        if self._tag is not None:
            self._tag.committed, self._tag.committed_ns = version, at_ns

    def mark(self, body: int) -> None:
        """Where in a body: forward, backward, or a section."""
        if self._tag is not None:
            self._tag.body = body
            self._tag.publish()

    def count_collective(self) -> None:
        if self._tag is not None:
            self._tag.progress += 1
            self._tag.publish()

    def report_loss(self, loss: float) -> None:
        """Published with whatever is next."""
        if self._tag is not None:
            self._tag.loss = loss

    def close(self) -> None:
        if self._tag is not None:
            self._tag.close()
            self._tag = None
