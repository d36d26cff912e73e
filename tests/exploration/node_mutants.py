"""Mistakes in the rules of several nodes, each planted in a world that is small enough for it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

from flashrec import phases as ph
from flashrecd.core.nodes import Nodes
from tests.exploration import nodes
from tests.exploration.model import Config, Content
from tests.exploration.mutants import Mutant
from tests.exploration.node_worlds import BEHIND, LIVE, MOVING, SEALED, SPARE, VOTED

TWO_NODES = LIVE._replace(rank_faults=False, num_faults=2, domains=SPARE)
LOST = "no version was found"
OVERWRITTEN = "is overwritten, at or above"


def _is(mistake: str) -> Callable[[Config], Config]:
    return lambda config: config._replace(mistakes=(mistake,))


@contextmanager
def resumes_before_it_is_kept() -> Iterator[None]:
    right = ph._reform

    def hasty(state: ph.RankState) -> ph.Outcome:
        state, actions = right(state)
        return state, tuple(action for action in actions if not isinstance(action, ph.AwaitKept))

    with mock.patch.object(ph, "_reform", hasty):
        yield


def needs_no_promise() -> AbstractContextManager[object]:
    return mock.patch.object(Nodes, "_may_step_elsewhere", return_value="")


@contextmanager
def takes_the_newest() -> Iterator[None]:
    right = nodes.look

    def newest(*args: object, places: tuple[int, ...], version: int, sealed: bool) -> set[Content]:
        above: set[Content] = right(*args, places=(), version=version + 1, sealed=sealed)  # type: ignore[arg-type]
        return above or right(*args, places=places, version=version, sealed=sealed)  # type: ignore[arg-type]

    with mock.patch.object(nodes, "look", newest):
        yield


NODE_MUTANTS = (
    (
        TWO_NODES,
        Mutant(
            "an acknowledgement outlives its node",
            LOST,
            config=_is("a dead node's acknowledgement counts"),
        ),
    ),
    (
        BEHIND,
        Mutant("a keeper accepts after the fence", OVERWRITTEN, config=_is("accepts after the fence")),
    ),
    (BEHIND, Mutant("nothing is settled", OVERWRITTEN, config=_is("no Settle"))),
    (BEHIND, Mutant("a keeper does not wait for Settle", OVERWRITTEN, config=_is(nodes.HASTY))),
    (
        LIVE._replace(rank_faults=False),
        Mutant("a rank votes before its private state is kept", LOST, config=_is("votes without private")),
    ),
    (
        BEHIND._replace(num_faults=1, rank_faults=False),
        Mutant(
            "a replica above the plan is installed",
            "is to be kept elsewhere, and is not there",
            takes_the_newest,
            config=_is("Settle comes late"),
        ),
    ),
    (TWO_NODES, Mutant("new keepers are not waited for", LOST, resumes_before_it_is_kept)),
    (
        VOTED._replace(num_faults=0),
        Mutant(
            "a lost node's late vote counts",
            "two worlds",
            needs_no_promise,
            config=lambda config: config._replace(num_faults=1, cuts=True, node_faults=False),
        ),
    ),
    (
        TWO_NODES._replace(replicas=2),
        Mutant("holdings are taken before the fence", LOST, config=_is("holdings before the fence")),
    ),
    (MOVING, Mutant("old keepers forget before new ones have it", LOST, config=_is("forgets too early"))),
    (
        SEALED._replace(rank_faults=False),
        Mutant("a replica has one slot", OVERWRITTEN, config=_is("one replica slot")),
    ),
)
