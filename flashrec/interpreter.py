"""Interprets the rank's state machine: messages become events, and its actions effects.

All of it runs on the main thread, save the callbacks of the link's thread, which only wake the main thread up.
`phases.py` decides; nothing here does.
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
from flashrec.errors import EnvironmentFault, GroupsAborted, IntegrityError, UsageError
from flashrec.groups import GroupSet
from flashrec.keeping import Keeper, SealedDamaged, SourcesLost
from flashrec.link import DaemonFound, DaemonLost, Incoming, Link
from flashrec.pacing import Pace
from flashrec.patience import Patience
from flashrec.protected import ProtectedState
from flashrec.protocol import messages as msg
from flashrec.protocol.phase import Phase
from flashrec.recovery import Recovery
from flashrec.sources import Reach
from flashrec.state.pull import PullCancelled
from flashrec.state.replicating import NotKept
from flashrec.state.sealing import SealStuck

COMMUNICATES = "collectives run between the gate and the end of a step, so that a failure there tears ranks"


class Interpreter:
    """One process's part in a job, without its training loop. Without a rank it is a standby, nobody yet."""

    def __init__(self, link: Link, groups: GroupSet) -> None:
        self.link = link
        self.groups = groups
        self.world_size = link.welcome.world_size
        self.shm_dir = Path(link.welcome.shm_dir)
        self.replacement = link.welcome.replacement
        self.state: ProtectedState | None = None
        self.rehearsing = False
        self.attempt = 0
        self._machine: ph.RankMachine | None = None
        self._keeper: Keeper | None = None
        self._feed: Feed | None = None
        self.offers_built = False
        self.beacon = Beacon()
        self._assembly = Assembly(link, groups, self.shm_dir, self.world_size)
        self._regime_known = self.replacement  # which learns it from its plan
        self._claims: tuple[tuple[tuple[int, ...], str], ...] | None = None  # since protect()
        self._why_sealed = ""
        self._pace = Pace(None)
        self._arena_bytes = 0
        self._recovery = Recovery(link, self._assembly)
        self._forming: int | None = None  # generation that is being installed or formed
        self._patience = Patience(link)
        self._report_commit = True
        self._warned: set[str] = set()
        self._main_thread = threading.get_ident()
        link.on_abort = self._assembly.abort
        link.on_value = self._assembly.take_value
        link.on_inspect = self._on_inspect
        link.standing = self._standing
        link.on_adopted = self._assembly.say_again
        link.on_forsaken = self._on_forsaken
        link.on_garbled = self._on_garbled
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
            local_rank = str(self.link.welcome.local_rank or 0)
            os.environ.update(RANK=str(rank), ROLE_RANK=str(rank), LOCAL_RANK=local_rank)
        self._machine = ph.RankMachine(ph.RankState(rank, phase, generation))
        job = self.link.welcome.job
        reach = self._recovery.reach = Reach.of(self.link.welcome)
        fresh = not self.replacement
        self._keeper = Keeper(self.shm_dir, job, rank, self.world_size, fresh=fresh, reach=reach)
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

    def protect(self, state: ProtectedState) -> None:
        self.state = state
        if self._machine is None:
            return
        assert self._keeper is not None
        self._keeper.state = state
        state.publish_layout(self.shm_dir, self.rank)
        # Before the phase says that it is protected: a daemon that takes over meanwhile hears both or neither.
        self._why_sealed = state.why_sealed()
        self._pace = Pace(state.seal_every)
        self._arena_bytes, self._claims = state.arena_bytes(), state.claims()
        if self.replacement:
            self._keeper.get_ready()
        else:
            self._handle(ph.Protected())
        words = self._why_sealed, self._arena_bytes, self._pace.why_never
        self.link.send(msg.Protected(self.link.proc, self._claims, *words))
        if not self.replacement:
            self._await(lambda: self._regime_known)

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
                    assert self._machine is not None
                    if self._keeper is not None:
                        self._keeper.set_keepers(message.keepers, self._machine.state.generation)
                    self._pace.refuse(message.why_unsealed)
                    self._handle(ph.Regime(message.sealing))
            case msg.ResumePlan():
                self._handle(self._recovery.take(message))
            case msg.Assign():
                self.link.take_rank(message)
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
            can_advance=state.phase is Phase.HELD and not state.communicates,
            claims=self._claims,
            why_sealed=self._why_sealed or (COMMUNICATES if state.sealing else ""),
            arena_bytes=self._arena_bytes,
            built_offered=self.offers_built,
            why_unsealed=self._pace.why_never,
        )

    def _on_forsaken(self) -> None:
        """No daemon came: whoever waits for one inside a forming waits in vain."""
        self._end_forming("no daemon came that could tell the ranks of each other")

    def _on_garbled(self, reason: str) -> None:
        """It may be what a forming waits for."""
        self._end_forming(f"a message of the daemon's is malformed: {reason}")

    def _end_forming(self, why: str) -> None:
        generation = self._forming
        if generation is not None:
            self.link.parts.abort(generation)
            self._assembly.abort(generation, why)

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
            case ph.BeginFull():
                self._try_full(lambda: keeper.begin_full(action.version, machine.generation))
            case ph.FinishFull():
                self._try_full(self._finish_full)
            case ph.AwaitKept() if machine.phase is Phase.REFORMING:
                generation = machine.generation
                return self._unless_aborted(
                    lambda: self._await_kept(action, lambda: self.link.parts.aborted(generation))
                )
            case ph.AwaitKept():
                if not self._may_vote(action):
                    self._handle(ph.Verdict(False))
                    return False
            case ph.Vote():
                self._handle(self._vote())
            case ph.Report():
                self.link.send(msg.Parked(self.link.proc, *action, time.monotonic_ns()))
            case ph.NoteRedo():
                self.state.redo.note()
            case ph.PutBack():
                self.state.redo.put_back()
            case ph.DiscardAbove():
                self._pace.disturbed()
                keeper.discard_above(action.version, action.full)
                self._recovery.set_keepers(keeper, machine.plan)
            case ph.Serve():
                self._recovery.serve(keeper, action.plan, machine.rank)
            case ph.Install():
                return self._unless_aborted(
                    lambda: self._recovery.install(keeper, action.plan, self.note), ph.Installed()
                )
            case ph.Form():
                return self._unless_aborted(self._form, ph.Formed(action.generation))
            case ph.Commit():
                self._commit(action.version)
            case ph.Linger():
                self.link.send(msg.Leaving(self.link.proc, action.generation, action.version))
            case ph.Apply() | ph.Abandon():
                pass  # gate() returns or raises, by the phase
        return True

    def _unless_aborted(self, effect: Callable[[], None], event: ph.Event | None = None) -> bool:
        assert self._machine is not None
        self._forming = self._machine.state.generation
        try:
            effect()
        except (GroupsAborted, PullCancelled, SealedDamaged, SourcesLost, NotKept) as error:
            # A peer, or another node, may be out of reach though nobody died; a version may be of no use.
            if not self.link.parts.aborted(self._machine.state.generation):
                self.note("forming failed", str(error))
                self.link.post(ph.Latch(self._machine.state.generation))
            self._await(lambda: self.phase is not Phase.REFORMING)  # what ended it is queued
            return False
        finally:
            self._forming = None
        if event is not None:
            self._handle(event)
        return True

    def _await_kept(self, action: ph.AwaitKept, is_cancelled: Callable[[], bool]) -> None:
        assert self._keeper is not None
        self._keeper.await_kept(*action, is_cancelled, self.link.welcome.kept_within_s)

    def _may_vote(self, action: ph.AwaitKept) -> bool:
        """False: this rank must not, and whoever waits for its vote has heard of it."""
        try:
            self._await_kept(action, lambda: self.groups.latched is not None)
        except NotKept as error:
            if not error.is_cancelled:
                self.note("not kept", str(error))
            self._assembly.break_gate(str(error))
            return False
        return True

    def _finish_full(self) -> None:
        assert self._keeper is not None
        cost_s = self._keeper.finish_full()
        if cost_s is not None:
            self._pace.sealed(cost_s)

    def _try_full(self, effect: Callable[[], None]) -> None:
        """The live regime can do without full versions: what keeps this rank from sealing one is said, and ends it."""
        try:
            effect()
        except SealStuck:
            raise  # its thread may still read what the optimizer is about to change
        except (EnvironmentFault, IntegrityError) as error:
            self._pace.refuse(str(error))
            self.link.send(msg.Unsealed(self.link.proc, str(error)))

    def _vote(self) -> ph.Verdict:
        """The agreement of [nothing failed here, my version, the live regime does, what is sealed whole, how often]."""
        assert self._machine is not None
        assert self._keeper is not None
        assert self.state is not None
        state = self._machine.state
        live = not (state.sealing or state.communicates)
        version = state.version or 0
        full = self._keeper.full_that_counts()
        every = self._pace.wanted(self.state.rehearsals, self._keeper.newest_full)
        values = [int(self.groups.latched is None), version, -version, int(live), full, -every]
        agreed = self._assembly.agree(values)
        if agreed is None:
            return ph.Verdict(None)
        assert agreed[1] == version == -agreed[2], f"ranks vote at versions {agreed[1]} to {-agreed[2]}"
        passed, sealing = agreed[0] == 1, agreed[3] == 0
        if passed and sealing and not state.sealing:
            self.link.send(msg.Switched(self.link.proc, COMMUNICATES))
        return ph.Verdict(passed, sealing, agreed[4], -agreed[5])

    def _form(self) -> None:
        assert self._machine is not None
        assert self.state is not None
        assert self._machine.state.plan is not None
        self._recovery.form(self.rank, self._machine.state.plan, self.state)
        self._report_commit = True

    def _commit(self, version: int) -> None:
        assert self._machine is not None
        now = time.monotonic_ns()
        self.beacon.committed(version, now)
        self._pace.committed(version, now, time.process_time_ns())
        if self._report_commit:
            self._report_commit = False
            self.link.send(msg.Committed(self.link.proc, self._machine.state.generation, version, now))
        self.beacon.show(self._machine.state, self.attempt)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        self._assembly.close()
        self.beacon.close()
