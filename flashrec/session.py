"""What a training script calls: init, protect, steps, step, section.

flashrec.init()                        in place of torch.distributed.init_process_group
flashrec.protect(model=..., optimizer=..., scheduler=...)
for step in flashrec.steps(loader, total=10_000):
    with step:
        ...
"""

from collections.abc import Iterator
from typing import Any

import torch

from flashrec.data import Feed, Source
from flashrec.engine import Engine
from flashrec.errors import UsageError
from flashrec.external import join_from_environment, report_the_end
from flashrec.groups import GroupSet
from flashrec.happenings import NEVER
from flashrec.link import attached
from flashrec.loop import OwnStep, Section, Step, install_gate, mark_backward
from flashrec.protected import MAX_PRIVATE_BYTES, SURVIVE, ProtectedState, as_list, named_extras
from flashrec.protocol import messages as msg
from flashrec.protocol.phase import IN_BODY, Phase
from flashrec.state import tensors

DEPTHS = ("forked", "built")


class _Session:
    """This process's one session."""

    engine: Engine | None = None


_session = _Session()


def current_engine() -> Engine | None:
    return _session.engine


def _engine() -> Engine:
    if _session.engine is None:
        raise UsageError("call flashrec.init() first")
    return _session.engine


def _protected() -> Engine:
    engine = _engine()
    if engine.state is None:
        raise UsageError("call flashrec.protect(model=..., optimizer=...) before the first step")
    return engine


def init(*, standby: str = "forked") -> None:
    """Join the job: torch.distributed is initialised, with groups that can be re-formed in place.

    standby: how far a standby may go before it is needed. "forked": torch is imported, the script not started.
    "built": the script promises that nothing before its first step depends on the rank, so a standby can have
    built and rehearsed everything; asking for the rank earlier raises UsageError.

    Without `flashrec run` the launcher must set RANK and WORLD_SIZE, as torchrun does, and a `flashrecd` must run on
    the node; the job is then named by FLASHREC_JOB, torchrun's --rdzv-id, or MASTER_ADDR:MASTER_PORT.

    Raises UsageError without a launcher, when called twice, or when the daemon refuses this rank; DaemonUnavailable
    when none runs; VersionMismatch when it is of another release; RecoveryFailed when the job has ended already.
    """
    if standby not in DEPTHS:
        raise UsageError(f"standby must be one of {', '.join(DEPTHS)}, not {standby!r}")
    if _session.engine is not None:
        raise UsageError("flashrec.init() was called before")
    if torch.distributed.is_initialized():
        raise UsageError("torch.distributed is initialised already: flashrec.init() takes its place")
    link = attached() or join_from_environment()
    if link is None:
        raise UsageError(
            "no launcher: start the script with `flashrec run --nproc-per-node N script.py`, or with torchrun or the "
            "like (RANK and WORLD_SIZE in the environment) on a node where `flashrecd` runs"
        )
    groups = GroupSet(on_collective=lambda name, count: _on_collective(name))
    engine = Engine(link, groups)
    _session.engine = engine
    rank = link.welcome.rank
    groups.start(rank, engine.world_size)
    if link.welcome.external:  # after that, so that the groups are closed after the rank has left
        report_the_end(link, current_engine)
    if standby == "built":
        engine.offers_built = True
        link.send(msg.BuiltOffered(link.proc))
    if rank is not None:
        engine.assign(rank, link.welcome.generation)
    prelude = engine.shm_dir / "prelude"
    if link.welcome.replacement:
        groups.play_back(prelude / f"r{rank or 0}")
    else:
        engine.form_first()
        groups.record_to(prelude / f"r{rank}")


def _on_collective(name: str) -> None:
    engine = _session.engine
    if engine is None:
        return
    engine.beacon.count_collective()
    if engine.state is None or engine.rehearsing or engine.in_section:
        return
    if engine.phase in (Phase.APPLYING, Phase.TAIL) and not engine.sealing:
        engine.warn_once(
            "tail",
            f"{name} runs between the gate and the end of a step, where a failure can leave a rank neither at this "
            "version nor at the next. So from the next step on every version is sealed in shared memory; if that is "
            "not wanted, move it before optimizer.step() or into a section.",
        )
    elif engine.phase is Phase.IDLE:
        engine.warn_once("outside", f"{name} runs outside a step; put it into `with flashrec.section():`")


