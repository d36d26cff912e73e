"""Where a rank is in its data, as part of the version.

A position is (epoch, batches taken in it, random state just before the epoch's iterator was made). A
replacement gets there by doing the same: random state back, `set_epoch`, `iter`, and taking as many
batches, so that loader workers and their random streams end where the dead rank's were, bit for bit.
A loader that has `state_dict`/`load_state_dict` itself is asked instead, which costs no re-reading.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flashrec.errors import UsageError

Source = Iterable[Any] | Callable[[int, int], Iterable[Any]]


class Feed:
    """Batches of one rank, one after another over epochs.

    `source`: an iterable that can be iterated again (a DataLoader), or a callable (rank, world_size) -> such
    an iterable, called when the rank is known. `random_state`/`restore_random`: the rank's generators.
    """

    def __init__(
        self,
        source: Source,
        micro: int,
        random_state: Callable[[], Any],
        restore_random: Callable[[Any], None],
    ) -> None:
        if micro < 1:
            raise UsageError(f"a step needs at least one micro-batch, not {micro}")
        if isinstance(source, Iterator):
            raise UsageError(
                "an iterator cannot be replayed by a replacement: pass the iterable it came from"
            )
        if not callable(source) and not isinstance(source, Iterable):
            raise UsageError(
                f"data must be an iterable or a callable (rank, world_size), not {type(source).__name__}"
            )
        self._source = source
        self._micro = micro
        self._random_state = random_state
        self._restore_random = restore_random
        self._loader: Iterable[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self.epoch = 0
        self._taken = 0
        self._epoch_start: Any = None

    def open(self, rank: int, world_size: int) -> None:
        """Make the loader, if it is not there yet. Once per process, at the first step (or rehearsal)."""
        if self._loader is None:
            made = self._source if isinstance(self._source, Iterable) else self._source(rank, world_size)
            if isinstance(made, Iterator) or not isinstance(made, Iterable):
                raise UsageError(
                    f"data must give an iterable that can be iterated again, not {type(made).__name__}"
                )
            self._loader = made

    def close(self) -> None:
        """Forget the loader: what a rehearsal opened must not be gone on with."""
        self._iterator = None
        self._loader = None
        self.epoch, self._taken, self._epoch_start = 0, 0, None

    def take(self) -> list[Any]:
        """The next step's micro-batches."""
        batches: list[Any] = []
        empty_epochs = 0
        while len(batches) < self._micro:
            if self._iterator is None:
                self._begin_epoch()
            assert self._iterator is not None
            try:
                batches.append(next(self._iterator))
                self._taken += 1
                empty_epochs = 0
            except StopIteration:
                empty_epochs += 1
                if empty_epochs > 1:
                    raise UsageError("the data gave no batch in a whole epoch") from None
                self._iterator = None
                self.epoch, self._taken = self.epoch + 1, 0
        return batches

    def _begin_epoch(self) -> None:
        assert self._loader is not None
        self._epoch_start = self._random_state()
        set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        self._iterator = iter(self._loader)

    def position(self) -> dict[str, Any]:
        """Where the next `take()` starts, as plain data."""
        own = getattr(self._loader, "state_dict", None)
        return {
            "epoch": self.epoch,
            "taken": self._taken,
            "epoch_start": self._epoch_start,
            "begun": self._iterator is not None,
            "loader": own() if own is not None and self._iterator is not None else None,
        }

    def go_to(self, position: dict[str, Any], rank: int, world_size: int) -> None:
        """Bring a fresh feed to `position`. Changes the random state; the caller restores that of the version."""
        self.close()
        if not position["begun"] and position["epoch"] == 0:
            return  # the first epoch was not begun: the first take() does it all
        self.open(rank, world_size)
        self.epoch = position["epoch"]
        if not position["begun"]:
            return
        self._restore_random(position["epoch_start"])
        if position["loader"] is not None:
            self._loader.load_state_dict(position["loader"])  # type: ignore[union-attr]
            self._begin_epoch()
        else:
            self._begin_epoch()
            for _ in range(position["taken"]):
                assert self._iterator is not None
                next(self._iterator)
        self._taken = position["taken"]
