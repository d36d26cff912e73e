"""Larger worlds than can be exhausted: hypothesis chooses the ranks, the faults and the order of events."""

import random
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flashrec import phases as ph
from flashrecd.core import events as ev
from flashrecd.core.job import Core
from flashrecd.core.state import Status
from tests.exploration import invariants
from tests.exploration.control import Control, compose, slot_name
from tests.exploration.model import Config, Life, Regime
from tests.exploration.world import events, faults

MAX_EVENTS = 20_000
SEEDS = st.integers(0, 2**32)
DEAF = (ph.Phase.STARTING, ph.Phase.GONE)


def in_sets(num_ranks: int, num_alike: int) -> tuple[tuple[int, ...], ...]:
    """Replica sets of `num_alike` ranks; what is left over is unique."""
    left_over = num_ranks % num_alike
    begins = range(left_over, num_ranks, num_alike)
    return (*((rank,) for rank in range(left_over)), *(tuple(range(b, b + num_alike)) for b in begins))


class LargeWorld(RuleBasedStateMachine):
    """Channels can be held back for any time; what is older than a process's generation can come again."""

    @initialize(
        num_ranks=st.integers(4, 6),
        num_standbys=st.integers(0, 2),
        num_faults=st.integers(1, 5),
        built=st.booleans(),
        regime=st.sampled_from(Regime),
        num_alike=st.integers(1, 3),
        communicates=st.booleans(),
        damages=st.booleans(),
        full_every=st.integers(0, 2),
        full_fails=st.booleans(),
    )
    def begin(
        self,
        num_ranks: int,
        num_standbys: int,
        num_faults: int,
        built: bool,
        regime: Regime,
        num_alike: int,
        communicates: bool,
        damages: bool,
        full_every: int,
        full_fails: bool,
    ) -> None:
        config = Config(num_ranks, 3, num_faults, num_standbys, reduced=False)
        if regime is Regime.LIVE:
            config = config._replace(full_every=full_every, full_fails=full_fails, all_die=full_every > 0)
        if regime is not Regime.LIVE:
            config = config._replace(regime=regime, private_slots=3, communicates=communicates)
        if regime is Regime.SEALED:
            config = config._replace(sets=in_sets(num_ranks, num_alike), damages=damages)
        self.daemon = Control(config)
        self.world = self.daemon.initial()
        self.held: frozenset[str] = frozenset()
        self.stopped = False
        if built:
            self.world = self.daemon.tell(self.world, ev.BuiltOffered())

    @property
    def ended(self) -> bool:
        return self.world.hub.status is Status.ENDED

    def is_held(self, label: str) -> bool:
        words = label.split()
        held = (
            {f"to {words[0]}"}
            if " takes " in label
            else {f"from {words[-1]}"}
            if " hears (" in label
            else set()
        )
        return bool(held & self.held)

    def happen(self, count: int, seed: int) -> None:
        order = random.Random(seed)
        for _ in range(count):
            options = [after for label, after in events(self.world, self.daemon) if not self.is_held(label)]
            if not options:
                return
            self.world = order.choice(options)
            self.check()

    @rule(count=st.integers(1, 60), seed=SEEDS)
    def time_passes(self, count: int, seed: int) -> None:
        self.happen(count, seed)

    @rule(ranks=st.frozensets(st.integers(0, 5), max_size=3), way=st.sampled_from(("to", "from")))
    def some_channels_are_slow(self, ranks: frozenset[int], way: str) -> None:
        self.held = frozenset(f"{way} {rank}" for rank in ranks)

    @precondition(lambda self: self.world.faults and not self.ended)
    @rule(count=st.integers(0, 30), seed=SEEDS)
    def something_fails(self, count: int, seed: int) -> None:
        self.happen(count, seed)
        options = [after for _, after in faults(self.world, self.daemon.config)]
        if options:
            self.world = random.Random(seed).choice(options)

    @precondition(lambda self: self.world.hub.generation > 1)
    @rule(seed=SEEDS)
    def what_is_older_comes_again(self, seed: int) -> None:
        """No message of an older generation changes anything, on either side."""
        choose = random.Random(seed)
        rank = choose.randrange(len(self.world.slots))
        proc = self.world.slots[rank].proc
        if proc is not None and proc.state.phase not in DEAF and proc.state.generation > 1:
            old, version = choose.randrange(1, proc.state.generation), choose.randrange(3)
            for event in (ph.Latch(old), ph.Plan(old, version, ()), ph.Plan(old, version, (rank,))):
                assert ph.transition(proc.state, event) == (proc.state, ())
        old, name = choose.randrange(1, self.world.hub.generation), slot_name(rank)
        newest = self.world.hub.generation
        for event in (
            ev.Parked(name, old, choose.randrange(3), choose.random() < 0.5, (0, 1), (0,)),
            ev.Formed(name, old),
            ev.Leaving(name, old, 3),
            ev.Parked("p999", newest, 3, True, (3,), (3,)),
            ev.Formed("p999", newest),
            ev.Leaving("p999", newest, 3),
            ev.Protected("p999", (((0,), "another layout"),), "another reason"),
            ev.Switched("p999", "another reason"),
            ev.StandbyReady("p999", "built"),
            ev.Exited("p999", None, 9, (3,), (3,)),
        ):
            core = Core(self.daemon.core.config)
            core.state = before = compose(self.world, self.daemon.config)
            assert not core.handle(event, 0.0)
            assert core.state == before

    @precondition(lambda self: self.world.hub.generation > 1 and not self.stopped and not self.ended)
    @rule(hard=st.booleans())
    def somebody_stops_the_job(self, hard: bool) -> None:
        self.stopped = True
        self.world = self.daemon.tell(self.world, ev.Stop("enough", hard))

    @invariant()
    def check(self) -> None:
        invariants.of_state(invariants.view(slot) for slot in self.world.slots)

    def teardown(self) -> None:
        """Whatever happened, the job comes to its end."""
        if not hasattr(self, "world"):
            return
        self.held = frozenset()
        for seed in range(MAX_EVENTS // 100):
            if self.ended:
                break
            self.happen(100, seed)
        assert self.ended, f"{self.world.hub.status}: {self.world.slots}"
        assert self.world.hub.outcome is not None
        code, _ = self.world.hub.outcome
        assert all(slot.life is Life.NONE for slot in self.world.slots)
        if not self.stopped and self.world.faults == self.daemon.config.num_faults:
            assert code == 0


TestLargeWorlds = LargeWorld.TestCase
TestLargeWorlds.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_frozen_states_can_be_put_back() -> None:
    """What the whole exploration relies on: a core's state is all that its decisions depend on."""
    daemon = Control(Config(num_ranks=4, from_start=False))
    world = daemon.initial()
    event = ev.Exited(slot_name(2), None, 9, (0,))
    first, second = Core(daemon.core.config), Core(daemon.core.config)
    first.state = compose(world, daemon.config)
    first.handle(ev.Exited(slot_name(1), None, 9, (0,)), 0.0)
    second.state = replace(first.state)
    assert first.handle(event, 0.0) == second.handle(event, 0.0)
    assert first.state == second.state