def protect(
    *,
    model: Any,
    optimizer: Any,
    private: Any = None,
    replicated_over: Any = None,
    survive: str = "ranks",
    seal_every: int | None = None,
    **common: Any,
) -> None:
    """Tell flashrec what the state is. Call it once, after everything is built and before the first step.

    model, optimizer: one torch.nn.Module / torch.optim.Optimizer, or several.
    private: what differs by rank besides random state, module buffers and data position: an object with
        state_dict/load_state_dict, or a mapping of names to such objects.
    replicated_over: the process group whose ranks hold equal values of the plain tensors of which structure does not
        tell (tensor parallelism's norms, say), or {module: group}. Without it each rank keeps its own copy of them.
    survive: "ranks": as many losses as the parallelism bears, at the least cost; "all-ranks": also the death of all of
        them at once, for which every version is sealed in shared memory.
    seal_every: where each rank holds the whole state (plain data parallelism), the death of all of them leads back to
        the last version that was sealed as a whole. None: sealed as often as 1 % of the steps' time allows; k: every
        k steps; 0: never. The same on every rank.
    common: what is equal on all ranks (scheduler=..., scaler=..., ema=...): anything with state_dict/load_state_dict.

    Returns when every rank has called it.

    Raises UsageError when called twice or for something without these methods, LayoutMismatch (at a replacement)
    when the state differs from that of the other ranks, EnvironmentFault when shared memory is full.
    """
    engine = _engine()
    if engine.state is not None:
        raise UsageError("flashrec.protect() was called before")
    models = as_list(model, torch.nn.Module, "model")
    optimizers = as_list(optimizer, torch.optim.Optimizer, "optimizer")
    if survive not in SURVIVE:
        raise UsageError(f"survive must be one of {', '.join(SURVIVE)}, not {survive!r}")
    if seal_every is not None and (type(seal_every) is not int or not 0 <= seal_every < NEVER):
        raise UsageError(f"seal_every must be a number of steps, 0 for never, or None, not {seal_every!r}")
    state = ProtectedState(
        models,
        optimizers,
        named_extras(private),
        common,
        rank=engine.rank if engine.assigned else None,
        world_size=engine.world_size,
        replicated_over=replicated_over,
        survive=survive,
        seal_every=seal_every,
        external=engine.link.welcome.external,
    )
    state.check_common()
    if engine.assigned:  # what a standby is to be a replacement for has been checked
        state.check_pace()
    for one in optimizers:
        install_gate(engine, one)
    mark_backward(engine, models[0])
    engine.groups.record_to(None)
    engine.protect(state)


def steps(data: Source, total: int, micro: int = 1) -> Iterator[Step]:
    """The steps up to `total`, from wherever the state is: `step.batch` (or `step.batches` with `micro` > 1).

    data: an iterable that can be iterated again (a DataLoader), or a callable (rank, world_size) -> such an
    iterable, which is called once the rank is known; what seeds a rank's generators belongs into it.
    One loop for a job: the data is gone through as often as `total` takes.
    """
    engine = _protected()
    if total < 0:
        raise UsageError(f"total cannot be {total}")
    if engine.loop_begun:
        raise UsageError(
            "a second steps() loop: the data position of a replacement belongs to one loop. Use one loop to the end; "
            "it goes through the data as often as `total` takes, and step.epoch tells how often"
        )
    assert engine.state is not None
    private = engine.state.private
    # Encoded once an epoch rather than with every step's seal.
    feed = Feed(
        data,
        micro,
        lambda: tensors.encode(private.random_state()),
        lambda state: private.restore_random(tensors.decode(state, MAX_PRIVATE_BYTES)),
    )
    engine.feed = feed
    kept: Step | None = None
    kept_since = 0
    while True:
        if engine.must_rehearse:
            engine.begin_rehearsal()
            feed.open(engine.rank, engine.world_size)
            offered = Step(engine, 0, feed.take(), feed.epoch)
        else:
            engine.catch_up()
            index = engine.version or 0
            if index >= total:
                if engine.close_loop():
                    return
                continue
            if kept is None or kept.index != index or kept_since != engine.num_installs:
                feed.open(engine.rank, engine.world_size)
                kept, kept_since = Step(engine, index, feed.take(), feed.epoch), engine.num_installs
            else:
                kept = Step(engine, index, kept.batches, kept.epoch)  # the redo of a step has the same batch
            offered = kept
        yield offered
        if not offered.entered:
            raise UsageError(f"step {offered.index} was never entered: put its body into `with step:`")


def step() -> OwnStep:
    """One step of a loop of one's own (`with flashrec.step() as step:`), or a decorator for a function that is
    the whole step. After a failure the step is not committed, and `current_step()` stays where it was: ask it
    before each step, and let the batch follow from it. A plain `for batch in loader: with flashrec.step():`
    would lose the batch of a step that has to be redone, so it is refused (UsageError)."""
    return OwnStep(_protected)


def section() -> Section:
    """Collectives outside a step: `with flashrec.section() as section: ...; if section.valid: ...`."""
    return Section(_protected())


def current_step() -> int:
    """The step that comes next (inside a step: its own index). A replacement asks after it has recovered."""
    engine = _protected()
    if engine.phase in IN_BODY:
        return engine.version or 0
    engine.asked_for_step = True
    return engine.expected_step()


def rank() -> int:
    """This process's rank. UsageError in a standby that holds none yet."""
    return _engine().rank


def world_size() -> int:
    """The number of ranks."""
    return _engine().world_size


def report_loss(loss: float) -> None:
    """Show a number with this rank in `flashrec status` and the demo; costs nothing else."""
    engine = _session.engine
    if engine is not None:
        engine.beacon.report_loss(loss)
