"""Worlds of several nodes: what is explored in every run of the tests, and what takes longer.

All begin when a few steps have gone as they should, so that a version that is lost is not simply made again from the
start, and end (but for one) when one more step is over. The first node leads and is not lost; the last one is a spare
where there are more nodes than the ranks need.
"""

from tests.exploration.model import Config, Regime

SEALED = Config(
    num_ranks=2,
    steps=4,
    num_faults=1,
    link_faults=False,
    from_start=False,
    regime=Regime.SEALED,
    private_slots=3,
    domains=("", ""),
    open_ended=True,
    warm=3,
)
LIVE = SEALED._replace(regime=Regime.LIVE, private_slots=2)
SPARE = ("", "", "")
# A node in another failure domain has come, so keepers change although nothing is lost.
MOVING = SEALED._replace(
    steps=3, rank_faults=False, domains=("x", "x"), returns=1, returning="y", begins="joined"
)
BEHIND = SEALED._replace(num_faults=0, begins="behind")
VOTED = SEALED._replace(rank_faults=False, num_faults=0, domains=SPARE, begins="voted")

SMALL = {
    "sealed, a rank or a node": SEALED._replace(domains=SPARE),
    "sealed, two nodes or one twice": SEALED._replace(rank_faults=False, num_faults=2),
    "sealed, keepers that change": MOVING,
    "sealed, one rank behind": BEHIND,
    "live, two nodes": LIVE._replace(rank_faults=False, num_faults=2, domains=SPARE),
    "live, two nodes, two keepers each": LIVE._replace(
        rank_faults=False, num_faults=2, domains=SPARE, replicas=2
    ),
    "live, a node cut off, to the end": LIVE._replace(cuts=True, open_ended=False),
    "live, a node returns": LIVE._replace(returns=1),
    "live, full versions": LIVE._replace(full_every=1, all_die=True, rank_faults=False),
}
LARGE = {
    "sealed, two nodes": SEALED._replace(rank_faults=False, num_faults=2, domains=SPARE),
    "sealed, two faults": SEALED._replace(num_faults=2),
    "sealed, a node cut off": SEALED._replace(cuts=True, domains=SPARE, rank_faults=False, node_faults=False),
    "sealed, a node returns": SEALED._replace(returns=1, rank_faults=False),
    "sealed, two steps": SEALED._replace(steps=5, domains=SPARE),
    "live, two faults": LIVE._replace(num_faults=2),
    "live, two nodes, two spares": LIVE._replace(rank_faults=False, num_faults=2, domains=("",) * 4),
    "live, cut off, and a rank dies": LIVE._replace(num_faults=2, cuts=True, node_faults=False),
    "live, three ranks": LIVE._replace(num_ranks=3, share=2, domains=SPARE),
}
ALIKE = (  # small enough to be explored without the reductions as well
    LIVE,
    SEALED._replace(rank_faults=False),
    BEHIND,
    LIVE._replace(domains=SPARE, steps=3),
)
