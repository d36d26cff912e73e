"""A step, as the training loop sees it: entered, left, and done again where a failure struck.

with step:                      enters the body
    ...
    optimizer.step()            the gate: all ranks agree, then the optimizer runs; or the body is unwound
if step.committed: ...          False: the step will be offered again, with the same batch
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from flashrec.engine import Engine
from flashrec.errors import RecoveryFailed, StepAbandoned, UsageError
from flashrec.protocol import tag as tags
from flashrec.protocol.phase import IN_BODY

P = ParamSpec("P")
R = TypeVar("R")


class Step(AbstractContextManager["Step"]):
    """One attempt at one optimizer step.

    index       the step's number, from 0; the version of the state it starts from
    batch       the batch (with one micro-batch a step), `batches` the list of them; None in a loop of one's own
    epoch       the data's epoch
    attempt     0, or how often this step was begun before in this process
    committed   True once the step is done for good
    """

    def __init__(self, engine: Engine, index: int, batches: list[Any] | None = None, epoch: int = 0) -> None:
        self._engine = engine
        self._batches = batches
        self.entered = False
        self.index = index
        self.epoch = epoch
        self.attempt = 0
        self.committed = False

    @property
    def batch(self) -> Any:
        if self._batches is not None and len(self._batches) != 1:
            raise UsageError(f"this step has {len(self._batches)} micro-batches: use step.batches")
        return None if self._batches is None else self._batches[0]

    @property
    def batches(self) -> list[Any]:
        return self._batches or []

    def __enter__(self) -> "Step":
        if self.entered:
            raise UsageError(
                f"step {self.index} was entered before; take the next one from steps(), or call step() again"
            )
        self.entered = True
        self._engine.loop_begun = True
        self._engine.enter()
        self.attempt = self._engine.attempt
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        rehearsal = self._engine.rehearsing
        redo = self._engine.exit(error)
        self.committed = error is None and not redo and not rehearsal
        return redo


class OwnStep(AbstractContextManager[Step]):
    """What `flashrec.step()` gives: a context manager for a loop of one's own, or a decorator for a function
    that is the whole step. The decorated function is called again, with the same arguments, until the step
    is committed; its result is returned then."""

    def __init__(self, engine_of: Callable[[], Engine], *, keeps_arguments: bool = False) -> None:
        self._engine_of = engine_of
        self._keeps_arguments = keeps_arguments
        self._step: Step | None = None

    def __enter__(self) -> Step:
        engine = self._engine_of()
        if engine.rehearsing or engine.phase in IN_BODY:
            raise UsageError("a step inside a step")
        if not engine.asked_for_step and not self._keeps_arguments:
            raise UsageError(
                "a loop of one's own must ask flashrec.current_step() before each step, and take the batch of that "
                "number: a loop that just goes on to its next batch would lose the batch of a step that has to be "
                "redone. Or use flashrec.steps(loader, total), or decorate a function with flashrec.step()"
            )
        engine.asked_for_step = False
        if engine.must_rehearse:
            self._step = Step(engine, engine.expected_step())
            engine.begin_rehearsal()
        else:
            # No recovery here: it may lead back to an earlier step, and the script has this one's batch already.
            engine.check_quiet()
            self._step = Step(engine, engine.version or 0)
        return self._step.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._step is not None
        return self._step.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

        @functools.wraps(function)
        def whole_step(*args: P.args, **kwargs: P.kwargs) -> R:
            wanted = self._engine_of().expected_step()
            calls[wanted] = args, kwargs
            # Further back than one step leads only what also takes state from survivors: that is refused below, and the
            # rank, replaced, asks for its arguments anew.
            calls.pop(wanted - 2, None)
            while True:
                engine = self._engine_of()
                index = engine.expected_step()
                if index not in calls:
                    raise RecoveryFailed(
                        f"called for step {wanted}, but the job goes on at step {index}: these arguments do not "
                        "belong to it"
                    )
                with OwnStep(self._engine_of, keeps_arguments=True) as step:
                    used, named = calls[index]
                    result = function(*used, **named)
                if step.committed and index == wanted:
                    return result

        return whole_step


class Section(AbstractContextManager["Section"]):
    """Work between steps that runs collectives, an evaluation for instance. Random state is put back at its
    end. If a failure strikes inside, what it computed is worthless: `valid` is False, and the next step recovers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.valid = True

    def __enter__(self) -> "Section":
        if self._engine.phase in IN_BODY:
            raise UsageError("a section belongs between steps; inside a step's body no section is needed")
        assert self._engine.state is not None
        self._random = self._engine.state.private.random_state()
        self._engine.in_section = True
        self._engine.beacon.mark(tags.SECTION)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._engine.state is not None
        self._engine.in_section = False
        self._engine.beacon.mark(tags.FORWARD)
        groups = self._engine.groups
        # A replacement that has not joined yet evaluates alone, which is worth as little.
        failed = groups.latched is not None or not groups.formed
        self.valid = error is None and not failed
        self._engine.state.private.restore_random(self._random)
        return failed and isinstance(error, StepAbandoned | Exception)


def install_gate(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Put the gate where the optimizer is about to change something: its own pre-hook.

    With a closure, that is after the closure's forward and backward; an optimizer that calls its closure more
    than once (L-BFGS) has changed parameters in between, so it is refused.
    """

    def before(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = next((i for i, value in enumerate(args) if callable(value)), None)
        closure = args[position] if position is not None else kwargs.get("closure")
        if closure is None:
            engine.gate()
            return None
        calls = 0

        def gated() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UsageError(
                    f"{type(optimizer).__name__} runs its closure more than once in a step; that cannot be redone"
                )
            loss = closure()
            engine.gate()
            return loss

        if position is None:
            return args, {**kwargs, "closure": gated}
        return (*args[:position], gated, *args[position + 1 :]), kwargs

    def after(*_: Any) -> None:
        engine.applied()

    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("L-BFGS runs its closure more than once in a step; that cannot be redone")
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def mark_backward(engine: Engine, model: torch.nn.Module) -> None:
    """Let the tag say when a step's backward has begun: with the first gradient that is complete."""
    last = [parameter for parameter in model.parameters() if parameter.requires_grad][-1:]
    for parameter in last:
        parameter.register_post_accumulate_grad_hook(lambda _: engine.beacon.mark(tags.BACKWARD))


__all__ = ["OwnStep", "Section", "Step", "install_gate", "mark_backward"]
