"""Where the microseconds of a step go: self times of flashrec's parts, measured around their own functions."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from flashrec.engine import Engine

Parts = dict[str, dict[str, float]]


class Profile:
    """Wraps the parts of one engine. A part's time excludes that of other parts it calls; each wrapper adds
    about half a microsecond to the part that calls it. `lap()` marks where one step ends and the next begins."""

    def __init__(self, engine: Engine) -> None:
        self._self_ns: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._steps: dict[str, list[tuple[int, int]]] = {}
        self._inner = [0]
        assert engine.state is not None
        assert engine._keeper is not None
        state, keeper = engine.state, engine._keeper
        for holder, name, part in (
            (engine, "catch_up", "loop: catch up"),
            (engine, "enter", "loop: enter"),
            (engine, "exit", "loop: exit"),
            (engine, "gate", "gate: pre-hook"),
            (engine, "applied", "gate: post-hook"),
            (engine, "_handle", "state machine: effects"),
            (engine._machine, "handle", "state machine: transitions"),
            (engine.beacon, "show", "tag: phase changes"),
            (engine.beacon, "mark", "tag: backward"),
            (engine.beacon, "count_collective", "tag: collectives"),
            (engine, "_drain", "link: messages"),
            (engine, "_vote", "gate: vote"),
            (engine._assembly, "agree", "gate: agreement, with waiting"),
            (state.redo, "note", "redo: note"),
            (state, "seal_private", "seal: encode"),
            (state.private, "snapshot", "private state: snapshot"),
            (state, "disturbed", "private state: comparison"),
            (keeper, "seal_private", "seal: private"),
            (keeper._private, "seal", "seal: write"),
            (engine.feed, "position", "seal: data position"),
            (keeper, "begin_seal", "sealing: begin"),
            (state, "sealed_parts", "sealing: layout and readers"),
            (keeper, "finish_seal", "sealing: what is left at the gate"),
        ):
            setattr(holder, name, self._timed(part, getattr(holder, name)))

    def lap(self) -> None:
        for part, ns in self._self_ns.items():
            self._steps[part].append((ns, self._calls[part]))
            self._self_ns[part] = self._calls[part] = 0

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self._self_ns[part], self._calls[part], self._steps[part] = 0, 0, []

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0)
            started = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.perf_counter_ns() - started
                self._self_ns[part] += taken - self._inner.pop()
                self._inner[-1] += taken
                self._calls[part] += 1

        return timed

    def parts(self) -> Parts:
        """Microseconds and calls a step of each part that was called, medians over steps, the dearest first."""
        found = {
            part: {
                "us": statistics.median(ns for ns, _ in steps) / 1000,
                "calls": statistics.median(calls for _, calls in steps),
            }
            for part, steps in self._steps.items()
            if any(calls for _, calls in steps)
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]["us"]))
