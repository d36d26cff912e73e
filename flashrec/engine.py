"""What happens in a training loop, as the events of the rank's state machine: a step's enter, gate and exit, what lies
between two steps, rehearsals, the end.
"""

import time
from pathlib import Path

from flashrec import phases as ph
from flashrec.errors import RecoveryFailed, StepAbandoned, UsageError
from flashrec.groups import GroupSet
from flashrec.interpreter import Interpreter
from flashrec.link import DaemonLost, Link
from flashrec.protocol import messages as msg
from flashrec.protocol.phase import IN_BODY, Phase
from flashrec.protocol.tag import all_at_their_end

LOOK_S = 0.2  # at the others' tags, at the end of a script whose daemon is gone


class Engine(Interpreter):
    """One process's part in a job, from init() to its end."""

    def __init__(self, link: Link, groups: GroupSet) -> None:
        super().__init__(link, groups)
        self.in_section = False
        self.loop_begun = False
        self.asked_for_step = False  # current_step() was called since the last step
        self._entered: int | None = None
        self._gate_passed_at = 0  # collectives issued by then
        self._num_rehearsals = 0

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
        self._recovery.rehearsed_ns = time.monotonic_ns()
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
