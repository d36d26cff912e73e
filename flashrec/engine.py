"""Interprets the rank's state machine: turns what happens into events, and its actions into effects.

All of it runs on the main thread, save `_abort_now` and the other callbacks of the link's thread, which
only wake the main thread up. `phases.py` decides; nothing here does.
"""

import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flashrec import phases as ph
from flashrec.assembly import Assembly
from flashrec.beacon import Beacon
from flashrec.data import Feed
from flashrec.errors import GroupsAborted, RecoveryFailed, StepAbandoned, UsageError
from flashrec.groups import GroupSet
from flashrec.keeping import Keeper, SealedDamaged
from flashrec.link import DaemonFound, DaemonLost, Incoming, Link
from flashrec.patience import Patience
from flashrec.protected import ProtectedState
from flashrec.protocol import messages as msg
from flashrec.protocol.phase import IN_BODY, Phase
from flashrec.protocol.tag import all_at_their_end
from flashrec.state.pull import PullCancelled, Puller

LOOK_S = 0.2  # at the others' tags, at the end of a script whose daemon is gone
COMMUNICATES = "collectives run between the gate and the end of a step, so that a failure there tears ranks"


class Engine:
    """One process's part in a job, from init() to its end. Without a rank it is a standby, nobody yet."""

    def __init__(self, link: Link, groups: GroupSet) -> None:
        self.link = link
        self.groups = groups
        self.world_size = link.welcome.world_size
        self.shm_dir = Path(link.welcome.shm_dir)
        self.replacement = link.welcome.replacement
        self.state: ProtectedState | None = None
        self.rehearsing = False
        self.in_section = False
        self.loop_begun = False
        self.attempt = 0
        self.asked_for_step = False  # current_step() was called since the last step
        self._entered: int | None = None
        self._machine: ph.RankMachine | None = None
        self._keeper: Keeper | None = None
        self._feed: Feed | None = None
        self.offers_built = False
        self.beacon = Beacon()
        self._assembly = Assembly(link, groups, self.shm_dir, self.world_size)
        self._gate_passed_at = 0  # collectives issued by then
        self._regime_known = False
        self._claims: tuple[tuple[tuple[int, ...], str], ...] | None = None  # since protect()
        self._why_sealed = ""
        self._arena_bytes = 0
        self._forming: int | None = None  # generation that is being installed or formed
        self._patience = Patience(link)
        self._rehearsed_ns = 0
        self._num_rehearsals = 0
        self._pulled_ns = 0
        self._report_commit = True
        self._warned: set[str] = set()
        self._main_thread = threading.get_ident()
        link.on_abort = self._assembly.abort
        link.on_value = self._assembly.take_value
        link.on_inspect = self._on_inspect
        link.standing = self._standing
        link.on_adopted = self._assembly.say_again
        link.on_forsaken = self._on_forsaken
        groups.on_latch = self._on_latch

    # --- who I am ---------------------------------------------------------------------------------------

    @property
    def assigned(self) -> bool:
        return self._machine is not None

    @property
    def phase(self) -> Phase:
        return self._machine.state.phase if self._machine else Phase.BUILDING

    def is_at(self, *phases: Phase) -> bool:
        """Whether the machine is in one of `phases` by now (events move it between two looks)."""
        return self.phase in phases

    @property
    def sealing(self) -> bool:
        """Whether the job is in the sealed regime, as far as this rank knows."""
        return self._machine is not None and self._machine.state.sealing

    @property
    def version(self) -> int | None:
        return self._machine.state.version if self._machine else None

    @property
    def rank(self) -> int:
        if self._machine is None and self.rehearsing:
            return 0
        if self._machine is None:
            raise UsageError(
                "this process is a standby that holds no rank yet: with init(standby='built') nothing before the "
                "first step may ask for the rank; what depends on it belongs into the callable given to steps()"
            )
        return self._machine.state.rank

    def assign(self, rank: int, generation: int) -> None:
        """Take a rank, for good."""
        phase = Phase.BUILDING if self.replacement else Phase.STARTING
        if not self.link.welcome.external:  # what another launcher has said of the node holds
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", ROLE_RANK=str(rank))
        self._machine = ph.RankMachine(ph.RankState(rank, phase, generation))
        job = self.link.welcome.job
        self._keeper = Keeper(self.shm_dir, job, rank, self.world_size, fresh=not self.replacement)
        self._keeper.feed = self._feed
        self.beacon.light(self.shm_dir, rank)
        self.beacon.show(self._machine.state, self.attempt)

    @property
    def feed(self) -> Feed | None:
        """The data of the loop over steps, once there is one."""
        return self._feed

    @feed.setter
    def feed(self, feed: Feed) -> None:
        self._feed = feed
        if self._keeper is not None:
            self._keeper.feed = feed

    @property
    def num_installs(self) -> int:
        """How often this process has become a version that it was not at: its data position moved."""
        return self._keeper.num_installs if self._keeper is not None else 0

    def form_first(self) -> None:
        """Connect the world of a job that starts. If somebody dies meanwhile the daemon ends this process."""
        assert self._machine is not None
        self._forming = self._machine.state.generation
        try:
            self._assembly.form(self.rank, self._machine.state.generation)
        except GroupsAborted:
            while True:
                self._take(self._patience.next())
        finally:
            self._forming = None

    # --- the events of a step ---------------------------------------------------------------------------

    def protect(self, state: ProtectedState) -> None:
        self.state = state
        if self._machine is None:
            return
        assert self._keeper is not None
        self._keeper.state = state
        state.publish_layout(self.shm_dir, self.rank)
        if self.replacement:
            self._keeper.get_ready()
        else:
            self._handle(ph.Protected())
        self._why_sealed = state.why_sealed()
        self._arena_bytes, self._claims = state.arena_bytes(), state.claims()
        self.link.send(msg.Protected(self.link.proc, self._claims, self._why_sealed, self._arena_bytes))
        if not self.replacement:
            self._await(lambda: self._regime_known)

    @property
    def must_rehearse(self) -> bool:
        """A replacement runs one body detached before it can join: DDP's buckets take their order from it."""
        return self._machine is None or (self.phase is Phase.BUILDING and not self._machine.state.rehearsed)

    def begin_rehearsal(self) -> None:
        """From here to the gate of the body that follows nothing is real."""
        self._refuse_nesting()
        assert self.state is not None
        self.rehearsing = True
        self.state.redo.note()
        self.groups.play_back(self._first_step_record(), told_only=True)
        if self._machine is None:
            self.groups.act_as(0)

    def catch_up(self) -> None:
        """Between steps. A failure that is known is recovered from, which may lead back to an earlier version; a
        replacement that has rehearsed waits until it holds the plan's. Then private state is checked: it was sealed
        in the last gate, and is what the next step starts from."""
        self._refuse_nesting()
        self._recover()
        self.check_quiet()

    def _recover(self) -> None:
        self._drain()
        while True:
            if self.phase is Phase.IDLE:
                self._handle(ph.Settle())
            if self.phase is Phase.IDLE and not self._unsettled():
                return
            if self.phase is not Phase.IDLE:
                self._await(lambda: self.phase is Phase.IDLE)

    def _unsettled(self) -> bool:
        assert self._machine is not None
        state = self._machine.state
        return state.latched or state.plan is not None or state.version is None

    def close_loop(self) -> bool:
        """The loop over steps is at its end: in the sealed regime every rank must have sealed the last version before
        any may go on. False: a failure led back to an earlier step."""
        assert self._machine is not None
        goal = self.version
        self._handle(ph.Close())
        self._recover()
        return self.version == goal and (self._machine.state.closed or not self._machine.state.sealing)

    def expected_step(self) -> int:
        """The step that comes next; a replacement learns it from its plan, before it holds the state."""
        self._drain()
        if self._machine is None:
            self._await_rank()
        assert self._machine is not None
        if self.phase is Phase.BUILDING and not self._machine.state.rehearsed:
            self._await(lambda: self._machine is not None and self._machine.state.plan is not None)
            assert self._machine.state.plan is not None
            return self._machine.state.plan.version
        if self.phase not in IN_BODY:
            self._recover()
        assert self.version is not None
        return self.version

    def enter(self) -> None:
        """To the start of a step, through a recovery if one is due; or into a rehearsal."""
        if self.rehearsing:
            return
        self._refuse_nesting()
        self._drain()
        self._settle(ph.Enter())
        self.attempt = self.attempt + 1 if self.version == self._entered else 0
        self._entered = self.version
        self.groups.record_to(self._first_step_record() if self.version == 0 else None, told_only=True)

    def _first_step_record(self) -> Path:
        return self.shm_dir / "prelude" / f"first-r{self.rank}"

    def _refuse_nesting(self) -> None:
        if self.rehearsing or self.phase in IN_BODY:
            raise UsageError("a step inside a step: leave the first one's body before the next begins")

    def leave(self) -> None:
        """The script is at its end: linger until every rank is, ready to serve those that die meanwhile."""
        if self._machine is None or self.state is None or self.phase in (Phase.STARTING, Phase.GONE):
            return
        if self.rehearsing or self.phase in IN_BODY:
            # sys.exit(0) inside a step: the others wait for this rank, and its exit tells them at once.
            self.note("ended inside a step", "the script ended with exit code 0 before its step had")
            return
        if self.phase is Phase.BUILDING and not self._machine.state.rehearsed:
            self._handle(ph.Rehearsed())  # a script that takes no step has nothing to rehearse
        version = self.version
        self._settle(ph.Leave(), version)
        while not self.is_at(Phase.GONE) and not self._may_leave_alone():
            self._stay_at(version)
            message = self.link.receive(LOOK_S if self.link.daemon_lost else None)
            if message is not None:
                self._take(message)

    def _may_leave_alone(self) -> bool:
        """Without a daemon: whether nobody needs this rank any more, as its tag and the others' show, or no daemon came
        that could tell."""
        if not self.link.daemon_lost:
            self._patience.renew()
            return False
        if not self.is_at(Phase.LEFT):
            return self._patience.left_s <= 0
        return all_at_their_end(self.shm_dir, self.world_size) or self._patience.left_s <= 0

    def _stay_at(self, version: int | None) -> None:
        """Of a rank whose script is over: its vote at an earlier version would be taken for one in a step."""
        if version is not None and self.version is not None and self.version < version:
            raise RecoveryFailed(
                f"rank {self.rank}: version {version} was lost with another rank, and the loop that would make it "
                f"again from version {self.version} is over: a replacement runs the script anew"
            )

    def _settle(self, event: ph.Enter | ph.Leave, version: int | None = None) -> None:
        """Enter or Leave; where that means to park, wait for the plan, recover, and try again. RecoveryFailed where
        that led back behind `version`."""
        goal = Phase.LEFT if isinstance(event, ph.Leave) else Phase.COMPUTING
        self._drain()
        while self.phase is not goal:
            if self.phase is Phase.IDLE:
                self._stay_at(version)
                self._handle(event)
            if self.phase is not goal:
                self._await(lambda: self.phase in (Phase.IDLE, goal))

    def gate(self) -> None:
        """Returns if the optimizer may run; raises StepAbandoned if the step is to be redone."""
        if self.rehearsing:
            raise StepAbandoned("the rehearsal ends before the optimizer")
        if self.phase in (Phase.APPLYING, Phase.TAIL):
            return  # the second optimizer of the same step
        if self.phase is not Phase.COMPUTING:
            raise UsageError("optimizer.step() outside a step: put it into `with flashrec.step():`")
        self._drain()
        self._handle(ph.GateReached())
        if self.is_at(Phase.HELD):
            self._await(lambda: not self.is_at(Phase.HELD))
        if self.is_at(Phase.UNWINDING):
            raise StepAbandoned("a failure elsewhere: this step is redone")
        self._gate_passed_at = self.groups.collectives

    def applied(self) -> None:
        if not self.rehearsing and self.phase is Phase.APPLYING:
            self._handle(ph.Applied())

    def exit(self, error: BaseException | None) -> bool:
        """The body was left. True: `error` is put down to a failure elsewhere, and the step is redone."""
        if self.rehearsing:
            return self._end_rehearsal(error)
        self._drain()
        if error is None and self.phase is Phase.COMPUTING:
            try:
                self.gate()  # no optimizer ran: the step agrees here
                self.applied()
            except StepAbandoned as abandoned:
                error = abandoned
        if error is None and self.phase is Phase.TAIL:
            self._handle(ph.Exit(self.groups.collectives > self._gate_passed_at))
            # Neither this version nor the next: what the step did is void here.
            return self.version is None
        latched = self._machine is not None and self._machine.state.latched
        if self.phase is Phase.UNWINDING or (self.phase is Phase.COMPUTING and latched):
            if error is not None and not isinstance(error, StepAbandoned | Exception):
                return False  # KeyboardInterrupt, SystemExit
            self._handle(ph.Exit())
            return True
        return False

    def _end_rehearsal(self, error: BaseException | None) -> bool:
        self.rehearsing = False
        if error is not None and not isinstance(error, StepAbandoned):
            return False
        assert self.state is not None
        self._num_rehearsals += 1
        enough = self._num_rehearsals >= self.state.rehearsals
        if enough:
            self.state.end_rehearsals()
        self.state.redo.put_back()
        if self.feed is not None:
            self.feed.close()
        if not enough:
            if self._machine is None:
                self.groups.act_as(None)
            return True  # the loop offers another
        self._rehearsed_ns = time.monotonic_ns()
        if self._machine is None:
            self.groups.act_as(None)
            self._await_rank()
        self._drain()
        self._handle(ph.Rehearsed())
        return True

    def _await_rank(self) -> None:
        """A built standby waits here, at its first step, until somebody dies."""
        self.link.send(msg.StandbyReady(self.link.proc, "built"))
        while not self.assigned:
            message = self.link.receive(0 if self.link.daemon_lost else None)
            if message is None or isinstance(message, DaemonLost):
                raise SystemExit(0)  # nobody is left who could need this process
            self._take(message)

    def check_quiet(self) -> None:
        """If the script changed private state after it was sealed, say what, and seal it again."""
        assert self._machine is not None
        assert self._keeper is not None
        state = self._machine.state
        if state.dirty:
            return  # an abandoned body changed it, and the redo puts it back: what was sealed before holds
        disturbed = self._keeper.check_quiet(state.version or 0, state.generation)
        if disturbed:
            self.warn_once(
                "disturbed",
                f"{', '.join(disturbed)} changed between the optimizer's step and the next step: a rank lost in that "
                "span could not be replaced bit-identically. Put what changes it into the step's body, or into "
                "`with flashrec.section():`, which leaves random state as it found it.",
            )

    # --- messages ---------------------------------------------------------------------------------------

    def _drain(self) -> None:
        while (message := self.link.receive(timeout_s=0)) is not None:
            self._take(message)

    def _await(self, done: Callable[[], bool]) -> None:
        self._patience.renew()
        while not done():
            self._take(self._patience.next())

    def _take(self, message: Incoming) -> None:
        """One message for the main thread."""
        match message:
            case msg.Abort():
                if self.phase is not Phase.STARTING:
                    self._handle(ph.Latch(message.generation))
            case ph.Latch():
                self._handle(message)
            case msg.Regime():
                if not self._regime_known:  # a daemon that has taken over says it to all
                    self._regime_known = True
                    self._handle(ph.Regime(message.sealing))
            case msg.ResumePlan():
                plan = (
                    message.generation,
                    message.version,
                    message.replaced,
                    message.served,
                    message.sealing,
                )
                self._handle(ph.Plan(*plan))
            case msg.Assign():
                self.link.take_rank(message.rank, message.generation)
                self.groups.assign_rank(message.rank)
                self.assign(message.rank, message.generation)
                if self.state is not None:
                    self.protect(self.state)
            case msg.Released():
                self._handle(ph.Released())
            case msg.Refused():
                raise UsageError(message.reason)
            case DaemonLost():
                until = self.link.forsaken or "until there is another"
                self._say(f"the daemon is gone; training goes on unprotected ({until})")
            case DaemonFound():
                self._patience.renew()
                self._say(f"daemon {self.link.welcome.daemon_pid} has adopted this rank")
            case _:
                pass

    @staticmethod
    def _say(text: str) -> None:
        print(f"flashrec: {text}", file=sys.stderr, flush=True)

    # --- callbacks of other threads -------------------------------------------------------------------------

    def _on_latch(self, reason: str) -> None:
        """A collective failed: the machine hears of it at the next safe point, whoever waits for me at once."""
        self._assembly.break_gate(reason)
        machine = self._machine
        if machine is not None and machine.state.phase is not Phase.STARTING:
            self.link.post(ph.Latch(machine.state.generation))
            self.note("collective failed", reason)

    def _on_inspect(self) -> None:
        frame = sys._current_frames().get(self._main_thread)
        stack = "".join(traceback.format_stack(frame)) if frame else "no main thread"
        self.note("stack", f"last collective: {self.groups.last_collective or 'none'}\n{stack}")

    def _standing(self, offer: msg.Rejoin) -> msg.Rejoin:
        """What another daemon must know to adopt this rank. The machine's state is one frozen value."""
        machine = self._machine
        if machine is None:
            return offer
        state = machine.state
        return replace(
            offer,
            rank=state.rank,
            generation=state.generation,
            phase=state.phase,
            version=state.version,
            latched=state.latched,
            can_advance=state.phase is Phase.HELD and not state.communicates,
            claims=self._claims,
            why_sealed=self._why_sealed or (COMMUNICATES if state.sealing else ""),
            arena_bytes=self._arena_bytes,
            built_offered=self.offers_built,
        )

    def _on_forsaken(self) -> None:
        """No daemon came: whoever waits for one inside a forming waits in vain."""
        generation = self._forming
        if generation is not None:
            self.link.parts.abort(generation)
            self._assembly.abort(generation, "no daemon came that could tell the ranks of each other")

    def note(self, event: str, reason: str) -> None:
        """A line for the event log."""
        self.link.send(msg.Noted(self.link.proc, event, self.version, reason))

    def warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"flashrec: {text}", stacklevel=3)
            self.note("warning", text)

    # --- effects ----------------------------------------------------------------------------------------

    def _handle(self, event: ph.Event) -> None:
        assert self._machine is not None
        actions = self._machine.handle(event)
        self.beacon.show(self._machine.state, self.attempt)
        for action in actions:
            if not self._execute(action):
                break

    def _execute(self, action: ph.Action) -> bool:
        """False: what follows in the same list is void, because the forming was given up."""
        assert self._machine is not None
        assert self._keeper is not None
        assert self.state is not None
        machine, keeper = self._machine.state, self._keeper
        match action:
            case ph.Seal():
                # By protect(): the script may still seed its generators.
                provisional = machine.phase is Phase.IDLE
                keeper.seal_private(action.version, machine.generation, provisional=provisional)
            case ph.BeginSeal():
                keeper.begin_seal(action.version, machine.generation)
            case ph.FinishSeal():
                keeper.finish_seal()
            case ph.Vote():
                self._handle(self._vote())
            case ph.Report():
                self.link.send(msg.Parked(self.link.proc, *action, time.monotonic_ns()))
            case ph.NoteRedo():
                self.state.redo.note()
            case ph.PutBack():
                self.state.redo.put_back()
            case ph.DiscardAbove():
                keeper.discard_above(action.version)
            case ph.Serve():
                self._serve(action.plan)
            case ph.Install():
                return self._unless_aborted(lambda: self._install(action.plan), ph.Installed())
            case ph.Form():
                return self._unless_aborted(
                    lambda: self._reform(action.generation), ph.Formed(action.generation)
                )
            case ph.Commit():
                self._commit(action.version)
            case ph.Linger():
                self.link.send(msg.Leaving(self.link.proc, action.generation, action.version))
            case ph.Apply() | ph.Abandon():
                pass  # gate() returns or raises, by the phase
        return True

    def _unless_aborted(self, effect: Callable[[], None], event: ph.Event) -> bool:
        assert self._machine is not None
        self._forming = self._machine.state.generation
        try:
            effect()
        except (GroupsAborted, PullCancelled, SealedDamaged) as error:
            # A peer may be out of reach though nobody died; a version may be of no use.
            if not self.link.parts.aborted(self._machine.state.generation):
                self.note("forming failed", str(error))
                self.link.post(ph.Latch(self._machine.state.generation))
            self._await(lambda: self.phase is not Phase.REFORMING)  # what ended it is queued
            return False
        finally:
            self._forming = None
        self._handle(event)
        return True

    def _vote(self) -> ph.Verdict:
        """The agreement of [nothing failed here, my version, the live regime does]."""
        assert self._machine is not None
        state = self._machine.state
        live = not (state.sealing or state.communicates)
        agreed = self._assembly.agree([int(self.groups.latched is None), state.version or 0, int(live)])
        if agreed is None:
            return ph.Verdict(None)
        passed, sealing = agreed[0] == 1, agreed[2] == 0
        if passed and sealing and not state.sealing:
            self.link.send(msg.Switched(self.link.proc, COMMUNICATES))
        return ph.Verdict(passed, sealing)

    def _reform(self, generation: int) -> None:
        assert self._machine is not None
        assert self.state is not None
        assert self._machine.state.plan is not None
        self.state.settle_buckets(self._machine.state.plan.version)
        self._assembly.form(self.rank, generation)
        times = (self._pulled_ns, self._rehearsed_ns, time.monotonic_ns())
        self.link.send(msg.Formed(self.link.proc, generation, self.state.bucket_digests(), *times))
        self._report_commit = True

    def _serve(self, plan: ph.Plan) -> None:
        assert self._keeper is not None
        served = self._keeper.serve(plan)
        if served is not None:
            self.link.send(
                msg.Exported(self.link.proc, plan.generation, self.rank, served, time.monotonic_ns())
            )

    def _install(self, plan: ph.Plan) -> None:
        assert self._keeper is not None
        parts, keeper = self.link.parts, self._keeper
        servers = keeper.servers(plan)
        address = self.link.welcome.shard_address if self.link.welcome.pull == "zmq" else None
        puller = Puller(lambda: parts.aborted(plan.generation))
        for refused in keeper.install(plan, lambda: parts.wait(plan.generation, servers), puller, address):
            self.note("source refused", refused)
        self._pulled_ns = time.monotonic_ns()

    def _commit(self, version: int) -> None:
        assert self._machine is not None
        now = time.monotonic_ns()
        self.beacon.committed(version, now)
        if self._report_commit:
            self._report_commit = False
            self.link.send(msg.Committed(self.link.proc, self._machine.state.generation, version, now))
        self.beacon.show(self._machine.state, self.attempt)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        self._assembly.close()
        self.beacon.close()
