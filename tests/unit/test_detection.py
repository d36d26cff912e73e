"""Who is suspected, and who must not be. Time is a number here."""

from flashrecd.core import events as ev
from flashrecd.core.detection import STILL_FACTOR, Detector
from tests.unit.daemon_core import Driven

AFTER_S = 2.0
STILL_S = STILL_FACTOR * AFTER_S + 2


class Watched:
    """Ranks that beat and move as they are told, and a tick every quarter of a second."""

    def __init__(self, *procs: str) -> None:
        self.detector = Detector(AFTER_S)
        self.now = 0.0
        self.waiting = dict.fromkeys(procs, False)
        self.progress = dict.fromkeys(procs, 0)
        self.step = 0
        self.let(0.0)

    def let(
        self, seconds: float, silent: tuple[str, ...] = (), still: tuple[str, ...] = ()
    ) -> list[tuple[str, str]]:
        """All but `silent` beat, all but `still` (and the silent) move; returns who was suspected."""
        suspects: list[tuple[str, str]] = []
        end = self.now + seconds
        while True:
            for proc in self.waiting:
                if proc not in silent:
                    self.detector.heard(proc, self.now)
                    self.progress[proc] += proc not in still
                    self.detector.progressed(proc, self.step, self.progress[proc], self.now)
            suspects += self.detector.suspects(self.waiting, self.now)
            if self.now >= end:
                return suspects
            self.now += 0.25


def test_nobody_is_suspected_while_all_beat_and_move() -> None:
    assert Watched("a", "b").let(60) == []


def test_silence_is_suspicious() -> None:
    ranks = Watched("a", "b")
    assert ranks.let(AFTER_S, silent=("a",)) == []
    suspects = ranks.let(1, silent=("a",))
    assert {proc for proc, _ in suspects} == {"a"}
    assert "no heartbeat" in suspects[0][1]


def test_a_heartbeat_in_time_clears() -> None:
    ranks = Watched("a", "b")
    for _ in range(5):
        assert ranks.let(AFTER_S - 0.5, silent=("a",)) == []
        assert ranks.let(0.5) == []


def test_a_step_that_a_failure_disturbed_teaches_nothing() -> None:
    ranks = Watched("a", "b")
    ranks.detector.disturbed(ranks.now + 1)
    ranks.let(1)
    ranks.let(60)
    ranks.step += 1
    ranks.let(0.5, still=("a",))
    assert {proc for proc, _ in ranks.let(STILL_S, still=("a", "b"))} == {"a"}


def test_the_one_that_is_behind_while_all_wait_for_it_is_suspected() -> None:
    ranks = Watched("a", "b", "c")
    ranks.let(1, still=("a",))
    suspects = ranks.let(STILL_S, still=("a", "b", "c"))
    assert {proc for proc, _ in suspects} == {"a"}
    assert "no progress" in suspects[0][1]


def test_nobody_is_suspected_while_somebody_still_moves() -> None:
    ranks = Watched("a", "b", "c")
    ranks.let(1, still=("a",))
    assert ranks.let(60, still=("a", "b")) == []


def test_when_all_stand_still_alike_nobody_is_suspected_but_it_is_reported_once() -> None:
    ranks = Watched("a", "b")
    assert not ranks.detector.stalled(ranks.waiting, ranks.now)
    assert ranks.let(60, still=("a", "b")) == []
    assert ranks.detector.stalled(ranks.waiting, ranks.now)
    assert not ranks.detector.stalled(ranks.waiting, ranks.now)
    ranks.let(1)
    assert ranks.let(60, still=("a", "b")) == []
    assert ranks.detector.stalled(ranks.waiting, ranks.now)


def test_the_bound_is_learnt_from_the_longest_step() -> None:
    ranks = Watched("a", "b")
    for _ in range(2):
        ranks.let(4)
        ranks.step += 1
    ranks.let(0.5)
    ranks.let(0.5, still=("a",))
    assert ranks.let(5 * 4 - 2, still=("a", "b")) == []
    assert {proc for proc, _ in ranks.let(4, still=("a", "b"))} == {"a"}


def test_a_rank_that_waits_by_its_own_word_is_never_behind() -> None:
    ranks = Watched("a", "b")
    ranks.let(1, still=("a",))
    ranks.waiting["a"] = True
    assert {proc for proc, _ in ranks.let(STILL_S, still=("a", "b"))} == {"b"}


def test_those_that_are_equally_far_behind_one_that_waits_are_suspected_one_at_a_time() -> None:
    ranks = Watched("a", "b", "c")
    ranks.waiting["a"] = True
    first = ranks.let(STILL_S, still=("a", "b", "c"))
    assert len(first) == 1, "killing both at once could destroy the last copy of the state"
    assert ranks.let(AFTER_S / 2, still=("a", "b", "c")) == []


def test_a_watcher_that_stood_still_itself_blames_nobody() -> None:
    ranks = Watched("a", "b")
    ranks.now += 100
    assert ranks.detector.suspects(ranks.waiting, ranks.now) == []
    ranks.now += 0.25
    assert ranks.detector.suspects(ranks.waiting, ranks.now) == []


def test_a_process_that_was_never_heard_of_is_not_silent() -> None:
    detector = Detector(AFTER_S)
    for tick in range(100):
        assert detector.suspects({"a": False}, tick * 0.25) == []


# --- what the core makes of it --------------------------------------------------------------------------------


def test_a_replacement_that_never_gets_ready_is_replaced_in_its_turn() -> None:
    job = Driven(3, suspect_after_s=AFTER_S)
    job.now += 100  # as long as the ranks took to start
    job.running()
    job.die(1, 0)
    for rank in (0, 2):
        job.park(rank, 0)
    stuck = job.proc(1)

    def killed_after(seconds: float) -> list[str]:
        job.now += seconds
        for rank in job.ranks():
            job.tell(ev.Heartbeat(job.proc(rank)))
        return [kill.proc for kill in job.found(ev.Kill, job.tell(ev.Tick()))]

    assert [killed_after(0.5) for _ in range(2 * 490)] == [[]] * 2 * 490
    assert stuck in [proc for _ in range(2 * 20) for proc in killed_after(0.5)]
    assert any("not ready after" in log.reason for log in job.found(ev.Log))


def test_a_suspect_is_killed_once_and_replaced_only_when_it_is_gone() -> None:
    job = Driven(2, suspect_after_s=AFTER_S).running()
    job.tell(ev.Heartbeat(job.proc(0)))
    kills = []
    for _ in range(40):
        job.now += 0.25
        job.tell(ev.Heartbeat(job.proc(1)))
        kills += job.found(ev.Kill, job.tell(ev.Tick()))
    assert [kill.proc for kill in kills] == [job.proc(0)]
    assert kills[0].hard
    assert "no heartbeat" in kills[0].reason
    assert len(job.found(ev.Launch)) == 2
    assert job.only(ev.Launch, job.die(0, 0)).rank == 0


def test_a_stall_of_all_is_inspected() -> None:
    job = Driven(2, suspect_after_s=AFTER_S).running()
    for _ in range(int(STILL_S / 0.25) + 8):
        job.now += 0.25
        for rank in job.ranks():
            job.tell(ev.Heartbeat(job.proc(rank)), ev.TagSeen(job.proc(rank), 3, 17))
        job.tell(ev.Tick())
    assert job.only(ev.Inspect).procs == (job.proc(0), job.proc(1))
    assert not job.found(ev.Kill)
